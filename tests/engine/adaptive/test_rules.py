"""Every rule against the same rule in a few lines of numpy, from nothing but what was released."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from adaptive_plans import batch_of, losses_of, norms_of, plan_of
from net_builders import Net
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.gaussian import COUNTS_PLACE
from lamina.engine.noise.source import SeededNoise
from lamina.engine.rules.adaptation import Adaptation
from lamina.errors import BudgetExceeded
from lamina.plan.rules import FollowBudget, FollowEnergy, FollowQuantile
from lamina.plan.step_plan import StepPlan


def step(engine: Engine, batch: Batch, parts: int = 1) -> dict[str, Tensor]:
    """One step; returns B × what was written."""
    engine.model.zero_grad(set_to_none=True)
    for part in batch.split(parts):
        engine.backward(losses_of(engine.model, part), part)
    named = engine.model.named_parameters()
    grads = {name: p.grad.double() * engine.plan.batch for name, p in named if p.grad is not None}
    engine.model.zero_grad(set_to_none=True)
    return grads


def squares(plan: StepPlan, grads: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    return np.array([sum(float(grads[n].square().sum()) for n in x.parameters) for x in plan.layers])


def scaled(clip: Any, shape: Any, wanted: Any, bits: float = 0.0) -> Any:
    """κ·S, by the formula."""
    reach = [np.sum((c / shape)[c > 0] ** 2) for c in clip]
    return shape * max(math.sqrt(r / (s**-2 - bits**2)) for r, s in zip(reach, wanted, strict=True))


@pytest.mark.parametrize("form", ["box", "joint"])
def test_shares_follow_the_energy(model: nn.Module, form: str) -> None:
    decay, least, every = 0.7, 0.2, 2
    rule = FollowEnergy(decay=decay, least=least, every=every)
    plan = plan_of(model, rule, clipping=form, scale=0.1)
    clip, sigma = np.array(plan.clip)[:2], [plan.sigma(k) for k in (0, 1)]
    height = np.max([c * s for c, s in zip(clip, sigma, strict=True)], axis=0)
    d, noise = np.array([x.size for x in plan.layers]), np.array(plan.noise)
    proxy = (height / noise) ** 2 / np.sum((height / noise) ** 2)
    e, v, mass = np.zeros(3), np.zeros(3), 0.0
    measured = False
    with Engine(model, plan, noise=SeededNoise(3)) as engine:
        for t in range(9):
            y = squares(plan, step(engine, batch_of(40, seed=1)))
            if t % every == 0:
                e = decay * e + (1 - decay) * (y - d * noise**2)
                v = decay**2 * v + (1 - decay) ** 2 * 2 * d * noise**4
                mass = decay * mass + 1 - decay
                energy, sd = np.maximum(e / mass, 0), np.sqrt(v) / mass
                on = (energy >= sd) & (energy > 0)
                w = proxy.copy()
                if on.any():
                    target = np.sqrt(energy * d)[on] / np.sqrt(energy * d)[on].sum()
                    mix = (energy / (energy + sd))[on]
                    w[on] = mix * proxy[on].sum() * target + (1 - mix) * proxy[on]
                    w[on] *= proxy[on].sum() / w[on].sum()
                assert (w > least / 3).all()  # the floor has a test of its own
                noise = scaled(clip, height / np.sqrt(w), sigma)
                measured = measured or bool(on.any())
                assert engine.rules.adaptation.measured == tuple(on.tolist())
            np.testing.assert_allclose(engine.applied.noise, noise, rtol=1e-5)
            assert engine.applied.clip == plan.clip
            noise = np.array(engine.applied.noise)
    assert measured


def test_the_noise_that_is_applied_is_the_one_that_is_said(model: nn.Module) -> None:
    """Each step's release minus its own noise is a clipped sum: S of the step is what `applied` said before it."""
    plan = plan_of(model, FollowEnergy(every=1), scale=0.1)
    with Engine(model, plan, noise=SeededNoise(3, hardened=False)) as engine:
        for t in range(4):
            said = engine.applied
            grads = step(engine, batch_of(0))
            z = {n: torch.empty_like(p) for n, p in model.named_parameters()}
            SeededNoise(3, hardened=False).fill_many_(list(z.values()), [1.0] * len(z), step=t)
            for layer, s in zip(plan.layers, said.noise, strict=True):
                for name in layer.parameters:
                    assert torch.allclose(grads[name], s * z[name].double(), rtol=1e-4, atol=1e-9)
            engine.rules.adaptation.update(np.array([1e3, 1e3, 1e3 * t]), None)
            assert engine.applied.noise != said.noise


