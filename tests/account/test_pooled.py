"""The price of an account, noise that followed its budget among it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.account.accountants import find_accountant, pooled_epsilon
from lamina.account.gaussian_rdp import order_offset, step_rdp
from lamina.account.schedule import RDP_ORDERS, Event

FIXED = {(1.5, 0.01, 0.0): 100, (2.0, 0.02, 0.0): 50}


def test_without_such_noise_it_is_what_the_accountant_says() -> None:
    events = [Event(sigma=1.5, q=0.01, steps=100), Event(sigma=2.0, q=0.02, steps=50)]
    for name in ("pld", "rdp", "zcdp", "gaussian"):
        assert pooled_epsilon(FIXED, delta=1e-5, name=name) == find_accountant(name).epsilon(events, 1e-5)


def test_each_budget_counts_at_its_own_order_and_the_rest_at_the_smallest() -> None:
    events = {**FIXED, (1.2, 0.01, 20.0): 30, (1.1, 0.02, 8.0): 40}
    whole = 30 * step_rdp(0.01, 1.2, 20.0) + 40 * step_rdp(0.02, 1.1, 8.0)
    others = 100 * step_rdp(0.01, 1.5, 8.0) + 50 * step_rdp(0.02, 2.0, 8.0)
    expected = whole + others + order_offset(8.0, 1e-5)
    for name in ("pld", "rdp", "rdp@20", "rdp@8"):
        assert pooled_epsilon(events, delta=1e-5, name=name) == pytest.approx(expected, rel=1e-9)
    at_the_smaller = 30 * step_rdp(0.01, 1.2, 8.0) - 30 * step_rdp(0.01, 1.2, 20.0)
    assert at_the_smaller < 0  # pricing the first at 8 would be too little: it is proven at 20 only


def test_no_figure_without_amplification() -> None:
    events = {**FIXED, (1.2, 0.01, 20.0): 1}
    for name in ("zcdp", "gaussian"):
        assert pooled_epsilon(events, delta=1e-5, name=name) == math.inf
    assert pooled_epsilon({**FIXED, (1.2, 0.01, 20.0): 0}, delta=1e-5, name="zcdp") < math.inf


def test_a_smaller_order_that_comes_later_does_not_make_it_cheaper() -> None:
    """At 6.9 the fixed steps cost less than at 7.1: the best order up to the smallest is taken for both."""
    before = {(1.0, 0.3, 0.0): 6, (1.0, 0.3, 7.1): 1}
    after = {**before, (9.0, 0.3, 6.9): 1}
    assert pooled_epsilon(before, delta=1e-5, name="rdp") < pooled_epsilon(after, delta=1e-5, name="rdp")


KINDS = st.tuples(st.floats(0.5, 9.0), st.floats(0.001, 1.0), st.just(0.0) | st.sampled_from(RDP_ORDERS[:120]))


@given(events=st.dictionaries(KINDS, st.integers(1, 200), max_size=4), more=KINDS, steps=st.integers(1, 200))
@settings(max_examples=80)
def test_more_never_costs_less(
    events: dict[tuple[float, float, float], int], more: tuple[float, float, float], steps: int
) -> None:
    after = {**events, more: events.get(more, 0) + steps}
    cheap = pooled_epsilon(events, delta=1e-5, name="rdp")
    assert cheap <= pooled_epsilon(after, delta=1e-5, name="rdp") * (1 + 1e-9)
