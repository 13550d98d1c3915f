"""Slopes of activations: E|f'(Z)| under a Gaussian, and sup|f'|."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lamina.errors import PlanError

# Expectations under a Gaussian by adaptive quadrature, for many (mean, std) at once.
#
#     E g(Z) = ∫ g(mean + std·x) φ(x) dx,      |x| ≤ 38.5, beyond which φ is below the smallest double
#
# The line is cut where the Gaussian changes (whole multiples of std), where g changes (its breaks, and the origin
# with growing distances: activations live at scale 1) and nowhere else, so that a spike is not stepped over
# when std is 1e8, nor the mass when it is 1e-8. A panel is halved until Gauss's rule on it and on its two halves
# agree; the halves count. The tolerance is relative: E = 1e-40 keeps its digits as E = 1 does.

Array = NDArray[np.float64]
Slope = Callable[[Array], Array]

RELATIVE_TOLERANCE = 1e-11  # accepted error of one panel, as a share of the whole
_SMALLEST = 1e-290  # below, digits mean nothing
_ORDER = 12
_HALVINGS = 64
_CHUNK = 1000  # elements at a time: about 10 MB of nodes
_LARGEST_ARGUMENT = 1e300
_ROOT_2PI = math.sqrt(2.0 * math.pi)
_X_CUTS = np.array([1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 13.0, 19.0, 27.0, 38.5])
_Z_CUTS = np.array([0.5, 1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 13.0, 19.0, 27.0, 40.0, 64.0, 256.0])

_NODES, _WEIGHTS = leggauss(_ORDER)


def gaussian_expectation(g: Slope, mean: Any, std: Any, *, breaks: Sequence[float] = ()) -> Array:
    """E g(Z), Z ~ N(mean, std²), elementwise over the broadcast arrays mean and std.

    `breaks` are the places where g has a jump or a corner. One that is not named costs time, and digits only if it
    hides within half a per cent of the end of a panel (an error near 1e-6 at worst, seen with corners).
    """
    means, stds = check_mean_std(mean, std)
    flat_mean, flat_std = means.ravel(), np.maximum(stds.ravel(), 1e-300)  # std = 0 is the limit std → 0
    parts = [
        _integrate_chunk(g, flat_mean[i : i + _CHUNK], flat_std[i : i + _CHUNK], breaks)
        for i in range(0, len(flat_mean), _CHUNK)
    ]
    return np.concatenate([*parts, np.empty(0)]).reshape(means.shape)


def check_mean_std(mean: Any, std: Any) -> tuple[Array, Array]:
    """Both as float64 arrays of one shape; NaN, infinities and a negative std are refused."""
    means, stds = np.broadcast_arrays(np.asarray(mean, np.float64), np.asarray(std, np.float64))
    if not np.isfinite(means).all():
        raise PlanError(
            "measure.mean-pre-activation",
            f"mean of a pre-activation is {_first_where(means, ~np.isfinite(means))}, must be finite",
            "profile the model again: a forward pass on the proxy overflowed or a weight is NaN",
        )
    bad = ~(np.isfinite(stds) & (stds >= 0))
    if bad.any():
        raise PlanError(
            "measure.standard-deviation-pre",
            f"standard deviation of a pre-activation is {_first_where(stds, bad)}, must be finite and >= 0",
            "give the square root of a variance, measured on at least one proxy batch",
        )
    return means, stds


def _first_where(values: Array, which: NDArray[np.bool_]) -> float:
    return float(values[which].ravel()[0])


def _integrate_chunk(g: Slope, mean: Array, std: Array, breaks: Sequence[float]) -> Array:
    owner, left, right = _panels(mean, std, breaks)
    value = _integrate(g, mean[owner], std[owner], left, right)
    scale = np.bincount(owner, np.abs(value), minlength=len(mean))
    total = np.zeros(len(mean))
    for _ in range(_HALVINGS):
        middle = 0.5 * (left + right)
        lower = _integrate(g, mean[owner], std[owner], left, middle)
        upper = _integrate(g, mean[owner], std[owner], middle, right)
        halves = lower + upper
        # what lies between neighbouring doubles cannot be resolved, nor does it matter
        fine = (middle <= left) | (middle >= right)
        fine |= np.abs(value - halves) <= RELATIVE_TOLERANCE * scale[owner] + _SMALLEST
        total += np.bincount(owner[fine], halves[fine], minlength=len(mean))
        if fine.all():
            return total
        rough = ~fine
        owner = np.concatenate([owner[rough], owner[rough]])
        value = np.concatenate([lower[rough], upper[rough]])
        left, right = (np.concatenate([left[rough], middle[rough]]), np.concatenate([middle[rough], right[rough]]))
    raise PlanError(
        "measure.not-converge-mean",
        f"E|f'(Z)| did not converge at mean={mean[owner[0]]}, std={std[owner[0]]}",
        "name the kinks of the activation, or give one whose derivative has finitely many jumps",
    )


def _panels(mean: Array, std: Array, breaks: Sequence[float]) -> tuple[NDArray[np.intp], Array, Array]:
    """Owner, left and right end of every panel, in units of std around the mean."""
    offsets = np.concatenate([[0.0], _Z_CUTS, -_Z_CUTS, np.asarray(breaks, np.float64)])
    with np.errstate(over="ignore"):
        cuts = (offsets[None, :] - mean[:, None]) / std[:, None]
    fixed = np.concatenate([-_X_CUTS, [0.0], _X_CUTS])
    cuts = np.concatenate([cuts, np.broadcast_to(fixed, (len(mean), len(fixed)))], axis=1)
    cuts = np.sort(np.clip(cuts, -_X_CUTS[-1], _X_CUTS[-1]), axis=1)
    owner, place = np.nonzero(np.diff(cuts, axis=1) > 0)
    return owner, cuts[owner, place], cuts[owner, place + 1]


def _integrate(g: Slope, mean: Array, std: Array, left: Array, right: Array) -> Array:
    """Gauss's rule on every panel."""
    half = 0.5 * (right - left)
    x = 0.5 * (left + right)[:, None] + half[:, None] * _NODES
    with np.errstate(over="ignore", under="ignore"):
        z = np.clip(mean[:, None] + std[:, None] * x, -_LARGEST_ARGUMENT, _LARGEST_ARGUMENT)
        values = g(z) * np.exp(-0.5 * x * x)
    if not np.isfinite(values).all():
        where = float(z[~np.isfinite(values)][0])
        raise PlanError(
            "measure.slope-not-finite",
            f"the slope at z={where} is not finite",
            "give an activation with a bounded slope",
        )
    return np.asarray(half / _ROOT_2PI * (values @ _WEIGHTS))


