"""How steep an activation is where a network uses it: E|f'(Z)| with Z ~ N(mean, std²), beside its supremum.

An expectation is not a bound: E|f'(Z)| says how steep f is on average at pre-activations of this mean and spread
(a Gaussian fit, assumption A3 of the LSAB document), sup|f'| how steep it can be anywhere. Neither is what makes a
step private; clipping is (docs/theory.md). A variance that may be zero is regularised by the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.errors import PlanError
from lamina.sensitivity.quadrature import checked, expectation
from lamina.sensitivity.slopes import ACTIVATIONS, Activation

__all__ = ["ACTIVATIONS", "Activation", "activation", "local", "supremum", "local_of", "supremum_of"]

Array = NDArray[np.float64]
Function = Callable[[Tensor], Tensor]


def activation(name: str, **options: float) -> Activation:
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
            raise PlanError(
                "measure.activation", f"activation {name!r} has {option}={value}", "give a finite number"
            )
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
    f = activation(name, **options)
    means, stds = checked(mean, std)
    if f.closed is not None:
        value = f.closed(means, stds)
    else:
        value = expectation(lambda z: np.abs(f.slope(z)), means, stds, breaks=f.breaks)
    assert (value >= 0).all() and (value <= f.supremum * (1 + 1e-9)).all()
    value = np.minimum(value, f.supremum)
    return float(value) if value.ndim == 0 else value


def supremum(name: str, **options: float) -> float:
    """sup|f'|, the global Lipschitz constant."""
    return activation(name, **options).supremum


def local_of(f: Function, mean: Any, std: Any, *, kinks: Sequence[float] = ()) -> Any:
    """E|f'(Z)| of any scalar function of a tensor, differentiated by torch in float64.

    Jumps of f' belong into `kinks`. Zeros of f' are corners of |f'|; those that a scan of the line sees are found.
    """
    means, stds = checked(mean, std)
    slope = slope_of(f)
    zeros = _sign_changes(slope, means, stds)
    value = expectation(lambda z: np.abs(slope(z)), means, stds, breaks=(*kinks, *zeros))
    return float(value) if value.ndim == 0 else value


def supremum_of(f: Function, *, reach: float = 100.0, kinks: Sequence[float] = ()) -> float:
    """The steepest slope that a search on [-reach, reach] finds: an estimate from below, not a proof."""
    slope = slope_of(f)
    beside = [np.nextafter(kink, side) for kink in kinks for side in (-np.inf, np.inf)]
    z = np.sort(np.concatenate([_line(reach), np.asarray(beside, np.float64)]))
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


def _line(reach: float, points: int = 8001) -> Array:
    """Points from -reach to reach, dense around 0, where activations bend."""
    return np.asarray(np.sinh(np.linspace(-np.arcsinh(reach), np.arcsinh(reach), points)))


def _sign_changes(slope: Callable[[Array], Array], mean: Array, std: Array) -> list[float]:
    """Where f' crosses 0, within reach of any of the Gaussians, by bisection of a scan."""
    z = _line(float(min(np.max(np.abs(mean) + 9.0 * std, initial=1.0), 1e300)))
    sign = np.sign(slope(z))
    at = np.flatnonzero(sign[:-1] * sign[1:] < 0)
    low, high, side = z[at], z[at + 1], sign[at]
    for _ in range(80 if len(at) else 0):
        middle = 0.5 * (low + high)
        same = np.sign(slope(middle)) == side
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return [float(v) for v in 0.5 * (low + high)]
