"""Pace: how much of a budget that its noise follows a run has used, by the noise that its epochs say was applied.

At the plan's one Rényi order prices add: n steps at another sigma cost as much as n·RDP(factor·sigma)/RDP(sigma)
declared ones. A run is charged its budget once, as a whole; what it then may not do is to use more of it than there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamina.account.renyi import divergence
from lamina.ledger.spend import followed_order
from lamina.plan.rescale import effective_sigma
from lamina.plan.rules import FollowBudget, FollowEnergy
from lamina.plan.step import Clipping, StepPlan


def used(plan: StepPlan, variance: Sequence[float], steps: int) -> dict[str, float]:
    """By class: how many declared steps these steps cost as much as. Empty where that cannot be told from the noise.

    Where thresholds move too, or are chosen, S² alone does not say what sigma was.
    """
    order = followed_order(plan)
    known = all(isinstance(rule, FollowBudget | FollowEnergy) for rule in plan.rules)
    if order is None or not known or plan.clipping is not Clipping.BOX:
        return {}
    noise, found = [math.sqrt(v) for v in variance], {}
    for k, entry in enumerate(plan.classes):
        if entry.public or not (schedule := plan.schedule(k)):
            continue
        declared, applied = plan.sigma(k), effective_sigma(plan.clip[k], noise)
        event = schedule[0]
        price = divergence(event.q, event.sigma * applied / declared, order)
        found[entry.name] = steps * price / divergence(event.q, event.sigma, order)
    return found
