"""How much one operation stretches a distance: linear maps, activations, pools, normalisation, softmax.

These numbers shape clip norms. An error in them costs utility, never privacy, so they are estimates:

    spectral norms     of matrices exact; of other linear maps 100 steps of power iteration, times 1.01:
                       typically within 1 %, not proven (exact for maps of at most 100 inputs)
    E|f'(Z)|           4,096 points of equal probability: within TV(|f'|)/8192, which is below 3e-4 for ReLU, GELU,
                       hardtanh and their like
    softmax Jacobian   30 steps of power iteration: 0.3 % low at most over rows of 2 to 200 weights, ties among them

The last part holds formulas of the LSAB paper as they are printed, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lamina import validate
from lamina.allocate.measure.trace import Node
from lamina.errors import NoBound, PlanError

InputValues = Mapping[str, Tensor]
"""A value, zero unless said otherwise, for every input of a node."""

POWER_STEPS = 100
SLOPE_POINTS = 4096
_SEED = 20_240_607
_LARGEST_DENSE = 1024  # smaller side of a matrix up to which all eigenvalues of its Gram matrix are computed
_UPWARD = 1.01  # power iteration ends below the norm


def euclidean_norm(value: Any) -> float:
    """The Euclidean norm of all entries, in float64; 0 for what is no tensor."""
    return float(value.detach().double().norm()) if isinstance(value, Tensor) else 0.0


def norm_at_zero(node: Node, at: InputValues) -> float:
    """‖f(0)‖ of one patient: what a bias, a table of positions or a padding value adds."""
    with torch.no_grad():
        return euclidean_norm(_call_node(node, at))


def _call_node(node: Node, at: InputValues) -> Any:
    assert node.call is not None
    return node.call(at)


# ------------------------------------------------------------------------------------------------- linear maps


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value of a matrix: exact up to 1,024 rows or columns, above as `spectral_norm_of`."""
    m = matrix.detach().to("cpu", torch.float64)
    if not m.isfinite().all():
        raise PlanError("sensitivity.weight-not-finite", "a weight matrix is not finite", "initialise the layer again")
    if min(m.shape) > _LARGEST_DENSE:
        return spectral_norm_of(lambda v: m @ v, m.shape[1:])
    gram = m @ m.T if m.shape[0] <= m.shape[1] else m.T @ m
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0))


def spectral_norm_of(operator: Callable[[Tensor], Tensor], shape: Sequence[int]) -> float:
    """‖A‖ of a linear function of one float64 tensor of this shape, by power iteration on AᵀA; Aᵀ by autograd.

    Power iteration approaches the norm from below. After 100 steps from a fixed random start it is 0.03 to 0.4 % low
    for the 19 convolutions of ResidualAutoencoder, so the result is multiplied by 1.01. A map of at most 100 inputs is
    written out as a matrix: exact.
    """
    size = math.prod(shape)
    if size <= POWER_STEPS:
        with torch.no_grad():
            columns = [operator(unit.reshape(shape)).flatten() for unit in torch.eye(size, dtype=torch.float64)]
        return spectral_norm(torch.stack(columns))
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        y = operator(x)  # the recorded graph of a linear map serves every vector
    v, norm = x.detach(), 0.0
    for _ in range(POWER_STEPS):
        with torch.no_grad():
            image = operator(v / v.norm())
        norm = float(image.norm())
        if norm == 0:
            return 0.0
        (v,) = torch.autograd.grad(y, x, image / norm, retain_graph=True)
    return _UPWARD * norm


_MATRIX_ARGUMENTS = {
    "linear": ("input", "weight"),
    "addmm": ("mat1", "mat2"),
    "mm": ("self", "mat2"),
    "matmul": ("self", "other"),
}


