"""The paired step: one step with a canary and one without, under the same noise. Their difference is exact.

    D_l = B · (release with the canary − release without it)_l            the noise cancels
    realised sensitivity = ‖( D_l / S_l )_l‖   to be compared with   1/sigma_k = √Σ_l (C[k,l]/S_l)²

A step that also releases noised counts moves these, too: they are further coordinates, D/σ_b against ½/σ_b each.

"Without" has two forms. `slot` keeps the canary's rows with weight 0: every shape and dropout mask stays as it
is, so that nothing but the canary can differ. `absent` takes the rows away: that is what adding or removing a
contribution means, and it also sees steps that depend on how many were sampled; it needs a model without dropout.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.audit.subject import COUNTS, Subject
from lamina.engine import Batch
from lamina.errors import EngineError
from lamina.plan.rules import FollowQuantile
from lamina.plan.step import Clipping, StepPlan

QUIET = 2.0**-20
TOLERANCE = 1e-6


class Without(enum.Enum):
    """What stands in the canary's place."""

    SLOT = "slot"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What one contribution of class `cls` moved, in units of the noise.

    sensitivity  ‖(D_l/S_l)_l‖, infinite where something not finite or not noised was released
    bound        1/sigma_k of its class
    per_layer    ‖D_l‖/S_l for every layer of the plan
    limits       what the plan allows there: C/S (box), the bound (joint), 0 outside the class's band
    counts       how far each noised count moved, in units of its noise; empty if the step releases none
    rounding     an estimate of the floating-point error of `sensitivity`
    """

    cls: int
    sensitivity: float
    bound: float
    per_layer: tuple[float, ...]
    limits: tuple[float, ...]
    rounding: float
    counts: tuple[float, ...] = ()
    count_limits: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """sensitivity / bound: at most 1 in a sound step."""
        if self.sensitivity == 0:
            return 0.0
        return self.sensitivity / self.bound if self.bound > 0 else math.inf

    @property
    def sound(self) -> bool:
        """Whether every layer, and all of them together, stayed within what the plan allows."""
        pairs = [(self.sensitivity, self.bound), *zip(self.per_layer, self.limits, strict=True)]
        pairs += zip(self.counts, self.count_limits, strict=True)
        return all(found <= limit * (1 + TOLERANCE) + self.rounding for found, limit in pairs)

    @property
    def strays(self) -> tuple[int, ...]:
        """Layers outside the class's band that moved by more than rounding: none in a sound step.

        Rounding, because the sums of others are float32. Beside empty slots nothing moves to the last bit.
        """
        pairs = zip(self.per_layer, self.limits, strict=True)
        return tuple(i for i, (found, limit) in enumerate(pairs) if limit == 0 and found > self.rounding)


def paired_step(
    subject: Subject,
    batch: Batch,
    unit: int,
    *,
    without: Without | str = Without.SLOT,
    seed: int = 0,
    noise: float = QUIET,
) -> Paired:
    """The realised sensitivity of contribution `unit` of the batch.

    `noise` turns the noise of both steps down, by a power of two: what cancels then loses no digits.
    """
    cls = int(cast(Tensor, batch.cls)[unit])
    other = emptied(batch, unit) if Without(without) is Without.SLOT else removed(batch, unit)
    a = subject.release(batch, seed=seed, noise=noise)
    b = subject.release(other, seed=seed, noise=noise)
    plan = subject.plan
    moved = {name: a[name] - b[name] for name in _same_names(a, b)}
    per_layer, floor = whitened(plan, moved), _rounding(subject, a, b)
    counts, limits = _counts(plan, cls, moved)
    if subject.hardened:  # each release is rounded to a grid of at most S/2^8
        floor = math.hypot(floor, noise * 2.0**-8 * math.sqrt(sum(layer.size + 1 for layer in plan.layers)))
    return Paired(
        cls=cls,
        sensitivity=math.hypot(*per_layer, *counts),
        bound=math.hypot(plan.joint(cls), plan.bits(cls)),
        per_layer=per_layer,
        limits=_limits(plan, cls),
        rounding=floor,
        counts=counts,
        count_limits=limits,
    )


def whitened(plan: StepPlan, moved: Mapping[str, Tensor]) -> tuple[float, ...]:
    """‖D_l‖/S_l by layer. Infinite where it is not finite, or where D ≠ 0 meets S = 0."""
    found = []
    for layer, s in zip(plan.layers, plan.noise, strict=True):
        norm = math.hypot(*(float(moved[name].norm()) for name in layer.parameters if name in moved), 0.0)
        if norm == 0:
            found.append(0.0)
        else:
            found.append(norm / s if math.isfinite(norm) and s > 0 else math.inf)
    return tuple(found)


def _counts(
    plan: StepPlan, cls: int, moved: Mapping[str, Tensor]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How far the counts moved and might: infinitely far where the plan pays for none, or they are not finite."""
    if COUNTS not in moved:
        return (), ()
    rule = plan.rule(FollowQuantile)
    std = 0.0 if rule is None else rule.noise
    found = [abs(float(d)) for d in moved[COUNTS]]
    limits = [
        0.5 / std if std > 0 and c > 0 and not plan.classes[cls].public else 0.0 for c in plan.clip[cls]
    ]
    return tuple(0.0 if d == 0 else d / std if d < math.inf and std > 0 else math.inf for d in found), tuple(
        limits
    )


def emptied(batch: Batch, unit: int) -> Batch:
    """The batch with the contribution's rows kept as a slot of weight 0."""
    weight = torch.where(cast(Tensor, batch.unit) == unit, 0.0, cast(Tensor, batch.weight))
    return Batch(batch.x, batch.y, unit=batch.unit, cls=batch.cls, weight=weight)


def alone(batch: Batch, unit: int) -> Batch:
    """The batch with every other contribution turned into a slot of weight 0."""
    weight = torch.where(cast(Tensor, batch.unit) == unit, cast(Tensor, batch.weight), 0.0)
    return Batch(batch.x, batch.y, unit=batch.unit, cls=batch.cls, weight=weight)


def removed(batch: Batch, unit: int) -> Batch:
    """The batch without the contribution."""
    owner, cls, weight = (cast(Tensor, t) for t in (batch.unit, batch.cls, batch.weight))
    rows = (owner != unit).nonzero().flatten()
    left = owner[rows]
    x, y = pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, (batch.x, batch.y))
    others = torch.cat([cls[:unit], cls[unit + 1 :]])
    return Batch(x, y, unit=left - (left > unit).long(), cls=others, weight=weight[rows])


def _same_names(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    if a.keys() != b.keys():
        raise EngineError(
            f"only one of the two steps wrote gradients of {sorted(a.keys() ^ b.keys())[:5]}",
            "every trained tensor gets its noise at every step, whoever was sampled",
        )
    return list(a)


def _limits(plan: StepPlan, cls: int) -> tuple[float, ...]:
    whole = plan.joint(cls)
    row = plan.clip[cls]
    if plan.clipping is Clipping.JOINT or plan.classes[cls].public:
        return tuple(whole if c > 0 else 0.0 for c in row)
    return tuple(c / s if c > 0 else 0.0 for c, s in zip(row, plan.noise, strict=True))


def _rounding(subject: Subject, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """A unit in the last place of both releases, whitened."""
    dtypes = {name: p.dtype for name, p in subject.model.named_parameters()}
    parts = []
    for one in (a, b):
        scaled = {name: t * torch.finfo(dtypes[name]).eps for name, t in one.items() if name in dtypes}
        parts += [w for w in whitened(subject.plan, scaled) if math.isfinite(w)]
    return math.hypot(*parts)
