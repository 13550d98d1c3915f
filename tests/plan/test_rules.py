"""Rules of a plan: what they cost, what they refuse, and that they survive both encodings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import hand_plan
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.account.schedule import RDP_ORDERS, Event, rdp_order_of
from lamina.errors import LaminaError, PlanError
from lamina.plan.codec import rule_from_dict, rule_to_dict
from lamina.plan.rules import (
    RULE_KINDS,
    Choose,
    ChooseAsPrinted,
    FollowBudget,
    FollowEnergy,
    FollowProxy,
    FollowQuantile,
    effective_sigma,
    rescale_noise,
)
from lamina.plan.step_plan import Clipping, StepPlan


def plan_of(**changes: Any) -> StepPlan:
    clip = ((1.0, 0.5, 2.0), (0.0, 0.7, 0.7))
    return hand_plan(clip, (2.0, 1.0, 3.0), names=("a", "b"), rate=0.02, **{"batch": 40.0, "steps": 100, **changes})


CHOOSE = Choose(epsilon=0.5, every=30, names=("x", "y"), noise=((1, 1, 1), (3, 2, 1)), price=2)
PRINTED = ChooseAsPrinted(epsilon=0.5, every=1, names=("x",), noise=((1, 1, 1),), parts=((0.5, 0.25, 0.25),), spend=0.1)
RULES = [FollowEnergy(), FollowProxy(), FollowQuantile(noise=12.0), CHOOSE, FollowBudget(order=24)]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_survives_both_encodings(rule: Any) -> None:
    accounting = "rdp@24" if isinstance(rule, FollowBudget) else "pld"
    plan = plan_of(rules=(rule,), accountant=accounting)
    for again in (StepPlan.from_json(plan.to_json()), StepPlan.from_cbor(plan.to_cbor())):
        assert again == plan and again.digest() == plan.digest() and again.rules == (rule,)
    assert plan.digest() != plan_of().digest()
    assert rule_from_dict(json.loads(json.dumps(rule_to_dict(rule)))) == rule


def test_counts_are_part_of_sigma() -> None:
    plan, noise = plan_of(), 5.0
    counted = replace(plan, rules=(FollowQuantile(noise=noise),))
    for k, reached in ((0, 3), (1, 2)):
        expected = (plan.sigma(k) ** -2 + reached / (4 * noise**2)) ** -0.5
        assert counted.sigma(k) == pytest.approx(expected, rel=1e-14)
        assert counted.epsilon(k) > plan.epsilon(k)
    assert sum(counted.share(0)) < 1


def test_choices_are_part_of_the_schedule() -> None:
    plan = plan_of(rules=(CHOOSE,))
    event = Event(sigma=choice_noise_multiplier(0.5), q=0.02, steps=4)  # at steps 0, 30, 60, 90
    assert plan.schedule(0) == (Event(sigma=plan.sigma(0), q=0.02, steps=100), event)
    assert plan.epsilon(0) == find_accountant("pld").epsilon(plan.schedule(0), 1e-5) > plan_of().epsilon(0)
    assert plan.rho("a") == pytest.approx(50 / plan.sigma(0) ** 2 + 2 / event.sigma**2, rel=1e-14)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 60))
def test_the_calls_of_stretches_add_up(first: int, length: int, every: int) -> None:
    rule = replace(CHOOSE, every=every)
    last = first + length
    assert rule.calls(first, last) == sum(t % every == 0 for t in range(first, last))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5), st.floats(0.3, 50), st.floats(0.0, 0.999))
def test_rescaled_noise_pays_for_the_counts_exactly(row: list[float], sigma: float, part: float) -> None:
    beside = part / sigma
    noise = rescale_noise([row], [1.0] * len(row), [sigma], [beside])
    found = effective_sigma(row, noise, beside)
    assert found >= sigma and found == pytest.approx(sigma, rel=1e-9)
    paid = (sigma**-2 - beside**2) ** -0.5  # the multiplier that is left for the gradient
    assert effective_sigma(row, noise) == pytest.approx(paid, rel=1e-6)


def test_counts_that_cost_more_than_the_step_are_refused() -> None:
    with raises_code("plan.noised-counts-too-expensive"):
        rescale_noise([[1.0]], [1.0], [1.0], [2.0])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rules": (FollowEnergy(), FollowEnergy(every=3))}, "plan.rule-twice"),
        ({"rules": (FollowQuantile(noise=1.0),), "clipping": "joint"}, "plan.quantile-needs-box"),
        ({"rules": (FollowBudget(order=24),)}, "plan.budget-rule-accountant"),
        ({"rules": (FollowBudget(order=24),), "accountant": "rdp@25"}, "plan.budget-rule-accountant"),
        ({"rules": (replace(CHOOSE, noise=((1, 1), (2, 2))),)}, "plan.candidate-noise-elsewhere"),
        ({"rules": (replace(CHOOSE, noise=((1, 1, 1), (1, 0, 1))),)}, "plan.candidate-noise-elsewhere"),
        ({"clipping": Clipping.ELEMENTWISE, "batch": 1.0}, "plan.elementwise-clipping"),
        ({"claimed": (1.0, 1.0)}, "plan.claimed-misplaced"),
        ({"claimed": (1.0,), "allocation": "printed-lsab"}, "plan.claimed-misplaced"),
    ],
)
def test_rules_that_do_not_fit_the_plan_are_refused(changes: dict[str, Any], problem: str) -> None:
    with raises_code(problem):
        plan_of(**changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FollowEnergy(decay=1.0),
        lambda: FollowEnergy(least=0.0),
        lambda: FollowEnergy(every=0),
        lambda: FollowEnergy(decay=math.nan),
        lambda: FollowQuantile(noise=0.0),
        lambda: FollowQuantile(noise=math.inf),
        lambda: FollowQuantile(noise=1.0, target=1.0),
        lambda: Choose(epsilon=0.0, every=1, names=("x",), noise=((1.0,),)),
        lambda: Choose(epsilon=0.1, every=1, names=("x", "x"), noise=((1.0,), (1.0,))),
        lambda: Choose(epsilon=0.1, every=1, names=(), noise=()),
        lambda: Choose(epsilon=0.1, every=1, names=("x",), noise=((math.nan,),)),
        lambda: FollowProxy(estimator="hessian"),
        lambda: FollowProxy(proxy="private"),
        lambda: FollowProxy(every=0),
        lambda: FollowBudget(order=1.0),
        lambda: FollowBudget(order=8, least=1.5),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(LaminaError):
        make()


def test_a_printed_choice_needs_the_printed_clamp_and_stands_alone() -> None:
    with raises_code("plan.elementwise-clipping"):
        plan_of(rules=(PRINTED,))
    printed = {"clipping": "elementwise", "batch": 1.0, "allocation": "printed-ladp"}
    plan = plan_of(rules=(PRINTED,), **printed)
    assert StepPlan.from_cbor(plan.to_cbor()) == plan
    for rules in ((CHOOSE,), (PRINTED, FollowEnergy())):
        with raises_code("plan.elementwise-clipping"):
            plan_of(rules=rules, **printed)
    for parts in (((0.5, 0.5),), ((0.5, 0.5, 0.5),), ((-0.5, 0.5, 0.5),), ()):
        with raises_code("plan.rule-out-of-range"):
            replace(PRINTED, parts=parts)


def test_damaged_rules_are_refused() -> None:
    for rule in (*RULES, PRINTED):
        state = rule_to_dict(rule)
        for damaged in (
            {**state, "kind": "follow"},
            {**state, "more": 1},
            {key: value for key, value in state.items() if key != list(state)[-1]},
            {**state, list(state)[1]: "1"},
            {**state, list(state)[1]: True},
        ):
            with pytest.raises(PlanError):
                rule_from_dict(damaged)
    assert set(RULE_KINDS) == {rule_to_dict(rule)["kind"] for rule in (*RULES, PRINTED)}


class Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError


JUNK: list[Any] = [
    None, True, "1", "12", 10**400, 10**5000, -1, 0, math.nan, -math.inf, [], ["a"], [[]], [["a", "b", "c"]], [None],
    [1.0, 1.0], ["12", "13"], [[None, 1.0, 1.0]] * 2, [[10**400, 1.0, 1.0]] * 2, [["1", 1.0, 1.0]] * 2,
    [[True] * 3] * 2, [0, 1], [[1], [2]], [{}, {}], {}, {"x": 1, "y": 2}, b"xy", Unwritable(), [[1e300, 1.0, 1.0]] * 2,
    [[1e-30, 1.0, 1.0]] * 2, [[-1.0, 1.0, 1.0]] * 2, [[math.nan, 1.0, 1.0]] * 2, ["", "y"], ["x", "x"],
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_whatever_is_written_in_place_of_a_value_is_refused_as_a_plan_error(rule: Any) -> None:
    state = rule_to_dict(rule)
    for key in state:
        for junk in JUNK:
            if key == "names" and junk == ["12", "13"]:
                continue  # two names
            with pytest.raises(PlanError, match="Remedy: "):
                rule_from_dict({**state, key: junk})
    for junk in [*JUNK, {"kind": Unwritable()}, {1: 2, "kind": state["kind"], None: 3}, {**state, 5: 1.0}]:
        with raises_code("plan.fields-unexpected", "plan.rule-unknown"):
            rule_from_dict(junk)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"names": ("x", "")}, "plan.candidates-unnamed"),
        ({"noise": ((1e-21, 1, 1), (1, 1, 1))}, "plan.candidate-noise-out-of-range"),
        ({"noise": ((2e20, 1, 1), (1, 1, 1))}, "plan.candidate-noise-out-of-range"),
        ({"epsilon": 1e-7}, "plan.rule-out-of-range"),
        ({"every": 10**40}, "plan.rule-out-of-range"),
    ],
)
def test_a_choice_of_absurd_candidates_is_refused(changes: dict[str, Any], problem: str) -> None:
    with raises_code(problem):
        replace(CHOOSE, **changes)


def test_the_edges_of_a_candidate_are_fine() -> None:
    rule = replace(CHOOSE, noise=((1e-20, 1e20, 0), (1, 1, 1)))
    assert rule_from_dict(rule_to_dict(rule)) == rule


def test_an_order_is_what_the_name_of_its_accountant_says() -> None:
    """Otherwise the filter would be at one order, and the plan priced at another that reads the same."""
    assert FollowBudget(order=7.5).accountant == "rdp@7.5"
    assert FollowBudget(order=24).accountant == "rdp@24"
    for order in RDP_ORDERS[1:]:
        assert rdp_order_of(FollowBudget(order=order).accountant) == order
    with raises_code("plan.order-not-computed"):
        FollowBudget(order=8.000012)
