"""The resolver: from signed bounds to a noise schedule, and from a class to a depth.

S, q, B and T are the class table's and change for nobody. What a contribution signed beyond its class scales its own
thresholds (plan/signed.py); each distinct bound has an accountant of its own.                        docs/admission.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.admit.bound import Bound, Bounds, Ints
from lamina.admit.demands import Demands, check_class
from lamina.admit.descriptor import Descriptor
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refused
from lamina.admit.resolution import MOST, Depth, Resolution, Resolved
from lamina.errors import AdmissionError, PlanError
from lamina.plan.policy import Policy
from lamina.plan.signed import occurrences, scale_for, sigma_acc, signed_epsilon
from lamina.plan.step import StepPlan

Caps = int | Mapping[str, int] | None

_GRID = 1.01  # ratio of the grid that too many bounds are taken to


def check_bound(policy: Policy, descriptor: Descriptor) -> Reason | None:
    """Whether a signed bound is more permissive than its class, by the policy alone; None if it is not."""
    demand = Demands(policy).classes.get(descriptor.admissibility)
    if demand is None:
        return Reason.UNKNOWN_CLASS
    if demand.public:
        return Reason.PUBLIC_BOUND if descriptor.clip_norm or descriptor.noise_multiplier else None
    try:
        check_class(demand, descriptor)
    except Refused as refused:
        return refused.reason
    return None


def resolve(
    bounds: Sequence[Bound], policy: Policy, plan: StepPlan, *, max_occurrences: Caps = None
) -> Resolution:
    """The schedule of each bound under a plan, and the depth of each class.

    `max_occurrences` is the cap on how often one contribution is used, if the sampler keeps one: for all classes, or
    by class. A class with more than 256 distinct bounds has them taken to a grid, c down and z up, which is stricter.
    """
    columns = Bounds.of(bounds)
    for name in sorted({columns.names[row] for row in np.unique(columns.cls)}):
        _check_plan(name, policy, plan)
    index = np.zeros(len(columns), dtype=np.int32)
    entries: list[Resolved] = []
    rounded: dict[str, float] = {}
    for row, name in enumerate(columns.names):
        members = np.flatnonzero(columns.cls == row)
        if not len(members):
            continue
        kept, where, ratio = _few(columns, members)
        if ratio is not None:
            rounded[name] = ratio
        index[members] = len(entries) + where
        cap = max_occurrences.get(name) if isinstance(max_occurrences, Mapping) else max_occurrences
        entries += [_resolved(bound, plan, cap) for bound in kept]
    depth = {
        entry.name: Depth(
            profile=entry.profile,
            layers=tuple(layer.name for i, layer in enumerate(plan.layers) if plan.reaches(k, i)),
        )
        for k, entry in enumerate(plan.classes)
    }
    return Resolution(entries=tuple(entries), index=index, depth=depth, rounded=rounded)


def _check_plan(name: str, policy: Policy, plan: StepPlan) -> None:
    """The plan was made under this policy: a class with another depth or δ is not the one that was signed for."""
    if name not in policy.classes:
        raise AdmissionError(
            "admit.policy-no-class",
            f"the policy has no class {name!r}",
            "resolve under the policy of the gate",
        )
    found = next((entry for entry in plan.classes if entry.name == name), None)
    if found is None:
        raise AdmissionError(
            "admit.plan-no-class",
            f"the plan has no class {name!r}, which was admitted",
            "plan for it, or admit without it",
        )
    entry = policy.classes[name]
    told = (found.public, found.profile, found.delta)
    wanted = (entry.public, str(entry.profile), 0.0 if entry.public else policy.corpus.delta)
    same_depth = entry.profile.told_by(found.profile)  # the plan may name an adapter more exactly
    if not same_depth or (told[0], told[2]) != (wanted[0], wanted[2]):
        raise AdmissionError(
            "admit.class-public-reaches",
            f"class {name!r} is public={told[0]}, reaches {told[1]}, δ = {told[2]:g} in the plan; "
            f"public={wanted[0]}, {wanted[1]}, δ = {wanted[2]:g} in the policy",
            "make the plan under the policy of the gate",
        )


def _few(columns: Bounds, members: Ints) -> tuple[Bounds, NDArray[np.int32], float | None]:
    """At most 256 distinct bounds of one class, where each member is among them, and the ratio of the grid if any.

    The grid begins at the most permissive of them: who signed what the class asks for keeps it exactly.
    """
    row, clip, noise = columns.cls[members], columns.clip_norm[members], columns.noise_multiplier[members]
    kept, where = Bounds.distinct(columns.names, row, clip, noise)
    if len(kept) <= MOST:
        return kept, where, None
    ratio = _GRID
    while True:  # a grid of twice the step has every second rung of the one before
        rounded = _down(kept.clip_norm, ratio), _up(kept.noise_multiplier, ratio)
        kept, again = Bounds.distinct(columns.names, kept.cls, *rounded)
        where = again[where]
        if len(kept) <= MOST:
            return kept, where, ratio
        ratio *= ratio


def _up(values: Ints, ratio: float) -> Ints:
    """The least ⌈low·ratio^j⌉ that is not below each value."""
    low = int(values.min())
    rungs = [low]
    top = int(values.max())
    while rungs[-1] < top:
        rungs.append(max(rungs[-1] + 1, math.ceil(low * ratio ** len(rungs))))
    grid = np.array(rungs, dtype=np.int64)
    return grid[np.searchsorted(grid, values, side="left")]


def _down(values: Ints, ratio: float) -> Ints:
    """The largest ⌊high·ratio^-j⌋ that is not above each value; at least 1."""
    high, low = int(values.max()), int(values.min())
    rungs = [high]
    while rungs[-1] > low:
        rungs.append(max(1, min(rungs[-1] - 1, math.floor(high * ratio ** -len(rungs)))))
    grid = np.array(rungs[::-1], dtype=np.int64)
    return grid[np.searchsorted(grid, values, side="right") - 1]


def _resolved(bound: Bound, plan: StepPlan, cap: int | None) -> Resolved:
    k = plan.index(bound.cls)
    if plan.classes[k].public:
        return _unbounded(bound)
    c, z = bound.c, bound.z
    often = occurrences(plan, k, cap)
    most = often.count * (z * c) ** 2
    signed = signed_epsilon(plan, k, z)
    try:
        scale, needed = scale_for(plan, k, c, z), sigma_acc(plan, k, z)
    except PlanError as error:
        scale, needed, problem = 0.0, math.inf, error.problem
    else:
        problem = ""
    sigma = plan.sigma(k, scale=scale) if scale else math.inf
    least = (needed * c) ** 2 if scale else math.inf
    return Resolved(
        bound=bound,
        scale=scale,
        ceiling=c,
        sigma_acc=needed,
        sigma=sigma,
        occurrences=often.count,
        capped=often.capped,
        variance_floor=min(least, most) if often.capped else least,
        variance_ceiling=most if often.capped else max(least, most),
        variance=(sigma * c) ** 2,
        epsilon_signed=signed,
        epsilon=plan.epsilon(k, scale=scale) if scale else 0.0,
        problem=problem,
    )


def _unbounded(bound: Bound) -> Resolved:
    """In a public class nothing is owed to anybody."""
    return Resolved(
        bound=bound,
        scale=1.0,
        ceiling=math.inf,
        sigma_acc=0.0,
        sigma=math.inf,
        occurrences=math.inf,
        capped=False,
        variance_floor=0.0,
        variance_ceiling=0.0,
        variance=0.0,
        epsilon_signed=math.inf,
        epsilon=0.0,
    )
