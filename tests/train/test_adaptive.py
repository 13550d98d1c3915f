"""Runs whose plan changes on the way: interrupted anywhere they go on exactly, and never cost more than planned."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import POLICY, corpus, net, trainer

import lamina
from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.account import accountant
from lamina.allocate import LADP, Quantile
from lamina.engine import Engine
from lamina.errors import LaminaError, RunError
from lamina.plan import Choose, FollowBudget, FollowEnergy, FollowQuantile
from lamina.train.book.charge import charges, follows_budget, in_units
from lamina.train.run import Run

LAMINAS: dict[str, Any] = {
    "shares": LADP(),
    "budget": LADP(mode="budget"),
    "choices": LADP(choose_every=7, choose_epsilon=0.4),
    "quantile": Quantile(),
}


def plan_of(name: str, steps: int = 24, **changes: Any) -> StepPlan:
    made = make_plan(
        LayerStack.from_model(net()), Policy.parse(POLICY), batch=48, steps=steps, allocate=LAMINAS[name]
    )
    made = replace(made, rules=tuple(_quick(rule) for rule in made.rules))
    return replace(made, **changes)


def _quick(rule: Any) -> Any:
    return replace(rule, every=2) if isinstance(rule, FollowEnergy) else rule


def digest(made: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in made.model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that depend on how many attempts the journal holds, so that two runs can be compared."""

    def known(self: Run) -> bytes:
        return hashlib.sha256(f"{len(self.journal.opens)}".encode()).digest()

    monkeypatch.setattr(Run, "_seed", known)


