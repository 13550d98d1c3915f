"""Which optimiser, rate, schedule and clip norm need no tuning: every method on small tasks at ε = 1, 3 and 8, paired seeds.

    python benchmarks/utility defaults [--task wine …]              development tasks: the rule was chosen on these
    python benchmarks/utility defaults --held-out                   other tasks: measured once, with the rule frozen
    python benchmarks/utility defaults --validate                   the batched simulation against lamina.Engine

Writes benchmarks/results/defaults.json after every task and prints a table. Errors are 1 - accuracy or squared error over the
target's variance or power. The reference is the best of a grid of 5 rates × 5 clip norms of Adam with a cosine schedule, by
the mean test error over the same seeds: tuning on the test data that costs no ε, which nobody has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from lamina import Batch, Engine, LayerStack, Policy, SeededNoise, make_plan
from lamina.account import calibrate
from lamina.run.optimizer import FALLING, private_rate
from lamina.run.private import DEFAULT_CLIP_NORM

from .many_runs import Problem, Setting, first_weights, train_all
from .small_tasks import DEVELOPMENT, HELD_OUT, SmallTask
from .store import RESULTS

EPSILONS, SEEDS = (1.0, 3.0, 8.0), 5
RATES, CLIPS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0.01, 0.1, 0.3, 1.0, 3.0)
TOGETHER = 60  # settings in one batched training
DEFAULTS = 9  # the first contenders
LONGER = (0.2, 5.0)  # times the steps of a task
LENGTHENED = ("wine", "generated-small", "cgm-days", "text")  # tasks that are also run so much shorter and longer
LARGE = ("mnist-wide", "generated-large")  # only the defaults are run on these, not every optimiser
PATH = RESULTS / "defaults.json"

Held = dict[str, dict[str, list[float]]]
"""method|ε → {"error": by seed, "averaged": the same of the moving average of the weights}"""


def grid(sigma: float) -> dict[str, Setting]:
    """Adam with a cosine schedule at every rate and clip norm."""
    return {
        f"adam {rate:g} clip {clip:g}": Setting(optimizer="adam", rate=rate, clip=clip, sigma=sigma)
        for rate in RATES
        for clip in CLIPS
    }


def contenders(sigma: float, steps: int, batch: int, parameters: int) -> dict[str, Setting]:
    """The defaults of others, the rule of Lamina, and what was compared with it; clip norm 0.1 unless named."""

    def way(optimizer: str, rate: float, clip: float = 0.1, schedule: str = "cosine") -> Setting:
        return Setting(optimizer=optimizer, rate=rate, clip=clip, sigma=sigma, schedule=schedule)

    first = private_rate(batch / sigma / math.sqrt(parameters), steps)
    free = ("dog", "dog-far", "dowg", "dowg-far", "prodigy", "d-adapt-adam")
    found = {
        "opacus README (SGD 0.05, clip 1)": way("sgd", 0.05, 1.0, "constant"),
        "Adam 0.001, clip 1": way("adam", 1e-3, 1.0, "constant"),
        "lamina README before (Adam 0.001, clip 0.1)": way("adam", 1e-3, 0.1, "constant"),
        "lamina auto": way("adam", first, DEFAULT_CLIP_NORM, f"flat{FALLING:g}"),
        "lamina auto, cosine of 1.43 times the rate": way("adam", first / 0.7),
        "lamina auto, constant": way("adam", first, schedule="constant"),
        "min(0.03, 2/T)": way("adam", min(0.03, 2 / steps)),
        "min(0.03, 2/T), clip 1": way("adam", min(0.03, 2 / steps), 1.0),
        "adam 0.06": way("adam", 0.06),
    }
    for rate in (0.01, 0.03):
        found |= {f"adam {rate:g} warm-up": way("adam", rate, schedule="warm")}
        found |= {f"adam {rate:g} constant": way("adam", rate, schedule="constant")}
    found |= {f"adam-bc {rate:g}": way("adam-bc", rate) for rate in (1e-3, 3e-3, 1e-2, 3e-2)}
    found |= {f"known-scale {rate:g}": way("known-scale", rate) for rate in (3e-3, 1e-2, 3e-2, 0.1)}
    found |= {name: way(name, 1.0, schedule="constant") for name in free}
    found |= {f"{name} cosine": way(name, 1.0) for name in ("dog-far", "prodigy", "d-adapt-adam")}
    found |= {
        f"momentum {far:g}/T": way("momentum", far / steps) for far in (3, 10, 30, 100)
    }  # rate · 10 · C · T = far
    return found


def measure(tasks: Sequence[SmallTask], *, quick: bool) -> None:
    """Run what PATH does not have yet; `quick`: the defaults and the grid only."""
    for task in tasks:
        results = load()
        held: Held = results.setdefault(task.name, {})
        problem = task.problem()
        for factor in (1.0, *(LONGER if task.name in LENGTHENED else ())):
            steps = max(1, round(factor * task.steps))
            todo: list[tuple[str, Setting]] = []
            for epsilon in EPSILONS:
                sigma = calibrate(epsilon, delta=task.delta, q=task.batch / len(problem.x), steps=steps)
                ways = contenders(sigma, steps, task.batch, problem.parameters)
                if task.name in LARGE or quick:
                    ways = dict(list(ways.items())[:DEFAULTS])
                if factor == 1.0:
                    ways |= grid(sigma)
                else:
                    ways = {name: way for name, way in grid(sigma).items() if way.clip == DEFAULT_CLIP_NORM}
                    ways["lamina auto"] = contenders(sigma, steps, task.batch, problem.parameters)["lamina auto"]
                tag = "" if factor == 1.0 else f" ×{factor:g} steps"
                todo += [(f"{name}{tag}|{epsilon:g}", way) for name, way in ways.items()]
            todo = [(name, way) for name, way in todo if name not in held]
            for i in range(0, len(todo), TOGETHER):
                part = todo[i : i + TOGETHER]
                errors, averaged = train_all(
                    problem, [way for _, way in part], batch=task.batch, steps=steps, seeds=SEEDS
                )
                for j, (name, _) in enumerate(part):
                    both = {"error": errors[:, j], "averaged": averaged[:, j]}
                    held[name] = {key: [float(f"{v:.5g}") for v in found.tolist()] for key, found in both.items()}
        save(results)
        print(f"{task.name}: {len(held)} results", flush=True)


def load() -> dict[str, Held]:
    found: dict[str, Held] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    return found


def save(results: Mapping[str, Any]) -> None:
    PATH.write_text(json.dumps(results, separators=(",", ":"), sort_keys=True).replace("},", "},\n") + "\n", "utf-8")


def best_of_grid(held: Held, epsilon: float) -> tuple[float, str]:
    """The smallest mean error of the grid, and where it is."""
    return min((fmean(held[f"{name}|{epsilon:g}"]["error"]), name) for name in grid(1.0))


def table(tasks: Sequence[SmallTask], methods: Sequence[str], key: str = "error") -> str:
    """Error over the grid's best, by task and ε; below it the geometric mean and the largest."""
    results = load()
    rows = ["| task | ε | grid's best | at | " + " | ".join(methods) + " |", "|---" * (4 + len(methods)) + "|"]
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for task in tasks:
        held = results.get(task.name, {})
        for epsilon in EPSILONS:
            if f"adam {RATES[-1]:g} clip {CLIPS[-1]:g}|{epsilon:g}" not in held:
                continue
            best, where = best_of_grid(held, epsilon)
            cells = []
            for name in methods:
                found = held.get(f"{name}|{epsilon:g}")
                if found is not None:
                    ratios[name].append(fmean(found[key]) / best)
                cells.append("–" if found is None else f"{fmean(found[key]) / best:.2f}")
            rows.append(f"| {task.name} | {epsilon:g} | {best:.4f} | {where} | {' | '.join(cells)} |")
    means = [f"{math.exp(fmean(map(math.log, each))):.3f}" if each else "–" for each in ratios.values()]
    rows.append(f"| geometric mean | | | | {' | '.join(means)} |")
    rows.append(f"| largest | | | | {' | '.join(f'{max(each):.2f}' if each else '–' for each in ratios.values())} |")
    return "\n".join(rows)


