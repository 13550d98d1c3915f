"""A residual autoencoder that also classifies: one code, two uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.models.residual import ResidualAutoencoder


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
        self,
        leads: int = 12,
        samples: int = 96,
        classes: int = 4,
        *,
        widths: Sequence[int] = (16, 32),
        kernel: int = 5,
        groups: int = 4,
        squeeze: int = 4,
        hidden: int = 16,
    ) -> None:
        super().__init__()
        self.autoencoder = ResidualAutoencoder(leads, widths, kernel=kernel, groups=groups)
        halved = 2 ** len(widths)
        if samples < halved or samples % halved:
            raise PlanError(
                "models.samples-not-halved",
                f"samples {samples} cannot be halved {len(widths)} times, once per width",
                f"cut windows to a multiple of {halved}, for example samples={max(1, samples // halved) * halved}",
            )
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
