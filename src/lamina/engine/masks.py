"""`Masks`: which places of a tensor the classes of a plan may move, as tensors; and which no class reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lamina.engine.may import May
from lamina.engine.parts import Picked
from lamina.engine.places import Places
from lamina.engine.unitgrad import UnitGrad
from lamina.plan.opened import planned_sizes
from lamina.plan.slices import Range, joined, outside
from lamina.plan.step import StepPlan


def trained(plan: StepPlan) -> tuple[str, ...]:
    """The tensors of which some class may move something: the others keep `grad = None`."""
    return tuple(
        name
        for i, layer in enumerate(plan.layers)
        if any(row[i] > 0 for row in plan.clip)
        for name in layer.parameters
        if not plan.slices or (found := plan.open_ranges(name)) is None or found[1]
    )


def closed(plan: StepPlan, name: str) -> Places | None:
    """The places of a tensor that no class reaches, though some class reaches its layer; None if there are none."""
    cut = next((part for part in plan.slices if part.tensor == name), None)
    found = None if cut is None else plan.open_ranges(name)
    return None if cut is None or found is None else Places(found[0], outside(found[1], cut.length))


@dataclass(frozen=True, eq=False)
class Opening:
    """What the contributions of a part may move of one tensor.

    `may` by contribution and place along `axis`; `union` the places that some of them may move, None if
    that is every place; `alike` whether all that reach the layer may move the same.
    """

    axis: int
    may: May
    union: Places | None
    alike: bool

    @property
    def shut(self) -> bool:
        """Whether nobody in the part may move anything of the tensor."""
        return self.union is not None and not self.union.ranges

    def of(self, grad: UnitGrad) -> UnitGrad:
        """The gradient as it is measured: 0 wherever a contribution may not move it."""
        inner = None if self.union is None else grad.pick(self.union)
        if inner is None or self.union is None:
            return grad.where(self.axis, self.may)
        if not self.alike:
            inner = inner.where(self.axis, self._within)
        return Picked(inner, self.union, grad.shape)

    @cached_property
    def _within(self) -> May:
        assert self.union is not None
        return May(self.union.of(self.may.table, 1))


Openings = Mapping[str, Opening]
ALL_OPEN: Openings = {}


@dataclass(frozen=True)
class _Table:
    """What each class may move along one axis; None: it does not reach the layer. Tensors cut alike share a table."""

    axis: int
    length: int
    open: tuple[tuple[Range, ...] | None, ...]

    @cached_property
    def rows(self) -> Tensor:
        """(K, length), True where a class may move a place."""
        may = torch.zeros(len(self.open), self.length, dtype=torch.bool)
        for row, ranges in zip(may, self.open, strict=True):
            for first, stop in ranges or ():
                row[first:stop] = True
        return may

    def opening(self, classes: Tensor, members: Mapping[int, Tensor], narrow: bool) -> Opening | None:
        """`members`: which contributions are of a class, for every class that is here."""
        if not narrow:
            return Opening(self.axis, May(self.rows[classes], even=True), None, False)
        whole = ((0, self.length),)
        here = {k: ranges for k in members if (ranges := self.open[k]) is not None}
        found = set(here.values())
        if found <= {whole}:
            return None
        denied = [
            (who, outside(here.get(k, ()), self.length)) for k, who in members.items() if here.get(k) != whole
        ]
        union = joined(part for ranges in found for part in ranges)
        places = None if union == whole else Places(self.axis, union)
        return Opening(self.axis, May(self.rows[classes], denied), places, len(found) == 1)


def _table(plan: StepPlan, name: str) -> _Table | None:
    """None for a tensor that no class has a slice of."""
    layer = next(i for i, layer in enumerate(plan.layers) if name in layer.parameters)
    parts = [plan.slice(k, name) for k in range(len(plan.classes))]
    cut = next((part for part in parts if part is not None), None)
    if cut is None:
        return None
    whole = ((0, cut.length),)
    reached = [row[layer] > 0 for row in plan.clip]
    open_ = tuple(
        (whole if part is None else part.ranges) if reach else None
        for part, reach in zip(parts, reached, strict=True)
    )
    return _Table(cut.axis, cut.length, open_)


class Masks:
    """The slices of a plan, applied to the tensors of a model.

    A contribution's gradient is 0 outside its class's places before it is measured. Where no class reaches at all,
    nothing is released: no gradient, no noise.

      closed  by tensor, the places that no class reaches
      sizes   by layer, how many numbers some class may move: those that get noise
    """

    def __init__(self, plan: StepPlan, tensors: Mapping[str, Tensor]) -> None:
        self.closed: dict[str, Places] = {}
        self._tables: dict[str, _Table] = {}
        self.sizes = planned_sizes(plan, {name: t.shape for name, t in tensors.items()})
        shared: dict[_Table, _Table] = {}
        for name in trained(plan) if plan.slices else ():
            table = _table(plan, name)
            if table is not None:
                self._tables[name] = shared.setdefault(table, table)
            if (places := closed(plan, name)) is not None:
                self.closed[name] = places

    def openings(self, classes: Tensor, *, narrow: bool = True) -> Openings:
        """For contributions of these classes, the tensors that some of them may move in part only.

        `narrow`: leave out arithmetic where nobody in the part may move anything, which shows in the time it takes.
        Otherwise every tensor that some class may move in part is masked, in as much time whoever is here.
        """
        if not self._tables:
            return ALL_OPEN
        members = {k: (classes == k).nonzero().flatten() for k in set(classes.tolist())}
        made: dict[int, Opening | None] = {}
        found: dict[str, Opening] = {}
        for name, table in self._tables.items():
            if id(table) not in made:
                made[id(table)] = table.opening(classes, members, narrow)
            opening = made[id(table)]
            if opening is not None:
                found[name] = opening
        return found

    def silence(self, name: str, tensor: Tensor) -> None:
        """Set the places of a tensor that no class reaches to exactly 0."""
        if name in self.closed:
            self.closed[name].zero_(tensor)

    def silence_all(self, released: Mapping[str, Tensor]) -> None:
        for name in self.closed:
            if name in released:
                self.silence(name, released[name])
