"""How much one operation stretches a distance.

Linear maps, pooling, normalisation, softmax; and the LSAB paper's own formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.sensitivity.spectral import spectral_norm, spectral_norm_of
from lamina.sensitivity.trace import Node

InputValues = Mapping[str, Tensor]
"""A value, zero unless said otherwise, for every input of a node."""


def euclidean_norm(value: Any) -> float:
    """The Euclidean norm of all entries, in float64; 0 for what is no tensor."""
    return float(value.detach().double().norm()) if isinstance(value, Tensor) else 0.0


def norm_at_zero(node: Node, at: InputValues) -> float:
    """‖f(0)‖ of one patient: what a bias, a table of positions or a padding value adds."""
    with torch.no_grad():
        return euclidean_norm(_call_node(node, at))


_MATRIX_ARGUMENTS = {
    "linear": ("input", "weight"),
    "addmm": ("mat1", "mat2"),
    "mm": ("self", "mat2"),
    "matmul": ("self", "other"),
}


def linear_norm(node: Node, at: InputValues) -> float:
    """The norm of x ↦ f(x) - f(0), f affine; from the matrix where f multiplies by one."""
    operand, matrix = (node.arguments.get(name) for name in _MATRIX_ARGUMENTS.get(node.base, ("", "")))
    if isinstance(operand, str) and isinstance(matrix, Tensor) and matrix.ndim == 2:
        return abs(float(node.arguments.get("alpha", 1))) * spectral_norm(matrix)
    return operator_norm(node, at)


def operator_norm(node: Node, at: InputValues) -> float:
    """The norm of x ↦ f(x) - f(0), f affine, from its products with vectors."""
    ((name, zero),) = at.items()
    with torch.no_grad():
        rest = _call_node(node, {name: zero.double()})
    return spectral_norm_of(lambda x: _call_node(node, {name: x}) - rest, tuple(zero.shape))


def conv_norm(node: Node, shape: Sequence[int]) -> float:
    """The norm of a convolution on an input of this shape, padding, stride and dilation included."""
    given = node.arguments
    weight: Tensor = given["weight"]
    dims = weight.ndim - 2
    transposed = bool(given.get("transposed", node.base.startswith("conv_transpose")))
    kinds: Any = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d) if transposed
        else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )  # fmt: skip
    padding = given["padding"]
    options: dict[str, Any] = {
        "kernel_size": tuple(weight.shape[2:]),
        "stride": per_dimension(given["stride"], dims),
        "padding": padding if isinstance(padding, str) else per_dimension(padding, dims),
        "dilation": per_dimension(given["dilation"], dims),
        "groups": given["groups"],
        "bias": False,
        "device": "meta",
    }
    if transposed:
        channels = (weight.shape[0], weight.shape[1] * given["groups"])
        options["output_padding"] = per_dimension(given["output_padding"], dims)
    else:
        channels = (weight.shape[1] * given["groups"], weight.shape[0])
    layer = kinds[dims - 1](*channels, **options)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return spectral_norm(layer, tuple(shape)[-dims - 1 :])


def schur_norm_bound(node: Node, at: InputValues) -> float:
    """√(largest row sum · largest column sum) of an affine map with weights ≥ 0: a bound on its norm (Schur's test).

    Exact where all sums are equal: means, sums, pooling without overlap, repetition.
    """
    ((name, zero),) = at.items()
    with torch.enable_grad():
        x = torch.ones_like(zero, dtype=torch.float64).requires_grad_()
        y = _call_node(node, {name: x})
        (columns,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        rows = y.detach() - _call_node(node, {name: torch.zeros_like(x)})
    return math.sqrt(max(float(rows.max()), 0.0) * max(float(columns.max()), 0.0)) * (1 + 1e-12)


def copy_norm(node: Node, at: InputValues) -> float:
    """√(how often the most copied entry is copied) of an operation that only picks and copies entries."""
    ((name, zero),) = at.items()
    with torch.enable_grad():
        x = torch.zeros_like(zero, dtype=torch.float64).requires_grad_()
        y = _call_node(node, {name: x})
        (columns,) = torch.autograd.grad(y.double().sum(), x)
    return math.sqrt(float(columns.max()))


def max_pool_norm(node: Node, shape: Sequence[int]) -> float:
    """√(in how many windows of a max-pool an entry can lie): it may be the maximum of all of them.

    In one dimension entry i lies in window j if i = j·stride + t·dilation for a t in [0, kernel).
    """
    if node.base in ("amax", "amin"):
        return 1.0
    given, dims = node.arguments, int(node.base[-2])
    if node.base.startswith("adaptive"):
        ends = zip(shape[-dims:], per_dimension(given["output_size"], dims), strict=True)
        return math.sqrt(math.prod(_most_adaptive_windows(n, m) for n, m in ends))
    kernel = per_dimension(given["kernel_size"], dims)
    stride = per_dimension(given["stride"], dims) if given["stride"] else kernel
    sizes = zip(kernel, stride, per_dimension(given["dilation"], dims), strict=True)
    return math.sqrt(math.prod(-(-k // (s // math.gcd(s, d))) for k, s, d in sizes))


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _most_adaptive_windows(length: int, windows: int) -> int:
    """The most windows [⌊jn/m⌋, ⌈(j+1)n/m⌉) of an adaptive pool that an entry lies in."""
    cover = [0] * length
    for j in range(windows):
        for i in range(j * length // windows, -(-(j + 1) * length // windows)):
            cover[i] += 1
    return max(cover)


def _call_node(node: Node, at: InputValues) -> Any:
    assert node.call is not None
    return node.call(at)


def affine_norm_constant(gain: Any, variance: Any, eps: float) -> float:
    """max |gain|/√(variance + eps), over channels or examples: the Lipschitz constant of the fixed affine map.

    A layer that takes its statistics from the example itself (LayerNorm, GroupNorm) is, at any point, this map after
    an orthogonal projection, so that with the smallest variance of the inputs the constant bounds its slope there.
    The input's own variance may be tiny: then the constant is up to |gain|/√eps, and that is what it really does.
    """
    gains, variances = np.asarray(gain, np.float64), np.asarray(variance, np.float64)
    if not np.isfinite(gains).all() or gains.size == 0:
        raise PlanError(
            "measure.gain-normalisation-empty",
            "the gain of a normalisation is empty or not finite",
            "give its weight, or 1.0",
        )
    if variances.size == 0 or not (np.isfinite(variances) & (variances >= 0)).all():
        raise PlanError(
            "measure.variance-normalisation-not",
            "the variance of a normalisation is not finite and >= 0",
            "profile the model again",
        )
    if not (np.isfinite(eps) and eps >= 0) or not (variances + eps > 0).all():
        raise PlanError(
            "measure.variance-eps-normalisation",
            f"variance + eps of a normalisation is 0 (eps={eps})",
            "give the layer's positive eps",
        )
    return float(np.max(np.abs(gains) / np.sqrt(variances + eps)))


# The two matrices of softmax attention: the Jacobian of a row of weights, and the weights as a whole.
#
# A row a of weights (a ≥ 0, Σa = 1) has the Jacobian J = diag(a) - aaᵀ with respect to its logits, and
#
#     max a(1-a) ≤ ‖J‖ ≤ 2·max a(1-a) ≤ ½           (a diagonal entry; the largest absolute row sum)
#
# ‖J‖ is the largest root of the secular equation Σ_i a_i/(a_i - λ) = 0, between the two largest weights. With a_1 the
# largest and ψ(λ) = Σ_{i>1} a_i/(λ - a_i), it reads G(λ) = 1/ψ(λ) - 1 + λ/a_1 = 0; 1/ψ is concave, so Newton's
# method climbs to the root from its first step on and cannot leave the interval. O(n) per row instead of O(n³).
#
# The matrix of all rows is row-stochastic. Its norm is not at most 1: when all n queries look at one key it is √n.

_NEWTON_STEPS = 60
_ENTRIES_PER_CHUNK = 1 << 17  # at a time: a megabyte of float64, so that it stays in the cache


def softmax_jacobian_norm(weights: Tensor) -> Tensor:
    """‖diag(a) - aaᵀ‖ of every row a of weights (..., n), in float64, to about 1e-14 relative."""
    rows = _row_stochastic(weights)
    flat = rows.reshape(-1, rows.shape[-1])
    size = max(_ENTRIES_PER_CHUNK // flat.shape[1], 1)
    norms = [_largest_eigenvalue(part) for part in flat.split(size)]
    return torch.cat([*norms, flat.new_empty(0)]).reshape(rows.shape[:-1])


def expected_jacobian_norm(weights: Tensor) -> float:
    """The mean of ‖J‖ over all rows: the local constant of a softmax on these proxy inputs. At most ½."""
    if weights.numel() == 0:
        raise PlanError(
            "measure.no-attention-weights", "there are no attention weights to average", "run at least one proxy batch"
        )
    return float(softmax_jacobian_norm(weights).mean())


def row_stochastic_norm(weights: Tensor) -> Tensor:
    """‖A‖ of every matrix of weights (..., queries, keys), in float64: from 1 (or less, if padded) up to √queries."""
    if weights.ndim < 2:
        raise PlanError(
            "measure.attention-weights-shape",
            f"attention weights have shape {tuple(weights.shape)}",
            "give (..., queries, keys)",
        )
    a = _row_stochastic(weights)
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    top: Tensor = torch.linalg.eigvalsh(gram)[..., -1]
    return top.clamp(min=0).sqrt()


def _row_stochastic(weights: Tensor) -> Tensor:
    """Rows in float64 that sum to 1; refused where they do not nearly do so already."""
    a = weights.detach().to(torch.float64)
    if a.ndim == 0 or a.shape[-1] == 0:
        raise PlanError(
            "measure.attention-weights-shape-give",
            f"attention weights have shape {tuple(a.shape)}",
            "give rows of at least one weight",
        )
    if not torch.isfinite(a).all() or (a < 0).any():
        raise PlanError(
            "measure.attention-weights-negative",
            "attention weights are negative or not finite",
            "give the output of softmax; a row whose keys are all masked has none: leave it out",
        )
    total = a.sum(-1, keepdim=True)
    off = (total - 1).abs().max() if total.numel() else total.new_zeros(())
    if off > 1e-2:  # half precision sums to within 1e-3
        raise PlanError(
            "measure.row-attention-weights",
            f"a row of attention weights sums to 1 ± {float(off):.3g}",
            "give the output of softmax",
        )
    return a / total


def _largest_eigenvalue(a: Tensor) -> Tensor:
    """λ_max of diag(a) - aaᵀ for rows (m, n)."""
    top, place = a.max(-1)
    rest = a.scatter(-1, place.unsqueeze(-1), 0.0)
    second, others = rest.amax(-1), rest.sum(-1)  # others = 1 - top without its cancellation
    root = torch.minimum(top, 2 * top * others)
    # a tie makes the root equal to both, and one weight alone makes J = 0: nothing to iterate, avoid 0/0
    open_rows = (others > 0) & (second < top)
    root = torch.where(open_rows, root, torch.where(others > 0, top, torch.zeros_like(top)))
    for _ in range(_NEWTON_STEPS):
        above = (root.unsqueeze(-1) - rest).clamp(min=torch.finfo(torch.float64).tiny)
        share = rest / above
        psi = share.sum(-1)
        rise = (share / above).sum(-1) / psi.square() + 1 / top
        step = (1 / psi - 1 + root / top) / rise
        new = torch.where(open_rows, (root - step).maximum(second), root)
        if ((new - root).abs() <= 1e-10 * root).all():  # quadratic: the error is the square of that
            return new
        root = new
    return root


# Formulas of the LSAB document exactly as printed, for comparison. None is used by a sound policy.
#
# Each docstring says what is wrong and by how much; tests/sensitivity/test_printed.py measures it.

Array = NDArray[np.float64]

PAPER_RATIO_CLAIMED = 4.7
"""What the text below eq. 15 says that 0.000132 amounts to."""


def paper_relu_slope(mean: Any, variance: Any, epsilon_n: float = 0.0) -> Array:
    """Eq. 8: 1 - Φ(-μ/√(σ²+ε_n)). Right, up to what ε_n adds; `local("relu", …)` is the same number."""
    spread = np.sqrt(np.asarray(variance, np.float64) + epsilon_n)
    return np.asarray(1.0 - special.ndtr(-np.asarray(mean, np.float64) / spread))


def paper_gelu_slope(mean: Any, variance: Any) -> Array:
    """Eq. 10: Φ(μ/r) + μφ(μ/r)/r, r = √(1+σ²).

    The second term should be divided by r³, and the absolute value of eq. 7 is missing: at σ = 1 it gives 0.5 for
    0.5393 (μ = 0), 0.0201 for 0.2306 (μ = -1), 0.9799 for 0.8766 (μ = 1); -0.0723 at μ = -3, where a mean
    of absolute values cannot be.
    """
    mu = np.asarray(mean, np.float64)
    r = np.sqrt(1.0 + np.asarray(variance, np.float64))
    return np.asarray(special.ndtr(mu / r) + mu * np.exp(-0.5 * (mu / r) ** 2) / math.sqrt(2 * math.pi) / r)


def paper_compression(std_out: float, std_in: float) -> float:
    """Eq. 12: γ = σ_out/σ_in, "in (0, 1]". It exceeds 1 for every layer that widens the spread."""
    return std_out / std_in


def paper_compression_clamped(std_out: float, std_in: float) -> float:
    """γ of eq. 12 forced into the interval that the document promises, as its recursion (eq. 11) needs."""
    return min(paper_compression(std_out, std_in), 1.0)


def paper_norm_compression(eps: float, std: float) -> float:
    """Below eq. 12, for normalised layers: γ = ε_BN/σ_BN. With eps 1e-5 and σ = 1 it is 1e-5.

    The layer really multiplies by |gain|/√(σ²+ε): here 1, so the printed factor is 1e5 times too small.
    """
    return eps / std


def paper_residual(main: float, skip: float) -> float:
    """Eq. 13: √(a²+b²). Perturbations of both paths come from one input and may align: a+b, up to √2 larger."""
    return math.hypot(main, skip)


def paper_ratio(depth: int = 12, local: float = 0.5, supremum: float = 1.0, gamma: float = 0.95) -> float:
    """Eq. 15: (local/supremum)^depth·γ^depth = 0.475^12 = 0.000132 by default.

    The text calls this "4.7×" tighter; its inverse is 7580.
    """
    return float((local / supremum * gamma) ** depth)


def paper_attention_norm(weights: Tensor) -> Tensor:
    """Eq. 20: a_max(1 - a_max), called the norm of diag(a) - aaᵀ and "< 1/4". It is a lower bound of that norm.

    The norm reaches twice as much: a = (½, ½) has norm ½, printed ¼.
    """
    top = weights.to(torch.float64).amax(-1)
    return top * (1.0 - top)
