"""LADP as printed: the mean gradient of the batch, clamped entry by entry. It runs, and says what it is."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import layers_of
from refusals import raises_code
from torch import Tensor, nn

from lamina.allocate.paper import ReproductionWarning
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.source import SeededNoise
from lamina.plan.rules import ChooseAsPrinted, effective_sigma
from lamina.plan.step_plan import PlannedClass, StepPlan

ONE = PlannedClass(name="one", population=100, sampling_rate=0.1, delta=1e-5)
TWO = PlannedClass(name="two", population=100, sampling_rate=0.1, delta=1e-5)


def plan_of(model: nn.Module, bound: float, classes: tuple[PlannedClass, ...] = (ONE,)) -> StepPlan:
    layers = layers_of(model)
    row = tuple(2 * bound * (i + 1) * math.sqrt(x.size) for i, x in enumerate(layers))
    return StepPlan(
        layers=layers, classes=classes, clip=(row,) * len(classes), noise=tuple(0.1 + i for i in range(len(row))),
        batch=1.0, steps=10, clipping="elementwise", accountant="gaussian", allocation="printed-ladp",
        claimed=(1.0,) * len(classes),
    )  # fmt: skip


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x) - batch.y).square().mean(1)


def written(model: nn.Module) -> dict[str, Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("hardened", [False, True])
def test_the_mean_is_clamped_and_noised(parts: int, hardened: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan, twin = plan_of(model, 0.05), copy.deepcopy(model)
    weight = torch.ones(7)
    weight[4] = 0.0
    batch = Batch(torch.randn(7, 3), torch.randn(7, 2), unit=torch.tensor([0, 0, 0, 1, 1, 2, 3]), weight=weight)
    (losses(twin, batch) * weight).sum().div(6).backward()
    with pytest.warns(ReproductionWarning, match="ε = 1 is claimed"):
        engine = Engine(model, plan, noise=SeededNoise(3, hardened=hardened))
    with engine:
        for part in batch.split(parts):
            engine.backward(losses(model, part), part)
        grads = written(model)
        z = {n: torch.empty_like(p) for n, p in twin.named_parameters()}
        SeededNoise(3, hardened=False).fill_many_(list(z.values()), [1.0] * len(z), step=0)
        clamped = False
        for i, layer in enumerate(plan.layers):
            for name in layer.parameters:
                raw: Any = dict(twin.named_parameters())[name].grad
                mean = raw.clamp(-0.05 * (i + 1), 0.05 * (i + 1))
                clamped = clamped or not torch.equal(raw, mean)
                tolerance = plan.noise[i] / 256 if hardened else 1e-6
                assert torch.allclose(grads[name], mean + plan.noise[i] * z[name], atol=tolerance, rtol=1e-5)
        assert clamped
        sums = engine.clipped_sums(losses(model, batch), batch)
        assert all(float(sums[n].abs().max()) <= 0.1 + 1e-7 for n in sums)
        engine.backward(None, Batch(torch.zeros(0, 3), torch.zeros(0, 2)))
        SeededNoise(3, hardened=False).fill_many_(list(z.values()), [1.0] * len(z), step=1)
        grads = written(model)
        name = plan.layers[1].parameters[0]
        assert torch.allclose(grads[name], plan.noise[1] * z[name], atol=plan.noise[1] / 200)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_evaluates_the_layers_and_chooses_their_parts(seed: int) -> None:
    """Lines 3 and 4: Fisher information of a private sample, the exponential mechanism, then S as it was drawn."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    rows = ((0.2, 0.05), (0.1, 0.1), (0.05, 0.2))
    parts = ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))
    rule = ChooseAsPrinted(epsilon=8.0, every=1, names=("a", "b", "c"), noise=rows, parts=parts, spend=0.2)
    base = plan_of(model, 0.05)
    least = min(rows, key=lambda row: effective_sigma(base.clip[0], row))
    plan = replace(base, noise=least, rules=(rule,), steps=60)
    shares, drawn = np.zeros((60, 2)), []
    with pytest.warns(ReproductionWarning):
        engine = Engine(model, plan, noise=SeededNoise(5, hardened=False))
    with engine:
        for step in range(plan.steps):
            asked = Batch(torch.randn(6, 3), torch.randn(6, 2) * 3)
            for i in range(6):
                one = torch.autograd.grad(losses(twin, asked)[i], list(twin.parameters()))
                shares[step] += [float(sum(g.square().sum() for g in one[j : j + 2])) for j in (0, 2)]
            shares[step] /= shares[step].sum()
            assert engine.choice_due
            engine.choose(losses(model, asked), asked)
            assert not engine.choice_due
            assert engine.rules.adaptation is not None
            assert (
                engine.rules.adaptation.applied.noise
                == dict(zip(rule.names, rows, strict=True))[engine.rules.adaptation.choice]
            )
            assert engine.rules.adaptation.applied.sigma(0) >= plan.sigma(0)
            drawn.append(rule.names.index(engine.rules.adaptation.choice))
            batch = Batch(torch.randn(6, 3), torch.randn(6, 2))
            engine.backward(losses(model, batch), batch)
            model.zero_grad()
        batch = Batch(torch.randn(6, 3), torch.randn(6, 2))
        with raises_code("engine.no-steps-left"):
            engine.backward(losses(model, batch), batch)
        assert engine.budget.epsilon(0) == pytest.approx(plan.epsilon(0))
    weights = np.exp(8.0 * 0.5 * shares @ np.array(parts).T)
    expected = (weights / weights.sum(1, keepdims=True)).sum(0)
    deviation = np.sqrt(
        (weights / weights.sum(1, keepdims=True) * (1 - weights / weights.sum(1, keepdims=True))).sum(0)
    )
    assert (np.abs(np.bincount(drawn, minlength=3) - expected) < 4 * deviation).all()


def test_one_private_class_only() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with raises_code("engine.elementwise-needs-one-class"):
        Engine(model, plan_of(model, 1.0, (ONE, TWO)))