# The exact GELU f(z) = zΦ(z) under a Gaussian, in closed form. With Z ~ N(μ, s²) and r = √(1+s²):
#
#     E f'(Z)   = Φ(μ/r) + μ φ(μ/r)/r³
#     E |f'(Z)| = E f'(Z) - 2(A + B)                               f' < 0 exactly below z0 = -0.75179…
#     A = E[Φ(Z); Z < z0]   = Φ₂(μ/r, (z0-μ)/s; -s/r)
#     B = E[Zφ(Z); Z < z0]  = (φ(μ/r)/r)·(mΦ(u) - vφ(u)),    m = μ/r², v = s/r, u = (z0-m)/v
#
# Φ₂(h, k; ϱ), the bivariate normal distribution function, is written with Owen's T (1956); for these arguments its
# two slopes are (z0 r² - μ)/(sμ) and z0 s/(z0-μ), free of the cancellation of k - ϱh.

GELU_SLOPE_ZERO = -0.7517915246935645  # f'(ZERO) = 0
GELU_SUPREMUM = 1.1289041451851549  # f'(√2), rounded up
_CLOSED_FORM_LEAST = (
    1e-6  # the closed form has an absolute error near 1e-16: below, quadrature keeps the relative digits
)


def gelu_slope(z: Array) -> Array:
    """f'(z) = Φ(z) + zφ(z)."""
    return np.asarray(special.ndtr(z) + z * _density(z))


