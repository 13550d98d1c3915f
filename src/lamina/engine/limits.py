"""`Limits`: the thresholds in force, as tensors, and the collector that applies them to a part of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.engine.collect import BoxCollector, Collector, JointCollector
from lamina.engine.examine import Examined
from lamina.engine.masks import ALL_OPEN, Openings
from lamina.engine.open_step import Sums
from lamina.plan.step import Clipping, StepPlan


class Limits:
    """C (K × L) and the joint radii (K) of one plan. Made again when an adaptive plan has moved."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.clip = torch.tensor(plan.clip, dtype=torch.float64).view(len(plan.classes), len(plan.layers))
        self.radius = torch.tensor([plan.joint(k) for k in range(len(plan.classes))], dtype=torch.float64)
        owed = torch.tensor([not entry.public for entry in plan.classes]).unsqueeze(1)
        self.counted = (self.clip > 0) & owed
        self.norm = torch.tensor([plan.norm(k) for k in range(len(plan.classes))], dtype=torch.float64)

    def reached(self, part: Examined) -> list[bool]:
        """The layers that some contribution of the part may move."""
        return [bool(r) for r in (self.clip[part.classes] > 0).any(0)]

    def collector(
        self, part: Examined, into: Sums, reached: Sequence[bool], openings: Openings = ALL_OPEN
    ) -> Collector:
        bounds, scale = self.clip[part.classes], into.scale  # (P, L)
        stricter = self._stricter(part)
        start = part.graph, part.layouts, reached, into.sums, openings
        if self.plan.clipping is Clipping.JOINT:
            radius = self.radius[part.classes]
            radius = radius if stricter is None else radius * stricter
            return JointCollector(*start, reach=bounds > 0, noise=self.plan.noise, radius=radius, scale=scale)
        if self.plan.clipping is Clipping.ELEMENTWISE:  # bounded as a whole, when it is released
            return BoxCollector(*start, bounds=torch.where(bounds > 0, torch.inf, 0.0), scale=scale)
        bounds = bounds if stricter is None else torch.where(bounds > 0, bounds * stricter.unsqueeze(1), 0.0)
        counted = None if into.counts is None else self.counted[part.classes] & present(part).unsqueeze(1)
        return BoxCollector(*start, bounds=bounds, scale=scale, counts=into.counts, counted=counted)

    def _stricter(self, part: Examined) -> Tensor | None:
        """(P,) what thresholds of the class are multiplied by: min(scale, ceiling/‖C[k]‖); a public class by 1."""
        if part.scale is None and part.ceiling is None:
            return None
        norm = self.norm[part.classes]
        factor = torch.ones_like(norm) if part.scale is None else part.scale.clone()
        if part.ceiling is not None:
            factor = torch.minimum(factor, part.ceiling / norm)
        return torch.where(torch.isinf(norm), 1.0, factor)


def present(part: Examined) -> Tensor:
    """(P,) whether a contribution has any example of weight > 0: an empty slot is nobody, and counts nowhere."""
    here = torch.zeros(part.layout.units, dtype=torch.bool)
    owner = part.layout.owner
    here[owner[owner >= 0]] = True
    return here
