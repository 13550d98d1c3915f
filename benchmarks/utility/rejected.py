"""Two rules that were compared with the defaults on development tasks and rejected: python benchmarks/utility rejected.

simulated   the clip norm is 0.4 of the median gradient norm on simulated examples, at the first weights or after 40 steps of
            Adam on half of them, whichever is less (as `make_private(proxy=)` does with a proxy). Inputs and real targets are
            standard normal, labels random, autoencoders reproduce their inputs
released R  the rate follows the signal of the first ten released gradients: it begins at the rate of r < 1 and is then
            multiplied by min(2, max(1, s/R)^0.4), s the length of their mean without noise over the length of one step's noise

Everything else is `optimizer = "auto"` at clip norm 0.1. All methods of a seed share first weights, samples and noise. Writes
benchmarks/results/utility-rejected.json and prints the error over that of the default, and t of the paired differences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lamina import Batch
from lamina.account import calibrate
from lamina.allocate.problem import CLIP_PART
from lamina.run.optimizer import FALLING, private_rate
from lamina.run.private import DEFAULT_CLIP_NORM

from .defaults import EPSILONS, SEEDS, _losses, network
from .many_runs import OPTIMIZERS, Problem, Setting, Step, train_all
from .small_tasks import DEVELOPMENT
from .store import RESULTS

PATH = RESULTS / "utility-rejected.json"
EXAMPLES, FIRST = 256, 10
SIGNALS = (0.03, 0.1, 0.3, 1.0)
RELEASED = ("wine", "diabetes", "generated-small", "friedman", "mnist-small", "cgm-days", "cgm-forecast")


def gradient_norms(model: nn.Module, problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient norm of each example."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return _losses(functional_call(model, values, (a[None],)), problem, Batch(a[None], b[None], unit=ONE))[0]

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    squares: Tensor = torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0)
    return squares.sqrt()


ONE = torch.zeros(1, dtype=torch.long)


def simulated_norm(problem: Problem, seed: int) -> float:
    """Return the typical gradient norm on simulated examples."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, problem.sizes[0], generator=generator)
    out = problem.sizes[-1]
    labels = problem.loss == "ce"
    y = (
        torch.randint(out, (EXAMPLES,), generator=generator)
        if labels
        else torch.randn(EXAMPLES, out, generator=generator)
    )
    model = network(problem, seed)
    first = float(gradient_norms(model, problem, x[1::2], y[1::2]).median())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(40):
        rows = torch.arange(step * 16, (step + 1) * 16) % (EXAMPLES // 2) * 2
        batch = Batch(x[rows], y[rows], unit=torch.arange(16))
        optimizer.zero_grad()
        _losses(model(batch.x), problem, batch).mean().backward()
        optimizer.step()
    return min(first, float(gradient_norms(model, problem, x[1::2], y[1::2]).median()))


def released(signal: float) -> Callable[[Tensor, Tensor], Step]:
    """Return Adam whose rate follows the first released gradients."""

    def make(theta: Tensor, noise: Tensor) -> Step:
        m, v, total = (torch.zeros_like(theta) for _ in range(3))
        factor, variance = torch.ones(theta.shape[:2]), theta.shape[-1] * noise.square()[None, :]

        def step(theta: Tensor, g: Tensor, rate: Tensor, t: int) -> None:
            if t < FIRST:
                total.add_(g)
            if t == FIRST - 1:
                square = (total / FIRST).square().sum(-1) - variance / FIRST
                found = (square.clamp_min(0.0) / variance).sqrt() / signal
                factor.copy_(found.clamp_min(1.0).pow(0.4).clamp_max(2.0))
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            second = v / (1.0 - 0.999 ** (t + 1))
            theta.sub_((rate[None, :] * factor)[..., None] / (1.0 - 0.9 ** (t + 1)) * m / (second.sqrt() + 1e-8))

        return step

    return make


def main(names: list[str] | None) -> None:
    """Run what PATH does not have yet, and print a table."""
    OPTIMIZERS.update({f"released {signal:g}": released(signal) for signal in SIGNALS})
    held = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    for task in DEVELOPMENT:
        if (names and task.name not in names) or f"{task.name}|{EPSILONS[-1]:g}" in held:
            continue
        problem = task.problem()
        typical = sorted(simulated_norm(problem, seed) for seed in range(SEEDS))[SEEDS // 2]
        for epsilon in EPSILONS:
            sigma = calibrate(epsilon, delta=task.delta, q=task.batch / len(problem.x), steps=task.steps)
            signal = task.batch / sigma / math.sqrt(problem.parameters)

            def way(optimizer: str, clip: float, rate: float, sigma: float = sigma) -> Setting:
                return Setting(optimizer=optimizer, rate=rate, clip=clip, sigma=sigma, schedule=f"flat{FALLING:g}")

            rate, slow = private_rate(signal, task.steps), private_rate(0.0, task.steps)
            ways = {"auto": way("adam", DEFAULT_CLIP_NORM, rate), "simulated": way("adam", CLIP_PART * typical, rate)}
            if task.name in RELEASED:
                ways |= {name: way(name, DEFAULT_CLIP_NORM, slow) for name in OPTIMIZERS if name.startswith("released")}
            errors, _ = train_all(problem, list(ways.values()), batch=task.batch, steps=task.steps, seeds=SEEDS)
            found = {name: [float(f"{e:.5g}") for e in errors[:, j].tolist()] for j, name in enumerate(ways)}
            held[f"{task.name}|{epsilon:g}"] = {"clip": float(f"{CLIP_PART * typical:.4g}"), "error": found}
            PATH.write_text(json.dumps(held).replace('}}, "', '}},\n"') + "\n", encoding="utf-8")
    print(table(held))


def table(held: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Return, by task and method, the ratio of mean errors at each ε, and t of the paired differences in brackets."""
    rows = []
    for name in dict.fromkeys(key.partition("|")[0] for key in held):
        entries = [held[f"{name}|{epsilon:g}"] for epsilon in EPSILONS]
        for method in list(entries[0]["error"])[1:]:
            cells = []
            for entry in entries:
                mine, other = entry["error"][method], entry["error"]["auto"]
                apart = [a - b for a, b in zip(mine, other, strict=True)]
                t = fmean(apart) / (stdev(apart) / math.sqrt(len(apart))) if stdev(apart) else 0.0
                cells.append(f"{fmean(mine) / fmean(other):.2f} ({t:+.1f})")
            rows.append(
                f"| {name} | {method} | {entries[0]['clip'] if method == 'simulated' else ''} | {' | '.join(cells)} |"
            )
    return "\n".join(["| task | method | clip norm | ε = 1 | 3 | 8 |", "|---|---|---|---|---|---|", *rows])
