"""Layered adaptive DP as its paper prints it: kept to be measured, not to be used.

    G = mean gradient of the batch;   every entry of layer l clamped to ±c_l;   N(0, S_l²) added to every entry

Nothing here bounds a single contribution: one of them can turn every entry of the mean from -c_l to +c_l, a move of
2·c_l·√d_l. That is what such a plan holds as C, and what its true ε is computed from.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lamina.engine.execute.step import ClippedSums, OpenStep, zero_sums
from lamina.engine.guards.safety_checks import CheckedBatch
from lamina.errors import EngineError
from lamina.plan.step_plan import Clipping, StepPlan


class ReproductionWarning(UserWarning):
    """A plan that reproduces a paper, whose claim does not hold."""


def warn_if_reproduction(plan: StepPlan) -> None:
    """Warn, before anything is trained, that a plan which reproduces a paper is less private than it claims."""
    private = [k for k, entry in enumerate(plan.classes) if not entry.public]
    if plan.clipping is Clipping.ELEMENTWISE and len(private) != 1:
        problem = f"elementwise clipping clamps the batch as a whole, and the plan has {len(private)} private classes"
        raise EngineError("engine.elementwise-needs-one-class", problem, "give the plan one private class")
    if not plan.claimed:
        return
    said = "; ".join(
        f"class '{plan.classes[k].name}': ε = {plan.claimed[k]:.4g} is claimed, ε = {plan.epsilon(k):.4g} is true"
        for k in private
    )
    text = f"allocation '{plan.allocation}' reproduces a paper and is less private than that claims. {said}"
    warnings.warn(text, ReproductionWarning, stacklevel=3)


class UnclippedSums(ClippedSums):
    """Gradients of every example, added up without any bound; `mean` clamps their mean."""

    def __init__(self, plan: StepPlan, tensors: Mapping[str, Tensor], layer_of: Mapping[str, int]) -> None:
        super().__init__(zero_sums(tensors))
        self.examples = 0
        row = next(row for row, entry in zip(plan.clip, plan.classes, strict=True) if not entry.public)
        bound = [c / (2.0 * math.sqrt(layer.size)) for c, layer in zip(row, plan.layers, strict=True)]
        self.bound = {name: bound[layer_of[name]] for name in tensors}

    def prepare(self, part: CheckedBatch) -> CheckedBatch:
        present = part.weights > 0
        self.examples += int(present.sum())
        return dataclasses.replace(part, weights=present.to(part.weights.dtype))

    def mean(self) -> dict[str, Tensor]:
        for name, total in self.sums.items():
            total.div_(max(1, self.examples)).clamp_(-self.bound[name], self.bound[name])
        return self.sums


class PaperStep(OpenStep):
    """A step as the paper prints it: noise is added after the clamp, at the release."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.ranks.alone  # refuse_unsharded
        self.unclipped = UnclippedSums(self.plan, self._tensors, self._layer_of)
        self.sums = self.unclipped.sums

    def prepare(self, part: CheckedBatch) -> CheckedBatch:
        return self.unclipped.prepare(part)

    def release(self) -> dict[str, Tensor]:
        """The clamped mean + noise; B = 1."""
        self._same_process()
        mean = self.unclipped.mean()
        self.noise.add_many_(list(mean.values()), self.std, step=self.step)
        return mean