def gelu_signed(mean: Any, std: Any) -> Array:
    """E f'(Z), without the absolute value."""
    mu, s = check_mean_std(mean, std)
    r = np.hypot(1.0, s)
    return np.asarray(special.ndtr(mu / r) + mu / r * _density(mu / r) / r / r)


def gelu_local(mean: Any, std: Any) -> Array:
    """E |f'(Z)|: the closed form, and quadrature where the closed form has lost its digits."""
    mu, s = check_mean_std(mean, std)
    value = np.asarray(gelu_signed(mu, s) - 2.0 * _negative_part(mu, s))
    lost = value < _CLOSED_FORM_LEAST
    if lost.any():
        value[lost] = gaussian_expectation(
            lambda z: np.abs(gelu_slope(z)), mu[lost], s[lost], breaks=(GELU_SLOPE_ZERO,)
        )
    return value


def _negative_part(mu: Array, s: Array) -> Array:
    """A + B = E[f'(Z); Z < z0]; at s = 0 the limit."""
    s = np.maximum(s, 1e-300)
    r = np.hypot(1.0, s)
    h = mu / r
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        k = (GELU_SLOPE_ZERO - mu) / s
        slope_h = np.where(mu != 0, (k + GELU_SLOPE_ZERO * s) / np.where(mu != 0, mu, 1.0), -np.inf)
        slope_k = np.where(
            mu != GELU_SLOPE_ZERO,
            GELU_SLOPE_ZERO * s / np.where(mu != GELU_SLOPE_ZERO, GELU_SLOPE_ZERO - mu, 1.0),
            -np.inf,
        )
        m, v = h / r, s / r
        u = (GELU_SLOPE_ZERO - m) / v
        moment = _density(h) / r * (m * special.ndtr(u) - v * _density(u))
    opposite = (h < 0) != (k < 0)  # zero counts as positive, as in the slopes above
    joint = 0.5 * (special.ndtr(h) + special.ndtr(k) - opposite)
    joint = joint - _owens_t(h, slope_h) - _owens_t(k, slope_k)
    return np.asarray(np.maximum(joint, 0.0) + moment)


def _owens_t(h: Array, slope: Array) -> Array:
    """Owen's T; T(±∞, a) = 0, and T(h, ±∞) = ±Φ(-|h|)/2."""
    inner = special.owens_t(np.clip(h, -1e10, 1e10), np.clip(slope, -1e300, 1e300))
    limit = np.sign(slope) * 0.5 * special.ndtr(-np.abs(h))
    return np.asarray(np.where(np.isinf(slope), limit, np.where(np.isinf(h), 0.0, inner)))


def _density(z: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.exp(-0.5 * z * z) / _ROOT_2PI)


# The named activations: the slope f', where it breaks, and its supremum, which is the global Lipschitz constant.
#
# A constant in the table is rounded up, so that it bounds the slope that is computed too. Options are called as in
# torch. An activation that jumps (hardshrink) has no Lipschitz constant and is not here.

SILU_SLOPE_ZERO = -1.2784645427610738
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


@dataclass(frozen=True, kw_only=True)
class Activation:
    """f' as a function, its jumps and zeros, sup |f'|, and E|f'(Z)| in closed form where there is one."""

    slope: Callable[[Array], Array]
    supremum: float
    breaks: tuple[float, ...] = ()
    closed: Callable[[Array, Array], Array] | None = None


