"""Without amplification: exact Gaussian, zCDP, disclosed occurrences."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from scipy import special, stats

from lamina.account import gaussian_rdp
from lamina.account.accountants import DISCLOSED, cap_occurrences, cost, find_accountant
from lamina.account.gaussian_rdp import epsilon_of_noise_multiplier
from lamina.account.schedule import Adjacency, Event


@settings(max_examples=100)
@given(st.floats(1e-3, 50), st.sampled_from([1e-2, 1e-5, 1e-10]))
def test_exact_gaussian_inverts_and_agrees_with_the_library(mu: float, delta: float) -> None:
    epsilon = gaussian_rdp.epsilon_of_mu(mu, delta)
    assert gaussian_rdp.delta_of_mu(mu, epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert gaussian_rdp.delta_of_mu(mu, epsilon * (1 - 1e-6)) > delta
    theirs = gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta)
    assert epsilon == pytest.approx(theirs, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.5, 5.0, 60.0])
def test_hockey_stick_by_integration(mu: float) -> None:
    z = np.linspace(-15, 15 + mu, 2_000_001)
    upper, lower = stats.norm.pdf(z - mu), stats.norm.pdf(z)
    for epsilon in (-1.0, 0.0, 0.5 * mu * mu, 0.5 * mu * mu + 2 * mu):
        expected = float(np.maximum(upper - math.exp(min(epsilon, 700)) * lower, 0).sum() * (z[1] - z[0]))
        if epsilon < 600:
            assert float(gaussian_rdp.hockey_stick(epsilon, mu)) == pytest.approx(expected, rel=1e-5, abs=1e-14)


def test_extremes_of_mu() -> None:
    assert gaussian_rdp.epsilon_of_mu(0.0, 1e-5) == 0
    assert gaussian_rdp.epsilon_of_mu(math.inf, 1e-5) == math.inf
    assert gaussian_rdp.epsilon_of_mu(3.0, 0.0) == math.inf
    for mu in (1e3, 1e6, 1e9, 1e100):
        assert gaussian_rdp.epsilon_of_mu(mu, 1e-5) >= 0.5 * mu * mu
    assert gaussian_rdp.epsilon_of_mu(1e-12, 1e-5) == 0
    assert 0 < gaussian_rdp.epsilon_of_mu(1e-12, 1e-14) < 1e-11


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-3, 30), st.sampled_from([1e-2, 1e-5, 1e-10]))
def test_budget_of_a_target(epsilon: float, delta: float) -> None:
    mu = gaussian_rdp.mu_of_epsilon(epsilon, delta)
    assert gaussian_rdp.epsilon_of_mu(mu, delta) <= epsilon
    assert gaussian_rdp.epsilon_of_mu(mu * (1 + 1e-6), delta) > epsilon * (1 - 1e-9)


@given(st.floats(1e-6, 1e3), st.sampled_from([1e-2, 1e-5, 1e-10]))
def test_zcdp_conversion_is_the_best_over_a_fine_grid_of_orders(rho: float, delta: float) -> None:
    excess = np.exp(np.linspace(-12, 20, 40_001))
    grid = rho * (1 + excess) + (math.log(1 / delta) - np.log1p(excess)) / excess - np.log1p(1 / excess)
    best = max(0.0, float(grid.min()))
    assert gaussian_rdp.epsilon_of_rho(rho, delta) == pytest.approx(best, rel=1e-5, abs=1e-9)
    assert gaussian_rdp.epsilon_of_mu(math.sqrt(2 * rho), delta) <= gaussian_rdp.epsilon_of_rho(rho, delta)
    assert gaussian_rdp.epsilon_of_rho(rho, delta) <= gaussian_rdp.classical_zcdp_epsilon(rho, delta) * (1 + 1e-9)
    epsilon = gaussian_rdp.epsilon_of_rho(rho, delta)
    if epsilon > 0:
        assert gaussian_rdp.delta_of_rho(rho, epsilon) == pytest.approx(delta, rel=1e-3)


def test_unamplified_figures_ignore_the_rate() -> None:
    for name in ("zcdp", "gaussian"):
        costs = {find_accountant(name).epsilon([Event(sigma=3.0, q=q, steps=50)], 1e-5) for q in (1e-6, 0.1, 1.0)}
        assert len(costs) == 1
        assert find_accountant(name).epsilon([Event(sigma=3.0, q=0.0, steps=50)], 1e-5) == 0


def test_mixture_by_simulation() -> None:
    """Draw occurrences, average the exact δ."""
    event, epsilon = Event(sigma=5.0, q=0.02, steps=2000), 1.0
    counts = np.random.default_rng(3).binomial(event.steps, event.q, 40_000)
    values, weight = np.unique(counts, return_counts=True)
    each = [gaussian_rdp.delta_of_mu(math.sqrt(n) / event.sigma, epsilon) for n in values]
    assert DISCLOSED.delta([event], epsilon) == pytest.approx(float(np.dot(each, weight) / len(counts)), rel=0.01)


def test_mixture_of_several_events_is_pessimistic_and_close() -> None:
    whole = (Event(sigma=5.0, q=0.02, steps=2000),)
    nearly_split = (Event(sigma=5.0, q=0.02, steps=1000), Event(sigma=5.0 * (1 + 1e-12), q=0.02, steps=1000))
    exact = DISCLOSED.epsilon(whole, 1e-5)
    assert exact <= DISCLOSED.epsilon(nearly_split, 1e-5) <= exact * 1.005


@settings(max_examples=20, deadline=None)
@given(st.floats(0.5, 50), st.floats(1e-3, 1), st.integers(1, 3000))
def test_mixture_lies_between_amplified_and_every_step(sigma: float, q: float, steps: int) -> None:
    schedule = (Event(sigma=sigma, q=q, steps=steps),)
    disclosed = DISCLOSED.epsilon(schedule, 1e-5)
    assert disclosed <= find_accountant("gaussian").epsilon(schedule, 1e-5) * (1 + 1e-6)
    assert find_accountant("pld").epsilon(schedule, 1e-5) <= disclosed * (1 + 2e-3) + 1e-9
    assert disclosed <= DISCLOSED.epsilon(schedule, 1e-5, Adjacency.REPLACE_ONE)


def test_mixture_at_its_ends() -> None:
    assert DISCLOSED.epsilon((), 1e-5) == 0
    certain = (Event(sigma=3.0, q=1.0, steps=9),)
    assert DISCLOSED.epsilon(certain, 1e-5) == pytest.approx(gaussian_rdp.epsilon_of_mu(1.0, 1e-5), rel=1e-6)
    assert DISCLOSED.epsilon(certain, 1e-300) == math.inf


def test_cost_with_a_cap_takes_the_least_noisy_steps() -> None:
    schedule = [Event(sigma=4.0, q=0.1, steps=50), Event(sigma=2.0, q=0.1, steps=30)]
    assert cap_occurrences(schedule, 40) == (Event(sigma=2.0, q=0.1, steps=30), Event(sigma=4.0, q=0.1, steps=10))
    assert cap_occurrences(schedule, 0) == ()
    report = cost(schedule, delta=1e-5, occurrences=40)
    assert report.rho == pytest.approx(0.5 * (30 / 4 + 10 / 16))
    assert report.epsilon == cost(schedule, delta=1e-5).epsilon  # amplification does not see the cap
    assert report.epsilon_disclosed is None
    assert cost(schedule, delta=1e-5, accountant="gaussian", occurrences=40).epsilon == report.epsilon_unamplified
    assert cost(schedule, delta=1e-5, accountant="rdp").epsilon_replace_one == report.epsilon_replace_one
    with raises_code("account.occurrences-negative"):
        cap_occurrences(schedule, -1)


def test_signed_multiplier() -> None:
    assert epsilon_of_noise_multiplier(1 / gaussian_rdp.mu_of_epsilon(1.0, 1e-5), 1e-5) == pytest.approx(1.0, rel=1e-9)


def test_erfcx_without_scipy() -> None:
    x = np.concatenate([np.linspace(0, 30, 3001), [12.0, 1e3, 1e8]])
    assert [gaussian_rdp._erfcx(float(each)) for each in x] == pytest.approx(special.erfcx(x), rel=3e-15)


def test_one_delta_as_the_curve() -> None:
    for mu in (1e-3, 0.1, 1.0, 5.0, 60.0):
        for a in (-8.0, -2.0, -1e-3, 1e-3, 0.4 * mu):
            epsilon = mu * (0.5 * mu - a)
            if epsilon >= 0:
                curve = float(gaussian_rdp.hockey_stick(epsilon, mu))
                assert gaussian_rdp.delta_of_mu(mu, epsilon) == pytest.approx(curve, rel=1e-11)


@pytest.mark.parametrize("mu", [1e-6, 3e-5, 1e-3, 0.07, 1.0, 7.0, 90.0])
@pytest.mark.parametrize("ratio", [0.0, 1e-3, 0.5, 3.0, 9.0])
def test_delta_is_never_rounded_down(mu: float, ratio: float) -> None:
    """Against 60 digits: for a small μ the two terms of δ(ε) almost cancel."""
    epsilon = mu * mu / 2 + ratio * mu if ratio else 0.0
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        exact = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        found = mpmath.mpf(gaussian_rdp.delta_of_mu(mu, epsilon))
        assert exact <= found <= exact * (1 + mpmath.mpf(10) ** -4) or found == 1
