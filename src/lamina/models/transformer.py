"""A transformer autoencoder: a window cut into tokens, attended over, put together again."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.errors import PlanError


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward. The projections are plain Linears, one layer each."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
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
        h: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + h


class TransformerAutoencoder(nn.Module):
    """(N, tokens, features) -> (N, tokens, features).

    Half of the layers encode; the code is the `code`-wide projection of each token between the halves. Positions
    are a fixed sinusoid: a learned position table used without the batch axis would arrive already summed.
    """

    positions: Tensor

    def __init__(
        self,
        features: int,
        tokens: int = 64,
        *,
        width: int = 128,
        layers: int = 8,
        heads: int = 4,
        hidden: int = 512,
        code: int = 32,
    ) -> None:
        super().__init__()
        if layers % 2 or width % heads:
            raise PlanError(
                "models.layers-even-width",
                f"layers={layers} must be even and width={width} a multiple of heads={heads}",
                "for example layers=8, width=128, heads=4",
            )
        self.embed = nn.Linear(features, width)
        self.encoder = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers // 2))
        self.squeeze = nn.Linear(width, code)
        self.expand = nn.Linear(code, width)
        self.decoder = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers // 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, features)
        self.register_buffer("positions", sinusoid(tokens, width), persistent=False)

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


def sinusoid(tokens: int, width: int) -> Tensor:
    """(tokens, width): sin and cos of t / 10000^(2i/width) (Vaswani et al. 2017, section 3.5)."""
    t = torch.arange(tokens, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    table = torch.zeros(tokens, width)
    table[:, 0::2] = torch.sin(t * rate)
    table[:, 1::2] = torch.cos(t * rate)[:, : width // 2]
    return table
