"""A cost model of a run, fitted to measurements here, and what it predicts for 1 to 1,024 ranks.

    python benchmarks/scale.py [--measure FILE] [--predict FILE] [--flops 0] [--network 25e9]

`--measure` measures and writes the figures; `--predict` fits the model to such a file and prints the table. Times are processor
time of one thread, the least of several rounds; a figure that the fit did not see is predicted and compared beside each part.
A rank is one core like this one, unless --flops says how fast it computes. --network is in bytes per second and rank.
benchmarks/results/scale.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import nn

from lamina import Batch, Corpus, Engine, LayerStack, Policy, SeededNoise, make_plan
from lamina.account.schedule import Event
from lamina.engine.batch import Draw
from lamina.engine.distributed import Ranks
from lamina.engine.noise.random_stream import KeyStream
from lamina.ledger.records import Epoch, EpochAccount, Segment, SegmentOutcome, encode_leaf
from lamina.run.sampler import poisson_sample
from lamina.run.training_checkpoint import TrainingCheckpoint, TrainingCheckpoints

Point = dict[str, Any]
HERE = Path(__file__).parent
POLICY = '[corpus]\norigin = "scale"\ndelta = 1e-6\n[class.a]\npopulation = 100000\nepsilon = 4.0\n'


def least(work: Callable[[], Any], rounds: int = 5) -> float:
    """Processor time of the fastest round."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return min(found)


