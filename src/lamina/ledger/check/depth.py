"""Depth: outside its profile a class has no threshold, in the layers that the plan itself lists.

A plan names its layers, their depth and their tensors, and not the model. So what is asked is what a model must have
for the plan to keep to the profile:

place     TOP, BAND, BLOCKS: a layer whose first block is b, of n, has depth b/(n-1). How many blocks there are is not
          in the plan, since some may be frozen: some n must fit the depth of every layer, and let the profile reach
          those that the class has a threshold for
          LAYERS: the layer by its number or name, or patterns that mean its name and all of its tensors
          ADAPTER: every tensor lies below the adapter's name, or the class has an empty slice of it
weights   a layer with the factor 0 is out

Which heads or experts a tensor holds only the model knows; of these the words of the profile are compared (plans.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from lamina.plan.naming import matches
from lamina.plan.profile import DepthProfile, Kind, exact
from lamina.plan.step import PlannedLayer, StepPlan

_MOST = 1_000_000  # blocks; depths that ask for more were not counted in blocks


def outside(plan: StepPlan, k: int, profile: DepthProfile) -> str | None:
    """The first layer for which class k has a threshold, and which its profile does not reach on any model."""
    reached = [i for i, c in enumerate(plan.clip[k]) if c > 0]
    for i in reached:
        if any(not factor and matches(pattern, plan.layers[i].name) for pattern, factor in profile.weights):
            return plan.layers[i].name
    wrong: Iterator[int]
    if profile.kind is Kind.LAYERS:
        wrong = (i for i in reached if not _named(profile.names, plan.layers[i], i, len(plan.layers)))
    elif profile.kind is Kind.ADAPTER:
        wrong = (i for i in reached if not _of_adapter(profile.name or "", plan, k, plan.layers[i]))
    elif profile.kind is Kind.ALL:
        return None
    else:
        wrong = iter(_beyond(profile, [exact(layer.depth) for layer in plan.layers], reached))
    first = next(wrong, None)
    return None if first is None else plan.layers[first].name


def _named(names: Sequence[str | int], layer: PlannedLayer, index: int, count: int) -> bool:
    if layer.name in names or index in names or index - count in names:
        return True
    patterns = [name for name in names if isinstance(name, str)]
    inside = f"{layer.name}."
    elsewhere = [tensor for tensor in layer.parameters if not tensor.startswith(inside)]
    if len(elsewhere) == len(layer.parameters):  # a group with a name of its own
        elsewhere = []
    return all(any(matches(p, name) for p in patterns) for name in (layer.name, *elsewhere))


def _of_adapter(name: str, plan: StepPlan, k: int, layer: PlannedLayer) -> bool:
    for tensor in layer.parameters:
        if name not in tensor.split(".")[1:]:
            closed = plan.slice(k, tensor)
            if closed is None or closed.ranges:
                return False
    return True


# ------------------------------------------------------------------------------------ depth in blocks


def _beyond(profile: DepthProfile, depths: Sequence[Fraction], reached: Sequence[int]) -> Sequence[int]:
    """The first layer with which no number of blocks is left; nothing if some number fits all."""
    if all(depth == 1 for depth in depths) and _one_block(profile):
        return ()
    step = math.lcm(*(depth.denominator for depth in depths))
    step = 1 if step > _MOST else step  # n-1 is a multiple of it
    least, most = Fraction(2), Fraction(_MOST**2)
    for i in reached:
        low, high = _blocks(profile, depths[i])
        least, most = max(least, low), min(most, high)
        if 1 + step * math.ceil((least - 1) / step) > most:
            return (i,)
    return ()


def _one_block(profile: DepthProfile) -> bool:
    """Whether it reaches the only block of a model; its depth is 1, and it is the first."""
    first, last = profile.bounds
    if profile.kind is Kind.BLOCKS:
        return first in (0, -1) and last in (0, -1)
    return first == 0 and last == 1


_NEVER = (Fraction(1), Fraction(0))


def _blocks(profile: DepthProfile, d: Fraction) -> tuple[Fraction, Fraction]:
    """The least and the most blocks, of two or more, of which the profile holds the one at depth d = b/(n-1)."""
    if profile.kind is Kind.BLOCKS:
        return _counted(int(profile.bounds[0]), int(profile.bounds[1]), d)
    low, high = map(exact, profile.bounds)
    least = [Fraction(2)]
    for room, needed in ((d - low, d), (high - d, 1 - d)):  # low·n ≤ b and b+1 ≤ high·n, over n
        if room <= 0 and (room < 0 or needed > 0):
            return _NEVER
        if room > 0:
            least.append(needed / room)
    return max(least), Fraction(_MOST**2)


def _counted(first: int, last: int, d: Fraction) -> tuple[Fraction, Fraction]:
    """The same of blocks by number; a negative one is counted from the end."""
    least, most = (
        [Fraction(2), *(Fraction(-b if b < 0 else b + 1) for b in (first, last))],
        [Fraction(_MOST**2)],
    )
    if first >= 0:  # first ≤ d(n-1)
        if d == 0 and first > 0:
            return _NEVER
        least.append(first / d + 1 if d else Fraction(2))
    elif d < 1:  # n+first ≤ d(n-1)
        most.append((-first - d) / (1 - d))
    if last >= 0:  # d(n-1) ≤ last
        if d > 0:
            most.append(last / d + 1)
    elif d < 1:  # d(n-1) ≤ n+last
        least.append((-last - d) / (1 - d))
    elif last < -1:
        return _NEVER
    return max(least), min(most)
