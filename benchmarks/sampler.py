"""What a corpus of 10⁶ contributions costs: memory of its index, and the time of one draw on one thread.

    python benchmarks/sampler.py [--contributions 1000000] [--rounds 100] [--json]

Ids (15 letters) and subject tags (32 letters) are text, two classes, every contribution with one small example.
`allocated` is what Python and numpy hold for the index (tracemalloc), `resident` what the process has grown by,
both in MB and each measured in a process of its own. `draw` is in milliseconds: the coins of all contributions, and
the batch; `best` is the figure to read on a busy machine. The other figures are in seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lamina.allocate.make_plan import make_plan
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.sampler import Sampler


def material(count: int) -> dict[str, Any]:
    """What a user would hand over."""
    return {
        "x": np.zeros((count, 4), dtype=np.float32),
        "ids": np.array([f"patient-{i:07d}" for i in range(count)]),
        "subject": np.array([f"{i * 0x9E3779B97F4A7C15 % 2**128:032x}" for i in range(count)]),
        "cls": np.where(np.arange(count) % 4 == 0, "sensitive", "clinical"),
    }


def plan_for(count: int) -> StepPlan:
    table = {"epsilon": 1.0, "population": count}
    policy = Policy.from_dict(
        {
            "corpus": {"origin": "benchmark", "delta": 1e-8, "accountant": "rdp"},
            "class": {"clinical": table, "sensitive": table},
        }
    )
    return make_plan(LayerStack.from_model(nn.Linear(4, 2)), policy, batch=1024, steps=1000)


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(count: int, traced: bool) -> float:
    """MB that the index takes beside what it was made from."""
    given = material(count)
    Corpus(**material(10))  # whatever is loaded at first use
    if traced:
        tracemalloc.start()
        corpus = Corpus(**given)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    else:
        before = resident()
        corpus = Corpus(**given)
        taken = resident() - before
    assert len(corpus) == count
    return taken / 1e6


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def draws(sampler: Sampler, rounds: int) -> dict[str, float]:
    taken = [1e3 * timed(lambda step=step: sampler.draw(step)) for step in range(rounds)]  # type: ignore[misc]
    return {"best": round(min(taken), 2), "median": round(statistics.median(taken), 2)}


def measure(count: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    given, plan = material(count), plan_for(count)
    result: dict[str, Any] = {"contributions": count}
    for name, flag in (("allocated", "--traced"), ("resident", "--resident")):
        command = [sys.executable, __file__, flag, "--contributions", str(count)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result[name] = round(float(told), 1)
    made: list[Corpus] = []
    result["make"] = round(timed(lambda: made.append(Corpus(**given))), 2)
    (corpus,) = made
    seed = os.urandom(32)
    result["draw"] = draws(Sampler(corpus, plan, seed=seed), rounds)
    caps = {"clinical": 100, "sensitive": 100}
    result["draw, capped"] = draws(Sampler(corpus, plan, seed=seed, max_occurrences=caps), rounds)
    result["membership digest"] = round(timed(lambda: corpus.membership(seed)), 3)
    result["withdrawal"] = round(timed(lambda: corpus.withdraw("patient-0000001")), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of the sampler at 10⁶ contributions.")
    parser.add_argument("--contributions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.traced or options.resident:
        print(memory(options.contributions, options.traced))
        return
    result = measure(options.contributions, options.rounds)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        return
    for name, figure in result.items():
        print(f"{name:20} {figure}")


if __name__ == "__main__":
    main()
