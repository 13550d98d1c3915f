"""A step that is being taken: its noise and its sums, until both are released together."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.engine.batch import Batch
from lamina.engine.examine import Examined
from lamina.engine.inject import Injected, Raw, Shared
from lamina.engine.noise import NoiseSource
from lamina.errors import EngineError, NoiseError
from lamina.plan.injection import Form
from lamina.plan.rules import FollowQuantile
from lamina.plan.step import StepPlan

COUNTS = 1 << 62  # the counts' place in the noise stream of a step: no model has so many tensors


class Sums:
    """Clipped gradients times `scale`, added up; and counts of unclipped contributions where they are asked for."""

    def __init__(self, sums: dict[str, Tensor], scale: float = 1.0, counts: Tensor | None = None) -> None:
        self.sums, self.scale, self.counts = sums, scale, counts

    def admit(self, part: Examined) -> Examined:
        """The part as it is to be differentiated."""
        return part


class OpenStep(Sums):
    """The running sum of a step. Nothing of it leaves before `release`.

    Unhardened, the sums *start* as noise S/B·z and clipped gradients are added times 1/B: no pass
    over the parameters is spent on zeroing, scaling or adding. Hardened, the exact sum is noised and
    rounded at the end, in float64. Counts, where the plan has them, are one more tensor of the step.

    Noise that the plan lets in by parts comes with whom `bring` names (inject.py), the counts' once as ever.
    """

    def __init__(
        self,
        plan: StepPlan,
        noise: NoiseSource,
        tensors: Mapping[str, Tensor],
        layer_of: Mapping[str, int],
        step: int,
    ) -> None:
        self.plan, self.noise, self.step, self.process = plan, noise, step, os.getpid()
        self.std = [plan.noise[layer_of[name]] for name in tensors]
        counted = plan.rule(FollowQuantile)
        counts = None if counted is None else torch.zeros(len(plan.layers), dtype=torch.float64)
        self.extra = 0.0 if counted is None else counted.noise
        self._ready: Tensor | None = None  # noise for the counts, added once: parts then add up exactly
        form, parts = plan.injection.form, plan.injection.parts
        filled = not noise.hardened and form is not Form.RAW
        scale = 1.0 if noise.hardened else 1.0 / plan.batch
        super().__init__(_empty(tensors) if filled else zeros(tensors), scale, counts)
        if filled:
            self._ready = None if counts is None else torch.empty_like(counts)
            share = scale / math.sqrt(parts)
            outs, stds, places = self._with(self._ready, [s * share for s in self.std])
            noise.fill_many_(outs, stds, step=step, tensors=places)
        self._injected: Injected | None = None
        if form is Form.RAW:
            self._injected = Raw(plan, noise, self.sums, self.std, step=step, scale=scale, layer_of=layer_of)
        elif form is not Form.STEP:
            self._injected = Shared(
                plan, noise, self.sums, self.std, step=step, scale=scale, taken=int(filled)
            )

    def _with(self, counts: Tensor | None, stds: list[float]) -> tuple[list[Tensor], list[float], list[int]]:
        """Sums and, as one more tensor in a place of its own, counts."""
        outs, places = list(self.sums.values()), list(range(len(self.sums)))
        if counts is None:
            return outs, stds, places
        return [*outs, counts], [*stds, self.extra], [*places, COUNTS]

    def bring(self, classes: Tensor) -> None:
        """Contributions of these classes are added next: noise that comes with them enters now."""
        if self._injected is not None:
            self._injected.bring(classes)

    def admit(self, part: Examined) -> Examined:
        self.bring(part.classes)
        return part

    def release(self) -> dict[str, Tensor]:
        """(clipped sum + noise) / B. `counts` is noised, too, from here on."""
        self._same_process()
        if self._injected is not None:
            self._injected.finish()
        if self.noise.hardened:
            outs, stds, places = self._with(self.counts, self.std)
            late = 0 if self._injected is None else len(self.sums)  # those of the sums are in already
            self.noise.add_many_(outs[late:], stds[late:], step=self.step, tensors=places[late:])
            for total in self.sums.values():
                total.div_(self.plan.batch)
        elif self.counts is not None and self._ready is not None:
            self.counts += self._ready
            self._ready = None
        return self.sums

    def _same_process(self) -> None:
        if os.getpid() != self.process:
            raise NoiseError(
                "noise.step-opened-parent",
                "a step that was opened in a parent process is released in its child: both would use one noise",
                "fork between steps, not within one",
            )


def batch_given(batch: Any) -> Batch:
    if not isinstance(batch, Batch):
        raise EngineError(
            "engine.batch", f"the batch is a {type(batch).__name__}", "pass a lamina.Batch(x, y, cls=…)"
        )
    return batch


def out_of_order() -> EngineError:
    return EngineError(
        "engine.later-part-split",
        "a later part of a split batch came without its first part",
        "pass the parts of batch.split(k) in order, and begin again after an error",
    )


def zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p, dtype=_wide(p.dtype), memory_format=torch.contiguous_format)
        for name, p in tensors.items()
    }


def _empty(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.empty_like(p, dtype=_wide(p.dtype), memory_format=torch.contiguous_format)
        for name, p in tensors.items()
    }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
