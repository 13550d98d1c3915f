"""The resolver: from signed bounds to threshold scales and noise under a plan, and from a class to its depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.account.charges import Account
from lamina.admit.rows import BoundColumns, Int64Array
from lamina.errors import AdmissionError, PlanError
from lamina.plan.policy import Policy
from lamina.plan.signed_bounds import occurrence_count, scale_for_signed_bound, sigma_acc, signed_epsilon
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import align_columns, at_least, at_most, epsilon_text

BOUNDS_SHOWN = 40  # entries in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBound:
    """One distinct bound (c, z) of a class under a plan.

    scale             thresholds of the class are multiplied by this; 0: no scale keeps the bound, so it must stay out
    ceiling           c: whatever the thresholds are, its clipped gradient is no longer; infinite in a public class
    sigma_acc         the multiplier that a step needs for ε(z)
    sigma             the multiplier that a step has for it: plan.sigma(class, scale)
    occurrences       N: the cap (`capped`), or how often it takes part on average
    variance_floor    (sigma_acc·c)², or N·z²·c² if a cap makes that less: enough while the sampling is secret
    variance_ceiling  N·z²·c²: with a capped N enough even if all occurrences become known
    variance          (sigma·c)², what is applied: the noise of a step as this contribution meets it, in units in which
                      its gradient has norm c. Never below the floor. Above the ceiling where the class has more noise
                      than this bound asks for, or c is small beside the class's thresholds: S is the class's alone
    epsilon_signed    ε(z) at the δ of the class
    epsilon           what the whole plan spends on it
    problem           why there is no scale
    """

    bound: Account
    scale: float
    ceiling: float
    sigma_acc: float
    sigma: float
    occurrences: float
    capped: bool
    variance_floor: float
    variance_ceiling: float
    variance: float
    epsilon_signed: float
    epsilon: float
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain figures; what is infinite is null."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "bound"}
        return {
            "class": self.bound.cls,
            "clip_norm": self.bound.clip_micro,
            "noise_multiplier": self.bound.noise_micro,
            **{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDepth:
    """Where a class may reach: its profile in the policy, and the plan's layers that it comes to."""

    profile: str
    layers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """`entries` are the distinct bounds; `index[i]` is the entry that bound i is held to; `depth` is by class alone.

    `rounded` names the classes whose bounds were too many and were taken to a grid, and its ratio.
    """

    entries: tuple[ResolvedBound, ...]
    index: NDArray[np.int32]
    depth: Mapping[str, ClassDepth]
    rounded: Mapping[str, float]

    @cached_property
    def scale(self) -> NDArray[np.float64]:
        """For each bound that was asked about; 0 where it must stay out."""
        return self._column([entry.scale for entry in self.entries])

    @cached_property
    def ceiling(self) -> NDArray[np.float64]:
        """For each bound that was asked about, c in plain units."""
        return self._column([entry.ceiling for entry in self.entries])

    def _column(self, values: Sequence[float]) -> NDArray[np.float64]:
        return np.asarray(values, dtype=np.float64)[self.index] if values else np.empty(0)

    def __getitem__(self, bound: int) -> ResolvedBound:
        """What bound number `bound` is held to."""
        return self.entries[int(self.index[bound])]

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        depth = {name: {"profile": each.profile, "layers": list(each.layers)} for name, each in self.depth.items()}
        bounds = [entry.to_dict() for entry in self.entries]
        return {"bounds": bounds, "depth": depth, "rounded": dict(self.rounded)}

    def table(self) -> str:
        """For people: one line per bound, then one per class with its depth."""
        rows = [["class", "c", "z", "scale", "floor", "variance", "ceiling", "ε signed", "ε spent"]]
        rows += [_table_row(entry) for entry in self.entries[:BOUNDS_SHOWN]]
        lines = align_columns(rows, left=1)
        if len(self.entries) > BOUNDS_SHOWN:
            lines.append(f"… and {len(self.entries) - BOUNDS_SHOWN} more")
        for name, ratio in self.rounded.items():
            lines.append(
                f"class {name} has more than {MAX_DISTINCT_BOUNDS} distinct bounds: they are rounded to a grid of ratio "
                f"{ratio:.4g}, c down and z up"
            )
        depths = [
            [name, depth.profile, f"{(n := len(depth.layers))} layer{'s' * (n != 1)}"]
            for name, depth in self.depth.items()
        ]
        return "\n".join([*lines, "", *align_columns([["class", "reaches", ""], *depths], left=2)])

    def __str__(self) -> str:
        return self.table()


