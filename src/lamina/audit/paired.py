"""The paired step: one step with a canary and one without, under the same noise. Their difference is exact.

    D_l = B · (release with the canary − release without it)_l            the noise cancels
    realised sensitivity = ‖( D_l / S_l )_l‖   to be compared with   1/sigma_k = √Σ_l (C[k,l]/S_l)²

A step that also releases noised counts moves these, too: they are further coordinates, D/σ_b against ½/σ_b each.
Where the canary is stricter than its class, C is its class's times min(scale, ceiling/‖C[k]‖).

"Without" has two forms. `slot` keeps the canary's rows with weight 0: every shape and dropout mask stays as it
is, so that nothing but the canary can differ. `absent` takes the rows away: that is what adding or removing a
contribution means, and it also sees steps that depend on how many were sampled; it needs a model without dropout.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.audit.regions import outside
from lamina.audit.subject import COUNTS, Subject
from lamina.engine import Batch
from lamina.errors import EngineError
from lamina.plan.opened import planned_sizes
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
    bound        1/sigma_k of its class, at its scale
    scale        what the class's thresholds are multiplied by for this contribution
    per_layer    ‖D_l‖/S_l for every layer of the plan
    limits       what the plan allows there: C/S (box), the bound (joint), 0 outside the class's band
    outside      ‖D_l‖/S_l at the places of a layer that are outside the class's slices: 0 in a sound step
    norm         ‖D‖, to be compared with `most`, the largest norm that the contribution may have
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
    outside: tuple[float, ...] = ()
    scale: float = 1.0
    norm: float = 0.0
    most: float = math.inf
    norm_rounding: float = 0.0

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
        pairs += [(found, 0.0) for found in self.outside]
        within = all(found <= limit * (1 + TOLERANCE) + self.rounding for found, limit in pairs)
        return within and self.norm <= self.most * (1 + TOLERANCE) + self.norm_rounding

    @property
    def strays(self) -> tuple[int, ...]:
        """Layers that moved, by more than rounding, outside the class's band or slices: none in a sound step.

        Rounding, because the sums of others are float32. Beside empty slots nothing moves to the last bit.
        """
        return tuple(i for i, found in enumerate(self.astray) if found > self.rounding)

    @property
    def astray(self) -> tuple[float, ...]:
        """By layer, how far it moved where the class may not move it, in units of the noise."""
        beside = self.outside or (0.0,) * len(self.per_layer)
        return tuple(
            found if limit == 0 else part
            for found, limit, part in zip(self.per_layer, self.limits, beside, strict=True)
        )


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
    scale = scale_of(batch, unit, plan)
    if subject.hardened:  # each release is rounded to a grid of at most S/2^8
        shapes = {name: p.shape for name, p in subject.model.named_parameters()}
        numbers = sum(planned_sizes(plan, shapes)) + len(plan.layers)
        floor = math.hypot(floor, noise * 2.0**-8 * math.sqrt(numbers))
    return Paired(
        cls=cls,
        sensitivity=math.hypot(*per_layer, *counts),
        bound=math.hypot(plan.joint(cls, scale), plan.bits(cls)),
        per_layer=per_layer,
        limits=tuple(limit * scale for limit in _limits(plan, cls)),
        rounding=floor,
        counts=counts,
        count_limits=limits,
        outside=whitened(plan, outside(plan, cls, moved)),
        scale=scale,
        norm=math.hypot(*(float(moved[name].norm()) for name in moved if name != COUNTS), 0.0),
        most=plan.norm(cls) * scale,
        norm_rounding=floor * max(plan.noise),
    )


def scale_of(batch: Batch, unit: int, plan: StepPlan) -> float:
    """min(scale, ceiling/‖C[k]‖) of a contribution: what its class's thresholds are multiplied by."""
    cls = int(cast(Tensor, batch.cls)[unit])
    if plan.classes[cls].public:
        return 1.0
    ceiling = math.inf if batch.ceiling is None else float(batch.ceiling[unit])
    scale = 1.0 if batch.scale is None else float(batch.scale[unit])
    return min(scale, ceiling / plan.norm(cls)) if plan.norm(cls) > 0 else scale


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
    return replace(batch, weight=weight)


def alone(batch: Batch, unit: int) -> Batch:
    """The batch with every other contribution turned into a slot of weight 0."""
    weight = torch.where(cast(Tensor, batch.unit) == unit, cast(Tensor, batch.weight), 0.0)
    return replace(batch, weight=weight)


def removed(batch: Batch, unit: int) -> Batch:
    """The batch without the contribution."""
    owner, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
    rows = (owner != unit).nonzero().flatten()
    left = owner[rows]
    x, y = pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, (batch.x, batch.y))
    cls, scale, ceiling = (
        None if t is None else torch.cat([t[:unit], t[unit + 1 :]])
        for t in (batch.cls, batch.scale, batch.ceiling)
    )
    unit_of = left - (left > unit).long()
    return Batch(x, y, unit=unit_of, cls=cls, weight=weight[rows], scale=scale, ceiling=ceiling)


def _same_names(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    if a.keys() != b.keys():
        raise EngineError(
            "audit.two-steps-wrote",
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
