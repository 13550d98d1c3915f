"""A choice that is being made: how much of the sampled contributions every candidate would keep, until one is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lamina.allocate.choice import Offer, draw, utilities
from lamina.engine.adapt.frame import Array
from lamina.engine.examine import Examined
from lamina.engine.limits import present
from lamina.engine.noise import NoiseSource
from lamina.plan.rules import Choose
from lamina.plan.step import StepPlan

CHOICE = (1 << 62) + 1  # its place in the noise stream of the step that it precedes
_DIGITS = 9  # of six bits each: 54 bits


class OpenChoice:
    """Σ_i s_i(a) of every candidate, over the parts of a batch; the norms themselves are never kept.

    What it holds is secret until `drawn`: one name, drawn with p(a) ∝ exp(ε·u(a)), is all that leaves.
    """

    def __init__(self, plan: StepPlan, offers: Sequence[Offer], sizes: Sequence[int] | None = None) -> None:
        rule = plan.rule(Choose)
        assert rule is not None
        self.plan, self.rule, self.offers = plan, rule, offers
        self.sizes = tuple(layer.size for layer in plan.layers) if sizes is None else tuple(sizes)
        self._kept = np.zeros(len(self.offers))

    def add(self, part: Examined, norms: Tensor) -> None:
        """The contributions of a part, with their norms (P, L). A slot of weight 0 is nobody."""
        here = present(part)
        self._kept += self._utilities(norms[here], part.classes[here], 0.0)

    def drawn(self, noise: NoiseSource, step: int) -> Offer:
        nobody = torch.zeros(0, len(self.sizes), dtype=torch.float64)
        price = self._utilities(nobody, torch.zeros(0, dtype=torch.long), self.rule.price)
        return self.offers[draw(self._kept + price, self.rule.epsilon, uniform(noise, step))]

    def _utilities(self, norms: Tensor, classes: Tensor, price: float) -> Array:
        form = self.plan.clipping
        return utilities(
            self.offers, norms.numpy(), classes.numpy(), form=form, sizes=self.sizes, price=price
        )


def uniform(noise: NoiseSource, step: int) -> float:
    """53 uniform bits in [0, 1) from the noise source, also where it rounds to its grid of 2^-8.

    Six bits of each normal: round(256·z) mod 64 is uniform to within 2·exp(-2π²·(256/64)²) < e^-300, the size of the
    first harmonic of a normal that is wrapped around a quarter of its standard deviation.
    """
    z = torch.empty(_DIGITS, dtype=torch.float64)
    noise.fill_(z, 1.0, step=step, tensor=CHOICE)
    word = 0
    for digit in torch.remainder(torch.round(z * 256.0), 64.0).tolist():
        word = 64 * word + int(digit)
    return (word >> (6 * _DIGITS - 53)) / 2.0**53