def counted(plan: StepPlan, clip: Any, batch: Batch, norms: Tensor) -> np.ndarray[Any, Any]:
    """Σ (bit - ½) over the contributions of private classes that reach the layer, one at a time."""
    found = np.zeros(len(plan.layers))
    for i, k in enumerate(batch.cls.tolist()):
        for layer in range(len(plan.layers)):
            if not plan.classes[k].public and clip[k][layer] > 0:
                found[layer] += 0.5 if norms[i, layer] <= clip[k][layer] else -0.5
    return found


def noise_of_counts(seed: int, std: float, t: int, layers: int = 3) -> np.ndarray[Any, Any]:
    z = torch.empty(layers, dtype=torch.float64)
    SeededNoise(seed, hardened=False).fill_(z, std, step=t, tensor=COUNTS_PLACE)
    return z.numpy()


def test_thresholds_follow_the_quantile(model: nn.Module) -> None:
    rule = FollowQuantile(target=0.6, rate=0.5, noise=3.0)
    plan, twin = plan_of(model, rule), copy.deepcopy(model)
    clip, noise = np.array(plan.clip)[:2], np.array(plan.noise)
    wanted, bits = [plan.sigma(k) for k in (0, 1)], [math.sqrt(n) / 6.0 for n in (3, 2)]
    with Engine(model, plan, noise=SeededNoise(5, hardened=False)) as engine:
        for t in range(6):
            batch = batch_of(11, seed=t, spread=3.0)
            raw = counted(plan, engine.applied.clip, batch, norms_of(twin, batch, plan))
            step(engine, batch, parts=1 + t % 3)
            assert engine.rules.adaptation is not None and engine.rules.adaptation.counts is not None
            released = np.array(engine.rules.adaptation.counts)
            np.testing.assert_allclose(released, raw + noise_of_counts(5, 3.0, t), rtol=0, atol=1e-12)
            factor = np.exp(-0.5 * (released / 8.0 + 0.5 - 0.6))
            clip, noise = clip * factor, noise * factor  # shares stay: S moves with C
            np.testing.assert_allclose(np.array(engine.applied.clip)[:2], clip, rtol=1e-12)
            assert all(math.isinf(c) for c in engine.applied.clip[2])
            for k in (0, 1):
                spent = np.sum((clip[k] / engine.applied.noise) ** 2) + bits[k] ** 2
                assert 1 / math.sqrt(spent) == pytest.approx(wanted[k], rel=1e-9)
            np.testing.assert_allclose(engine.applied.noise, noise, rtol=1e-9)


@pytest.mark.parametrize("hardened", [False, True])
def test_an_empty_batch_gets_its_noise_and_parts_add_up(model: nn.Module, hardened: bool) -> None:
    rule = FollowQuantile(noise=3.0)
    found = []
    for batch, parts in ((batch_of(0), 1), (batch_of(13, spread=4.0), 1), (batch_of(13, spread=4.0), 5)):
        with Engine(model, plan_of(model, rule), noise=SeededNoise(5, hardened=hardened)) as engine:
            step(engine, batch, parts)
            found.append(np.array(engine.rules.adaptation.counts))
    np.testing.assert_allclose(found[0], noise_of_counts(5, 3.0, 0), atol=3.0 / 256 if hardened else 1e-12)
    assert (np.abs(found[0]) > 0).all()
    np.testing.assert_array_equal(found[1], found[2])
    assert (found[1] != found[0]).any()


