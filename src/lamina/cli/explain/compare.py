"""Policies side by side: the same classes, batch, steps and ε, another way to share out clipping and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.allocate import Allocation, flat, uniform
from lamina.allocate.problem import Policy
from lamina.cli import allocations
from lamina.cli.explain.figures import kept, signal_to_noise, total_noise, whole_signal_to_noise
from lamina.cli.explain.layers import number
from lamina.cli.explain.words import figure, rules_in_words
from lamina.cli.output import columns
from lamina.errors import AccountingError, PlanError
from lamina.plan import StepPlan
from lamina.plan.rules import KINDS

if TYPE_CHECKING:
    from lamina.sensitivity import Measure

Make = Callable[[Policy], tuple[StepPlan, Allocation]]

WHEN = {
    "flat": "the first run, and what others are compared with: nothing need be known of the layers",
    "uniform": "a step in one pass, where nothing was measured",
    "proportional": "to reproduce group-wise clipping; every layer is heard equally, at more noise in all",
    "pareto": "the default: flat for one class, for several each its whole budget; better with good norms of a proxy",
    "lsab": "a zCDP budget without amplification spent exactly, or to compare with its document",
    "ladp": "shares that follow training, or named layers that need more care; set its presets yourself",
    "ladp-budget": "as ladp, when the run may stop early and sigma may follow what is left",
    "quantile": "norms that drift by orders of magnitude and that no proxy knows; not at small ε",
    "automatic": "a clip norm that cannot be tuned: every contribution counts by its direction; no public class",
    "printed-lsab": "never for real data: to measure what equation 16 as printed gives away",
    "printed-ladp": "never for real data: to measure what the algorithm as printed gives away",
}
"""In one line; docs/policies has a page for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One policy: its plan and figures, or the reason why there is none."""

    policy: str
    when: str
    plan: StepPlan | None = None
    noise: float = math.nan
    against_flat: float = math.nan
    kept: float | None = None
    worst: tuple[str, float] | None = None
    whole: float | None = None
    problem: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints under `compare`."""
        if self.plan is None:
            return {
                "policy": self.policy, "ran": False, "problem": self.problem, "remedy": self.remedy, "when": self.when,
            }  # fmt: skip
        plan = self.plan
        return {
            "policy": self.policy,
            "ran": True,
            "clipping": plan.clipping.value,
            "accountant": plan.accountant,
            "classes": {
                entry.name: {
                    "sigma": _finite(plan.sigma(k)),
                    "epsilon": _finite(plan.epsilon(k)),
                    **({"claimed": plan.claimed[k]} if plan.claimed else {}),
                }
                for k, entry in enumerate(plan.classes)
            },
            "total_noise": self.noise,
            "noise_against_flat": self.against_flat,
            "kept": self.kept,
            "signal_to_noise": self.whole,
            "worst_layer": None
            if self.worst is None
            else {"name": self.worst[0], "signal_to_noise": self.worst[1]},
            "rules": list(rules_in_words(plan)),
            "printed": bool(plan.claimed),
            "when": self.when,
            "digest": plan.digest().hex(),
        }


def compare(
    make: Make, among: Iterable[str], measure: Measure | None, sizes: Sequence[int] | None = None
) -> tuple[Row, ...]:
    """A row for each; `make` makes the plan of a policy, or refuses. Names are checked first."""
    policies = {text: allocations.parse(text) for text in among}
    try:
        reference = total_noise(make(flat)[0], sizes)
    except PlanError:  # profiles with weights need a box, which flat is not
        reference = total_noise(make(uniform)[0], sizes)
    return tuple(_row(text, policy, make, reference, measure, sizes) for text, policy in policies.items())


def comparison(rows: Sequence[Row], chosen: str, measure: Measure | None) -> str:
    """Tables for people: what runs, what the printed ones give away, what could not run and why."""
    parts = []
    sound = [row for row in rows if row.plan is not None and not row.plan.claimed]
    printed = [row for row in rows if row.plan is not None and row.plan.claimed]
    refused = [row for row in rows if row.plan is None]
    if sound:
        parts += [_table(sound, chosen, measure), _when(sound)]
    if printed:
        parts.append(_claims(printed))
    if refused:
        told = [f"  {row.policy}: {row.problem}. Remedy: {row.remedy}" for row in refused]
        parts.append("\n".join(["not compared:", *told]))
    return "\n\n".join(parts)


