"""Spectral norms of linear layers and operators, as they act: with padding, stride, dilation and groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lamina.errors import PlanError

# A proven upper bound for the norm of a convolution, from its symbol.
#
# A convolution that pads with zeros is a piece of the convolution on a torus that is too long for its ends to meet:
# fewer inputs, fewer outputs, the same numbers. So its norm is at most that of the torus, where a Fourier transform
# makes it block-diagonal: the largest norm of the (channels out × channels in) matrices Ŵ(ω) over the frequencies ω of
# the torus. Stride s is first turned into s phases of the input, each a channel (a permutation, which changes no
# norm); dilation is a longer kernel with zeros in it; groups are separate operators; a transposed convolution has the
# norm of the convolution it transposes. For long signals the bound is tight: its excess falls as 1/length².

_MOST_WORK = 2e9  # frequencies × channels³ that are worth it: a few seconds


def fourier_norm_bound(
    weight: Tensor,
    lengths: Sequence[int],
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    wraps: bool = False,
) -> float:
    """An upper bound for y = conv(x, weight), x of spatial size `lengths`; inf where it would take too long.

    weight (out, in/groups, *kernel), float64. `wraps`: padding is circular, the torus is the signal itself; the
    caller makes sure that each length is a multiple of its stride and that outputs do not repeat.
    """
    blocks = weight.detach().reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    sizes: list[int] = []
    for axis, (length, s, d) in enumerate(zip(lengths, stride, dilation, strict=True)):
        blocks = _stride_to_channels(_dilate_kernel(blocks, 3 + axis, d), 3 + axis, s)
        taps = blocks.shape[3 + axis]
        # without wrapping, one more for the phase at which the signal begins
        sizes.append(length // s if wraps else -(-length // s) + 1 + taps)
    frequencies, smaller = math.prod(sizes), min(blocks.shape[1:3])
    if groups * frequencies * smaller**2 * max(blocks.shape[1:3]) > _MOST_WORK:
        return math.inf
    return _largest_symbol_norm(blocks, sizes)


def _dilate_kernel(blocks: Tensor, axis: int, dilation: int) -> Tensor:
    """Taps `dilation` apart, zeros between."""
    taps = blocks.shape[axis]
    if dilation == 1 or taps == 1:
        return blocks
    shape = list(blocks.shape)
    shape[axis] = dilation * (taps - 1) + 1
    places = torch.arange(taps) * dilation
    return blocks.new_zeros(shape).index_copy_(axis, places, blocks)


def _stride_to_channels(blocks: Tensor, axis: int, stride: int) -> Tensor:
    """Tap t = stride·j + phase becomes tap j of the input channel (channel, phase)."""
    if stride == 1:
        return blocks
    taps = blocks.shape[axis]
    longer = -(-taps // stride)
    shape = list(blocks.shape)
    shape[axis] = longer * stride
    padded = blocks.new_zeros(shape)
    padded.narrow(axis, 0, taps).copy_(blocks)
    split: Tensor = padded.unflatten(axis, (longer, stride))
    return split.movedim(axis + 1, 3).flatten(2, 3)  # the phase beside the input channel


def _largest_symbol_norm(blocks: Tensor, sizes: Sequence[int]) -> float:
    """max over groups and frequencies of ‖Ŵ(ω)‖. The kernel is real, so half of the last axis is enough."""
    axes = tuple(range(3, 3 + len(sizes)))
    folded = _fold_kernel(blocks, sizes)
    symbol = torch.fft.rfftn(folded, dim=axes).flatten(3).movedim(-1, 1)  # groups, frequency, out, in
    gram = symbol @ symbol.mH if symbol.shape[-2] <= symbol.shape[-1] else symbol.mH @ symbol
    top = gram.real if gram.shape[-1] == 1 else torch.linalg.eigvalsh(gram)[..., -1]
    return math.sqrt(max(float(top.max()), 0.0))


def _fold_kernel(blocks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Kernels as long as the torus; taps that reach around it are added up."""
    for axis, size in enumerate(sizes, start=3):
        taps = blocks.shape[axis]
        shape = list(blocks.shape)
        shape[axis] = size
        places = torch.arange(taps) % size
        blocks = blocks.new_zeros(shape).index_add_(axis, places, blocks)
    return blocks


