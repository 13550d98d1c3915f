"""Gaussian noise that is independent from step to step: once per step, in parts, or per contribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.engine.distributed import Ranks
from lamina.engine.noise.mechanism import COUNTS, NoiseMechanism, StepNoise, sum_dtype
from lamina.engine.noise.source import NoiseSource, widest_dtype
from lamina.plan.rules import FollowQuantile, InjectionForm
from lamina.plan.selection import Range
from lamina.plan.step_plan import StepPlan

COUNTS_PLACE = 1 << 62  # in the noise stream of a step: no model has so many tensors


class GaussianNoise(NoiseMechanism):
    """N(0, S²) for every layer: once per step, in bins, or in slots. All three have the same law."""

    def open(self, applied: StepPlan, source: NoiseSource, step: int) -> StepNoise:
        given = applied, source, step, self.tensors, self.layer_of
        if self.ranks.alone and applied.injection.form is not InjectionForm.STEP:
            return NoiseInShares(*given)
        return GaussianStep(*given, ranks=self.ranks)


class RawNoise(NoiseMechanism):
    """N(0, S²) for every private contribution of the batch."""

    def open(self, applied: StepPlan, source: NoiseSource, step: int) -> StepNoise:
        return NoisePerContribution(applied, source, step, self.tensors, self.layer_of)


class GaussianStep(StepNoise):
    """Noise that is added at the end, in one pass that also rounds and divides by B.

    Several ranks each add a share of it, in float64; the whole is rounded once, to the grid of S.
    """

    def __init__(
        self, plan: StepPlan, source: NoiseSource, step: int, tensors: Mapping[str, Tensor],
        layer_of: Mapping[str, int], *, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.source, self.step, self.tensors = plan, source, step, tensors
        self.names = list(tensors)
        self.std = {name: plan.noise[layer_of[name]] for name in tensors}
        self.place = {name: i for i, name in enumerate(tensors)}
        self.divisor = dict.fromkeys(tensors, plan.batch)
        self._share = 1.0 if ranks is None else ranks.noise_share
        if (counted := plan.rule(FollowQuantile)) is not None:
            self.std[COUNTS], self.place[COUNTS], self.divisor[COUNTS] = counted.noise, COUNTS_PLACE, 1.0

    def release(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: sums[name] for name in self.names}
        stds = [self.std[name] for name in found]
        self.source.add_many_(list(found.values()), stds, step=self.step, divisor=self.plan.batch)
        return found | self._release_counts(sums)

    def _release_counts(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if COUNTS not in sums:
            return {}
        self.source.add_(sums[COUNTS], self.std[COUNTS], step=self.step, tensor=COUNTS_PLACE)
        return {COUNTS: sums[COUNTS]}

    def share(self, names: Sequence[str], totals: Sequence[Tensor]) -> list[Tensor]:
        wide = [total.to(widest_dtype(total.device)) for total in totals]
        stds, places = [self.std[name] * self._share for name in names], [self.place[name] for name in names]
        self.source.add_many_(wide, stds, step=self.step, tensors=places, rounded=False)
        return wide

    def finish(self, names: Sequence[str], totals: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for name, total in zip(names, totals, strict=True):
            dtype = total.dtype if name == COUNTS else sum_dtype(self.tensors[name].dtype)
            out = torch.zeros(total.shape, dtype=dtype, device=total.device)
            if not self.std[name]:
                out.copy_(total)
            self.source.add_gathered_([out], [total], [self.std[name]], divisor=self.divisor[name])
            found.append(out)
        return found


def zeros_for_noise(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """A sum for the noise of each tensor, in float64 where there is one."""
    layout = torch.contiguous_format
    return [torch.zeros_like(t, dtype=widest_dtype(t.device), memory_format=layout) for t in tensors.values()]


class GatheredNoise(GaussianStep):
    """Noise that is gathered in float64 while the step is open, and added to the sums at the end.

    It enters in parts. Part i of a step has a place of its own in the noise stream (`NoiseSource`, part=i), so how a
    batch is cut moves the order of additions only. The whole is rounded once, to the grid of S: the result is one
    rounding away from the exact sum, as with one noise.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gathered = zeros_for_noise(self.tensors)
        self.private = torch.tensor([not entry.public for entry in self.plan.classes])
        self.taken = 0  # parts that are in

    def gather_rest(self) -> None:
        """Every contribution of the step was announced."""

    def release(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.gather_rest()
        found = {name: sums[name] for name in self.names}
        stds = [self.std[name] for name in found]
        self.source.add_gathered_(list(found.values()), self.gathered, stds, divisor=self.plan.batch)
        return found | self._release_counts(sums)

    def _draw(self, outs: Sequence[Tensor], places: Sequence[int], share: float) -> None:
        stds = [self.std[self.names[i]] * share for i in places]
        self.source.add_many_(outs, stds, step=self.step, tensors=places, part=self.taken, rounded=False)


class NoiseInShares(GatheredNoise):
    """`parts` equal shares N(0, S²/parts): one for every part of the batch, or for every private contribution in it.

    All of them enter, whoever was sampled, and no more.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._here = 0
        self._each = self.plan.injection.form is InjectionForm.SHARES

    def saw(self, classes: Tensor) -> None:
        self._here += int(self.private[classes].sum()) if self._each else 1
        self._upto(min(self._here, self.plan.injection.parts))

    def gather_rest(self) -> None:
        self._upto(self.plan.injection.parts)

    def _upto(self, parts: int) -> None:
        every = range(len(self.gathered))
        while self.taken < parts:
            self._draw(self.gathered, every, 1.0 / math.sqrt(self.plan.injection.parts))
            self.taken += 1


class NoisePerContribution(GatheredNoise):
    """N(0, S²) for every private contribution in the batch, where its class reaches; nothing for an empty batch.

    A contribution whose examples all have weight 0 adds its noise too: the guarantee is about a gradient that is
    replaced by 0, and whether it is 0 must not show.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._layer = {name: i for i, layer in enumerate(self.plan.layers) for name in layer.parameters}
        self._reach: dict[int, tuple[list[int], dict[int, tuple[int, tuple[Range, ...]]]]] = {}

    def saw(self, classes: Tensor) -> None:
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
                if not self.plan.clip[k][self._layer[name]] > 0:
                    continue
                if (part := self.plan.slice(k, name)) is None:
                    whole.append(i)
                elif part.ranges:
                    partly[i] = part.axis, part.ranges
            self._reach[k] = whole, partly
        return self._reach[k]
