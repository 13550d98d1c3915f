"""How much one operation of a traced model can stretch a distance: upper bounds on the norm of its linear part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.sensitivity.graph import Node
from lamina.sensitivity.operators import spectral_norm, spectral_norm_of

At = Mapping[str, Tensor]
"""A value, zero unless said otherwise, for every input of a node."""


def norm(value: Any) -> float:
    """The Euclidean norm of all entries, in float64; 0 for what is no tensor."""
    return float(value.detach().double().norm()) if isinstance(value, Tensor) else 0.0


def offset(node: Node, at: At) -> float:
    """‖f(0)‖ of one patient: what a bias, a table of positions or a padding value adds."""
    with torch.no_grad():
        return norm(_called(node, at))


_MATRIX = {
    "linear": ("input", "weight"),
    "addmm": ("mat1", "mat2"),
    "mm": ("self", "mat2"),
    "matmul": ("self", "other"),
}


def linear_norm(node: Node, at: At) -> float:
    """The norm of x ↦ f(x) - f(0), f affine; from the matrix where f multiplies by one."""
    operand, matrix = (node.arguments.get(name) for name in _MATRIX.get(node.base, ("", "")))
    if isinstance(operand, str) and isinstance(matrix, Tensor) and matrix.ndim == 2:
        return abs(float(node.arguments.get("alpha", 1))) * spectral_norm(matrix)
    return operator_norm(node, at)


def operator_norm(node: Node, at: At) -> float:
    """The norm of x ↦ f(x) - f(0), f affine, from its products with vectors."""
    ((name, zero),) = at.items()
    with torch.no_grad():
        rest = _called(node, {name: zero.double()})
    return spectral_norm_of(lambda x: _called(node, {name: x}) - rest, tuple(zero.shape))


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
        "stride": wide(given["stride"], dims),
        "padding": padding if isinstance(padding, str) else wide(padding, dims),
        "dilation": wide(given["dilation"], dims),
        "groups": given["groups"],
        "bias": False,
        "device": "meta",
    }
    if transposed:
        channels = (weight.shape[0], weight.shape[1] * given["groups"])
        options["output_padding"] = wide(given["output_padding"], dims)
    else:
        channels = (weight.shape[1] * given["groups"], weight.shape[0])
    layer = kinds[dims - 1](*channels, **options)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return spectral_norm(layer, tuple(shape)[-dims - 1 :])


def schur(node: Node, at: At) -> float:
    """√(largest row sum · largest column sum) of an affine map with weights ≥ 0: a bound on its norm (Schur's test).

    Exact where all sums are equal: means, sums, pooling without overlap, repetition.
    """
    ((name, zero),) = at.items()
    with torch.enable_grad():
        x = torch.ones_like(zero, dtype=torch.float64).requires_grad_()
        y = _called(node, {name: x})
        (columns,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        rows = y.detach() - _called(node, {name: torch.zeros_like(x)})
    return math.sqrt(max(float(rows.max()), 0.0) * max(float(columns.max()), 0.0)) * (1 + 1e-12)


def repeats(node: Node, at: At) -> float:
    """√(how often the most copied entry is copied) of an operation that only picks and copies entries."""
    ((name, zero),) = at.items()
    with torch.enable_grad():
        x = torch.zeros_like(zero, dtype=torch.float64).requires_grad_()
        y = _called(node, {name: x})
        (columns,) = torch.autograd.grad(y.double().sum(), x)
    return math.sqrt(float(columns.max()))


def pooled(node: Node, shape: Sequence[int]) -> float:
    """√(in how many windows of a max-pool an entry can lie): it may be the maximum of all of them.

    In one dimension entry i lies in window j if i = j·stride + t·dilation for a t in [0, kernel).
    """
    if node.base in ("amax", "amin"):
        return 1.0
    given, dims = node.arguments, int(node.base[-2])
    if node.base.startswith("adaptive"):
        ends = zip(shape[-dims:], wide(given["output_size"], dims), strict=True)
        return math.sqrt(math.prod(_adaptive(n, m) for n, m in ends))
    kernel = wide(given["kernel_size"], dims)
    stride = wide(given["stride"], dims) if given["stride"] else kernel
    sizes = zip(kernel, stride, wide(given["dilation"], dims), strict=True)
    return math.sqrt(math.prod(-(-k // (s // math.gcd(s, d))) for k, s, d in sizes))


def wide(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _adaptive(length: int, windows: int) -> int:
    """The most windows [⌊jn/m⌋, ⌈(j+1)n/m⌉) of an adaptive pool that an entry lies in."""
    cover = [0] * length
    for j in range(windows):
        for i in range(j * length // windows, -(-(j + 1) * length // windows)):
            cover[i] += 1
    return max(cover)


def _called(node: Node, at: At) -> Any:
    assert node.call is not None
    return node.call(at)
