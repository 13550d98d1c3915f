"""The finest parts of a layer that a plan tells apart: places that the same classes may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lamina.plan.slices import Range
from lamina.plan.step import StepPlan


@dataclass(frozen=True, kw_only=True)
class Region:
    """Tensors of one layer, whole or (`places`: axis, first, stop) in part, and the classes that may move them."""

    layer: int
    name: str
    tensors: tuple[str, ...]
    size: int
    classes: frozenset[int]
    places: tuple[int, int, int] | None = None

    def square(self, seen: Mapping[str, Tensor]) -> float:
        """Σ of the squares of what was released there."""
        return sum(float(self._cut(seen[name]).square().sum()) for name in self.tensors if name in seen)

    def moved(self, seen: Mapping[str, Tensor]) -> bool:
        return any(bool((self._cut(seen[name]) != 0).any()) for name in self.tensors if name in seen)

    def _cut(self, t: Tensor) -> Tensor:
        if self.places is None:
            return t
        axis, first, stop = self.places
        return t.narrow(axis, first, stop - first) if t.dim() else t


def regions(plan: StepPlan, tensors: Mapping[str, Tensor]) -> tuple[Region, ...]:
    """Every number of the plan's layers in exactly one region. A layer that nobody cuts is one region."""
    found: list[Region] = []
    for i, layer in enumerate(plan.layers):
        reach = frozenset(k for k, row in enumerate(plan.clip) if row[i] > 0)
        cut = [name for name in layer.parameters if any(plan.slice(k, name) is not None for k in reach)]
        rest = tuple(name for name in layer.parameters if name not in cut)
        if rest:
            size = sum(tensors[name].numel() for name in rest)
            found.append(Region(layer=i, name=layer.name, tensors=rest, size=size, classes=reach))
        for name in cut:
            found += _pieces(plan, i, name, tensors[name].shape, reach)
    return tuple(found)


def _pieces(plan: StepPlan, layer: int, name: str, shape: torch.Size, reach: frozenset[int]) -> list[Region]:
    parts = {k: plan.slice(k, name) for k in reach}
    one = next(part for part in parts.values() if part is not None)
    open_ = {k: ((0, one.length),) if part is None else part.ranges for k, part in parts.items()}
    edges = sorted({0, one.length, *(edge for ranges in open_.values() for both in ranges for edge in both)})
    return [
        Region(
            layer=layer,
            name=f"{name}[{first}:{stop}, axis {one.axis}]",
            tensors=(name,),
            size=shape.numel() // one.length * (stop - first),
            classes=frozenset(k for k, ranges in open_.items() if _inside(first, ranges)),
            places=(one.axis, first, stop),
        )
        for first, stop in pairwise(edges)
    ]


def _inside(place: int, ranges: tuple[Range, ...]) -> bool:
    return any(first <= place < stop for first, stop in ranges)


def within(plan: StepPlan, k: int, name: str, t: Tensor) -> Tensor:
    """A gradient with 0 outside the places that class k may move."""
    part = plan.slice(k, name)
    if part is None:
        return t
    may = torch.zeros(part.length, dtype=torch.bool)
    for first, stop in part.ranges:
        may[first:stop] = True
    shape = [1] * t.dim()
    if t.dim():
        shape[part.axis] = part.length
    return torch.where(may.view(shape), t, torch.zeros((), dtype=t.dtype))


def outside(plan: StepPlan, k: int, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what moved, the part that class k may not move although it reaches the layer."""
    return {
        name: moved[name] - within(plan, k, name, moved[name])
        for i, layer in enumerate(plan.layers)
        if plan.clip[k][i] > 0
        for name in layer.parameters
        if name in moved and plan.slice(k, name) is not None
    }
