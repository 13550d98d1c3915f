"""One step: its clipped sums and its noise until they are released together; and `route`, the same as a function."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lamina.engine.batch import Batch
from lamina.engine.distributed import ALONE, Ranks
from lamina.engine.guards.safety_checks import CheckedBatch
from lamina.engine.noise.correlated import NoiseWindow
from lamina.engine.noise.integer import Grid, layer_grids, row_taxicab_sq
from lamina.engine.noise.source import NoiseSource, widest_dtype
from lamina.engine.slices import trained_tensors, unreached_ranges, zero_outside_slices
from lamina.errors import EngineError, NoiseError
from lamina.plan.rules import FollowQuantile, InjectionForm, NoiseKind
from lamina.plan.selection import Range
from lamina.plan.step_plan import Clipping, StepPlan

# Noise that enters a step in parts: one for every bin, slot or contribution (plan/rules.py).
#
# Part i of a step has a place of its own in the noise stream (`NoiseSource`, part=i). Parts enter with the parts of a
# batch as these come, and what is left enters at the release: how a batch is cut moves the order of additions only.
#
# They are gathered in float64 and the whole is rounded once, to the grid of S: the result is one rounding away from the
# exact sum, as with one noise.


class NoiseInjection(ABC):
    """The noise of one step, gathered in float64 until it is added to the sums."""

    def __init__(
        self, plan: StepPlan, source: NoiseSource, tensors: Mapping[str, Tensor], stds: Sequence[float], *, step: int
    ) -> None:
        self.plan, self.source, self.step = plan, source, step
        self.names, self.stds = list(tensors), list(stds)
        self.gathered = _zeros_for_noise(tensors.values())
        self.private = torch.tensor([not entry.public for entry in plan.classes])
        self.taken = 0  # parts that are in

    @abstractmethod
    def add_noise_for(self, classes: Tensor) -> None:
        """Add the noise that comes with contributions of these classes."""

    def finish(self) -> list[Tensor]:
        """All of the noise: every contribution of the step was announced."""
        return self.gathered

    def _draw(self, outs: Sequence[Tensor], places: Sequence[int], share: float) -> None:
        stds = [self.stds[i] * share for i in places]
        self.source.add_many_(outs, stds, step=self.step, tensors=places, part=self.taken, rounded=False)


class NoiseInShares(NoiseInjection):
    """`parts` equal shares N(0, S²/parts): one for every part of the batch, or for every private contribution in it.

    All of them enter, whoever was sampled, and no more.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._here = 0
        self._each = self.plan.injection.form is InjectionForm.SHARES

    def add_noise_for(self, classes: Tensor) -> None:
        self._here += int(self.private[classes].sum()) if self._each else 1
        self._upto(min(self._here, self.plan.injection.parts))

    def finish(self) -> list[Tensor]:
        self._upto(self.plan.injection.parts)
        return super().finish()

    def _upto(self, parts: int) -> None:
        every = range(len(self.gathered))
        while self.taken < parts:
            self._draw(self.gathered, every, 1.0 / math.sqrt(self.plan.injection.parts))
            self.taken += 1


