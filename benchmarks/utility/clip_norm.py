"""The clip norm that nobody tunes, against every clip norm of a grid: same optimiser, rate, seeds and ε.

`make_private` has two untuned rules:

proxy    0.4 of the typical gradient norm on the stand-in with its targets (`lamina.run.private.typical_norm`)
fixed    0.1, without a proxy: a point of every grid

The error is 1 - accuracy, 1 - AUC or NMSE, the mean over the seeds. Learning rates are those that `flat` was given on the
stand-ins; that of Adam was not tuned.
"""

from __future__ import annotations

import datetime
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from lamina import Corpus, StepPlan
from lamina.allocate.problem import CLIP_PART, untuned_clip_norm
from lamina.run.private import typical_norm

from .data import Split, simulated
from .policies import ENTRIES, planned
from .store import RESULTS
from .tasks import TASKS, Task, single_leads
from .train import model_of, run

SEEDS = 5
MOST = 1.05  # times the error of the grid's best
_FOLDER = Path(tempfile.gettempdir()) / "lamina-utility"


def _simulated_beats() -> Split:
    """The autoencoder's simulated patients as if they were the private ones."""
    return single_leads(simulated(_FOLDER))


def _other_patients(folder: Path) -> Split:
    """Others of the same simulation: the test patients, who are not trained on."""
    split = _simulated_beats()
    return Split(train=split.test, test=split.test)


BEATS = replace(
    TASKS["autoencoder"],
    name="beats",
    title="simulated beats, autoencoder of 12 layers, Adam, ε = 1",
    steps=300,
    real=_simulated_beats,
    proxy=_other_patients,
    adam=True,
)
COLUMNS: dict[str, tuple[Task, float, tuple[float, ...]]] = {  # task, rate, grid
    "mnist": (TASKS["mnist"], 1.6, (0.1, 0.3, 1.0)),
    "ptbxl3": (TASKS["ptbxl3"], 0.2, (0.1, 0.5, 1.0, 2.5)),
    "ptbxl8": (TASKS["ptbxl8"], 0.4, (0.1, 0.5, 1.0, 2.5)),
    "autoencoder": (TASKS["autoencoder"], 0.015, (0.02, 0.1, 1.0)),
    "beats": (BEATS, 0.002, (0.02, 0.1, 1.0)),
}


def _losses(task: Task) -> Any:
    def losses(output: Tensor, target: Tensor) -> Tensor:
        return task.losses(output, target, target)

    return losses


def untuned(task: Task, units: int, seed: int) -> tuple[float, StepPlan]:
    """The clip norm that `make_private` takes from the stand-in at the first weights of a seed, and its plan."""
    part = task.proxy(_FOLDER).train
    targets = None if task.metric == "NMSE" else part.y
    proxy, plan = Corpus(part.x, targets, unit=part.unit), planned(ENTRIES["flat"], task, units, 1.0, None)
    clip = untuned_clip_norm(typical_norm(model_of(task, seed), plan, _losses(task), proxy))
    return clip, planned(ENTRIES["flat"], task, units, clip, None)


class Rows:
    """One row per run, written after each; a row counts for the plan that it was measured with."""

    def __init__(self, path: Path = RESULTS / "utility-clip.json") -> None:
        self.path = path
        self.held: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def once(self, name: str, rule: str, clip: float, seed: int, plan: StepPlan, real: Split) -> None:
        task, rate, _ = COLUMNS[name]
        key = {"task": name, "rule": rule, "clip": clip, "seed": seed, "plan": plan.digest().hex()[:16]}
        if any(all(row[k] == v for k, v in key.items()) for row in self.held):
            return
        figure, _ = run(task, real, plan, rate=rate, clip=clip, seed=seed)
        error = 1.0 - figure if task.higher else figure
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        self.held.append(key | {"error": round(error, 6) if math.isfinite(error) else None, "date": today})
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("[\n" + ",\n".join(map(json.dumps, self.held)) + "\n]\n", encoding="utf-8")
        scratch.replace(self.path)
        print(self.held[-1], flush=True)

    def errors(self, name: str, rule: str, clip: float | None = None) -> list[float]:
        """By seed."""
        rows = [r for r in self.held if r["task"] == name and r["rule"] == rule and clip in (None, r["clip"])]
        return [math.inf if r["error"] is None else r["error"] for r in sorted(rows, key=lambda r: r["seed"])]


def measure(names: list[str]) -> None:
    """Every run that is not in the file yet."""
    rows = Rows()
    for name in names:
        task, _, grid = COLUMNS[name]
        real = task.real()
        for seed in range(SEEDS):
            for clip in grid:
                plan = planned(ENTRIES["flat"], task, real.train.units, clip, None)
                rows.once(name, "grid", clip, seed, plan, real)
            clip, plan = untuned(task, real.train.units, seed)
            rows.once(name, "proxy", clip, seed, plan, real)


def report() -> str:
    """The table for docs/allocations/utility.md."""
    rows = Rows()
    lines = [
        f"`proxy`: {CLIP_PART:g} of the typical gradient norm. Mean error over {SEEDS} seeds ± standard deviation; in "
        "brackets the ratio to the grid's best.",
        "",
        "| task | grid: error at each clip norm | `fixed`, 0.1 | `proxy` |",
        "|---|---|---|---|",
    ]
    for name, (task, _, grid) in COLUMNS.items():
        found = {clip: rows.errors(name, "grid", clip) for clip in grid}
        mine = rows.errors(name, "proxy")
        if not mine or not all(found.values()):
            continue
        best = min(fmean(errors) for errors in found.values())
        points = ", ".join(f"{clip:g}: {_told(errors, best)}" for clip, errors in found.items())
        norms = sorted(row["clip"] for row in rows.held if row["task"] == name and row["rule"] == "proxy")
        proxy = f"{_told(mine, best)} at C {norms[0]:g} to {norms[-1]:g}"
        lines.append(f"| {task.title} | {points} | {_ratio(found[0.1], best)} | {proxy} |")
    return "\n".join(lines) + "\n"


def _ratio(errors: list[float], best: float) -> str:
    ratio = fmean(errors) / best
    return f"{ratio:.3f}" if ratio <= MOST else f"**{ratio:.3f}**"


def _told(errors: list[float], best: float) -> str:
    fewer = f", {len(errors)} seeds" if len(errors) < SEEDS else ""
    return f"{fmean(errors):.4f} ± {stdev(errors) if len(errors) > 1 else 0.0:.4f} ({_ratio(errors, best)}{fewer})"