def linear_norm(node: Node, at: InputValues) -> float:
    """The norm of x ↦ f(x) - f(0), f affine; from the matrix where f multiplies by one.

    A convolution has not the norm of its reshaped weight: padding, stride, dilation and the size of the input count.
    """
    operand, matrix = (node.arguments.get(name) for name in _MATRIX_ARGUMENTS.get(node.base, ("", "")))
    if isinstance(operand, str) and isinstance(matrix, Tensor) and matrix.ndim == 2:
        return abs(float(node.arguments.get("alpha", 1))) * spectral_norm(matrix)
    ((name, zero),) = at.items()
    with torch.no_grad():
        rest = _call_node(node, {name: zero.double()})
    return spectral_norm_of(lambda x: _call_node(node, {name: x}) - rest, zero.shape)


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

    In one dimension entry i lies in window j if i = j·stride + t·dilation for a t in [0, kernel). Windows of an
    adaptive pool overlap where they do not divide the length, by one entry at most: an upper bound.
    """
    if node.base in ("amax", "amin"):
        return 1.0
    given, dims = node.arguments, int(node.base[-2])
    if node.base.startswith("adaptive"):
        ends = zip(shape[-dims:], _per_dimension(given["output_size"], dims), strict=True)
        return math.sqrt(math.prod(1 if n % m == 0 else -(-m // n) + 1 for n, m in ends))
    kernel = _per_dimension(given["kernel_size"], dims)
    stride = _per_dimension(given["stride"], dims) if given["stride"] else kernel
    sizes = zip(kernel, stride, _per_dimension(given["dilation"], dims), strict=True)
    return math.sqrt(math.prod(-(-k // (s // math.gcd(s, d))) for k, s, d in sizes))


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


# ------------------------------------------------------------------------------------------------- activations

_LARGEST_SLOPES = {
    "relu": 1.0, "relu6": 1.0, "hardtanh": 1.0, "clamp": 1.0, "clamp_min": 1.0, "clamp_max": 1.0, "abs": 1.0,
    "softshrink": 1.0, "hardsigmoid": 1 / 6, "hardswish": 1.5, "gelu": 1.1289041451851549, "silu": 1.0998393201288672,
    "mish": 1.088498161251728, "tanh": 1.0, "sigmoid": 0.25, "log_sigmoid": 1.0, "softplus": 1.0, "celu": 1.0,
    "selu": 1.0507009873554805 * 1.6732632423543772, "sin": 1.0, "cos": 1.0, "atan": 1.0,
    "erf": 2 / math.sqrt(math.pi),
}  # fmt: skip


def largest_slope(operation: str, arguments: Mapping[str, Any]) -> float:
    """sup|f'| of an activation, by its name in ATen: its Lipschitz constant. Constants are rounded up."""
    if operation == "gelu" and arguments.get("approximate") == "tanh":
        return 1.128993068658772
    if operation == "leaky_relu":
        return max(1.0, abs(float(arguments["negative_slope"])))
    if operation == "prelu":
        return max(1.0, float(arguments["weight"].detach().abs().max()))
    if operation == "elu":
        scale, inner = float(arguments.get("scale", 1)), float(arguments.get("input_scale", 1))
        return abs(scale) * max(1.0, abs(float(arguments["alpha"]) * inner))
    return _LARGEST_SLOPES[operation]


def expected_slope(
    f: Callable[[Tensor], Tensor], mean: float, std: float, largest: float, *, channels: int = 1
) -> float:
    """E|f'(Z)|, Z ~ N(mean, std²), from 4,096 points of equal probability; f' by autograd, `largest` is sup|f'|.

    By Koksma's inequality the error is at most TV(|f'|)/8192 for every mean and std, kinks or not. A unit that is
    almost never open would get exactly 0, and Δ = 0 means that no input reaches the layer: hence at least
    largest/8192. A function with a slope per channel gets its points as (4096, channels).

    The Gaussian is assumption A3 of the LSAB document. An expectation is not a bound: sup|f'| is.
    """
    share = (torch.arange(SLOPE_POINTS, dtype=torch.float64) + 0.5) / SLOPE_POINTS
    slope = slopes_at(f, (mean + std * torch.special.ndtri(share))[:, None].repeat(1, channels))
    return limit_slope(float(slope.mean()), largest)


def limit_slope(slope: float, largest: float) -> float:
    """A mean slope, kept between `largest`/8192 (0 would mean that no input reaches the layer) and `largest`."""
    return min(max(slope, largest / (2 * SLOPE_POINTS)), largest)


