"""Filters: asked before, exact in their sums, saved and restored, and never past what they promise."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.filters import GaussianFilter, PrivacyFilter, RenyiFilter, choose_order
from lamina.account.schedule import Event
from lamina.errors import AccountingError, BudgetExceeded

PLAN = [Event(sigma=1.3, q=0.05, steps=700), Event(sigma=1.1, q=0.03, steps=301), Event(sigma=7.7, q=0.2, steps=13)]


def filters(plan: list[Event]) -> list[GaussianFilter | RenyiFilter]:
    return [GaussianFilter.for_schedule(plan), RenyiFilter.for_schedule(plan, order=choose_order(plan, delta=1e-5))]


def test_exactly_the_planned_steps_fit_in_any_order() -> None:
    rng = random.Random(5)
    for filter in filters(PLAN):
        steps = [(event.sigma, event.q) for event in PLAN for _ in range(event.steps)]
        rng.shuffle(steps)
        for sigma, q in steps:
            assert filter.admits(sigma, q)
            filter.charge(sigma, q)
        assert filter.remaining < 1e-9 * filter.budget
        assert not filter.admits(7.7, 0.2)
        assert filter.admits(math.inf, 0.2)
        assert filter.admits(7.7, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 40), st.floats(0.001, 1), st.integers(0, 40)), max_size=40), st.integers(0, 1))
def test_whatever_is_admitted_stays_within_the_promise(asked: list[tuple[float, float, int]], kind: int) -> None:
    """An adaptive sequence costs, by the matching accountant, no more than the ε known in advance."""
    filter = filters([Event(sigma=2.0, q=0.1, steps=40)])[kind]
    done = []
    for sigma, q, steps in asked:
        before = filter.to_state()
        fits = filter.admits(sigma, q, steps)
        assert filter.to_state() == before
        if fits:
            filter.charge(sigma, q, steps)
            done.append(Event(sigma=sigma, q=q, steps=steps))
        else:
            with raises_code("account.budget-exceeded"):
                filter.charge(sigma, q, steps)
            assert filter.to_state() == before
        assert filter.remaining >= 0
    name = ("gaussian", "rdp")[kind]
    assert find_accountant(name).epsilon(done, 1e-5) <= filter.epsilon(1e-5) * (1 + 1e-12)


def test_promise_of_the_plan() -> None:
    gauss, renyi = filters(PLAN)
    assert gauss.epsilon(1e-5) == pytest.approx(find_accountant("gaussian").epsilon(PLAN, 1e-5), rel=1e-9)
    assert renyi.epsilon(1e-5) == pytest.approx(find_accountant("rdp").epsilon(PLAN, 1e-5), rel=1e-9)
    assert gauss.epsilon(0.0) == renyi.epsilon(0.0) == math.inf


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_promise_of_a_target(epsilon: float) -> None:
    assert GaussianFilter.for_target(epsilon, delta=1e-5).epsilon(1e-5) == pytest.approx(epsilon, rel=1e-9)
    assert GaussianFilter.for_target(epsilon, delta=1e-5).epsilon(1e-5) <= epsilon
    made = RenyiFilter.for_target(epsilon, delta=1e-5, order=40.0)
    assert epsilon * (1 - 1e-9) <= made.epsilon(1e-5) <= epsilon


def test_state_survives_json_and_is_checked() -> None:
    for filter in filters(PLAN):
        filter.charge(1.3, 0.05, 123)
        state = filter.to_state()
        again = type(filter).from_state(json.loads(json.dumps(state)))
        assert again.to_state() == state
        assert again.remaining == filter.remaining
        assert again.admits(1.3, 0.05, 577) == filter.admits(1.3, 0.05, 577)
        for broken in (
            {**state, "kind": "other"},
            {**state, "spent": -1},
            {**state, "spent": 2**62},
            {**state, "spent": 0.5},
            {**state, "budget": 0.0},
            {**state, "extra": 1},
            {name: value for name, value in state.items() if name != "limit"},
        ):
            with pytest.raises(AccountingError):
                type(filter).from_state(broken)


def test_even_the_smallest_price_is_counted() -> None:
    """Rounding is upwards: a price below one unit of the count still costs one."""
    for filter in filters(PLAN):
        filter.charge(1e15, 1e-3)
        assert filter.to_state()["spent"] == 1


def test_infinite_prices_and_bad_questions() -> None:
    for filter in filters(PLAN):
        assert not filter.admits(1e-320, 1.0)
        with pytest.raises(BudgetExceeded):
            filter.charge(1e-320, 1.0)
        with raises_code("account.sigma-not-positive"):
            filter.admits(0.0, 0.5)
        with raises_code("account.steps-negative"):
            filter.charge(1.0, 0.5, -1)


def test_a_budget_must_be_one() -> None:
    with raises_code("account.budget-not-positive"):
        GaussianFilter.for_schedule([])
    with raises_code("account.order-too-small"):
        RenyiFilter.for_target(0.1, delta=1e-5, order=2.0)
    with raises_code("account.order-out-of-range"):
        RenyiFilter.for_target(1.0, delta=1e-5, order=1.0)
    with raises_code("account.delta-zero"):
        RenyiFilter.for_target(1.0, delta=0.0, order=8.0)


def test_the_order_is_that_of_the_intended_schedule() -> None:
    order = choose_order(PLAN, delta=1e-5)
    best = RenyiFilter.for_schedule(PLAN, order=order).epsilon(1e-5)
    assert all(best <= RenyiFilter.for_schedule(PLAN, order=other).epsilon(1e-5) for other in (2.0, order + 1, 64.0))


def test_they_are_filters() -> None:
    def use(filter: PrivacyFilter) -> float:
        return filter.remaining

    assert all(use(filter) > 0 for filter in filters(PLAN))
