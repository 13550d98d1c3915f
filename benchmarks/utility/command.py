"""Utility of all allocation policies at equal ε on real data.

    LAMINA_DATA=… python benchmarks/utility run [--task mnist …] [--policy flat …] [--seeds 3]
    python benchmarks/utility report
    LAMINA_DATA=… python benchmarks/utility clip [--task mnist …]
    LAMINA_DATA=… LAMINA_TEXT=… python benchmarks/utility defaults [--held-out] [--validate] [--task wine …]

`run` measures the layers and tunes every policy on public stand-ins (digits of scikit-learn, simulated ECG), then
trains on the real data with what was chosen there. It writes benchmarks/results/utility-<task>.json after every single
run and goes on where it was interrupted. `report` writes benchmarks/results/utility.md from these files.
`defaults` compares settings that nobody tunes: benchmarks/results/defaults.json (defaults.py).
`rejected` compares two rules with them that were not taken: benchmarks/results/utility-rejected.json (rejected.py).
`clip` holds the untuned clip norm against every one of a grid: benchmarks/results/utility-clip.json, and a table.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from pathlib import Path

import torch

from lamina import LayerStack
from lamina.allocate.measure.measure import Measure
from lamina.allocate.paper import PaperLADP, PaperLSAB

from . import clip_norm, defaults, rejected
from .data import Split
from .freezing import freezing
from .glucose import cgm, cgm_simulated
from .goals import GOALS as REACHED
from .images import images
from .policies import ENTRIES, Entry, planned
from .proxy import measured
from .report import report
from .small_tasks import DEVELOPMENT, HELD_OUT
from .store import RESULTS, Store
from .tasks import DELTA, TASKS, Task
from .tuning import once, tune

GOALS = REACHED | {"cgm": cgm, "cgm-simulated": cgm_simulated, "freezing": freezing, "images": images}
PRINTED = (
    Entry(name="printed-lsab", what="eq. 16 as printed", allocate=lambda t: PaperLSAB()),
    Entry(name="printed-ladp", what="algorithm 1 as printed", allocate=lambda t: PaperLADP()),
)


def measure_task(task: Task, names: list[str], seeds: int, cache: Path, again: bool) -> None:
    """Everything about one task; real data is opened only after the last choice is made."""
    store = Store.of(task.name)
    if again:
        store.forget(names)
    proxy = task.proxy(cache)
    measure = measured(task, proxy, cache)
    chosen = {name: tune(ENTRIES[name], task, proxy, measure, store) for name in names}
    real = task.real()
    store.about = _about(task, real.train.units, len(real.test.x), measure)
    for entry in PRINTED:
        plan = planned(entry, task, real.train.units, 1.0, measure)
        store.printed[entry.name] = {"claimed": plan.claimed[0], "epsilon": plan.epsilon(0)}
    for seed in range(seeds):
        for name in names:
            clip, rate = chosen[name]
            plan = planned(ENTRIES[name], task, real.train.units, clip, measure)
            once("runs", ENTRIES[name], task, real, plan, store, clip=clip, rate=rate, seed=seed)
    if "flat" in names:
        _spread(task, real, chosen["flat"][1], seeds, measure, store)
    store.save()


def _spread(task: Task, real: Split, rate: float, seeds: int, measure: Measure, store: Store) -> None:
    """`flat` at every clip norm of the grid: how far apart figures lie that no policy has anything to do with.

    Looked at last, and no choice rests on it.
    """
    for clip in task.clips:
        plan = planned(ENTRIES["flat"], task, real.train.units, clip, measure)
        for seed in range(seeds):
            once("spread", ENTRIES["flat"], task, real, plan, store, clip=clip, rate=rate, seed=seed)


def _about(task: Task, units: int, tested: int, measure: Measure) -> dict[str, object]:
    sizes = [layer.size for layer in LayerStack.from_model(task.model())]
    return {
        "task": task.title,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} vCPUs",
        "epsilon": task.epsilon,
        "delta": DELTA,
        "unit": task.unit,
        "units": units,
        "tested": tested,
        "batch": task.batch,
        "steps": task.steps,
        "saved": _saved(measure, sizes),
        "layers": list(measure.layers),
        "sizes": sizes,
        "norms": list(measure.norms),
        "harm": list(measure.harm),
        "tight": list(measure.tight),
        "fisher": list(measure.fisher),
    }


def _saved(measure: Measure, sizes: list[int]) -> float:
    """Noise of pareto with measured norms over that of flat:  (Σ n√d)² / (Σ n² · Σ d)."""
    pairs = list(zip(measure.norms, sizes, strict=True))
    cross = sum(n * d**0.5 for n, d in pairs)
    return float(cross**2 / (sum(n * n for n, _ in pairs) * sum(sizes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report", "clip", "goals", "defaults", "rejected"))
    small = tuple(task.name for task in (*DEVELOPMENT, *HELD_OUT))
    parser.add_argument("--task", action="append", choices=(*TASKS, *clip_norm.COLUMNS, *small), help="default: all")
    parser.add_argument("--held-out", action="store_true", help="of defaults: the tasks that no choice was made on")
    parser.add_argument("--validate", action="store_true", help="of defaults: against lamina.Engine")
    parser.add_argument("--goal", action="append", choices=tuple(GOALS), help="of goals; default: all")
    parser.add_argument("--policy", action="append", choices=tuple(ENTRIES), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="forget what was measured of these policies before")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "lamina-utility",
        help="where simulated beats and measures are kept between runs",
    )
    parser.add_argument("--quick", action="store_true", help="of defaults: not every optimiser")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "goals":
        for name in chosen.goal or GOALS:
            GOALS[name]()
    elif chosen.what == "defaults":
        defaults.main(chosen.task, held_out=chosen.held_out, check=chosen.validate, quick=chosen.quick)
    elif chosen.what == "rejected":
        rejected.main(chosen.task)
    elif chosen.what == "clip":
        clip_norm.measure(chosen.task or list(clip_norm.COLUMNS))
        print(clip_norm.report())
    elif chosen.what == "run":
        for name in chosen.task or TASKS:
            measure_task(TASKS[name], chosen.policy or list(ENTRIES), chosen.seeds, chosen.cache, chosen.again)
    else:
        text = report()
        (RESULTS / "utility.md").write_text(text, encoding="utf-8")
        print(text)
