"""The exact GELU f(z) = zΦ(z) under a Gaussian, in closed form. With Z ~ N(μ, s²) and r = √(1+s²):

    E f'(Z)   = Φ(μ/r) + μ φ(μ/r)/r³
    E |f'(Z)| = E f'(Z) - 2(A + B)                               f' < 0 exactly below z0 = -0.75179…
    A = E[Φ(Z); Z < z0]   = Φ₂(μ/r, (z0-μ)/s; -s/r)
    B = E[Zφ(Z); Z < z0]  = (φ(μ/r)/r)·(mΦ(u) - vφ(u)),    m = μ/r², v = s/r, u = (z0-m)/v

Φ₂(h, k; ϱ), the bivariate normal distribution function, is written with Owen's T (1956); for these arguments its
two slopes are (z0 r² - μ)/(sμ) and z0 s/(z0-μ), free of the cancellation of k - ϱh.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lamina.sensitivity.quadrature import checked, expectation

Array = NDArray[np.float64]

ZERO = -0.7517915246935645  # f'(ZERO) = 0
SUPREMUM = 1.1289041451851549  # f'(√2), rounded up
_ROOT_2PI = math.sqrt(2.0 * math.pi)
_LOST = 1e-6  # the closed form has an absolute error near 1e-16: below, quadrature keeps the relative digits


def gelu_slope(z: Array) -> Array:
    """f'(z) = Φ(z) + zφ(z)."""
    return np.asarray(special.ndtr(z) + z * _density(z))


def gelu_signed(mean: Any, std: Any) -> Array:
    """E f'(Z), without the absolute value."""
    mu, s = checked(mean, std)
    r = np.hypot(1.0, s)
    return np.asarray(special.ndtr(mu / r) + mu / r * _density(mu / r) / r / r)


def gelu_local(mean: Any, std: Any) -> Array:
    """E |f'(Z)|: the closed form, and quadrature where the closed form has lost its digits."""
    mu, s = checked(mean, std)
    value = np.asarray(gelu_signed(mu, s) - 2.0 * _below_zero(mu, s))
    lost = value < _LOST
    if lost.any():
        value[lost] = expectation(lambda z: np.abs(gelu_slope(z)), mu[lost], s[lost], breaks=(ZERO,))
    return value


def _below_zero(mu: Array, s: Array) -> Array:
    """A + B = E[f'(Z); Z < z0]; at s = 0 the limit."""
    s = np.maximum(s, 1e-300)
    r = np.hypot(1.0, s)
    h = mu / r
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        k = (ZERO - mu) / s
        slope_h = np.where(mu != 0, (k + ZERO * s) / np.where(mu != 0, mu, 1.0), -np.inf)
        slope_k = np.where(mu != ZERO, ZERO * s / np.where(mu != ZERO, ZERO - mu, 1.0), -np.inf)
        m, v = h / r, s / r
        u = (ZERO - m) / v
        moment = _density(h) / r * (m * special.ndtr(u) - v * _density(u))
    opposite = (h < 0) != (k < 0)  # zero counts as positive, as in the slopes above
    joint = 0.5 * (special.ndtr(h) + special.ndtr(k) - opposite)
    joint = joint - _owen(h, slope_h) - _owen(k, slope_k)
    return np.asarray(np.maximum(joint, 0.0) + moment)


def _owen(h: Array, slope: Array) -> Array:
    """Owen's T; T(±∞, a) = 0, and T(h, ±∞) = ±Φ(-|h|)/2."""
    inner = special.owens_t(np.clip(h, -1e10, 1e10), np.clip(slope, -1e300, 1e300))
    limit = np.sign(slope) * 0.5 * special.ndtr(-np.abs(h))
    return np.asarray(np.where(np.isinf(slope), limit, np.where(np.isinf(h), 0.0, inner)))


def _density(z: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.exp(-0.5 * z * z) / _ROOT_2PI)