def _row(
    text: str,
    policy: Policy,
    make: Make,
    reference: float,
    measure: Measure | None,
    sizes: Sequence[int] | None,
) -> Row:
    when = WHEN.get(policy.name, "")
    try:
        plan, _ = make(policy)
    except (PlanError, AccountingError) as error:
        return Row(policy=text, when=when, problem=error.problem, remedy=error.remedy)
    noise = total_noise(plan, sizes)
    ratios = zip(plan.layers, signal_to_noise(plan, measure, sizes), strict=True)
    worst = min(
        ((layer.name, r) for layer, r in ratios if r is not None), key=lambda found: found[1], default=None
    )
    parts = [p for p in kept(plan, measure, sizes) if p is not None] if measure is not None else []
    return Row(
        policy=text,
        when=when,
        plan=plan,
        noise=noise,
        against_flat=noise / reference if reference else 1.0,
        kept=min(parts, default=None),
        worst=worst,
        whole=whole_signal_to_noise(plan, measure, sizes),
    )


def _table(rows: Sequence[Row], chosen: str, measure: Measure | None) -> str:
    """Noise and signal of each; then sigma and ε of every class."""
    head = ["  policy", "clipping", "moves", "Σ d·S²", "of flat"]
    head += ["kept"] if measure is not None else []
    noise, price = [[*head, "S/N", "worst S/N", "at"]], [["  policy"]]
    names = [entry.name for entry in _plan(rows[0]).classes if not entry.public]
    price[0] += [f"{what} {name}" for name in names for what in ("sigma", "ε")]
    for row in rows:
        plan, name = _plan(row), ("→ " if row.policy == chosen else "  ") + row.policy
        cells = [name, plan.clipping.value, _moves(plan), f"{row.noise:.4g}", f"{row.against_flat:.3f}"]
        cells += ["-" if row.kept is None else f"{100 * row.kept:.3g} %"] if measure is not None else []
        worst = (number(row.worst[1]), row.worst[0]) if row.worst else ("-", "-")
        noise.append([*cells, number(row.whole), *worst])
        each = [(number(plan.sigma(k)), figure(plan.epsilon(k))) for k in names]
        price.append([name, *(cell for pair in each for cell in pair)])
    return "\n".join(
        [columns(noise, left=3), "", *_NOTE, *([_KEPT] if measure is not None else []), "", columns(price)]
    )


_NOTE = (
    "  Σ d·S²: noise in the sum of a step, over all coordinates. of flat: against the flat policy; less is better, but",
    "  only for gradients that clipping keeps. S/N: signal to noise of the whole gradient, and of its worst layer.",
)
_KEPT = "  kept: the part of a typical gradient's norm on the proxy that clipping keeps, in the class that keeps least."


def _when(rows: Sequence[Row]) -> str:
    return "\n".join(["when to use:", columns([[f"  {row.policy}", row.when] for row in rows], left=2)])


def _claims(rows: Sequence[Row]) -> str:
    lines = [["  policy", "class", "ε claimed", "true ε", "accountant"]]
    for row in rows:
        plan = _plan(row)
        for k, entry in enumerate(plan.classes):
            if not entry.public:
                told = [f"{plan.claimed[k]:.4g}", figure(plan.epsilon(k)), plan.accountant]
                lines.append([f"  {row.policy}", entry.name, *told])
    return "\n".join(["printed methods, not what they claim:", columns(lines, left=2)])


def _moves(plan: StepPlan) -> str:
    names = [name for rule in plan.rules for name, kind in KINDS.items() if type(rule) is kind]
    return ", ".join(names) or "nothing"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plan(row: Row) -> StepPlan:
    assert row.plan is not None
    return row.plan
