"""Runs whose plan changes on the way: interrupted anywhere they go on exactly, and never cost more than planned."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from open_charges import open_charges
from problem import POLICY, corpus, net, trainer
from refusals import raises_code
from run_state import moments
from stopping import Killed, complete, die, lose_ledger, same, weights
from stopping import figures as read_figures

import lamina
from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.account.accountants import find_accountant
from lamina.account.filters import GaussianFilter
from lamina.account.gaussian_rdp import classical_zcdp_epsilon, epsilon_of_rho
from lamina.allocate.basic import Quantile
from lamina.allocate.ladp import LADP
from lamina.engine.engine import Engine
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import MAX_NOISE_VALUES, Epoch, SegmentOutcome
from lamina.ledger.verify.verifier import verify
from lamina.plan.charges import charges_in_declared_steps, follows_budget, plan_charges
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile
from lamina.run import segments
from lamina.run.sampler import Sampler

LAMINAS: dict[str, Any] = {
    "shares": LADP(),
    "budget": LADP(mode="budget"),
    "choices": LADP(choose_every=7, choose_epsilon=0.4),
    "quantile": Quantile(),
}


def plan_of(name: str, steps: int = 24, **changes: Any) -> StepPlan:
    made = make_plan(LayerStack.from_model(net()), Policy.parse(POLICY), batch=48, steps=steps, allocate=LAMINAS[name])
    made = replace(made, rules=tuple(_quick(rule) for rule in made.rules))
    return replace(made, **changes)


def _quick(rule: Any) -> Any:
    return replace(rule, every=2) if isinstance(rule, FollowEnergy) else rule


@pytest.mark.parametrize("name", list(LAMINAS))
@pytest.mark.parametrize("stop", [0, 3, 5, 13, 22])
@pytest.mark.usefixtures("known_seeds")
def test_an_interrupted_run_ends_where_a_whole_one_does(
    name: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(tmp_path / "whole" / "run", plan=plan_of(name))
    outcome = whole.fit()
    go_on = interrupt(monkeypatch, stop + 1)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut" / "run", plan=plan_of(name)).fit()
    go_on()
    again = trainer(tmp_path / "cut" / "run", plan=plan_of(name))
    found = again.fit()
    assert same(weights(again), weights(whole))
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
    figures = read_figures(tmp_path / "run")
    assert figures["classes"]["clinical"]["epsilon"] == outcome.epsilon["clinical"]


def epochs_of(folder: Path) -> list[Epoch]:
    with LedgerReader.read_only(str(folder / "tests.ledger.db")) as ledger:
        return [leaf.record for leaf in ledger.of_kind(Epoch) if isinstance(leaf.record, Epoch)]


@pytest.mark.parametrize("name", list(LAMINAS))
@pytest.mark.parametrize("room", [MAX_NOISE_VALUES, 12])
def test_every_noise_that_was_applied_is_in_an_epoch(
    name: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each step was noised with, as the engine begins it, against what the ledger says of that step."""
    applied: dict[int, tuple[float, ...]] = {}
    begin = Engine._begin

    def watched(engine: Engine, *args: Any) -> Any:
        found = begin(engine, *args)
        applied[found.number] = tuple(s * s for s in engine.applied.noise)
        return found

    monkeypatch.setattr(Engine, "_begin", watched)
    monkeypatch.setattr(segments, "MAX_NOISE_VALUES", room)
    plan = plan_of(name)
    trainer(tmp_path / "run", plan=plan).fit()
    told: list[tuple[float, ...]] = []
    for epoch in epochs_of(tmp_path):
        assert len(epoch.changes or ()) <= max(1, room // len(plan.layers)) + 1
        told += [variance for steps, variance in epoch.applied for _ in range(steps)]
    assert told == [applied[step] for step in range(plan.steps)]
    assert len(set(told)) > 1 or name == "budget"
    assert verify(str(tmp_path / "tests.ledger.db")).problem is None


@pytest.mark.parametrize("name", ["choices", "quantile"])
def test_a_ledger_that_was_lost_is_told_the_noise_again(name: str, tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", plan=plan_of(name))
    made.fit()
    before = [(each.variance, each.changes) for each in epochs_of(tmp_path)]
    lose_ledger(tmp_path)
    with raises_code("train.ledger-differs"):
        trainer(tmp_path / "run", plan=plan_of(name), ledger=tmp_path / "tests.ledger.db").fit()
    complete(tmp_path / "tests.ledger.db", tmp_path / "run")
    trainer(tmp_path / "run", plan=plan_of(name)).fit()
    assert [(each.variance, each.changes) for each in epochs_of(tmp_path)] == before
    assert any(changes for _, changes in before)


def test_an_abandoned_segment_tells_only_the_noise_that_it_began_with(tmp_path: Path) -> None:
    """Also if all of its steps were taken: how far it came is nobody's to know. The noise applied is in the checkpoint."""
    with moments(die, only="checkpoint/.000001"), pytest.raises(Killed):
        trainer(tmp_path / "run", plan=plan_of("quantile")).fit()
    trainer(tmp_path / "run", plan=plan_of("quantile", steps=30)).fit()
    first = epochs_of(tmp_path)[0]
    assert first.segments[0].outcome is SegmentOutcome.ABANDONED and first.changes is None
    assert first.variance == tuple(s * s for s in plan_of("quantile").noise)
    assert verify(str(tmp_path / "tests.ledger.db")).problem is None


def test_a_choice_shows_in_epsilon() -> None:
    plan = plan_of("choices")
    assert plan.rule(Choose) is not None
    without = replace(plan, rules=())
    assert plan.sigma("clinical") == without.sigma("clinical")
    assert without.epsilon("clinical") < plan.epsilon("clinical") <= 4.0


def test_caps_and_choices_do_not_go_together(tmp_path: Path) -> None:
    with raises_code("train.max-occurrences-with-choices"):
        trainer(tmp_path / "run", plan=plan_of("choices"), max_occurrences={"clinical": 3})
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------- following the budget


def test_units_price_other_noise_by_the_order_of_the_plan() -> None:
    plan = plan_of("budget")
    assert follows_budget(plan)
    as_declared = charges_in_declared_steps(plan, 0, 10, 1.0)
    assert as_declared == plan_charges(plan, 0, 10)
    price = find_accountant(plan.accountant)
    for factor in (0.7, 0.9, 1.3):
        for units, whole in zip(charges_in_declared_steps(plan, 0, 10, factor), as_declared, strict=True):
            actual = price.epsilon((replace(whole.event, sigma=whole.event.sigma * factor),), 1e-5)
            told = price.epsilon((units.event,), 1e-5)
            fewer = price.epsilon((replace(units.event, steps=units.event.steps - 1),), 1e-5)
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
        booked = made.spend.total(name, delta=1e-5, accountant="pld")
        assert booked.spent == pytest.approx(plan.epsilon(name), rel=1e-9)  # never the smaller figure of a PLD
    assert all(torch.isfinite(p).all() for p in made.model.parameters())


def test_noise_above_the_declared_one_still_counts_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("budget", steps=20)
    rule = plan.rule(FollowBudget)
    assert rule is not None and rule.most > 1
    made = trainer(tmp_path / "run", plan=plan)
    monkeypatch.setattr(type(made.state), "factor", property(lambda self: rule.most))
    outcome = made.fit()
    assert outcome.steps == 20
    assert outcome.epsilon["clinical"] == plan.epsilon("clinical")
    assert made.spend.spent(outcome.run, "clinical", delta=1e-5) == pytest.approx(plan.epsilon("clinical"))
    assert made.fit().epsilon == outcome.epsilon  # asked again: nothing is booked twice
    assert made.spend.spent(outcome.run, "clinical", delta=1e-5) == pytest.approx(plan.epsilon("clinical"))


def test_a_later_run_is_priced_with_the_order_of_an_earlier_one(tmp_path: Path) -> None:
    large = POLICY.replace("epsilon = 4.0", "epsilon = 30.0").replace("epsilon = 2.0", "epsilon = 30.0")
    stack = LayerStack.from_model(net())
    first = make_plan(stack, Policy.parse(large), batch=48, steps=10, epsilon=2.0, allocate=LADP(mode="budget"))
    trainer(tmp_path / "one", plan=first, corpus=corpus(policy=large)).fit()
    second = make_plan(stack, Policy.parse(large), batch=48, steps=10, epsilon=1.0)
    found = trainer(tmp_path / "two", plan=second, corpus=corpus(policy=large)).fit()
    both = (*first.schedule("clinical"), *second.schedule("clinical"))
    by_order = find_accountant(first.accountant).epsilon(both, 1e-5)
    assert found.total["clinical"] == pytest.approx(by_order, rel=1e-9)
    assert found.total["clinical"] > find_accountant("pld").epsilon(both, 1e-5)
    figures = read_figures(tmp_path / "two")
    assert figures["classes"]["clinical"]["total"] == found.total["clinical"]


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> Any:
    """Stop in the `at`-th step from now; returns how to go on."""
    real, count = Engine.backward, 0

    def interrupted(self: Engine, losses: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        real(self, losses, batch)

    monkeypatch.setattr(Engine, "backward", interrupted)
    return lambda: monkeypatch.setattr(Engine, "backward", real)


def test_the_whole_budget_is_spent_when_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is used of it: nothing comes back, on no path."""
    plan = plan_of("budget", steps=20)
    interrupt(monkeypatch, 8)
    made = trainer(tmp_path / "run", plan=plan)
    with pytest.raises(KeyboardInterrupt):
        made.fit()
    for name in ("clinical", "sensitive"):
        spent = made.spend.total(name, delta=1e-5).spent
        assert spent == pytest.approx(plan.epsilon(name), rel=1e-9)
    (run,) = made.spend.labels()
    made.spend.finish(run)  # as `lamina spend --release` does
    assert made.spend.total("clinical", delta=1e-5).spent == pytest.approx(plan.epsilon("clinical"))


def test_reading_a_copy_of_a_finished_run_costs_nothing(tmp_path: Path) -> None:
    plan = plan_of("budget", steps=20)
    made = trainer(tmp_path / "run", plan=plan, bounds=dict.fromkeys(("clinical", "sensitive"), 99.0))
    made.fit()
    spent = made.spend.total("clinical", delta=1e-5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    trainer(tmp_path / "copy", plan=plan, bounds=dict.fromkeys(("clinical", "sensitive"), 99.0)).fit()
    assert made.spend.total("clinical", delta=1e-5) == spent
    assert open_charges(made.ledger) == []


def test_epsilon_does_not_fall_when_the_plan_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = POLICY.replace("epsilon = 4.0", "epsilon = 30.0").replace("epsilon = 2.0", "epsilon = 30.0")
    stack, data = LayerStack.from_model(net()), corpus(policy=large)
    first = make_plan(stack, Policy.parse(large), batch=48, steps=20, epsilon=4.0, allocate=LADP(mode="budget"))
    second = make_plan(stack, Policy.parse(large), batch=48, steps=20, epsilon=2.0)
    go_on = interrupt(monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", plan=first, corpus=data).fit()
    go_on()
    outcome = trainer(tmp_path / "run", plan=second, corpus=data).fit()
    assert outcome.epsilon["clinical"] > first.epsilon("clinical")
    figures = read_figures(tmp_path / "run")["classes"]["clinical"]
    assert figures["epsilon"] == outcome.epsilon["clinical"]
    assert figures["epsilon_replace_one"] is figures["rho"] is None  # nothing is proven for both together


def test_a_lost_book_learns_the_whole_budget_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("budget", steps=20)
    go_on = interrupt(monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", plan=plan).fit()
    go_on()
    lose_ledger(tmp_path)
    with raises_code("train.ledger-differs"):
        trainer(tmp_path / "run", plan=plan, ledger=tmp_path / "tests.ledger.db").fit()
    complete(tmp_path / "tests.ledger.db", tmp_path / "run")
    made = trainer(tmp_path / "run", plan=plan)
    assert made.fit().epsilon["clinical"] == pytest.approx(plan.epsilon("clinical"))
    assert made.spend.total("clinical", delta=1e-5).spent == pytest.approx(plan.epsilon("clinical"))


def test_a_copy_of_the_run_has_no_budget_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders that both went on would be two budgets: the copy is refused, and finds the budget used up."""
    large = POLICY.replace("epsilon = 4.0", "epsilon = 30.0").replace("epsilon = 2.0", "epsilon = 30.0")
    plan = make_plan(
        LayerStack.from_model(net()), Policy.parse(large), batch=48, steps=20, epsilon=2.0, allocate=LADP(mode="budget")
    )
    go_on = interrupt(monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", plan=plan, corpus=corpus(policy=large)).fit()
    go_on()
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    trainer(tmp_path / "run", plan=plan, corpus=corpus(policy=large)).fit()
    with raises_code("train.folder-behind-ledger"):
        trainer(tmp_path / "copy", plan=plan, corpus=corpus(policy=large)).fit()
    made = trainer(tmp_path / "copy", plan=plan, corpus=corpus(policy=large), take_over=True)
    with raises_code("ledger.run-end-continued"):  # it cannot go on, and where it stands is not the end of the run
        made.fit()
    spent = made.spend.total("clinical", delta=1e-5).spent
    assert spent == pytest.approx(plan.epsilon("clinical"), rel=1e-9)
    assert verify(str(tmp_path / "tests.ledger.db")).problem is None


def test_a_zcdp_budget_from_plan_to_book(tmp_path: Path) -> None:
    """ρ/T at every step, ρ in all, and its ε by the tight conversion wherever the run tells it."""
    plan = make_plan(LayerStack.from_model(net()), Policy.parse(POLICY), batch=48, steps=24, rho=0.05)
    made = trainer(tmp_path / "run", plan=plan)
    outcome = made.fit()
    figures = read_figures(tmp_path / "run")["classes"]
    assert 0.05 * (1 - 1e-12) <= max(plan.rho("clinical"), plan.rho("sensitive")) <= 0.05  # the one that decides S
    for name in ("clinical", "sensitive"):
        assert figures[name]["rho"] == pytest.approx(plan.rho(name), rel=1e-12)
        tight = epsilon_of_rho(plan.rho(name), 1e-5)
        assert outcome.epsilon[name] == pytest.approx(tight, rel=1e-12)
        assert tight < classical_zcdp_epsilon(plan.rho(name), 1e-5)
        assert made.spend.total(name, delta=1e-5, accountant="zcdp").spent == pytest.approx(tight)


def test_what_is_sure_without_amplification_is_the_least_noise(tmp_path: Path) -> None:
    plan = plan_of("budget")
    trainer(tmp_path / "run", plan=plan).fit()
    figures = read_figures(tmp_path / "run")["classes"]["clinical"]
    rule = plan.rule(FollowBudget)
    assert rule is not None and rule.least < 1
    assert figures["rho"] == pytest.approx(plan.steps / (2 * (rule.least * plan.sigma("clinical")) ** 2))
    assert figures["rho"] > plan.rho("clinical")


def test_filters_of_a_caller_do_not_go_with_it(tmp_path: Path) -> None:
    with raises_code("train.filters-with-adaptive-noise"):
        trainer(tmp_path / "run", plan=plan_of("budget"), filters={"clinical": GaussianFilter(budget=5.0)})


def test_a_choice_draws_other_coins_than_its_step() -> None:
    """One sample for both would be one event, not two: what theory says about layers holds for choices too."""
    plan = plan_of("choices")
    sampler = Sampler(corpus(), plan, seed=bytes(range(32)))
    rows = [(sampler.draw(t).x, sampler.draw_for_choice(t).x) for t in range(12)]
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in rows)
    again = Sampler(corpus(), plan, seed=bytes(range(32)))
    assert torch.equal(again.draw_for_choice(7).x, rows[7][1])  # for a replay
    assert rows[0][1].shape != rows[7][1].shape or not torch.equal(rows[0][1], rows[7][1])
    sizes = [len(sampler.draw_for_choice(t)) for t in range(200)]
    expected = sum(e.sampling_rate * n for e, n in zip(plan.classes, (50, 250, 100), strict=True))
    assert abs(sum(sizes) / 200 - expected) < 5 * math.sqrt(expected / 200)


def test_what_rules_learned_is_forgotten_under_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        losses = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none") if len(batch) else None
        engine.backward(losses, batch)
        for p in model.parameters():
            p.grad = None
    assert engine.applied.clip != before
    for k in ("clinical", "sensitive"):
        assert engine.applied.sigma(k) >= plan.sigma(k)
    with raises_code("engine.no-steps-left"):
        engine.backward(None, lamina.Batch(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)))
    engine.detach()
