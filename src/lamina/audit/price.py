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
    grid of the PLD, which is exact to about 1e-3), and an ε above the claim refutes the claim. A plan that
    credits nothing to sampling is held to its word: the exact Gaussian, with the canary in every step (of raw noise,
    in as many as it may take part in).
    """
    row = plan.index(k)
    if plan.classes[row].public or sensitivity == 0:
        return 0.0
    if not math.isfinite(sensitivity):
        return math.inf
    amplified = accountant(plan.accountant).amplified and not plan.injection.raw
    q = plan.classes[row].sampling_rate if amplified else 1.0
    steps = plan.injection.events(0, plan.steps) if plan.injection.raw else plan.steps
    event = Event(sigma=1.0 / sensitivity, q=q, steps=steps)
    return accountant("pld" if amplified else "gaussian").epsilon((event,), plan.delta(row))


def epsilon_of_noise(plan: StepPlan, k: str | int, noise: Sequence[float], counts: float = 1.0) -> float:
    """ε of class k if its layers carry this noise instead of the plan's, and its counts so many times theirs."""
    row = plan.index(k)
    if plan.classes[row].public:
        return 0.0
    sigma = effective_sigma(plan.clip[row], noise, plan.bits(row) / counts)
    return epsilon_of_sensitivity(plan, row, math.inf if sigma == 0 else 1.0 / sigma)


def claim(plan: StepPlan, k: str | int, scale: float = 1.0) -> float:
    """The ε that is claimed for class k: the plan's own, or what the document says that a printed plan reproduces."""
    return plan.claimed[plan.index(k)] if plan.claimed else plan.epsilon(k, scale=scale)
