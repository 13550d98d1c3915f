"""The five autoencoders of the LSAB paper for windows of a signal: stacked, convolutional, residual, transformer, VAE.

All take (N, channels, samples) and go through a code of `latent` numbers. What they give:

    without classes    the reconstruction, (N, channels, samples)
    with classes       (x - reconstruction, logits), as `SignalLoss` takes it
    the VAE            (x - reconstruction, KL divergence of each example) and, with classes, the logits

`depth` counts layers with weights from the signal to the code and back (of the transformer: its blocks), half of them
on each way: even, from 4 to 20. Dropout follows every activation. Where the paper has BatchNorm there is GroupNorm:
BatchNorm's mean and variance are taken over the batch, so that every contribution changes the gradient of every other
one, and clipping bounds nobody (docs/signals.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.signals.autoencoders import Autoencoder, TransformerBlock, sinusoidal_positions

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
GROUPS = 8
HALVINGS = 4  # at most: 256 samples become 16
LOG_VARIANCE = 4.0  # the VAE's log-variances are clamped to ±4, and its noise to ±3: both stay bounded,
NOISE = 3.0  # so that the sensitivity of the layers behind them has a bound


def _check(samples: int, depth: int, activation: str, dropout: float, halvings: int = 0) -> int:
    """Half of the depth, if the settings can work."""
    if depth % 2 or not 4 <= depth <= 20:
        raise PlanError("models.depth-not-valid", f"depth is {depth}, must be even, 4 to 20", "for example depth=8")
    if activation not in ACTIVATIONS:
        problem = f"activation {activation!r} is not known"
        raise PlanError("models.activation-not-known", problem, f"choose from {', '.join(ACTIVATIONS)}")
    if not 0 <= dropout < 1:
        raise PlanError("models.dropout-not-valid", f"dropout is {dropout}, must be in [0, 1)", "for example 0.1")
    if samples < 2**halvings or samples % 2**halvings:
        problem = f"samples is {samples}, must be a multiple of {2**halvings}: it is halved {halvings} times"
        raise PlanError("models.samples-not-divisible", problem, "for example samples=256")
    return depth // 2


class SignalAutoencoder(Autoencoder):
    """The base of the five models: (N, channels, samples) -> (N, latent) and back; with classes a classifier of the code."""

    def __init__(self, latent: int, classes: int, **parts: nn.Module) -> None:
        """`parts` in the order of their depth; the classifier is the top, and normalises without parameters."""
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.classifier = None
        if classes:
            norm = nn.LayerNorm(latent, elementwise_affine=False)
            self.classifier = nn.Sequential(norm, nn.Linear(latent, classes))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        code = self.encode(x)
        y = self.decode(code)
        return y if self.classifier is None else (x - y, self.classifier(code))


@dataclass(frozen=True, kw_only=True)
class SignalLoss:
    """One loss per example: reconstruction · mean squared error + classification · entropy + divergence · KL.

    Labels are class numbers (cross entropy), or one 0 or 1 per class in floating point (mean binary cross entropy).
    """

    reconstruction: float = 1.0
    classification: float = 1.0
    divergence: float = 1e-3

    def __call__(self, output: Tensor | tuple[Tensor, ...], y: Tensor) -> Tensor:
        if isinstance(output, Tensor):
            return self.reconstruction * (y - output).square().flatten(1).mean(1)
        losses = self.reconstruction * output[0].square().flatten(1).mean(1)
        for part in output[1:]:
            if part.dim() == 1:
                losses = losses + self.divergence * part
            elif y.is_floating_point():
                entropy = F.binary_cross_entropy_with_logits(part, y, reduction="none").mean(1)
                losses = losses + self.classification * entropy
            else:
                losses = losses + self.classification * F.cross_entropy(part, y, reduction="none")
        return losses

    def random_labels(self, output: Tensor | tuple[Tensor, ...], n: int, generator: torch.Generator) -> Tensor | None:
        """Return a random 0 or 1 for each class that the model scores; None if it only reconstructs its input."""
        scores = [part for part in output[1:] if part.dim() == 2] if isinstance(output, tuple) else []
        return torch.randint(2, (n, scores[0].shape[1]), generator=generator).float() if scores else None


def _dense(sizes: list[int], activation: str, dropout: float, *, norm: bool) -> list[nn.Module]:
    """Linear, norm, activation, dropout, …, Linear: nothing after the last."""
    layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1])]
    for into, out in pairwise(sizes[1:]):
        norms = [nn.GroupNorm(into // GROUPS, into)] if norm else []  # over eight numbers each
        layers += [*norms, ACTIVATIONS[activation](), nn.Dropout(dropout), nn.Linear(into, out)]
    return layers


def _falling(width: int, latent: int, steps: int) -> list[int]:
    """`steps` widths in equal ratios from `width` down to, but without, `latent`; multiples of the norm's groups."""
    ratios = np.geomspace(width, latent, steps + 1)[:-1]
    return [max(GROUPS, GROUPS * round(size / GROUPS)) for size in ratios]


