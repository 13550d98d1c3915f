"""The slices of a plan: what each class may move of a tensor, and what no class may move, kept as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamina.engine.execute.grads import AxisSliceGrads, ContributionGrads
from lamina.engine.execute.slice_masks import AxisRanges, SliceMask
from lamina.engine.guards.guard import Guard, tensors_of_optimizer
from lamina.errors import EngineError
from lamina.plan.selection import Range, complement_ranges, merge_ranges, planned_noised_sizes
from lamina.plan.step_plan import StepPlan


def trained_tensors(plan: StepPlan) -> tuple[str, ...]:
    """The tensors of which some class may move something: the others keep `grad = None`."""
    return tuple(
        name
        for i, layer in enumerate(plan.layers)
        if any(row[i] > 0 for row in plan.clip)
        for name in layer.parameters
        if not plan.slices or (found := plan.open_ranges(name)) is None or found[1]
    )


def zero_outside_slices(plan: StepPlan, k: int, name: str, t: Tensor) -> Tensor:
    """A gradient with 0 outside the slices that class k may move."""
    part = plan.slice(k, name)
    if part is None:
        return t
    mask = torch.zeros(part.length, dtype=torch.bool)
    for first, stop in part.ranges:
        mask[first:stop] = True
    shape = [1] * t.dim()
    if t.dim():
        shape[part.axis] = part.length
    return torch.where(mask.view(shape), t, torch.zeros((), dtype=t.dtype))


def unreached_ranges(plan: StepPlan, name: str) -> AxisRanges | None:
    """The indices of a tensor that no class reaches, though some class reaches its layer; None if there are none."""
    cut = next((part for part in plan.slices if part.tensor == name), None)
    found = None if cut is None else plan.open_ranges(name)
    return None if cut is None or found is None else AxisRanges(found[0], complement_ranges(found[1], cut.length))


@dataclass(frozen=True, eq=False)
class TensorMask:
    """What the contributions of a part may move of one tensor.

    `mask` by contribution and index along `axis`; `union` the indices that some of them may move, None if
    that is every index; `alike` whether all that reach the layer may move the same.
    """

    axis: int
    mask: SliceMask
    union: AxisRanges | None
    alike: bool

    @property
    def all_blocked(self) -> bool:
        """Whether nobody in the part may move anything of the tensor."""
        return self.union is not None and not self.union.ranges

    def of(self, grad: ContributionGrads) -> ContributionGrads:
        """The gradient as it is measured: 0 wherever a contribution may not move it."""
        inner = None if self.union is None else grad.pick(self.union)
        if inner is None or self.union is None:
            return grad.where(self.axis, self.mask)
        if not self.alike:
            inner = inner.where(self.axis, self._within)
        return AxisSliceGrads(inner, self.union, grad.shape)

    @cached_property
    def _within(self) -> SliceMask:
        assert self.union is not None
        return self.mask.within(self.union)


TensorMasks = Mapping[str, TensorMask]
NO_MASKS: TensorMasks = {}


@dataclass(frozen=True)
class _ClassRanges:
    """What each class may move along one axis; None: it does not reach the layer. Tensors cut alike share a table."""

    axis: int
    length: int
    open: tuple[tuple[Range, ...] | None, ...]

    @cached_property
    def rows(self) -> Tensor:
        """(K, length), True where a class may move an index."""
        mask = torch.zeros(len(self.open), self.length, dtype=torch.bool)
        for row, ranges in zip(mask, self.open, strict=True):
            for first, stop in ranges or ():
                row[first:stop] = True
        return mask

    def mask_for(self, classes: Tensor, members: Mapping[int, Tensor], narrow: bool) -> TensorMask | None:
        """`members`: which contributions are of a class, for every class that is here."""
        if not narrow:
            return TensorMask(self.axis, SliceMask(self.rows[classes], even=True), None, False)
        whole = ((0, self.length),)
        here = {k: ranges for k in members if (ranges := self.open[k]) is not None}
        found = set(here.values())
        if found <= {whole}:
            return None
        blocked = [
            (who, complement_ranges(here.get(k, ()), self.length)) for k, who in members.items() if here.get(k) != whole
        ]
        union = merge_ranges(part for ranges in found for part in ranges)
        span = None if union == whole else AxisRanges(self.axis, union)
        return TensorMask(self.axis, SliceMask(self.rows[classes], blocked), span, len(found) == 1)


def _class_ranges(plan: StepPlan, name: str) -> _ClassRanges | None:
    """None for a tensor that no class has a slice of."""
    layer = next(i for i, layer in enumerate(plan.layers) if name in layer.parameters)
    parts = [plan.slice(k, name) for k in range(len(plan.classes))]
    cut = next((part for part in parts if part is not None), None)
    if cut is None:
        return None
    whole = ((0, cut.length),)
    reached = [row[layer] > 0 for row in plan.clip]
    open_ = tuple(
        (whole if part is None else part.ranges) if reach else None for part, reach in zip(parts, reached, strict=True)
    )
    return _ClassRanges(cut.axis, cut.length, open_)


class PlanSlices:
    """The slices of a plan, applied to the tensors of a model.

    A contribution's gradient is 0 outside its class's indices before it is measured. Where no class reaches at all,
    nothing is released: no gradient, no noise.

      unreached  by tensor, the indices that no class reaches
      sizes      by layer, how many numbers some class may move: those that get noise
    """

    def __init__(self, plan: StepPlan, tensors: Mapping[str, Tensor]) -> None:
        self.unreached: dict[str, AxisRanges] = {}
        self._tables: dict[str, _ClassRanges] = {}
        self.sizes = planned_noised_sizes(plan, {name: t.shape for name, t in tensors.items()})
        shared: dict[_ClassRanges, _ClassRanges] = {}
        for name in trained_tensors(plan) if plan.slices else ():
            table = _class_ranges(plan, name)
            if table is not None:
                self._tables[name] = shared.setdefault(table, table)
            if (span := unreached_ranges(plan, name)) is not None:
                self.unreached[name] = span

    def masks_for(self, classes: Tensor, *, narrow: bool = True) -> TensorMasks:
        """For contributions of these classes, the tensors that some of them may move in part only.

        `narrow`: leave out arithmetic where nobody in the part may move anything, which shows in the time it takes.
        Otherwise every tensor that some class may move in part is masked, in as much time whoever is here.
        """
        if not self._tables:
            return NO_MASKS
        members = {k: (classes == k).nonzero().flatten() for k in set(classes.tolist())}
        made: dict[int, TensorMask | None] = {}
        found: dict[str, TensorMask] = {}
        for name, table in self._tables.items():
            if id(table) not in made:
                made[id(table)] = table.mask_for(classes, members, narrow)
            mask = made[id(table)]
            if mask is not None:
                found[name] = mask
        return found

    def zero_unreached(self, released: Mapping[str, Tensor]) -> None:
        """Set what no class reaches to exactly 0."""
        for name, ranges in self.unreached.items():
            if name in released:
                ranges.zero_(released[name])


# Rprop's, which starts as the learning rate and stays so where the gradient is 0.
_NONZERO_INITIAL_STATE = {"step_size"}

SavedRanges = tuple[list[Tensor], dict[Any, list[Tensor]]]


class RestoreUnreached(Guard):
    """Keeps the slices that no class reaches unchanged over a step of any torch optimiser.

    Saves them before the step, of the weights and of every state tensor of the same shape, and puts them back after
    it; state that the step created starts as 0 there. Their gradient is 0, but weight decay, older momentum or another
    kind of optimiser would still move them. State that is a single number belongs to the whole tensor and is left to
    the optimiser. State of any other shape mixes slices: refused.
    """

    def __init__(self, tensors: Mapping[str, Tensor], unreached: Mapping[str, AxisRanges]) -> None:
        self.tensors = {name: tensors[name] for name in unreached if name in tensors}
        self.unreached = unreached
        self._saved: dict[str, SavedRanges] = {}

    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._saved = {}
        for name, p in tensors_of_optimizer(optimizer, self.tensors) if self.tensors else ():
            state = {path: self._cut(name, t) for path, t in self._state(optimizer, name, p)}
            self._saved[name] = self._cut(name, p), state

    def after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        saved, self._saved = self._saved, {}
        with torch.no_grad():
            updated = [(name, p) for name, p in self.tensors.items() if name in saved]
            for name, p in updated:
                self._paste(name, p, saved[name][0])
            for name, p in updated:
                for path, t in self._state(optimizer, name, p):
                    if path in saved[name][1]:
                        self._paste(name, t, saved[name][1][path])
                    elif not _NONZERO_INITIAL_STATE & {str(getattr(key, "key", "")) for key in path}:
                        self.unreached[name].zero_(t)

    def _state(self, optimizer: Optimizer, name: str, p: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """The state of a tensor that has its shape, by where it is kept."""
        leaves, _ = pytree.tree_flatten_with_path(dict(optimizer.state.get(p, {})))
        for path, leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.numel() == 1:
                continue
            if leaf.shape != p.shape:
                raise EngineError(
                    "engine.optimizer-state-shape",
                    f"{type(optimizer).__name__} has state {pytree.keystr(path)} of shape {tuple(leaf.shape)} for "
                    f"'{name}' of shape {tuple(p.shape)}: slices that no class reaches cannot be kept unchanged",
                    "use AdamW or SGD, whose state has the tensor's shape, or a plan that reaches all of the tensor",
                )
            yield path, leaf

    def _cut(self, name: str, t: Tensor) -> list[Tensor]:
        span = self.unreached[name]
        return [t.detach().narrow(span.axis, a, b - a).clone() for a, b in span.ranges]

    def _paste(self, name: str, t: Tensor, values: list[Tensor]) -> None:
        span = self.unreached[name]
        for (a, b), value in zip(span.ranges, values, strict=True):
            t.detach().narrow(span.axis, a, b - a).copy_(value)
