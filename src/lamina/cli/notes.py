"""What the figures of a plan do not say by themselves."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.account import order_of
from lamina.cli.output import round_up
from lamina.plan import Policy, StepPlan
from lamina.train import Corpus

_NEARLY = 0.99  # calibration lands a little on the safe side


NOT_SIGNED = (
    "the data was not admitted by signature: who contributed what, and under which bound, is on the word of whoever "
    "runs this ([admit] in the run file, lamina attest)"
)


def admission_notes(corpus: Corpus) -> tuple[str, ...]:
    """What a run says about how its data got in."""
    return () if corpus.admission is not None else (NOT_SIGNED,)


def plan_notes(
    plan: StepPlan, policy: Policy, epsilon: float | Mapping[str, float] | None = None
) -> tuple[str, ...]:
    """Why a class is planned below what it may spend.

    Classes share the noise S of a layer, and S is scaled until every class has at least the sigma that its ε needs.
    The class that needs most decides; the others get more noise than they ask for, and a smaller ε.
    """
    private = [entry.name for entry in plan.classes if not entry.public]
    planned = {name: plan.epsilon(name) for name in private}
    allowed = {name: _allowed(policy, name, epsilon) for name in private}
    silent = [name for name in private if not plan.schedule(name)]
    deciding = [
        name
        for name in private
        if allowed[name] is not None and planned[name] >= _NEARLY * (allowed[name] or 0)
    ]
    notes = [
        f"class '{name}' reaches no layer of this model: it costs nothing and teaches nothing"
        for name in silent
    ]
    for name in private:
        most = allowed[name]
        if name in silent or name in deciding or most is None:
            continue
        others = " and ".join(f"'{other}'" for other in deciding)
        reason = (
            f"classes share the noise of a layer, and class {others} needs more of it"
            if others
            else "the plan has more noise than its ε asks for"
        )
        if order_of(plan.accountant) is not None and others:
            reason += (
                f"; and all classes are counted at one Rényi order ({plan.accountant}), which suits some less"
            )
        if plan.allocation in ("flat", "uniform", "automatic") and others:
            reason += " (pareto would let it spend the rest where that class does not reach)"
        notes.append(
            f"class '{name}' is planned at ε {round_up(planned[name])}, below the {most:g} that it may spend: {reason}"
        )
    return tuple(notes)


def _allowed(policy: Policy, name: str, epsilon: float | Mapping[str, float] | None) -> float | None:
    """What was asked for, or else what the policy allows."""
    if isinstance(epsilon, Mapping):
        return epsilon.get(name, policy.bound(name))
    return policy.bound(name) if epsilon is None else epsilon