def test_counts_leave_the_noise_of_the_gradients_alone(model: nn.Module) -> None:
    found = []
    for rules in ((), (FollowQuantile(noise=3.0),)):
        with Engine(model, plan_of(model, *rules), noise=SeededNoise(5)) as engine:
            found.append(step(engine, batch_of()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_who_counts(model: nn.Module) -> None:
    """Padding is nobody; public classes and layers out of reach do not count; what is not finite is clipped."""
    plan = plan_of(model, FollowQuantile(noise=1e-6), scale=1e6)
    x, y = torch.ones(5, 4), torch.zeros(5, 2)
    x[3] = math.nan
    batch = Batch(x, y, cls=torch.tensor([0, 1, 2, 0, 0]), weight=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]))
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        step(engine, batch)
        # class 0: +½ everywhere; class 1: +½ in the upper two; NaN: -½ everywhere
        np.testing.assert_allclose(engine.rules.adaptation.counts, [0.0, 0.5, 0.5], atol=1e-4)


def test_a_layer_without_gradient_counts_as_unclipped_whoever_else_is_there() -> None:
    """Otherwise one contribution that brings a layer into the graph would move the counts of all others."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.into(x)
        chosen = (x[:, 0] > 5).nonzero().flatten()
        if len(chosen):
            with lamina.rows(chosen):
                h = h.index_add(0, chosen, m.expert(h[chosen]))
        return m.out(h)

    torch.manual_seed(0)
    model = Net(forward, into=nn.Linear(4, 6), expert=nn.Linear(6, 6), out=nn.Linear(6, 2))
    plan = plan_of(model, FollowQuantile(noise=1e-6), several=False, scale=1e-6)
    x = torch.zeros(7, 4)
    counts = []
    for n in (7, 6):  # the last one is alone in needing the expert
        x[6, 0] = 9.0
        with Engine(model, plan, noise=SeededNoise(0)) as engine:
            batch = Batch(x[:n], torch.ones(n, 2))
            engine.backward((model(batch.x) - batch.y).square().mean(1), batch)
            model.zero_grad(set_to_none=True)
            counts.append(np.array(engine.rules.adaptation.counts))
    np.testing.assert_allclose(np.abs(counts[0] - counts[1]), 0.5, atol=1e-4)


def test_the_pace_keeps_signal_to_noise(model: nn.Module) -> None:
    decay = 0.5
    rules = (FollowBudget(order=4.0, least=0.3, most=2.0), FollowEnergy(decay=decay, every=1))
    plan = plan_of(model, *rules, accountant="rdp@4", several=False, noise=(3.0, 3.6, 4.2), steps=400)
    d, declared = np.array([x.size for x in plan.layers]), np.array(plan.noise)
    e, v, mass, reference, factor = np.zeros(3), np.zeros(3), 0.0, 0.0, 1.0
    factors = []
    with Engine(model, plan, noise=SeededNoise(8)) as engine:
        for t in range(14):
            noise = np.array(engine.applied.noise)
            one, n = batch_of(1, seed=2, several=False), 200 if t < 5 else 90
            batch = Batch(one.x.expand(n, 4), one.y.expand(n, 2))
            engine.rules.adaptation.apply_proposed_factor()
            noise = np.array(engine.applied.noise)
            assert engine.rules.adaptation.factor == pytest.approx(factor, rel=1e-12)
            assert engine.applied.sigma(0) == pytest.approx(factor * plan.sigma(0))
            y = squares(plan, step(engine, batch))
            e = decay * e + (1 - decay) * (y - d * noise**2)
            v = decay**2 * v + (1 - decay) ** 2 * 2 * d * noise**4
            mass = decay * mass + 1 - decay
            total = np.sum(np.maximum(e / mass, 0) / declared**2)
            deviation = math.sqrt(np.sum(v / mass**2 / declared**4))
            if total < deviation:
                factor = 1.0
            elif t >= 1:
                reference = reference or total
                exact = math.sqrt(total / reference)
                levels = [0.3 + 1.7 * i / 32 for i in range(33)]
                factor = min((each for each in levels if each >= exact), default=2.0)
            factors.append(factor)
    assert factors[0] == 1.0 and min(factors) < 1


def test_a_rule_that_would_leave_the_range_is_not_followed(model: nn.Module) -> None:
    plan = plan_of(model, FollowQuantile(rate=9.0, noise=3.0))
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        adaptation = engine.rules.adaptation
        adaptation.update(None, [-1e6, 0.0, math.nan])
        assert [c / d for c, d in zip(adaptation.applied.clip[0], plan.clip[0], strict=True)] == [1.0, 1.0, 1.0]
        for _ in range(40):
            adaptation.update(None, [-8.0, 0.0, 8.0])
        low, high = adaptation.applied.clip[0][2], adaptation.applied.clip[0][0]
        assert 1e-20 <= low < 1e-10 and 1e10 < high <= 1e20


def test_state_is_exact(model: nn.Module) -> None:
    """Half a run, its state as text, and the other half in another engine: the same bits."""
    rules = (FollowEnergy(every=2), FollowQuantile(noise=3.0), FollowBudget(order=8.0))
    plan = plan_of(model, *rules, accountant="rdp@8", scale=0.1)
    whole, halves = [], []
    with Engine(model, plan, noise=SeededNoise(4)) as engine:
        for t in range(8):
            step(engine, batch_of(12, seed=t))
            whole.append((engine.applied.clip, engine.applied.noise, engine.epsilon("all")))
    states: tuple[Any, Any] | None = None
    for first in (0, 4):
        with Engine(model, plan, noise=SeededNoise(4)) as engine:
            if states is not None:
                engine.rules.adaptation.load_state(json.loads(json.dumps(states[0])))
                engine.budget.load_state(json.loads(json.dumps(states[1])))
            for t in range(first, first + 4):
                step(engine, batch_of(12, seed=t))
                halves.append((engine.applied.clip, engine.applied.noise, engine.epsilon("all")))
            states = engine.rules.adaptation.to_state(), engine.budget.to_state()
    assert whole == halves


def test_a_state_that_gives_less_is_refused(model: nn.Module) -> None:
    adaptation = Adaptation(plan_of(model, FollowEnergy()))
    good = adaptation.to_state()
    adaptation.load_state(good)
    for change in (
        {"noise": [s * (1 - 1e-12) for s in good["noise"]]},
        {"noise": good["noise"][:2]},
        {"noise": [math.nan, *good["noise"][1:]]},
        {"noise": [None, *good["noise"][1:]]},
        {"clip": [[2 * c for c in row] for row in good["clip"]]},
        {"clip": [[0.0, *row[1:]] for row in good["clip"]]},
        {"factor": 0.5},
        {"extra": 1},
    ):
        with raises_code("engine.adaptation-state"):
            adaptation.load_state({**good, **change})
    assert adaptation.to_state() == good


def test_a_plan_without_rules_costs_nothing(model: nn.Module) -> None:
    with Engine(model, plan_of(model), noise=SeededNoise(0)) as engine:
        assert engine.rules.adaptation is None and engine.applied is engine.plan and not engine.choice_due
        engine.continue_at(3, SeededNoise(1), factor=1.0)
        with raises_code("engine.factor-not-used"):
            engine.continue_at(3, SeededNoise(1), factor=0.9)
        for step in (-1, 41):
            with raises_code("engine.step-out-of-range"):
                engine.continue_at(step, SeededNoise(1))


def test_who_keeps_the_filters(model: nn.Module) -> None:
    rule = FollowBudget(order=8.0, least=0.5, most=2.0)
    plan = plan_of(model, rule, accountant="rdp@8", steps=8, noise=(4.0, 5.0, 6.0))
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        with raises_code("engine.factor-missing"):
            engine.continue_at(0, SeededNoise(1))
        with raises_code("engine.factor-out-of-range"):
            engine.continue_at(0, SeededNoise(1), factor=0.4)
        engine.continue_at(0, SeededNoise(1), factor=0.5)
        assert engine.applied.sigma(0) == pytest.approx(0.5 * plan.sigma(0))
        for _ in range(8):  # its own filter would have refused the third
            step(engine, batch_of())
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        engine.rules.adaptation.proposed_factor = 0.5
        step(engine, batch_of())
        engine.rules.adaptation.proposed_factor = 0.5
        assert engine.rules.adaptation.factor == 0.5
        for _ in range(8):
            engine.rules.adaptation.proposed_factor = 0.5
            try:
                step(engine, batch_of())
            except BudgetExceeded:
                break
        assert engine.budget.taken < 3
    with raises_code("engine.earlier-steps-exceed-budget"):
        Engine(model, plan, noise=SeededNoise(0), taken=4)
