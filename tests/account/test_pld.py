"""PLD against independent oracles: direct integration, dp-accounting's own pipeline, PRV, exact Gaussian."""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.privacy_accountant import NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.account import gaussian_rdp, pld
from lamina.account.accountants import find_accountant
from lamina.account.pld import Direction
from lamina.account.schedule import Adjacency, Event

ONE_STEP = [(1.0, 0.1), (0.5, 0.01), (4.31, 0.0128), (0.8, 0.9), (2.0, 1.0), (30.0, 1e-3)]


def densities(z: np.ndarray, q: float, mu: float, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
    def normal(shift: float) -> np.ndarray:
        return np.exp(-0.5 * (z - shift) ** 2) / math.sqrt(2 * math.pi)

    mixed = (1 - q) * normal(0) + q * normal(mu)
    if direction is Direction.REMOVE:
        return mixed, normal(0)
    if direction is Direction.ADD:
        return normal(0), mixed
    return (1 - q) * normal(0) + q * normal(-mu), mixed


def integrated(epsilon: float, q: float, mu: float, direction: Direction) -> float:
    """∫ (p - e^ε p')₊ by the trapezoidal rule."""
    z = np.linspace(-14 - mu, 14 + mu, 400_001)
    upper, lower = densities(z, q, mu, direction)
    return float(np.maximum(upper - math.exp(epsilon) * lower, 0.0).sum() * (z[1] - z[0]))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("sigma", "q"), ONE_STEP)
def test_one_step_curve_against_integration(sigma: float, q: float, direction: Direction) -> None:
    mu = 1 / sigma
    low, high = pld.loss_range(q, mu, direction, 1e-6)
    epsilons = np.concatenate([np.linspace(low, high, 9), [0.0, -0.3, 0.3]])
    expected = [integrated(float(e), q, mu, direction) for e in epsilons]
    assert pld.step_hockey_stick(epsilons, q, mu, direction) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (0.5, 0.3)])
def test_two_steps_against_integration_in_the_plane(sigma: float, q: float, epsilon: float) -> None:
    z = np.linspace(-9, 9 + 1 / sigma, 1501)
    cell = (z[1] - z[0]) ** 2
    worst = 0.0
    for direction in (Direction.REMOVE, Direction.ADD):
        upper, lower = densities(z, q, 1 / sigma, direction)
        gap = np.outer(upper, upper) - math.exp(epsilon) * np.outer(lower, lower)
        worst = max(worst, float(np.maximum(gap, 0.0).sum() * cell))
    computed = find_accountant("pld").delta([Event(sigma=sigma, q=q, steps=2)], epsilon)
    assert worst - 1e-7 <= computed <= worst * (1 + 2e-3) + 1e-6


def test_replace_one_pair_dominates_every_other_pair() -> None:
    """Two contributions x, x' in the unit disk, not only opposite ones, and any sampling: never worse."""
    rng = np.random.default_rng(7)
    axis = np.linspace(-9, 9, 301)
    zx, zy = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def mixed(q: float, centre: np.ndarray) -> np.ndarray:
        base = np.exp(-0.5 * (zx**2 + zy**2))
        moved = np.exp(-0.5 * ((zx - centre[0]) ** 2 + (zy - centre[1]) ** 2))
        return ((1 - q) * base + q * moved) / (2 * math.pi)

    for q, mu in ((0.05, 1.0), (0.3, 2.0), (0.9, 0.7)):
        epsilons = np.array([0.0, 0.1, 0.5, 1.5])
        bound = pld.step_hockey_stick(epsilons, q, mu, Direction.REPLACE)
        for trial in range(12):
            angles = rng.uniform(0, 2 * math.pi, 2)
            radii = np.ones(2) if trial % 2 else np.sqrt(rng.uniform(0, 1, 2))
            points = mu * radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
            first, second = mixed(q, points[0]), mixed(q, points[1])
            for epsilon, limit in zip(epsilons, bound, strict=True):
                found = np.maximum(first - math.exp(epsilon) * second, 0.0).sum() * cell
                assert found <= limit + 1e-6


