"""Local constants against quadrature, Monte Carlo and autograd; suprema; extreme arguments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, special, stats

from lamina.errors import PlanError
from lamina.sensitivity.activations import (
    ACTIVATIONS,
    GELU_SLOPE_ZERO,
    SILU_SLOPE_ZERO,
    find_activation,
    gaussian_expectation,
    gelu_local,
    gelu_signed,
    gelu_slope,
    local,
    local_of,
    supremum,
    supremum_of,
)
from lamina.sensitivity.gains import affine_norm_constant

Array = NDArray[np.float64]

# what torch itself computes, option by option: the oracle for every slope
TORCH: list[tuple[str, dict[str, float], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("relu", {}, F.relu),
    ("relu6", {}, F.relu6),
    ("leaky_relu", {"negative_slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    ("leaky_relu", {"negative_slope": -1.5}, lambda x: F.leaky_relu(x, -1.5)),
    ("prelu", {"weight": 0.3}, lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype))),
    ("hardtanh", {"min_val": -0.3, "max_val": 2.0}, lambda x: F.hardtanh(x, -0.3, 2.0)),
    ("hardsigmoid", {}, lambda x: (x / 6 + 0.5).clamp(0, 1)),  # F.hardsigmoid has 1/6 in float32
    ("hardswish", {}, F.hardswish),
    ("softshrink", {"lambd": 0.4}, lambda x: F.softshrink(x, 0.4)),
    ("identity", {}, lambda x: x.clone()),
    ("gelu", {}, F.gelu),
    ("gelu_tanh", {}, lambda x: F.gelu(x, approximate="tanh")),
    ("silu", {}, F.silu),
    ("mish", {}, F.mish),
    ("tanh", {}, torch.tanh),
    ("sigmoid", {}, torch.sigmoid),
    ("logsigmoid", {}, F.logsigmoid),
    ("softplus", {"beta": 3.0}, lambda x: F.softplus(x, 3.0, 1000)),
    ("elu", {"alpha": 1.7}, lambda x: F.elu(x, 1.7)),
    ("celu", {"alpha": 0.5}, lambda x: F.celu(x, 0.5)),  # F.celu takes 1/alpha in float32
    ("selu", {}, F.selu),
    ("softsign", {}, F.softsign),
    ("tanhshrink", {}, F.tanhshrink),
]
LABELS = [f"{name}{list(options.values()) or ''}" for name, options, _ in TORCH]


def torch_slope(f: Callable[[torch.Tensor], torch.Tensor], z: Array) -> Array:
    x = torch.from_numpy(np.array(z, np.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    return np.asarray(gradient.numpy())


def reference(f: Callable[[torch.Tensor], torch.Tensor], mean: float, std: float, cuts: Any = ()) -> float:
    """E|f'(Z)| by scipy's Gauss rule on short panels cut at the corners, with torch's own derivative."""
    grid = {mean + std * k / 4 for k in range(-40, 41)} | {*cuts} | {float(k) for k in range(-9, 10)}
    points = sorted(p for p in grid if abs(p - mean) <= 10 * std)

    def integrand(z: Array) -> Array:
        return np.asarray(np.abs(torch_slope(f, z)) * stats.norm.pdf(z, mean, std))

    return sum(integrate.fixed_quad(integrand, low, high, n=12)[0] for low, high in pairwise(points))


def test_every_activation_has_an_oracle() -> None:
    assert {name for name, _, _ in TORCH} | {"dropout"} == set(ACTIVATIONS)


@pytest.mark.parametrize(
    ("name", "mean", "value", "digits"),
    [
        ("gelu", 0.0, 0.5393, 4),
        ("gelu", -1.0, 0.2306, 4),
        ("gelu", 1.0, 0.8766, 4),
        ("silu", 0.0, 0.51164, 5),
        ("silu", 1.0, 0.82315, 5),
        ("relu", 0.0, 0.5, 15),
        ("relu", 1.0, 0.841345, 6),
    ],
)
def test_the_values_of_the_theory(name: str, mean: float, value: float, digits: int) -> None:
    assert round(local(name, mean, 1.0), digits) == pytest.approx(value, abs=1e-15)


def test_the_suprema_of_the_theory() -> None:
    assert round(supremum("gelu"), 3) == 1.129
    assert round(supremum("silu"), 4) == 1.0998
    assert supremum("relu") == supremum("tanh") == supremum("identity") == 1.0
    assert supremum("sigmoid") == 0.25
    assert supremum("dropout", p=0.2) == pytest.approx(1.25)
    assert local("dropout", 3.0, 1.0, p=0.2) == 1.0


