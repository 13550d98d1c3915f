"""A plan in sentences: its rules, and why it is as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lamina.account.zcdp import epsilon_of_rho
from lamina.allocate import Allocation
from lamina.cli.explain.figures import kept
from lamina.cli.output import round_up
from lamina.plan import Choose, Clipping, FollowBudget, FollowEnergy, FollowQuantile, Rule, StepPlan

if TYPE_CHECKING:
    from lamina.sensitivity import Measure

SIGNAL = (
    "S/N: signal to noise of the layer at the first step, b·n̂/(S·√d): b contributions expected in a step, n̂ the norm "
    "of a typical one after clipping, S·√d the norm of the noise. An upper figure, as if all contributions pulled the "
    "same way."
)
_BOUND = " Nothing was measured, so n̂ is the threshold C itself (--proxy gaussian measures n)."


def signal_note(measure: Measure | None) -> str:
    """What the column of signal to noise means."""
    return SIGNAL + (_BOUND if measure is None else f" n was measured on the proxy ({measure.proxy}).")


def rules_in_words(plan: StepPlan) -> tuple[str, ...]:
    """One sentence for each rule by which C and S may change while the plan runs; none if nothing moves."""
    return tuple(_rule(rule, plan) for rule in plan.rules)


def why(
    plan: StepPlan, allocation: Allocation, measure: Measure | None, sizes: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Why this plan: the allocation's reasons, what the accountant said, what clipping keeps, rules, warning."""
    return (
        *allocation.why,
        *(_priced(plan, k) for k, entry in enumerate(plan.classes) if not entry.public),
        *(
            (_kept(plan, measure, sizes),)
            if measure is not None and any(math.isfinite(plan.sigma(k)) for k in _all(plan))
            else ()
        ),
        *(rules_in_words(plan) or ("Nothing moves: C and S are the same in every step.",)),
        *warnings(plan),
    )


def warnings(plan: StepPlan) -> tuple[str, ...]:
    """Of a printed allocation: what its document claims, and what is true."""
    if not plan.claimed:
        return ()
    told = "; ".join(
        f"class {entry.name}: claimed ε = {plan.claimed[k]:.4g}, true ε = {figure(plan.epsilon(k))}"
        for k, entry in enumerate(plan.classes)
        if not entry.public
    )
    return (
        f"NOT WHAT IT CLAIMS. A printed method, kept to be measured ({told}). Do not train real data by it.",
    )


def asked(
    epsilon: float | Mapping[str, float] | None, rho: float | Mapping[str, float] | None, delta: float
) -> float | Mapping[str, float] | None:
    """The ε that was asked for, also where it was asked for as a zCDP budget."""
    if rho is None:
        return epsilon
    if isinstance(rho, Mapping):
        return {name: epsilon_of_rho(each, delta) for name, each in rho.items()}
    return epsilon_of_rho(rho, delta)


def figure(epsilon: float) -> str:
    """ε, never printed smaller than it is."""
    if not math.isfinite(epsilon):
        return "∞"
    if epsilon < 1e4:
        return round_up(epsilon)
    exponent = math.floor(math.log10(epsilon)) - 3
    return f"{math.ceil(epsilon / 10.0**exponent) * 10.0**exponent:.4g}"


def _priced(plan: StepPlan, k: int) -> str:
    entry, sigma = plan.classes[k], plan.sigma(k)
    if math.isinf(sigma):
        return f"Class {entry.name} reaches no layer: it is owed nothing."
    if plan.injection.raw:
        count = plan.injection.events(0, plan.steps)
        return (
            f"Class {entry.name}: sigma {sigma:.4g} in each of {count:,} occurrences, every {entry.unit} under its own "
            f"noise alone ({plan.adjacency}), is ε = {figure(plan.epsilon(k))} at δ = {entry.delta:g} by "
            f"{plan.accountant}, ρ = {plan.rho(k):.4g}."
        )
    sampled = (
        f"each {entry.unit} sampled with rate {entry.sampling_rate:.4g}"
        if plan.accountant not in ("zcdp", "gaussian")
        else "without credit for sampling"
    )
    return (
        f"Class {entry.name}: sigma {sigma:.4g} over {plan.steps:,} steps, {sampled}, is ε = "
        f"{figure(plan.epsilon(k))} at δ = {entry.delta:g} by {plan.accountant}. If it were known who was sampled "
        f"when, the same steps would be ρ = {plan.rho(k):.4g}."
    )


def _kept(plan: StepPlan, measure: Measure, sizes: Sequence[int] | None) -> str:
    told = []
    whole = math.hypot(*measure.norms)
    for entry, part in zip(plan.classes, kept(plan, measure, sizes), strict=True):
        if part is not None:
            told.append(f"{100 * part:.3g} % of it in class {entry.name}")
    parts = [part for part in kept(plan, measure, sizes) if part is not None]
    remark = ""
    if plan.clipping is not Clipping.ELEMENTWISE and all(part > 0.999 for part in parts):
        remark = f" Nothing is clipped: a clip_norm of {whole:.2g} would add less noise and lose nothing yet."
    elif any(part < 0.3 for part in parts):
        remark = (
            f" That is little: clip_norm (a typical gradient has {whole:.2g}) and the learning rate matter more than "
            "any allocation; try a larger one on public data."
        )
    return (
        f"On the proxy ({measure.proxy}) the gradient of an example has norm {whole:.3g}; clipping keeps "
        f"{' and '.join(told)}.{remark}"
    )


def _rule(rule: Rule, plan: StepPlan) -> str:
    if isinstance(rule, FollowEnergy):
        return (
            f"Shares follow the energy of the noised gradient: looked at every {_steps(rule.every)}, averaged with "
            f"decay {rule.decay:g}, no layer below {rule.least:g}/L of the budget. What is looked at is already "
            "released: it costs nothing, and sigma stays."
        )
    if isinstance(rule, FollowQuantile):
        private = [k for k in _all(plan) if not plan.classes[k].public]
        part = max((plan.bits(k) * plan.sigma(k)) ** 2 for k in private if math.isfinite(plan.sigma(k)))
        return (
            f"Thresholds follow the {rule.target:g} quantile of the gradient norms at rate {rule.rate:g}, read from "
            f"counts with noise {rule.noise:.4g} at every step. The counts take {100 * part:.3g} % of the budget; ε "
            "includes them."
        )
    if isinstance(rule, Choose):
        calls = rule.calls(0, plan.steps)
        return (
            f"An exponential mechanism of ε {rule.epsilon:g} chooses the shape of S every {_steps(rule.every)} "
            f"({calls:,} {'time' if calls == 1 else 'times'}) among {', '.join(rule.names)}, over a sample of its own. "
            "ε includes it."
        )
    assert isinstance(rule, FollowBudget)
    return (
        f"sigma follows the budget that is left, between {rule.least:g} and {rule.most:g} times the declared one, "
        f"under a Rényi filter of order {rule.order:g} that is asked before every step. It may stop early; ε is never "
        "exceeded."
    )


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every:,} steps"


def _all(plan: StepPlan) -> range:
    return range(len(plan.classes))