MAX_DISTINCT_BOUNDS = 256  # distinct bounds of a class: each has an accountant of its own


def _table_row(entry: ResolvedBound) -> list[str]:
    bound = entry.bound
    if not bound.signed:
        return [bound.cls, "public", "", "1", "", "", "", "", "not protected"]
    line, signed = [bound.cls, at_most(bound.c), at_least(bound.z)], epsilon_text(entry.epsilon_signed)
    if entry.problem:
        return [*line, "stays out", "", "", "", signed, ""]
    ceiling = f"{at_least(entry.variance_ceiling)}{'' if entry.capped else ' (expected)'}"
    variances = [at_least(entry.variance_floor), at_least(entry.variance), ceiling]
    return [*line, at_most(entry.scale), *variances, signed, epsilon_text(entry.epsilon)]


# S, q, B and T come from the class table and change for nobody. A contribution that signed more than its class asks
# for scales its own thresholds (plan/signed_bounds.py); each distinct bound has an accountant of its own. See
# docs/admission.md.

Caps = int | Mapping[str, int] | None

_GRID_RATIO = 1.01  # ratio of the grid that too many bounds are rounded to


def resolve(bounds: Sequence[Account], policy: Policy, plan: StepPlan, *, max_occurrences: Caps = None) -> Resolution:
    """The schedule of each bound under a plan, and the depth of each class.

    `max_occurrences` is the cap on how often one contribution is used, if the sampler keeps one: for all classes, or
    by class. More than 256 distinct bounds of a class are rounded to a grid, c down and z up, which is stricter.
    """
    columns = BoundColumns.of(bounds)
    for name in sorted({columns.names[row] for row in np.unique(columns.cls)}):
        _check_plan(name, policy, plan)
    index = np.zeros(len(columns), dtype=np.int32)
    entries: list[ResolvedBound] = []
    rounded: dict[str, float] = {}
    for row, name in enumerate(columns.names):
        members = np.flatnonzero(columns.cls == row)
        if not len(members):
            continue
        kept, where, ratio = _merge_to_grid(columns, members)
        if ratio is not None:
            rounded[name] = ratio
        index[members] = len(entries) + where
        cap = max_occurrences.get(name) if isinstance(max_occurrences, Mapping) else max_occurrences
        entries += [_resolve_bound(bound, plan, cap) for bound in kept]
    depth = {}
    for k, entry in enumerate(plan.classes):
        reached = tuple(layer.name for i, layer in enumerate(plan.layers) if plan.reaches(k, i))
        depth[entry.name] = ClassDepth(profile=entry.profile, layers=reached)
    return Resolution(entries=tuple(entries), index=index, depth=depth, rounded=rounded)


def _check_plan(name: str, policy: Policy, plan: StepPlan) -> None:
    """The plan was made under this policy: a class with another depth or δ is not the one that was signed for."""
    if name not in policy.classes:
        problem = f"the policy has no class {name!r}"
        raise AdmissionError("admit.class-unknown", problem, "resolve under the policy of the gate")
    found = next((entry for entry in plan.classes if entry.name == name), None)
    if found is None:
        problem = f"the plan has no class {name!r}, which was admitted"
        raise AdmissionError("admit.class-not-in-plan", problem, "plan for it, or admit without it")
    entry = policy.classes[name]
    delta = 0.0 if entry.public else policy.corpus.delta
    same_depth = entry.profile.described_by(found.profile)  # the plan may name an adapter more exactly
    if not same_depth or (found.public, found.delta) != (entry.public, delta):
        problem = (
            f"class {name!r} is public={found.public}, reaches {found.profile}, δ = {found.delta:g} in the plan; "
            f"public={entry.public}, {entry.profile}, δ = {delta:g} in the policy"
        )
        raise AdmissionError("admit.plan-of-other-policy", problem, "make the plan under the policy of the gate")


