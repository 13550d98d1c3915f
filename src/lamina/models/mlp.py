"""Fully connected autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLPAutoencoder(nn.Module):
    """(N, sizes[0]) -> (N, sizes[0]) through sizes[1:], whose last entry is the code, and back."""

    def __init__(self, sizes: Sequence[int] = (864, 512, 256, 128, 64, 32)) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*_chain(sizes))
        self.decoder = nn.Sequential(*_chain(tuple(reversed(sizes))))

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.encoder(x)
        return code

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.encode(x))
        return y


def _chain(sizes: Sequence[int]) -> list[nn.Module]:
    """Linear, ReLU, Linear, …, Linear: no activation after the last."""
    layers: list[nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return layers[:-1]
