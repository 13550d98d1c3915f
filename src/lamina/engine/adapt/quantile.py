"""Following a quantile: thresholds move by noised counts of the contributions that they did not clip."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamina.engine.adapt.frame import Frame
from lamina.plan.rules import FollowQuantile
from lamina.plan.step import StepPlan
from lamina.plan.step_checks import LEAST, MOST


def factors(
    frame: Frame, rule: FollowQuantile, applied: StepPlan, counts: Sequence[float]
) -> tuple[float, ...]:
    """exp(-rate·(b̃ - target)) of every layer, b̃ = counts/B + ½: what C of every private class is multiplied with.

    A layer whose thresholds would leave what a plan allows keeps those that it has.
    """
    found = [_factor(count / applied.batch + 0.5, rule) for count in counts]
    for layer, factor in enumerate(found):
        moved = [applied.clip[k][layer] * factor for k in frame.private if applied.clip[k][layer] > 0]
        if not all(LEAST <= c <= MOST for c in moved):  # also refuses NaN
            found[layer] = 1.0
    return tuple(found)


def _factor(unclipped: float, rule: FollowQuantile) -> float:
    try:
        return math.exp(-rule.rate * (unclipped - rule.target))
    except OverflowError:
        return math.inf
