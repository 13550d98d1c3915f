"""Autoencoders for physiological signals: fully connected, residual Conv1d (with a classifier), transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.errors import PlanError


class Autoencoder(nn.Module):
    """Decodes what it encodes."""

    encoder: nn.Module
    decoder: nn.Module

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.encoder(x)
        return code

    def decode(self, code: Tensor) -> Tensor:
        y: Tensor = self.decoder(code)
        return y

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.decode(self.encode(x))


class MLPAutoencoder(Autoencoder):
    """(N, sizes[0]) -> (N, sizes[0]) through sizes[1:], whose last entry is the code, and back."""

    def __init__(self, sizes: Sequence[int] = (864, 512, 256, 128, 64, 32)) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*_linear_layers(sizes))
        self.decoder = nn.Sequential(*_linear_layers(tuple(reversed(sizes))))


def _linear_layers(sizes: Sequence[int]) -> list[nn.Module]:
    """Linear, ReLU, Linear, …, Linear: no activation after the last."""
    layers: list[nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return layers[:-1]


class ResidualBlock(nn.Module):
    """y = x + conv(relu(norm(conv(relu(norm(x)))))), same length and width.

    GroupNorm instead of BatchNorm: its statistics belong to one example, so contributions stay independent.
    """

    def __init__(self, width: int, *, kernel: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv1 = nn.Conv1d(width, width, kernel, padding=kernel // 2)
        self.norm2 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv1d(width, width, kernel, padding=kernel // 2)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv1(self.act(self.norm1(x)))
        h = self.conv2(self.act(self.norm2(h)))
        return x + h


class ResidualAutoencoder(Autoencoder):
    """(N, leads, samples) -> (N, leads, samples).

    Each entry of `widths` halves the length on the way in and doubles it on the way out; the innermost
    activation, `widths[-1]` channels of length samples / 2^len(widths), is the code.
    """

    def __init__(
        self, leads: int = 12, widths: Sequence[int] = (32, 64, 64), *, kernel: int = 5, groups: int = 8
    ) -> None:
        super().__init__()
        if not widths or any(width % groups for width in widths):
            problem = f"widths {tuple(widths)} are not all multiples of groups {groups}"
            raise PlanError("models.widths-not-multiples", problem, "for example widths=(32, 64, 64), groups=8")
        if kernel % 2 == 0:
            problem = f"kernel is {kernel}, must be odd to keep the length"
            raise PlanError("models.kernel-even", problem, f"use kernel={kernel + 1}")
        down: list[nn.Module] = []
        width = leads
        for wider in widths:
            down += [nn.Conv1d(width, wider, 4, stride=2, padding=1)]
            down += [ResidualBlock(wider, kernel=kernel, groups=groups)]
            width = wider
        up: list[nn.Module] = []
        for narrower in (*reversed(widths[:-1]), widths[0]):
            up += [ResidualBlock(width, kernel=kernel, groups=groups)]
            up += [nn.ConvTranspose1d(width, narrower, 4, stride=2, padding=1)]
            width = narrower
        self.encoder = nn.Sequential(*down)
        self.decoder = nn.Sequential(*up)
        self.head = nn.Conv1d(width, leads, kernel, padding=kernel // 2)

    def decode(self, code: Tensor) -> Tensor:
        y: Tensor = self.head(self.decoder(code))
        return y


class ResidualClassifier(nn.Module):
    """(N, leads, samples) -> (residual, logits): x - reconstruction, as large as x, and (N, classes).

    The residual instead of the reconstruction: with it a loss needs no second copy of x.

    The classifier reads the code. It is registered last, so that with two widths the top quarter of the depth is the
    classifier and nothing else: a class of contributions that may reach only the top decides how a code is read, not
    what it holds. It is small, because the noise on a layer grows with the root of its size: each position of the
    code is squeezed into `squeeze` channels, which `hidden` units read after normalisation. That has no parameters,
    and keeps the gradients of different contributions of one size.
    """

    def __init__(
        self, leads: int = 12, samples: int = 96, classes: int = 4, *, widths: Sequence[int] = (16, 32),
        kernel: int = 5, groups: int = 4, squeeze: int = 4, hidden: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.autoencoder = ResidualAutoencoder(leads, widths, kernel=kernel, groups=groups)
        halved = 2 ** len(widths)
        if samples < halved or samples % halved:
            problem = f"samples is {samples}, must be a multiple of {halved}: each of {len(widths)} widths halves it"
            remedy = f"for example samples={max(1, samples // halved) * halved}"
            raise PlanError("models.samples-not-divisible", problem, remedy)
        features = squeeze * (samples // halved)
        self.classifier = nn.Sequential(
            nn.Conv1d(widths[-1], squeeze, 1),
            nn.Flatten(),
            nn.LayerNorm(features, elementwise_affine=False),
            nn.Linear(features, hidden),
            nn.Tanh(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.autoencoder.encode(x)
        logits: Tensor = self.classifier(code)
        return x - self.autoencoder.decode(code), logits


@dataclass(frozen=True, kw_only=True)
class ClassifierLoss:
    """loss[n] = cross entropy(logits[n], label[n]) + weight · mean(residual[n]²): one per example, not one in all."""

    weight: float = 3.0

    def __call__(self, output: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
        residual, logits = output
        entropy = F.cross_entropy(logits, label, reduction="none")
        return entropy + self.weight * residual.square().flatten(1).mean(1)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward. The projections are plain Linears, one layer each."""

    def __init__(
        self, width: int, heads: int, hidden: int, *, act: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.act, self.dropout = heads, act or nn.GELU(), nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (
            project(x).view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        h: Tensor = self.down(self.dropout(self.act(self.up(self.norm2(x)))))
        return x + h


class TransformerAutoencoder(nn.Module):
    """(N, tokens, features) -> (N, tokens, features).

    Half of the layers encode; the code is the `code`-wide projection of each token between the halves. Positions
    are a fixed sinusoid: a learned position table used without the batch axis would arrive already summed.
    """

    positions: Tensor

    def __init__(
        self, features: int, tokens: int = 64, *, width: int = 128, layers: int = 8, heads: int = 4, hidden: int = 512,
        code: int = 32,
    ) -> None:  # fmt: skip
        super().__init__()
        if layers % 2 or width % heads:
            problem = f"layers={layers} must be even and width={width} a multiple of heads={heads}"
            raise PlanError("models.layers-odd", problem, "for example layers=8, width=128, heads=4")
        self.embed = nn.Linear(features, width)
        self.encoder = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers // 2))
        self.squeeze = nn.Linear(width, code)
        self.expand = nn.Linear(code, width)
        self.decoder = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers // 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, features)
        self.register_buffer("positions", sinusoidal_positions(tokens, width), persistent=False)

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x) + self.positions
        for block in self.encoder:
            h = block(h)
        code: Tensor = self.squeeze(h)
        return code

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.expand(self.encode(x)) + self.positions
        for block in self.decoder:
            h = block(h)
        y: Tensor = self.head(self.norm(h))
        return y


def sinusoidal_positions(tokens: int, width: int) -> Tensor:
    """(tokens, width): sin and cos of t / 10000^(2i/width) (Vaswani et al. 2017, section 3.5)."""
    t = torch.arange(tokens, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    table = torch.zeros(tokens, width)
    table[:, 0::2] = torch.sin(t * rate)
    table[:, 1::2] = torch.cos(t * rate)[:, : width // 2]
    return table