def piecewise_linear(kinks: Sequence[float], slopes: Sequence[float]) -> Activation:
    """Straight pieces: slopes[0] before kinks[0], slopes[i] after kinks[i-1]. E|f'| = Σ |slope|·Pr[piece]."""
    k, a = np.asarray(kinks, np.float64), np.asarray(slopes, np.float64)

    def slope(z: Array) -> Array:
        return np.asarray(a[np.searchsorted(k, z, side="left")])

    def closed(mean: Array, std: Array) -> Array:
        spread = np.maximum(std, 1e-300)  # the limit std → 0: half of the mass on each side of a kink
        with np.errstate(over="ignore"):
            x = [-math.inf, *((kink - mean) / spread for kink in k), math.inf]
        masses = zip(np.abs(a), x[:-1], x[1:], strict=True)
        return np.asarray(sum(weight * _normal_mass(low, high) for weight, low, high in masses) + 0.0 * mean)

    return Activation(slope=slope, supremum=float(np.abs(a).max()), breaks=tuple(kinks), closed=closed)


def _normal_mass(low: Array | float, high: Array | float) -> Array:
    """Φ(high) - Φ(low), from the tail that has the digits."""
    flip = np.greater(low, np.negative(high))
    a, b = np.where(flip, np.negative(high), low), np.where(flip, np.negative(low), high)
    return np.asarray(special.ndtr(b) - special.ndtr(a))


def relu() -> Activation:
    return piecewise_linear((0.0,), (0.0, 1.0))


def relu6() -> Activation:
    return piecewise_linear((0.0, 6.0), (0.0, 1.0, 0.0))


def leaky_relu(negative_slope: float = 0.01) -> Activation:
    return piecewise_linear((0.0,), (negative_slope, 1.0))


def prelu(weight: float = 0.25) -> Activation:
    return leaky_relu(negative_slope=weight)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Activation:
    if not min_val < max_val:
        raise PlanError(
            "measure.hardtanh-min-val", f"hardtanh has min_val={min_val} >= max_val={max_val}", "exchange them"
        )
    return piecewise_linear((min_val, max_val), (0.0, 1.0, 0.0))


def hardsigmoid() -> Activation:
    return piecewise_linear((-3.0, 3.0), (0.0, 1.0 / 6.0, 0.0))


def softshrink(lambd: float = 0.5) -> Activation:
    return piecewise_linear((-_positive_option("softshrink", "lambd", lambd), lambd), (1.0, 0.0, 1.0))


def identity() -> Activation:
    return piecewise_linear((), (1.0,))


def dropout(p: float = 0.5) -> Activation:
    """Each entry is 0, or kept and divided by 1-p: slope 1 in the mean over masks, 1/(1-p) at most."""
    if not 0 <= p < 1:
        raise PlanError(
            "measure.dropout",
            f"dropout has p={p}, must be in [0, 1)",
            "lower p, or remove a layer that drops everything",
        )
    flat = piecewise_linear((), (1.0,))
    return Activation(slope=flat.slope, supremum=1.0 / (1.0 - p), closed=flat.closed)


def gelu() -> Activation:
    return Activation(slope=gelu_slope, supremum=GELU_SUPREMUM, breaks=(GELU_SLOPE_ZERO,), closed=gelu_local)


def gelu_tanh() -> Activation:
    """f = z·sigmoid(2w), w = √(2/π)(z + 0.044715 z³)."""
    root = math.sqrt(2.0 / math.pi)

    def slope(z: Array) -> Array:
        near = np.clip(z, -50.0, 50.0)  # beyond, the slope is 0 or 1 and the cube would overflow
        square = near * near
        w = root * near * (1.0 + 0.044715 * square)
        rise = root * (1.0 + 3 * 0.044715 * square)
        return np.asarray(special.expit(2 * w) + 2 * near * rise * _sigmoid_slope(2 * w))

    return Activation(slope=slope, supremum=1.128993068658772, breaks=(-0.7524614220710163,))


def silu() -> Activation:
    def slope(z: Array) -> Array:
        return np.asarray(special.expit(z) + z * _sigmoid_slope(z))

    return Activation(slope=slope, supremum=1.0998393201288672, breaks=(SILU_SLOPE_ZERO,))


