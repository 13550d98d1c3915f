"""The paired step: one step with a canary and one without, under the same noise. Their difference is exact.

    D_l = B · (release with the canary − release without it)_l            the noise cancels
    realised sensitivity = ‖( D_l / S_l )_l‖   to be compared with   1/sigma_k = √Σ_l (C[k,l]/S_l)²

A step that also releases noised counts moves these, too: they are further coordinates, D/σ_b against ½/σ_b each.
Where the canary is stricter than its class, C is its class's times min(scale, ceiling/‖C[k]‖).

"Without" has two forms. `slot` keeps the canary's rows with weight 0: every shape and dropout mask stays as it is, so
that nothing but the canary can differ. `absent` takes the rows away: that is what adding or removing a contribution
means, and it also sees steps that depend on how many were sampled; it needs a model without dropout.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from lamina.audit.target import COUNTS_KEY, AuditTarget, moved_outside_slices
from lamina.engine.batch import Batch, take_rows
from lamina.engine.reference import clip_norm_factor
from lamina.errors import EngineError
from lamina.plan.rules import FollowQuantile, NoiseKind
from lamina.plan.selection import planned_noised_sizes
from lamina.plan.step_plan import Clipping, StepPlan

QUIET_NOISE = 2.0**-20
TOLERANCE = 1e-6


class Without(enum.Enum):
    """What replaces the canary."""

    SLOT = "slot"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class PairedStep:
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
    def layers_outside(self) -> tuple[int, ...]:
        """Layers that moved, by more than rounding, outside the class's band or slices: none in a sound step.

        Rounding, because the sums of others are float32. Beside empty slots nothing moves to the last bit.
        """
        return tuple(i for i, found in enumerate(self.moved_outside) if found > self.rounding)

    @property
    def moved_outside(self) -> tuple[float, ...]:
        """By layer, how far it moved where the class may not move it, in units of the noise."""
        beside = self.outside or (0.0,) * len(self.per_layer)
        return tuple(
            found if limit == 0 else part
            for found, limit, part in zip(self.per_layer, self.limits, beside, strict=True)
        )


def paired_step(
    subject: AuditTarget, batch: Batch, unit: int, *,
    without: Without | str = Without.SLOT, seed: int = 0, noise: float = QUIET_NOISE,
) -> PairedStep:  # fmt: skip
    """The realised sensitivity of contribution `unit` of the batch.

    `noise` turns the noise of both steps down, by a power of two: what cancels then loses no digits.
    """
    cls = int(cast(Tensor, batch.cls)[unit])
    other = with_empty_slot(batch, unit) if Without(without) is Without.SLOT else without_rows(batch, unit)
    a = subject.release(batch, seed=seed, noise=noise)
    b = subject.release(other, seed=seed, noise=noise)
    plan = subject.plan
    moved = {name: a[name] - b[name] for name in _same_names(a, b)}
    per_layer, floor = moved_by_noise_std(plan, moved), _rounding_error(subject, a, b)
    counts, limits = _moved_counts(plan, cls, moved)
    scale = contribution_scale(batch, unit, plan)
    if subject.hardened:  # each release is rounded to a grid of at most S/2^8
        shapes = {name: p.shape for name, p in subject.model.named_parameters()}
        numbers = sum(planned_noised_sizes(plan, shapes)) + len(plan.layers)
        floor = math.hypot(floor, noise * 2.0**-8 * math.sqrt(numbers))
    return PairedStep(
        cls=cls,
        sensitivity=math.hypot(*per_layer, *counts),
        bound=math.hypot(plan.joint(cls, scale), plan.bits(cls)),
        per_layer=per_layer,
        limits=tuple(limit * scale for limit in _layer_limits(plan, cls)),
        rounding=floor,
        counts=counts,
        count_limits=limits,
        outside=moved_by_noise_std(plan, moved_outside_slices(plan, cls, moved)),
        scale=scale,
        norm=math.hypot(*(float(moved[name].norm()) for name in moved if name != COUNTS_KEY), 0.0),
        most=plan.norm(cls) * scale,
        norm_rounding=floor * max(plan.noise),
    )


def contribution_scale(batch: Batch, unit: int, plan: StepPlan) -> float:
    """What the thresholds of a contribution's class are multiplied by."""
    scale, ceiling = (None if t is None else float(t[unit]) for t in (batch.scale, batch.ceiling))
    return clip_norm_factor(plan, int(cast(Tensor, batch.cls)[unit]), scale, ceiling)


def moved_by_noise_std(plan: StepPlan, moved: Mapping[str, Tensor]) -> tuple[float, ...]:
    """‖D_l‖/S_l by layer, in the norm that the plan clips. Infinite where it is not finite, or where D ≠ 0 meets S = 0."""
    found, order = [], 1 if plan.noise_kind is NoiseKind.LAPLACE else 2
    for layer, s in zip(plan.layers, plan.noise, strict=True):
        each = (moved[name].flatten() for name in layer.parameters if name in moved)
        norm = math.hypot(*(float(torch.linalg.vector_norm(part, order)) for part in each), 0.0)
        if norm == 0:
            found.append(0.0)
        else:
            found.append(norm / s if math.isfinite(norm) and s > 0 else math.inf)
    return tuple(found)


