"""Whatever an adaptation is shown, no class gets less than was declared, and no budget is passed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from adaptive_plans import batch_of, losses_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from torch import nn

from lamina.account.gaussian_rdp import step_rdp
from lamina.engine.budget import Budget
from lamina.engine.engine import Engine
from lamina.engine.noise.source import SeededNoise
from lamina.engine.rules.adaptation import Adaptation
from lamina.errors import BudgetExceeded, EngineError
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile
from lamina.plan.step_plan import Clipping, StepPlan

LAYERS = 3
ODD = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300, 1e40, 1e12, 1.0, 30.0, 1e-12]
numbers = st.one_of(st.sampled_from(ODD), st.floats(allow_nan=True, allow_infinity=True))
row = st.lists(numbers, min_size=LAYERS, max_size=LAYERS)
seen = st.lists(st.tuples(st.one_of(st.none(), row), row, st.integers(0, 2)), min_size=1, max_size=12)
ENERGY = FollowEnergy(decay=0.5, least=0.01, every=1)
CHOOSE = Choose(epsilon=0.5, every=1, names=("a", "b", "c"), noise=((1.0, 1.0, 1.0), (9.0, 1.0, 0.1), (1e-9, 1.0, 1e9)))
KINDS = {
    "energy": (ENERGY,),
    "quantile": (FollowQuantile(rate=5.0, noise=20.0),),
    "both": (ENERGY, FollowQuantile(rate=1.0, noise=20.0)),
    "choose": (ENERGY, CHOOSE),
    "budget": (ENERGY, FollowBudget(order=8.0, least=0.5, most=2.0)),
    "all": (ENERGY, FollowQuantile(noise=20.0), CHOOSE, FollowBudget(order=8.0)),
}


def made(kind: str, **changes: Any) -> StepPlan:
    rules = KINDS[kind]
    follows = any(isinstance(rule, FollowBudget) for rule in rules)
    accountant = {"accountant": "rdp@8"} if follows else {}
    return plan_of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)), *rules, **accountant, **changes)


def holds(adaptation: Adaptation) -> None:
    declared, applied = adaptation.declared, adaptation.applied
    rule = declared.rule(FollowBudget)
    if rule is None:
        assert adaptation.factor == 1
    else:
        assert rule.least <= adaptation.factor <= rule.most
    for k in range(len(declared.classes)):
        assert applied.sigma(k) >= declared.sigma(k) * adaptation.factor
        assert [c > 0 for c in applied.clip[k]] == [c > 0 for c in declared.clip[k]]
    assert (applied.batch, applied.steps, applied.rules) == (declared.batch, declared.steps, declared.rules)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(shown=seen)
def test_sigma_is_never_below_the_declared_one(kind: str, shown: Any) -> None:
    adaptation = Adaptation.of(made(kind))
    for squares, counts, pick in shown:
        if adaptation.due(0):
            adaptation.apply_choice(adaptation.candidates()[pick])
            holds(adaptation)
        adaptation.apply_proposed_factor()
        holds(adaptation)
        adaptation.update(None if squares is None else np.array(squares), counts)
        holds(adaptation)


@settings(max_examples=30)
@given(shown=seen, factor=st.floats(0.7, 1.5))
def test_a_fixed_factor_holds_through_a_segment(shown: Any, factor: float) -> None:
    adaptation = Adaptation.of(made("budget"))
    assert adaptation.fix(factor)
    for squares, counts, _ in shown:
        adaptation.apply_proposed_factor()
        assert adaptation.factor == factor
        holds(adaptation)
        adaptation.update(None if squares is None else np.array(squares), counts)


@settings(max_examples=25)
@given(energies=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=60), least=st.floats(0.1, 1.0))
def test_the_second_mode_never_passes_its_budget(energies: Any, least: float) -> None:
    """Noised gradients of an adversary's choice; what was taken is added up from the sigmas that were applied."""
    rules = (FollowEnergy(decay=0.5, every=1), FollowBudget(order=8.0, least=least, most=2.0))
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    plan = plan_of(model, *rules, accountant="rdp@8")
    adaptation, budget = Adaptation(plan), Budget(plan, {})
    spent = [0.0] * len(plan.classes)
    for t in range(2 * plan.steps):
        adaptation.apply_proposed_factor()
        try:
            budget.charge(adaptation.factor)
        except BudgetExceeded:
            break
        for k, entry in enumerate(plan.classes):
            spent[k] += step_rdp(entry.sampling_rate, adaptation.applied.sigma(k), 8.0)
        energy = energies[t % len(energies)]
        adaptation.update(
            np.array([energy * layer.size * s**2 for layer, s in zip(plan.layers, plan.noise, strict=True)]), None
        )
    else:
        pytest.fail("more steps than the plan has")
    for k, entry in enumerate(plan.classes):
        most = plan.steps * step_rdp(entry.sampling_rate, plan.sigma(k), 8.0)
        assert spent[k] <= most * (1 + 1e-12)


