"""Privacy loss distributions of Poisson-subsampled Gaussian steps: the tightest accountant."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lamina.account import gaussian_rdp
from lamina.account.gaussian_rdp import Array, hockey_stick
from lamina.account.schedule import Adjacency, Event, Schedule, bisect_int

# One step's loss is put on a grid of spacing h by "connect the dots" (Doroshenko et al. 2022, from
# dp-accounting): the discrete loss dominates the true one. A whole schedule is then one product of Fourier
# transforms, Π_e F_e^steps_e, on a window whose outside is bounded by Chernoff and counted as infinite loss.
# ε is the larger of both directions.
#
# Rounding to the grid adds a variance of about h²/6 per step, so h = (rms loss)/29 costs 1e-4 of ε. When that
# grid would be too long it is coarsened, which is still pessimistic; RDP and the unamplified Gaussian bound
# the result too, and the smallest of the valid bounds is returned. That is also the answer when δ is so small
# that the transform's rounding, counted as `_noise`, drowns it.

_FINENESS = 29.0  # grid points per standard deviation of one step's loss
_MAX_STEP_POINTS = 2**17  # grid points of one step
_MAX_SUM_POINTS = 2**20  # grid points of the composition
_SMALLEST_MU, _LARGEST_MU, _SMALLEST_Q = 1e-60, 1e5, 1e-60  # what doubles can tabulate
_COARSEST = 50.0  # spacing beyond which a grid says nothing that RDP does not
_TAIL_PROBABILITY = 1e-15  # probability that may leave the window; counted as infinite loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyLossDistribution:
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
        # δ is above delta at (max(0, first) - 1)·h, or that is below 0; it is at most delta at the last point
        start, stop = max(0, self.first) - 1, self.first + len(self.probabilities)
        _, high = bisect_int(lambda point: self.delta(max(0, point) * self.h) <= delta, start, stop)
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
class _StepLosses:
    """`count` equal steps. One of them: P[loss = (centre + offsets[i])·h] = probabilities[i]."""

    count: int
    centre: int  # near the mean: the phases that matter stay small and keep their digits
    offsets: npt.NDArray[np.int64]
    probabilities: Array
    infinite: float


@lru_cache(maxsize=256)
def _step_losses(event: Event, h: float, direction: Direction, low: float, high: float) -> _StepLosses:
    from dp_accounting.pld import pld_pmf  # a second to import: only who prices by it waits

    first, last = math.floor(low / h), math.ceil(high / h)
    curve = step_hockey_stick(np.arange(first, last + 1, dtype=np.float64) * h, event.q, event.mu, direction)
    deltas = np.minimum.accumulate(curve)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(h, first, last, deltas).to_dense_pmf()
    p = np.asarray(pmf._probs, dtype=np.float64)
    mean = round(_dot(p, np.arange(len(p), dtype=np.float64)) / float(p.sum()))
    return _StepLosses(
        count=event.steps,
        centre=first + mean,
        offsets=np.arange(len(p), dtype=np.int64) - mean,
        probabilities=p,
        infinite=float(deltas[-1]),
    )


def _grid_spacing(parts: Schedule, ranges: tuple[tuple[float, float], ...], direction: Direction) -> float:
    """The spacing: fine enough for 1e-4 of ε, coarse enough to be fast; a power of √2, to be reused."""
    steps = sum(event.steps for event in parts)
    variance = math.fsum(e.steps * loss_variance(e.q, e.mu, direction) for e in parts)
    widest = max(max(high - low, abs(low), abs(high)) for low, high in ranges)
    fine = math.sqrt(variance / steps) / _FINENESS
    coarse = max(widest / _MAX_STEP_POINTS, 20.0 * math.sqrt(variance) / _MAX_SUM_POINTS)
    halves = math.floor(2 * math.log2(fine)) if fine > coarse else math.ceil(2 * math.log2(coarse))
    return math.exp2(halves / 2)


@lru_cache(maxsize=128)
def compose_losses(parts: Schedule, direction: Direction) -> PrivacyLossDistribution | None:
    """The composed loss of a grouped schedule, or None where no grid of bearable length holds it."""
    parts = _merge_unsampled(parts)
    if not all(_SMALLEST_MU < event.mu < _LARGEST_MU and event.q > _SMALLEST_Q for event in parts):
        return None
    outside = _TAIL_PROBABILITY / sum(event.steps for event in parts)
    ranges = tuple(loss_range(event.q, event.mu, direction, outside) for event in parts)
    h = _grid_spacing(parts, ranges, direction)
    while h <= _COARSEST:
        steps = [_step_losses(event, h, direction, *bounds) for event, bounds in zip(parts, ranges, strict=True)]
        low, high = _window(steps)
        if high - low < _MAX_SUM_POINTS:
            return _compose(steps, h, low, high)
        h *= 2.0
    return None


def _merge_unsampled(parts: Schedule) -> Schedule:
    """All steps with q = 1 are one Gaussian step with the root of the summed squares."""
    plain = tuple(event for event in parts if event.q == 1)
    if not plain:
        return parts
    mu = math.sqrt(gaussian_rdp.squared_mu(plain))
    return (*(e for e in parts if e.q < 1), Event(sigma=1.0 / mu, q=1.0, steps=1))


def _compose(steps: list[_StepLosses], h: float, low: int, high: int) -> PrivacyLossDistribution:
    from scipy import fft

    size = fft.next_fast_len(high - low + 1, real=True)
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    for step in steps:
        folded = np.bincount(step.offsets % size, weights=step.probabilities, minlength=size)
        product *= fft.rfft(folded) ** step.count
    composed = np.roll(fft.irfft(product, size), -(low % size))[: high - low + 1]
    infinite = -math.expm1(math.fsum(step.count * math.log1p(-step.infinite) for step in steps))
    return PrivacyLossDistribution(
        h=h,
        first=sum(step.count * step.centre for step in steps) + low,
        probabilities=np.maximum(composed, 0.0),
        infinite=infinite + _TAIL_PROBABILITY + _transform_rounding(sum(step.count for step in steps)),
    )


def _window(steps: list[_StepLosses]) -> tuple[int, int]:
    """Bounds, relative to the centres, that the sum leaves with probability ≤ _OUTSIDE (Chernoff)."""
    low = sum(step.count * int(step.offsets[0]) for step in steps)
    high = sum(step.count * int(step.offsets[-1]) for step in steps)
    variance = sum(step.count * _dot(step.probabilities, step.offsets.astype(np.float64) ** 2) for step in steps)
    surprise = math.log(2.0 / _TAIL_PROBABILITY)
    for exponent in range(-10, 4):
        rate = 2.0**exponent * math.sqrt(2.0 * surprise / max(variance, 1e-9))
        high = min(high, _ceil_or((_log_mgf(steps, rate) + surprise) / rate, high))
        low = max(low, -_ceil_or((_log_mgf(steps, -rate) + surprise) / rate, -low))
    return min(low, high), high


def _log_mgf(steps: list[_StepLosses], rate: float) -> float:
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


def _ceil_or(value: float, otherwise: int) -> int:
    return math.ceil(value) if math.isfinite(value) else otherwise


def _transform_rounding(steps: int) -> float:
    """What the rounding of the transforms may hide, as probability."""
    return 1e-14 + 1e-16 * steps


def directions(adjacency: Adjacency) -> tuple[Direction, ...]:
    if adjacency is Adjacency.ADD_REMOVE:
        return (Direction.REMOVE, Direction.ADD)
    return (Direction.REPLACE,)


def pld_epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification; the larger of both directions."""
    bound = gaussian_rdp.gaussian_epsilon(schedule, delta, adjacency)
    if delta == 0 or all(event.q == 1 for event in schedule):
        return bound
    if adjacency is Adjacency.ADD_REMOVE:
        bound = min(bound, gaussian_rdp.rdp_epsilon(schedule, delta, adjacency))
    composed = [compose_losses(schedule, direction) for direction in directions(adjacency)]
    found = max(math.inf if each is None else each.epsilon(delta) for each in composed)
    return min(bound, found)


