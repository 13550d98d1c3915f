"""Privacy loss distributions: the tightest accountant, pessimistic by construction.

One step's loss is put on a grid of spacing h by "connect the dots" (Doroshenko et al. 2022, from
dp-accounting): the discrete loss dominates the true one. A whole schedule is then one product of Fourier
transforms, Π_e F_e^steps_e, on a window whose outside is bounded by Chernoff and counted as infinite loss.
ε is the larger of both directions.

Rounding to the grid adds a variance of about h²/6 per step, so h = (rms loss)/29 costs 1e-4 of ε. When that
grid would be too long it is coarsened, which is still pessimistic; RDP and the unamplified Gaussian bound
the result too, and the smallest of the valid bounds is returned. That is also the answer when δ is so small
that the transform's rounding, counted as `_noise`, drowns it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from lamina.account import gaussian, rdp, sampled
from lamina.account.event import Adjacency, Event, Schedule
from lamina.account.gaussian import Array
from lamina.account.sampled import Direction

_FINENESS = 29.0  # grid points per standard deviation of one step's loss
_LONGEST_STEP = 2**17  # grid points of one step
_LONGEST_SUM = 2**20  # grid points of the composition
_SMALLEST_MU, _LARGEST_MU, _SMALLEST_Q = 1e-60, 1e5, 1e-60  # what doubles can tabulate
_COARSEST = 50.0  # spacing beyond which a grid says nothing that RDP does not
_OUTSIDE = 1e-15  # probability that may leave the window; counted as infinite loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The composed loss: P[loss = (first + i)·h] = probabilities[i], P[loss = inf] ≤ infinite."""

    h: float
    first: int
    probabilities: Array
    infinite: float

    def delta(self, epsilon: float) -> float:
        """δ(ε) = P[inf] + Σ_{loss > ε} p·(1 - e^(ε-loss)), rounding of the transform included."""
        upper, lower = self._tail(math.floor(epsilon / self.h) - self.first + 1, epsilon)
        return min(1.0, self.infinite + max(0.0, upper - lower))

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ delta, or inf."""
        if self.infinite >= delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = max(0, self.first) - 1, self.first + len(self.probabilities)
        while high - low > 1:  # δ is above delta at low·h (or low < 0), at most delta at high·h
            middle = (low + high) // 2
            if self.delta(max(0, middle) * self.h) <= delta:
                high = middle
            else:
                low = middle
        # Within a cell δ(ε) = infinite + upper - e^(ε - high·h)·lower, the point `high` included in the sums.
        upper, lower = self._tail(high - self.first, high * self.h)
        if lower <= 0:
            return max(0.0, high * self.h)
        inside = high * self.h + math.log(max((self.infinite + upper - delta) / lower, 1e-300))
        return max(0.0, (high - 1) * self.h, min(high * self.h, inside))

    def _tail(self, start: int, epsilon: float) -> tuple[float, float]:
        start = max(0, start)
        p = self.probabilities[start:]
        losses = (self.first + start + np.arange(len(p))) * self.h
        return float(p.sum()), _dot(p, np.exp(np.clip(epsilon - losses, -600.0, 700.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """`count` equal steps. One of them: P[loss = (centre + offsets[i])·h] = probabilities[i]."""

    count: int
    centre: int  # near the mean: the phases that matter stay small and keep their digits
    offsets: npt.NDArray[np.int64]
    probabilities: Array
    infinite: float


@lru_cache(maxsize=256)
def _step(event: Event, h: float, direction: Direction, low: float, high: float) -> _Step:
    from dp_accounting.pld import pld_pmf  # a second to import: only who prices by it waits

    first, last = math.floor(low / h), math.ceil(high / h)
    curve = sampled.curve(np.arange(first, last + 1, dtype=np.float64) * h, event.q, event.mu, direction)
    deltas = np.minimum.accumulate(curve)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(h, first, last, deltas).to_dense_pmf()
    p = np.asarray(pmf._probs, dtype=np.float64)
    mean = round(_dot(p, np.arange(len(p), dtype=np.float64)) / float(p.sum()))
    return _Step(
        count=event.steps,
        centre=first + mean,
        offsets=np.arange(len(p), dtype=np.int64) - mean,
        probabilities=p,
        infinite=float(deltas[-1]),
    )


def _grid(parts: Schedule, ranges: tuple[tuple[float, float], ...], direction: Direction) -> float:
    """The spacing: fine enough for 1e-4 of ε, coarse enough to be fast; a power of √2, to be reused."""
    steps = sum(event.steps for event in parts)
    variance = math.fsum(e.steps * sampled.loss_variance(e.q, e.mu, direction) for e in parts)
    widest = max(max(high - low, abs(low), abs(high)) for low, high in ranges)
    fine = math.sqrt(variance / steps) / _FINENESS
    coarse = max(widest / _LONGEST_STEP, 20.0 * math.sqrt(variance) / _LONGEST_SUM)
    halves = math.floor(2 * math.log2(fine)) if fine > coarse else math.ceil(2 * math.log2(coarse))
    return math.exp2(halves / 2)


@lru_cache(maxsize=128)
def losses(parts: Schedule, direction: Direction) -> Losses | None:
    """The composed loss of a grouped schedule, or None where no grid of bearable length holds it."""
    parts = _merge_unsampled(parts)
    if not all(_SMALLEST_MU < event.mu < _LARGEST_MU and event.q > _SMALLEST_Q for event in parts):
        return None
    outside = _OUTSIDE / sum(event.steps for event in parts)
    ranges = tuple(sampled.loss_range(event.q, event.mu, direction, outside) for event in parts)
    h = _grid(parts, ranges, direction)
    while h <= _COARSEST:
        steps = [_step(event, h, direction, *bounds) for event, bounds in zip(parts, ranges, strict=True)]
        low, high = _window(steps)
        if high - low < _LONGEST_SUM:
            return _compose(steps, h, low, high)
        h *= 2.0
    return None


def _merge_unsampled(parts: Schedule) -> Schedule:
    """All steps with q = 1 are one Gaussian step with the root of the summed squares."""
    plain = tuple(event for event in parts if event.q == 1)
    if not plain:
        return parts
    mu = math.sqrt(gaussian.squared_mu(plain))
    return (*(e for e in parts if e.q < 1), Event(sigma=1.0 / mu, q=1.0, steps=1))


def _compose(steps: list[_Step], h: float, low: int, high: int) -> Losses:
    size = scipy.fft.next_fast_len(high - low + 1, real=True)
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    for step in steps:
        folded = np.bincount(step.offsets % size, weights=step.probabilities, minlength=size)
        product *= scipy.fft.rfft(folded) ** step.count
    composed = np.roll(scipy.fft.irfft(product, size), -(low % size))[: high - low + 1]
    infinite = -math.expm1(math.fsum(step.count * math.log1p(-step.infinite) for step in steps))
    return Losses(
        h=h,
        first=sum(step.count * step.centre for step in steps) + low,
        probabilities=np.maximum(composed, 0.0),
        infinite=infinite + _OUTSIDE + _noise(sum(step.count for step in steps)),
    )


def _window(steps: list[_Step]) -> tuple[int, int]:
    """Bounds, relative to the centres, that the sum leaves with probability ≤ _OUTSIDE (Chernoff)."""
    low = sum(step.count * int(step.offsets[0]) for step in steps)
    high = sum(step.count * int(step.offsets[-1]) for step in steps)
    variance = sum(
        step.count * _dot(step.probabilities, step.offsets.astype(np.float64) ** 2) for step in steps
    )
    surprise = math.log(2.0 / _OUTSIDE)
    for exponent in range(-10, 4):
        rate = 2.0**exponent * math.sqrt(2.0 * surprise / max(variance, 1e-9))
        high = min(high, _ceil((_log_growth(steps, rate) + surprise) / rate, high))
        low = max(low, -_ceil((_log_growth(steps, -rate) + surprise) / rate, -low))
    return min(low, high), high


def _log_growth(steps: list[_Step], rate: float) -> float:
    """log E[exp(rate · sum)], with the infinite part left out."""
    total = 0.0
    for step in steps:
        top = rate * float(step.offsets[-1] if rate > 0 else step.offsets[0])
        grown = np.exp(np.maximum(rate * step.offsets - top, -600.0))  # denormals would be slow
        share = _dot(step.probabilities, grown)
        total += step.count * (top + math.log(share)) if share > 0 else math.inf
    return total


def _dot(p: Array, x: Array) -> float:
    """Σ p·x without BLAS, whose threads cost more than they save at this size."""
    return float((p * x).sum())


def _ceil(value: float, otherwise: int) -> int:
    return math.ceil(value) if math.isfinite(value) else otherwise


def _noise(steps: int) -> float:
    """What the rounding of the transforms may hide, as probability."""
    return 1e-14 + 1e-16 * steps


def _directions(adjacency: Adjacency) -> tuple[Direction, ...]:
    if adjacency is Adjacency.ADD_REMOVE:
        return (Direction.REMOVE, Direction.ADD)
    return (Direction.REPLACE,)


def epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification; the larger of both directions."""
    bound = gaussian.epsilon(schedule, delta, adjacency)
    if delta == 0 or all(event.q == 1 for event in schedule):
        return bound
    if adjacency is Adjacency.ADD_REMOVE:
        bound = min(bound, rdp.epsilon(schedule, delta, adjacency))
    composed = [losses(schedule, direction) for direction in _directions(adjacency)]
    found = max(math.inf if each is None else each.epsilon(delta) for each in composed)
    return min(bound, found)


def delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification; the larger of both directions."""
    bound = gaussian.delta(schedule, epsilon, adjacency)
    if math.isinf(epsilon) or all(event.q == 1 for event in schedule):
        return bound
    if adjacency is Adjacency.ADD_REMOVE:
        bound = min(bound, rdp.delta(schedule, epsilon, adjacency))
    composed = [losses(schedule, direction) for direction in _directions(adjacency)]
    found = max(1.0 if each is None else each.delta(epsilon) for each in composed)
    return min(bound, found)