def _merge_to_grid(columns: BoundColumns, members: Int64Array) -> tuple[BoundColumns, NDArray[np.int32], float | None]:
    """At most 256 distinct bounds of one class, where each member is among them, and the ratio of the grid if any.

    The grid begins at the most permissive of them: who signed what the class asks for keeps it exactly.
    """
    row, clip, noise = columns.cls[members], columns.clip_norm[members], columns.noise_multiplier[members]
    kept, where = BoundColumns.distinct(columns.names, row, clip, noise)
    if len(kept) <= MAX_DISTINCT_BOUNDS:
        return kept, where, None
    ratio = _GRID_RATIO
    while True:  # a grid of twice the step has every second rung of the one before
        rounded = _grid_down(kept.clip_norm, ratio), _grid_up(kept.noise_multiplier, ratio)
        kept, again = BoundColumns.distinct(columns.names, kept.cls, *rounded)
        where = again[where]
        if len(kept) <= MAX_DISTINCT_BOUNDS:
            return kept, where, ratio
        ratio *= ratio


def _grid_up(values: Int64Array, ratio: float) -> Int64Array:
    """The least ⌈low·ratio^j⌉ that is not below each value."""
    grid = np.unique(np.ceil(values.min() * _powers(values, ratio))).astype(np.int64)
    return grid[np.searchsorted(grid, values, side="left")]


def _grid_down(values: Int64Array, ratio: float) -> Int64Array:
    """The largest ⌊high·ratio^-j⌋ that is not above each value; at least 1."""
    grid = np.unique(np.floor(values.max() / _powers(values, ratio)).clip(1)).astype(np.int64)
    return grid[np.searchsorted(grid, values, side="right") - 1]


def _powers(values: Int64Array, ratio: float) -> NDArray[np.float64]:
    """1, ratio, ratio², … until the least value times the last is above the largest."""
    steps = math.log(values.max() / values.min()) / math.log(ratio)
    return ratio ** np.arange(math.ceil(steps) + 2, dtype=np.float64)


def _resolve_bound(bound: Account, plan: StepPlan, cap: int | None) -> ResolvedBound:
    k = plan.index(bound.cls)
    if plan.classes[k].public:
        return _resolve_public(bound)
    c, z = bound.c, bound.z
    often = occurrence_count(plan, k, cap)
    most = often.count * (z * c) ** 2
    signed = signed_epsilon(plan, k, z)
    try:
        scale, needed = scale_for_signed_bound(plan, k, c, z), sigma_acc(plan, k, z)
    except PlanError as error:
        scale, needed, problem = 0.0, math.inf, error.problem
    else:
        problem = ""
    sigma = plan.sigma(k, scale=scale) if scale else math.inf
    needed = min(needed, sigma)  # a search ends above what is needed; `scale` is priced, so its sigma is enough
    least = (needed * c) ** 2 if scale else math.inf
    return ResolvedBound(
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


def _resolve_public(bound: Account) -> ResolvedBound:
    """A public class keeps no bound."""
    return ResolvedBound(
        bound=bound, scale=1.0, ceiling=math.inf, sigma_acc=0.0, sigma=math.inf, occurrences=math.inf, capped=False,
        variance_floor=0.0, variance_ceiling=0.0, variance=0.0, epsilon_signed=math.inf, epsilon=0.0,
    )  # fmt: skip