@pytest.mark.parametrize(("name", "mean", "std"), [("gelu", -1.0, 1.0), ("silu", 0.5, 2.0), ("mish", -1.0, 0.7)])
def test_monte_carlo_agrees(name: str, mean: float, std: float) -> None:
    f = {"gelu": F.gelu, "silu": F.silu, "mish": F.mish}[name]
    z = np.random.default_rng(4).normal(mean, std, 1_000_000)
    steep = np.abs(torch_slope(f, z))
    assert abs(steep.mean() - local(name, mean, std)) < 5 * steep.std() / math.sqrt(len(z))


@pytest.mark.parametrize(("name", "options", "f"), TORCH, ids=LABELS)
def test_slopes_are_those_of_torch(name: str, options: dict[str, float], f: Any) -> None:
    z = np.concatenate([np.linspace(-12.0, 12.0, 2400) + 1e-4, [-60.0, 60.0]])
    np.testing.assert_allclose(find_activation(name, **options).slope(z), torch_slope(f, z), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("name", "options", "f"), TORCH, ids=LABELS)
def test_suprema_are_attained_and_never_passed(name: str, options: dict[str, float], f: Any) -> None:
    breaks = find_activation(name, **options).breaks
    z = np.concatenate([np.linspace(-40, 40, 200_001), np.asarray(breaks) + 1e-9, np.asarray(breaks) - 1e-9])
    steepest = float(np.abs(torch_slope(f, z)).max())
    top = supremum(name, **options)
    assert steepest * (1 - 1e-12) <= top <= steepest + 1e-6


@pytest.mark.parametrize(("name", "options", "f"), TORCH, ids=LABELS)
@pytest.mark.parametrize(("mean", "std"), [(-1.2, 0.8), (0.7, 3.0)])
def test_local_constants_against_quadpack(
    name: str, options: dict[str, float], f: Any, mean: float, std: float
) -> None:
    cuts = find_activation(name, **options).breaks
    assert local(name, mean, std, **options) == pytest.approx(reference(f, mean, std, cuts), abs=2e-9)


def test_exponential_units_in_closed_form() -> None:
    """E[ELU'] = Φ(μ/s) + α e^(μ + s²/2) Φ(-(μ + s²)/s), over eleven orders of magnitude."""
    mean, std = np.meshgrid([-30.0, -3.0, 0.0, 2.0], [1e-3, 0.1, 1.0, 5.0])
    below = np.exp(mean + std**2 / 2 + special.log_ndtr(-(mean + std**2) / std))
    wanted = special.ndtr(mean / std) + 0.8 * below
    np.testing.assert_allclose(local("elu", mean, std, alpha=0.8), wanted, rtol=1e-9)


def test_gelu_closed_form_is_the_integral() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(size=1500) * 10 ** rng.uniform(-3, 3, 1500)
    std = 10 ** rng.uniform(-6, 6, 1500)
    by_quadrature = gaussian_expectation(lambda z: np.abs(gelu_slope(z)), mean, std, breaks=(GELU_SLOPE_ZERO,))
    np.testing.assert_allclose(gelu_local(mean, std), by_quadrature, rtol=1e-9, atol=2e-15)
    np.testing.assert_allclose(gelu_signed(mean, std), gaussian_expectation(gelu_slope, mean, std), rtol=0, atol=1e-10)


def test_gelu_closed_form_is_mpmath() -> None:
    for mean, std in [(0.0, 1.0), (-1.0, 1.0), (GELU_SLOPE_ZERO, 0.3), (-4.0, 0.5), (2.5, 40.0)]:

        def f(z: Any, mean: float = mean, std: float = std) -> Any:
            return abs(mpmath.ncdf(z) + z * mpmath.npdf(z)) * mpmath.npdf(z, mean, std)

        cuts = sorted({mean + k * std for k in range(-12, 13, 2)} | {GELU_SLOPE_ZERO, -3.0, 0.0, 3.0})
        wanted = float(mpmath.quad(f, [c for c in cuts if abs(c - mean) <= 12 * std]))
        assert float(gelu_local(mean, std)) == pytest.approx(wanted, rel=1e-9)


