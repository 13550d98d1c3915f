"""Calibration lands on the safe side, closely, and refuses what cannot be reached."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.account.accountants import calibrate, find_accountant
from lamina.account.filters import GaussianFilter, RenyiFilter, choose_order
from lamina.account.schedule import Adjacency, Event


@settings(max_examples=12, deadline=None)
@given(
    st.floats(0.3, 20),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
    st.floats(1e-3, 1),
    st.integers(1, 5000),
    st.sampled_from(["pld", "rdp", "zcdp", "gaussian"]),
)
def test_safe_and_tight(epsilon: float, delta: float, q: float, steps: int, name: str) -> None:
    sigma = calibrate(epsilon, delta=delta, q=q, steps=steps, accountant=name)
    asked = find_accountant(name)
    assert asked.epsilon([Event(sigma=sigma, q=q, steps=steps)], delta) <= epsilon
    if sigma > 0.01:
        less = Event(sigma=sigma * (1 - 3e-4), q=q, steps=steps)
        # PLD is monotone only up to its grid: less noise may read up to 1e-3 lower there
        assert asked.epsilon([less], delta) > epsilon * (1 - (1e-3 if name == "pld" else 1e-4))


def test_reference_is_fast_and_cached() -> None:
    find_accountant("pld").epsilon([Event(sigma=1.0, q=0.1, steps=10)], 1e-5)  # warm the imports
    begun = time.process_time()
    sigma = calibrate(1.01, delta=1e-5, q=0.0128, steps=7812)
    assert time.process_time() - begun < 4  # 0.6 s on an idle core
    begun = time.process_time()
    assert {calibrate(1.01, delta=1e-5, q=0.0128, steps=7812) for _ in range(1000)} == {sigma}
    assert time.process_time() - begun < 0.2


def test_replace_one_needs_about_twice_the_noise() -> None:
    one = calibrate(1.0, delta=1e-5, q=0.0128, steps=7812)
    other = calibrate(1.0, delta=1e-5, q=0.0128, steps=7812, adjacency=Adjacency.REPLACE_ONE)
    assert other == pytest.approx(2 * one, rel=0.05)


def test_besides_shares_the_budget() -> None:
    side = [Event(sigma=3.0, q=0.1, steps=20)]
    sigma = calibrate(2.0, delta=1e-5, q=0.01, steps=500, besides=side)
    assert sigma > calibrate(2.0, delta=1e-5, q=0.01, steps=500)
    assert find_accountant("pld").epsilon([*side, Event(sigma=sigma, q=0.01, steps=500)], 1e-5) <= 2.0
    with raises_code("account.other-releases-too-expensive"):
        calibrate(0.5, delta=1e-5, q=0.01, steps=500, besides=side)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, float("nan"), None])
def test_impossible_targets(target: float) -> None:
    with raises_code("account.epsilon-not-positive"):
        calibrate(target, delta=1e-5, q=0.01, steps=10)


def test_other_refusals() -> None:
    with raises_code("account.delta-zero"):
        calibrate(1.0, delta=0.0, q=0.01, steps=10)
    with raises_code("account.nothing-released"):
        calibrate(1.0, delta=1e-5, q=0.0, steps=10)
    with raises_code("account.target-unreachable"):
        calibrate(0.1, delta=1e-5, q=0.01, steps=10, accountant="moments")  # log(1/δ)/64 = 0.18
    assert calibrate(1e12, delta=1e-5, q=1.0, steps=1, accountant="gaussian") <= 1e-3


def test_a_calibrated_plan_fits_its_filter_to_the_last_step() -> None:
    sigma = calibrate(2.0, delta=1e-5, q=0.1, steps=997, accountant="gaussian")
    whole = GaussianFilter.for_target(2.0, delta=1e-5)
    for _ in range(997):
        whole.charge(sigma, 0.1)
    assert not whole.admits(sigma, 0.1)
    sigma = calibrate(2.0, delta=1e-5, q=0.1, steps=997, accountant="rdp")
    order = choose_order([Event(sigma=sigma, q=0.1, steps=997)], delta=1e-5)
    rdp = RenyiFilter.for_target(2.0, delta=1e-5, order=order)
    for _ in range(997):
        rdp.charge(sigma, 0.1)
    assert not rdp.admits(sigma, 0.1)
