"""What head masks cost: a step in which some, or all, contributions may move some attention heads only.

    python benchmarks/routing.py [--workload tfae] [--rounds 40] [--budget 400] [--out benchmarks/results]

Per workload and form of clipping, against a step of two classes that both reach everything:
  mixed   half of the batch may move one head of each attention, and everything that is no attention
  batch   all of the batch may, in a plan that has both classes: what nobody in it may move is not formed
  plan    nobody in the plan may move more: other heads also get no noise, and are put back after the optimiser's step
  heads   nobody may move anything but that head
Ratios are paired within rounds; what counts is the upper 95 % bootstrap limit: below 1.05 for `mixed`, below 1 for the
rest. Writes routing.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamina.allocate.make_plan import make_plan
from lamina.bench.step_cost import interleave, paired_ratio
from lamina.bench.workloads import Workload, find_workload
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy

GOALS = {"mixed": 1.05, "batch": 1.0, "plan": 1.0, "heads": 1.0}
ONE_HEAD = {"all": True, "heads": [0], "others": True}
PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "open": {"open": {"all": True}, "sensitive": {"all": True}},
    "mixed": {"open": {"all": True}, "sensitive": ONE_HEAD},
    "batch": {"open": {"all": True}, "sensitive": ONE_HEAD},
    "plan": {"sensitive": ONE_HEAD},
    "heads": {"sensitive": {"all": True, "heads": [0]}},
}
Step = Callable[[], None]


def step_of(load: Workload, variant: str, clipping: str) -> Step:
    model, profiles = load.model(), PROFILES[variant]
    one = {"population": load.batch * 100, "clip_norm": 1.0, "noise_multiplier": 1.0}
    policy = {
        "corpus": {"origin": "benchmark", "delta": 1e-5},
        "class": {name: {**one, "profile": profile} for name, profile in profiles.items()},
    }
    stack = LayerStack.from_model(model)
    plan = make_plan(stack, Policy.from_dict(policy), batch=load.batch, steps=10_000, clipping=clipping)
    engine = Engine(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = load.example()
    cls = torch.full((load.batch,), plan.index("sensitive"))
    if variant in ("open", "mixed"):
        cls[: load.batch // 2] = plan.index("open")

    def step() -> None:
        batch = Batch(x, y, cls=cls)  # each step is a draw of its own
        engine.backward(load.losses(model(batch.x), batch.y), batch)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()  # what is checked at first is checked here
    return step


def measured(load: Workload, clipping: str, rounds: int, budget: float) -> dict[str, Any]:
    times = interleave(
        {variant: step_of(load, variant, clipping) for variant in PROFILES}, rounds=rounds, budget=budget
    )
    return {
        variant: {
            **paired_ratio(times[variant], times["open"]).as_json(),
            "milliseconds": round(1000 * float(np.median(times[variant])), 3),
        }
        for variant in PROFILES
    }


def main() -> int:
    options = argparse.ArgumentParser(description="time added, or saved, by head masks")
    options.add_argument("--workload", action="append", default=None)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--budget", type=float, default=400.0, help="seconds, for all of it")
    options.add_argument("--out", type=Path, default=None)
    given = options.parse_args()
    loads = [find_workload(name) for name in given.workload or ("tfae", "bert1k")]
    cases = [(load, clipping) for load in loads for clipping in ("box", "joint")]
    each = given.budget / len(cases)
    found = {f"{load.name} {form}": measured(load, form, given.rounds, each) for load, form in cases}
    result = {"threads": torch.get_num_threads(), "goals": GOALS, "found": found}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "routing.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    above = [
        f"{case}, {variant}: upper limit {rows[variant]['high']} is not below {goal}"
        for case, rows in found.items()
        for variant, goal in GOALS.items()
        if rows[variant]["high"] >= goal
    ]
    for line in above:
        print(line, file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
