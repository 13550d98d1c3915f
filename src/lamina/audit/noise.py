"""Reading S: steps without a contribution are noise alone, and say how much there is.

N draws of N(0, S²): Σ z²/S² is chi-square with N degrees of freedom, so that

    S in [ √(Σz²/χ²_N(1-α/2)),  √(Σz²/χ²_N(α/2)) ]      with probability 1-α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import chi2
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.audit.subject import COUNTS, Subject
from lamina.engine import Batch
from lamina.plan.rules import FollowQuantile

_MOST = 128  # steps


@dataclass(frozen=True, kw_only=True)
class Level:
    """The noise of one layer: what the plan says, and what was seen with its confidence limits."""

    layer: str
    planned: float
    measured: float
    low: float
    high: float

    @property
    def as_planned(self) -> bool:
        return self.low <= self.planned <= self.high


def noise_levels(
    subject: Subject, batch: Batch, *, draws: int = 4096, risk: float = 1e-9, seed: int = 1
) -> tuple[Level, ...]:
    """The noise of every layer from empty steps under different seeds, at least `draws` numbers of each; last that of
    the counts, if the plan has them.

    `risk` is the probability that a sound step is flagged, over all layers together. Of `batch` only the
    kinds of its tensors are used.
    """
    plan = subject.plan
    nobody = Batch(*pytree.tree_map(lambda t: t[:0] if isinstance(t, Tensor) else t, (batch.x, batch.y)))
    smallest = min(layer.size for layer in plan.layers)
    rule = plan.rule(FollowQuantile)
    squares, counts = [0.0] * (len(plan.layers) + 1), [0] * (len(plan.layers) + 1)
    for i in range(max(2, min(_MOST, -(-draws // smallest)))):
        seen = subject.release(nobody, seed=seed + i)
        for index, layer in enumerate(plan.layers):
            if counts[index] >= draws and i >= 2:
                continue
            squares[index] += sum(float(seen[n].square().sum()) for n in layer.parameters if n in seen)
            counts[index] += layer.size
        if rule is not None and COUNTS in seen:
            squares[-1] += float(seen[COUNTS].square().sum())
            counts[-1] += len(seen[COUNTS])
    names, stds = [layer.name for layer in plan.layers], list(plan.noise)
    if rule is not None:
        names.append(COUNTS)
        stds.append(rule.noise)
    alpha = risk / len(names)
    levels = []
    for name, planned, total, n in zip(names, stds, squares, counts, strict=False):
        if n == 0:  # the plan pays for counts that never came
            levels.append(Level(layer=name, planned=planned, measured=0.0, low=0.0, high=0.0))
            continue
        low, high = math.sqrt(total / chi2.isf(alpha / 2, n)), math.sqrt(total / chi2.ppf(alpha / 2, n))
        levels.append(Level(layer=name, planned=planned, measured=math.sqrt(total / n), low=low, high=high))
    return tuple(levels)
