"""The reference values of the theory, and the order in which accountants must stand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.account import gaussian_rdp
from lamina.account.accountants import DISCLOSED, calibrate, cost, find_accountant
from lamina.account.schedule import Adjacency, Event, prefix

Q, T, DELTA = 256 / 20_000, 7812, 1e-5  # N = 20000, b = 256
REFERENCE = (Event(sigma=4.31, q=Q, steps=T),)

schedules = st.lists(
    st.builds(Event, sigma=st.floats(0.4, 50), q=st.floats(1e-4, 1), steps=st.integers(1, 3000)), min_size=1, max_size=3
)
deltas = st.sampled_from([1e-3, 1e-5, 1e-8])


def test_noise_for_epsilon_one() -> None:
    sigma = {name: calibrate(1.0, delta=DELTA, q=Q, steps=T, accountant=name) for name in ("pld", "rdp")}
    assert sigma["pld"] == pytest.approx(4.31, rel=4e-3)
    assert find_accountant("pld").epsilon(REFERENCE, DELTA) <= 1.0
    assert sigma["rdp"] == pytest.approx(4.65, rel=2e-3)
    assert calibrate(1.0, delta=DELTA, q=1.0, steps=100, accountant="gaussian") == pytest.approx(37.3, rel=5e-4)
    assert calibrate(1.0, delta=DELTA, q=Q, steps=T, accountant="gaussian") == pytest.approx(330, rel=2e-3)


def test_conversions_of_rho() -> None:
    assert gaussian_rdp.classical_zcdp_epsilon(0.0208, DELTA) == pytest.approx(1.000, abs=1e-3)
    assert gaussian_rdp.epsilon_of_rho(0.0208, DELTA) == pytest.approx(0.811, abs=1e-3)
    assert gaussian_rdp.epsilon_of_mu(math.sqrt(2 * 0.0208), DELTA) == pytest.approx(0.741, abs=1e-3)


def test_adjacency_and_disclosure() -> None:
    report = cost(REFERENCE, delta=DELTA)
    assert report.epsilon == pytest.approx(1.00, abs=5e-3)
    assert report.epsilon_replace_one == pytest.approx(2.11, abs=1e-2)
    assert report.rho == pytest.approx(T / (2 * 4.31**2), rel=1e-12)
    # 100 disclosed occurrences move ε from 1 to 12; averaging over Binomial(T, q) costs a little more
    assert cost(REFERENCE, delta=DELTA, occurrences=100).epsilon_unamplified == pytest.approx(12.1, abs=0.1)
    assert report.epsilon_disclosed == pytest.approx(12.45, abs=0.05)


def test_calibrating_to_the_mean_occurrences_is_not_enough() -> None:
    sigma = 10 / gaussian_rdp.mu_of_epsilon(1.0, DELTA)  # exact for 100 occurrences
    assert DISCLOSED.epsilon((Event(sigma=sigma, q=100 / T, steps=T),), DELTA) == pytest.approx(1.0168, abs=2e-4)


def test_withdrawal_after_part_of_the_steps() -> None:
    spent = [find_accountant("pld").epsilon(prefix(REFERENCE, int(T * part)), DELTA) for part in (0.1, 0.25, 0.5)]
    assert spent == pytest.approx([0.29, 0.47, 0.69], abs=8e-3)


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "right", "wrong"), [(1.0, Q, T, 7.18, 5.19), (0.5, 0.01, 1000, 13.4, 2.9)]
)
def test_layers_are_one_joint_event(sigma: float, q: float, steps: int, right: float, wrong: float) -> None:
    """12 layers with equal shares: one event with sigma, not 12 subsampled events with sigma·√12.

    Without sampling both are the same; with it, the second forgets that one coin decides for all layers.
    """
    joint = (Event(sigma=sigma, q=q, steps=steps),)
    apart = (Event(sigma=sigma * math.sqrt(12), q=q, steps=12 * steps),)
    assert find_accountant("pld").epsilon(joint, DELTA) == pytest.approx(right, rel=5e-3)
    assert find_accountant("pld").epsilon(apart, DELTA) == pytest.approx(wrong, rel=5e-3)
    exact = find_accountant("gaussian")
    assert exact.epsilon(joint, DELTA) == pytest.approx(exact.epsilon(apart, DELTA), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(schedules, deltas)
def test_accountants_are_ordered(schedule: list[Event], delta: float) -> None:
    pld, rdp, moments, zc, exact = (
        find_accountant(name).epsilon(schedule, delta) for name in ("pld", "rdp", "moments", "zcdp", "gaussian")
    )
    assert pld <= rdp <= moments
    assert pld <= exact <= zc
    assert pld <= find_accountant("pld").epsilon(schedule, delta, Adjacency.REPLACE_ONE) * (1 + 1e-3) + 1e-9


@settings(max_examples=15, deadline=None)
@given(schedules, deltas, st.sampled_from(["pld", "rdp", "moments", "zcdp", "gaussian"]), st.data())
def test_monotone_and_independent_of_splitting(
    schedule: list[Event], delta: float, name: str, data: st.DataObject
) -> None:
    """Less noise, more sampling, more steps: never cheaper (PLD: up to its grid). Splitting: no change."""
    asked = find_accountant(name)
    base = asked.epsilon(schedule, delta)
    slack = base * (1 - 1e-3) - 1e-9 if name == "pld" else base * (1 - 1e-9)
    first, *rest = schedule
    more = data.draw(st.floats(1.0, 2.0))
    assert asked.epsilon([Event(sigma=first.sigma / more, q=first.q, steps=first.steps), *rest], delta) >= slack
    assert asked.epsilon([Event(sigma=first.sigma, q=min(1, first.q * more), steps=first.steps), *rest], delta) >= slack
    assert asked.epsilon([*schedule, Event(sigma=5.0, q=0.1, steps=10)], delta) >= slack
    cut = data.draw(st.integers(0, first.steps))
    halves = [Event(sigma=first.sigma, q=first.q, steps=steps) for steps in (cut, first.steps - cut)]
    assert asked.epsilon([halves[1], *rest, halves[0]], delta) == base


@settings(max_examples=15, deadline=None)
@given(schedules, st.floats(0.05, 8), st.sampled_from(["pld", "rdp", "moments", "zcdp", "gaussian"]))
def test_delta_and_epsilon_invert_each_other(schedule: list[Event], epsilon: float, name: str) -> None:
    asked = find_accountant(name)
    delta = asked.delta(schedule, epsilon)
    assert 0 <= delta <= 1
    if 1e-9 < delta < 0.5:
        assert asked.epsilon(schedule, delta) == pytest.approx(epsilon, rel=2e-3, abs=1e-6)