def mish() -> Activation:
    def slope(z: Array) -> Array:
        soft = np.logaddexp(0.0, z)
        return np.asarray(np.tanh(soft) + z * special.expit(z) * 4 * _sigmoid_slope(2 * soft))

    return Activation(slope=slope, supremum=1.088498161251728, breaks=(-1.1924312145154953,))


def hardswish() -> Activation:
    """f = z·(z+3)/6 between -3 and 3."""

    def slope(z: Array) -> Array:
        near = np.clip(z, -3.0, 3.0)
        return np.where(z <= -3.0, 0.0, np.where(z >= 3.0, 1.0, near / 3.0 + 0.5))

    return Activation(slope=slope, supremum=1.5, breaks=(-3.0, -1.5, 3.0))


def tanh() -> Activation:
    return Activation(slope=lambda z: 4 * _sigmoid_slope(2 * z), supremum=1.0)


def sigmoid() -> Activation:
    return Activation(slope=_sigmoid_slope, supremum=0.25)


def logsigmoid() -> Activation:
    return Activation(slope=lambda z: np.asarray(special.expit(-z)), supremum=1.0)


def softplus(beta: float = 1.0) -> Activation:
    _positive_option("softplus", "beta", beta)
    marks = tuple(sign * distance / beta for sign in (-1, 1) for distance in (1.0, 3.0, 9.0, 38.0))
    return Activation(slope=lambda z: np.asarray(special.expit(beta * z)), supremum=1.0, breaks=marks)


def elu(alpha: float = 1.0) -> Activation:
    return _exponential(1.0, _positive_option("elu", "alpha", alpha), 1.0)


def celu(alpha: float = 1.0) -> Activation:
    return _exponential(1.0, 1.0, _positive_option("celu", "alpha", alpha))


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


def _sigmoid_slope(z: Array) -> Array:
    """sigmoid'(z) = sigmoid(z)·sigmoid(-z)."""
    return np.asarray(special.expit(z) * special.expit(-z))


