"""`Clipper`: how the contributions of one applied plan are bounded. One class for each form of clipping."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from lamina.engine.batch import Batch
from lamina.engine.execute.collectors import BoxCollector, Collector, JointCollector
from lamina.engine.execute.sums import Sums
from lamina.engine.guards.checked_batch import CheckedBatch
from lamina.engine.slices import TensorMasks
from lamina.plan.step_plan import Clipping, StepPlan


class Clipper(ABC):
    """C (K × L) and the joint radii (K) of a plan. An adaptive plan that moved has another clipper."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.clip = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))
        self.radius = torch.tensor([plan.joint(k) for k in range(len(plan.classes))], dtype=torch.float64)
        owed = torch.tensor([not entry.public for entry in plan.classes]).unsqueeze(1)
        self.counted = (self.clip > 0) & owed
        self.norm = torch.tensor([plan.norm(k) for k in range(len(plan.classes))], dtype=torch.float64)

    def reached(self, classes: Tensor) -> list[bool]:
        """Return the layers that a contribution of these classes may change."""
        mine = self.clip if len(self.clip) == 1 and len(classes) else self.clip[classes]
        reached: list[bool] = (mine > 0).any(0).tolist()
        return reached

    def limits(self, part: CheckedBatch | Batch) -> tuple[Tensor, Tensor]:
        """Bounds of a box (P, L) and of a joint clip (P,), for the contributions of a part."""
        classes = part.classes if isinstance(part, CheckedBatch) else cast(Tensor, part.cls)
        bounds, radius, stricter = self.clip[classes], self.radius[classes], self._stricter(classes, part)
        if stricter is None:
            return bounds, radius
        return torch.where(bounds > 0, bounds * stricter.unsqueeze(1), 0.0), radius * stricter

    def prepare(self, part: CheckedBatch, sums: Sums) -> CheckedBatch:
        """The part as it is to be differentiated."""
        return part

    @abstractmethod
    def collector(self, part: CheckedBatch, sums: Sums, reached: Sequence[bool], masks: TensorMasks) -> Collector:
        """What clips the gradients of a part and adds them to sums."""

    def settle(self, sums: Sums) -> None:  # noqa: B027  (only the elementwise clip waits for all of a step)
        """After the last part of a step, before the noise."""

    def _stricter(self, classes: Tensor, part: CheckedBatch | Batch) -> Tensor | None:
        """(P,) what thresholds of the class are multiplied by: min(scale, ceiling/‖C[k]‖); a public class by 1."""
        if part.scale is None and part.ceiling is None:
            return None
        norm = self.norm[classes]
        factor = torch.ones_like(norm) if part.scale is None else part.scale.clone()
        if part.ceiling is not None:
            factor = torch.minimum(factor, part.ceiling / norm)
        return torch.where(torch.isinf(norm), 1.0, factor)


class BoxClipper(Clipper):
    """Each layer by its own threshold."""

    def collector(self, part: CheckedBatch, sums: Sums, reached: Sequence[bool], masks: TensorMasks) -> Collector:
        counted = None
        if sums.counts is not None:
            counted = self.counted[part.classes] & nonempty_contributions(part).unsqueeze(1)
        return BoxCollector(part, reached, sums, masks, bounds=self.limits(part)[0], counted=counted)


class JointClipper(Clipper):
    """All layers by one threshold."""

    def collector(self, part: CheckedBatch, sums: Sums, reached: Sequence[bool], masks: TensorMasks) -> Collector:
        reach, radius = self.clip[part.classes] > 0, self.limits(part)[1]
        return JointCollector(part, reached, sums, masks, reach=reach, noise=self.plan.noise, radius=radius)


class ElementwiseClipper(Clipper):
    """The mean gradient of the batch, every entry of it clamped to ±c_l: algorithm 1 of the LADP paper.

    Nothing here bounds a single contribution: one of them can turn every entry of the mean from -c_l to +c_l, a move of
    2·c_l·√d_l. That is what such a plan holds as C, and what its true ε is computed from (allocate/paper.py).
    """

    def prepare(self, part: CheckedBatch, sums: Sums) -> CheckedBatch:
        present = part.weights > 0
        sums.examples += int(present.sum())
        return dataclasses.replace(part, weights=present.to(part.weights.dtype))

    def collector(self, part: CheckedBatch, sums: Sums, reached: Sequence[bool], masks: TensorMasks) -> Collector:
        bounds = torch.where(self.clip[part.classes] > 0, torch.inf, 0.0)
        return BoxCollector(part, reached, sums, masks, bounds=bounds)

    def settle(self, sums: Sums) -> None:
        plan = self.plan
        row = next(row for row, entry in zip(plan.clip, plan.classes, strict=True) if not entry.public)
        for c, layer in zip(row, plan.layers, strict=True):
            bound = c / (2.0 * math.sqrt(layer.size))
            for name in layer.parameters:
                if name in sums.tensors:
                    sums[name].div_(max(1, sums.examples)).clamp_(-bound, bound)


_CLIPPERS: Mapping[Clipping, type[Clipper]] = {
    Clipping.BOX: BoxClipper,
    Clipping.JOINT: JointClipper,
    Clipping.ELEMENTWISE: ElementwiseClipper,
}


def clipper_of(plan: StepPlan) -> Clipper:
    """The clipper of an applied plan."""
    return _CLIPPERS[plan.clipping](plan)


def nonempty_contributions(part: CheckedBatch) -> Tensor:
    """(P,) whether a contribution has any example of weight > 0: an empty one counts nowhere."""
    present = torch.zeros(part.layout.units, dtype=torch.bool)
    owner = part.layout.owner
    present[owner[owner >= 0]] = True
    return present