def slopes_at(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Return |f'| at every entry of `z`, by autograd; `f` acts on each entry alone."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(f(z.clone()).sum(), z)
    return slope.abs()


def single_number(value: Any) -> float | None:
    """A number, or a tensor that holds one; None for anything else."""
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return None


def observed_slopes(node: Node, z: Tensor) -> Tensor:
    """Return |f'| of an activation node at the inputs `z` that it got."""
    return slopes_at(lambda z: _call_node(node, {node.inputs[0]: z}), z)


def activation_slopes(node: Node, mean: float, std: float, exponent: float = 0.0) -> tuple[float, float]:
    """E|f'(Z)|, Z ~ N(mean, std²), and sup|f'| of an activation node; exp's is at the largest `exponent` it can get."""
    given = node.arguments
    largest = math.exp(exponent) if node.base == "exp" else largest_slope(node.base, given)
    if any(isinstance(given.get(limit), Tensor | str) for limit in ("min", "max")):
        raise NoBound("sensitivity.clamp-to-tensors", f"{node} clamps to tensors", "clamp to two numbers")
    channels = given["weight"].numel() if node.base == "prelu" else 1
    f = lambda z: _call_node(node, {node.inputs[0]: z})  # noqa: E731
    return expected_slope(f, mean, std, largest, channels=channels), largest


def dropout_slope(p: float) -> float:
    """The largest slope of dropout: each entry is 0, or kept and divided by 1-p."""
    validate.number(
        NoBound, "sensitivity.dropout-rate", least=0, below=1, p=p, remedy="remove a layer that drops everything"
    )
    return 1.0 / (1.0 - p)


# ------------------------------------------------------------------------------------------------- normalisation, softmax


def affine_norm_constant(gain: Any, variance: Any, eps: float) -> float:
    """max |gain|/√(variance + eps), over channels or examples: the Lipschitz constant of the fixed affine map.

    A layer that takes its statistics from the example itself (LayerNorm, GroupNorm) is, at any point, this map after
    an orthogonal projection, so that with the smallest variance of the inputs the constant bounds its slope there.
    The input's own variance may be tiny: then the constant is up to |gain|/√eps, and that is what it really does.
    """
    gains, variances = np.asarray(gain, np.float64), np.asarray(variance, np.float64)
    if not (variances + eps > 0).all():
        problem = f"variance + eps is 0 (eps={eps})"
        raise PlanError("sensitivity.normalises-by-zero", problem, "give the layer a positive eps")
    return float(np.max(np.abs(gains) / np.sqrt(variances + eps)))


def softmax_jacobian_norm(weights: Tensor) -> Tensor:
    """‖J‖ of J = diag(a) - aaᵀ, the Jacobian of a softmax, for every row a of weights (..., n), in float64.

        max a(1-a) ≤ ‖J‖ ≤ 2·max a(1-a) ≤ ½           (a diagonal entry; the largest absolute row sum)

    30 steps of power iteration from the unit vector of the largest weight, where the quotient is the lower end and
    to which the top eigenvector is never orthogonal. The tests allow 1 % and find 0.3 % at most.
    """
    a = weights.detach().double()
    v = torch.zeros_like(a).scatter_(-1, a.argmax(-1, keepdim=True), 1.0)
    norm = a.new_zeros(a.shape[:-1])
    for _ in range(30):
        image = a * (v - (a * v).sum(-1, keepdim=True))
        norm = (v * image).sum(-1)
        v = image / image.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return norm


# ------------------------------------------------------------------------------------------------- the paper's formulas

Array = NDArray[np.float64]


def paper_relu_slope(mean: Any, variance: Any, epsilon_n: float = 0.0) -> Array:
    """Eq. 8: 1 - Φ(-μ/√(σ²+ε_n)). Right, up to what ε_n adds; `expected_slope(relu, …)` is the same number."""
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


def paper_compression_clamped(std_out: float, std_in: float) -> float:
    """Eq. 12: γ = σ_out/σ_in, "in (0, 1]". It exceeds 1 for every layer that widens the spread: forced to 1 there."""
    return min(std_out / std_in, 1.0)


def paper_norm_compression(epsilon: float, std: float) -> float:
    """After eq. 12: γ = ε/σ of a normalised layer, "< 1", σ the deviation that it divides by; forced to 1 above.

    It is no bound. The layer multiplies a small change by up to |gain|/√(σ² + ε), which exceeds ε/σ for every σ if
    |gain| = 1 and ε < 1: at σ = 1 and ε = 1e-5 by a factor of 100,000. `tight` takes |gain|/√(σ² + ε) at the σ that was
    seen, and `worst`, which is a bound, |gain|/√ε (lamina.allocate.measure.bounds).
    """
    return min(epsilon / std, 1.0) if std > 0 else 1.0


def paper_residual(main: float, skip: float) -> float:
    """Eq. 13: √(a²+b²). Perturbations of both paths come from one input and may align: a+b, up to √2 larger."""
    return math.hypot(main, skip)


def paper_attention_norm(weights: Tensor) -> Tensor:
    """Eq. 20: a_max(1 - a_max), called the norm of diag(a) - aaᵀ and "< 1/4". It is a lower bound of that norm.

    The norm reaches twice as much: a = (½, ½) has norm ½, printed ¼.
    """
    top = weights.to(torch.float64).amax(-1)
    return top * (1.0 - top)
