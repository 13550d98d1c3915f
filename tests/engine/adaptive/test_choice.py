"""Choosing the shape of the noise: who may, what it costs, and that it draws as it should."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from adaptive_plans import batch_of, losses_of, norms_of, plan_of
from refusals import raises_code
from scipy import stats
from torch import Tensor, nn

from lamina.account.accountants import find_accountant
from lamina.account.filters import RenyiFilter
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.account.schedule import Event
from lamina.engine.batch import Batch
from lamina.engine.engine import Engine
from lamina.engine.noise.source import SecureNoise, SeededNoise
from lamina.engine.rules.adaptation import OpenChoice, uniform_draw
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy
from lamina.plan.step_plan import StepPlan

SHAPES = ((0.8, 0.96, 1.152), (2.0, 1.0, 0.5), (0.3, 1.0, 4.0))
RULE = Choose(epsilon=0.8, every=3, names=("even", "deep", "shallow"), noise=SHAPES, price=0.1)


def choose(engine: Engine, batch: Batch, parts: int = 1) -> None:
    for part in batch.split(parts):
        engine.choose(losses_of(engine.model, part), part)


def expected(plan: StepPlan, batch: Batch, norms: Tensor) -> np.ndarray[Any, Any]:
    """u(a) of every candidate, by the formula, one contribution at a time; joint clipping."""
    utilities = []
    powers = []
    for shape in SHAPES:
        clip = np.array(plan.clip)[:2]
        kappa = max(math.sqrt(np.sum((clip[k] / shape) ** 2)) * plan.sigma(k) for k in (0, 1))
        s = kappa * np.array(shape)
        total = 0.0
        for i, k in enumerate(batch.cls.tolist()):
            if not plan.classes[k].public:
                reach = clip[k] > 0
                radius = math.sqrt(np.sum((clip[k] / s) ** 2))
                total += min(1.0, radius / math.sqrt(np.sum((norms[i].numpy() / s)[reach] ** 2)))
        utilities.append(total)
        powers.append(sum(x.size * each**2 for x, each in zip(plan.layers, s, strict=True)))
    return np.array(utilities) - RULE.price * np.array(powers) / min(powers)


def opened(engine: Engine, batch: Batch, parts: int = 1) -> OpenChoice:
    """The choice as the engine has it just before it draws."""
    choice = OpenChoice(engine.plan, engine.rules.adaptation.candidates())
    for piece in batch.split(parts):
        part = engine.eager.examine(losses_of(engine.model, piece), piece)
        choice.add(part, engine.eager.norms(part, engine.rules.clipper))
    return choice


@pytest.mark.parametrize("parts", [1, 3])
def test_a_choice_is_drawn_from_the_exponential_mechanism(model: nn.Module, parts: int) -> None:
    plan, batch = plan_of(model, RULE, clipping="joint"), batch_of(12, seed=1, spread=2.0)
    u = expected(plan, batch, norms_of(copy.deepcopy(model), batch, plan))
    p = np.exp(RULE.epsilon * u) / np.exp(RULE.epsilon * u).sum()
    assert p.min() > 0.02  # none is hopeless, so that all three are tested
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        choice = opened(engine, batch, parts)
        drawn = Counter(choice.drawn(SeededNoise(seed), 0).name for seed in range(1000))
        assert stats.chisquare([drawn[n] for n in RULE.names], 1000 * p).pvalue > 1e-3
    for seed in range(5):
        with Engine(model, plan, noise=SeededNoise(seed)) as engine:
            choose(engine, batch, parts)
            assert engine.rules.adaptation.choice == choice.drawn(SeededNoise(seed), 0).name


def test_utilities_move_by_at_most_one_and_in_one_direction(model: nn.Module) -> None:
    """Through the engine, for contributions from tiny to not finite; a slot of weight 0 is nobody."""
    batch, gone = batch_of(6, seed=3), [0, 1, 3, 4, 5]
    with Engine(model, plan_of(model, RULE, clipping="joint"), noise=SeededNoise(0)) as engine:
        for size in (0.0, 1e-9, 1.0, 1e3, 1e12, math.inf, math.nan):
            for k in range(3):
                batch.x[2] = size
                batch.cls[2] = k
                slot = Batch(batch.x, batch.y, cls=batch.cls, weight=torch.tensor([1.0, 1, 0, 1, 1, 1]))
                absent = Batch(batch.x[gone], batch.y[gone], cls=batch.cls[gone])
                there, empty = (opened(engine, b)._sums for b in (batch, slot))
                assert (there >= empty).all() and (there <= empty + 1).all()
                if not math.isfinite(size) or k == 2:
                    np.testing.assert_array_equal(there, empty)
                np.testing.assert_allclose(empty, opened(engine, absent)._sums, atol=1e-5)


@pytest.mark.parametrize("form", ["box", "joint"])
def test_the_step_waits_for_its_choice(model: nn.Module, form: str) -> None:
    plan = plan_of(model, RULE, FollowEnergy(every=1), clipping=form, steps=6)
    with Engine(model, plan, noise=SecureNoise()) as engine:
        for t in range(6):
            batch = batch_of()
            assert engine.choice_due == (t % 3 == 0)
            if engine.choice_due:
                with raises_code("engine.choice-due"):
                    engine.backward(losses_of(model, batch), batch)
                before, spent = engine.applied, engine.epsilon("all")
                choose(engine, batch_of(0) if t else batch_of())
                assert not engine.choice_due and engine.epsilon("all") > spent
                assert all(p.grad is None for p in model.parameters())
                assert engine.applied is not before
                with raises_code("engine.no-choice-due"):
                    choose(engine, batch)
            assert all(engine.applied.sigma(k) >= plan.sigma(k) for k in range(3))
            engine.backward(losses_of(model, batch), batch)
            model.zero_grad()
        assert not engine.choice_due  # the plan is at its end
        assert engine.epsilon("all") == pytest.approx(plan.epsilon("all"))
    steps = Event(sigma=plan.sigma(0), q=0.02, steps=6)
    choices = Event(sigma=choice_noise_multiplier(RULE.epsilon), q=0.02, steps=2)
    assert plan.epsilon("all") == find_accountant("pld").epsilon((steps, choices), 1e-5)
    assert plan.epsilon("all") > find_accountant("pld").epsilon((steps,), 1e-5)


def test_epsilon_on_the_way_is_never_below_the_truth(model: nn.Module) -> None:
    plan = plan_of(model, RULE, clipping="joint", steps=25)
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        last = 0.0
        for t in range(1, 26):
            engine.continue_at(t, SeededNoise(0))
            now = engine.epsilon("top")
            assert now >= max(last, find_accountant("pld").epsilon(plan.schedule_between("top", 0, t), 1e-5))
            last = now
        assert last == plan.epsilon("top")


def test_the_chosen_shape_is_what_is_applied(model: nn.Module) -> None:
    plan = plan_of(model, RULE, clipping="joint")
    found = set()
    for seed in range(12):
        with Engine(model, plan, noise=SeededNoise(seed)) as engine:
            choose(engine, batch_of(0))
            shape = np.array(SHAPES[RULE.names.index(engine.rules.adaptation.choice)])
            ratio = np.array(engine.applied.noise) / shape
            np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
            found.add(engine.rules.adaptation.choice)
    assert len(found) > 1


def test_a_choice_that_fails_stays_charged_and_is_not_repeated(model: nn.Module) -> None:
    plan = plan_of(model, RULE, clipping="joint")
    batch = batch_of(6)
    with Engine(model, plan, noise=SeededNoise(0)) as engine:
        first, *_ = batch.split(2)
        with raises_code("engine.losses-without-graph"):
            engine.choose(torch.zeros(3), first)  # refused before it is charged
        assert engine.choice_due
        engine.choose(losses_of(model, first), first)
        with raises_code("engine.choice-due"):
            engine.backward(losses_of(model, batch), batch)  # it is not finished
        with raises_code("engine.no-choice-due"):
            engine.choose(losses_of(model, first), first)
        assert not engine.choice_due and engine.applied.noise == plan.noise
        another = batch_of(6)
        engine.backward(losses_of(model, another), another)


def test_filters_are_asked_for_choices(model: nn.Module) -> None:
    plan = plan_of(model, RULE, FollowBudget(order=8.0), accountant="rdp@8", clipping="joint", steps=3)
    mine = RenyiFilter.for_schedule(plan.schedule(0), order=8.0)
    with Engine(model, plan, noise=SeededNoise(0), filters={"all": mine}) as engine:
        choose(engine, batch_of())
        for _ in range(3):
            engine.backward(losses_of(model, batch_of()), batch_of())
            model.zero_grad()
        assert mine.remaining < 1e-15 * mine.budget
    poor = RenyiFilter.for_schedule((Event(sigma=plan.sigma(0), q=0.02, steps=3),), order=8.0)
    poor.charge(plan.sigma(0), 0.02, 3)
    with Engine(model, plan, noise=SeededNoise(0), filters={"all": poor}) as engine:
        with raises_code("engine.budget-exhausted"):
            choose(engine, batch_of())
        assert engine.choice_due and engine.epsilon("all") == 0.0


@pytest.mark.parametrize("hardened", [False, True])
def test_uniform_numbers(hardened: bool) -> None:
    found = np.array([uniform_draw(SeededNoise(s, hardened=hardened), 5) for s in range(2000)])
    assert ((found >= 0) & (found < 1)).all() and len(np.unique(found)) == 2000
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    last = (found * 2**53).astype(np.int64) & 0xFF  # the low bits are uniform, too
    assert stats.chisquare(np.bincount(last, minlength=256)).pvalue > 1e-3
