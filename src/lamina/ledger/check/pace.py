"""Pace: how much of a budget that its noise follows an attempt has used, by the noise that its epoch says was applied.

At the plan's one Rényi order prices add: n steps at f times the declared sigma cost as much as
n·RDP(f·sigma)/RDP(sigma) declared ones. A run is charged its budget once, as a whole; what it then may not do is to use
more of it than there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamina.account.renyi import divergence
from lamina.ledger.spend import followed_order
from lamina.plan.rescale import effective_sigma
from lamina.plan.rules import FollowBudget, FollowEnergy
from lamina.plan.step import Clipping, StepPlan


def used(plan: StepPlan, cls: str, scale: float, variance: Sequence[float], steps: int) -> float:
    """How many declared steps these steps of a class cost as much as, at least."""
    order, schedule = followed_order(plan), plan.schedule(cls, scale)
    if order is None or not schedule:
        return 0.0
    event = schedule[0]
    price = divergence(event.q, event.sigma * _factor(plan, cls, variance), order)
    return steps * price / divergence(event.q, event.sigma, order)


def _factor(plan: StepPlan, cls: str, variance: Sequence[float]) -> float:
    """How often the declared sigma was applied. Where thresholds move too, the most that its rule allows."""
    budget = plan.rule(FollowBudget)
    assert budget is not None
    known = all(isinstance(rule, FollowBudget | FollowEnergy) for rule in plan.rules)
    if not known or plan.clipping is not Clipping.BOX:
        return budget.most
    k = plan.index(cls)
    return effective_sigma(plan.clip[k], [math.sqrt(v) for v in variance]) / plan.sigma(k)