def _moved_counts(plan: StepPlan, cls: int, moved: Mapping[str, Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How far the counts moved and might: infinitely far where the plan pays for none, or they are not finite."""
    if COUNTS_KEY not in moved:
        return (), ()
    rule = plan.rule(FollowQuantile)
    std = 0.0 if rule is None else rule.noise
    found = [abs(float(d)) for d in moved[COUNTS_KEY]]
    limits = [0.5 / std if std > 0 and c > 0 and not plan.classes[cls].public else 0.0 for c in plan.clip[cls]]
    return tuple(0.0 if d == 0 else d / std if d < math.inf and std > 0 else math.inf for d in found), tuple(limits)


def with_empty_slot(batch: Batch, unit: int) -> Batch:
    """The batch with the contribution's rows kept as a slot of weight 0."""
    weight = torch.where(cast(Tensor, batch.unit) == unit, 0.0, cast(Tensor, batch.weight))
    return replace(batch, weight=weight)


def with_only(batch: Batch, unit: int) -> Batch:
    """The batch with every other contribution turned into a slot of weight 0."""
    weight = torch.where(cast(Tensor, batch.unit) == unit, cast(Tensor, batch.weight), 0.0)
    return replace(batch, weight=weight)


def without_rows(batch: Batch, unit: int) -> Batch:
    """The batch without the contribution."""
    owner, weight = cast(Tensor, batch.unit), cast(Tensor, batch.weight)
    rows = (owner != unit).nonzero().flatten()
    left = owner[rows]
    x, y = take_rows((batch.x, batch.y), rows)
    cls, scale, ceiling = (
        None if t is None else torch.cat([t[:unit], t[unit + 1 :]]) for t in (batch.cls, batch.scale, batch.ceiling)
    )
    unit_of = left - (left > unit).long()
    return Batch(x, y, unit=unit_of, cls=cls, weight=weight[rows], scale=scale, ceiling=ceiling)


def _same_names(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    if a.keys() != b.keys():
        problem = f"only one of the two steps wrote gradients of {sorted(a.keys() ^ b.keys())[:5]}"
        remedy = "give every trained tensor its noise at every step, whoever was sampled"
        raise EngineError("audit.different-tensors-written", problem, remedy)
    return list(a)


def _layer_limits(plan: StepPlan, cls: int) -> tuple[float, ...]:
    whole = plan.joint(cls)
    row = plan.clip[cls]
    if plan.clipping is Clipping.JOINT or plan.classes[cls].public:
        return tuple(whole if c > 0 else 0.0 for c in row)
    return tuple(c / s if c > 0 else 0.0 for c, s in zip(row, plan.noise, strict=True))


def _rounding_error(subject: AuditTarget, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """A unit in the last place of both releases, whitened."""
    dtypes = {name: p.dtype for name, p in subject.model.named_parameters()}
    parts = []
    for one in (a, b):
        scaled = {name: t * torch.finfo(dtypes[name]).eps for name, t in one.items() if name in dtypes}
        parts += [w for w in moved_by_noise_std(subject.plan, scaled) if math.isfinite(w)]
    return math.hypot(*parts)


_LOOSE_CLIP = 2.0**40


def coupling_to_others(subject: AuditTarget, batch: Batch, unit: int, *, absent: bool = False) -> float:
    """How far the others' clipped sum moves when contribution `unit` appears, relative to both sums.

    The step is taken four times, with all, without the canary, with the canary alone, and with nobody:

        slot     ‖ (all − without) − (alone − nobody) ‖       0 if parts are simply added
        absent   ‖ (without − nobody) − (rows taken away − nobody) ‖     0 if others do not see the row

    once at the plan's thresholds and once with thresholds 2^40 times as large, because clipping hides
    changes of length. 0 up to rounding in a sound step.
    """
    return max(_moved(subject, batch, unit, absent, clip) for clip in (1.0, _LOOSE_CLIP))


def _moved(subject: AuditTarget, batch: Batch, unit: int, absent: bool, clip: float) -> float:
    def take(b: Batch) -> dict[str, Tensor]:
        return subject.release(b, noise=QUIET_NOISE, clip=clip)

    nobody = take(with_empty_slot(with_only(batch, unit), unit))
    without = _minus(take(with_empty_slot(batch, unit)), nobody)
    if absent:
        gone = without_rows(batch, unit)
        return _relative(without, _minus(take(gone), nobody), without)
    single = _minus(take(with_only(batch, unit)), nobody)
    both = _minus(take(batch), nobody)
    return _relative(_minus(both, without), single, without)


def _minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] for name in a}


def _relative(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> float:
    """The largest ‖a − b‖ of a tensor over the size of what was added; infinite if it is not finite."""
    worst = 0.0
    for name in a:
        gap = float((a[name] - b[name]).norm())
        size = float(torch.stack([b[name].norm(), scale[name].norm(), a[name].norm()]).sum())
        if gap > 0:
            worst = max(worst, gap / size if size < math.inf else math.inf)
        elif gap != gap:
            return math.inf
    return worst
