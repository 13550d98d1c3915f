"""The named activations: the slope f', where it breaks, and its supremum, which is the global Lipschitz constant.

A constant in the table is rounded up, so that it bounds the slope that is computed too. Options are called as in
torch. An activation that jumps (hardshrink) has no Lipschitz constant and is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lamina.errors import PlanError
from lamina.sensitivity import gelu as exact_gelu

Array = NDArray[np.float64]

SILU_ZERO = -1.2784645427610738
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


@dataclass(frozen=True, kw_only=True)
class Activation:
    """f' as a function, its jumps and zeros, sup |f'|, and E|f'(Z)| in closed form where there is one."""

    slope: Callable[[Array], Array]
    supremum: float
    breaks: tuple[float, ...] = ()
    closed: Callable[[Array, Array], Array] | None = None


def pieces(kinks: Sequence[float], slopes: Sequence[float]) -> Activation:
    """Straight pieces: slopes[0] before kinks[0], slopes[i] after kinks[i-1]. E|f'| = Σ |slope|·Pr[piece]."""
    k, a = np.asarray(kinks, np.float64), np.asarray(slopes, np.float64)

    def slope(z: Array) -> Array:
        return np.asarray(a[np.searchsorted(k, z, side="left")])

    def closed(mean: Array, std: Array) -> Array:
        spread = np.maximum(std, 1e-300)  # the limit std → 0: half of the mass on each side of a kink
        with np.errstate(over="ignore"):
            x = [-math.inf, *((kink - mean) / spread for kink in k), math.inf]
        masses = zip(np.abs(a), x[:-1], x[1:], strict=True)
        return np.asarray(sum(weight * _between(low, high) for weight, low, high in masses) + 0.0 * mean)

    return Activation(slope=slope, supremum=float(np.abs(a).max()), breaks=tuple(kinks), closed=closed)


def _between(low: Array | float, high: Array | float) -> Array:
    """Φ(high) - Φ(low), from the tail that has the digits."""
    flip = np.greater(low, np.negative(high))
    a, b = np.where(flip, np.negative(high), low), np.where(flip, np.negative(low), high)
    return np.asarray(special.ndtr(b) - special.ndtr(a))


def relu() -> Activation:
    return pieces((0.0,), (0.0, 1.0))


def relu6() -> Activation:
    return pieces((0.0, 6.0), (0.0, 1.0, 0.0))


def leaky_relu(negative_slope: float = 0.01) -> Activation:
    return pieces((0.0,), (negative_slope, 1.0))


def prelu(weight: float = 0.25) -> Activation:
    return leaky_relu(negative_slope=weight)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Activation:
    if not min_val < max_val:
        raise PlanError(
            "measure.hardtanh-min-val",
            f"hardtanh has min_val={min_val} >= max_val={max_val}",
            "exchange them",
        )
    return pieces((min_val, max_val), (0.0, 1.0, 0.0))


def hardsigmoid() -> Activation:
    return pieces((-3.0, 3.0), (0.0, 1.0 / 6.0, 0.0))


def softshrink(lambd: float = 0.5) -> Activation:
    return pieces((-_positive("softshrink", "lambd", lambd), lambd), (1.0, 0.0, 1.0))


def identity() -> Activation:
    return pieces((), (1.0,))


def dropout(p: float = 0.5) -> Activation:
    """Each entry is 0, or kept and divided by 1-p: slope 1 in the mean over masks, 1/(1-p) at most."""
    if not 0 <= p < 1:
        raise PlanError(
            "measure.dropout",
            f"dropout has p={p}, must be in [0, 1)",
            "lower p, or remove a layer that drops everything",
        )
    flat = pieces((), (1.0,))
    return Activation(slope=flat.slope, supremum=1.0 / (1.0 - p), closed=flat.closed)


def gelu() -> Activation:
    return Activation(
        slope=exact_gelu.gelu_slope,
        supremum=exact_gelu.SUPREMUM,
        breaks=(exact_gelu.ZERO,),
        closed=exact_gelu.gelu_local,
    )