def test_the_second_mode_stops_early_and_the_model_stays_usable(model: nn.Module) -> None:
    rules = (FollowEnergy(decay=0.5, every=1), FollowBudget(order=8.0, least=0.5, most=1.5))
    plan = plan_of(model, *rules, accountant="rdp@8", steps=60, several=False, scale=50.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    taken = 0
    with Engine(model, plan, noise=SeededNoise(1)) as engine:
        for t in range(plan.steps):
            # the gradient fades: first all are alike and add up, then hardly anything is there
            batch = batch_of(64 if t < 8 else 4, seed=t, several=False)
            if t < 8:
                batch = type(batch)(batch.x[:1].expand(64, 4) * 9, batch.y[:1].expand(64, 2) * 9, cls=batch.cls)
            try:
                engine.backward(losses_of(model, batch), batch)
            except BudgetExceeded as refused:
                assert "keep the model" in refused.remedy
                break
            taken += 1
            optimizer.step()
            optimizer.zero_grad()
        assert engine.rules.adaptation.factor < 1
        assert 8 < taken < plan.steps
        assert engine.epsilon(0) == plan.epsilon(0)  # a filter promises its whole budget
        with pytest.raises(BudgetExceeded):
            engine.backward(None, batch_of(0, several=False))
    assert torch.isfinite(model(torch.zeros(1, 4))).all()
    assert model.state_dict().keys() == type(model)().state_dict().keys()


@pytest.mark.parametrize("form", [Clipping.BOX, Clipping.JOINT])
def test_sigma_at_every_step_of_a_run(model: nn.Module, form: Clipping) -> None:
    """Several classes, gradients of wildly different sizes, one of them not finite."""
    rules = [ENERGY] if form is Clipping.JOINT else [ENERGY, FollowQuantile(noise=6.0)]
    plan = plan_of(model, *rules, clipping=form)
    moved = set()
    with Engine(model, plan, noise=SeededNoise(2)) as engine:
        for t in range(12):
            batch = batch_of(9, seed=t, spread=12.0)
            batch.x[0, 0] = math.nan
            engine.backward(losses_of(model, batch), batch)
            model.zero_grad()
            holds(engine.rules.adaptation)
            moved.add(engine.applied.noise)
    assert len(moved) == 12


# ------------------------------------------------------------------------------------------------------- states


JUNK: list[Any] = [None, True, "x", "1", 5, -1.0, 0.0, math.nan, math.inf, 10**400, 10**5000, 1e300, [], {}, [None]]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(shown=seen)
def test_a_state_comes_back_or_is_refused_and_then_nothing_changed(kind: str, shown: Any) -> None:
    """What an adversary writes into one field of a state: an EngineError, or numbers under which all still holds."""
    plan = made(kind)
    adaptation, other = Adaptation(plan), Adaptation(plan)
    for squares, counts, _ in shown:
        adaptation.apply_proposed_factor()
        adaptation.update(None if squares is None else np.array(squares), counts)
    good = adaptation.to_state()
    other.load_state(good)
    assert repr(other.to_state()) == repr(good)  # NaN is not equal to itself
    for key, value in good.items():
        size = len(value) if isinstance(value, list) else 0
        rows = [[junk] * size for junk in JUNK] + [[[junk] * LAYERS] * size for junk in JUNK] if size else []
        inner = [{**value, each: junk} for each in value for junk in JUNK] if isinstance(value, dict) else []
        for junk in [*JUNK, *rows, *inner]:
            try:
                other.load_state({**good, key: junk})
            except EngineError as refused:
                assert refused.remedy
                assert repr(other.to_state()) == repr(good)
                continue
            other.apply_proposed_factor()
            holds(other)
            other.update(np.ones(LAYERS), [0.0] * LAYERS)
            holds(other)
            other.load_state(good)


DAMAGED: dict[str, list[dict[str, Any]]] = {
    "budget": [
        *({"proposed": bad} for bad in (0.49, 2.1, math.nan)),
        *({"pace": {"seen": seen, "reference": size}} for seen, size in ((1.5, 0.0), (1, math.nan))),
    ],
    "quantile": [
        *({"drift": [1.0, bad, 1.0]} for bad in (math.nan, -1.0)),
        *({"counts": bad} for bad in (["x"] * 3, [1.0])),
        {"base": [0.5, 0.4, 0.0]},
    ],
    "choose": [{"chosen": 40}, {"chosen": 3.0}, {"choice": "d"}],
    "energy": [
        {"proposed": 1.1}, {"counts": [1.0] * 3}, {"chosen": 3}, {"base": [5.0, -4.0, 0.0]}, {"noise": None},
        {"clip": [[1.0, "a", 1.0], [0.0, 1.0, 1.0]]}, {"energy": {"decay": 0.1}},
        {"energy": {"decay": 0.9, "energy": [0.0] * 3, "sd": [0.0] * 3, "mass": [0.0] * 3}},
        {"energy": {"decay": 0.5, "energy": [0.0], "sd": [0.0], "mass": [0.0]}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), [(kind, change) for kind in DAMAGED for change in DAMAGED[kind]])
def test_a_damaged_state_is_refused(kind: str, change: dict[str, Any]) -> None:
    adaptation = Adaptation(made(kind))
    with raises_code("engine.adaptation-state"):
        adaptation.load_state({**adaptation.to_state(), **change})


def test_a_budget_of_another_plan_is_refused() -> None:
    """A filter that is worth more than the plan's schedule would let steps through that nobody priced."""
    mine = Budget(made("all"), {})
    good = mine.to_state()
    mine.load_state(good)
    others = [made("all", noise=(0.4, 0.5, 0.6)), made("all", steps=41)]
    for other in others:
        with raises_code("engine.budget-state"):
            mine.load_state(Budget(other, {}).to_state())
    for what, value in (
        ("order", 9.0), ("order", 8), ("budget", 1e9), ("limit", 10**40), ("limit", 0), ("spent", -1),
        ("spent", 10**40), ("spent", 0.0), ("kind", "gaussian"), ("more", 1),
    ):  # fmt: skip
        filters = {**good["filters"], "all": {**good["filters"]["all"], what: value}}
        with raises_code("engine.budget-state"):
            mine.load_state({**good, "filters": filters})
    for key in good:
        for junk in [*JUNK, -1, 41, 10**40]:
            if (key, junk) == ("taken", 5) or (key == "choices" and junk in (0.0, [])):
                continue
            with raises_code("engine.budget-state"):
                mine.load_state({**good, key: junk})
    for junk in JUNK:
        with raises_code("engine.budget-state"):
            mine.load_state(junk)
    assert mine.to_state() == good


def test_no_choice_is_left_when_all_steps_are_taken() -> None:
    """Nobody priced it: the schedule has the choices that fall on its steps."""
    plan = made("choose", steps=3)
    budget = Budget(plan, {})
    for _ in range(3):
        budget.charge_choice()
        budget.charge()
    assert plan.schedule(0)[1].steps == 3
    with raises_code("engine.no-steps-left"):
        budget.charge_choice()


@pytest.mark.parametrize("form", [Clipping.BOX, Clipping.JOINT])
def test_a_candidate_that_no_step_can_take_is_refused_before_anything_is_paid(form: Clipping) -> None:
    wild = Choose(epsilon=0.5, every=1, names=("a", "wild"), noise=((1.0, 1.0, 1.0), (1e-20, 1.0, 1e20)))
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    with raises_code("engine.candidate-out-of-range"):
        Engine(model, plan_of(model, wild, clipping=form), noise=SeededNoise(0))
