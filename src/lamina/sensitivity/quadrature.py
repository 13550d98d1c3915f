"""Expectations under a Gaussian by adaptive quadrature, for many (mean, std) at once.

    E g(Z) = ∫ g(mean + std·x) φ(x) dx,      |x| ≤ 38.5, beyond which φ is below the smallest double

The line is cut where the Gaussian changes (whole multiples of std), where g changes (its breaks, and the origin
with growing distances: activations live at scale 1) and nowhere else, so that a spike is not stepped over
when std is 1e8, nor the mass when it is 1e-8. A panel is halved until Gauss's rule on it and on its two halves
agree; the halves count. The tolerance is relative: E = 1e-40 keeps its digits as E = 1 does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray

from lamina.errors import PlanError

Array = NDArray[np.float64]
Slope = Callable[[Array], Array]

RELATIVE = 1e-11  # accepted error of one panel, as a share of the whole
_SMALLEST = 1e-290  # below, digits mean nothing
_ORDER = 12
_HALVINGS = 64
_CHUNK = 1000  # elements at a time: about 10 MB of nodes
_FAR = 1e300
_ROOT_2PI = math.sqrt(2.0 * math.pi)
_X_CUTS = np.array([1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 13.0, 19.0, 27.0, 38.5])
_Z_CUTS = np.array([0.5, 1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 13.0, 19.0, 27.0, 40.0, 64.0, 256.0])

_NODES, _WEIGHTS = leggauss(_ORDER)


def expectation(g: Slope, mean: Any, std: Any, *, breaks: Sequence[float] = ()) -> Array:
    """E g(Z), Z ~ N(mean, std²), elementwise over the broadcast arrays mean and std.

    `breaks` are the places where g has a jump or a corner. One that is not named costs time, and digits only if it
    hides within half a per cent of the end of a panel (an error near 1e-6 at worst, seen with corners).
    """
    means, stds = checked(mean, std)
    flat_mean, flat_std = means.ravel(), np.maximum(stds.ravel(), 1e-300)  # std = 0 is the limit std → 0
    parts = [
        _chunk(g, flat_mean[i : i + _CHUNK], flat_std[i : i + _CHUNK], breaks)
        for i in range(0, len(flat_mean), _CHUNK)
    ]
    return np.concatenate([*parts, np.empty(0)]).reshape(means.shape)


def checked(mean: Any, std: Any) -> tuple[Array, Array]:
    """Both as float64 arrays of one shape; NaN, infinities and a negative std are refused."""
    means, stds = np.broadcast_arrays(np.asarray(mean, np.float64), np.asarray(std, np.float64))
    if not np.isfinite(means).all():
        raise PlanError(
            "measure.mean-pre-activation",
            f"mean of a pre-activation is {_first(means, ~np.isfinite(means))}, must be finite",
            "profile the model again: a forward pass on the proxy overflowed or a weight is NaN",
        )
    bad = ~(np.isfinite(stds) & (stds >= 0))
    if bad.any():
        raise PlanError(
            "measure.standard-deviation-pre",
            f"standard deviation of a pre-activation is {_first(stds, bad)}, must be finite and >= 0",
            "give the square root of a variance, measured on at least one proxy batch",
        )
    return means, stds


def _first(values: Array, which: NDArray[np.bool_]) -> float:
    return float(values[which].ravel()[0])


def _chunk(g: Slope, mean: Array, std: Array, breaks: Sequence[float]) -> Array:
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
        fine |= np.abs(value - halves) <= RELATIVE * scale[owner] + _SMALLEST
        total += np.bincount(owner[fine], halves[fine], minlength=len(mean))
        if fine.all():
            return total
        rough = ~fine
        owner = np.concatenate([owner[rough], owner[rough]])
        value = np.concatenate([lower[rough], upper[rough]])
        left, right = (
            np.concatenate([left[rough], middle[rough]]),
            np.concatenate([middle[rough], right[rough]]),
        )
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
        z = np.clip(mean[:, None] + std[:, None] * x, -_FAR, _FAR)
        values = g(z) * np.exp(-0.5 * x * x)
    if not np.isfinite(values).all():
        where = float(z[~np.isfinite(values)][0])
        raise PlanError(
            "measure.slope-not-finite",
            f"the slope at z={where} is not finite",
            "give an activation with a bounded slope",
        )
    return np.asarray(half / _ROOT_2PI * (values @ _WEIGHTS))
