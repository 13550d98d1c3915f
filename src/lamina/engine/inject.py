"""Noise that enters a step in parts: one for every bin, slot or contribution (plan/injection.py).

Part i of a step has a place of its own in the noise stream (`NoiseSource`, part=i). Parts enter with the parts of a
batch as these come, and what is left enters at the release: how a batch is cut moves the order of additions only.

Not hardened, parts are added to the sums themselves, in their precision. Hardened, they are gathered in float64 and
the whole is rounded once, to the grid of S: the result is one rounding away from the exact sum, as with one noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lamina.engine.noise import NoiseSource, add_rounded_many_
from lamina.plan.injection import Form
from lamina.plan.slices import Range
from lamina.plan.step import StepPlan


class Injected(ABC):
    """The noise of one step on its way into `sums`, which hold what is added times `scale`."""

    def __init__(
        self,
        plan: StepPlan,
        source: NoiseSource,
        sums: Mapping[str, Tensor],
        stds: Sequence[float],
        *,
        step: int,
        scale: float,
    ) -> None:
        self.plan, self.source, self.step = plan, source, step
        self.names, self.sums, self.stds = list(sums), list(sums.values()), list(stds)
        self.into = (
            [torch.zeros_like(t, dtype=torch.float64) for t in self.sums] if source.hardened else self.sums
        )
        self.scale = 1.0 if source.hardened else scale
        self.private = torch.tensor([not entry.public for entry in plan.classes])
        self.taken = 0  # parts that are in

    @abstractmethod
    def bring(self, classes: Tensor) -> None:
        """A part of the batch has contributions of these classes."""

    def finish(self) -> None:
        """Nobody else comes."""
        if self.source.hardened:
            add_rounded_many_(self.sums, self.into, self.stds)

    def _draw(self, outs: Sequence[Tensor], places: Sequence[int], share: float) -> None:
        stds = [self.stds[i] * self.scale * share for i in places]
        self.source.add_many_(outs, stds, step=self.step, tensors=places, part=self.taken, rounded=False)


class Shared(Injected):
    """`parts` equal shares N(0, S²/parts): one for every part of the batch, or for every private contribution in it.

    All of them enter, whoever was sampled; beyond the last, nobody brings any. Part 0 is there from the start.
    """

    def __init__(self, *args: object, taken: int, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.taken, self._here = taken, 0
        self._each = self.plan.injection.form is Form.SHARES

    def bring(self, classes: Tensor) -> None:
        self._here += int(self.private[classes].sum()) if self._each else 1
        self._upto(min(self._here, self.plan.injection.parts))

    def finish(self) -> None:
        self._upto(self.plan.injection.parts)
        super().finish()

    def _upto(self, parts: int) -> None:
        every = range(len(self.sums))
        while self.taken < parts:
            self._draw(self.into, every, 1.0 / math.sqrt(self.plan.injection.parts))
            self.taken += 1


class Raw(Injected):
    """N(0, S²) for every private contribution in the batch, where its class reaches; nothing for an empty batch.

    A contribution whose examples all have weight 0 brings its noise too: the guarantee is about a gradient that is
    replaced by 0, and whether it is 0 must not show.
    """

    def __init__(self, *args: object, layer_of: Mapping[str, int], **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._layer_of = layer_of
        self._reach: dict[int, tuple[list[int], dict[int, tuple[int, tuple[Range, ...]]]]] = {}

    def bring(self, classes: Tensor) -> None:
        for k in classes[self.private[classes]].tolist():
            whole, partly = self._reached(k)
            self._draw([self.into[i] for i in whole], whole, 1.0)
            scratch = [torch.zeros_like(self.into[i]) for i in partly]
            self._draw(scratch, list(partly), 1.0)
            for made, (i, (axis, ranges)) in zip(scratch, partly.items(), strict=True):
                for first, stop in ranges:
                    place = (axis, first, stop - first)
                    self.into[i].narrow(*place).add_(made.narrow(*place))
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
