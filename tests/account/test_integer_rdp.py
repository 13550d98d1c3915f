"""The accountant of noise on integers, against dp-accounting and against the discrete Gaussian itself in one dimension."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy import special

from lamina.account.accountants import cost, find_accountant, pooled_epsilon
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import INTEGER_ORDERS, INTEGER_RDP, Event

DELTA = 1e-5
SCHEDULES = [(0.8, 1.0, 1), (1.3, 0.1, 50), (4.3, 0.0128, 7812), (2.0, 0.01, 1000), (20.0, 1.0, 100)]


def discrete(scale: float, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, and log P of the discrete Gaussian there."""
    x = np.arange(-math.ceil(40 * scale) - 2, math.ceil(40 * scale) + 3)
    log = -((x - shift) ** 2) / (2 * scale * scale)
    return x, log - special.logsumexp(-(np.arange(-5000, 5001) ** 2) / (2 * scale * scale))


def sampled(scale: float, q: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers; log P without the contribution, and with it at rate q, which shifts by 1."""
    x, without = discrete(scale)
    moved = discrete(scale, 1)[1]
    mixed = moved if q == 1 else np.logaddexp(without + math.log1p(-q), moved + math.log(q))
    return x, without, mixed


@pytest.mark.parametrize(("sigma", "q", "steps"), SCHEDULES)
def test_it_is_rdp_at_integer_orders(sigma: float, q: float, steps: int) -> None:
    event = dp_accounting.GaussianDpEvent(sigma)
    theirs = RdpAccountant(orders=[int(order) for order in INTEGER_ORDERS if order <= 1024])
    theirs.compose(event if q == 1 else dp_accounting.PoissonSampledDpEvent(q, event), steps)
    schedule = [Event(sigma=sigma, q=q, steps=steps)]
    ours = find_accountant(INTEGER_RDP).epsilon(schedule, DELTA)
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-6)
    assert ours >= find_accountant("rdp").epsilon(schedule, DELTA) - 1e-12
    assert find_accountant(INTEGER_RDP).delta(schedule, ours) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("scale", [0.7, 1.0, 2.5, 16.0])
@pytest.mark.parametrize("q", [0.01, 0.3, 1.0])
def test_no_divergence_of_the_discrete_gaussian_is_larger(scale: float, q: float) -> None:
    """Both directions, by summing over the integers."""
    _, without, mixed = sampled(scale, q)
    for order in (2, 3, 5, 8, 16, 32):
        bound = step_rdp(q, scale, float(order))
        for p, r in ((mixed, without), (without, mixed)):
            exact = special.logsumexp(order * p + (1 - order) * r) / (order - 1)
            assert exact <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("q", "steps"), [(1.0, 1), (1.0, 8), (0.2, 1), (0.2, 30), (0.02, 200)])
def test_epsilon_is_never_below_the_privacy_loss_of_the_discrete_gaussian(scale: float, q: float, steps: int) -> None:
    """Its privacy loss distribution composed numerically, rounded down: a lower limit of the truth."""
    x, without, mixed = sampled(scale, q)
    laws = [dict(zip(x.tolist(), log.tolist(), strict=True)) for log in (without, mixed)]
    lower, upper = laws
    for pair in ((lower, upper), (upper, lower)):
        one = privacy_loss_distribution.from_two_probability_mass_functions(
            *pair, pessimistic_estimate=False, value_discretization_interval=1e-3, log_mass_truncation_bound=-60
        )
        truth = one.self_compose(steps).get_epsilon_for_delta(DELTA)
        assert truth <= find_accountant(INTEGER_RDP).epsilon([Event(sigma=scale, q=q, steps=steps)], DELTA)


@pytest.mark.parametrize("variance", [4.0, 30.0, 400.0])
@pytest.mark.parametrize("q", [0.05, 1.0])
def test_no_divergence_of_skellam_noise_is_larger(variance: float, q: float) -> None:
    """With sigma² = v/(1 + 3.5/v) for a shift by 1, both directions, by summing over the integers."""
    x = np.arange(-400, 401)
    with np.errstate(divide="ignore"):
        without, moved = (np.log(special.ive(np.abs(x - shift).astype(float), variance)) for shift in (0, 1))
    seen = np.isfinite(without) & np.isfinite(moved)
    without, moved = without[seen], moved[seen]
    mixed = moved if q == 1 else np.logaddexp(without + math.log1p(-q), moved + math.log(q))
    sigma = math.sqrt(variance / (1 + 3.5 / variance))
    for order in (2, 3, 4, 8, 16):
        for p, r in ((mixed, without), (without, mixed)):
            exact = special.logsumexp(order * p + (1 - order) * r) / (order - 1)
            assert exact <= step_rdp(q, sigma, float(order)) * (1 + 1e-9)


@pytest.mark.parametrize(("sigma", "q", "steps"), SCHEDULES)
def test_what_else_is_said_bounds_the_gaussian_figures(sigma: float, q: float, steps: int) -> None:
    """Where nothing is known of the discrete law but its Rényi divergences, no exact Gaussian figure is printed."""
    schedule = [Event(sigma=sigma, q=q, steps=steps)]
    ours, exact = cost(schedule, delta=DELTA, accountant=INTEGER_RDP), cost(schedule, delta=DELTA)
    assert ours.rho == exact.rho
    assert ours.epsilon_unamplified > exact.epsilon_unamplified
    assert ours.epsilon_unamplified_replace_one > exact.epsilon_unamplified_replace_one
    assert ours.epsilon_replace_one > exact.epsilon_replace_one and ours.epsilon_replace_one >= 2 * ours.epsilon
    assert ours.epsilon_disclosed is not None and ours.epsilon_disclosed >= ours.epsilon_unamplified
    capped = cost(schedule, delta=DELTA, accountant=INTEGER_RDP, occurrences=1)
    assert capped.epsilon_unamplified <= ours.epsilon_unamplified


def test_noise_that_followed_its_budget_is_added_at_integer_orders() -> None:
    fixed, followed = {(2.0, 0.01, 0.0): 500}, {(2.0, 0.01, 12.5): 10}
    alone = pooled_epsilon(fixed, delta=DELTA, name=INTEGER_RDP)
    both = pooled_epsilon(fixed | followed, delta=DELTA, name=INTEGER_RDP)
    assert alone < both < math.inf
    assert both >= pooled_epsilon(fixed | followed, delta=DELTA, name="rdp")
    assert math.isinf(pooled_epsilon({(2.0, 0.01, 1.5): 10}, delta=DELTA, name=INTEGER_RDP))