def test_zeros_of_the_slopes() -> None:
    assert abs(float(gelu_slope(np.array(GELU_SLOPE_ZERO)))) < 1e-15
    assert abs(float(find_activation("silu").slope(np.array(SILU_SLOPE_ZERO)))) < 1e-15
    assert round(GELU_SLOPE_ZERO, 6) == -0.751792 and round(SILU_SLOPE_ZERO, 6) == -1.278465
    for name in ("gelu_tanh", "mish", "hardswish"):
        assert min(abs(float(find_activation(name).slope(np.array(b)))) for b in find_activation(name).breaks) < 1e-14


MEANS = st.floats(-1e6, 1e6) | st.floats(-1e300, 1e300) | st.floats(-10, 10)
STDS = st.floats(1e-300, 1e300) | st.floats(1e-9, 1e3) | st.just(0.0)


@given(pairs=st.lists(st.tuples(MEANS, STDS), min_size=20, max_size=40))
@settings(max_examples=20)
def test_between_zero_and_the_supremum(pairs: list[tuple[float, float]]) -> None:
    mean, std = np.array(pairs).T
    for name in ACTIVATIONS:
        value = local(name, mean, std)
        assert np.isfinite(value).all() and (value >= 0).all() and (value <= supremum(name)).all(), name


@given(
    mean=st.lists(st.floats(-20, 20), min_size=30, max_size=30),
    scale=st.lists(st.floats(-14, -5), min_size=30, max_size=30),
)
@settings(max_examples=15)
def test_a_narrow_gaussian_sees_the_slope_at_its_mean(mean: list[float], scale: list[float]) -> None:
    means, stds = np.array(mean), 10.0 ** np.array(scale)
    for name, options, f in TORCH:
        corners = np.array([*find_activation(name, **options).breaks, math.inf])
        clear = np.abs(means[:, None] - corners).min(axis=1) > 20 * stds
        slope = np.abs(torch_slope(f, means[clear]))
        # |f''| ≤ 4 in this list; torch's own slope is good to about 1e-12 where it cancels
        off = np.abs(local(name, means[clear], stds[clear], **options) - slope)
        assert (off <= 4 * stds[clear] + 1e-12).all(), name
        still = local(name, means[clear], np.zeros(clear.sum()), **options)
        np.testing.assert_allclose(still, slope, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "relu", "elu", "softplus", "hardswish"])
