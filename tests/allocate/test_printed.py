"""The printed forms: what they spend against what their documents claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refusals import raises_code
from scipy.stats import norm
from torch import nn

from lamina.account.gaussian_rdp import choice_noise_multiplier, classical_zcdp_epsilon
from lamina.allocate.basic import LSAB
from lamina.allocate.make_plan import explained_plan, make_plan
from lamina.allocate.paper import PaperLADP, PaperLSAB
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.rules import ChooseAsPrinted
from lamina.plan.step_plan import Clipping, StepPlan

Make = Callable[..., Any]
TWELVE = LayerStack.from_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))))
NAMES = tuple(layer.name for layer in TWELVE)


def policy(**classes: dict[str, Any]) -> Policy:
    return Policy.from_dict({"corpus": {"origin": "t", "delta": 1e-5, "accountant": "gaussian"}, "class": classes})


ONE = policy(a={"population": 1000})


@pytest.mark.parametrize(
    ("harm", "factor"), [((1.0,) * 12, 12.0), ((1.0,) * 6 + (100.0,) * 6, 306.03), ((3.0,) * 12, 12.0)]
)
@pytest.mark.parametrize("per_step", [False, True])
def test_equation_16_overspends_by_the_layers_and_their_spread(
    harm: tuple[float, ...], factor: float, per_step: bool, measure: Make
) -> None:
    """One step takes L·AM(m)/HM(m) times ρ_cap (or ρ_cap/T); T steps take T times that."""
    known = measure(NAMES, harm=harm)
    plan, given = explained_plan(
        TWELVE, ONE, batch=10, steps=50, rho=0.0208, allocate=PaperLSAB(per_step=per_step), measure=known
    )
    am, hm = np.mean(harm), 1 / np.mean(1 / np.array(harm))
    assert 12 * am / hm == pytest.approx(factor, rel=1e-4)
    assert plan.rho("a") == pytest.approx(0.0208 * factor * (1 if per_step else 50), rel=1e-4)
    assert plan.claimed == (classical_zcdp_epsilon(0.0208, 1e-5),)
    assert plan.claimed[0] == pytest.approx(1.0, abs=1e-3)
    assert plan.epsilon("a") > 2.9 * plan.claimed[0]
    assert plan.accountant == "gaussian"
    assert f"one step spends {factor:.4g} times" in given.why[0]
    assert plan.clip[0] == known.printed
    sound = make_plan(TWELVE, ONE, batch=10, steps=50, rho=0.0208, allocate=LSAB(), measure=known)
    assert sound.rho("a") == pytest.approx(0.0208, rel=1e-12)
    assert sound.claimed == ()


def test_the_true_epsilon_of_a_twelve_layer_plan(measure: Make) -> None:
    """Claim ε = 1 (ρ_cap = 0.0208), 100 steps, equal m: 2.94 with /T, 54.3 as printed; δ checked by quadrature."""
    known = measure(NAMES, harm=(1.0,) * 12)
    for per_step, rho, epsilon in ((True, 12 * 0.0208, 2.94), (False, 1200 * 0.0208, 54.3)):
        chooser = PaperLSAB(per_step=per_step)
        plan = make_plan(TWELVE, ONE, batch=10, steps=100, rho=0.0208, allocate=chooser, measure=known)
        assert plan.epsilon("a") == pytest.approx(epsilon, rel=5e-3)
        mu = math.sqrt(2 * rho)
        x = np.linspace(-12.0, mu + 12.0, 400_001)
        gap = norm.pdf(x, mu) - math.exp(plan.epsilon("a")) * norm.pdf(x)
        assert np.trapezoid(np.maximum(gap, 0.0), x) == pytest.approx(1e-5, rel=1e-3)


def test_a_target_epsilon_becomes_rho_by_the_documents_own_conversion(measure: Make) -> None:
    plan = make_plan(TWELVE, ONE, batch=10, steps=5, epsilon=2.5, allocate="printed-lsab", measure=measure(NAMES))
    assert plan.claimed[0] == pytest.approx(2.5, rel=1e-12)


def test_printed_ladp_is_not_private_by_twelve_orders() -> None:
    """Two layers of 10³ and 10⁵, the small one sensitive, "ε = 8", 100 steps: the candidate with the least noise, and
    every choice, by hand."""
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(10, 100, bias=False), nn.Linear(100, 1000, bias=False)))
    assert [layer.size for layer in stack] == [1000, 100_000]
    plan, given = explained_plan(stack, ONE, batch=10, steps=100, epsilon=8.0, allocate=PaperLADP(sensitive=["0"]))
    rule = plan.rule(ChooseAsPrinted)
    assert rule is not None and (rule.every, rule.spend) == (1, pytest.approx(0.08))
    parts = dict(zip(rule.names, rule.parts, strict=True))
    assert parts["even"] == pytest.approx((0.5, 0.5))
    assert parts["sensitive"] == pytest.approx((2 / 3, 1 / 3))
    clip = (2 * math.sqrt(1e3), 10 * math.sqrt(1e5))
    assert plan.clip[0] == pytest.approx(clip)
    mu = []
    for row, part in zip(rule.noise, rule.parts, strict=True):
        assert row == pytest.approx((0.08 * part[0], 0.04 * part[1]))
        mu.append(math.hypot(clip[0] / row[0], clip[1] / row[1]))
    assert plan.noise == rule.noise[int(np.argmax(mu))]
    assert all(plan.sigma("a") <= 1 / each for each in mu)
    whole = 10 * math.hypot(max(mu), 1 / choice_noise_multiplier(0.5))
    assert plan.epsilon("a") == pytest.approx(whole**2 / 2, rel=1e-4)
    assert plan.epsilon("a") > 1e12
    assert plan.claimed == (8.0,)
    assert plan.clipping is Clipping.ELEMENTWISE
    assert plan.batch == 1.0
    assert "Its claim does not hold" in given.why[-1]
    assert StepPlan.from_cbor(plan.to_cbor()) == plan


@pytest.mark.parametrize(("pace", "steps"), [(1.0, 100), (2.0, 50), (3.0, 34), (0.5, 100)])
def test_printed_ladp_returns_when_the_budget_is_used_up(pace: float, steps: int) -> None:
    """ε ← ε − Σ ε_l after every step; the model is returned once ε ≤ 0 (lines 18 to 21)."""
    plan = make_plan(TWELVE, ONE, batch=10, steps=100, epsilon=8.0, allocate=PaperLADP(pace=pace))
    rule, left, taken = plan.rule(ChooseAsPrinted), 8.0, 0
    assert rule is not None
    while taken < 100 and left > 1e-12:
        left, taken = left - rule.spend, taken + 1
    assert plan.steps == taken == steps


def test_printed_ladp_gives_less_privacy_to_those_who_ask_for_more() -> None:
    true = [
        make_plan(TWELVE, ONE, batch=10, steps=100, epsilon=e, allocate="printed-ladp").epsilon("a")
        for e in (0.5, 2.0, 8.0)
    ]
    assert true[0] > 10 * true[1] > 100 * true[2]


def test_printed_ladp_offers_what_was_measured(measure: Make) -> None:
    known, run = measure(NAMES, fisher=(9.0, 1.0) * 6), {"batch": 10, "steps": 100, "epsilon": 8.0}
    rule = make_plan(TWELVE, ONE, allocate=PaperLADP(split="fisher"), measure=known, **run).rule(ChooseAsPrinted)
    assert rule is not None and rule.names[-1] == "fisher"
    assert rule.parts[-1] == pytest.approx((9 / 60, 1 / 60) * 6)
    with raises_code("allocate.needs-measure"):
        make_plan(TWELVE, ONE, allocate=PaperLADP(split="fisher"), **run)


@pytest.mark.parametrize("name", ["printed-lsab", "printed-ladp"])
def test_several_classes_get_the_strictest_claim_and_public_ones_none(name: str, measure: Make) -> None:
    several = policy(
        a={"population": 1000, "profile": {"top": 0.5}},
        b={"population": 1000},
        open={"population": 1000, "public": True},
    )
    plan = make_plan(
        TWELVE, several, batch=30, steps=20, epsilon={"a": 1.0, "b": 4.0}, allocate=name, measure=measure(NAMES)
    )
    assert plan.claimed == pytest.approx((1.0, 1.0, 0.0))
    assert plan.epsilon("b") > plan.epsilon("a") > 1.0
    assert plan.epsilon("open") == 0.0
    assert [c > 0 for c in plan.clip[0]] == [False] * 6 + [True] * 6
    assert "claim" in str(plan)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: PaperLADP(pace=0.0), "allocate.option-range"),
        (lambda: PaperLADP(split="guess"), "allocate.option-unknown"),
        (lambda: PaperLADP(share=2.0), "allocate.option-range"),
        (lambda: PaperLADP(sensitive=4), "allocate.sensitive-type"),  # type: ignore[arg-type]
        (lambda: PaperLSAB(weights="norms"), "allocate.option-unknown"),
    ],
)
def test_wrong_options_are_refused(made: Callable[[], Any], message: str) -> None:
    with raises_code(message):
        made()


@pytest.mark.parametrize("policy", [PaperLSAB(), PaperLADP()])
def test_a_bare_problem_has_nothing_to_claim(policy: Any, problem: Make, measure: Make) -> None:
    with raises_code("allocate.no-target", "allocate.no-target"):
        policy(problem(measure=measure(), targets=(), delta=()))


def test_the_switches_of_table_8(measure: Make) -> None:
    """Without local constants Δ is the global one; without Pareto allocation every layer has an even share."""
    harm = (1.0,) * 6 + (100.0,) * 6
    known = measure(NAMES, harm=harm)
    run = {"batch": 10, "steps": 50, "rho": 0.0208, "measure": known}
    for bound in ("printed", "worst", "tight"):
        plan = make_plan(TWELVE, ONE, allocate=PaperLSAB(bound=bound), **run)
        assert plan.clip[0] == getattr(known, bound)
    even = make_plan(TWELVE, ONE, allocate=PaperLSAB(pareto=False), **run)
    ratio = np.array(even.clip[0]) / np.array(even.noise)
    assert ratio == pytest.approx(np.full(12, ratio[0]))
    assert even.rho("a") == pytest.approx(0.0208 * 12 * 50, rel=1e-4)
    with raises_code("allocate.option-unknown"):
        PaperLSAB(bound="loose")
