"""RDP and moments: closed forms, dp-accounting, and the places where the library is wrong."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as library
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.account import gaussian_rdp, schedule
from lamina.account.accountants import find_accountant
from lamina.account.schedule import Adjacency, Event


@settings(max_examples=25, deadline=None)
@given(st.floats(0.3, 30), st.floats(1e-3, 0.99))
def test_divergences_agree_with_dp_accounting(sigma: float, q: float) -> None:
    """At integer orders; at fractional ones the library's series often does not converge (below)."""
    orders = (2.0, 3.0, 4.0, 16.0, 64.0, 256.0)
    theirs = library._compute_rdp_poisson_subsampled_gaussian(q, sigma, orders)
    ours = gaussian_rdp.step_log_moments(q, sigma, orders) / (np.asarray(orders) - 1)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (4.31, 0.0128), (0.8, 0.02)])
def test_fractional_divergences_are_tighter_than_in_dp_accounting(sigma: float, q: float) -> None:
    """The library drops the alternating signs of its series, so it errs upwards (9 % at order 1.5)."""
    orders = (1.5, 2.5, 4.1, 7.9)
    theirs = library._compute_rdp_poisson_subsampled_gaussian(q, sigma, orders)
    ours = gaussian_rdp.step_log_moments(q, sigma, orders) / (np.asarray(orders) - 1)
    assert (ours <= theirs * (1 + 1e-6)).all()
    assert ours[2:] == pytest.approx(theirs[2:], rel=1e-3)


def test_library_gives_up_on_fractional_orders_at_large_rates() -> None:
    """dp-accounting 0.6 returns inf (safe, but loose and slow) where the quadrature has no difficulty."""
    logging.disable(logging.WARNING)
    try:
        assert library._compute_rdp_poisson_subsampled_gaussian(0.5, 3.0, (1.5,))[0] == math.inf
    finally:
        logging.disable(logging.NOTSET)
    below, at, above = gaussian_rdp.step_log_moments(0.5, 3.0, (1.0 + 1e-9, 1.5, 2.0))
    assert below < at < 0.5 * above  # convex, 0 at order 1


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (0.5, 0.01), (5.0, 0.5)])
def test_divergences_by_plain_integration(sigma: float, q: float) -> None:
    """Both directions: the one computed is the larger."""
    mu = 1 / sigma
    for order in (1.3, 2.0, 3.7, 6.0):
        z = np.linspace(-30, 30 + order * mu, 600_001)
        ratio = 1 - q + q * np.exp(mu * z - mu * mu / 2)
        weight = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
        forward, backward = (math.log(float((weight * ratio**power).sum())) for power in (order, 1 - order))
        found = float(gaussian_rdp.step_log_moments(q, sigma, (order,))[0])
        assert found == pytest.approx(forward, rel=1e-6)
        assert found >= backward


def test_without_sampling_it_is_the_gaussian_line() -> None:
    orders = np.asarray(schedule.RDP_ORDERS)
    assert gaussian_rdp.step_rdp_at_orders(1.0, 2.0) == pytest.approx(orders / 8, rel=1e-8)
    assert not gaussian_rdp.step_rdp_at_orders(0.0, 2.0).any()
    assert not gaussian_rdp.step_rdp_at_orders(0.5, math.inf).any()


def test_chord_bounds_fractional_orders_at_tiny_sigma() -> None:
    whole = gaussian_rdp.step_log_moments(0.01, 0.05, (2.0, 3.0))
    middle = gaussian_rdp.step_log_moments(0.01, 0.05, (2.5,))[0]
    assert middle == pytest.approx(whole.mean(), rel=1e-8)
    z = np.linspace(-20, 100, 2_000_001)  # a fine rule still resolves it
    log_ratio = np.logaddexp(math.log(0.99), math.log(0.01) + 20 * z - 200)
    exponent = 2.5 * log_ratio - 0.5 * z * z
    exact = (
        exponent.max()
        + math.log(float(np.exp(exponent - exponent.max()).sum() * (z[1] - z[0])))
        - 0.5 * math.log(2 * math.pi)
    )
    assert exact <= middle


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 20), st.floats(1e-3, 1), st.integers(1, 5000), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_epsilon_is_at_least_as_tight_as_dp_accounting(sigma: float, q: float, steps: int, delta: float) -> None:
    theirs = library.RdpAccountant()
    event = dp_event.GaussianDpEvent(sigma)
    theirs.compose(dp_event.PoissonSampledDpEvent(q, event) if q < 1 else event, steps)
    ours = find_accountant("rdp").epsilon([Event(sigma=sigma, q=q, steps=steps)], delta)
    # Same conversion; other orders, so the two differ a little, mostly in our favour.
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=0.03) or ours < theirs.get_epsilon(delta)


def test_library_reports_zero_where_rounding_eats_the_divergence() -> None:
    """dp-accounting 0.6: log A comes out negative for large sigma, and that is read as ε = 0."""
    sigma, q, steps, delta = 1e6, 1e-3, 10**9, 1e-7
    theirs = library.RdpAccountant()
    logging.disable(logging.WARNING)
    try:
        theirs.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)), steps)
        assert theirs.get_epsilon(delta) == 0
    finally:
        logging.disable(logging.NOTSET)
    mu = q * math.sqrt(steps) / sigma  # the central limit: δ(0) = 2Φ(μ/2) - 1 ≈ 0.4 μ
    assert 0.39 * mu > 100 * delta  # so ε = 0 is far from true
    schedule = [Event(sigma=sigma, q=q, steps=steps)]
    assert find_accountant("rdp").epsilon(schedule, delta) > 0
    assert find_accountant("pld").epsilon(schedule, delta) > 0
    assert float(gaussian_rdp.step_log_moments(q, sigma, (2.0,))[0]) == pytest.approx(q * q / sigma**2, rel=1e-6)


def test_moments_by_hand() -> None:
    event = Event(sigma=2.0, q=1.0, steps=10)
    by_hand = min((10 * lam * (lam + 1) / 8 + math.log(1e5)) / lam for lam in range(1, 65))
    assert find_accountant("moments").epsilon([event], 1e-5) == pytest.approx(by_hand, rel=1e-8)
    assert gaussian_rdp.moments_curve((event,))[0] == pytest.approx(10 * 2 / 8)


@pytest.mark.parametrize("name", ["rdp", "moments"])
def test_replace_one_is_refused_with_a_remedy(name: str) -> None:
    for ask in (find_accountant(name).epsilon, find_accountant(name).delta):
        with raises_code("account.add-remove-only"):
            ask([Event(sigma=1.0, q=0.1, steps=1)], 0.1, Adjacency.REPLACE_ONE)
