"""Whether one depth profile reaches nothing that another does not, on any model.

A contributor signs how deep its data may go; a policy that goes deeper must be refused, without a model at hand. So the
answer is on the safe side: True only where it follows from the two profiles alone.
"""

from __future__ import annotations

from lamina.plan.mask import EVERYWHERE, Mask
from lamina.plan.profile import DepthProfile, Kind, exact


def within(one: DepthProfile, other: DepthProfile) -> bool:
    """Whether `one` reaches a part of what `other` reaches, at thresholds no larger."""
    return one == other or (_place(one, other) and _masks(one, other) and _weights(one, other))


def _place(one: DepthProfile, other: DepthProfile) -> bool:
    if other.kind is Kind.ALL:
        return True
    fractions = (Kind.TOP, Kind.BAND)
    if one.kind in fractions and other.kind in fractions:
        (a, b), (low, high) = map(exact, one.bounds), map(exact, other.bounds)
        return low <= a and b <= high
    if one.kind is Kind.BLOCKS and other.kind is Kind.BLOCKS:
        return _not_above(other.bounds[0], one.bounds[0]) and _not_above(one.bounds[1], other.bounds[1])
    if one.kind is Kind.LAYERS and other.kind is Kind.LAYERS:
        return set(one.names) <= set(other.names)
    if one.kind is Kind.ADAPTER and other.kind is Kind.ADAPTER:
        pinned = other.config is None or one.config == other.config
        return one.name == other.name and pinned and (other.scope is None or one.scope == other.scope)
    return False


def _not_above(one: float, other: float) -> bool:
    """Whether block `one` is at most block `other` in a model of any number of blocks that has both."""
    if (one < 0) == (other < 0):
        return one <= other
    return one == 0 or other == -1


def _masks(one: DepthProfile, other: DepthProfile) -> bool:
    if not other.masked:
        return True
    if one.others and not other.others:
        return False
    if not one.masked:
        return False
    for mine, theirs in ((one.heads, other.heads), (one.experts, other.experts)):
        if theirs is not None:
            if mine is None or not _numbers(mine, theirs):
                return False
        elif mine is not None and not other.others:
            return False
    return True


def _numbers(one: Mask, other: Mask) -> bool:
    """Whether every row of `one` is inside a row of `other` that means the same modules, or all."""
    rows = dict(other.rows)
    for pattern, numbers in one.rows:
        allowed = rows.get(pattern, rows.get(EVERYWHERE))
        if allowed is None or not set(numbers) <= set(allowed):
            return False
    return True


def _weights(one: DepthProfile, other: DepthProfile) -> bool:
    mine = dict(one.weights)
    return all(pattern in mine and mine[pattern] <= factor for pattern, factor in other.weights)
