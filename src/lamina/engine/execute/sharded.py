"""Models under `fully_shard` (FSDP2): weights that are gathered block by block, and sums of which a rank keeps its part.

    forward   a block is gathered when the forward pass enters it, and dropped when it leaves it
    backward  the same in the opposite order. When it has left a block, the sums of the block, which hold this rank's share of
              the noise, are added up over the ranks, and each rank keeps its part of them
    joint     sums begin when the backward pass is over; they too are added up one after another

All ranks pass the blocks in one order. Before each they agree (`Ranks.agree`) on where they are: who has no examples follows,
and who failed says so. A rank that cannot keep to the order asks for the whole model: all ranks then gather it, and keep it
until the step is over. It does so for a block that it leaves out, uses in another order, or runs without gradients, and for
a batch that is cut into parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamina.engine.batch import Batch
from lamina.engine.distributed import (
    Ranks,
    as_shard,
    is_sharded,
    is_sharded_model,
    is_sharded_module,
    rank_lost,
    shard_like,
    whole_tensor,
)
from lamina.engine.execute.collectors import Collector
from lamina.engine.execute.norms import release_buffers
from lamina.engine.execute.placement import OpenStep, Placement, RankedPlacement
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.guard import tensors_of_optimizer
from lamina.engine.noise.mechanism import COUNTS, StepNoise
from lamina.errors import EngineError
from lamina.plan.rules import FollowProxy
from lamina.plan.step_plan import Clipping, StepPlan

_SENT_ALONE = 1 << 18  # elements: smaller sums of a block are sent together
_START, _BACKWARD, _WHOLE = 1 << 40, 1 << 41, 1 << 42  # places in a step: forward passes count from 1


class ShardedPlacement(RankedPlacement):
    """Weights that are divided over the ranks between steps, and sums of which each rank keeps its part.

    A sum is sent when its layer is complete, in float64 and with this rank's share of the noise: after that only this
    rank's part of the total is there. `release` sends the rest and gives all parts away; before it nothing leaves.
    """

    sharded = True

    def __init__(
        self, model: nn.Module, plan: StepPlan, ranks: Ranks, *, step: Callable[[], int], compiled: bool = False
    ) -> None:
        self.parts: list[Any] = [module for module in model.modules() if is_sharded_module(module)]
        for part in self.parts:
            part.reshard()
        super().__init__(model, plan, ranks)
        self._layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
        self._of_engine = WeakMethod(step)  # a cycle would keep an engine that nobody holds
        self._handles: list[Any] = []
        self._forget()
        meshes = [p.device_mesh for p in self.held.values() if is_sharded(p)]
        unfit = {
            "the plan has slices of tensors": bool(plan.slices),
            "compiled is given": compiled,
            "the plan follows a proxy, which is measured on all of it": plan.rule(FollowProxy) is not None,
            "its parts lie on fewer ranks than take the step": any(
                m.ndim > 1 or m.size() != ranks.size for m in meshes
            ),
        }
        for why, holds in unfit.items():
            if holds:
                problem = f"the model is under fully_shard, and {why}"
                remedy = "leave fully_shard out: the ranks work without it too"
                raise EngineError("engine.sharded-model", problem, remedy)
        encloses = [any(is_sharded_module(m) for m in part.modules() if m is not part) for part in self.parts]
        self._leaf = [not each for each in encloses]  # one that encloses others stays whole while they run
        self._part_of = self._find_parts(model)
        # None: always whole. As they are registered, until a forward pass shows another order
        self._order: list[int] | None = list(range(len(self.parts)))
        for part in self.parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
            part.set_requires_gradient_sync(False, recurse=False)
            part.set_unshard_in_backward(False)

    def _find_parts(self, model: nn.Module) -> dict[str, int]:
        """The part that holds each tensor: the innermost that encloses its module."""
        inside: dict[int, int] = {}
        for i, part in enumerate(self.parts):  # outer ones come first
            inside |= {id(module): i for module in part.modules()}
        names = {id(p): name for name, p in self.held.items() if is_sharded(p)}
        owners = [
            (id(p), inside.get(id(module), -1)) for module in model.modules() for p in module._parameters.values()
        ]
        return {names[p]: part for p, part in owners if p in names}

    def attach(self, run_often: Sequence[nn.Module]) -> None:
        """Watch the parts; those of modules that are run often are not gathered each time."""
        if any(is_sharded_module(m) for module in run_often for m in module.modules() if m is not module):
            self._order = None
        for i, part in enumerate(self.parts):
            self._handles.append(part.register_forward_pre_hook(self._entering(i), prepend=True))
            self._handles.append(part.register_forward_hook(self._leaving(i), always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.divide()
        for i, part in enumerate(self.parts):
            part.set_reshard_after_forward(i > 0, recurse=False)
            part.set_reshard_after_backward(True, recurse=False)
            part.set_requires_gradient_sync(True, recurse=False)
            part.set_unshard_in_backward(True)

    # Whole, or in parts

    def _forget(self) -> None:
        """A step begins: nothing of it has happened yet."""
        self.is_whole, self._place, self._odd = False, 0, False
        self._seen: list[int] = []  # the parts that the forward passes of this step entered
        self._passes = 0
        self._pass: BackwardPass | None = None
        self._sent: dict[str, Tensor] = {}

    def gather(self) -> None:
        if not self.is_whole:
            self._agree(_WHOLE, whole=1)

    def begin_forward(self) -> None:
        if self._order is None or not torch.is_grad_enabled():
            self.gather()

    def divide(self) -> None:
        """Sends nothing, unless ranks had to be whole because of their order."""
        for part in self.parts:
            _reshard(part)
        odd, seen = self._odd, self._seen
        self._forget()
        if odd:
            self._adopt(seen)

    def after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Drop weights that a forward pass gathered meanwhile: they are those before the step."""
        if tensors_of_optimizer(optimizer, self.held):
            for part in self.parts:
                _reshard(part)
            self._forget()

    def give_up(self) -> None:
        inner = {id(m) for part in self.parts for m in part.modules() if m is not part}
        try:
            for part in self.parts:
                if id(part) not in inner and part._get_fsdp_state()._is_root:  # known since its first forward pass
                    part.reset_iter_state()
        finally:
            self._forget()
            self.divide()

    def _adopt(self, seen: list[int]) -> None:
        """Go on with the order of blocks that forward passes showed, if all of them showed the same."""
        most = 4 * len(self.parts)
        row = torch.tensor([*seen[:most], *[-1] * (most - len(seen))], dtype=torch.int64, device=self.ranks.device)
        shown = {tuple(i for i in other.tolist() if i >= 0) for other in self.ranks.every(row)} - {()}
        if shown:
            order = list(shown.pop())
            self._order = None if shown or len(order) == most else order

    def _step_number(self) -> int:
        step = self._of_engine()
        assert step is not None
        return step()

    def _agree(
        self, place: int, *, whole: int = 0, need: bool = False, passes: int = 0, unready: bool = False, drawn: int = -1
    ) -> list[int]:  # fmt: skip
        """Where this rank is; if one of them asks for it, the model is whole afterwards."""
        asked = (whole, need, passes, unready)
        found = self.ranks.agree(self._step_number(), drawn=drawn, place=place, asked=asked, may_gather=True)
        if found[0]:
            self.is_whole, self._odd = True, found[0] > 1
            for part in self.parts:
                _unshard(part)
        return found

    # Forward

    def _entering(self, i: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._pass is not None:  # computed again in a backward pass
                self._pass.enter(i)
                return
            self._seen.append(i)
            if self.is_whole or self._order is None:
                return
            if self._place < len(self._order) and self._order[self._place] == i:
                self._forward(need=True)
            else:
                self._agree(_WHOLE, whole=2)

        return hook

    def _leaving(self, i: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if self._pass is not None or self.is_whole or self._order is None:
                return
            if self._leaf[i]:
                _reshard(self.parts[i])
            leaves = pytree.tree_leaves(output)
            found = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            for t in found:
                t.register_hook(lambda _: self._reached_backward(i))
            if self._leaf[i] and not all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
                self.gather()  # an object may hold an output, and nothing would say when a backward pass enters the block

        return hook

    def _reached_backward(self, i: int) -> None:
        if self._pass is not None:
            self._pass.enter(i)

    def _forward(self, *, need: bool) -> None:
        """The next block of the forward pass: gathered if some rank needs it."""
        assert self._order is not None
        i = self._order[self._place]
        found = self._agree(1 + self._place, need=need)
        if not self.is_whole:
            self._place += 1
            if found[1]:
                _unshard(self.parts[i])
                if not need and self._leaf[i]:
                    _reshard(self.parts[i])

    # Backward

    def start(self, batch: Batch, *, empty: bool, passes: int) -> None:
        """All ranks are at the same sample."""
        if not (batch.first and batch.last):
            self.gather()  # sums of several parts wait for the last
            if not batch.last:
                return
        if self._order is None:
            self.gather()
        else:
            while empty and not self.is_whole and self._place < len(self._order):
                self._forward(need=False)
            if not self.is_whole:
                whole = 2 if self._place < len(self._order) else 0
                found = self._agree(_START, whole=whole, passes=passes, drawn=batch.draw.step)
                self._passes = 0 if self.is_whole else found[2]
        if self.is_whole:
            self.ranks.agree(self._step_number(), place=_START, drawn=batch.draw.step)

    @contextmanager
    def passing(self, sums: Sums | None = None, collector: Collector | None = None) -> Iterator[None]:
        """Blocks that the pass does not enter are passed when it is over."""
        if self.is_whole or self._order is None:
            yield
            return
        early = sums is not None and sums.streamed and self.plan.clipping is not Clipping.JOINT
        order = [i for i in reversed(self._order) if self._leaf[i]]
        self._pass = BackwardPass(self, order, collector, sums if early else None)
        try:
            yield
            self._pass.finish()
        finally:
            self._pass = None
        self._passes -= 1

    def follow(self, passes: int | None = None, sums: Sums | None = None) -> None:
        """Pass the blocks as the other ranks do: what is left of the passes before the last, unless `passes` says more."""
        for _ in range(self._passes if passes is None else passes):
            with self.passing(sums):
                pass

    def divided(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: t if is_sharded(t) else shard_like(t, self.held[name]) for name, t in grads.items()}

    def whole(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: whole_tensor(t) for name, t in grads.items()}

    # Sums

    def sums(self, tensors: Mapping[str, Tensor], noise: StepNoise) -> Sums:
        sums = super().sums(tensors, noise)
        sums.streamed = not noise.grids  # whole numbers are added up whole
        self._sent = {}
        return sums

    def names_of(self, part: int, tensors: Mapping[str, Tensor]) -> list[str]:
        """The tensors that a part holds; those that are not divided are of part -1."""
        return [name for name in tensors if self._part_of.get(name, -1) == part]

    def are_complete(self, part: int, sums: Sums, collector: Collector | None) -> bool:
        """Whether nothing more comes to the sums of a block."""
        if collector is None or part < 0:
            return True
        collector.flush()
        return all(collector.is_complete(self._layer_of[name]) for name in self.names_of(part, sums.tensors))

    @torch.no_grad()
    def send(self, part: int, sums: Sums) -> None:
        """Add the sums of a block up over the ranks, and keep this rank's part."""
        together: dict[torch.dtype, list[str]] = {}
        for name in self.names_of(part, sums.tensors):
            if name in self._sent:
                continue
            if sums.later is not None:
                with torch.autocast("cpu", enabled=False):  # the caller's, which would add up in bfloat16
                    sums.later.add(self._layer_of[name])
            if sums.tensors[name].numel() >= _SENT_ALONE:
                self._send([name], sums)
            else:
                together.setdefault(sums.tensors[name].dtype, []).append(name)
        for names in together.values():
            self._send(names, sums)

    def _send(self, names: list[str], sums: Sums) -> None:
        held, noise = [self.held[name] for name in names], sums.noise
        totals = [noise.share([name], [sums.take(name)])[0] for name in names]
        if is_sharded(held[0]):
            rows = [_rows(t, p.placements[0].dim, self.ranks.size) for p, t in zip(held, totals, strict=True)]
            sizes = [row.shape[1] for row in rows]
            whole = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            del totals, rows
            mine = self.ranks.add_up_parts(whole).split(sizes)
            totals = [_local(row, p, self.ranks) for p, row in zip(held, mine, strict=True)]
        else:
            self.ranks.add_up(totals)
        for name, p, found in zip(names, held, noise.finish(names, totals), strict=True):
            self._sent[name] = as_shard(found, p) if is_sharded(p) else found

    def release(self, opened: OpenStep) -> dict[str, Tensor]:
        """This rank's part of (clipped sum + noise) / B, and the noised counts."""
        sums = opened.sums
        if not sums.streamed:
            return super().release(opened)
        self.ranks.agree(opened.number, drawn=opened.drawn)
        counts = self._add_up(sums, [COUNTS]) if COUNTS in sums else {}
        parts = [*range(len(self.parts)), -1]
        try:
            for part in parts if self.plan.clipping is Clipping.JOINT else reversed(parts):
                self.send(part, sums)
        finally:
            release_buffers()  # of a joint clip, which adds here
        sums.later = None  # sums and collector hold each other
        return {name: self._sent.pop(name) for name in sums.tensors} | counts


class BackwardPass:
    """One pass through the blocks, from the last to the first."""

    def __init__(
        self, model: ShardedPlacement, order: list[int], collector: Collector | None, sums: Sums | None
    ) -> None:
        self.model, self.order, self.collector = model, order, collector
        self.sums = sums  # which are sent as soon as they are complete
        self.next, self.inside = 0, -1

    def enter(self, i: int) -> None:
        """The pass needs block i."""
        if self.model.is_whole or i == self.inside or not self.model._leaf[i]:
            return
        if i not in self.order[self.next :]:
            self.model._agree(_WHOLE, whole=1)
            return
        while not self.model.is_whole and self.order[self.next] != i:
            self._advance(need=False)
        if not self.model.is_whole:
            self._advance(need=True)

    def finish(self) -> None:
        while not self.model.is_whole and self.next < len(self.order):
            self._advance(need=False)
        if not self.model.is_whole:
            self._drop()

    def _advance(self, *, need: bool) -> None:
        """Leave the block and go to the next one. Its sums are sent, if they are complete on all ranks."""
        model, i, left = self.model, self.order[self.next], self.inside
        unready = self.sums is not None and not model.are_complete(left, self.sums, self.collector)
        found = model._agree(_BACKWARD + self.next, need=need, unready=unready)
        if model.is_whole:
            return
        self._drop()
        if self.sums is not None and left >= 0 and not found[3]:
            model.send(left, self.sums)
        if found[1]:
            _unshard(model.parts[i])
        self.inside, self.next = i, self.next + 1

    def _drop(self) -> None:
        if self.inside >= 0 and self.model._leaf[self.inside]:
            _reshard(self.model.parts[self.inside])


def _unshard(part: Any) -> None:
    part.set_unshard_in_backward(True)  # FSDP's own hooks must not gather anything, which this call may
    try:
        with rank_lost():
            part.unshard()
    finally:
        part.set_unshard_in_backward(False)


def _reshard(part: Any) -> None:
    part.reshard()


def _rows(total: Tensor, dim: int, size: int) -> Tensor:
    """A tensor as (size, n): row r is what rank r keeps of it, filled up with 0."""
    whole = total.movedim(dim, 0)
    length, each = whole.shape[0], math.ceil(whole.shape[0] / size)
    if length == each * size:
        return whole.reshape(size, -1)
    rows = total.new_zeros(each * size, *whole.shape[1:])
    rows[:length] = whole
    return rows.view(size, -1)


def _local(mine: Tensor, held: Any, ranks: Ranks) -> Tensor:
    """This rank's row as its part of the tensor."""
    dim, shape = held.placements[0].dim, list(held.shape)
    each = math.ceil(shape[dim] / ranks.size)
    length = max(0, min(each, shape[dim] - each * ranks.rank))
    rest = shape[:dim] + shape[dim + 1 :]
    whole = mine[: length * math.prod(rest)].view(length, *rest)
    return whole.movedim(0, dim).contiguous()


def placement_of(
    model: nn.Module, plan: StepPlan, ranks: Ranks, *, step: Callable[[], int], compiled: bool
) -> Placement:  # fmt: skip
    """The placement of a model. `step`: the number of the step that is open, or of the next one."""
    if ranks.alone:
        return Placement(model, plan, ranks)
    if not is_sharded_model(model):
        return RankedPlacement(model, plan, ranks)
    return ShardedPlacement(model, plan, ranks, step=step, compiled=compiled)