def ranking(tasks: Sequence[SmallTask]) -> str:
    """Every method by the geometric mean of its error over the grid's best, over the tasks that have all of them."""
    results, found = load(), {}
    names = (*grid(1.0), *contenders(1.0, 100, 1, 1))
    for name in names:
        for key in ("error", "averaged"):
            ratios = [
                fmean(results[task.name][f"{name}|{epsilon:g}"][key]) / best_of_grid(results[task.name], epsilon)[0]
                for task in tasks
                for epsilon in EPSILONS
                if f"{name}|{epsilon:g}" in results.get(task.name, {})
            ]
            if ratios:
                mean = math.exp(fmean(map(math.log, ratios)))
                found[name + (", moving average" if key == "averaged" else "")] = (mean, max(ratios), len(ratios))
    order = sorted(found.items(), key=lambda item: item[1])
    return "\n".join(f"{mean:.3f}  largest {most:6.2f}  of {count:3d}  {name}" for name, (mean, most, count) in order)


def validate(task: SmallTask, *, steps: int = 40, epsilon: float = 3.0) -> tuple[float, float]:
    """The error after some steps of the engine and of the batched simulation: same weights and samples, other noise."""
    problem = task.problem()
    population, rate, clip = len(problem.x), 0.03, 0.1
    about = {"origin": "benchmark", "delta": task.delta}
    terms = {"population": population, "clip_norm": clip, "epsilon": epsilon}
    policy = Policy.from_dict({"corpus": about, "class": {"all": terms}})
    simulated = Setting(optimizer="adam", rate=rate, clip=clip, sigma=0.0)
    engines: list[float] = []
    for seed in range(SEEDS):
        model = network(problem, seed)
        plan = make_plan(LayerStack.from_model(model), policy, batch=task.batch, steps=steps, allocate="flat")
        simulated = Setting(optimizer="adam", rate=rate, clip=clip, sigma=plan.sigma(0))
        engines.append(_trained_by_engine(model, problem, plan, rate, seed))
    errors, _ = train_all(problem, [simulated], batch=task.batch, steps=steps, seeds=SEEDS)
    return fmean(engines), float(errors.mean())


