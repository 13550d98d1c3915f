"""`rdp@ORDER`: RDP at one order, which a filter can promise whatever is chosen on the way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.account.accountants import calibrate, cost, find_accountant
from lamina.account.filters import RenyiFilter
from lamina.account.schedule import RDP_ORDERS, Event, rdp_order_of

SCHEDULE = (Event(sigma=1.1, q=0.01, steps=1000), Event(sigma=4.0, q=0.01, steps=10))


def test_it_is_what_a_filter_of_that_order_promises() -> None:
    for order in (4.0, 16.0, 32.5):
        promised = RenyiFilter.for_schedule(SCHEDULE, order=order).epsilon(1e-5)
        assert find_accountant(f"rdp@{order:g}").epsilon(SCHEDULE, 1e-5) == pytest.approx(promised, rel=1e-9)


def test_the_best_order_is_the_rdp_accountant() -> None:
    names = [f"rdp@{order:g}" for order in RDP_ORDERS if float(f"{order:g}") == order and order < 200]
    best = min(find_accountant(name).epsilon(SCHEDULE, 1e-5) for name in names)
    assert best == pytest.approx(find_accountant("rdp").epsilon(SCHEDULE, 1e-5), rel=1e-9)
    assert all(find_accountant(name).epsilon(SCHEDULE, 1e-5) >= best for name in names)


@given(st.sampled_from([8.0, 20.0, 40.0]), st.floats(0.5, 8.0))
def test_delta_and_epsilon_are_inverse(order: float, epsilon: float) -> None:
    by = find_accountant(f"rdp@{order:g}")
    delta = by.delta(SCHEDULE, epsilon)
    if 1e-12 < delta < 0.5:
        assert by.epsilon(SCHEDULE, delta) == pytest.approx(epsilon, rel=1e-6)


def test_calibration_lands_on_the_safe_side() -> None:
    sigma = calibrate(2.0, delta=1e-5, q=0.02, steps=500, accountant="rdp@16")
    found = find_accountant("rdp@16").epsilon((Event(sigma=sigma, q=0.02, steps=500),), 1e-5)
    assert 2.0 * (1 - 1e-3) < found <= 2.0


def test_replace_one_is_two_changes() -> None:
    schedule = (Event(sigma=2.0, q=0.01, steps=1000),)
    found, by = cost(schedule, delta=1e-5, accountant="rdp@16"), find_accountant("rdp@16")
    half = found.epsilon_replace_one / 2
    assert found.epsilon_replace_one > 2 * found.epsilon
    assert by.delta(schedule, half) * (1 + math.exp(half)) <= 1e-5 * (1 + 1e-6)
    assert found.epsilon_replace_one >= cost(schedule, delta=1e-5, accountant="pld").epsilon_replace_one
    assert cost(SCHEDULE, delta=1e-5, accountant="rdp@16").epsilon_replace_one == math.inf  # no δ' is small enough


@pytest.mark.parametrize("name", ["rdp@", "rdp@x", "rdp@1", "rdp@1e9", "rdp@32.0", "rdp@nan", "rdp@ 32"])
def test_orders_that_make_no_sense_are_refused(name: str) -> None:
    with raises_code("account.order-out-of-range"):
        find_accountant(name)


def test_other_names_have_no_order() -> None:
    assert rdp_order_of("rdp") is None and rdp_order_of("pld") is None and rdp_order_of("rdp@32") == 32.0
    with raises_code("account.add-remove-only"):
        find_accountant("rdp@32").epsilon(SCHEDULE, 1e-5, "replace_one")
