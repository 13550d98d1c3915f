"""Hockey-stick curves δ(ε) of one Poisson-subsampled Gaussian step, per direction, without cancellation.

In units of the noise let Q = N(0,1), P± = N(±μ,1), μ = 1/sigma, and mix± = (1-q)Q + qP±.

    REMOVE   δ(ε) = H(mix+ ‖ Q)      = q · g(ε'),            e^ε' = 1 + (e^ε - 1)/q
    ADD      δ(ε) = H(Q ‖ mix+)      = a · g(ε''),           a = 1 - (1-q)e^ε,  e^ε'' = q e^ε / a
    REPLACE  δ(ε) = H(mix- ‖ mix+)   cut at the z where the likelihood ratio is e^ε

with g the curve of the plain Gaussian (`gaussian.hockey_stick`). The factor q stands in front, so the
rounding error is 1e-16·q rather than 1e-16: that is what lets a fine grid be used when q/sigma is tiny.
"""

from __future__ import annotations

import enum
import math

import numpy as np
from scipy import special

from lamina.account.gaussian import Array, hockey_stick

TAIL = 10.0  # Φ(-10) = 8e-24; used where the loss is flat, so that reaching far costs nothing


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
    reach = float(max(-special.ndtri(outside / 2), mu - special.ndtri(min(0.5, outside / (2 * q)))))
    low, high = (float(x) for x in log_ratio(np.array([-TAIL, reach]), q, mu))
    if direction is Direction.REMOVE:
        return low, high
    if direction is Direction.ADD:
        return -high, -low
    mirrored = float(log_ratio(-reach, q, mu))
    return mirrored - high, high - mirrored


def loss_variance(q: float, mu: float, direction: Direction) -> float:
    """The variance of the privacy loss of one step, by quadrature on 4001 points: to choose a grid."""
    edge = TAIL + mu
    z = np.linspace(-edge, edge, 4001)
    base, shifted = np.exp(-0.5 * z * z), np.exp(-0.5 * (z - mu) ** 2)
    loss = log_ratio(z, q, mu)
    weight = base if direction is Direction.ADD else (1 - q) * base + q * shifted
    if direction is Direction.REPLACE:
        loss = loss - log_ratio(-z, q, mu)
    weight = weight / weight.sum()
    mean = float((weight * loss).sum())
    return float((weight * (loss - mean) ** 2).sum())


def curve(epsilon: Array, q: float, mu: float, direction: Direction) -> Array:
    """δ(ε) of one step for an array of ε of any sign."""
    if direction is Direction.REMOVE:
        return _remove(epsilon, q, mu)
    if direction is Direction.ADD:
        return _add(epsilon, q, mu)
    return _replace(epsilon, q, mu)


def _remove(epsilon: Array, q: float, mu: float) -> Array:
    if q == 1:
        return hockey_stick(epsilon, mu)
    excess = np.expm1(np.minimum(epsilon, 1.0))
    inside = excess > -q
    # log1p(excess/q) without overflow for large ε
    large = np.log(1 - (1 - q) * np.exp(-np.maximum(epsilon, 1.0))) + np.maximum(epsilon, 1.0) - math.log(q)
    moderate = np.log1p(np.where(inside & (epsilon < 1.0), excess, 0.0) / q)
    plain = np.where(epsilon < 1.0, moderate, large)
    return np.where(inside, q * hockey_stick(plain, mu), np.clip(-excess, 0.0, 1.0))


def _add(epsilon: Array, q: float, mu: float) -> Array:
    if q == 1:
        return hockey_stick(epsilon, mu)
    capped = np.minimum(epsilon, 1.0 - math.log1p(-q))  # beyond -log(1-q) the divergence is 0
    factor = q * np.exp(capped) - np.expm1(capped)
    inside = factor > 0
    safe = np.where(inside, factor, 1.0)
    plain = capped + math.log(q) - np.log(safe)
    return np.where(inside, safe * hockey_stick(plain, mu), 0.0)


def _replace(epsilon: Array, q: float, mu: float) -> Array:
    if q == 1:
        return hockey_stick(epsilon, 2.0 * mu)
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
