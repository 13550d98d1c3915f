"""Shares that follow Fisher information or influence on public or simulated data, live: sound, free, exact on resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import problem
import pytest
import torch
from problem import POLICY, loss, net
from refusals import raises_code
from stopping import same, weights

from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.allocate.ladp import LADP
from lamina.allocate.measure.example_gradients import fisher
from lamina.engine.engine import Engine
from lamina.engine.rules.proxy import Proxy
from lamina.ledger.verify.verifier import verify
from lamina.plan.rules import Choose, FollowEnergy, FollowProxy

_DRAW = torch.Generator().manual_seed(5)
X, Y = torch.randn(40, 6, generator=_DRAW), torch.randint(0, 3, (40,), generator=_DRAW)
PROXY = Proxy(source="simulated: three clouds", x=X, y=Y, loss_fn=loss)


def plan_of(estimator: str, every: int = 1, steps: int = 12, **options: Any) -> StepPlan:
    rule = LADP(estimator=estimator, every=every, examples=16, **options)
    return make_plan(LayerStack.from_model(net()), Policy.parse(POLICY), batch=48, steps=steps, allocate=rule)


@pytest.mark.parametrize(
    ("estimator", "mode"), [("fisher", "shares"), ("influence", "shares"), ("fisher", "budget"), ("fisher", "choice")]
)
@pytest.mark.usefixtures("known_seeds")
def test_an_interrupted_run_ends_where_a_whole_one_does(estimator: str, mode: str, tmp_path: Path) -> None:
    every = 1 if estimator == "fisher" else 4
    plan = plan_of(estimator, every, **({"choose_every": 3} if mode == "choice" else {"mode": mode}))
    whole = problem.trainer(tmp_path / "whole" / "run", plan=plan, proxy=PROXY)
    outcome = whole.fit()
    half = problem.trainer(tmp_path / "cut" / "run", plan=plan, proxy=PROXY)
    run_step, taken = half._run_step, []

    def stops_once(*args: Any) -> float | None:
        taken.append(1)
        if len(taken) == 8:
            raise KeyboardInterrupt
        return run_step(*args)

    half._run_step = stops_once
    with pytest.raises(KeyboardInterrupt):
        half.fit()
    again = problem.trainer(tmp_path / "cut" / "run", plan=plan, proxy=PROXY)
    found = again.fit()
    assert same(weights(again), weights(whole))
    assert (found.steps, found.epsilon, found.total) == (outcome.steps, outcome.epsilon, outcome.total)
    for k in ("clinical", "sensitive"):
        assert found.epsilon[k] <= plan.epsilon(k) * (1 + 1e-9)
    for path in tmp_path.rglob("*.ledger.db"):
        assert verify(path).problem is None


@pytest.mark.parametrize("estimator", ["fisher", "influence"])
def test_whatever_the_weights_are_sigma_is_what_was_declared(estimator: str) -> None:
    """The price of the plan holds for every S that can occur: sigma is looked at after every move."""
    torch.manual_seed(0)
    model = net()
    plan = plan_of(estimator)
    engine = Engine(model, plan, proxy=PROXY)
    seen = set()
    for step in range(12):
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.mul_(10.0 ** ((-1) ** (step + i) * step / 4))
        engine.budget.set_taken(step)
        engine.follow_proxy()
        seen.add(engine.applied.noise)
        ratios = [engine.applied.sigma(k) / plan.sigma(k) for k in (1, 2)]
        assert all(engine.applied.sigma(k) >= plan.sigma(k) for k in (1, 2))
        assert min(ratios) == pytest.approx(1.0, rel=1e-9)  # and no more noise than the strictest class asks for
        assert engine.applied.clip == plan.clip
    assert len(seen) > 6
    engine.detach()


def test_shares_are_those_of_the_fisher_information_at_these_weights() -> None:
    torch.manual_seed(1)
    model = net(dropout=0.0)
    stack = LayerStack.from_model(model)
    plan = make_plan(
        stack, Policy.parse('[corpus]\norigin = "a"\ndelta = 1e-5\n[class.data]\npopulation = 300\nepsilon = 2.0\n'),
        batch=30, steps=10, allocate=LADP(estimator="fisher", examples=40, every=3),
    )  # fmt: skip
    engine = Engine(model, plan, proxy=PROXY)
    state = torch.get_rng_state()
    engine.follow_proxy()
    assert torch.equal(state, torch.get_rng_state())
    found = fisher(model, lambda x, y: loss(model(x), y), X, Y, stack).information
    wanted = np.sqrt(np.array(found) * [layer.size for layer in stack])
    shares = (np.array(plan.clip[0]) / np.array(engine.applied.noise)) ** 2 * plan.sigma(0) ** 2
    assert shares == pytest.approx(wanted / wanted.sum(), rel=1e-4)
    noise = engine.applied.noise
    with torch.no_grad():
        model[0].weight.mul_(3.0)
    engine.budget.set_taken(1)  # not due
    engine.follow_proxy()
    assert engine.applied.noise == noise
    engine.budget.set_taken(3)
    engine.follow_proxy()
    assert engine.applied.noise != noise
    assert all("forward" not in vars(m) for m in engine.rules._proxy._twin.modules())
    engine.detach()


def test_a_measurement_that_fails_moves_nothing() -> None:
    torch.manual_seed(0)
    model = net()
    engine = Engine(model, plan_of("fisher"), proxy=PROXY)
    engine.follow_proxy()
    before = engine.applied
    with torch.no_grad():
        model[3].weight.zero_()  # the lower layer gets no gradient
    engine.budget.set_taken(1)
    engine.follow_proxy()
    assert engine.applied is before
    engine.detach()


@pytest.mark.parametrize("estimator", ["fisher", "influence"])
def test_a_choice_decides_whether_the_measured_shares_are_followed(estimator: str) -> None:
    """Lines 3, 4 and 32 of the algorithm together: the proxy's shares are one candidate, and only the draw costs."""
    plan, plain = plan_of(estimator, choose_every=4), plan_of(estimator)
    rule = plan.rule(Choose)
    assert rule is not None and rule.names[-1] == "measured" and len(rule.names) == 7
    energy = plan_of("energy", choose_every=4)
    for k in (1, 2):
        assert plan.schedule(k) == energy.schedule(k)  # the proxy is free, the choice has the price that it always has
        assert plan.sigma(k) > plain.sigma(k)
    engine = Engine(net(), plan, proxy=PROXY)
    followed = {}
    for step, name in ((0, "measured"), (4, "flat")):
        engine.budget.set_taken(step)
        engine.follow_proxy()
        (candidate,) = (c for c in engine.rules.adaptation.candidates() if c.name == name)
        engine.rules.adaptation.apply_choice(candidate)
        before = engine.applied.noise
        assert before == pytest.approx(candidate.noise)
        with torch.no_grad():
            engine.model[0].weight.mul_(3.0)
        engine.budget.set_taken(step + 1)
        engine.follow_proxy()
        followed[name] = engine.applied.noise != before
        assert all(engine.applied.sigma(k) >= plan.sigma(k) for k in (1, 2))
    assert followed == {"measured": True, "flat": False}
    again = Engine(net(), plan, proxy=PROXY)
    again.rules.adaptation.load_state(engine.rules.adaptation.to_state())
    assert again.rules.adaptation.choice == "flat" and again.applied.noise == engine.applied.noise
    engine.detach()
    again.detach()


