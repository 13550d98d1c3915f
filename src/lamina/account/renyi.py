"""The Rényi divergence of one Poisson-subsampled Gaussian step.

With r(z) = 1-q + q·exp(z/sigma - 1/(2 sigma²)) the likelihood ratio and z ~ N(0,1),

    A(α) = E[r^α],     RDP(α) = log A(α) / (α-1)          the larger direction (Mironov, Talwar, Zhang 2019)

E[r] = 1, so A(α) - 1 is a sum or integral of terms that are all ≥ 0, and nothing cancels however small
q/sigma is:
    integer α     A - 1 = Σ_{i=2..α} binom(α,i) q^i (1-q)^(α-i) (e^{(i²-i)/(2 sigma²)} - 1)
    any α > 1     A - 1 = E[ r^α - 1 - α(r-1) ]           by the trapezoidal rule
log A is convex in α with log A(1) = 0, so where the rule would need too many points a chord bounds it from
above.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]

_FRACTIONAL = tuple(round(1 + x / 20, 2) for x in range(1, 20)) + tuple(
    round(2 + x / 10, 1) for x in range(1, 80) if x % 10
)
_LARGE = (72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768)
ORDERS: tuple[float, ...] = tuple(sorted((*_FRACTIONAL, *map(float, range(2, 66)), *map(float, _LARGE))))

_PAD = 1e-9  # relative; gammaln at order 32768 is good to 1e-10
_QUADRATURE_FROM = 0.1  # smallest sigma for which fractional orders are integrated


@lru_cache(maxsize=4096)
def divergences(q: float, sigma: float) -> Array:
    """RDP of one step at each of ORDERS, rounded up; read-only."""
    orders = np.asarray(ORDERS)
    with np.errstate(over="ignore", divide="ignore"):
        result = log_moments(q, sigma, ORDERS) / (orders - 1.0)
    result.setflags(write=False)
    return result


@lru_cache(maxsize=65536)
def divergence(q: float, sigma: float, order: float) -> float:
    """RDP of one step at one order > 1, rounded up."""
    return float(log_moments(q, sigma, (order,))[0] / (order - 1.0))


def log_moments(q: float, sigma: float, orders: tuple[float, ...]) -> Array:
    """log A(α) for each order, rounded up; inf where it overflows."""
    alpha = np.asarray(orders, dtype=np.float64)
    if q == 0 or math.isinf(sigma):
        return np.zeros_like(alpha)
    if sigma < 1e-150:
        return np.full_like(alpha, math.inf)
    if q == 1:
        return alpha * (alpha - 1.0) / (2.0 * sigma * sigma) * (1.0 + _PAD)
    result = np.empty_like(alpha)
    whole = alpha == np.floor(alpha)
    result[whole] = [_at_integer(q, sigma, int(a)) for a in alpha[whole]]
    if not whole.all():
        fractional = alpha[~whole]
        if sigma >= _QUADRATURE_FROM and fractional.max() <= 64:
            result[~whole] = _by_quadrature(q, sigma, fractional)
        else:
            low = np.floor(fractional)
            below = np.array([_at_integer(q, sigma, int(a)) if a > 1 else 0.0 for a in low])
            above = np.array([_at_integer(q, sigma, int(a)) for a in low + 1])
            result[~whole] = below + (fractional - low) * (above - below)
    return result * (1.0 + _PAD)


def _at_integer(q: float, sigma: float, alpha: int) -> float:
    i = np.arange(2, alpha + 1, dtype=np.float64)
    exponent = i * (i - 1.0) / (2.0 * sigma * sigma)
    log_expm1 = exponent + np.log(-np.expm1(-exponent))
    terms = _log_choose(alpha) + i * math.log(q) + (alpha - i) * math.log1p(-q) + log_expm1
    top = float(terms.max())
    if not math.isfinite(top):
        return math.inf
    return float(np.logaddexp(0.0, top + math.log(float(np.exp(terms - top).sum()))))


@lru_cache(maxsize=256)
def _log_choose(alpha: int) -> Array:
    i = np.arange(2, alpha + 1, dtype=np.float64)
    return np.asarray(special.gammaln(alpha + 1) - special.gammaln(i + 1) - special.gammaln(alpha - i + 1))


def _by_quadrature(q: float, sigma: float, orders: Array) -> Array:
    mu = 1.0 / sigma
    alpha = orders[:, None]
    # The integrand is analytic up to Im z = π·sigma and falls like a Gaussian: convergence is geometric.
    width = min(0.2, 0.3 * sigma)
    z = np.arange(-13.0, float(orders.max()) * mu + 13.0, width)[None, :]
    shift = mu * z - 0.5 * mu * mu
    u = q * np.expm1(np.minimum(shift, 700.0))  # r - 1
    log_r = np.logaddexp(math.log1p(-q), math.log(q) + shift)
    small = np.minimum(u, 0.5)
    series = (
        0.5 * alpha * (alpha - 1) * small**2 * (1 + (alpha - 2) * small / 3 * (1 + (alpha - 3) * small / 4))
    )
    near = np.where(np.abs(small) * alpha < 1e-3, series, np.expm1(alpha * np.log1p(small)) - alpha * small)
    with np.errstate(divide="ignore"):
        log_near = np.log(np.maximum(near, 0.0))
    power = alpha * log_r
    with np.errstate(divide="ignore", invalid="ignore"):
        log_far = power + np.log1p(-(1 + alpha * np.maximum(u, 0.5)) * np.exp(-np.maximum(power, 0.0)))
    integrand = np.where(u > 0.5, log_far, log_near) - 0.5 * z * z
    log_excess = special.logsumexp(integrand, axis=1) + math.log(width) - 0.5 * math.log(2 * math.pi)
    return np.asarray(np.logaddexp(0.0, log_excess))
