"""The policies of the table: what is asked of `make_plan`, and whether it may look at the measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina import Clipping, LayerStack, Policy, StepPlan, make_plan
from lamina.allocate.basic import LSAB, Pareto, Proportional, Quantile, automatic, flat, uniform
from lamina.allocate.ladp import LADP
from lamina.allocate.measure.measure import Measure
from lamina.allocate.problem import Allocate, Allocation, AllocationProblem, optimal_noise

from .tasks import DELTA, Task

CHOICES = 5  # how often a run of ladp with choices asks its exponential mechanism


@dataclass(frozen=True, kw_only=True)
class Even:
    """`pareto` with even thresholds. Of itself it has C ∝ √d where nothing is measured, and then is `flat`."""

    name: ClassVar[str] = "pareto"

    def __call__(self, problem: AllocationProblem) -> Allocation:
        clip, m = problem.thresholds(), np.asarray(problem.weights)
        return Allocation(clip=clip, noise=optimal_noise(problem, clip, m), clipping=Clipping.JOINT)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table. `measured`: C, S or the sensitive layers follow the measurement on the stand-in."""

    name: str
    what: str
    allocate: Callable[[Task], Allocate]
    measured: bool = True


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(name="flat", what="joint clip, one S", allocate=lambda t: flat, measured=False),
        Entry(name="uniform", what="box, even C, one S", allocate=lambda t: uniform, measured=False),
        Entry(name="proportional", what="box, C ∝ n, equal shares", allocate=lambda t: Proportional()),
        Entry(name="pareto-even", what="joint, even C, best S for m = d", allocate=lambda t: Even(), measured=False),
        Entry(name="pareto-n", what="joint, C ∝ n, best S for m = d (kkt)", allocate=lambda t: Pareto()),
        Entry(
            name="pareto-n-box",
            what="box, C ∝ n, best S for m = d (kkt)",
            allocate=lambda t: Pareto(clipping=Clipping.BOX),
        ),
        Entry(name="pareto-n-half", what="as pareto-n, n shrunk half-way to √d", allocate=lambda t: Pareto(shrink=0.5)),
        Entry(
            name="pareto-harm",
            what="joint, C ∝ n, best S for the measured harm",
            allocate=lambda t: Pareto(weights="harm"),
        ),
        Entry(name="lsab", what="box, C ∝ Δ, best S for the measured harm", allocate=lambda t: LSAB()),
        Entry(name="ladp", what="box, presets, shares follow the released energy", allocate=lambda t: LADP()),
        Entry(
            name="ladp-choice",
            what=f"joint, as ladp, {CHOICES} paid choices of S at ε 0.5",
            allocate=lambda t: LADP(choose_every=-(-t.steps // CHOICES)),
        ),
        Entry(
            name="ladp-budget",
            what="as ladp, sigma follows the budget under a filter",
            allocate=lambda t: LADP(mode="budget"),
        ),
        Entry(name="quantile", what="box, C follows paid medians", allocate=lambda t: Quantile()),
        Entry(name="automatic", what="joint, every gradient normalised", allocate=lambda t: automatic),
    )
}


def everybody(task: Task, units: int, clip: float) -> Policy:
    """All contributions in one class, `clip` the norm of a contribution's whole gradient."""
    return Policy.parse(
        f'[corpus]\norigin = "benchmark"\ndelta = {DELTA}\n'
        f'[class.all]\npopulation = {units}\nclip_norm = {clip}\nunit = "{task.unit}"\n'
    )


def planned(entry: Entry, task: Task, units: int, clip: float, measure: Measure | None) -> StepPlan:
    """The plan of a policy at the task's ε."""
    return make_plan(
        LayerStack.from_model(task.model()),
        everybody(task, units, clip),
        batch=task.batch,
        steps=task.steps,
        allocate=entry.allocate(task),
        epsilon=task.epsilon,
        measure=measure if entry.measured else None,
    )
