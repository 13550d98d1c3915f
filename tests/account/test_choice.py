"""The exponential mechanism as a Gaussian: the two-output mechanisms that it must dominate, tried one by one."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from scipy import special

from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import choice_noise_multiplier, hockey_stick
from lamina.account.schedule import Event


def two_outputs(range_: float, t: float) -> tuple[float, float]:
    """P(first output) with and without the contribution, if its log ratio is t and the other's t - range."""
    low = (1 - math.exp(t - range_)) / (math.exp(t) - math.exp(t - range_))
    return math.exp(t) * low, low


@given(st.floats(0.01, 8.0), st.floats(0.001, 0.999), st.floats(-4.0, 6.0))
def test_every_two_output_mechanism_of_that_range_is_dominated(range_: float, position: float, epsilon: float) -> None:
    p, q = two_outputs(range_, range_ * position)
    delta = max(0.0, p - math.exp(epsilon) * q) + max(0.0, (1 - p) - math.exp(epsilon) * (1 - q))
    mu = 1 / choice_noise_multiplier(range_)
    assert delta <= float(hockey_stick(epsilon, mu)) + 1e-12


def test_no_smaller_gaussian_would_do() -> None:
    for range_ in (0.1, 0.5, 2.0):
        p, q = two_outputs(range_, range_ / 2)
        smaller = 0.99 / choice_noise_multiplier(range_)
        epsilons = np.linspace(-range_, range_, 2001)
        exact = np.maximum(0, p - np.exp(epsilons) * q) + np.maximum(0, (1 - p) - np.exp(epsilons) * (1 - q))
        assert (exact > hockey_stick(epsilons, smaller)).any()


def test_an_exponential_mechanism_has_that_range() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        utility, moved = rng.normal(0, 3, 6), rng.uniform(0, 1, 6)
        ratio = special.log_softmax(0.7 * (utility + moved)) - special.log_softmax(0.7 * utility)
        assert np.ptp(ratio) <= 0.7 + 1e-12


def test_thirty_calls_cost_what_they_should() -> None:
    """30 choices at 0.5 beside a run of ε = 1: well below the 1.022 that pure ε-DP events would give."""
    steps = Event(sigma=4.3131, q=0.0128, steps=7812)
    alone = find_accountant("pld").epsilon((steps,), 1e-5)
    choices = Event(sigma=choice_noise_multiplier(0.5), q=0.0128, steps=30)
    both = find_accountant("pld").epsilon((steps, choices), 1e-5)
    assert alone < both < 1.01


@pytest.mark.parametrize(
    "epsilon", [0, -1.0, 1e-17, 9.9e-7, pytest.param(10**5000, id="huge"), math.nan, math.inf, True, "1", 51.0]
)
def test_a_choice_that_makes_no_sense_is_refused(epsilon: object) -> None:
    with raises_code("account.choice-epsilon-out-of-range"):
        choice_noise_multiplier(epsilon)  # type: ignore[arg-type]


def test_it_is_rounded_down_and_by_no_more_than_it_must() -> None:
    """Against 60 digits: Φ(μ/2) = 1/(1+e^(-ε/2)), that is erf(μ/√8) = tanh(ε/4)."""
    with mpmath.workdps(60):
        for epsilon in [*np.logspace(-6, math.log10(50), 300).tolist(), 1e-6, 1 - 1e-16, 1.0, 50.0]:
            mu = mpmath.sqrt(8) * mpmath.erfinv(mpmath.tanh(mpmath.mpf(epsilon) / 4))
            found = mpmath.mpf(choice_noise_multiplier(epsilon))
            assert 1 - mpmath.mpf("1e-11") < found * mu < 1
