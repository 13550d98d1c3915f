"""A plan in words for `lamina plan`: its rules, reasons and notes, and allocations side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.account.gaussian_rdp import epsilon_of_rho
from lamina.account.schedule import rdp_order_of
from lamina.cli import by_name
from lamina.cli.command import table
from lamina.cli.layer_figures import (
    LayerFigures,
    kept_norm,
    layer_bars,
    layer_figures,
    layer_table,
    signal_to_noise,
    three_digits,
    total_noise,
    whole_signal_to_noise,
)
from lamina.errors import AccountingError, PlanError
from lamina.plan.correlation import best_bands, prefix_error_ratio
from lamina.plan.policy import Policy
from lamina.plan.risk import STATED_RATES, RiskOf, plan_curve
from lamina.plan.rules import (
    RULE_KINDS,
    Choose,
    ChooseAsPrinted,
    FollowBudget,
    FollowEnergy,
    FollowProxy,
    FollowQuantile,
    Rule,
)
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.plan.table import (
    at_least,
    at_most,
    correlation_text,
    epsilon_text,
    finite_or_none,
    percent_text,
    reach_text,
)

if TYPE_CHECKING:
    from lamina.allocate.measure.measure import Measure
    from lamina.allocate.problem import Allocation, Allocator


_SIGNAL_TO_NOISE = (
    "S/N: signal to noise of the layer at the first step, b·n̂/(S·√d): b contributions expected in a step, n̂ the norm "
    "of a typical one after clipping, S·√d the norm of the noise. An upper bound, as if all gradients pointed the same "
    "way."
)


RISKS: tuple[RiskOf, ...] = ("membership", "content")


def rules_in_words(plan: StepPlan) -> tuple[str, ...]:
    """One sentence for each rule by which C and S may change while the plan runs; none if nothing moves."""
    return tuple(_rule_sentence(rule, plan) for rule in plan.rules)


def plan_reasons(
    plan: StepPlan, allocation: Allocation, measure: Measure | None, sizes: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Why this plan: the allocation's reasons, the cost by class, what clipping keeps, rules, warning."""
    reasons = [*allocation.why, *(_cost_sentence(plan, k) for k, entry in enumerate(plan.classes) if not entry.public)]
    for k, entry in enumerate(plan.classes):
        count = sum(c > 0 for c in plan.clip[k])
        if 0 < count < len(plan.layers):
            reasons.append(f"Class {entry.name} reaches {count} of {len(plan.layers)} layers: {reach_text(plan, k)}.")
    if measure is not None and any(math.isfinite(plan.sigma(k)) for k in range(len(plan.classes))):
        reasons.append(_kept_norm_sentence(plan, measure, sizes))
    if plan.bands > 1:
        reasons.append(f"{correlation_text(plan)}.")
    reasons += rules_in_words(plan) or ("C and S are the same in every step.",)
    return (*reasons, *claim_warnings(plan))


def claim_warnings(plan: StepPlan) -> tuple[str, ...]:
    """Of an allocation that reproduces a paper: the ε that the paper claims, and the true one."""
    if not plan.claimed:
        return ()
    figures = "; ".join(
        f"class {entry.name}: claimed ε = {at_most(plan.claimed[k])}, true ε = {epsilon_text(plan.epsilon(k))}"
        for k, entry in enumerate(plan.classes)
        if not entry.public
    )
    return (f"NOT WHAT IT CLAIMS. A method as published, kept to be measured ({figures}). Do not use it on real data.",)


def requested_epsilon(
    epsilon: float | Mapping[str, float] | None, rho: float | Mapping[str, float] | None, delta: float
) -> float | Mapping[str, float] | None:
    """The requested ε, computed from a zCDP budget where that was given."""
    if rho is None:
        return epsilon
    if isinstance(rho, Mapping):
        return {name: epsilon_of_rho(each, delta) for name, each in rho.items()}
    return epsilon_of_rho(rho, delta)


