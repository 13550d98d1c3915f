"""Attacks on the low-order bits of a released gradient, written without the code that draws and adds noise.

One step, σ = 1, 10,000 numbers: was the batch empty, or did it hold one canary of the largest norm? The attacker sees
`.grad`, or the weights of a zero-initialised layer after one SGD step, as in LoRA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle import plan_of
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise
from lamina.engine import native
from lamina.engine.execute import compiled

SIDE = 100
LEARNT, TRIED = 30, 30  # trials of each kind, to choose the attack on and to try it on
MOST = 0.75  # Φ(½) = 0.69 is what the mechanism allows, and 60 trials have a standard error of 0.06
SEES = ("grad", "lr 0.1", "lr 0.001")

Trial = dict[str, NDArray[np.float64]]


def trials(how: str, *, canary: bool, plain: bool) -> list[Trial]:
    """What the attacker sees, by how it is seen: a step each, and of correlated noise the first step of an engine."""
    engines, steps = (LEARNT + TRIED, 1) if how == "correlated" else (1, LEARNT + TRIED)
    return [each for i in range(engines) for each in _steps(how, steps, 1000 * canary + i, canary=canary, plain=plain)]


def _steps(how: str, steps: int, seed: int, *, canary: bool, plain: bool) -> Iterator[Trial]:
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False))
    weight = model[0].weight
    nn.init.zeros_(weight)
    plan = plan_of(model, 1.0, 1.0, batch=1.0, clipping="joint" if how == "joint" else "box")
    if how == "correlated":
        plan = dataclasses.replace(plan, bands=3)
    noise = SeededNoise(seed, hardened=False) if plain else SeededNoise(seed)

    def losses_of(x: Tensor, y: object) -> Tensor:
        out: Tensor = model(x).sum(1)
        return out

    x = torch.zeros(2, SIDE)  # two contributions, because a graph is made for two and more
    x[0] = float(canary)
    first = 3 if how == "compiled" else 0  # the graph takes the fourth step
    with Engine(model, plan, noise=noise, compiled=how == "compiled") as engine:
        for step in range(first + steps):
            model.zero_grad()
            engine.step(losses_of, Batch(x.clone()))
            if step < first:
                continue
            assert weight.grad is not None
            seen = {"grad": weight.grad.double().flatten().numpy().copy()}
            for rate in (0.1, 0.001):
                torch.optim.SGD([weight], lr=rate).step()
                seen[f"lr {rate:g}"] = -weight.detach().double().flatten().numpy() / rate
                nn.init.zeros_(weight)
            yield seen
        assert how != "compiled" or (engine.compiled is not None and engine.compiled.steps == steps)


def features(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far numbers are from multiples of 2^-3 … 2^-42, in those units: of all of them, and of the smallest."""
    size = np.abs(values[values != 0])
    smallest = np.sort(size)[:16]
    return np.array([np.abs(s - np.rint(s)).mean() for e in range(3, 43) for s in (size * 2.0**e, smallest * 2.0**e)])


def accuracy(empty: list[NDArray[np.float64]], full: list[NDArray[np.float64]]) -> float:
    """Of the one feature and threshold that tell the first trials apart best, on the others."""
    a, b = np.array(empty), np.array(full)
    middle = (a[:LEARNT].mean(0) + b[:LEARNT].mean(0)) / 2
    sign = np.sign(b[:LEARNT].mean(0) - a[:LEARNT].mean(0))
    right = ((b - middle) * sign > 0).astype(float), ((a - middle) * sign < 0).astype(float)
    best = int(np.argmax(sum(each[:LEARNT].mean(0) for each in right)))
    return float(np.mean([each[LEARNT:, best].mean() for each in right]))


def attacked(how: str, *, plain: bool) -> dict[str, float]:
    made = {canary: trials(how, canary=canary, plain=plain) for canary in (False, True)}
    return {see: accuracy(*([features(each[see]) for each in made[k]] for k in (False, True))) for see in SEES}


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")


@pytest.mark.parametrize("how", ["hook", "joint", "compiled", "correlated"])
def test_bits_of_the_default_noise_do_not_show_a_canary(how: str) -> None:
    found = attacked(how, plain=False)
    assert max(found.values()) <= MOST, found


@pytest.mark.parametrize("how", ["hook", "joint", "compiled"])
def test_bits_of_plain_noise_show_a_canary(how: str) -> None:
    """So that the attack above can succeed."""
    found = attacked(how, plain=True)
    assert min(found.values()) >= 0.95, found


def test_without_the_kernel_too() -> None:
    with native.switched(False):
        assert max(attacked("hook", plain=False).values()) <= MOST
        assert min(attacked("hook", plain=True).values()) >= 0.95
