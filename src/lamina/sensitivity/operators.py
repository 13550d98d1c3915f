"""Spectral norms of linear layers as they act: with their padding, stride, dilation and groups, in float64.

The norm of a convolution is not that of its reshaped weight; it depends on the size of the input. What is reported
never falls short: `spectral_norm` returns the upper end of a bracket that `spectral_bracket` shows in full.

    small matrices      all singular values
    convolutions        from above by their symbol on a torus (torus.py), from below by Golub and Kahan's process
    everything else     from above and below by that process (krylov.py); the upper end holds with probability 1 - 1e-9

`tolerance` says how narrow the bracket should be. Should `most` steps not get there, the bracket is wider, not wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lamina.errors import PlanError
from lamina.sensitivity.convolution import LAYERS, Convolution
from lamina.sensitivity.krylov import ROUNDING, Bracket, Product, golub_kahan

__all__ = [
    "Bracket",
    "Convolution",
    "spectral_bracket",
    "spectral_bracket_of",
    "spectral_norm",
    "spectral_norm_of",
]

TOLERANCE = 1e-3
MOST = 400
SEED = 20_240_607
_DENSE = 1024  # rows or columns, whichever are fewer, up to which a matrix is decomposed
_FEW = 48  # the same, up to which an operator is written out as a matrix

Operator = Callable[[Tensor], Tensor]
Layer = nn.Module | Convolution | Tensor


def spectral_norm(
    layer: Layer,
    input_shape: Sequence[int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST,
) -> float:
    """‖A‖ of a Linear or (transposed) convolution layer without its bias, of a Convolution or a matrix; from above.

    `input_shape` is that of one example, without the batch: (channels, length) for Conv1d. Linear needs none.
    """
    return spectral_bracket(layer, input_shape, tolerance=tolerance, most=most).upper


def spectral_norm_of(
    operator: Operator, shape: Sequence[int], *, tolerance: float = TOLERANCE, most: int = MOST
) -> float:
    """‖A‖ of any linear function of one float64 tensor of this shape; from above. See spectral_bracket_of."""
    return spectral_bracket_of(operator, shape, tolerance=tolerance, most=most).upper


def spectral_bracket(
    layer: Layer,
    input_shape: Sequence[int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST,
) -> Bracket:
    """The bracket around ‖A‖; arguments as for spectral_norm."""
    if isinstance(layer, Tensor | nn.Linear):
        return _matrix(_numbers(layer), tolerance, most)
    if not isinstance(layer, (Convolution, *LAYERS)):
        raise PlanError(
            "measure.not-linear-layer",
            f"{type(layer).__name__} is not a linear layer whose norm is known here",
            "give Linear, Conv1d/2d/3d or ConvTranspose1d/2d/3d; for another linear map, spectral_norm_of(f, shape)",
        )
    weight = _numbers(layer)
    if input_shape is None:
        raise PlanError(
            "measure.norm-convolution-depends",
            "the norm of a convolution depends on its input's size, and input_shape is missing",
            "give the shape of one example without the batch, for example input_shape=(12, 256)",
        )
    scale = float(weight.abs().max())
    if scale == 0.0:
        return Bracket(lower=0.0, upper=0.0, method="dense")
    given = layer if isinstance(layer, Convolution) else Convolution.of(layer)
    unit = replace(given, weight=weight / scale)
    proven = unit.bound(input_shape)
    found = spectral_bracket_of(unit.operator(), input_shape, tolerance=tolerance, most=most, proven=proven)
    return found.scaled(scale)


def spectral_bracket_of(
    operator: Operator,
    shape: Sequence[int],
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST,
    proven: float = math.inf,
) -> Bracket:
    """The bracket around ‖A‖ of a linear function of a float64 tensor; Aᵀ comes from autograd.

    `proven` is an upper bound that is known already. A function that is not linear is refused.
    """
    _check_options(shape, tolerance, most)
    zero = torch.zeros(tuple(shape), dtype=torch.float64)
    image, pull = _pullback(operator, zero)
    _check_linear(operator, zero, image)

    def forward(v: Tensor) -> Tensor:
        with torch.no_grad():
            return operator(v.view(zero.shape)).reshape(-1)

    def adjoint(u: Tensor) -> Tensor:
        return pull(u.view(image.shape)).reshape(-1)

    sizes = (zero.numel(), image.numel())
    if min(sizes) <= _FEW:
        product, side = (forward, sizes[0]) if sizes[0] <= sizes[1] else (adjoint, sizes[1])
        columns = [product(unit) for unit in torch.eye(side, dtype=torch.float64)]
        return replace(_matrix(torch.stack(columns), tolerance, most), steps=side)
    return golub_kahan(forward, adjoint, sizes, tolerance=tolerance, most=most, seed=SEED, proven=proven)


def _matrix(weight: Tensor, tolerance: float, most: int) -> Bracket:
    if weight.ndim != 2:
        raise PlanError(
            "measure.tensor-shape-not",
            f"a tensor of shape {tuple(weight.shape)} is not a matrix",
            "give the layer itself and its input_shape: the norm of a convolution is not that of its reshaped weight",
        )
    scale = float(weight.abs().max())
    if scale == 0.0:
        return Bracket(lower=0.0, upper=0.0, method="dense")
    w = weight / scale
    if min(w.shape) > _DENSE:
        _check_options(w.shape, tolerance, most)
        forward: Product = lambda v: w @ v  # noqa: E731
        sizes = (w.shape[1], w.shape[0])
        found = golub_kahan(forward, lambda u: w.T @ u, sizes, tolerance=tolerance, most=most, seed=SEED)
        return found.scaled(scale)
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    norm = math.sqrt(float(torch.linalg.eigvalsh(gram)[-1])) * scale
    return Bracket(lower=norm * (1 - ROUNDING), upper=norm * (1 + ROUNDING), method="dense")


def _numbers(layer: Layer) -> Tensor:
    """The weight in float64 on the CPU."""
    what = "the matrix" if isinstance(layer, Tensor) else f"the weight of {type(layer).__name__}"
    weight = layer if isinstance(layer, Tensor) else layer.weight
    if not isinstance(weight, Tensor) or isinstance(weight, UninitializedParameter):
        raise PlanError(
            "measure.not-exist-yet", f"{what} does not exist yet", "run one example through the model first"
        )
    numbers = weight.detach().to("cpu", torch.float64)
    if numbers.numel() == 0 or not torch.isfinite(numbers).all():
        raise PlanError(
            "measure.empty-not-finite",
            f"{what} is empty or not finite",
            "initialise the layer, or find out what made it NaN",
        )
    return numbers


def _check_options(shape: Sequence[int], tolerance: float, most: int) -> None:
    if len(shape) == 0 or min(shape) < 1:
        raise PlanError(
            "measure.shape-holds-no", f"shape {tuple(shape)} holds no numbers", "give positive sizes"
        )
    if not (math.isfinite(tolerance) and tolerance > 0) or most < 1:
        raise PlanError(
            "measure.tolerance-leave",
            f"tolerance={tolerance}, most={most}: must be > 0 and >= 1",
            f"leave them at {TOLERANCE} and {MOST}",
        )


def _pullback(operator: Operator, zero: Tensor) -> tuple[Tensor, Product]:
    """The operator at 0, and its transpose: the recorded graph of a linear map serves every vector."""
    with torch.enable_grad():
        x = zero.clone().requires_grad_()
        image = operator(x)
    if not isinstance(image, Tensor) or image.numel() == 0 or image.dtype != torch.float64:
        raise PlanError(
            "measure.operator-not-give",
            "the operator does not give a non-empty float64 tensor",
            "convert its weights to float64",
        )
    if not image.requires_grad:
        raise PlanError(
            "measure.operator-output-not",
            "the operator's output does not depend on its input",
            "its norm is 0, or it detaches",
        )

    def pull(u: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(image, x, u, retain_graph=True)
        return gradient

    return image.detach(), pull


def _check_linear(operator: Operator, zero: Tensor, image: Tensor) -> None:
    """Refuse a bias and a bend: f(0) = 0 and f(a - 2b) = f(a) - 2f(b) at random points."""
    generator = torch.Generator().manual_seed(SEED + 1)
    a, b = torch.randn(2, *zero.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        whole, parts = operator(a - 2 * b), operator(a) - 2 * operator(b)
    size = float(parts.abs().max()) + float(whole.abs().max())
    off = max(float((whole - parts).abs().max()), float(image.abs().max()))
    if not off <= 1e-9 * size:
        raise PlanError(
            "measure.operator-not-linear",
            f"the operator is not linear: it misses f(a-2b) = f(a)-2f(b), f(0) = 0 by {off:.2g}",
            "take its bias away (x ↦ f(x) - f(0)), or give the linear part only",
        )
