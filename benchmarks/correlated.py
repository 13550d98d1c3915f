"""When noise that is correlated over steps helps: error of the sums of gradients at equal ε, and trainings with either noise.

    python benchmarks/correlated.py [--errors] [--train] [--adam] [--out results.json]

Errors are computed, not simulated: both plans have the same ε, batch and steps. The trainings are of a softmax regression on
simulated features, plain SGD, three seeds for each noise and learning rate, or the plan's own Adam; the figure is the accuracy
on fresh examples.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lamina
from lamina.account import calibrate
from lamina.plan.correlation import participations, prefix_error

DELTA, POPULATION = 1e-5, 10_000
BANDS = (2, 4, 8, 16, 32, 64)
RATES = (0.03, 0.1, 0.3, 1.0)


def error_ratio(epsilon: float, q: float, steps: int, bands: int, accountant: str) -> float | None:
    """Mean squared error of prefix sums over that of independent noise at the same ε."""
    if q * bands > 1:
        return None
    alone = calibrate(epsilon, delta=DELTA, q=q, steps=steps, accountant=accountant)
    turns = participations(steps, bands)
    sigma = calibrate(epsilon, delta=DELTA, q=q * bands, steps=turns, accountant=accountant)
    return sigma**2 * prefix_error(bands, steps) / (alone**2 * prefix_error(1, steps))


def errors() -> list[dict[str, Any]]:
    found = []
    for accountant in ("pld", "gaussian"):
        for q, steps in ((0.001, 2000), (0.01, 1000), (0.01, 4000), (0.05, 1000)):
            for epsilon in (0.5, 1.0, 2.0, 8.0):
                row = {str(b): error_ratio(epsilon, q, steps, b, accountant) for b in BANDS}
                found.append({"accountant": accountant, "q": q, "steps": steps, "epsilon": epsilon, "ratio": row})
                cells = "  ".join("   -" if r is None else f"{r:.2f}" for r in row.values())
                print(f"{accountant:8} q {q:<6g} T {steps:<5} ε {epsilon:<4g} {cells}", flush=True)
    return found


def data(count: int, seed: int, features: int = 60, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten overlapping clusters."""
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=generator)
    return 0.35 * centres[y] + torch.randn(count, features, generator=generator), y


def train(epsilon: float, q: float, steps: int, bands: int, accountant: str, rate: float | None, seed: int) -> float:
    """Accuracy after a training, by plain SGD at `rate`, or by the plan's own Adam for None."""
    noise = "" if bands == 1 else f'[noise]\ncorrelation = "banded"\nbands = {bands}\n'
    policy = lamina.Policy.parse(
        f'[corpus]\norigin = "simulated"\ndelta = {DELTA}\naccountant = "{accountant}"\n'
        f"[class.a]\npopulation = {POPULATION}\nepsilon = {epsilon}\n{noise}"
    )
    torch.manual_seed(seed)
    model = nn.Linear(60, 10)
    nn.init.zeros_(model.weight)
    plan = lamina.make_plan(
        lamina.LayerStack.from_model(model), policy, batch=int(q * POPULATION), steps=steps, allocate="flat"
    )
    x, y = data(POPULATION, seed + 1)
    corpus = lamina.Corpus(x.numpy(), y.numpy(), unit="each", ids=range(len(x)), policy=policy)
    optimizer, schedule = lamina.private_optimizer(model, plan)
    if rate is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with lamina.Engine(model, plan) as engine:
        engine.decline_probe()
        for batch in corpus.batches(plan, probe=False):
            losses = F.cross_entropy(model(batch.x), batch.y, reduction="none") if len(batch) else None
            engine.backward(losses, batch)
            optimizer.step()
            optimizer.zero_grad()
            if rate is None:
                schedule.step()
    x, y = data(20_000, seed + 1000)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def adam(seeds: int = 3) -> list[dict[str, Any]]:
    """The optimiser of the plan ("auto") with either noise: its rate does not know of the bands."""
    found = []
    for accountant, epsilon, q, steps, tried in (
        ("pld", 1.0, 0.002, 2000, (1, 8, 32)),
        ("pld", 8.0, 0.01, 1000, (1, 4, 16)),
        ("gaussian", 1.0, 0.02, 1000, (1, 8, 32)),
    ):
        for bands in tried:
            reached = [train(epsilon, q, steps, bands, accountant, None, seed) for seed in range(seeds)]
            row = {
                "accountant": accountant,
                "epsilon": epsilon,
                "q": q,
                "steps": steps,
                "bands": bands,
                "accuracy": reached,
            }
            found.append(row)
            print(f"{accountant:8} ε {epsilon:<4g} bands {bands:<3} Adam, auto: {reached}", flush=True)
    return found


def trainings(seeds: int = 3) -> list[dict[str, Any]]:
    """The best learning rate of each noise, chosen on other seeds than those reported."""
    found = []
    for accountant, epsilon, q, steps, tried in (
        ("pld", 1.0, 0.002, 2000, (1, 8, 32)),
        ("pld", 0.5, 0.02, 1000, (1, 8)),
        ("gaussian", 1.0, 0.02, 1000, (1, 8, 32)),
    ):
        for bands in tried:
            chosen = max(RATES, key=lambda rate: train(epsilon, q, steps, bands, accountant, rate, 100))
            reached = [train(epsilon, q, steps, bands, accountant, chosen, seed) for seed in range(seeds)]
            ratio = error_ratio(epsilon, q, steps, bands, accountant) if bands > 1 else 1.0
            row = {
                "accountant": accountant, "epsilon": epsilon, "q": q, "steps": steps, "bands": bands, "rate": chosen,
                "error_ratio": ratio, "accuracy": statistics.mean(reached), "spread": statistics.stdev(reached),
            }  # fmt: skip
            found.append(row)
            print(
                f"{accountant:8} ε {epsilon:<4g} bands {bands:<3} error {ratio:.2f} learning rate {chosen:<5g} "
                f"accuracy {row['accuracy']:.4f} ± {row['spread']:.4f}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    every = not (asked.errors or asked.train or asked.adam)
    result = {
        "errors": errors() if asked.errors or every else [],
        "adam": adam() if asked.adam or every else [],
        "trainings": trainings() if asked.train or every else [],
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
