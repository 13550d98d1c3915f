"""The optimal noise, against a general solver and against its own certificate."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from lamina.allocate.basic import pareto
from lamina.allocate.problem import AllocationProblem, least_noise
from lamina.plan.rules import rescale_noise

Array = NDArray[np.float64]


def instance(seed: int, classes: int, layers: int, spread: float = 1.0) -> tuple[Array, Array, Array]:
    """Random C with holes, m and sigma; every layer reached by someone, every class reaching something."""
    rng = np.random.default_rng(seed)
    clip = rng.lognormal(0, spread, (classes, layers)) * (rng.random((classes, layers)) < 0.6)
    clip[rng.integers(classes, size=layers), np.arange(layers)] = 1.0
    clip[np.arange(classes), rng.integers(layers, size=classes)] = 1.0
    return clip, rng.lognormal(3, spread, layers), rng.lognormal(0.5, 0.5, classes)


def general_solver(clip: Array, weights: Array, sigma: Array) -> float:
    """The least Σ m S² by SLSQP in log x, started again from where it stopped until nothing is gained."""
    a = np.square(clip * sigma[:, None])
    x = 1.0 / a.max(0)
    best = np.inf
    for _ in range(8):
        x = x / (a @ x).max()  # feasible, to rounding
        cost = float((weights / x).sum())
        if cost >= best * (1 - 1e-13):
            break
        best = cost
        m, unit = weights / x / cost, a * x
        with np.errstate(over="ignore", invalid="ignore"):  # its line search may leap; only the end counts
            result = minimize(
                lambda y, m=m: float(np.sum(m * np.exp(-y))),
                np.zeros(len(x)),
                jac=lambda y, m=m: -m * np.exp(-y),
                constraints={
                    "type": "ineq",
                    "fun": lambda y, unit=unit: 1 - unit @ np.exp(y),
                    "jac": lambda y, unit=unit: -unit * np.exp(y),
                },
                method="SLSQP",
                options={"maxiter": 500, "ftol": 1e-16},
            )
        x = x * np.exp(result.x)
    return best


@pytest.mark.parametrize(("classes", "layers"), [(1, 5), (1, 12), (2, 4), (2, 8), (3, 8), (4, 10), (5, 6), (5, 12)])
def test_optimum_agrees_with_a_general_solver(classes: int, layers: int) -> None:
    """25 instances of each shape, 200 in all."""
    for seed in range(25):
        clip, weights, sigma = instance(seed, classes, layers)
        found = least_noise(clip, weights, sigma)
        cost = float((weights * found.noise**2).sum())
        assert cost == pytest.approx(general_solver(clip, weights, sigma), rel=1e-9)


def test_pareto_is_that_optimum(problem: Callable[..., AllocationProblem]) -> None:
    """The policy itself, public class and unreached layers included."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        asked = problem(clip_norm=(*rng.lognormal(0, 1, 2), 1.0), sigma=(*rng.lognormal(0, 1, 2), np.inf))
        given = pareto(asked)
        best = general_solver(np.array(given.clip)[:2, :3], np.array(asked.weights[:3]), np.array(asked.sigma[:2]))
        noise = rescale_noise(given.clip, given.noise, asked.sigma)
        assert float((np.array(asked.weights) * np.square(noise)).sum()) == pytest.approx(best, rel=1e-9)


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 60), st.sampled_from([0.1, 1.0, 3.0]))
@settings(max_examples=150, deadline=None)
def test_conditions_of_optimality(seed: int, classes: int, layers: int, spread: float) -> None:
    """Feasible, complementary, stationary: sufficient for the optimum of a convex program."""
    clip, weights, sigma = instance(seed, classes, layers, spread)
    found = least_noise(clip, weights, sigma)
    a, x = np.square(clip * sigma[:, None]), found.noise**-2.0
    used = a @ x
    assert used.max() <= 1 + 1e-12
    assert found.price.min() >= 0
    assert (found.price @ (1 - used)) / found.price.sum() <= 1e-9
    np.testing.assert_allclose(weights / x**2, a.T @ found.price, rtol=1e-6)
    assert found.gap <= 1e-10


@given(st.integers(0, 2**32), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_one_class_is_the_closed_form(seed: int, layers: int) -> None:
    clip, m, sigma = instance(seed, 1, layers)
    c, root = clip[0], np.sqrt(m)
    expected = sigma[0] ** 2 * c / root * (c * root).sum()
    np.testing.assert_allclose(least_noise(clip, m, sigma).noise ** 2, expected, rtol=1e-12)


def test_equal_and_redundant_classes_do_no_harm() -> None:
    clip, m, sigma = instance(1, 1, 6)
    alone = least_noise(clip, m, sigma).noise
    twice = least_noise(np.vstack([clip, clip]), m, np.repeat(sigma, 2)).noise
    slack = least_noise(np.vstack([clip, clip]), m, np.array([sigma[0], sigma[0] / 10])).noise
    np.testing.assert_allclose(twice, alone, rtol=1e-8)
    np.testing.assert_allclose(slack, alone, rtol=1e-8)


def test_nested_bands_spend_where_the_stricter_class_is_not() -> None:
    """Class 0 reaches all of 4 layers, class 1 the last two with more noise owed: they get more noise."""
    clip = np.array([[1.0, 1, 1, 1], [0, 0, 1, 1]])
    noise = least_noise(clip, np.ones(4), np.array([1.0, 4.0])).noise
    assert noise[0] == pytest.approx(noise[1])
    assert noise[2] == pytest.approx(noise[3])
    assert noise[2] > 2 * noise[0]


def test_a_hundred_layers_and_ten_classes_in_a_moment() -> None:
    clip, m, sigma = instance(0, 10, 100)
    times = []
    for _ in range(5):
        start = time.thread_time()
        least_noise(clip, m, sigma)
        times.append(time.thread_time() - start)
    assert min(times) < 0.05
