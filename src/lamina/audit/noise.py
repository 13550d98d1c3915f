"""Reading S: steps without a contribution are noise alone, and say how much there is.

N draws of N(0, S²): Σ z²/S² is chi-square with N degrees of freedom, so that

    S in [ √(Σz²/χ²_N(1-α/2)),  √(Σz²/χ²_N(α/2)) ]      with probability 1-α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import chi2
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.audit.regions import Region, regions
from lamina.audit.subject import COUNTS, Subject
from lamina.engine import Batch
from lamina.errors import EngineError
from lamina.plan.rules import FollowQuantile

_MOST = 128  # steps


@dataclass(frozen=True, kw_only=True)
class Level:
    """The noise of one layer, or of a part that some class may move by itself: what the plan says, and what was seen
    with its confidence limits. `index`: of the layer in the plan, None for the counts; `classes`: who may move it.
    """

    layer: str
    index: int | None
    classes: frozenset[int]
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
    """The noise of every layer (of a layer with slices: of every part that the plan tells apart) from empty steps
    under different seeds, at least `draws` numbers of each; last that of the counts, if the plan has them.

    Raw noise: of steps with an empty contribution of each private class, per contribution.

    `risk` is the probability that a sound step is flagged, over all layers together. Of `batch` only the
    kinds of its tensors are used.
    """
    plan = subject.plan
    private = [k for k, entry in enumerate(plan.classes) if not entry.public and plan.injection.raw]
    nobody = _silent(batch, private)
    parts = [
        r for r in regions(plan, dict(subject.model.named_parameters())) if r.classes or r.places is None
    ]
    smallest = min(part.size for part in parts)
    rule = plan.rule(FollowQuantile)
    squares, counts = [0.0] * (len(parts) + 1), [0] * (len(parts) + 1)
    for i in range(max(2, min(_MOST, -(-draws // smallest)))):
        seen = subject.release(nobody, seed=seed + i)
        for index, part in enumerate(parts):
            if counts[index] < draws or i < 2:
                squares[index] += part.square(seen)
                counts[index] += part.size
        if rule is not None and COUNTS in seen:
            squares[-1] += float(seen[COUNTS].square().sum())
            counts[-1] += len(seen[COUNTS])
    alpha = risk / (len(parts) + (rule is not None))
    made = [
        _level(part, plan.noise[part.layer], total, n, alpha, _brought(part, private) if private else 1)
        for part, total, n in zip(parts, squares, counts, strict=False)
    ]
    if rule is not None:
        made.append(_level(None, rule.noise, squares[-1], counts[-1], alpha))
    return tuple(made)


def _silent(batch: Batch, classes: list[int]) -> Batch:
    """Nobody, so that a step is noise alone; where noise comes with contributions: an empty one of each class."""
    x, y = pytree.tree_map(lambda t: t[: len(classes)] if isinstance(t, Tensor) else t, (batch.x, batch.y))
    if len(classes) > batch.examples:
        raise EngineError(
            "audit.audit-got-examples",
            f"the audit got {batch.examples} examples",
            f"give {len(classes)} or more",
        )
    return Batch(x, y, cls=torch.tensor(classes, dtype=torch.long), weight=torch.zeros(len(classes)))


def _brought(part: Region, classes: list[int]) -> int:
    """How many of the empty contributions bring noise there."""
    return len(part.classes.intersection(classes))


def _level(part: Region | None, planned: float, total: float, n: int, alpha: float, times: int = 1) -> Level:
    low = high = measured = 0.0
    planned, total = (planned, total / times) if times else (0.0, total)
    if n:  # otherwise the plan pays for counts that never came
        low, high = math.sqrt(total / chi2.isf(alpha / 2, n)), math.sqrt(total / chi2.ppf(alpha / 2, n))
        measured = math.sqrt(total / n)
    return Level(
        layer=COUNTS if part is None else part.name,
        index=None if part is None else part.layer,
        classes=frozenset() if part is None else part.classes,
        planned=planned,
        measured=measured,
        low=low,
        high=high,
    )
