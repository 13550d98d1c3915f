"""Following the energy of the noised gradient sum: what a release already shows, used for the shares of the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lamina.engine.adapt.frame import Array, Frame
from lamina.engine.norms import row_norm_sq
from lamina.plan.rules import FollowEnergy
from lamina.plan.step import StepPlan
from lamina.sensitivity.energy import EnergyEstimate


def released_squares(plan: StepPlan, released: Mapping[str, Tensor]) -> Array:
    """‖Y_l‖² of every layer, Y = B × what was released: the noised sum itself. 0 for what is not trained."""
    found = [
        sum(
            float(row_norm_sq(released[name].reshape(1, -1))) for name in layer.parameters if name in released
        )
        for layer in plan.layers
    ]
    return np.asarray(found) * plan.batch**2


class Energy:
    """The running estimate of every noised layer. Sees nothing but noised releases."""

    def __init__(self, frame: Frame, rule: FollowEnergy) -> None:
        self.frame, self.rule = frame, rule
        self.estimate = EnergyEstimate.start(len(frame.noised), decay=rule.decay)
        self.measured: tuple[bool, ...] = (False,) * len(frame.noised)

    def due(self, step: int) -> bool:
        return step % self.rule.every == 0 and len(self.frame.noised) > 0

    def observe(self, squares: Array, applied: StepPlan) -> None:
        """One more release, and the S that it was noised with."""
        layers = self.frame.noised
        noise = np.asarray(applied.noise)[layers]
        self.estimate = self.estimate.observed(squares[layers], noise=noise, sizes=self.frame.sizes)

    def shares(self, base: Array) -> Array:
        """The measured shares, shrunk to `base` where the signal is faint."""
        shares, self.measured = self.estimate.shares(base, self.frame.sizes, self.rule.least)
        return np.asarray(shares)

    def to_state(self) -> dict[str, Any]:
        return self.estimate.to_state()

    def load_state(self, state: Mapping[str, Any], base: Array) -> None:
        self.estimate = EnergyEstimate.from_state(state)
        self.shares(base)