def test_the_state_of_another_plan_or_a_damaged_one_is_refused() -> None:
    engine = Engine(net(), plan_of("fisher"), proxy=PROXY)
    engine.follow_proxy()
    state = engine.rules.adaptation.to_state()
    again = Engine(net(), plan_of("fisher"), proxy=PROXY)
    again.rules.adaptation.load_state(state)
    assert again.applied.noise == engine.applied.noise
    assert again.rules.adaptation.to_state() == state
    for wrong in ([0.5, 0.6], [1.0, 0.0], ["a", "b"], [1.0]):
        with raises_code("engine.adaptation-state"):
            again.rules.adaptation.load_state({**state, "proxy": wrong})
    engine.detach()
    again.detach()


def test_what_does_not_go_together_is_refused() -> None:
    plan = plan_of("fisher")
    with raises_code("engine.proxy-misplaced"):
        Engine(net(), plan)
    with raises_code("engine.proxy-misplaced"):
        Engine(net(), replace(plan, rules=()), proxy=PROXY)
    with raises_code("engine.proxy-of-other-kind"):
        Engine(net(), plan, proxy=replace(PROXY, source="public"))
    with raises_code("engine.proxy-not-public"):
        replace(PROXY, source="patients")
    with raises_code("sensitivity.losses-shape"):
        Engine(net(), plan, proxy=replace(PROXY, loss_fn=lambda out, y: loss(out, y).mean()))
    with raises_code("plan.shares-follow-two-rules"):
        replace(plan, rules=(*plan.rules, FollowEnergy()))
    with raises_code("plan.shares-follow-two-rules"):
        replace(plan, rules=(*plan.rules, Choose(epsilon=0.5, every=5, names=("a",), noise=((1.0, 1.0),))))
    for wrong in ({"estimator": "guess"}, {"proxy": "private"}, {"examples": 0}, {"every": 0}):
        with raises_code("plan.rule-out-of-range"):
            FollowProxy(**wrong)
    assert StepPlan.from_json(plan.to_json()) == plan
