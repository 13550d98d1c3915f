"""Laplace noise costs at most what Gaussian noise of S = b/√(π/2) costs: against dp-accounting's own Laplace figures."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Event

DELTA = 1e-5


@pytest.mark.parametrize("name", ["pld", "rdp", "rdp-integer", "zcdp", "gaussian"])
@pytest.mark.parametrize(("ratio", "q", "steps"), [(1.0, 1.0, 1), (20.0, 1.0, 100), (3.0, 0.1, 200), (1.5, 0.01, 1000)])
def test_no_figure_is_below_that_of_laplace_noise(name: str, ratio: float, q: float, steps: int) -> None:
    """`ratio` is b over the L1 threshold; the worst shift has all of it in one coordinate."""
    event = dp_accounting.LaplaceDpEvent(ratio)
    peer = PLDAccountant(value_discretization_interval=1e-4)
    peer.compose(event if q == 1 else dp_accounting.PoissonSampledDpEvent(q, event), steps)
    ours = find_accountant(name).epsilon([Event(sigma=ratio / math.sqrt(math.pi / 2), q=q, steps=steps)], DELTA)
    assert ours >= peer.get_epsilon(DELTA) * (1 - 1e-3)


@pytest.mark.parametrize("epsilon", [1e-4, 0.1, 0.7, 2.0, 10.0, 40.0])
def test_the_gaussian_that_dominates_two_answers(epsilon: float) -> None:
    """Φ(μ/2) = 1/(1 + e^-ε) has μ ≤ √(π/2)·ε."""
    mu = -2 * norm.ppf(1 / (1 + math.exp(epsilon)))
    assert 0 < mu <= math.sqrt(math.pi / 2) * epsilon * (1 + 1e-9)