class StackedAE(SignalAutoencoder):
    """Linear layers whose widths fall from `width` to `latent`, and back."""

    def __init__(
        self, channels: int = 12, samples: int = 256, *, depth: int = 8, latent: int = 32, width: int = 256,
        activation: str = "relu", dropout: float = 0.1, classes: int = 0,
    ) -> None:  # fmt: skip
        half = _check(samples, depth, activation, dropout)
        sizes = [channels * samples, *_falling(width, latent, half - 1), latent]
        down = _dense(sizes, activation, dropout, norm=True)
        up = _dense(sizes[::-1], activation, dropout, norm=True)
        encoder, decoder = nn.Sequential(nn.Flatten(), *down), nn.Sequential(*up, nn.Unflatten(1, (channels, samples)))
        super().__init__(latent, classes, encoder=encoder, decoder=decoder)


def _doubling(into: int, out: int, kernel: int, stride: int) -> nn.Module:
    """What undoes a convolution of that stride, in length."""
    padding = kernel // 2
    return nn.ConvTranspose1d(into, out, kernel, stride=stride, padding=padding, output_padding=stride - 1)


class ConvAE(SignalAutoencoder):
    """Convolutions, of which the first (at most four) halve the length, then one Linear to the code; and back."""

    def __init__(
        self, channels: int = 12, samples: int = 256, *, depth: int = 10, latent: int = 32, width: int = 32,
        kernel: int = 7, activation: str = "relu", dropout: float = 0.1, classes: int = 0,
    ) -> None:  # fmt: skip
        halvings = min(HALVINGS, depth // 2 - 1)
        convolutions = _check(samples, depth, activation, dropout, halvings) - 1
        strides = [2] * halvings + [1] * (convolutions - halvings)
        length = samples // 2**halvings

        def after() -> list[nn.Module]:
            return [nn.GroupNorm(GROUPS, width), ACTIVATIONS[activation](), nn.Dropout(dropout)]

        down: list[nn.Module] = []
        up: list[nn.Module] = [nn.Linear(latent, width * length), nn.Unflatten(1, (width, length)), *after()]
        for i, stride in enumerate(strides):
            into = width if i else channels
            down += [nn.Conv1d(into, width, kernel, stride=stride, padding=kernel // 2), *after()]
        for i, stride in enumerate(reversed(strides)):
            last = i == convolutions - 1
            out, kept = (channels, []) if last else (width, after())
            up += [_doubling(width, out, kernel, stride), *kept]
        encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(width * length, latent))
        super().__init__(latent, classes, encoder=encoder, decoder=nn.Sequential(*up))


class ResBlock(nn.Module):
    """y = resize(x) + conv(act(norm(conv(act(norm(resize(x))))))): two layers; `resize` halves, doubles or keeps."""

    def __init__(self, width: int, kernel: int, activation: str, dropout: float, resize: nn.Module) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(2):
            conv = nn.Conv1d(width, width, kernel, padding=kernel // 2)
            parts += [nn.GroupNorm(GROUPS, width), ACTIVATIONS[activation](), nn.Dropout(dropout), conv]
        self.resize, self.branch = resize, nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.resize(x)
        y: Tensor = h + self.branch(h)
        return y


class ResAE(SignalAutoencoder):
    """A convolution, residual blocks of two, a Linear to the code; and back. An odd layer is one more convolution."""

    def __init__(
        self, channels: int = 12, samples: int = 256, *, depth: int = 12, latent: int = 32, width: int = 32,
        kernel: int = 5, activation: str = "gelu", dropout: float = 0.1, classes: int = 0,
    ) -> None:  # fmt: skip
        blocks, odd = divmod(depth // 2 - 2, 2)
        halvings = min(HALVINGS, blocks)
        _check(samples, depth, activation, dropout, halvings)
        length = samples // 2**halvings

        def after() -> list[nn.Module]:
            return [nn.GroupNorm(GROUPS, width), ACTIVATIONS[activation](), nn.Dropout(dropout)]

        def conv(into: int, out: int) -> nn.Module:
            return nn.Conv1d(into, out, kernel, padding=kernel // 2)

        def block(i: int, resize: nn.Module) -> nn.Module:
            return ResBlock(width, kernel, activation, dropout, resize if i < halvings else nn.Identity())

        down = [block(i, nn.AvgPool1d(2)) for i in range(blocks)]
        up = [block(i, nn.Upsample(scale_factor=2)) for i in reversed(range(blocks))]
        flat, spread = nn.Linear(width * length, latent), nn.Linear(latent, width * length)
        down = [conv(channels, width), *(conv(width, width) for _ in range(odd)), *down, *after(), nn.Flatten(), flat]
        up = [spread, nn.Unflatten(1, (width, length)), *up, *(conv(width, width) for _ in range(odd))]
        decoder = nn.Sequential(*up, *after(), conv(width, channels))
        super().__init__(latent, classes, encoder=nn.Sequential(*down), decoder=decoder)


class TransAE(SignalAutoencoder):
    """`depth` transformer blocks over patches of the signal, the code between their halves."""

    positions: Tensor
    embed: nn.Module
    head: nn.Module

    def __init__(
        self, channels: int = 12, samples: int = 256, *, depth: int = 8, latent: int = 32, width: int = 64,
        heads: int = 4, patch: int = 16, activation: str = "silu", dropout: float = 0.1, classes: int = 0,
    ) -> None:  # fmt: skip
        half = _check(samples, depth, activation, dropout)
        if samples % patch or width % heads:
            problem = f"samples={samples} must be a multiple of patch={patch}, and width={width} of heads={heads}"
            remedy = "for example samples=256, patch=16, width=64, heads=4"
            raise PlanError("models.patches-do-not-fit", problem, remedy)
        tokens, made = samples // patch, ACTIVATIONS[activation]
        blocks = [TransformerBlock(width, heads, 2 * width, act=made(), dropout=dropout) for _ in range(depth)]
        encoder = nn.Sequential(*blocks[:half], nn.Flatten(), nn.Linear(tokens * width, latent))
        decoder = nn.Sequential(nn.Linear(latent, tokens * width), nn.Unflatten(1, (tokens, width)), *blocks[half:])
        embed, head = nn.Linear(channels * patch, width), nn.Linear(width, channels * patch)
        super().__init__(latent, classes, embed=embed, encoder=encoder, decoder=decoder, head=head)
        self.patch = patch
        self.register_buffer("positions", sinusoidal_positions(tokens, width), persistent=False)

    def encode(self, x: Tensor) -> Tensor:
        patches = x.unflatten(2, (-1, self.patch)).transpose(1, 2).flatten(2)  # (N, tokens, channels · patch)
        code: Tensor = self.encoder(self.embed(patches) + self.positions)
        return code

    def decode(self, code: Tensor) -> Tensor:
        patches = self.head(self.decoder(code))
        y: Tensor = patches.unflatten(2, (-1, self.patch)).transpose(1, 2).flatten(2)
        return y


class VAE(SignalAutoencoder):
    """Linear layers; the code is drawn from N(mean, exp(log-variance)), both of which are functions of the example.

    The draw is mean + exp(log-variance / 2) · noise, one noise per example and number, from torch's generator as dropout
    has it. In evaluation mode the code is the mean.
    """

    mean: nn.Module
    log_variance: nn.Module

    def __init__(
        self, channels: int = 12, samples: int = 256, *, depth: int = 6, latent: int = 32, width: int = 256,
        activation: str = "gelu", dropout: float = 0.1, classes: int = 0,
    ) -> None:  # fmt: skip
        half = _check(samples, depth, activation, dropout)
        sizes = [channels * samples, *_falling(width, latent, half - 1)]
        last = [ACTIVATIONS[activation](), nn.Dropout(dropout)]
        encoder = nn.Sequential(nn.Flatten(), *_dense(sizes, activation, dropout, norm=False), *last)
        up = _dense([latent, *sizes[::-1]], activation, dropout, norm=False)
        mean, log_variance = nn.Linear(sizes[-1], latent), nn.Linear(sizes[-1], latent)
        decoder = nn.Sequential(*up, nn.Unflatten(1, (channels, samples)))
        super().__init__(latent, classes, encoder=encoder, mean=mean, log_variance=log_variance, decoder=decoder)

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.mean(self.encoder(x))
        return code

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h).clamp(-LOG_VARIANCE, LOG_VARIANCE)
        noise = torch.randn_like(mean).clamp(-NOISE, NOISE) if self.training else 0.0
        code = mean + torch.exp(0.5 * log_variance) * noise
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1.0 - log_variance).sum(1)
        parts = (x - self.decode(code), divergence)
        return parts if self.classifier is None else (*parts, self.classifier(mean))