class NoisePerContribution(NoiseInjection):
    """N(0, S²) for every private contribution in the batch, where its class reaches; nothing for an empty batch.

    A contribution whose examples all have weight 0 adds its noise too: the guarantee is about a gradient that is
    replaced by 0, and whether it is 0 must not show.
    """

    def __init__(self, *args: object, layer_of: Mapping[str, int], **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._layer_of = layer_of
        self._reach: dict[int, tuple[list[int], dict[int, tuple[int, tuple[Range, ...]]]]] = {}

    def add_noise_for(self, classes: Tensor) -> None:
        for k in classes[self.private[classes]].tolist():
            whole, partly = self._reached(k)
            self._draw([self.gathered[i] for i in whole], whole, 1.0)
            scratch = [torch.zeros_like(self.gathered[i]) for i in partly]
            self._draw(scratch, list(partly), 1.0)
            for made, (i, (axis, ranges)) in zip(scratch, partly.items(), strict=True):
                for first, stop in ranges:
                    place = (axis, first, stop - first)
                    self.gathered[i].narrow(*place).add_(made.narrow(*place))
            self.taken += 1

    def _reached(self, k: int) -> tuple[list[int], dict[int, tuple[int, tuple[Range, ...]]]]:
        """The tensors that class k may move, and those of which it may move a part: axis and places."""
        if k not in self._reach:
            whole, partly = [], {}
            for i, name in enumerate(self.names):
                if not self.plan.clip[k][self._layer_of[name]] > 0:
                    continue
                if (part := self.plan.slice(k, name)) is None:
                    whole.append(i)
                elif part.ranges:
                    partly[i] = part.axis, part.ranges
            self._reach[k] = whole, partly
        return self._reach[k]


COUNTS_TENSOR = 1 << 62  # the counts' place in the noise stream of a step: no model has so many tensors


class ClippedSums:
    """Clipped gradients, added up; and counts of unclipped contributions where they are asked for."""

    streamed = False  # whether each sum is given away as soon as it is complete

    def __init__(self, sums: dict[str, Tensor], counts: Tensor | None = None) -> None:
        self.sums, self.counts = sums, counts
        self.grid: Mapping[str, Grid] = {}  # by tensor: the grid on which it is added up, if it is

    def prepare(self, part: CheckedBatch) -> CheckedBatch:
        """The part as it is to be differentiated."""
        return part


class LateSums(dict[str, Tensor]):
    """Sums of which each begins when it is first asked for."""

    def __init__(self, begin: Callable[[str], Tensor]) -> None:
        self._begin = begin

    def __missing__(self, name: str) -> Tensor:
        self[name] = made = self._begin(name)
        return made


class OpenStep(ClippedSums):
    """The running sum of a step. Nothing of it leaves before `release`.

    Noise is added at the end, in one pass that also rounds and divides by B. Counts, where the plan has them, are one
    more tensor of the step. Noise that the plan injects in parts enters with `add_noise_for`.

    Of several ranks each adds its share of the noise to its own sums; these are added up in float64 when all of them
    release.

    `sums`: those of the first part, if something else has added them up already; they are written to.
    """

    drawn = -1  # the number of the sample, which must be the same on all ranks

    def __init__(
        self, plan: StepPlan, noise: NoiseSource, tensors: Mapping[str, Tensor], layer_of: Mapping[str, int], step: int,
        *, ranks: Ranks = ALONE, memory: SumMemory | None = None, sums: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.noise, self.step, self.process = plan, noise, step, os.getpid()
        self.ranks, self._tensors, self._layer_of = ranks, tensors, layer_of
        self.std = [plan.noise[layer_of[name]] for name in tensors]
        counted = plan.rule(FollowQuantile)
        counts = None if counted is None else torch.zeros(len(plan.layers), dtype=torch.float64)
        self.extra = 0.0 if counted is None else counted.noise
        memory = memory or SumMemory()
        super().__init__(LateSums(lambda name: memory.zeros(name, tensors[name])) if sums is None else sums, counts)
        self._injected: NoiseInjection | None = None
        form = plan.injection.form if ranks.alone else InjectionForm.STEP
        if form is InjectionForm.RAW:
            self._injected = NoisePerContribution(plan, noise, tensors, self.std, step=step, layer_of=layer_of)
        elif form is not InjectionForm.STEP:
            self._injected = NoiseInShares(plan, noise, tensors, self.std, step=step)

    def add_noise_for(self, classes: Tensor) -> None:
        """Add the noise that comes with contributions of these classes, which are added next."""
        if self._injected is not None:
            self._injected.add_noise_for(classes)

    def prepare(self, part: CheckedBatch) -> CheckedBatch:
        self.add_noise_for(part.classes)
        return part

    def release(self) -> dict[str, Tensor]:
        """(clipped sum + noise) / B. `counts` is noised, too, from here on."""
        self._same_process()
        self.ranks.agree(self.step, drawn=self.drawn)
        self.sums = {name: self.sums[name] for name in self._tensors}  # in one order on all ranks
        totals, divisor = list(self.sums.values()), self.plan.batch
        if not self.ranks.alone:
            self._add_up_over_ranks(totals, self.std, range(len(totals)), divisor)
        elif self._injected is not None:
            self.noise.add_gathered_(totals, self._injected.finish(), self.std, divisor=divisor)
        else:
            self.noise.add_many_(totals, self.std, step=self.step, divisor=divisor)
        if self.counts is not None and not self.ranks.alone:
            self._add_up_over_ranks([self.counts], [self.extra], [COUNTS_TENSOR], 1.0)
        elif self.counts is not None:
            self.noise.add_(self.counts, self.extra, step=self.step, tensor=COUNTS_TENSOR)
        return self.sums

    def _add_up_over_ranks(
        self, totals: Sequence[Tensor], stds: Sequence[float], places: Sequence[int], divisor: float
    ) -> None:
        """Sums and shares of the noise in float64 over all ranks; the whole is rounded once, to the grid of S."""
        share = self.ranks.noise_share
        whole = [total.to(widest_dtype(total.device), copy=True) for total in totals]
        self.noise.add_many_(whole, [s * share for s in stds], step=self.step, tensors=places, rounded=False)
        self.ranks.add_up(whole)
        for total, added_up, std in zip(totals, whole, stds, strict=True):
            total.zero_() if std else total.copy_(added_up)
        self.noise.add_gathered_(totals, whole, stds, divisor=divisor)

    def _same_process(self) -> None:
        if os.getpid() != self.process:
            problem = "a child process releases a step of its parent: both would use the same noise"
            raise NoiseError("noise.forked-step", problem, "fork between steps, not within one")


class CorrelatedStep(OpenStep):
    """The running sum of a step whose noise follows from that of the steps before (plan/correlation.py)."""

    def __init__(self, *args: Any, window: NoiseWindow, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gathered = _zeros_for_noise(self._tensors.values())
        self.noise.add_many_(self._gathered, self.std, step=self.step, rounded=False)
        window.correlate_(self._gathered)

    def release(self) -> dict[str, Tensor]:
        self._same_process()
        self.sums = {name: self.sums[name] for name in self._tensors}
        self.noise.add_gathered_(list(self.sums.values()), self._gathered, self.std, divisor=self.plan.batch)
        return self.sums


class IntegerStep(OpenStep):
    """The running sum of a step whose noise is on a grid of integers: int64, in units of each layer's own grid.

    Of several ranks only rank 0 adds noise: shares of a discrete Gaussian do not add up to one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sums = {name: torch.zeros(p.shape, dtype=torch.int64) for name, p in self._tensors.items()}
        grids = layer_grids(self.plan)
        self.grid = {name: grids[self._layer_of[name]] for name in self._tensors}

    def release(self) -> dict[str, Tensor]:
        """(clipped sum + noise) / B: whole numbers until here."""
        self._same_process()
        self.ranks.agree(self.step, drawn=self.drawn)
        bits = [self.grid[name].bits for name in self.sums]
        if self.ranks.first:
            self.noise.add_integers_(list(self.sums.values()), bits, step=self.step, kind=self.plan.noise_kind)
        self.ranks.add_up(list(self.sums.values()))
        made = {name: total.double() * (self.grid[name].unit / self.plan.batch) for name, total in self.sums.items()}
        return {name: total.to(_sum_dtype(self._tensors[name].dtype)) for name, total in made.items()}


def own_their_storage(sums: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Whether each tensor has a sum, in memory that nothing else uses."""
    if sums.keys() != tensors.keys() or len({t.data_ptr() for t in sums.values()}) < len(sums):
        return False
    alike = all(
        t.dtype == _sum_dtype(tensors[name].dtype) and t.shape == tensors[name].shape for name, t in sums.items()
    )
    return alike and all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in sums.values())


def check_is_batch(batch: Any) -> Batch:
    if not isinstance(batch, Batch):
        problem = f"the batch is a {type(batch).__name__}"
        raise EngineError("engine.not-a-batch", problem, "pass a lamina.Batch(x, y, cls=…)")
    return batch


def parts_out_of_order_error() -> EngineError:
    problem = "a later part of a split batch came without its first part"
    remedy = "pass the parts of batch.split(k) in order, and begin again after an error"
    return EngineError("engine.parts-out-of-order", problem, remedy)


def zero_sums(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    memory = SumMemory()
    return {name: memory.zeros(name, p) for name, p in tensors.items()}


def _zeros_for_noise(tensors: Iterable[Tensor]) -> list[Tensor]:
    layout = torch.contiguous_format
    return [torch.zeros_like(t, dtype=widest_dtype(t.device), memory_format=layout) for t in tensors]


class SumMemory:
    """The memory of released sums of a small model, used again once nobody holds them: fresh pages cost more than what is
    written there. Only so much of it: a step needs memory for its activations, too, and steps of a large model are long."""

    def __init__(self, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self.keeps: set[str] = set()
        left = _MAX_KEPT_BYTES
        if sum(p.nbytes for p in tensors.values()) <= _MAX_SMALL_BYTES:
            for name, p in sorted(tensors.items(), key=lambda item: -item[1].numel()):
                if p.nbytes <= left:
                    self.keeps.add(name)
                    left -= p.nbytes
        self._kept: dict[str, tuple[torch.UntypedStorage, torch.dtype, torch.Size, tuple[int, ...]]] = {}
        self._holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 2)

    def _free(self, storage: torch.UntypedStorage) -> bool:
        """Whether neither this process (as a tensor or as the storage itself) nor another one holds it."""
        return (
            self._holders(storage._cdata) == 1
            and sys.getrefcount(storage) <= _OWN_REFERENCES
            and not storage.is_shared()
        )

    def zeros(self, name: str, p: Tensor) -> Tensor:
        """The sum of a tensor, 0."""
        wanted, kept = _sum_dtype(p.dtype), self._kept.get(name)
        if kept is not None and kept[1:3] == (wanted, p.shape) and p.is_cpu and self._free(kept[0]):
            storage, dtype, shape, stride = kept
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride).zero_()
        made = torch.zeros_like(p, dtype=wanted, memory_format=torch.contiguous_format)
        if name in self.keeps and p.numel() >= _MIN_KEPT_ELEMENTS and type(made) is Tensor and p.is_cpu:
            self._kept[name] = made.untyped_storage(), wanted, p.shape, made.stride()
        return made


_MIN_KEPT_ELEMENTS = 1 << 12  # a few pages
_MAX_SMALL_BYTES, _MAX_KEPT_BYTES = 6 << 20, 4 << 20  # of a small model; of what is kept of its sums
_OWN_REFERENCES = 3  # to a storage: `_kept`, the argument of `_free`, and that of getrefcount


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def route(
    per_sample_grads: Mapping[str, Tensor], classes: Tensor, plan: StepPlan, *, noise: NoiseSource | None,
    step: int = 0, scale: Tensor | None = None, ceiling: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Mask, clip, sum and perturb gradients that are given per contribution.

    `per_sample_grads[name]` is (P, *shape) for every tensor of which some class may move something, `classes` (P,)
    holds class indices, `scale` and `ceiling` (P,) are those of `Batch`. With a noise source the result is
    (clipped sum + noise) / B, as `Engine.backward` writes it. With `noise=None` it is the clipped sum itself, as
    `Engine.clipped_sums` returns it: not private. Plain float64 throughout, one line per rule, on purpose without the
    code that `Engine` clips with: it is the reference that tests hold `Engine` to.
    """
    layer_of = {name: i for i, layer in enumerate(plan.layers) for name in layer.parameters}
    wanted = set(trained_tensors(plan))
    if set(per_sample_grads) != wanted:
        problem = f"per_sample_grads and plan disagree about {sorted(set(per_sample_grads) ^ wanted)[:5]}"
        raise EngineError("engine.route-wrong-tensors", problem, "give exactly the tensors that the plan trains")
    classes = torch.as_tensor(classes)
    bound = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))[classes]  # (P, L)
    members = list(enumerate(classes.tolist()))
    limits = [[None if t is None else float(t[u]) for t in (scale, ceiling)] for u, _ in members]
    strict = torch.tensor([clip_norm_factor(plan, k, *limits[u]) for u, k in members], dtype=torch.float64)  # (P,)
    grads_of = {}
    for name, grads in per_sample_grads.items():
        if len(grads) != len(classes):
            problem = f"'{name}' has {len(grads)} gradients for {len(classes)} classes"
            remedy = "give one gradient and one class per contribution"
            raise EngineError("engine.gradients-wrong-length", problem, remedy)
        routed = [zero_outside_slices(plan, k, name, grads[u]) for u, k in members]
        grads_of[name] = torch.stack(routed) if routed else grads
    norm_sq = torch.zeros(bound.shape, dtype=torch.float64)
    for name, grads in grads_of.items():
        rows = grads.double().reshape(len(grads), grads.shape[1:].numel())
        taxicab = plan.noise_kind is NoiseKind.LAPLACE
        norm_sq[:, layer_of[name]] += row_taxicab_sq(rows) if taxicab else rows.square().sum(1)

    if plan.clipping is Clipping.BOX:
        bound = torch.where(bound > 0, bound * strict.unsqueeze(1), 0.0)
        factor = torch.where(norm_sq > 0, bound / norm_sq.sqrt(), torch.inf).clamp(max=1.0)
        factor = torch.where(torch.isfinite(norm_sq) & (bound > 0), factor, 0.0)
    else:
        spread = torch.tensor([s or 1.0 for s in plan.noise], dtype=torch.float64)
        whole = torch.where(bound > 0, norm_sq / spread**2, 0.0).sum(1)
        radius = torch.tensor([plan.joint(k) for k in range(len(plan.classes))], dtype=torch.float64)[classes]
        radius = radius * strict
        once = torch.where(whole > 0, radius / whole.sqrt(), torch.inf).clamp(max=1.0)
        factor = torch.where(torch.isfinite(whole).unsqueeze(1) & (bound > 0), once.unsqueeze(1), 0.0)

    clipped = {}
    for name, grads in grads_of.items():
        weight = factor[:, layer_of[name]].view(-1, *[1] * (grads.dim() - 1))
        clipped[name] = torch.where(weight > 0, grads.double() * weight, 0.0)
    sums = {name: each.sum(0) for name, each in clipped.items()}
    if noise is None:
        return sums
    if plan.bands > 1:
        problem = f"the plan correlates its noise over {plan.bands} steps, and this is one step by itself"
        remedy = "use lamina.Engine, which keeps the noise of earlier steps"
        raise EngineError("engine.route-correlated", problem, remedy)
    made = OpenStep if plan.noise_kind is NoiseKind.GAUSSIAN else IntegerStep
    opened = made(plan, noise, sums, layer_of, step)
    opened.add_noise_for(classes)
    for name, total in sums.items():
        if name in opened.grid:
            opened.sums[name].add_((clipped[name] / opened.grid[name].unit).trunc().to(torch.int64).sum(0))
        else:
            opened.sums[name].add_(total)
    released = opened.release()
    for name, total in released.items():
        if (places := unreached_ranges(plan, name)) is not None:
            places.zero_(total)
    return released


def clip_norm_factor(plan: StepPlan, k: int, scale: float | None, ceiling: float | None) -> float:
    """min(1, scale, ceiling / the largest norm of the class): what its clip norms are multiplied by; 1 if public."""
    if plan.classes[k].public:
        return 1.0
    limits = [1.0 if scale is None else scale, 1.0]
    if ceiling is not None and plan.norm(k) > 0:
        limits.append(ceiling / plan.norm(k))
    return min(limits)