def pld_delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification; the larger of both directions."""
    bound = gaussian_rdp.gaussian_delta(schedule, epsilon, adjacency)
    if math.isinf(epsilon) or all(event.q == 1 for event in schedule):
        return bound
    if adjacency is Adjacency.ADD_REMOVE:
        bound = min(bound, gaussian_rdp.rdp_delta(schedule, epsilon, adjacency))
    composed = [compose_losses(schedule, direction) for direction in directions(adjacency)]
    found = max(1.0 if each is None else each.delta(epsilon) for each in composed)
    return min(bound, found)


# Hockey-stick curves δ(ε) of one Poisson-subsampled Gaussian step, per direction, without cancellation.
#
# In units of the noise let Q = N(0,1), P± = N(±μ,1), μ = 1/sigma, and mix± = (1-q)Q + qP±.
#
#     REMOVE   δ(ε) = H(mix+ ‖ Q)      = q · g(ε'),            e^ε' = 1 + (e^ε - 1)/q
#     ADD      δ(ε) = H(Q ‖ mix+)      = a · g(ε''),           a = 1 - (1-q)e^ε,  e^ε'' = q e^ε / a
#     REPLACE  δ(ε) = H(mix- ‖ mix+)   cut at the z where the likelihood ratio is e^ε
#
# with g the curve of the plain Gaussian (`gaussian.hockey_stick`). The factor q stands in front, so the
# rounding error is 1e-16·q rather than 1e-16: that is what lets a fine grid be used when q/sigma is tiny.

_TAIL_Z = 10.0  # Φ(-10) = 8e-24; used where the loss is flat, so that reaching far costs nothing


class Direction(enum.Enum):
    """The ordered pair of output distributions that is told apart."""

    REMOVE = "remove"
    ADD = "add"
    REPLACE = "replace"


def log_ratio(z: Array | float, q: float, mu: float) -> Array:
    """log of mix+ over Q at z: log(1-q + q·exp(μz - μ²/2))."""
    shift = mu * np.asarray(z, dtype=np.float64) - 0.5 * mu * mu
    if q == 1:
        return shift
    small = np.log1p(q * np.expm1(np.minimum(shift, 1.0)))
    large = np.logaddexp(math.log1p(-q), math.log(q) + shift)
    return np.where(shift < 1.0, small, large)


def loss_range(q: float, mu: float, direction: Direction, outside: float) -> tuple[float, float]:
    """Losses between which one step stays, except above with probability ≤ outside (and below: harmless).

    Q exceeds z with probability Φ(-z), the sampled part with q·Φ(μ-z).
    """
    from scipy.special import ndtri

    reach = float(max(-ndtri(outside / 2), mu - ndtri(min(0.5, outside / (2 * q)))))
    low, high = (float(x) for x in log_ratio(np.array([-_TAIL_Z, reach]), q, mu))
    if direction is Direction.REMOVE:
        return low, high
    if direction is Direction.ADD:
        return -high, -low
    mirrored = float(log_ratio(-reach, q, mu))
    return mirrored - high, high - mirrored


def loss_variance(q: float, mu: float, direction: Direction) -> float:
    """The variance of the privacy loss of one step, by quadrature on 4001 points: to choose a grid."""
    edge = _TAIL_Z + mu
    z = np.linspace(-edge, edge, 4001)
    base, shifted = np.exp(-0.5 * z * z), np.exp(-0.5 * (z - mu) ** 2)
    loss = log_ratio(z, q, mu)
    weight = base if direction is Direction.ADD else (1 - q) * base + q * shifted
    if direction is Direction.REPLACE:
        loss = loss - log_ratio(-z, q, mu)
    weight = weight / weight.sum()
    mean = float((weight * loss).sum())
    return float((weight * (loss - mean) ** 2).sum())


def step_hockey_stick(epsilon: Array, q: float, mu: float, direction: Direction) -> Array:
    """δ(ε) of one step for an array of ε of any sign."""
    if direction is Direction.REMOVE:
        return _hockey_stick_remove(epsilon, q, mu)
    if direction is Direction.ADD:
        return _hockey_stick_add(epsilon, q, mu)
    return _hockey_stick_replace(epsilon, q, mu)


def _hockey_stick_remove(epsilon: Array, q: float, mu: float) -> Array:
    if q == 1:
        return hockey_stick(epsilon, mu)
    excess = np.expm1(np.minimum(epsilon, 1.0))
    inside = excess > -q
    # log1p(excess/q) without overflow for large ε
    large = np.log(1 - (1 - q) * np.exp(-np.maximum(epsilon, 1.0))) + np.maximum(epsilon, 1.0) - math.log(q)
    moderate = np.log1p(np.where(inside & (epsilon < 1.0), excess, 0.0) / q)
    plain = np.where(epsilon < 1.0, moderate, large)
    return np.where(inside, q * hockey_stick(plain, mu), np.clip(-excess, 0.0, 1.0))


def _hockey_stick_add(epsilon: Array, q: float, mu: float) -> Array:
    if q == 1:
        return hockey_stick(epsilon, mu)
    capped = np.minimum(epsilon, 1.0 - math.log1p(-q))  # beyond -log(1-q) the divergence is 0
    factor = q * np.exp(capped) - np.expm1(capped)
    inside = factor > 0
    safe = np.where(inside, factor, 1.0)
    plain = capped + math.log(q) - np.log(safe)
    return np.where(inside, safe * hockey_stick(plain, mu), 0.0)


def _hockey_stick_replace(epsilon: Array, q: float, mu: float) -> Array:
    if q == 1:
        return hockey_stick(epsilon, 2.0 * mu)
    from scipy import special

    half = 0.5 * np.abs(epsilon)
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0)
    t = log_sinh + 0.5 * mu * mu + math.log1p(-q) - math.log(q)
    asinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2.0 * t), t)
    z = -(np.sign(epsilon) * (asinh + half)) / mu
    scale = np.minimum(epsilon, 700.0)
    kept = -np.expm1(scale) * special.ndtr(z) * (1 - q)
    moved = special.ndtr(z + mu) - np.exp(np.minimum(epsilon + special.log_ndtr(z - mu), 0.0))
    return np.asarray(np.clip(kept + q * moved, 0.0, 1.0))