def in_library(
    event: Event, h: float, relation: NeighboringRelation, pessimistic: bool = True
) -> library.PrivacyLossDistribution:
    return library.from_gaussian_mechanism(
        event.sigma,
        value_discretization_interval=h,
        sampling_prob=event.q,
        neighboring_relation=relation,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,
    ).self_compose(event.steps)


@pytest.mark.parametrize(
    ("event", "h"),
    [
        (Event(sigma=4.31, q=0.0128, steps=7812), 1e-4),
        (Event(sigma=1.0, q=0.01, steps=1000), 3e-4),
        (Event(sigma=0.6, q=0.05, steps=50), 2e-3),
        (Event(sigma=2.0, q=0.5, steps=20), 1e-3),
    ],
)
def test_agrees_with_dp_accounting(event: Event, h: float) -> None:
    for adjacency, relation in (
        (Adjacency.ADD_REMOVE, NeighboringRelation.ADD_OR_REMOVE_ONE),
        (Adjacency.REPLACE_ONE, NeighboringRelation.REPLACE_ONE),
    ):
        ours = find_accountant("pld").epsilon([event], 1e-5, adjacency)
        theirs = in_library(event, h, relation).get_epsilon_for_delta(1e-5)
        assert ours == pytest.approx(theirs, rel=5e-4)


@settings(max_examples=10, deadline=None)
@given(
    st.builds(Event, sigma=st.floats(0.6, 6), q=st.floats(0.002, 0.9), steps=st.integers(1, 300)),
    st.sampled_from([1e-3, 1e-5, 1e-7]),
)
def test_never_below_the_optimistic_estimate_of_both_directions(event: Event, delta: float) -> None:
    optimistic = in_library(event, 2e-3, NeighboringRelation.ADD_OR_REMOVE_ONE, pessimistic=False)
    assert find_accountant("pld").epsilon([event], delta) >= optimistic.get_epsilon_for_delta(delta)


def test_mixed_schedule_against_library_composition() -> None:
    parts = [Event(sigma=1.2, q=0.02, steps=300), Event(sigma=3.0, q=0.3, steps=20), Event(sigma=9.0, q=1.0, steps=4)]
    composed = in_library(parts[0], 5e-4, NeighboringRelation.ADD_OR_REMOVE_ONE)
    for part in parts[1:]:
        composed = composed.compose(in_library(part, 5e-4, NeighboringRelation.ADD_OR_REMOVE_ONE))
    assert find_accountant("pld").epsilon(parts, 1e-5) == pytest.approx(composed.get_epsilon_for_delta(1e-5), rel=1e-3)


@pytest.mark.parametrize("mu", [0.3, 3.0])
@pytest.mark.parametrize("steps", [1, 100, 10_000])
def test_composition_against_the_exact_gaussian(mu: float, steps: int) -> None:
    """At q = 1 the sum is known exactly: the transform may err upwards by its grid, never downwards."""
    event = Event(sigma=math.sqrt(steps) / mu, q=1.0, steps=steps)
    h = event.mu / 29
    low, high = pld.loss_range(1.0, event.mu, Direction.REMOVE, 1e-15 / steps)
    step = pld._step_losses(event, h, Direction.REMOVE, low, high)
    composed = pld._compose([step], h, *pld._window([step]))
    for delta in (1e-3, 1e-5, 1e-8, 1e-10, 1e-12):
        exact = gaussian_rdp.epsilon_of_mu(mu, delta)
        assert composed.delta(exact) >= delta * (1 - 1e-9)
        assert composed.epsilon(delta) >= exact * (1 - 1e-9)
        if delta >= 1e-10:
            assert composed.epsilon(delta) == pytest.approx(exact, rel=2e-3)
    assert find_accountant("pld").epsilon([event], 1e-5) == pytest.approx(
        gaussian_rdp.epsilon_of_mu(mu, 1e-5), rel=1e-9
    )