def net(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def stepper(width: int, batch: int) -> tuple[Callable[[], None], int]:
    """One private step with its optimiser step; and how many parameters it has."""
    model = net(width)
    plan = make_plan(
        LayerStack.from_model(model),
        Policy.parse(POLICY),
        batch=batch,
        steps=10_000,
        allocate="uniform",
        noise_multiplier=1.0,
    )
    ranks = Ranks.current()
    engine, optimizer = (
        Engine(model, plan, noise=SeededNoise(0, rank=ranks.rank)),
        torch.optim.SGD(model.parameters(), lr=1e-3),
    )
    x = torch.randn(batch, width)

    def step() -> None:
        part = Batch(x, draw=Draw()).shard(ranks.rank, ranks.size) if ranks.size > 1 else Batch(x, draw=Draw())
        engine.backward((model(part.x) - part.x).square().mean(1), part)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step, sum(p.numel() for p in model.parameters())


def steps() -> list[Point]:
    found = []
    for width, batch in ((256, 16), (256, 128), (512, 16), (512, 128), (1024, 16), (1024, 64), (2048, 8), (1536, 32)):
        step, size = stepper(width, batch)
        found.append({"parameters": size, "batch": batch, "seconds": least(step, 7)})
    return found


def coins() -> list[Point]:
    stream = KeyStream(bytes(range(16)))
    counts = (100_000, 300_000, 1_000_000, 4_000_000)
    return [{"contributions": n, "seconds": least(partial(poisson_sample, stream, 0, n, 1e-4))} for n in counts]


def index() -> list[Point]:
    """Bytes that a corpus holds beside its examples: ids of 15 letters, no subject tags."""
    found = []
    for n in (50_000, 100_000, 200_000):
        x, ids = np.zeros((n, 1), dtype=np.float32), [f"patient-{i:07d}" for i in range(n)]
        tracemalloc.start()
        corpus = Corpus(x, ids=ids, unit="each", cls="a")
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        found.append({"contributions": len(corpus), "bytes": held})
    return found


def memory_of(width: int) -> None:
    """In a process of its own: what a step of this width adds to the peak."""
    stepper(8, 2)  # so that everything is imported
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    step, size = stepper(width, 2)
    step()
    print(json.dumps({"parameters": size, "bytes": _status("VmHWM") - before}))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def reduce_of(size: int) -> None:
    """In one of several ranks: processor time of adding up so many float32, and bytes that crossed the loopback."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=world)
    ranks, total = Ranks.current(), torch.ones(size)
    ranks.add_up([total])
    seconds, crossed = [], []
    for _ in range(6):
        dist.barrier()
        begun, sent = time.process_time(), _loopback()
        ranks.add_up([total])
        seconds.append(time.process_time() - begun)
        dist.barrier()
        crossed.append(_loopback() - sent)
    print(json.dumps({"parameters": size, "ranks": world, "seconds": min(seconds), "bytes": min(crossed)}), flush=True)
    dist.destroy_process_group()


def shared_of(width: int) -> None:
    """In one of several ranks: processor time of a whole step that they take together, batch 64."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=world)
    torch.manual_seed(0)
    step, size = stepper(width, 64)
    seconds = least(step, 7)
    print(json.dumps({"parameters": size, "batch": 64, "ranks": world, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def _loopback() -> int:
    """Bytes that the loopback has sent so far, everybody's: the least of several rounds counts."""
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if each.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def alone(*arguments: str, world: int = 1) -> list[Point]:
    """What processes of this program print."""
    with tempfile.TemporaryDirectory() as folder:
        told = {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(world),
            "STORE": f"{folder}/store",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        begun = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True,
                env={**os.environ, **told, "RANK": str(rank)},
            )
            for rank in range(world)
        ]  # fmt: skip
        return [json.loads(each.communicate(timeout=300)[0].splitlines()[-1]) for each in begun]


def reduces() -> list[Point]:
    found = []
    for world, size in ((2, 1 << 20), (2, 1 << 22), (4, 1 << 20), (4, 1 << 22), (3, 1 << 21)):
        answers = alone("--reduce", str(size), world=world)
        found.append({**answers[0], "seconds": float(np.mean([each["seconds"] for each in answers]))})
    return found


def epochs() -> list[Point]:
    """Bytes of the leaf that closes a segment."""
    found = []
    for layers, accounts in ((10, 1), (100, 1), (1000, 1), (100, 10), (100, 100), (500, 40)):
        charge = Event(sigma=1.2345678, q=0.0123456, steps=100)
        named = tuple(
            EpochAccount(cls="a", clip_norm=i, noise_multiplier=i, charges=(charge,), spend=10**9)
            for i in range(accounts)
        )
        segment = Segment(
            index=3,
            generation=0,
            nonce=bytes(16),
            first=300,
            last=400,
            eligibility=10**6,
            outcome=SegmentOutcome.CLOSED,
        )
        variance = tuple(1.0 + i / 7 for i in range(layers))
        record = Epoch(
            run=bytes(16), segments=(segment,), plan=bytes(32), variance=variance, accounts=named, state=bytes(32)
        )
        found.append(
            {
                "layers": layers,
                "accounts": accounts,
                "bytes": sum(len(part or b"") for part in encode_leaf(record, 10**6, 1_800_000_000, 1)),
            }
        )
    return found


def checkpoints() -> list[Point]:
    found = []
    for size in (1 << 20, 1 << 22, 1 << 23):
        with tempfile.TemporaryDirectory() as folder:
            files = TrainingCheckpoints(Path(folder))
            made = TrainingCheckpoint(
                tensors={"model.a": torch.zeros(size), "optimizer.a": torch.zeros(size)}, state={}
            )
            seconds = least(partial(files.save, 0, made), 3)
            found.append({"parameters": size, "seconds": seconds, "bytes": files.path(0).stat().st_size})
    return found


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, work in (
        ("steps", steps), ("coins", coins), ("index", index), ("reduces", reduces), ("epochs", epochs),
        ("checkpoints", checkpoints), ("memory", lambda: [alone("--memory", str(w))[0] for w in (1000, 2000, 2500, 3000)]),
    ):  # fmt: skip
        found[name] = work()
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    found["shared"] = [alone("--shared", "1024", world=world)[0] for world in (2, 4)]
    print("shared", json.dumps(found["shared"]), file=sys.stderr, flush=True)
    stored = json.loads((HERE / "results" / "ledger.json").read_text())  # of benchmarks/ledger.py
    found["ledger"] = [{"contributions": float(n), "bytes": mb["sqlite"] * 1e6} for n, mb in stored["size_mb"].items()]
    return found


# ------------------------------------------------------------------------------------------ the model


def fitted(points: list[Point], terms: Callable[[Point], list[float]], what: str) -> tuple[list[float], float]:
    """Coefficients ≥ 0 by relative least squares, all but the last point; and the last point over its prediction."""
    seen, unseen = points[:-1], points[-1]
    rows = np.array([np.array(terms(p)) / p[what] for p in seen])
    found = nnls(rows, np.ones(len(seen)))[0]
    return found.tolist(), unseen[what] / float(np.dot(found, terms(unseen)))


def model_of(measured: dict[str, Any]) -> dict[str, tuple[list[float], float]]:
    parts: dict[str, tuple[Callable[[Point], list[float]], str]] = {
        "steps": (lambda p: [1.0, p["parameters"], p["parameters"] * p["batch"]], "seconds"),
        "coins": (lambda p: [1.0, p["contributions"]], "seconds"),
        "index": (lambda p: [1.0, p["contributions"]], "bytes"),
        "reduces": (lambda p: [1.0, 4 * p["parameters"] * 2 * (p["ranks"] - 1) / p["ranks"]], "seconds"),
        "epochs": (lambda p: [1.0, p["layers"], p["accounts"]], "bytes"),
        "checkpoints": (lambda p: [1.0, p["parameters"]], "seconds"),
        "memory": (lambda p: [1.0, p["parameters"]], "bytes"),
        "ledger": (lambda p: [1.0, p["contributions"]], "bytes"),
    }
    found = {name: fitted(measured[name], *how) for name, how in parts.items()}
    crossed = [{**p, "whole": 4 * p["parameters"] * 2 * (p["ranks"] - 1)} for p in measured["reduces"]]
    found["wire"] = fitted(crossed, lambda p: [p["whole"]], "bytes")
    return found


def predict(model: dict[str, tuple[list[float], float]], flops: float, network: float) -> list[Point]:
    """One step of 10⁹ parameters on 10⁹ contributions, batch 2¹⁶, by number of ranks."""
    parameters, contributions, batch, layers, accounts, length = 1e9, 1e9, 65_536, 400, 10, 100
    fixed, each, product = model["steps"][0]
    rows = []
    for ranks in (1, 2, 8, 64, 256, 1024):
        share = 2 * (ranks - 1) / ranks
        compute = parameters * batch / ranks * (6 / flops if flops else product)
        row = {
            "ranks": ranks, "compute": compute, "noise_and_update": fixed + each * parameters,
            "coins": model["coins"][0][1] * contributions, "wire_bytes": 4 * parameters * share,
            "wire": 4 * parameters * share / network, "adding": model["reduces"][0][1] * 4 * parameters * share,
            "checkpoint": model["checkpoints"][0][1] * parameters / length,
            "memory": model["memory"][0][1] * parameters + model["index"][0][1] * contributions,
        }  # fmt: skip
        timed = ("compute", "noise_and_update", "coins", "wire", "adding", "checkpoint")
        row["seconds"] = sum(row[name] for name in timed)
        row["epoch_bytes"] = float(np.dot(model["epochs"][0], [1.0, layers, accounts]))
        row["ledger_bytes"] = model["ledger"][0][1] * contributions
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--flops", type=float, default=0.0, help="of a rank; 0: as measured")
    parser.add_argument("--network", type=float, default=25e9, help="bytes per second of a rank")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--reduce", type=int)
    parser.add_argument("--shared", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.memory:
        memory_of(asked.memory)
    elif asked.reduce:
        reduce_of(asked.reduce)
    elif asked.shared:
        shared_of(asked.shared)
    if asked.measure:
        asked.measure.write_text(json.dumps(measure(), indent=1) + "\n")
    if asked.predict:
        model = model_of(json.loads(asked.predict.read_text()))
        for name, (coefficients, check) in model.items():
            print(f"{name:12} {' '.join(f'{c:.4g}' for c in coefficients):40} unseen point / prediction {check:.2f}")
        for p in json.loads(asked.predict.read_text())["shared"]:
            fixed, each, product = model["steps"][0]
            told = fixed + p["parameters"] * (each + product * p["batch"] / p["ranks"])
            told += np.dot(model["reduces"][0], [1.0, 8 * p["parameters"] * (p["ranks"] - 1) / p["ranks"]])
            print(
                f"a step of {p['ranks']} ranks took {1e3 * p['seconds']:.1f} ms of each, {p['seconds'] / told:.2f} of the prediction"
            )
        for row in predict(model, asked.flops, asked.network):
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
