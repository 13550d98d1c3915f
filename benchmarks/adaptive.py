"""What a rule that changes the plan while it runs adds to a step.

    python benchmarks/adaptive.py [--workload resae] [--rounds 60] [--budget 240] [--out benchmarks/results]

For each adaptive policy one engine takes its step with the rules and without them, in turns: same model, same memory,
same thresholds. The ratio is taken within a round; what counts is the upper 95 % bootstrap limit of its median, to be
below 1.03. Shares follow the energy at every step here, ten times as often as they do by default; a choice is measured
apart, as a multiple of a step. Writes adaptive.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamina.allocate.ladp import LADP
from lamina.allocate.make_plan import make_plan
from lamina.allocate.problem import Allocate
from lamina.bench.step_cost import interleave, paired_ratio
from lamina.bench.workloads import Workload, find_workload
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.rules.adaptation import Adaptation
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan

GOAL = 1.03
POLICIES: dict[str, Allocate] = {
    "ladp": LADP(every=1),
    "ladp joint": LADP(every=1, clipping="joint"),  # type: ignore[arg-type]  # text becomes a form
    "ladp budget": LADP(every=1, mode="budget"),
}
Step = Callable[[], None]


def plan_for(load: Workload, stack: LayerStack, allocate: str | Allocate) -> StepPlan:
    single = {"population": load.batch * 100, "clip_norm": 1.0, "noise_multiplier": 1.0}
    policy = {"corpus": {"origin": "benchmark", "delta": 1e-5}, "class": {"everyone": single}}
    return make_plan(stack, Policy.from_dict(policy), batch=load.batch, steps=100_000, allocate=allocate)


def steps_of(load: Workload, allocate: str | Allocate) -> dict[str, Step]:
    """The same step with and without the rules of the policy's plan."""
    model = load.model()
    plan = plan_for(load, LayerStack.from_model(model), allocate)
    bare, adaptation = replace(plan, rules=(), accountant="rdp"), Adaptation(plan)
    engine = Engine(model, plan)
    engine.budget.filters_asked_elsewhere = True  # a filter would stop a run that never ends
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = load.example()

    def taken(how: Adaptation | None, by: StepPlan) -> Step:
        def step() -> None:
            engine.rules.adaptation, engine.plan = how, by
            engine.backward(load.losses(model(x), y), Batch(x, y))
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {"with": taken(adaptation, plan), "without": taken(None, bare)}


def choice_of(load: Workload) -> dict[str, Step]:
    """A step of a plan that chooses, and one choice."""
    model = load.model()
    plan = plan_for(load, LayerStack.from_model(model), LADP(choose_every=1, choose_epsilon=0.001))
    engine = Engine(model, plan)
    x, y = load.example()

    def choose() -> None:
        engine.budget.set_taken(engine.budget.taken + 1)  # as if a step had followed the last one
        engine.choose(load.losses(model(x), y), Batch(x, y))

    def step() -> None:
        if engine.rules.adaptation is not None:
            engine.rules.adaptation.chosen = engine.budget.taken
        engine.backward(load.losses(model(x), y), Batch(x, y))
        model.zero_grad()

    return {"with": choose, "without": step}


def measured(steps: dict[str, Step], rounds: int, budget: float) -> dict[str, Any]:
    for step in (*steps.values(), *steps.values()):  # what is checked at first is checked here
        step()
    times = interleave(steps, rounds=rounds, budget=budget)
    milliseconds = {name: round(1000 * float(np.median(times[name])), 3) for name in steps}
    return {**paired_ratio(times["with"], times["without"]).as_json(), "milliseconds": milliseconds}


def main() -> int:
    options = argparse.ArgumentParser(description="time added by adaptive rules")
    options.add_argument("--workload", default="resae")
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--budget", type=float, default=240.0, help="seconds, for all of it")
    options.add_argument("--out", type=Path, default=None)
    given = options.parse_args()
    load = find_workload(given.workload)
    each = given.budget / (len(POLICIES) + 2)
    policies: dict[str, str | Allocate] = {**POLICIES, "quantile": "quantile"}
    found = {name: measured(steps_of(load, how), given.rounds, each) for name, how in policies.items()}
    result = {
        "workload": load.name,
        "threads": torch.get_num_threads(),
        "goal": GOAL,
        "rules": found,
        "choice": measured(choice_of(load), max(5, given.rounds // 4), each),
    }
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "adaptive.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    above = [name for name, row in found.items() if row["high"] >= GOAL]
    for name in above:
        print(f"{name}: upper limit {found[name]['high']} is not below {GOAL}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