def prv(event: Event, delta: float) -> tuple[float, float, float]:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=event.sigma, sampling_probability=event.q)
        oracle = PRVAccountant(mechanism, max_self_compositions=event.steps, eps_error=0.01, delta_error=delta / 1000)
        low, middle, high = oracle.compute_epsilon(delta, event.steps)
    return float(low), float(middle), float(high)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Event(sigma=1.0, q=0.01, steps=200), 1e-3),
        (Event(sigma=4.31, q=0.0128, steps=7812), 5e-4),
        (Event(sigma=0.7, q=0.02, steps=300), 5e-4),
    ],
)
def test_within_the_limits_of_prv(event: Event, error: float) -> None:
    low, middle, high = prv(event, 1e-5)
    ours = find_accountant("pld").epsilon([event], 1e-5)
    assert low <= ours <= high
    assert ours == pytest.approx(middle, rel=error)


@pytest.mark.slow
def test_below_the_upper_estimate_of_opacus_prv() -> None:
    accountants = pytest.importorskip("opacus.accountants", reason="opacus comes with the bench extra")
    oracle = accountants.PRVAccountant()
    oracle.history = [(4.31, 0.0128, 7812)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upper = oracle.get_epsilon(1e-5, eps_error=0.01, delta_error=1e-8)  # it reports the upper end
    ours = find_accountant("pld").epsilon([Event(sigma=4.31, q=0.0128, steps=7812)], 1e-5)
    assert upper - 0.021 <= ours <= upper


EXTREME = [
    (0.3, 1.0, 10**6),
    (0.3, 0.01, 10**6),
    (0.01, 0.5, 10**6),
    (1e-5, 0.5, 10),
    (1e-200, 0.5, 10),
    (1e-310, 0.5, 1),
    (1e-310, 1.0, 1),
    (1.0, 0.01, 10**9),
    (1e6, 1e-3, 10**9),
    (1e200, 0.5, 10),
    (50.0, 1e-9, 10**6),
    (0.7, 1e-6, 1000),
    (1.0, 1e-200, 10**6),
    (1.0, 1 - 1e-12, 10),
    (5e-324, 5e-324, 1),
]


@pytest.mark.parametrize(("sigma", "q", "steps"), EXTREME)
@pytest.mark.parametrize("delta", [1e-5, 1e-14])
def test_extremes_give_a_safe_number_in_bounded_time(sigma: float, q: float, steps: int, delta: float) -> None:
    schedule = [Event(sigma=sigma, q=q, steps=steps)]
    begun = time.process_time()
    costs = [find_accountant("pld").epsilon(schedule, delta, adjacency) for adjacency in Adjacency]
    assert time.process_time() - begun < 20
    assert all(cost >= 0 for cost in costs)  # also: not NaN
    assert costs[0] <= costs[1] * (1 + 1e-3) + 1e-9
    # A lower bound that needs no accountant: the loss a single step shows with probability well above δ.
    if delta == 1e-5 and 1e-3 <= q < 1 and sigma < 1e3 and sigma > 1e-150:
        z = 1 / sigma  # P[upper ≥ z] ≥ q/2
        seen = float(pld.log_ratio(z, q, 1 / sigma)) if sigma > 1e-3 else 0.0
        assert costs[0] >= seen + math.log(1 - 4 * delta / q)


def test_small_delta_is_not_swallowed_by_rounding() -> None:
    schedule = [Event(sigma=4.31, q=0.0128, steps=7812)]
    costs = [
        find_accountant("pld").epsilon(schedule, delta) for delta in (1e-5, 1e-8, 1e-11, 1e-12, 1e-13, 1e-20, 1e-60)
    ]
    assert costs == sorted(costs)
    assert all(
        cost <= find_accountant("rdp").epsilon(schedule, d) for cost, d in zip(costs, (1e-5, 1e-8), strict=False)
    )
    assert costs[-1] == find_accountant("rdp").epsilon(schedule, 1e-60)


def test_replace_one_figures() -> None:
    schedule = [Event(sigma=2.0, q=1.0, steps=5)]
    double = [Event(sigma=1.0, q=1.0, steps=5)]
    for name in ("pld", "gaussian", "zcdp"):
        asked = find_accountant(name)
        assert asked.epsilon(schedule, 1e-5, Adjacency.REPLACE_ONE) == pytest.approx(asked.epsilon(double, 1e-5))
