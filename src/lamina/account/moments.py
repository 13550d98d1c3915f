"""The moments accountant of Abadi et al. 2016: integer moments and the plain tail bound.

    α(λ) = Σ_t log A_t(λ+1),  λ = 1..64,      ε = min_λ (α(λ) + log 1/δ)/λ,      δ = min_λ exp(α(λ) - λε)

Kept because older reports use it; never below `rdp`, which converts the same moments better.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from lamina.account.event import Adjacency, Schedule
from lamina.account.rdp import _add_remove_only
from lamina.account.renyi import Array, log_moments

LAMBDAS = np.arange(1, 65, dtype=np.float64)


@lru_cache(maxsize=4096)
def _moments(q: float, sigma: float) -> Array:
    result = log_moments(q, sigma, tuple(LAMBDAS + 1.0))
    result.setflags(write=False)
    return result


def curve(schedule: Schedule) -> Array:
    """α(λ) of a grouped schedule."""
    total = np.zeros(len(LAMBDAS))
    for event in schedule:
        total = total + event.steps * _moments(event.q, event.sigma)
    return total


def epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "moments")
    if delta == 0:
        return math.inf
    return float(np.min((curve(schedule) - math.log(delta)) / LAMBDAS))


def delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "moments")
    if math.isinf(epsilon):
        return 0.0
    return math.exp(min(0.0, float(np.min(curve(schedule) - LAMBDAS * epsilon))))
