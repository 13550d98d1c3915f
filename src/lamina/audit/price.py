"""What a measured step costs, by the accountant that computes rather than bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamina.account import Event, accountant
from lamina.plan.rescale import effective_sigma
from lamina.plan.step import StepPlan


def epsilon_of_sensitivity(plan: StepPlan, k: str | int, sensitivity: float) -> float:
    """ε at the plan's δ if a contribution of class k moves every one of its T steps by `sensitivity`.

    A canary that does so in one step can do so in all of them, and the subsampled Gaussian of multiplier
    1/sensitivity is then exactly what an observer of all steps faces. So no smaller ε is true (up to the
    grid of the PLD, which is exact to about 1e-3), and an ε above the claim refutes the claim.
    """
    row = plan.index(k)
    if plan.classes[row].public or sensitivity == 0:
        return 0.0
    if not math.isfinite(sensitivity):
        return math.inf
    event = Event(sigma=1.0 / sensitivity, q=plan.classes[row].sampling_rate, steps=plan.steps)
    return accountant("pld").epsilon((event,), plan.delta(row))


def epsilon_of_noise(plan: StepPlan, k: str | int, noise: Sequence[float]) -> float:
    """ε of class k if its layers carry this noise instead of the plan's."""
    row = plan.index(k)
    if plan.classes[row].public:
        return 0.0
    sigma = effective_sigma(plan.clip[row], noise)
    return epsilon_of_sensitivity(plan, row, math.inf if sigma == 0 else 1.0 / sigma)
