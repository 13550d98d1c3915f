"""What a private step costs at least, and what it costs: plain products, the least extra work, what is reached.

    python benchmarks/roofline.py [--rounds 15] [--only resae] [--out benchmarks/results]

One thread, processor time. Writes roofline.json and roofline.png. Four figures for each workload, all relative to the plain step:

products   what the plain step spends in matrix products and convolutions, by torch's profiler
peak       what its products would take at the speed of a large square product of this machine
least      the plain step and the least extra work of box clipping: each contribution's gradient of a layer with positions is read
           once for its norm and once to be added (4 operations a number, at the speed of a dot product and an addition in cache), a
           Linear of one position needs the norms of its two factors only, and every parameter needs one draw of noise
reached    the private step with native kernels, paired with the plain one
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lamina.bench.step_cost import interleave, paired_ratio
from lamina.bench.step_variants import build_step
from lamina.bench.workloads import WORKLOADS, Workload
from lamina.engine.noise.source import SecureNoise

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "mkldnn", "attention")


def seconds_of(work: Callable[[], object], *, least: float = 0.2) -> float:
    """Processor seconds of one call, the best of three."""
    work()
    found = []
    for _ in range(3):
        count, began = 0, time.process_time()
        while time.process_time() - began < least:
            work()
            count += 1
        found.append((time.process_time() - began) / count)
    return min(found)


def machine() -> dict[str, float]:
    """Speed of a large product, of a dot product with an addition in cache, and of the noise."""
    n = 1536
    a, b = torch.randn(n, n), torch.randn(n, n)
    small, total = torch.randn(1 << 15), torch.zeros(1 << 15)  # both fit into the second cache
    sums = torch.zeros(1 << 20)
    noise = SecureNoise()

    def read_twice() -> None:
        torch.dot(small, small)
        total.add_(small, alpha=0.5)

    step = itertools.count()
    return {
        "product_flops": 2 * n**3 / seconds_of(lambda: a @ b),
        "in_cache_flops": 4 * small.numel() / seconds_of(read_twice),
        "seconds_per_draw": seconds_of(lambda: noise.add_(sums, 1e-3, step=next(step))) / sums.numel(),
    }


def products_of(workload: Workload) -> tuple[float, float]:
    """The share of products in the plain step's time, and their operations."""
    step = build_step(workload, "plain")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            step()
    events = [e for e in seen.key_averages() if not e.key.startswith("ProfilerStep")]
    in_products = sum(e.self_cpu_time_total for e in events if any(p in e.key for p in PRODUCTS))
    share = in_products / sum(e.self_cpu_time_total for e in events)
    model = workload.model()
    x, target = workload.example()
    with FlopCounterMode(display=False) as counter:
        workload.losses(model(x), target).mean().backward()
    return share, float(counter.get_total_flops())


def least_operations(workload: Workload) -> tuple[float, int]:
    """Operations of clipping that no method avoids, and the number of draws."""
    model, found = workload.model(), 0.0

    def count(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        nonlocal found
        size = sum(p.numel() for p in module.parameters(recurse=False) if p.requires_grad)
        rows = workload.batch
        rank_one = isinstance(module, nn.Linear) and given[0].dim() == 2
        found += 2.0 * (given[0].numel() + made.numel()) if rank_one else 4.0 * rows * size

    hooks = [m.register_forward_hook(count) for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    x, _ = workload.example()
    model(x)
    for hook in hooks:
        hook.remove()
    return found, sum(p.numel() for p in model.parameters() if p.requires_grad)


def roofline(workload: Workload, speeds: dict[str, float], rounds: int) -> dict[str, Any]:
    """The four figures of a workload."""
    share, flops = products_of(workload)
    steps = {name: build_step(workload, name) for name in ("plain", "box", "joint")}
    times = interleave(steps, rounds=rounds, minimum=rounds, budget=float("inf"), clock=time.process_time)
    plain = statistics.median(times["plain"].tolist())
    clipping, draws = least_operations(workload)
    extra = clipping / speeds["in_cache_flops"] + draws * speeds["seconds_per_draw"]
    return {
        "plain_milliseconds": 1_000 * plain,
        "products": share,
        "peak": flops / speeds["product_flops"] / plain,
        "noise": draws * speeds["seconds_per_draw"] / plain,
        "least": 1 + extra / plain,
        "reached": paired_ratio(times["box"], times["plain"]).as_json(),
        "joint": paired_ratio(times["joint"], times["plain"]).as_json(),
    }


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars by workload: products, the rest of the plain step, the least extra, and what comes on top of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(found)
    products = [found[n]["products"] for n in names]
    extra = [found[n]["least"] - 1 for n in names]
    over = [max(0.0, found[n]["reached"]["median"] - found[n]["least"]) for n in names]
    figure, axis = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    left = [0.0] * len(names)
    parts = (
        ("products of the plain step", products, "#0072b2", ""),
        ("rest of the plain step", [1 - p for p in products], "#9ecae1", ""),
        ("least extra work of clipping and noise", extra, "#e69f00", "//"),
        ("what Lamina takes beyond that", over, "#d55e00", "xx"),
    )
    for label, sizes, colour, hatch in parts:
        axis.barh(names, sizes, left=left, label=label, color=colour, hatch=hatch, edgecolor="white")
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, name in enumerate(names):
        axis.text(left[row] + 0.01, row, f"{found[name]['reached']['median']:.2f}", va="center", fontsize=9)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("processor time of a step, plain step = 1 (one thread)")
    axis.invert_yaxis()
    axis.legend(ncols=2, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.22))
    figure.savefig(path, dpi=130)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--only", action="append", choices=list(WORKLOADS))
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    torch.set_num_threads(1)
    speeds = machine()
    print({name: f"{value:.3g}" for name, value in speeds.items()})
    found = {}
    for name in given.only or WORKLOADS:
        found[name] = roofline(WORKLOADS[name], speeds, given.rounds)
        print(name, json.dumps(found[name]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "roofline.json").write_text(json.dumps({"machine": speeds, "workloads": found}, indent=2) + "\n")
    draw(found, given.out / "roofline.png")


if __name__ == "__main__":
    main()