def _positive_option(name: str, option: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise PlanError(
            "measure.give-positive", f"{name} has {option}={value}, must be > 0", f"give a positive {option}"
        )
    return value


_PIECEWISE_LINEAR = (relu, relu6, leaky_relu, prelu, hardtanh, hardsigmoid, softshrink, identity, dropout)
_SMOOTH = (gelu, gelu_tanh, silu, mish, hardswish, tanh, sigmoid, logsigmoid, softplus, elu, celu, selu)
ACTIVATIONS: dict[str, Callable[..., Activation]] = {
    make.__name__: make for make in (*_PIECEWISE_LINEAR, *_SMOOTH, softsign, tanhshrink)
}


# How steep an activation is where a network uses it: E|f'(Z)| with Z ~ N(mean, std²), beside its supremum.
#
# An expectation is not a bound: E|f'(Z)| says how steep f is on average at pre-activations of this mean and spread
# (a Gaussian fit, assumption A3 of the LSAB document), sup|f'| how steep it can be anywhere. Neither is what makes a
# step private; clipping is (docs/theory.md). A variance that may be zero is regularised by the caller.

Function = Callable[[Tensor], Tensor]


def find_activation(name: str, **options: float) -> Activation:
    """The named activation with torch's options, for example activation("leaky_relu", negative_slope=0.2)."""
    if name not in ACTIVATIONS:
        raise PlanError(
            "measure.activation-not-known",
            f"activation {name!r} is not known; known are {', '.join(sorted(ACTIVATIONS))}",
            "use one of them, or local_of(f, mean, std) for any other scalar function",
        )
    known = tuple(inspect.signature(ACTIVATIONS[name]).parameters)
    for option, value in options.items():
        if option not in known:
            raise PlanError(
                "measure.activation-no-option",
                f"activation {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}",
                "correct the name of the option",
            )
        if not np.isfinite(value):
            raise PlanError("measure.activation", f"activation {name!r} has {option}={value}", "give a finite number")
    return ACTIVATIONS[name](**options)


@overload
def local(name: str, mean: float, std: float, **options: float) -> float: ...
@overload
def local(name: str, mean: Array, std: Array | float, **options: float) -> Array: ...
@overload
def local(name: str, mean: float, std: Array, **options: float) -> Array: ...
def local(name: str, mean: Any, std: Any, **options: float) -> Any:
    """E|f'(Z)|: a float for two numbers, an array for arrays of means and standard deviations.

    std = 0 is the limit std → 0: |f'(mean)|; for ReLU at 0, half of both slopes.
    """
    f = find_activation(name, **options)
    means, stds = check_mean_std(mean, std)
    if f.closed is not None:
        value = f.closed(means, stds)
    else:
        value = gaussian_expectation(lambda z: np.abs(f.slope(z)), means, stds, breaks=f.breaks)
    assert (value >= 0).all() and (value <= f.supremum * (1 + 1e-9)).all()
    value = np.minimum(value, f.supremum)
    return float(value) if value.ndim == 0 else value


def supremum(name: str, **options: float) -> float:
    """sup|f'|, the global Lipschitz constant."""
    return find_activation(name, **options).supremum


def local_of(f: Function, mean: Any, std: Any, *, kinks: Sequence[float] = ()) -> Any:
    """E|f'(Z)| of any scalar function of a tensor, differentiated by torch in float64.

    Jumps of f' belong into `kinks`. Zeros of f' are corners of |f'|; those that a scan of the line sees are found.
    """
    means, stds = check_mean_std(mean, std)
    slope = slope_of(f)
    zeros = _sign_changes(slope, means, stds)
    value = gaussian_expectation(lambda z: np.abs(slope(z)), means, stds, breaks=(*kinks, *zeros))
    return float(value) if value.ndim == 0 else value


def supremum_of(f: Function, *, reach: float = 100.0, kinks: Sequence[float] = ()) -> float:
    """The steepest slope that a search on [-reach, reach] finds: an estimate from below, not a proof."""
    slope = slope_of(f)
    beside = [np.nextafter(kink, side) for kink in kinks for side in (-np.inf, np.inf)]
    z = np.sort(np.concatenate([_scan_points(reach), np.asarray(beside, np.float64)]))
    for _ in range(8):
        steep = np.abs(slope(z))
        best = int(np.argmax(steep))
        z = np.linspace(z[max(best - 1, 0)], z[min(best + 1, len(z) - 1)], 65)
    return float(max(steep[best], np.abs(slope(z)).max()))


def slope_of(f: Function) -> Callable[[Array], Array]:
    """f' as a function of arrays. f must act on each number by itself."""

    def slope(z: Array) -> Array:
        x = torch.from_numpy(np.array(z, np.float64)).requires_grad_()
        y = f(x)
        if y.shape != x.shape:
            raise PlanError(
                "measure.activation-turns-shape",
                f"the activation turns shape {tuple(x.shape)} into {tuple(y.shape)}",
                "give a function that acts on each number by itself",
            )
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return np.asarray(gradient.numpy())

    return slope


def _scan_points(reach: float, points: int = 8001) -> Array:
    """Points from -reach to reach, dense around 0, where activations bend."""
    return np.asarray(np.sinh(np.linspace(-np.arcsinh(reach), np.arcsinh(reach), points)))


def _sign_changes(slope: Callable[[Array], Array], mean: Array, std: Array) -> list[float]:
    """Where f' crosses 0, within reach of any of the Gaussians, by bisection of a scan."""
    z = _scan_points(float(min(np.max(np.abs(mean) + 9.0 * std, initial=1.0), 1e300)))
    sign = np.sign(slope(z))
    at = np.flatnonzero(sign[:-1] * sign[1:] < 0)
    low, high, side = z[at], z[at + 1], sign[at]
    for _ in range(80 if len(at) else 0):
        middle = 0.5 * (low + high)
        same = np.sign(slope(middle)) == side
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return [float(v) for v in 0.5 * (low + high)]
