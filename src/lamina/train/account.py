"""What a run has cost so far, as it may be told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamina.account import Schedule, accountant, cost
from lamina.plan import FollowBudget, StepPlan
from lamina.train.book.account import is_bound
from lamina.train.book.charge import follows_budget
from lamina.train.followed import belongs
from lamina.train.run import Run
from lamina.train.settings import code_version
from lamina.train.snapshot import TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """By class: ε of this run (`epsilon`) and of every run in the ledger (`total`). Public classes owe nothing."""

    epsilon: dict[str, float]
    total: dict[str, float]


def spent_so_far(run: Run, plan: StepPlan) -> dict[str, float]:
    """ε by class of everything that the run was charged for: redone segments count again.

    Journal and ledger should agree; where they do not (one of them was put back from a copy), the larger counts.
    Classes that an earlier plan of the run charged are listed too. Noise that is chosen on the way is proven to stay
    within its budget, not to have cost less on the way: from the first step on it counts as a whole.
    """
    deltas = _deltas(run) | {entry.name: entry.delta for entry in plan.classes}
    return {name: _spent(run, plan, name, delta) for name, delta in deltas.items() if not is_bound(name)}


def _deltas(run: Run) -> dict[str, float]:
    """Everything that the run was charged under, with its δ."""
    return {c.cls: c.delta for opened in run.attempts for c in opened.charges}


def _spent(run: Run, plan: StepPlan, name: str, delta: float) -> float:
    charged = run.charged.get(name, ())
    mine = accountant(plan.accountant).epsilon(charged, delta) if charged else 0.0
    booked = run.book.spent(run.id, name, delta=delta, accountant=plan.accountant) if delta else 0.0
    followed = follows_budget(plan) and (mine or booked) and not is_bound(name)
    return max(mine, booked, plan.epsilon(name) if followed else 0.0)


def _total(run: Run, plan: StepPlan, name: str, delta: float, epsilon: float) -> float:
    """ε of every run in the ledger, and never less than that of this one."""
    if not delta:
        return epsilon
    return max(epsilon, run.book.total(name, delta=delta, accountant=plan.accountant).spent)


def account(run: Run, plan: StepPlan) -> Account:
    mine, deltas = spent_so_far(run, plan), _deltas(run) | {e.name: e.delta for e in plan.classes}
    return Account(
        epsilon=mine,
        total={name: _total(run, plan, name, deltas[name], epsilon) for name, epsilon in mine.items()},
    )


def signed_figures(run: Run, plan: StepPlan) -> dict[str, dict[str, Any]]:
    """By signed bound: ε that was signed, of this run, and of all runs. Without `scale`: of an earlier start.

    Worked out at the end of a run: there may be thousands, and after each segment every price would be another one.
    """
    deltas = {name: delta for name, delta in _deltas(run).items() if is_bound(name)}
    deltas |= {each.name: plan.delta(each.cls) for each in run.accounts}
    found: dict[str, dict[str, Any]] = {}
    for name, delta in deltas.items():
        epsilon = _spent(run, plan, name, delta)
        found[name] = {"delta": delta, "epsilon": epsilon, "total": _total(run, plan, name, delta, epsilon)}
    for each in run.accounts:
        found[each.name] |= {"class": each.cls, "scale": each.scale, "signed": each.epsilon}
    return found


def public_figures(run: Run, plan: StepPlan, state: TrainingState, notes: Sequence[str]) -> dict[str, Any]:
    """The content of metrics.json: nothing in it depends on who was sampled, or on a private loss."""
    now = account(run, plan)
    classes: dict[str, dict[str, Any]] = {
        entry.name: {
            "unit": entry.unit,
            "public": entry.public,
            "adjacency": plan.adjacency,
            "delta": entry.delta,
            "epsilon": now.epsilon[entry.name],
            "total": now.total[entry.name],
            "steps_charged": sum(
                o.last - o.first for o in run.attempts if any(c.cls == entry.name for c in o.charges)
            ),
        }
        for entry in plan.classes
    }
    for name in now.epsilon.keys() - classes.keys():  # of an earlier plan of this run
        classes[name] = {"epsilon": now.epsilon[name], "total": now.total[name]}
    return {
        "run": run.id,
        "origin": run.origin,
        "steps": state.step,
        "planned_steps": plan.steps,
        "segments": state.segments,
        "plan": plan.digest().hex(),
        "accountant": plan.accountant,
        "classes": classes,
        "evaluations": state.evaluations,
        "code": code_version(),
        "notes": list(notes),
    }


def final_figures(run: Run, plan: StepPlan, caps: Mapping[str, int], step: int) -> dict[str, dict[str, Any]]:
    """By class, what a certificate says beside ε: the replace-one figure, and what holds without amplification.

    An attempt that was given up used its contributions too: each adds at most the cap, or its steps.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, delta in _deltas(run).items():
        if is_bound(name):
            continue
        schedule, cap = run.charged.get(name, ()), caps.get(name)
        most = None if cap is None else cap + sum(min(cap, o.last - o.first) for o in run.wasted(step))
        if any(belongs(o) and any(c.cls == name for c in o.charges) for o in run.attempts):
            found[name] = _followed(run, plan, name, schedule, delta, step)
        else:
            figures = cost(schedule, delta=delta, accountant=plan.accountant, occurrences=most)
            found[name] = {
                "epsilon_replace_one": _finite(figures.epsilon_replace_one),
                "rho": figures.rho,
                "epsilon_unamplified": figures.epsilon_unamplified,
            }
        found[name]["max_occurrences"] = cap
    return found


def _followed(
    run: Run, plan: StepPlan, name: str, fixed: Schedule, delta: float, step: int
) -> dict[str, float | None]:
    """The same where noise followed a budget. None where nothing is proven: under several plans.

    Where occurrences are known, all that is sure is the least noise that the rule allows, at every step there was.
    """
    rule = plan.rule(FollowBudget)
    if fixed or rule is None or any(o.plan != plan.digest() for o in run.attempts):
        return {"epsilon_replace_one": None, "rho": None, "epsilon_unamplified": None}
    steps, *choices = plan.schedule(name)
    wasted = run.wasted(step)
    again = sum(o.last - o.first for o in wasted)
    lowest = replace(steps, sigma=steps.sigma * rule.least, steps=plan.steps + again)
    more = [c.event for o in wasted for c in o.charges if c.cls == name and c.sigma != steps.sigma]
    sure = cost((lowest, *choices, *more), delta=delta, accountant="gaussian")
    figures = cost(plan.schedule(name), delta=delta, accountant=plan.accountant)
    return {
        "epsilon_replace_one": _finite(figures.epsilon_replace_one),
        "rho": sure.rho,
        "epsilon_unamplified": sure.epsilon_unamplified,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: nothing is claimed then."""
    return value if math.isfinite(value) else None