Operator = Callable[[Tensor], Tensor]

_FORWARD: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_TRANSPOSED_LAYERS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTION_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED_LAYERS)

Sizes = int | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ConvolutionOperator:
    """x ↦ conv(x, weight) without bias, with torch's meaning of every argument.

    weight is (out, in/groups, *kernel), for a transposed one (in, out/groups, *kernel).
    """

    weight: Tensor
    stride: Sizes = 1
    padding: Sizes | str = 0
    dilation: Sizes = 1
    groups: int = 1
    padding_mode: str = "zeros"
    transposed: bool = False
    output_padding: Sizes = 0

    @classmethod
    def of(cls, layer: Any) -> ConvolutionOperator:
        """The convolution that one of LAYERS carries out."""
        return cls(
            weight=layer.weight,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            padding_mode=layer.padding_mode,
            transposed=isinstance(layer, _TRANSPOSED_LAYERS),
            output_padding=layer.output_padding,
        )

    @property
    def dims(self) -> int:
        return self.weight.ndim - 2

    @property
    def channels(self) -> int:
        """Of the input."""
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups

    def operator(self) -> Operator:
        """The map on one example, (channels, *spatial), without batch axis."""
        if self.transposed:
            spread = _TRANSPOSED[self.dims - 1]
            options = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            return lambda x: spread(x, self.weight, None, *options)
        convolve = _FORWARD[self.dims - 1]
        if self.padding_mode == "zeros" and self.padding != "same":
            given = (self.stride, self.padding, self.dilation, self.groups)
            return lambda x: convolve(x, self.weight, None, *given)
        sides, mode = self._sides(), "constant" if self.padding_mode == "zeros" else self.padding_mode

        def padded(x: Tensor) -> Tensor:
            wide = F.pad(x.unsqueeze(0), sides, mode=mode).squeeze(0)
            return convolve(wide, self.weight, None, self.stride, 0, self.dilation, self.groups)

        return padded

    def bound(self, shape: Sequence[int]) -> float:
        """An upper bound on the norm for inputs of this shape where the torus gives one, else inf."""
        image = self._image(shape)
        # a transposed convolution is the transpose of the one that maps its output to its input
        signal = image if self.transposed else tuple(shape[1:])
        stride, dilation = _per_axis(self.stride, self.dims), _per_axis(self.dilation, self.dims)
        wraps = self.padding_mode == "circular"
        if wraps and any(n % s or s * m > n for n, s, m in zip(signal, stride, image, strict=True)):
            return math.inf  # an output that is there twice is not on the torus
        if not wraps and self.padding_mode != "zeros":
            return math.inf
        return fourier_norm_bound(
            self.weight, signal, stride=stride, dilation=dilation, groups=self.groups, wraps=wraps
        )

    def _image(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial size of the output, after a check of the input's shape."""
        if len(shape) != self.dims + 1 or shape[0] != self.channels or min(shape) < 1:
            raise PlanError(
                "measure.input-shape-not",
                f"input_shape {tuple(shape)} does not fit a convolution of {self.channels} channels",
                f"give ({self.channels}, …) with {self.dims} spatial sizes and no batch axis",
            )
        try:
            return tuple(self.operator()(torch.zeros(tuple(shape), dtype=self.weight.dtype)).shape[1:])
        except RuntimeError as problem:
            raise PlanError(
                "measure.convolution-not-accept",
                f"the convolution does not accept input_shape {tuple(shape)}: {problem}",
                "give the shape that the layer really sees",
            ) from problem

    def _sides(self) -> list[int]:
        """What F.pad is told: before and after, last axis first."""
        if self.padding == "valid":
            return [0] * (2 * self.dims)
        if self.padding != "same":
            assert not isinstance(self.padding, str)
            return [width for width in reversed(_per_axis(self.padding, self.dims)) for _ in range(2)]
        spans = zip(_per_axis(self.dilation, self.dims), self.weight.shape[2:], strict=True)
        totals = [d * (taps - 1) for d, taps in spans]
        return [width for total in reversed(totals) for width in (total // 2, total - total // 2)]


def _per_axis(sizes: Sizes, dims: int) -> tuple[int, ...]:
    """One number for all axes, or one for each."""
    if isinstance(sizes, int):
        return (sizes,) * dims
    return tuple(sizes) if len(sizes) == dims else tuple(sizes) * dims


# The norm of a linear operator that is known only by its products: a bracket from Golub and Kahan's process.
#
# From a random unit vector v the process builds orthonormal V, U with A V = U B, B bidiagonal. After k steps:
#
# lower   ‖A y‖ for the best unit vector y = V s, computed afresh: ‖A‖ is at least that, whatever v was
# upper   the next basis vector is p(AᵀA)v for the Lanczos polynomial p, so 1 ≥ p(‖A‖²)·|c| with c the component of v
#         along the top singular vector. For a uniform v in n dimensions Pr[|c| < t] ≤ t·√(2n/π); with t such that this
#         is MISS, ‖A‖² is at most the point beyond the zeros of p where p = 1/t (Hochstenbach 2013)
#
# The upper end is wrong with probability at most MISS over the random start, for *every* operator: no gap, no rate of
# convergence and no luck is assumed. The start comes from a fixed seed, which no weights were chosen to defeat.
# Arithmetic is float64 with full re-orthogonalisation, whose error acts as a relative change of A of about 1e-15 per
# step; both ends are moved outwards by ROUNDING for it. t stays far above that error: else p would see only rounding.

Array = NDArray[np.float64]
VectorProduct = Callable[[Tensor], Tensor]

FAILURE_PROBABILITY = 1e-9
ROUNDING = 1e-12
_STEPS_BETWEEN_CHECKS = 10  # steps between two looks at the bracket
_MOST_BASIS_NUMBERS = 1 << 25  # the bases may hold: 256 MB
_EXHAUSTED = 1e-13  # a new direction shorter than this, relatively, is rounding: the space is invariant


@dataclass(frozen=True, kw_only=True, slots=True)
class NormBracket:
    """lower ≤ ‖A‖ ≤ upper, and how that is known.

    method     "dense": all singular values. "torus": `upper` is proven by a Fourier transform. "random start":
               `upper` holds with probability at least 1 - MISS
    residual   ‖AᵀA y - lower² y‖/lower² of the vector y that attains `lower` (0 for "dense")
    steps      products with A and with Aᵀ
    """

    lower: float
    upper: float
    method: str
    residual: float = 0.0
    steps: int = 0

    @property
    def width(self) -> float:
        """(upper - lower)/lower; 0 for the zero operator."""
        return (self.upper - self.lower) / self.lower if self.lower > 0 else self.upper

    def scaled(self, factor: float) -> NormBracket:
        """The bracket of factor·A, factor > 0."""
        return replace(self, lower=self.lower * factor, upper=self.upper * factor)


@dataclass
class _KrylovBasis:
    """V (k+1 rows), U (k rows) and the diagonals α, β of B."""

    right: Tensor
    left: Tensor
    alpha: list[float]
    beta: list[float]

    def tridiagonal(self) -> tuple[Array, Array]:
        """BᵀB: its diagonal (k), and beside it α·β (k), the last of which leads out of the space."""
        alpha, beta = np.array(self.alpha), np.array(self.beta)
        diagonal = alpha**2
        diagonal[1:] += beta[:-1] ** 2
        return diagonal, alpha * beta


def golub_kahan(
    forward: VectorProduct,
    adjoint: VectorProduct,
    sizes: tuple[int, int],
    *,
    tolerance: float,
    most: int,
    seed: int,
    proven: float = math.inf,
) -> NormBracket:
    """Steps until upper ≤ (1 + tolerance)·lower, the space is exhausted, or `most` were taken.

    `sizes` are (columns, rows) of A; `proven` is an upper bound known from elsewhere.
    """
    columns, rows = sizes
    most = max(min(most, _MOST_BASIS_NUMBERS // (columns + rows), columns), 2)
    basis = _KrylovBasis(
        torch.empty(most + 1, columns, dtype=torch.float64), torch.empty(most, rows, dtype=torch.float64), [], []
    )
    start = torch.randn(columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis.right[0] = start / torch.linalg.vector_norm(start)
    unit = float(torch.linalg.vector_norm(forward(basis.right[0])))
    if unit == 0.0:
        return NormBracket(lower=0.0, upper=0.0, method="random start", steps=1)
    ahead, back = ((lambda v: forward(v) / unit), (lambda u: adjoint(u) / unit))  # squares neither over- nor underflow
    threshold = math.log(math.sqrt(2.0 * columns / math.pi) / FAILURE_PROBABILITY)
    ended = False
    for k in range(1, most + 1):
        ended = _extend_basis(ahead, back, basis) or k == columns
        if (
            ended
            or k == most
            or (k % _STEPS_BETWEEN_CHECKS == 0 and _narrow_enough(basis, tolerance, threshold, proven / unit))
        ):
            break
    found = _bracket_of_basis(ahead, back, basis, proven / unit, None if ended else threshold)
    return found.scaled(unit)


def _extend_basis(forward: VectorProduct, adjoint: VectorProduct, basis: _KrylovBasis) -> bool:
    """One step; True if it found no new direction."""
    k = len(basis.alpha)
    scale = max((*basis.alpha, *basis.beta), default=0.0)
    u = _orthogonalise(forward(basis.right[k]), basis.left[:k])
    alpha = float(torch.linalg.vector_norm(u))
    if k == len(u) or alpha <= _EXHAUSTED * scale:
        basis.alpha.append(0.0)
        basis.beta.append(0.0)
        return True
    basis.left[k] = u / alpha
    w = _orthogonalise(adjoint(basis.left[k]), basis.right[: k + 1])
    beta = float(torch.linalg.vector_norm(w))
    basis.alpha.append(alpha)
    basis.beta.append(beta)
    if beta <= _EXHAUSTED * max(scale, alpha):
        return True
    basis.right[k + 1] = w / beta
    return False


def _orthogonalise(vector: Tensor, rows: Tensor) -> Tensor:
    """What of the vector is orthogonal to the rows. Twice, since what cancels in the first pass leaves its rounding."""
    for _ in range(2):
        vector = vector - rows.T @ (rows @ vector)
    return vector


def _narrow_enough(basis: _KrylovBasis, tolerance: float, threshold: float, proven: float) -> bool:
    diagonal, beside = basis.tridiagonal()
    top, _ = _largest_eigenpair(diagonal, beside)
    target = top * (1 + 0.99 * tolerance) ** 2
    return proven**2 <= target or _log_polynomial(target, diagonal, beside) >= threshold


def _bracket_of_basis(
    forward: VectorProduct, adjoint: VectorProduct, basis: _KrylovBasis, proven: float, threshold: float | None
) -> NormBracket:
    """The ends that this basis proves. threshold None: the space is invariant, and its norm is the norm."""
    steps = len(basis.alpha)
    diagonal, beside = basis.tridiagonal()
    top, vector = _largest_eigenpair(diagonal, beside)
    y = basis.right[:steps].T @ torch.from_numpy(vector)
    y = y / torch.linalg.vector_norm(y)
    image = forward(y)
    lower = float(torch.linalg.vector_norm(image))
    residual = float(torch.linalg.vector_norm(adjoint(image) - lower**2 * y)) / lower**2
    guess = math.sqrt(top if threshold is None else _solve_log_polynomial(top, diagonal, beside, threshold))
    method = "random start" if guess < proven else "torus"
    upper = max(min(guess, proven), lower) * (1 + ROUNDING)
    return NormBracket(lower=lower * (1 - ROUNDING), upper=upper, method=method, residual=residual, steps=steps + 1)


def _largest_eigenpair(diagonal: Array, beside: Array) -> tuple[float, Array]:
    """The largest eigenvalue of the tridiagonal matrix and its vector."""
    last = len(diagonal) - 1
    if last == 0:
        return float(diagonal[0]), np.ones(1)
    values, vectors = eigh_tridiagonal(diagonal, beside[:-1], select="i", select_range=(last, last))
    return float(values[0]), np.asarray(vectors[:, 0], np.float64)


def _log_polynomial(x: float, diagonal: Array, beside: Array) -> float:
    """log p(x) = Σ log(pivot/β), from the pivots of x - BᵀB; -inf where x is not beyond all zeros."""
    pivot, previous, total = math.inf, 0.0, 0.0
    for d, e in zip(diagonal.tolist(), beside.tolist(), strict=True):
        pivot = (x - d) - previous * (previous / pivot)
        if pivot <= 0.0:
            return -math.inf
        total += math.log(pivot) - math.log(e)
        previous = e
    return total


def _solve_log_polynomial(top: float, diagonal: Array, beside: Array, threshold: float) -> float:
    """The x ≥ top with log p(x) = threshold, from above."""
    low, high = top, 2.0 * top
    while _log_polynomial(high, diagonal, beside) < threshold:
        low, high = high, 4.0 * high
    while high - low > 1e-14 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if _log_polynomial(middle, diagonal, beside) < threshold:
            low = middle
        else:
            high = middle
    return high


# Spectral norms of linear layers as they act: with their padding, stride, dilation and groups, in float64.
#
# The norm of a convolution is not that of its reshaped weight; it depends on the size of the input. What is reported
# never falls short: `spectral_norm` returns the upper end of a bracket that `spectral_bracket` shows in full.
#
#     small matrices      all singular values
#     convolutions        from above by their symbol on a torus (torus.py), from below by Golub and Kahan's process
#     everything else     from above and below by that process (krylov.py); the upper end holds with probability 1 - 1e-9
#
# `tolerance` says how narrow the bracket should be. Should `most` steps not get there, the bracket is wider, not wrong.

TOLERANCE = 1e-3
MOST_STEPS = 400
SEED = 20_240_607
_DENSE_LIMIT = 1024  # rows or columns, whichever are fewer, up to which a matrix is decomposed
_EXPLICIT_LIMIT = 48  # the same, up to which an operator is written out as a matrix
LinearLayer = nn.Module | ConvolutionOperator | Tensor


def spectral_norm(
    layer: LinearLayer,
    input_shape: Sequence[int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST_STEPS,
) -> float:
    """‖A‖ of a Linear or (transposed) convolution layer without its bias, of a Convolution or a matrix; from above.

    `input_shape` is that of one example, without the batch: (channels, length) for Conv1d. Linear needs none.
    """
    return spectral_bracket(layer, input_shape, tolerance=tolerance, most=most).upper


def spectral_norm_of(
    operator: Operator, shape: Sequence[int], *, tolerance: float = TOLERANCE, most: int = MOST_STEPS
) -> float:
    """‖A‖ of any linear function of one float64 tensor of this shape; from above. See spectral_bracket_of."""
    return spectral_bracket_of(operator, shape, tolerance=tolerance, most=most).upper


def spectral_bracket(
    layer: LinearLayer,
    input_shape: Sequence[int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST_STEPS,
) -> NormBracket:
    """The bracket around ‖A‖; arguments as for spectral_norm."""
    if isinstance(layer, Tensor | nn.Linear):
        return _matrix_bracket(_float64_weight(layer), tolerance, most)
    if not isinstance(layer, (ConvolutionOperator, *CONVOLUTION_LAYERS)):
        raise PlanError(
            "measure.not-linear-layer",
            f"{type(layer).__name__} is not a linear layer whose norm is known here",
            "give Linear, Conv1d/2d/3d or ConvTranspose1d/2d/3d; for another linear map, spectral_norm_of(f, shape)",
        )
    weight = _float64_weight(layer)
    if input_shape is None:
        raise PlanError(
            "measure.norm-convolution-depends",
            "the norm of a convolution depends on its input's size, and input_shape is missing",
            "give the shape of one example without the batch, for example input_shape=(12, 256)",
        )
    scale = float(weight.abs().max())
    if scale == 0.0:
        return NormBracket(lower=0.0, upper=0.0, method="dense")
    given = layer if isinstance(layer, ConvolutionOperator) else ConvolutionOperator.of(layer)
    unit = replace(given, weight=weight / scale)
    proven = unit.bound(input_shape)
    found = spectral_bracket_of(unit.operator(), input_shape, tolerance=tolerance, most=most, proven=proven)
    return found.scaled(scale)


def spectral_bracket_of(
    operator: Operator,
    shape: Sequence[int],
    *,
    tolerance: float = TOLERANCE,
    most: int = MOST_STEPS,
    proven: float = math.inf,
) -> NormBracket:
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
    if min(sizes) <= _EXPLICIT_LIMIT:
        product, side = (forward, sizes[0]) if sizes[0] <= sizes[1] else (adjoint, sizes[1])
        columns = [product(unit) for unit in torch.eye(side, dtype=torch.float64)]
        return replace(_matrix_bracket(torch.stack(columns), tolerance, most), steps=side)
    return golub_kahan(forward, adjoint, sizes, tolerance=tolerance, most=most, seed=SEED, proven=proven)


def _matrix_bracket(weight: Tensor, tolerance: float, most: int) -> NormBracket:
    if weight.ndim != 2:
        raise PlanError(
            "measure.tensor-shape-not",
            f"a tensor of shape {tuple(weight.shape)} is not a matrix",
            "give the layer itself and its input_shape: the norm of a convolution is not that of its reshaped weight",
        )
    scale = float(weight.abs().max())
    if scale == 0.0:
        return NormBracket(lower=0.0, upper=0.0, method="dense")
    w = weight / scale
    if min(w.shape) > _DENSE_LIMIT:
        _check_options(w.shape, tolerance, most)
        forward: VectorProduct = lambda v: w @ v  # noqa: E731
        sizes = (w.shape[1], w.shape[0])
        found = golub_kahan(forward, lambda u: w.T @ u, sizes, tolerance=tolerance, most=most, seed=SEED)
        return found.scaled(scale)
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    norm = math.sqrt(float(torch.linalg.eigvalsh(gram)[-1])) * scale
    return NormBracket(lower=norm * (1 - ROUNDING), upper=norm * (1 + ROUNDING), method="dense")


def _float64_weight(layer: LinearLayer) -> Tensor:
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
        raise PlanError("measure.shape-holds-no", f"shape {tuple(shape)} holds no numbers", "give positive sizes")
    if not (math.isfinite(tolerance) and tolerance > 0) or most < 1:
        raise PlanError(
            "measure.tolerance-leave",
            f"tolerance={tolerance}, most={most}: must be > 0 and >= 1",
            f"leave them at {TOLERANCE} and {MOST_STEPS}",
        )


def _pullback(operator: Operator, zero: Tensor) -> tuple[Tensor, VectorProduct]:
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
