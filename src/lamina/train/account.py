"""What a run has cost so far, as it may be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.account import accountant, cost
from lamina.plan import StepPlan
from lamina.train.run import Run
from lamina.train.settings import code_version
from lamina.train.snapshot import TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """By class: ε of this run (`epsilon`) and of every run in the book (`total`). Public classes owe nothing."""

    epsilon: dict[str, float]
    total: dict[str, float]


def spent_so_far(run: Run, plan: StepPlan) -> dict[str, float]:
    """ε by class of everything that the run was charged for: redone segments count again."""
    charged = run.charged
    priced = accountant(plan.accountant)
    return {
        entry.name: priced.epsilon(charged.get(entry.name, ()), entry.delta) if entry.name in charged else 0.0
        for entry in plan.classes
    }


def account(run: Run, plan: StepPlan) -> Account:
    total = {
        entry.name: 0.0
        if entry.public
        else run.book.total(run.origin, entry.name, delta=entry.delta, accountant=plan.accountant).spent
        for entry in plan.classes
    }
    return Account(epsilon=spent_so_far(run, plan), total=total)


def public_figures(run: Run, plan: StepPlan, state: TrainingState, notes: Sequence[str]) -> dict[str, Any]:
    """The content of metrics.json: nothing in it depends on who was sampled, or on a private loss."""
    now = account(run, plan)
    charged = run.charged
    classes = {
        entry.name: {
            "unit": entry.unit,
            "public": entry.public,
            "delta": entry.delta,
            "epsilon": now.epsilon[entry.name],
            "total": now.total[entry.name],
            "steps_charged": sum(event.steps for event in charged.get(entry.name, ())),
        }
        for entry in plan.classes
    }
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


def final_figures(run: Run, plan: StepPlan, caps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """By class, what a certificate says beside ε: the replace-one figure, and what holds without amplification.

    An attempt that was given up used its contributions too: each adds at most the cap, or its steps.
    """
    found = {}
    for name, schedule in run.charged.items():
        cap = caps.get(name)
        most = None if cap is None else cap + sum(min(cap, steps) for steps in run.redone(name))
        figures = cost(schedule, delta=plan.delta(name), accountant=plan.accountant, occurrences=most)
        found[name] = {
            "epsilon_replace_one": figures.epsilon_replace_one,
            "rho": figures.rho,
            "epsilon_unamplified": figures.epsilon_unamplified,
            "max_occurrences": cap,
        }
    return found
