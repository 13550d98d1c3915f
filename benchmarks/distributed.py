"""What two processes of one thread gain over one: `python benchmarks/distributed.py [--steps N] [WORKLOAD …]`.

Each of two processes takes, in turn, a step of the whole batch by itself and a step of its half together with the other.
Cores are shared with whatever else runs on the machine, so a process is charged by the CPU time that it used (its threads that
pass messages included), not by the clock:

    alone     CPU milliseconds of a step of the whole batch in one process
    together  CPU milliseconds of a step that two processes share, of the busier one
    messages  the part of it in which the sums of both are added up
    speedup   alone / together: what two cores of their own would gain, if nobody waits

Waiting for the slower rank is not in it: where halves of a batch take unequal time, the gain is smaller by that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lamina import Batch, Engine, LayerStack, Policy, make_plan
from lamina.bench.workloads import Workload, find_workload
from lamina.engine.distributed import ALONE, Ranks

DEEP = ("resae", "tfae", "bert1k")
_spent = [0.0]


class TimedRanks(Ranks):
    """Notes the CPU time of adding up."""

    def add_up(self, tensors: Any) -> None:
        before = time.process_time()
        super().add_up(tensors)
        _spent[0] += time.process_time() - before


def taker(workload: Workload, ranks: Ranks) -> Any:
    """A step of the whole batch, or of this rank's part of it."""
    model = workload.model()
    entry = {"population": workload.batch * 100, "clip_norm": 1.0, "noise_multiplier": 1.0}
    policy = Policy.from_dict({"corpus": {"origin": "benchmark", "delta": 1e-5}, "class": {"everyone": entry}})
    plan = make_plan(LayerStack.from_model(model), policy, batch=workload.batch, steps=10_000, clipping="box")
    engine = Engine(model, plan, ranks=ranks)
    engine.decline_probe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = workload.example()

    def step() -> float:
        batch = Batch(x, y)
        part = batch if ranks.alone else batch.shard(ranks.rank, ranks.size)
        before = time.process_time()
        engine.backward(workload.losses(model(part.x), part.y), part)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - before

    return step


def measure(rank: int, folder: str, names: tuple[str, ...], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name in names:
        alone, together = taker(find_workload(name), ALONE), taker(find_workload(name), TimedRanks(rank, 2))
        rows = []
        for i in range(steps + 3):
            _spent[0] = 0.0
            row = (alone(), together(), _spent[0])
            if i >= 3:  # the first steps look at who owns which row
                rows.append(row)
        found[name] = [statistics.median(column) for column in zip(*rows, strict=True)]
    Path(folder, f"rank{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


WIDE, DEPTH = 1536, 8


def memory(rank: int, folder: str, size: int, sharded: bool, clipping: str) -> None:
    """Peak memory of a rank that takes two steps of AdamW, beyond what it had before the model, in bytes a parameter."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(DEPTH)]
    small = nn.Sequential(nn.Linear(8, 8))
    if sharded:
        fully_shard(small)
    _take_steps(small, rank, size, clipping)  # what is imported by then is not the model's
    before = _resident()
    model = nn.Sequential(*made)
    count = sum(p.numel() for p in model.parameters())
    if sharded:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    _take_steps(model, rank, size, clipping)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(folder, f"rank{rank}").write_text(json.dumps((peak - before) / count + 4))  # the model was there before
    dist.destroy_process_group()


def _take_steps(model: nn.Module, rank: int, size: int, clipping: str) -> None:
    entry = {"population": 1000, "clip_norm": 1.0, "noise_multiplier": 1.0}
    policy = Policy.from_dict({"corpus": {"origin": "benchmark", "delta": 1e-5}, "class": {"everyone": entry}})
    plan = make_plan(LayerStack.from_model(model), policy, batch=8, steps=100, clipping=clipping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Engine(model, plan) as engine:
        engine.decline_probe()
        for _ in range(2):
            width = next(model.parameters()).shape[1]
            part = Batch(torch.ones(8, width)).shard(rank, size)
            engine.backward(model(part.x).square().mean(1) if len(part) else None, part)
            optimizer.step()
            optimizer.zero_grad()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_together(target: Any, size: int, *arguments: Any) -> list[Any]:
    """What each of so many processes wrote."""
    with tempfile.TemporaryDirectory() as folder:
        start: Any = mp.get_context("spawn").Process
        processes = [start(target=target, args=(rank, folder, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, f"rank{rank}").read_text()) for rank in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(DEEP))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--memory", action="store_true", help="bytes a parameter of a rank, with and without fully_shard"
    )
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "262144")  # glibc: what is freed goes back, so that a peak is one
    if given.memory:
        found = {}
        for size in (2, 4):
            for sharded, clipping in ((False, "box"), (True, "box"), (True, "joint")):
                peak = max(run_together(memory, size, size, sharded, clipping))
                found[f"{size} ranks{', fully_shard' if sharded else ''}, {clipping}"] = round(peak, 1)
        print(json.dumps(found, indent=2))
        return
    ranks = run_together(measure, 2, tuple(given.workloads), given.steps)
    answer = {}
    for name in given.workloads:
        together, messages = (max(found[name][i] for found in ranks) * 1e3 for i in (1, 2))
        alone = min(found[name][0] for found in ranks) * 1e3
        answer[name] = {
            "alone": round(alone, 1), "together": round(together, 1), "messages": round(messages, 2),
            "speedup": round(alone / together, 3),
        }  # fmt: skip
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
