"""From a signed bound (clip norm, noise multiplier) to the scale of a contribution's thresholds in a plan.

A contribution signs a clip norm c and a noise multiplier z over its whole participation: over all steps, no worse than
one Gaussian release with multiplier z. That is ε(z) at a given δ, and a bound at that δ only. Of a step it asks, with
N occurrences in all,

    variance floor     V_floor = (sigma_acc·c)²   enough while the sampling is secret
    variance ceiling   V_ceil  = N·z²·c²          enough even if all occurrences become known: together 1/z-GDP

sigma_acc(z) is the multiplier of one step for which the plan's accountant, with the plan's q and steps, finds ε(z).
S, q, B and T are the plan's and change for nobody; a contribution that needs more has its thresholds scaled:

    C_i = C[k] · min(1, c/‖C[k]‖, sigma_k/sigma_acc(z))                             docs/theory.md, "Signed bounds"

Dividing by z instead of sigma_acc would take a figure of the whole horizon for one of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lamina import validate
from lamina.account.accountants import calibrate
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.errors import AccountingError, PlanError
from lamina.plan.correlation import participations
from lamina.plan.rules import clip_radius
from lamina.plan.step_plan import StepPlan

REMAINING_FACTORS: Mapping[str, tuple[float, ...]] = {
    "refuse": (),
    "leave-out": (1.0, 0.0),
    "scale": (1.0, 0.5, 0.25, 0.125, 0.0),
}
"""By `[corpus] exhausted`: what the thresholds of a bound may be multiplied by in a segment, the largest that fits first.

The list is public, and which of it applies follows from recorded charges alone, so ε is that of the charges as made.
"""

_SCALE_STEP = 2e-5  # by which a scale shrinks where rounding left it too large: the tolerance of `calibrate`
_MAX_TRIES = 50


@dataclass(frozen=True, slots=True)
class OccurrenceCount:
    """How often a contribution takes part: at most `count` if `capped`, on average `count` if not."""

    count: float
    capped: bool


def signed_epsilon(plan: StepPlan, k: str | int, z: float) -> float:
    """ε(z) at the δ of class k: exactly that of one Gaussian release with multiplier z."""
    return epsilon_of_noise_multiplier(_check_positive("noise multiplier", z), plan.delta(k))


def sigma_acc(plan: StepPlan, k: str | int, z: float) -> float:
    """The multiplier that a step needs for ε(z) after the whole plan, choices included; 0 if nothing is owed.

    The smallest to 1e-4, and never too small. PlanError: no noise is enough.
    """
    steps, *choices = plan.schedule(k) or (None,)
    if steps is None:
        return 0.0
    target, delta = signed_epsilon(plan, k, z), plan.delta(k)
    if target == 0:
        problem = f"noise multiplier {z:g} is ε = 0 at δ = {delta:g}: nothing may be learned"
        remedy = "sign a smaller one, or leave the contribution out"
        raise PlanError("plan.signed-bound-allows-nothing", problem, remedy)
    try:
        return calibrate(target, delta=delta, q=steps.q, steps=steps.steps, accountant=plan.accountant, besides=choices)
    except AccountingError as error:
        problem = f"noise multiplier {z:g}, ε = {target:.4g} at δ = {delta:g}, is out of reach: {error.problem}"
        remedy = "leave the contribution out, or plan with fewer steps"
        raise PlanError("plan.signed-bound-unreachable", problem, remedy) from None


def scale_for_signed_bound(plan: StepPlan, k: str | int, c: float, z: float) -> float:
    """The largest scale of class k's thresholds, to 1e-3, that keeps what a contribution signed: (c, z).

    Its clipped norm is then at most c, and `plan.epsilon(k, scale=…)` at most ε(z): priced, not only solved for.
    PlanError where no scale does, because something else of the step costs too much by itself.
    """
    row = plan.index(k)
    who = f"class {plan.classes[row].name!r}"
    most = min(1.0, _check_positive("clip norm", c) / (plan.norm(row) or math.inf))
    if not plan.schedule(row):
        return min(1.0, most) if not plan.classes[row].public else 1.0
    target = signed_epsilon(plan, row, z)
    if plan.epsilon(row, scale=most) <= target:
        return most
    if not plan.scales:
        problem = f"{who} spends ε = {plan.epsilon(row):.4g}, but noise multiplier {z:g} allows {target:.4g}, and this plan cannot scale"
        remedy = "leave the contribution out, or plan with a fixed sigma"
        raise PlanError("plan.signed-bound-unreachable", problem, remedy)
    needed, beside = 1.0 / sigma_acc(plan, row, z), plan.bits(row)
    if needed <= beside:
        problem = (
            f"the noised counts of {who} have multiplier {1 / beside:.4g}, below the {1 / needed:.4g} that is needed"
        )
        remedy = "leave the contribution out, or plan without counts"
        raise PlanError("plan.noised-counts-too-expensive", problem, remedy)
    reach = clip_radius(plan.clip[row], plan.noise)
    scale = min(most, math.sqrt((needed - beside) * (needed + beside)) / reach)
    for _ in range(_MAX_TRIES):
        if plan.epsilon(row, scale=scale) <= target:
            return scale
        scale *= 1 - _SCALE_STEP
    problem = f"no scale near {scale:.6g} holds ε = {target:.6g} for {who}"
    raise PlanError("plan.scale-search-failed", problem, "report this as a bug")


def occurrence_count(plan: StepPlan, k: str | int, cap: int | None = None) -> OccurrenceCount:
    """N of the variance ceiling: the cap on how often one contribution is used, or else q·T, the average."""
    caps = [n for n in (cap, plan.injection.occurrences) if n is not None]
    if plan.bands > 1:  # contributions take turns
        caps.append(participations(plan.steps, plan.bands))
    if plan.injection.raw or caps:  # without a cap, raw noise is priced for every step
        return OccurrenceCount(float(min([plan.steps, *caps])), True)
    return OccurrenceCount(plan.classes[plan.index(k)].sampling_rate * plan.steps, False)


def variance_floor(plan: StepPlan, k: str | int, c: float, z: float) -> float:
    """(sigma_acc·c)²: the least variance of a step that keeps (c, z), while nobody learns who was sampled when."""
    return (sigma_acc(plan, k, z) * _check_positive("clip norm", c)) ** 2


def variance_ceiling(plan: StepPlan, k: str | int, c: float, z: float, cap: int | None = None) -> float:
    """N·z²·c²: with a capped N nothing is gained by more, even if every occurrence becomes known."""
    return (
        occurrence_count(plan, k, cap).count
        * (_check_positive("noise multiplier", z) * _check_positive("clip norm", c)) ** 2
    )


def _check_positive(what: str, value: float) -> float:
    remedy = "correct the signed bound"
    return validate.positive(PlanError, "plan.signed-bound-not-positive", remedy=remedy, **{what: value})