@pytest.mark.parametrize("name", list(LAMINAS))
@pytest.mark.parametrize("stop", [0, 3, 5, 13, 22])
@pytest.mark.usefixtures("seeded")
def test_an_interrupted_run_ends_where_a_whole_one_does(
    name: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(tmp_path / "whole" / "run", plan=plan_of(name))
    outcome = whole.fit()
    real, count = Engine.backward, 0

    def interrupted(self: Engine, losses: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        if count == stop + 1:
            raise KeyboardInterrupt
        real(self, losses, batch)

    monkeypatch.setattr(Engine, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut" / "run", plan=plan_of(name)).fit()
    monkeypatch.setattr(Engine, "backward", real)
    again = trainer(tmp_path / "cut" / "run", plan=plan_of(name))
    found = again.fit()
    assert digest(again) == digest(whole)
    assert (found.steps, found.epsilon, found.total) == (outcome.steps, outcome.epsilon, outcome.total)


@pytest.mark.parametrize("name", list(LAMINAS))
def test_it_costs_what_the_plan_says_and_really_adapts(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    made = trainer(tmp_path / "run", plan=plan)
    outcome = made.fit()
    for k in ("clinical", "sensitive"):
        assert outcome.epsilon[k] == pytest.approx(plan.epsilon(k), rel=1e-9)
        bound = 4.0 if k == "clinical" else 2.0
        assert outcome.epsilon[k] <= outcome.total[k] <= bound
    figures = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert figures["classes"]["clinical"]["epsilon"] == outcome.epsilon["clinical"]


def test_a_choice_shows_in_epsilon() -> None:
    plan = plan_of("choices")
    assert plan.rule(Choose) is not None
    without = replace(plan, rules=())
    assert plan.sigma("clinical") == without.sigma("clinical")
    assert without.epsilon("clinical") < plan.epsilon("clinical") <= 4.0


def test_caps_and_choices_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="whose draws are not counted"):
        trainer(tmp_path / "run", plan=plan_of("choices"), max_occurrences={"clinical": 3})
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------- following the budget


def test_units_price_other_noise_by_the_order_of_the_plan() -> None:
    plan = plan_of("budget")
    assert follows_budget(plan)
    as_declared = in_units(plan, 0, 10, 1.0)
    assert as_declared == charges(plan, 0, 10)
    price = accountant(plan.accountant)
    for factor in (0.7, 0.9, 1.3):
        for units, whole in zip(in_units(plan, 0, 10, factor), as_declared, strict=True):
            actual = price.epsilon((replace(whole.event, sigma=whole.sigma * factor),), 1e-5)
            told = price.epsilon((units.event,), 1e-5)
            fewer = price.epsilon((replace(units.event, steps=units.steps - 1),), 1e-5)
            assert fewer < actual * (1 + 1e-9) and actual <= told * (1 + 1e-9)


def test_noise_below_the_declared_one_ends_the_run_early_and_keeps_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("budget", steps=40)
    rule = plan.rule(FollowBudget)
    assert rule is not None
    made = trainer(tmp_path / "run", plan=plan, segment=4)
    monkeypatch.setattr(type(made.state), "factor", property(lambda self: rule.least))
    outcome = made.fit()
    assert 16 <= outcome.steps < 40  # a step costs at most twice the declared price
    assert any("budget allows no more" in note for note in outcome.notes)
    assert (tmp_path / "run" / "model.safetensors").exists()
    for name in ("clinical", "sensitive"):
        assert outcome.epsilon[name] == pytest.approx(plan.epsilon(name), rel=1e-12)
        assert outcome.total[name] <= plan.epsilon(name) * (1 + 1e-9)
        booked = made.book.total("tests", name, delta=1e-5, accountant="pld")
        assert booked.spent == pytest.approx(
            plan.epsilon(name), rel=1e-9
        )  # never the smaller figure of a PLD
    assert all(torch.isfinite(p).all() for p in made.model.parameters())


def test_noise_above_the_declared_one_still_counts_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("budget", steps=20)
    rule = plan.rule(FollowBudget)
    assert rule is not None and rule.most > 1
    made = trainer(tmp_path / "run", plan=plan)
    monkeypatch.setattr(type(made.state), "factor", property(lambda self: rule.most))
    outcome = made.fit()
    assert outcome.steps == 20
    assert outcome.epsilon["clinical"] == plan.epsilon("clinical")
    assert made.book.spent(outcome.run, "clinical", delta=1e-5) == pytest.approx(plan.epsilon("clinical"))
    assert made.fit().epsilon == outcome.epsilon  # asked again: nothing is booked twice
    assert made.book.spent(outcome.run, "clinical", delta=1e-5) == pytest.approx(plan.epsilon("clinical"))


def test_a_later_run_is_priced_with_the_order_of_an_earlier_one(tmp_path: Path) -> None:
    small = POLICY.replace("epsilon = 4.0", "epsilon = 9.0").replace("epsilon = 2.0", "epsilon = 9.0")
    first = make_plan(
        LayerStack.from_model(net()),
        Policy.parse(small),
        batch=48,
        steps=10,
        epsilon=2.0,
        allocate=LADP(mode="budget"),
    )
    trainer(tmp_path / "one", plan=first, corpus=corpus(policy=small)).fit()
    second = make_plan(LayerStack.from_model(net()), Policy.parse(small), batch=48, steps=10, epsilon=1.0)
    found = trainer(tmp_path / "two", plan=second, corpus=corpus(policy=small)).fit()
    both = (*first.schedule("clinical"), *second.schedule("clinical"))
    by_order = accountant(first.accountant).epsilon(both, 1e-5)
    assert found.total["clinical"] == pytest.approx(by_order, rel=1e-9)
    assert found.total["clinical"] > accountant("pld").epsilon(both, 1e-5)


def test_what_rules_learned_is_forgotten_under_another_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = Engine.backward, 0

    def interrupted(self: Engine, losses: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise KeyboardInterrupt
        real(self, losses, batch)

    monkeypatch.setattr(Engine, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", plan=plan_of("quantile")).fit()
    monkeypatch.setattr(Engine, "backward", real)
    other = trainer(tmp_path / "run", plan=plan_of("shares"))
    outcome = other.fit()
    assert any("learned is forgotten" in note for note in outcome.notes)


def test_a_plan_with_rules_needs_no_trainer() -> None:
    """The engine alone does the same: a hand-written loop."""
    model, plan = net(dropout=0.0), plan_of("quantile")
    assert plan.rule(FollowQuantile) is not None
    engine = lamina.Engine(model, plan)
    before = engine.applied.clip
    for batch in corpus().batches(plan):
        losses = (
            torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
            if len(batch)
            else None
        )
        engine.backward(losses, batch)
        for p in model.parameters():
            p.grad = None
    assert engine.applied.clip != before
    for k in ("clinical", "sensitive"):
        assert engine.applied.sigma(k) >= plan.sigma(k)
    with pytest.raises(LaminaError, match="all are taken"):
        engine.backward(None, lamina.Batch(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)))
    engine.detach()