def gelu_tanh() -> Activation:
    """f = z·sigmoid(2w), w = √(2/π)(z + 0.044715 z³)."""
    root = math.sqrt(2.0 / math.pi)

    def slope(z: Array) -> Array:
        near = np.clip(z, -50.0, 50.0)  # beyond, the slope is 0 or 1 and the cube would overflow
        square = near * near
        w = root * near * (1.0 + 0.044715 * square)
        rise = root * (1.0 + 3 * 0.044715 * square)
        return np.asarray(special.expit(2 * w) + 2 * near * rise * _bell(2 * w))

    return Activation(slope=slope, supremum=1.128993068658772, breaks=(-0.7524614220710163,))


def silu() -> Activation:
    def slope(z: Array) -> Array:
        return np.asarray(special.expit(z) + z * _bell(z))

    return Activation(slope=slope, supremum=1.0998393201288672, breaks=(SILU_ZERO,))


def mish() -> Activation:
    def slope(z: Array) -> Array:
        soft = np.logaddexp(0.0, z)
        return np.asarray(np.tanh(soft) + z * special.expit(z) * 4 * _bell(2 * soft))

    return Activation(slope=slope, supremum=1.088498161251728, breaks=(-1.1924312145154953,))


def hardswish() -> Activation:
    """f = z·(z+3)/6 between -3 and 3."""

    def slope(z: Array) -> Array:
        near = np.clip(z, -3.0, 3.0)
        return np.where(z <= -3.0, 0.0, np.where(z >= 3.0, 1.0, near / 3.0 + 0.5))

    return Activation(slope=slope, supremum=1.5, breaks=(-3.0, -1.5, 3.0))


def tanh() -> Activation:
    return Activation(slope=lambda z: 4 * _bell(2 * z), supremum=1.0)


def sigmoid() -> Activation:
    return Activation(slope=_bell, supremum=0.25)


def logsigmoid() -> Activation:
    return Activation(slope=lambda z: np.asarray(special.expit(-z)), supremum=1.0)


def softplus(beta: float = 1.0) -> Activation:
    _positive("softplus", "beta", beta)
    marks = tuple(sign * distance / beta for sign in (-1, 1) for distance in (1.0, 3.0, 9.0, 38.0))
    return Activation(slope=lambda z: np.asarray(special.expit(beta * z)), supremum=1.0, breaks=marks)


def elu(alpha: float = 1.0) -> Activation:
    return _exponential(1.0, _positive("elu", "alpha", alpha), 1.0)


def celu(alpha: float = 1.0) -> Activation:
    return _exponential(1.0, 1.0, _positive("celu", "alpha", alpha))


def selu() -> Activation:
    return _exponential(_SELU_SCALE, _SELU_SCALE * _SELU_ALPHA, 1.0)


def softsign() -> Activation:
    return Activation(slope=lambda z: np.square(1.0 / (1.0 + np.abs(z))), supremum=1.0)


def tanhshrink() -> Activation:
    return Activation(slope=lambda z: np.square(np.tanh(z)), supremum=1.0)


def _exponential(above: float, below: float, width: float) -> Activation:
    """f' = above for z > 0, below·e^(z/width) for z ≤ 0."""

    def slope(z: Array) -> Array:
        return np.where(z > 0, above, below * np.exp(np.minimum(z, 0.0) / width))

    marks = tuple(-width * distance for distance in (0.0, 1.0, 3.0, 9.0, 38.0, 100.0))
    return Activation(slope=slope, supremum=max(above, below), breaks=marks)


def _bell(z: Array) -> Array:
    """sigmoid'(z) = sigmoid(z)·sigmoid(-z)."""
    return np.asarray(special.expit(z) * special.expit(-z))


def _positive(name: str, option: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise PlanError(
            "measure.give-positive", f"{name} has {option}={value}, must be > 0", f"give a positive {option}"
        )
    return value


_STRAIGHT = (relu, relu6, leaky_relu, prelu, hardtanh, hardsigmoid, softshrink, identity, dropout)
_CURVED = (gelu, gelu_tanh, silu, mish, hardswish, tanh, sigmoid, logsigmoid, softplus, elu, celu, selu)
ACTIVATIONS: dict[str, Callable[..., Activation]] = {
    make.__name__: make for make in (*_STRAIGHT, *_CURVED, softsign, tanhshrink)
}
