"""One clip norm and one learning rate per policy, chosen on the stand-in: the same grid and tries for every policy."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from lamina import StepPlan
from lamina.allocate.measure.measure import Measure

from .data import Split
from .policies import Entry, planned
from .store import Store
from .tasks import Task
from .train import run

FIRST_SEED = 50  # tuning seeds and final seeds are disjoint


def tune(entry: Entry, task: Task, split: Split, measure: Measure, store: Store) -> tuple[float, float]:
    """(clip, rate) with the best mean figure on the stand-in's test part."""
    for clip in task.clips:
        plan = planned(entry, task, split.train.units, clip, measure)
        for rate in task.rates:
            for seed in range(FIRST_SEED, FIRST_SEED + task.tries):
                once("tuning", entry, task, split, plan, store, clip=clip, rate=rate, seed=seed)
    return best(task, store.tuning[entry.name])


def best(task: Task, rows: list[dict[str, Any]]) -> tuple[float, float]:
    points: dict[tuple[float, float], list[float]] = {}
    for row in rows:
        if row["clip"] in task.clips and row["rate"] in task.rates:  # a file may hold points of an older grid
            points.setdefault((row["clip"], row["rate"]), []).append(worth(task, row["figure"]))
    return max(points, key=lambda point: fmean(points[point]))


def worth(task: Task, figure: float | None) -> float:
    """The figure with larger better; a run that diverged is worth nothing."""
    if figure is None:
        return -math.inf
    return figure if task.higher else -figure


def once(
    table: str,
    entry: Entry,
    task: Task,
    split: Split,
    plan: StepPlan,
    store: Store,
    *,
    clip: float,
    rate: float,
    seed: int,
) -> None:
    """Measure one run unless the store has it."""
    digest = plan.digest().hex()[:16]
    if store.find(table, entry.name, clip=clip, rate=rate, seed=seed, plan=digest) is not None:
        return
    figure, taken = run(task, split, plan, rate=rate, clip=clip, seed=seed)
    row = {"clip": clip, "rate": rate, "seed": seed, "plan": digest, "steps": taken}
    row["figure"] = round(figure, 6) if math.isfinite(figure) else None
    row["epsilon"] = round(plan.epsilon(0), 6)
    store.add(table, entry.name, row)
    print(
        f"{task.name:12s} {table:6s} {entry.name:14s} C {clip:<5g} rate {rate:<6g} seed {seed}  {row['figure']}",
        flush=True,
    )