def _cost_sentence(plan: StepPlan, k: int) -> str:
    entry, sigma = plan.classes[k], plan.sigma(k)
    if math.isinf(sigma):
        return f"Class {entry.name} reaches no layer and costs nothing."
    if plan.injection.raw:
        count = plan.injection.events(0, plan.steps)
        return (
            f"Class {entry.name}: sigma {at_least(sigma)} in each of {count:,} occurrences, every {entry.unit} under its own "
            f"noise alone ({plan.adjacency}), is ε = {epsilon_text(plan.epsilon(k))} at δ = {entry.delta:g} by "
            f"{plan.accountant}, ρ = {at_most(plan.rho(k))}."
        )
    amplified = plan.accountant not in ("zcdp", "gaussian")
    rate = at_most(plan.step_rate(k))
    rate = f"{rate} in one of {plan.bands} of them" if plan.bands > 1 else rate
    sampled = f"each {entry.unit} sampled with rate {rate}" if amplified else "sampling not credited"
    return (
        f"Class {entry.name}: sigma {at_least(sigma)} over {plan.steps:,} steps, {sampled}, is ε = "
        f"{epsilon_text(plan.epsilon(k))} at δ = {entry.delta:g} by {plan.accountant}. Without secret sampling the same "
        f"steps would cost ρ = {at_most(plan.rho(k))}."
    )


def _kept_norm_sentence(plan: StepPlan, measure: Measure, sizes: Sequence[int] | None) -> str:
    whole = math.hypot(*measure.norms)
    found = zip(plan.classes, kept_norm(plan, measure, sizes), strict=True)
    kept = {c.name: part for c, part in found if part is not None}
    words = " and ".join(f"{100 * part:.3g} % of it in class {name}" for name, part in kept.items())
    parts = kept.values()
    remark = ""
    if plan.clipping is not Clipping.ELEMENTWISE and all(part > 0.999 for part in parts):
        remark = f" Nothing is clipped: a clip_norm of {whole:.2g} would add less noise at no loss."
    elif any(part < 0.3 for part in parts):
        remark = (
            f" That is little: clip_norm (a typical gradient has {whole:.2g}) and the learning rate matter more than "
            "any allocation; try a larger one on public data."
        )
    return f"On the proxy ({measure.proxy}) the gradient of an example has norm {whole:.3g}; clipping keeps {words}.{remark}"


def _rule_sentence(rule: Rule, plan: StepPlan) -> str:
    if isinstance(rule, FollowEnergy):
        return (
            f"Shares follow the energy of the noised gradient, read every {_steps_text(rule.every)}, averaged with decay "
            f"{rule.decay:g}, no layer below {rule.least:g}/L of the budget. That gradient is already released: reading it "
            "costs nothing, and sigma stays."
        )
    if isinstance(rule, FollowProxy):
        what = "Fisher information" if rule.estimator == "fisher" else "influence functions"
        return (
            f"Shares follow the {what} of {rule.examples:,} {rule.proxy} examples at the current weights, measured every "
            f"{_steps_text(rule.every)}, no layer below {rule.least:g}/L of the budget. Neither the weights nor the data are "
            "private: it costs nothing, and sigma stays."
        )
    if isinstance(rule, FollowQuantile):
        private = [k for k, entry in enumerate(plan.classes) if not entry.public]
        part = max((plan.bits(k) * plan.sigma(k)) ** 2 for k in private if math.isfinite(plan.sigma(k)))
        return (
            f"Thresholds follow the {rule.target:g} quantile of the gradient norms at rate {rule.rate:g}, read from "
            f"counts with noise {at_least(rule.noise)} at every step. The counts take {100 * part:.3g} % of the budget; ε "
            "includes them."
        )
    if isinstance(rule, ChooseAsPrinted):
        return (
            f"Before every step an exponential mechanism of ε = {at_most(rule.epsilon)} over the Fisher information of private "
            f"contributions picks the layers' parts of {rule.spend:.3g} from {', '.join(rule.names)}: lines 3 and 4 as printed."
        )
    if isinstance(rule, Choose):
        calls = rule.calls(0, plan.steps)
        return (
            f"An exponential mechanism of ε {at_most(rule.epsilon)} chooses the shape of S every {_steps_text(rule.every)} "
            f"({calls:,} {'time' if calls == 1 else 'times'}) among {', '.join(rule.names)}, over a sample of its own. "
            "ε includes it."
        )
    assert isinstance(rule, FollowBudget)
    return (
        f"sigma follows the remaining budget, between {rule.least:g} and {rule.most:g} times the declared one. A Rényi "
        f"filter of order {rule.order:g} checks every step before it is taken. The run may stop early; ε is never exceeded."
    )


