"""What the noise of a step costs, per parameter, beside torch.randn in the same run.

    python benchmarks/noise.py [--rounds 20] [--json] [--overlap | --independence]

Rounds are interleaved. `wall` is the median, `best` the fastest round (the figure to read on a busy machine),
`cpu` the median of the processor time of all threads, each in nanoseconds per parameter. `--overlap` asks
instead whether drawing the next step's noise behind the forward and backward pass pays (milliseconds a step);
`--independence` how far 10^8 draws of two streams are from uncorrelated, in standard deviations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from lamina.engine.noise.source import NoiseSource, SecureNoise

MLP = (864, 512, 256, 128, 32, 128, 256, 512, 864)

COMPARED = [f"{what}{of}" for what in ("two tensors", "two steps", "neighbours") for of in ("", ", squares")]
COMPARED += ["beyond 5 sigma"]


def models() -> dict[str, list[torch.Tensor]]:
    """Sums of the shapes of a model: one large tensor, an MLP, and many small tensors."""
    mlp: list[torch.Tensor] = []
    for width, after in itertools.pairwise(MLP):
        mlp += [torch.zeros(after, width), torch.zeros(after)]
    return {
        "1.4M": [torch.zeros(1_400_000)],
        "10M": [torch.zeros(10_000_000)],
        "mlp": mlp,
        "200 small": [torch.zeros(64, 64) if i % 2 else torch.zeros(64) for i in range(200)],
    }


def ways(sums: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Each adds noise to every sum once."""
    steps = iter(range(1 << 40))

    def secure(source: NoiseSource) -> Callable[[], None]:
        return lambda: source.add_many_(sums, [1e-3] * len(sums), step=next(steps))

    def randn() -> None:
        for x in sums:
            x.add_(torch.randn_like(x), alpha=1e-3)

    return {"secure": secure(SecureNoise()), "hardened": secure(SecureNoise(hardened=True)), "randn": randn}


def measure(sums: list[torch.Tensor], rounds: int) -> dict[str, dict[str, float]]:
    size = sum(x.numel() for x in sums)
    repeat = max(1, 400_000 // size)
    todo = ways(sums)
    wall: dict[str, list[float]] = {name: [] for name in todo}
    cpu: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(rounds + 1):
        for name, way in todo.items():
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                way()
            if turn:  # the first warms up
                wall[name].append((time.perf_counter() - clock) / repeat / size * 1e9)
                cpu[name].append((time.process_time() - processor) / repeat / size * 1e9)
    return {
        name: {
            "wall": round(statistics.median(wall[name]), 2),
            "best": round(min(wall[name]), 2),
            "cpu": round(statistics.median(cpu[name]), 2),
        }
        for name in todo
    }


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    linear = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(MLP)]
    widths = (12, 64, 64, 64, 64, 12)
    conv = [nn.Sequential(nn.Conv1d(a, b, 7, padding=3), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return {
        "mlp b32": (nn.Sequential(*linear), torch.randn(32, MLP[0])),
        "conv1d b16": (nn.Sequential(*conv), torch.randn(16, 12, 256)),
    }


def overlap(rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """(fastest, median) milliseconds of an ordinary AdamW step without noise, with noise, with prefetched noise."""
    result = {}
    for name, (model, x) in networks().items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        parameters = list(model.parameters())
        stds = [1e-3] * len(parameters)
        spare = [torch.empty_like(p) for p in parameters]
        source, behind = SecureNoise(), SecureNoise(threads=1)
        steps = iter(range(1 << 40))
        worker = ThreadPoolExecutor(1)

        def prepare(
            draw: Callable[..., None] = behind.fill_many_,
            worker: ThreadPoolExecutor = worker,
            spare: list[torch.Tensor] = spare,
            stds: list[float] = stds,
            steps: Iterator[int] = steps,
        ) -> Future[None]:
            return worker.submit(draw, spare, stds, step=next(steps))

        waiting = prepare()
        times: dict[str, list[float]] = {"no noise": [], "noise": [], "prefetched": []}
        for _ in range(rounds):
            for way, taken in times.items():
                waiting.result()
                if way == "prefetched":  # fair: every timed step begins a draw and ends with the one before
                    waiting = prepare()
                start = time.perf_counter()
                (model(x) - x).square().mean().backward()
                grads = [p.grad for p in parameters if p.grad is not None]
                if way == "noise":
                    source.add_many_(grads, stds, step=next(steps))
                elif way == "prefetched":
                    waiting.result()
                    for grad, noise in zip(grads, spare, strict=True):
                        grad.add_(noise)
                optimizer.step()
                optimizer.zero_grad()
                taken.append((time.perf_counter() - start) * 1e3)
        worker.shutdown()
        result[name] = {w: (round(min(t), 2), round(statistics.median(t), 2)) for w, t in times.items()}
    return result


def independence(draws: int = 100_000_000, chunk: int = 1 << 22) -> dict[str, float]:
    """Correlations of two tensors of a step, of two steps and of neighbours, of values and of squares; tail counts."""
    source, sums, seen = SecureNoise(), dict.fromkeys(COMPARED, 0.0), 0
    for step in range(-(-draws // chunk)):
        a, b, c = (torch.empty(chunk, dtype=torch.float64) for _ in range(3))
        source.fill_many_([a, b], [1.0, 1.0], step=2 * step)
        source.fill_(c, 1.0, step=2 * step + 1)
        pairs = {"two tensors": (a, b), "two steps": (a, c), "neighbours": (a[1:], a[:-1])}
        for name, (x, y) in pairs.items():
            sums[name] += float(x @ y)
            sums[f"{name}, squares"] += float((x.square() - 1) @ (y.square() - 1)) / 2
        sums["beyond 5 sigma"] += int((a.abs() > 5).sum())
        seen += chunk
    expected = seen * math.erfc(5 / math.sqrt(2))
    sums["beyond 5 sigma"] = (sums["beyond 5 sigma"] - expected) / math.sqrt(expected)
    return {n: round(s if n.startswith("beyond") else s / math.sqrt(seen), 2) for n, s in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Nanoseconds per parameter of a step's noise.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--independence", action="store_true")
    options = parser.parse_args()
    if options.independence:
        json.dump(independence(), sys.stdout, indent=2)
        return
    if options.overlap:
        torch.set_num_threads(2)
        json.dump(overlap(options.rounds), sys.stdout, indent=2)
        return
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for model, sums in models().items():
            found = measure(sums, max(3, options.rounds // 4) if model == "10M" else options.rounds)
            result.setdefault(f"{threads} threads", {})[model] = found
            if not options.json:
                for way, figures in found.items():
                    print(f"{threads} threads  {model:10} {way:9} {figures}")
    if options.json:
        json.dump(result, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