def test_a_wide_gaussian_sees_two_straight_lines(name: str) -> None:
    assert local(name, 0.0, 1e9) == pytest.approx(0.5, abs=1e-8)
    assert local(name, 1e9, 1.0) == pytest.approx(1.0, abs=1e-12)
    assert local(name, -1e9, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert local(name, -1e9, 1e9) == pytest.approx(float(stats.norm.cdf(-1.0)), abs=1e-8)


def test_a_bump_far_narrower_than_the_gaussian_is_not_stepped_over() -> None:
    """∫ sigmoid' = 1, so E sigmoid'(Z) → density at 0 = 1/(std·√2π) as std grows."""
    for std in (1e2, 1e5, 1e8):
        assert local("sigmoid", 0.0, std) * std * math.sqrt(2 * math.pi) == pytest.approx(1.0, rel=5 / std)


def test_small_values_keep_their_digits() -> None:
    """sigmoid' ≈ e^z far below 0, and E e^Z = e^(μ + s²/2)."""
    assert local("sigmoid", -80.0, 1.0) == pytest.approx(math.exp(-79.5), rel=1e-9, abs=0)
    assert local("gelu", -8.0, 0.1) == pytest.approx(reference_gelu_tail(), rel=1e-8, abs=0)


def reference_gelu_tail() -> float:
    z = -8.0 + 0.1 * np.linspace(-12, 12, 200_001)
    density = np.exp(-0.5 * ((z + 8.0) / 0.1) ** 2) / (0.1 * math.sqrt(2 * math.pi))
    return float(np.trapezoid(np.abs(special.ndtr(z) + z * stats.norm.pdf(z)) * density, z))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_arrays_are_the_numbers_one_by_one(name: str) -> None:
    mean, std = np.array([[-1.0, 0.0, 2.0]]), np.array([[0.5], [3.0]])
    table = local(name, mean, std)
    assert table.shape == (2, 3)
    assert table[1, 2] == pytest.approx(local(name, 2.0, 3.0), rel=1e-13)
    assert local(name, np.empty(0), 1.0).shape == (0,)


def test_ten_thousand_gelu_constants_within_a_second() -> None:
    rng = np.random.default_rng(1)
    mean, std = rng.normal(size=10_000), rng.lognormal(size=10_000)
    start = time.perf_counter()
    gelu_local(mean, std)
    assert time.perf_counter() - start < 1.0


def test_any_other_function() -> None:
    assert local_of(F.silu, 0.0, 1.0) == pytest.approx(local("silu", 0.0, 1.0), rel=1e-10)
    assert local_of(F.relu, 0.3, 1.0, kinks=(0.0,)) == pytest.approx(local("relu", 0.3, 1.0), rel=1e-10)
    assert local_of(F.relu, 0.3, 1.0) == pytest.approx(local("relu", 0.3, 1.0), rel=1e-6)
    zeros = [math.pi * (k + 0.5) for k in range(-7, 7)]
    assert local_of(torch.sin, 0.3, 2.0) == pytest.approx(reference(torch.sin, 0.3, 2.0, zeros), abs=1e-9)
    assert local_of(torch.square, 0.0, 3.0) == pytest.approx(6.0 * math.sqrt(2 / math.pi), rel=1e-10)
    both = local_of(F.silu, np.array([0.0, 1.0]), 1.0)
    np.testing.assert_allclose(both, [0.511639, 0.823152], atol=1e-6)
    assert supremum_of(F.silu) == pytest.approx(supremum("silu"), rel=1e-12)
    assert supremum_of(F.hardswish, kinks=(-3.0, 3.0)) == pytest.approx(1.5, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: local("swish", 0.0, 1.0), "'swish' is not known"),
        (lambda: local("relu", 0.0, 1.0, slope=1.0), "no option 'slope'"),
        (lambda: local("elu", 0.0, 1.0, alpha=-1.0), "alpha=-1.0, must be > 0"),
        (lambda: local("elu", 0.0, 1.0, alpha=math.nan), "alpha=nan"),
        (lambda: local("relu", math.nan, 1.0), "mean of a pre-activation is nan"),
        (lambda: local("relu", 0.0, -1.0), "standard deviation of a pre-activation is -1.0"),
        (lambda: local("gelu", np.array([0.0, 1.0]), np.array([1.0, math.inf])), "is inf"),
        (lambda: supremum("dropout", p=1.0), r"p=1.0, must be in \[0, 1\)"),
        (lambda: supremum("hardtanh", min_val=1.0, max_val=1.0), "min_val=1.0 >= max_val=1.0"),
        (lambda: local_of(lambda x: x.sum(), 0.0, 1.0), r"into \(\)"),
        (lambda: local_of(torch.sqrt, 0.0, 1.0), "not finite"),
        (lambda: affine_norm_constant([], 1.0, 1e-5), "empty"),
        (lambda: affine_norm_constant(1.0, math.nan, 1e-5), "not finite"),
        (lambda: affine_norm_constant(1.0, 0.0, 0.0), r"is 0 \(eps=0.0\)"),
    ],
)
def test_refusals(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(PlanError, match=told) as caught:
        call()
    assert caught.value.remedy


def test_a_fixed_norm_is_an_affine_map() -> None:
    assert affine_norm_constant([1.0, -3.0], [4.0, 9.0], 0.0) == pytest.approx(1.0)
    norm = torch.nn.BatchNorm1d(5, eps=1e-3).double().eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(5, generator=rng))
        norm.running_var.copy_(torch.rand(5, generator=rng))
    jacobian = torch.autograd.functional.jacobian(
        lambda x: norm(x.unsqueeze(0)).squeeze(0), torch.zeros(5, dtype=torch.float64)
    )
    constant = affine_norm_constant(norm.weight.detach().numpy(), norm.running_var.numpy(), norm.eps)
    assert constant == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-12)


def test_a_norm_of_the_example_itself_is_no_steeper_than_the_affine_map() -> None:
    layer = torch.nn.LayerNorm(16, eps=1e-5).double()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, generator=rng))
    for scale in (1e-4, 1.0, 30.0):
        x = scale * torch.randn(16, generator=rng, dtype=torch.float64)
        slope = float(torch.linalg.matrix_norm(torch.autograd.functional.jacobian(layer, x), 2))
        constant = affine_norm_constant(layer.weight.detach().numpy(), float(x.var(correction=0)), layer.eps)
        assert 0.5 * constant < slope <= constant * (1 + 1e-12)
