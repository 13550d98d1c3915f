"""Following the budget: how much noise the next steps should have, for a signal-to-noise ratio that stays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lamina.engine.adapt.frame import Frame
from lamina.plan.rules import FollowBudget
from lamina.sensitivity.energy import EnergyEstimate

_LEVELS = 32  # between the least factor and the most: few distinct sigmas, so that a filter prices each once


class Pace:
    """The factor on sigma that keeps the signal-to-noise ratio of the first measured window.

        f = √(E/E₀),  E = Σ_l E_l/S_l²      S as declared, E₀ the value when the first window was full

    A window is 1/(1-decay) observations. Where E cannot be told from noise the factor is 1. Steps take less noise
    (and more budget) as the gradient fades, and the filter, not this, decides how long that goes on.
    """

    def __init__(self, frame: Frame, rule: FollowBudget, decay: float) -> None:
        self.rule = rule
        self.window = math.ceil(1.0 / (1.0 - decay))
        self.weight = 1.0 / np.asarray(frame.plan.noise)[frame.noised] ** 2
        self.seen = 0
        self.reference = 0.0  # 0: not measured yet

    def observe(self, estimate: EnergyEstimate) -> float:
        """The factor that the next steps should have, after one more observation."""
        self.seen += 1
        with np.errstate(all="ignore"):
            energy = float(np.sum(estimate.energies() * self.weight))
            deviation = float(np.linalg.norm(estimate.deviations() * self.weight))
        if not (0 < energy < math.inf and energy >= deviation):
            return 1.0
        if self.reference == 0.0:
            if self.seen < self.window:
                return 1.0
            self.reference = energy
        return self.clamped(math.sqrt(energy / self.reference))

    def clamped(self, factor: float) -> float:
        """One of the levels, rounded up, within what the rule allows."""
        least, most = self.rule.least, self.rule.most
        if not least < factor < most:
            return least if factor <= least else most
        return min(
            most, least + math.ceil((factor - least) / (most - least) * _LEVELS) * (most - least) / _LEVELS
        )

    def to_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "reference": self.reference}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen, self.reference = int(state["seen"]), float(state["reference"])
