"""The exact cost of Gaussian noise when nothing is credited to sampling.

T steps with multipliers sigma_t, whatever the coins say, are one Gaussian mechanism with

    μ = sqrt( Σ_t sigma_t^-2 ),     δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)          (Balle and Wang 2018)

and both directions are equal. Replacing one contribution by another moves the sum by twice its radius: 2μ.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from lamina.account.event import Adjacency, Schedule

Array = npt.NDArray[np.float64]

_ROOT2 = math.sqrt(2.0)
_PAD = 1e-12  # relative; covers the rounding of Φ and of the sums below
_HUGE_MU = 1e7  # beyond, μ/2 - ε/μ loses its digits; a closed bound is as good


def squared_mu(schedule: Schedule, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """μ² = Σ steps/sigma² (times 4 for replace-one), rounded once, in any order; inf on overflow."""
    try:
        total = math.fsum(event.steps * (event.mu * event.mu) for event in schedule if not event.free)
    except OverflowError:
        return math.inf
    return total if adjacency is Adjacency.ADD_REMOVE else 4.0 * total


def hockey_stick(epsilon: Any, mu: Any) -> Array:
    """δ(ε) of N(μ,1) against N(0,1) for arrays of ε, negative ones included, and of μ > 0.

    With a = μ/2 - ε/μ and b = a - μ, e^ε φ(b) = φ(a); so in the tail (a ≤ 0) the difference is written
    Φ(a)·(1 - m(b)/m(a)) with Mills ratios m = Φ/φ, which keeps its relative precision.
    """
    eps = np.asarray(epsilon, dtype=np.float64)
    a = 0.5 * mu - eps / mu
    b = a - mu
    tail = a <= 0
    a_tail, b_tail = np.where(tail, a, -1.0), np.where(tail, b, -1.0 - mu)
    ratio = special.erfcx(-b_tail / _ROOT2) / special.erfcx(-a_tail / _ROOT2)
    body = special.ndtr(a) - np.exp(np.minimum(eps + special.log_ndtr(b), 0.0))
    return np.asarray(np.clip(np.where(tail, special.ndtr(a) * (1.0 - ratio), body), 0.0, 1.0))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The smallest ε with δ(ε) ≤ delta, rounded up."""
    if mu == 0:
        return 0.0
    if delta == 0 or math.isinf(mu):
        return math.inf
    high = 0.5 * mu * mu + mu * math.sqrt(2.0 * math.log(1.0 / delta))  # from δ(ε) ≤ Φ(a) ≤ exp(-a²/2)
    if mu > _HUGE_MU:
        return high * (1 + _PAD)
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    low = 0.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high or high - low <= _PAD * high:
            break
        if delta_of_mu(mu, middle) <= delta:
            high = middle
        else:
            low = middle
    return high * (1 + _PAD)


def delta_of_mu(mu: float, epsilon: float) -> float:
    """δ(ε), rounded up."""
    if mu == 0:
        return 0.0
    if math.isinf(epsilon):
        return 0.0 if math.isfinite(mu) else 1.0
    if math.isinf(mu) or mu > _HUGE_MU:
        return 1.0
    # 1 - m(b)/m(a) loses 1e-16/μ of relative precision when μ is small
    slack = 1.0 + _PAD + 8e-16 * max(1.0, epsilon) / min(mu, 1.0)
    return min(1.0, float(hockey_stick(epsilon, mu)) * slack)


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest μ with ε(μ, delta) ≤ epsilon, rounded down: the budget of a Gaussian filter."""
    if delta == 0:
        return 0.0
    low, high = 0.0, 1.0
    while high < _HUGE_MU and epsilon_of_mu(high, delta) <= epsilon:
        low, high = high, 2.0 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high or high - low <= _PAD * high:
            break
        if epsilon_of_mu(middle, delta) <= epsilon:
            low = middle
        else:
            high = middle
    return low


def epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule without amplification, exact up to rounding (upwards)."""
    return epsilon_of_mu(math.sqrt(squared_mu(schedule, adjacency)), delta)


def delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule without amplification, exact up to rounding (upwards)."""
    return delta_of_mu(math.sqrt(squared_mu(schedule, adjacency)), epsilon)
