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
)
from lamina.engine.execute.clipping import Collector, JointCollector
from lamina.engine.execute.grads import release_buffers
from lamina.engine.execute.step import ClippedSums, LateSums, OpenStep, zero_sums
from lamina.engine.guards.safety_checks import tensors_of_optimizer
from lamina.engine.noise.source import NoiseSource, widest_dtype
from lamina.errors import EngineError
from lamina.plan.rules import FollowProxy
from lamina.plan.step_plan import Clipping, StepPlan

_SENT_ALONE = 1 << 18  # elements: smaller sums of a block are sent together
_START, _BACKWARD, _WHOLE = 1 << 40, 1 << 41, 1 << 42  # places in a step: forward passes count from 1
OWNERSHIP_PASSES = 3


class ShardedModel:
    """A model whose weights are divided over the ranks between steps. Of a model that is not sharded nothing changes."""

    def __init__(
        self, model: nn.Module, plan: StepPlan, ranks: Ranks, *, step: Callable[[], int], compiled: bool = False
    ) -> None:
        self.ranks, self._of_engine = ranks, WeakMethod(step)  # a cycle would keep an engine that nobody holds
        self.parts: list[Any] = []
        if not ranks.alone and is_sharded_model(model):
            self.parts = [module for module in model.modules() if is_sharded_module(module)]
        for part in self.parts:
            part.reshard()
        self.held: dict[str, Any] = dict(model.named_parameters())  # what the optimiser updates, of this rank
        self._handles: list[Any] = []
        self._order: list[int] | None = None  # None: always whole
        self._forget()
        if not self.parts:
            return
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
        self._order = list(range(len(self.parts)))  # as they are registered, until a forward pass shows another order
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
        """Watch the parts. `run_often`: modules that are run once per contribution; parts of them are not gathered each time."""
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

    def gather(self) -> None:
        """Make it whole on every rank until the step is over, if it is not."""
        if self.parts and not self.is_whole:
            self._agree(_WHOLE, whole=1)

    def begin_call(self) -> None:
        """A forward pass begins somewhere in the model."""
        if self._order is None or not torch.is_grad_enabled():
            self.gather()

    def divide(self) -> None:
        """Keep this rank's part of it only. Sends nothing, unless ranks had to be whole because of their order."""
        for part in self.parts:
            _reshard(part)
        odd, seen = self._odd, self._seen
        self._forget()
        if odd:
            self._adopt(seen)

    def after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Drop weights that a forward pass gathered meanwhile: they are those before the step."""
        if self.parts and tensors_of_optimizer(optimizer, self.held):
            for part in self.parts:
                _reshard(part)
            self._forget()

    def give_up(self) -> None:
        """The step failed here."""
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
        """A step's backward passes begin, `passes` of them before the one that adds up; all ranks are at the same sample."""
        if not self.parts:
            return
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
    def backward_pass(self, step: ClippedSums | None = None, collector: Collector | None = None) -> Iterator[None]:
        """Around one backward pass. Blocks that it does not enter are passed when it is over."""
        if not self.parts or self.is_whole or self._order is None:
            yield
            return
        self._pass = BackwardPass(self, [i for i in reversed(self._order) if self._leaf[i]], step, collector)
        try:
            yield
            self._pass.finish()
        finally:
            self._pass = None
        self._passes -= 1

    def follow(self, passes: int | None = None, step: ClippedSums | None = None) -> None:
        """Pass the blocks as the other ranks do, where this one computes nothing: what is left of the passes before the last."""
        for _ in range(self._passes if passes is None else passes):
            with self.backward_pass(step):
                pass

    def divided(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's part of gradients."""
        if not self.parts:
            return sums
        return {name: t if is_sharded(t) else shard_like(t, self.held[name]) for name, t in sums.items()}

    def names_by_part(self, names: Sequence[str]) -> list[list[str]]:
        """Tensors by the part that holds them, in the order of the parts; those that are not divided come last."""
        found: list[list[str]] = [[] for _ in range(len(self.parts) + 1)]
        for name in names:
            found[self._part_of.get(name, -1)].append(name)
        return found


class BackwardPass:
    """One pass through the blocks, from the last to the first."""

    def __init__(
        self, model: ShardedModel, order: list[int], step: ClippedSums | None, collector: Collector | None
    ) -> None:
        self.model, self.order, self.collector = model, order, collector
        self.step = step if isinstance(step, ShardedStep) and step.early else None
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
        unready = self.step is not None and not self.step.is_complete(left, self.collector)
        found = model._agree(_BACKWARD + self.next, need=need, unready=unready)
        if model.is_whole:
            return
        self._drop()
        if self.step is not None and left >= 0 and not found[3]:
            self.step.send(left)
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


class ShardedStep(ClippedSums):
    """The running sum of a step of several ranks, of which each keeps its part.

    A sum is sent when its layer is complete, in float64 and with this rank's share of the noise: after that only this
    rank's part of the total is there. `release` sends the rest and gives all parts away; before it nothing leaves.
    """

    streamed = True

    def __init__(
        self, plan: StepPlan, noise: NoiseSource, tensors: Mapping[str, Tensor], layer_of: Mapping[str, int], step: int,
        *, ranks: Ranks, model: ShardedModel,
    ) -> None:  # fmt: skip
        self.plan, self.noise, self.step, self.ranks, self.model = plan, noise, step, ranks, model
        self._tensors, self._layer_of = tensors, layer_of
        self._place = {name: i for i, name in enumerate(tensors)}
        self._counts = OpenStep(plan, noise, {}, layer_of, step, ranks=ranks)  # which are small, and not divided
        super().__init__(LateSums(lambda name: zero_sums({name: tensors[name]})[name]), self._counts.counts)
        self.early = plan.clipping is not Clipping.JOINT
        self.later: JointCollector | None = None  # adds what is to be sent
        self._by_part = model.names_by_part(list(tensors))
        self._sent: dict[str, Tensor] = {}

    @property
    def drawn(self) -> int:
        return self._counts.drawn

    @drawn.setter
    def drawn(self, number: int) -> None:
        self._counts.drawn = number

    def _std(self, name: str) -> float:
        return self.plan.noise[self._layer_of[name]]

    def is_complete(self, part: int, collector: Collector | None) -> bool:
        """Whether nothing more comes to the sums of a block."""
        if collector is None or part < 0:
            return True
        collector.flush()
        return all(collector.is_complete(self._layer_of[name]) for name in self._by_part[part])

    @torch.no_grad()
    def send(self, part: int) -> None:
        """Add the sums of a block up over the ranks, and keep this rank's part."""
        together: dict[torch.dtype, list[str]] = {}
        for name in self._by_part[part]:
            if name in self._sent:
                continue
            if self.later is not None:
                with torch.autocast("cpu", enabled=False):  # the caller's, which would add up in bfloat16
                    self.later.add(self._layer_of[name])
            if self._tensors[name].numel() >= _SENT_ALONE:
                self._send([name])
            else:
                together.setdefault(self._tensors[name].dtype, []).append(name)
        for names in together.values():
            self._send(names)

    def _send(self, names: list[str]) -> None:
        totals, dtypes, held = [], [self.sums[name].dtype for name in names], self.model.held
        for name in names:
            total = self.sums.pop(name)
            total = total.to(widest_dtype(total.device))
            share, place = self._std(name) * self.ranks.noise_share, self._place[name]
            self.noise.add_many_([total], [share], step=self.step, tensors=[place], rounded=False)
            totals.append(total)
        if is_sharded(held[names[0]]):
            rows = [
                _rows(t, held[name].placements[0].dim, self.ranks.size) for name, t in zip(names, totals, strict=True)
            ]
            sizes = [row.shape[1] for row in rows]
            whole = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            del total, totals, rows
            mine = self.ranks.add_up_parts(whole).split(sizes)
            totals = [_local(row, held[name], self.ranks) for name, row in zip(names, mine, strict=True)]
        else:
            self.ranks.add_up(totals)
        for name, total, dtype in zip(names, totals, dtypes, strict=True):
            found = self._released(total, self._std(name), dtype)
            self._sent[name] = as_shard(found, held[name]) if is_sharded(held[name]) else found

    def _released(self, total: Tensor, std: float, dtype: torch.dtype) -> Tensor:
        """A sum that holds its noise, rounded once, to the grid of S, and divided by B."""
        out = torch.zeros(total.shape, dtype=dtype, device=total.device)
        if not std:
            out.copy_(total)
        self.noise.add_gathered_([out], [total], [std], divisor=self.plan.batch)
        return out

    def release(self) -> dict[str, Tensor]:
        """This rank's part of (clipped sum + noise) / B. `counts` is noised, too, from here on."""
        self._counts.release()  # all ranks agree
        parts = range(len(self._by_part))
        try:
            for part in reversed(parts) if self.early else parts:
                self.send(part)
        finally:
            release_buffers()  # of a joint clip, which adds here
        self.sums, self.later = {}, None  # late sums and step hold each other: gradients would wait for a collection
        return {name: self._sent.pop(name) for name in self._tensors}


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