def _steps_text(every: int) -> str:
    return "step" if every == 1 else f"{every:,} steps"


_USES_ITS_BUDGET = 0.99  # calibration lands a little on the safe side


NOT_SIGNED = (
    "the data was not admitted by signature: nothing proves who contributed what, or under which bound (use [admit] in "
    "the run file, and lamina attest)"
)


def plan_notes(plan: StepPlan, policy: Policy, epsilon: float | Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Why a class is planned below what it may spend.

    Classes share the noise S of a layer, and S is scaled until every class has at least the sigma that its ε needs.
    The class that needs most decides; the others get more noise than they ask for, and a smaller ε.
    """
    private = [entry.name for entry in plan.classes if not entry.public]
    planned = {name: plan.epsilon(name) for name in private}
    allowed = {name: _allowed_epsilon(policy, name, epsilon) for name in private}
    silent = [name for name in private if not plan.schedule(name)]
    deciding = [n for n in private if (most := allowed[n]) is not None and planned[n] >= _USES_ITS_BUDGET * most]
    notes = [f"class '{name}' reaches no layer of this model: it costs nothing and teaches nothing" for name in silent]
    for name in private:
        most = allowed[name]
        if name in silent or name in deciding or most is None:
            continue
        others = " and ".join(f"'{other}'" for other in deciding)
        reason = "the plan has more noise than its ε needs"
        if others:
            reason = f"classes share the noise of a layer, and class {others} needs more of it"
            if rdp_order_of(plan.accountant) is not None:
                reason += f"; and all classes are counted at one Rényi order ({plan.accountant}), which suits some less"
            if plan.allocation in ("flat", "uniform", "automatic"):
                reason += " (allocation pareto would let it spend the rest where that class does not reach)"
        notes.append(
            f"class '{name}' is planned at ε {epsilon_text(planned[name])}, below the {at_most(most)} that it may spend: {reason}"
        )
    return tuple(notes)


def bands_note(plan: StepPlan) -> tuple[str, ...]:
    """Return a note if correlated noise over two or more steps may have less error at the plan's ε."""
    if plan.bands > 1 or best_bands(plan, 2) == 1:
        return ()
    return (
        f"noise that is correlated over 2 steps has {at_most(prefix_error_ratio(plan, 2))} times the mean squared error in "
        'sums of gradients, at the same ε, and correlation over more steps may reduce it further: set bands = "auto" in RUN.toml '
        "(requires one rank, and contributions with a unit; docs/decisions/correlated_noise.md)",
    )


def _allowed_epsilon(policy: Policy, name: str, epsilon: float | Mapping[str, float] | None) -> float | None:
    """The requested ε, or else what the policy allows."""
    if isinstance(epsilon, Mapping):
        return epsilon.get(name, policy.bound(name))
    return policy.bound(name) if epsilon is None else epsilon


MakePlan = Callable[["Allocator"], "tuple[StepPlan, Allocation]"]

WHEN_TO_USE = {
    "flat": "the first run, and what others are compared with: nothing need be known of the layers",
    "uniform": "a step in one pass, where nothing was measured",
    "proportional": "to reproduce group-wise clipping; every layer counts equally, at more noise in all",
    "pareto": "the default: flat for one class, for several each its whole budget; better with good norms of a proxy",
    "lsab": "a zCDP budget without amplification spent exactly, or to compare with its document",
    "ladp": "shares that follow training, or named layers that need more care; set its presets yourself",
    "ladp-budget": "as ladp, when the run may stop early and sigma may follow what is left",
    "quantile": "norms that change by orders of magnitude and that no proxy shows; not at small ε",
    "automatic": "a clip norm that cannot be tuned: every contribution counts by its direction; no public class",
    "printed-lsab": "never for real data: to measure what equation 16 as printed gives away",
    "printed-ladp": "never for real data: to measure what the algorithm as printed gives away",
}
"""docs/policies has a page for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedAllocation:
    """An allocation that has no plan here, and the reason."""

    allocation: str
    when: str
    problem: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints under `compare`."""
        return {"ran": False, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedAllocation:
    """An allocation, its plan and figures."""

    allocation: str
    when: str
    plan: StepPlan
    noise: float
    against_flat: float
    kept: float | None
    worst: tuple[str, float] | None
    whole: float | None

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints under `compare`."""
        plan = self.plan
        return {
            "allocation": self.allocation,
            "ran": True,
            "clipping": plan.clipping.value,
            "accountant": plan.accountant,
            "classes": {
                entry.name: {
                    "sigma": finite_or_none(plan.sigma(k)),
                    "epsilon": None if entry.public else finite_or_none(plan.epsilon(k)),
                    **({"claimed": plan.claimed[k]} if plan.claimed else {}),
                }
                for k, entry in enumerate(plan.classes)
            },
            "total_noise": self.noise,
            "noise_against_flat": self.against_flat,
            "kept": self.kept,
            "signal_to_noise": self.whole,
            "worst_layer": None if self.worst is None else {"name": self.worst[0], "signal_to_noise": self.worst[1]},
            "rules": list(rules_in_words(plan)),
            "printed": bool(plan.claimed),
            "when": self.when,
            "digest": plan.digest().hex(),
        }


def compare_allocations(
    make: MakePlan, among: Iterable[str], measure: Measure | None, sizes: Sequence[int] | None = None
) -> tuple[ComparedAllocation | RefusedAllocation, ...]:
    """A row for each allocation; `make` makes its plan, or refuses. Names are checked first."""
    from lamina.allocate.basic import flat, uniform

    allocators = {text: by_name.parse_allocation(text) for text in among}
    try:
        reference = total_noise(make(flat)[0], sizes)
    except PlanError:  # profiles with weights need a box, which flat is not
        reference = total_noise(make(uniform)[0], sizes)
    return tuple(_compared(text, allocator, make, reference, measure, sizes) for text, allocator in allocators.items())


def comparison_text(
    rows: Sequence[ComparedAllocation | RefusedAllocation], chosen: str, measure: Measure | None
) -> str:
    """Tables: the sound allocations, the published ones with their false claims, and what could not run and why."""
    parts = []
    refused = [row for row in rows if isinstance(row, RefusedAllocation)]
    ran = [row for row in rows if isinstance(row, ComparedAllocation)]
    sound, printed = ([row for row in ran if bool(row.plan.claimed) is claimed] for claimed in (False, True))
    if sound:
        parts.append(_comparison_table(sound, chosen, measure))
        parts.append("when to use:\n" + table([[f"  {row.allocation}", row.when] for row in sound], left=2))
    if printed:
        parts.append(_claims_table(printed))
    if refused:
        reasons = [f"  {row.allocation}: {row.problem}. Remedy: {row.remedy}" for row in refused]
        parts.append("\n".join(["not compared:", *reasons]))
    return "\n\n".join(parts)


def _compared(
    text: str, allocator: Allocator, make: MakePlan, reference: float, measure: Measure | None,
    sizes: Sequence[int] | None,
) -> ComparedAllocation | RefusedAllocation:  # fmt: skip
    when = WHEN_TO_USE.get(allocator.name, "")
    try:
        plan, _ = make(allocator)
    except (PlanError, AccountingError) as error:
        return RefusedAllocation(allocation=text, when=when, problem=error.problem, remedy=error.remedy)
    noise = total_noise(plan, sizes)
    ratios = zip(plan.layers, signal_to_noise(plan, measure, sizes), strict=True)
    worst = min(((layer.name, r) for layer, r in ratios if r is not None), key=lambda found: found[1], default=None)
    parts = [p for p in kept_norm(plan, measure, sizes) if p is not None] if measure is not None else []
    return ComparedAllocation(
        allocation=text, when=when, plan=plan, noise=noise, against_flat=noise / reference if reference else 1.0,
        kept=min(parts, default=None), worst=worst, whole=whole_signal_to_noise(plan, measure, sizes),
    )  # fmt: skip


def _comparison_table(rows: Sequence[ComparedAllocation], chosen: str, measure: Measure | None) -> str:
    """Noise and signal of each; then sigma and ε of every class."""
    head = ["  allocation", "clipping", "moves", "Σ d·S²", "of flat"]
    head += ["kept"] if measure is not None else []
    noise, price = [[*head, "S/N", "worst S/N", "at"]], [["  allocation"]]
    names = [entry.name for entry in rows[0].plan.classes if not entry.public]
    price[0] += [f"{what} {name}" for name in names for what in ("sigma", "ε")]
    for row in rows:
        plan, name = row.plan, ("→ " if row.allocation == chosen else "  ") + row.allocation
        cells = [name, plan.clipping.value, _adaptive_rules(plan), at_least(row.noise), f"{row.against_flat:.3f}"]
        cells += ["-" if row.kept is None else f"{100 * row.kept:.3g} %"] if measure is not None else []
        worst = (three_digits(row.worst[1]), row.worst[0]) if row.worst else ("-", "-")
        noise.append([*cells, three_digits(row.whole), *worst])
        each = [(three_digits(plan.sigma(k)), epsilon_text(plan.epsilon(k))) for k in names]
        price.append([name, *(cell for pair in each for cell in pair)])
    notes = [_NOISE_NOTE, *([_KEPT_NOTE] if measure is not None else [])]
    return "\n".join([table(noise, left=3), "", *notes, "", table(price)])


_NOISE_NOTE = """\
  Σ d·S²: noise in the sum of a step, over all coordinates. of flat: against the flat allocation; less is better, but
  only for gradients that clipping keeps. S/N: signal to noise of the whole gradient, and of its worst layer."""
_KEPT_NOTE = (
    "  kept: the part of a typical gradient's norm on the proxy that clipping keeps, in the class that keeps least."
)


def _claims_table(rows: Sequence[ComparedAllocation]) -> str:
    lines = [["  allocation", "class", "ε claimed", "true ε", "accountant"]]
    for row in rows:
        plan = row.plan
        for k, entry in enumerate(plan.classes):
            if not entry.public:
                figures = [at_most(plan.claimed[k]), epsilon_text(plan.epsilon(k)), plan.accountant]
                lines.append([f"  {row.allocation}", entry.name, *figures])
    return "methods as published, which are not what they claim:\n" + table(lines, left=2)


def _adaptive_rules(plan: StepPlan) -> str:
    names = [name for rule in plan.rules for name, kind in RULE_KINDS.items() if type(rule) is kind]
    return ", ".join(names) or "nothing"


def risk_summary(plan: StepPlan, k: int) -> dict[str, Any]:
    """Return the risks of a class after all steps, by their names in certificates; null if no bound is proven."""
    found: dict[str, Any] = {}
    for of in RISKS:
        curve = None if plan.classes[k].public else plan_curve(plan, k, of)
        rates = {} if curve is None else {f"{rate:g}": curve.tpr(rate) for rate in STATED_RATES}
        found[of] = None if curve is None else {"tpr": rates, "accuracy": curve.accuracy()}
    return found


def _risk_lines(plan: StepPlan) -> list[str]:
    """Return a table of the risks of each private class, by their names in certificates."""
    rows = [["class", "risk", "found at 1 % false accusations", "right answers from a coin toss"]]
    for k, entry in enumerate(plan.classes):
        for of, risk in ({} if entry.public else risk_summary(plan, k)).items():
            rates = [None, None] if risk is None else [risk["tpr"]["0.01"], risk["accuracy"]]
            rows.append([entry.name, of, *("not proven" if rate is None else percent_text(rate) for rate in rates)])
    return table(rows, left=2).split("\n") if len(rows) > 1 else []


@dataclass(frozen=True, kw_only=True)
class PlanExplanation:
    """A plan and its allocation; with reasons if `full`, with other allocations if `compared`.

    `sizes`: how many numbers of each layer are reached; None: all.
    """

    plan: StepPlan
    allocation: Allocation
    measure: Measure | None
    notes: tuple[str, ...]
    compared: Sequence[ComparedAllocation | RefusedAllocation] | None
    chosen: str
    full: bool
    sizes: Sequence[int] | None = None

    @property
    def layers(self) -> tuple[LayerFigures, ...]:
        return layer_figures(self.plan, self.measure, self.sizes)

    @property
    def why(self) -> tuple[str, ...]:
        return plan_reasons(self.plan, self.allocation, self.measure, self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """The figures of the plan, and beside them what follows from a measure; null where there is none."""
        result = self.plan.to_dict()
        for k, each in enumerate(result["classes"].values()):
            each |= risk_summary(self.plan, k)
        for entry, row in zip(result["layers"], self.layers, strict=True):
            entry |= {"delta_tight": row.tight, "delta_global": row.worst, "norm": row.norm}
            entry |= {"signal_to_noise": row.signal_to_noise, "reached": row.reached if any(row.clip) else 0}
        result |= {
            "total_noise": total_noise(self.plan, self.sizes),
            "signal_to_noise": whole_signal_to_noise(self.plan, self.measure, self.sizes),
            "proxy": None if self.measure is None else self.measure.proxy,
            "why": list(self.why),
            "notes": [*self.notes, *(self.measure.notes if self.measure is not None else ())],
        }
        if self.compared is not None:
            result["compare"] = [row.to_dict() for row in self.compared]
        return result

    def __str__(self) -> str:
        """The plan's table; with `full` more columns per layer, bars and reasons; then the comparison."""
        parts = [str(self.plan)]
        if self.full:
            head, _, classes = str(self.plan).split("\n\n", 2)
            reasons = "\n".join(f"- {reason}" for reason in self.why)
            source = "Nothing was measured, so n̂ is the threshold C (--proxy gaussian measures n)."
            if self.measure is not None:
                source = f"n was measured on the proxy ({self.measure.proxy})."
            note = f"{_SIGNAL_TO_NOISE} {source}"
            parts = [head, layer_table(self.plan, self.layers), note, layer_bars(self.layers)]
            parts += [classes, f"why this plan\n{reasons}"]
        if risks := _risk_lines(self.plan):
            parts.append("\n".join(risks))
        notes = [f"note: {note}" for note in self.notes]
        if not self.full:
            notes = [*(f"rule: {rule}" for rule in rules_in_words(self.plan)), *notes]
        if self.measure is not None:
            notes += [f"note: measured: {note}" for note in self.measure.notes]
        if notes:
            parts[-1] += "\n" + "\n".join(notes)
        if self.compared is not None:
            parts.append(comparison_text(self.compared, self.chosen, self.measure))
        return "\n\n".join(parts)
