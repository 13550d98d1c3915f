"""A residual Conv1d autoencoder for windows of a multi-lead physiological signal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lamina.errors import PlanError


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


class ResidualAutoencoder(nn.Module):
    """(N, leads, samples) -> (N, leads, samples).

    Each entry of `widths` halves the length on the way in and doubles it on the way out; the innermost
    activation, `widths[-1]` channels of length samples / 2^len(widths), is the code.
    """

    def __init__(
        self,
        leads: int = 12,
        widths: Sequence[int] = (32, 64, 64),
        *,
        kernel: int = 5,
        groups: int = 8,
    ) -> None:
        super().__init__()
        if not widths or any(width % groups for width in widths):
            raise PlanError(
                "models.widths-not-multiples",
                f"widths {tuple(widths)} are not all multiples of groups {groups}",
                "choose widths that GroupNorm can divide, for example (32, 64, 64) with groups=8",
            )
        if kernel % 2 == 0:
            raise PlanError(
                "models.kernel-even-odd",
                f"kernel {kernel} is even, must be odd to keep the length",
                f"use kernel={kernel + 1}",
            )
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

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.encoder(x)
        return code

    def decode(self, code: Tensor) -> Tensor:
        y: Tensor = self.head(self.decoder(code))
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))