def network(problem: Problem, seed: int) -> nn.Sequential:
    """The network of the simulation as a torch module, with the same first weights."""
    layers: list[nn.Module] = []
    for a, b in zip(problem.sizes, problem.sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    nn.utils.vector_to_parameters(first_weights(problem.sizes, seed), model.parameters())
    return model


def _trained_by_engine(model: nn.Sequential, problem: Problem, plan: Any, rate: float, seed: int) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    coins = torch.Generator().manual_seed(10_000 + seed)
    with Engine(model, plan, noise=SeededNoise(seed, threads=1)) as engine:
        for _ in range(plan.steps):
            rows = (torch.rand(len(problem.x), generator=coins) < plan.batch / len(problem.x)).nonzero().flatten()
            batch = Batch(problem.x[rows], problem.y[rows], unit=torch.arange(len(rows)))
            engine.backward(_losses(model(batch.x), problem, batch), batch)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    with torch.no_grad():
        output = model(problem.test_x)
    if problem.loss == "ce":
        return float((output.argmax(1) != problem.test_y).float().mean())
    target = problem.test_x if problem.loss == "auto" else problem.test_y
    centre = 0.0 if problem.loss == "auto" else target.mean(0)
    return float((output - target).square().sum() / (target - centre).square().sum())


def _losses(output: torch.Tensor, problem: Problem, batch: Batch) -> torch.Tensor:
    if problem.loss == "ce":
        return nn.functional.cross_entropy(output, batch.y, reduction="none")
    target: torch.Tensor = batch.x if problem.loss == "auto" else batch.y
    return (output - target).square().mean(1)


def main(names: Sequence[str] | None, *, held_out: bool, check: bool, quick: bool) -> None:
    tasks = [t for t in (HELD_OUT if held_out else DEVELOPMENT) if not names or t.name in names]
    if check:
        for task in tasks:
            for epsilon in (3.0, 1e3):  # at 1000 the noise is negligible, and both must agree closely
                engine, simulated = validate(task, epsilon=epsilon)
                print(f"{task.name}, ε {epsilon:g}: engine {engine:.4f}, simulation {simulated:.4f}", flush=True)
        return
    measure(tasks, quick=quick)
    shown = list(contenders(1.0, 100, 1, 1))[:DEFAULTS]
    print(table(tasks, shown), "", ranking(tasks), sep="\n")
