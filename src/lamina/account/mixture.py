"""Uncapped Poisson sampling when the occurrences become known: the binomial mixture.

A contribution occurs N times, N = Σ_e Binomial(steps_e, q_e), and the pattern is drawn from coins that do
not depend on its content. If the pattern is disclosed beside the outputs it has the same law under both
datasets, so the hockey-stick divergences average:

    δ(ε) = E_N[ δ_Gauss(ε; μ²) ],     μ² = Σ_e N_e/sigma_e²

This is a statement about content (zero-out adjacency: the contribution is there or is replaced by nothing,
with its pattern in both worlds); REPLACE_ONE doubles μ. It says less than T/(2 sigma²), which holds for
every pattern, and more than the mean E[N] alone: calibrating to the mean gives ε 1.017 for a target of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import scipy

from lamina.account.event import (
    Adjacency,
    Event,
    Schedule,
    check_adjacency,
    check_delta,
    check_epsilon,
    grouped,
)
from lamina.account.gaussian import Array, hockey_stick
from lamina.errors import AccountingError

_OUTSIDE = 1e-18  # probability of occurrence counts that are treated as a full disclosure
_POINTS = 2**14  # resolution of μ² when several events are mixed; rounded up
_PAD = 1e-9


def delta(
    schedule: Iterable[Event], epsilon: float, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
) -> float:
    """δ at `epsilon` when the occurrences of the contribution are disclosed."""
    return _delta(grouped(schedule), check_epsilon(epsilon), check_adjacency(adjacency))


def epsilon(
    schedule: Iterable[Event], delta: float, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
) -> float:
    """The smallest ε with δ(ε) ≤ `delta`, rounded up."""
    return _epsilon(grouped(schedule), check_delta(delta), check_adjacency(adjacency))


@lru_cache(maxsize=1024)
def _epsilon(parts: Schedule, delta: float, adjacency: Adjacency) -> float:
    if not parts:
        return 0.0
    if delta <= 2 * _OUTSIDE * len(parts):
        return math.inf
    if _delta(parts, 0.0, adjacency) <= delta:
        return 0.0
    high = 1.0
    while _delta(parts, high, adjacency) > delta:
        high *= 2.0
        if high > 1e300:
            return math.inf
    low = 0.0
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if _delta(parts, middle, adjacency) <= delta:
            high = middle
        else:
            low = middle
    return high


def _delta(parts: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    if not parts or math.isinf(epsilon):
        return 0.0
    squares, weights, lost = _squared_mu(parts)
    scale = 1.0 if adjacency is Adjacency.ADD_REMOVE else 2.0
    positive = squares > 0
    mus = scale * np.sqrt(squares[positive])
    each = hockey_stick(epsilon, mus)
    return min(1.0, float((weights[positive] * each).sum()) * (1 + _PAD) + lost)


@lru_cache(maxsize=64)
def _squared_mu(parts: Schedule) -> tuple[Array, Array, float]:
    """Values of μ², their probabilities, and the probability left out."""
    if len(parts) == 1:
        counts, weights = _occurrences(parts[0])
        return counts * parts[0].mu ** 2, weights, 2 * _OUTSIDE
    if len(parts) > 64:
        raise AccountingError(
            "account.distinct-events-too",
            f"{len(parts)} distinct events are too many for a mixture",
            "coarsen the schedule",
        )
    spread = [_occurrences(event) for event in parts]
    top = sum(float(counts[-1]) * event.mu**2 for event, (counts, _) in zip(parts, spread, strict=True))
    unit = top / _POINTS
    total = np.ones(1)
    for event, (counts, weights) in zip(parts, spread, strict=True):
        total = np.convolve(
            total, np.bincount(np.ceil(counts * event.mu**2 / unit).astype(int), weights=weights)
        )
    return np.arange(len(total), dtype=np.float64) * unit, total, 2 * _OUTSIDE * len(parts)


def _occurrences(event: Event) -> tuple[Array, Array]:
    """Counts and probabilities; what lies below the range is moved up into it."""
    law = scipy.stats.binom(event.steps, event.q)
    low, high = int(law.ppf(_OUTSIDE)), int(law.isf(_OUTSIDE)) + 1
    counts = np.arange(max(0, low), min(event.steps, high) + 1, dtype=np.float64)
    weights = np.asarray(law.pmf(counts), dtype=np.float64)
    weights[0] += float(law.cdf(counts[0] - 1))
    return counts, weights
