"""Gains of single operations against dense singular values, quadrature, Monte Carlo and autograd, to the stated errors."""

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
from refusals import raises_code
from scipy import integrate, stats
from torch import Tensor, nn

from lamina.allocate.measure.gains import (
    _LARGEST_SLOPES,
    affine_norm_constant,
    dropout_slope,
    expected_slope,
    largest_slope,
    linear_norm,
    paper_attention_norm,
    paper_compression_clamped,
    paper_gelu_slope,
    paper_relu_slope,
    paper_residual,
    softmax_jacobian_norm,
    spectral_norm,
    spectral_norm_of,
)
from lamina.allocate.measure.trace import OPERATION_KINDS, OperationKind, trace
from lamina.signals.autoencoders import ResidualAutoencoder

Array = NDArray[np.float64]
NORM_ERROR = 0.02  # 1.01 times an estimate that is at most 1 % low
SLOPE_ERROR = 3e-4
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

# ------------------------------------------------------------------------------------------------- linear maps


def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of a layer's linear part: the layer itself, in float64, applied to every unit vector."""
    twin = type(layer).__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    twin = twin.double()
    unit = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        zero = twin(torch.zeros(1, *shape, dtype=torch.float64))
        return (twin(unit) - zero).flatten(1).T


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix)[0])


CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("linear", lambda: nn.Linear(20, 33), (20,)),
    ("wide linear", lambda: nn.Linear(70, 3), (70,)),
    ("same", lambda: nn.Conv1d(4, 4, 4, padding="same"), (4, 31)),
    ("valid", lambda: nn.Conv1d(4, 4, 4, padding="valid"), (4, 31)),
    ("too much padding", lambda: nn.Conv1d(2, 3, 3, padding=7), (2, 12)),
    ("stride 3 > kernel", lambda: nn.Conv1d(4, 8, 2, stride=3), (4, 37)),
    ("one column", lambda: nn.Conv1d(1, 6, 3, padding=1), (1, 1)),
    ("one row", lambda: nn.Conv1d(4, 1, 9), (4, 9)),
    ("circular same", lambda: nn.Conv1d(3, 4, 4, padding="same", padding_mode="circular"), (3, 30)),
    ("circular, odd", lambda: nn.Conv1d(3, 4, 4, stride=2, padding=2, padding_mode="circular"), (3, 31)),
    ("circular, twice", lambda: nn.Conv1d(3, 4, 1, padding=9, padding_mode="circular"), (3, 10)),
    ("circular, short", lambda: nn.Conv1d(3, 4, 7, padding=3, padding_mode="circular"), (3, 4)),
    ("replicate far", lambda: nn.Conv1d(3, 4, 3, padding=20, padding_mode="replicate"), (3, 9)),
    ("transposed", lambda: nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1), (6, 20)),
    ("transposed, output padding", lambda: nn.ConvTranspose1d(6, 4, 3, 2, 1, output_padding=1), (6, 20)),
    ("transposed, groups", lambda: nn.ConvTranspose1d(6, 4, 3, groups=2, dilation=2), (6, 20)),
    ("2d", lambda: nn.Conv2d(2, 3, (3, 5), padding=(1, 2), stride=(2, 1)), (2, 9, 11)),
    ("2d circular", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 8, 6)),
    ("2d reflect", lambda: nn.Conv2d(2, 3, (3, 1), padding=(1, 0), padding_mode="reflect"), (2, 8, 6)),
    ("2d same circular", lambda: nn.Conv2d(2, 3, (4, 3), padding="same", padding_mode="circular"), (2, 8, 6)),
    ("2d transposed", lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 5, 6)),
    ("3d", lambda: nn.Conv3d(2, 2, 3, padding=1, stride=(1, 2, 1)), (2, 4, 5, 4)),
    ("3d transposed", lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 3, 3, 3)),
]


def layer_norm(layer: nn.Module, shape: tuple[int, ...]) -> float:
    """The norm of a layer as the recursion takes it: from its traced operations, padding as a node of its own."""
    graph = trace(layer, torch.zeros(1, *shape))
    norms = [linear_norm(node, {node.inputs[0]: torch.zeros(graph[node.inputs[0]].shape)}) for node in graph.nodes[1:]]
    return math.prod(norms)


@pytest.mark.parametrize(("make", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_layer_has_its_largest_singular_value(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(7)
    layer = make().double()
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    with torch.no_grad():
        rest = layer(zero)
    norm = largest(dense(layer, shape))
    assert spectral_norm_of(lambda x: layer(x) - rest, zero.shape) == pytest.approx(norm, rel=NORM_ERROR)
    if getattr(layer, "padding_mode", "zeros") == "zeros":
        assert layer_norm(layer.float(), shape) == pytest.approx(norm, rel=NORM_ERROR)


@given(
    seed=st.integers(0, 10_000),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 2),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 3),
    mode=st.sampled_from(["zeros", "circular", "reflect", "replicate", "transposed"]),
    length=st.integers(13, 24),
)
@settings(max_examples=80)
def test_any_convolution(
    seed: int,
    channels: tuple[int, int],
    groups: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: int,
    mode: str,
    length: int,
) -> None:
    torch.manual_seed(seed)
    wide, narrow = groups * channels[0], groups * channels[1]
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}
    if mode == "transposed":
        layer: Any = nn.ConvTranspose1d(wide, narrow, kernel, **options)
    else:
        layer = nn.Conv1d(wide, narrow, kernel, padding_mode=mode, **options)
    if mode == "transposed" and (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 < 1:
        return
    zero = torch.zeros(1, wide, length, dtype=torch.float64)
    norm = largest(dense(layer, (wide, length)))
    with torch.no_grad():
        rest = layer.double()(zero)
    assert spectral_norm_of(lambda x: layer(x) - rest, zero.shape) == pytest.approx(norm, rel=NORM_ERROR)
    if mode in ("zeros", "transposed"):
        assert layer_norm(layer.float(), (wide, length)) == pytest.approx(norm, rel=NORM_ERROR)


def test_a_large_matrix() -> None:
    w = torch.randn(1100, 1300, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert spectral_norm(w) == pytest.approx(largest(w), rel=NORM_ERROR)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_norms_scale_with_the_operator(scale: float) -> None:
    w = torch.randn(130, 140, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = scale * largest(w)
    assert spectral_norm(scale * w) == pytest.approx(exact, rel=1e-11)
    assert spectral_norm_of(lambda x: scale * (w @ x), (140,)) == pytest.approx(exact, rel=NORM_ERROR)
    assert spectral_norm_of(lambda x: scale * (w[:, :90] @ x), (90,)) == pytest.approx(scale * largest(w[:, :90]))


def test_any_linear_map() -> None:
    x = torch.eye(24, dtype=torch.float64).reshape(24, 2, 12)
    pooled = F.avg_pool1d(x, 3, stride=2).flatten(1).T
    assert spectral_norm_of(lambda v: F.avg_pool1d(v, 3, stride=2), (2, 12)) == pytest.approx(
        largest(pooled), rel=NORM_ERROR
    )
    assert spectral_norm_of(lambda v: v.cumsum(0), (30,)) == pytest.approx(
        largest(torch.ones(30, 30, dtype=torch.float64).tril()), rel=NORM_ERROR
    )
    assert spectral_norm_of(lambda v: v.sum().reshape(1), (9,)) == pytest.approx(3.0)


def test_the_norm_is_not_that_of_the_reshaped_weight() -> None:
    layer = nn.Conv1d(1, 1, 5, padding=2)
    nn.init.ones_(layer.weight)
    assert float(layer.weight.detach().norm()) == pytest.approx(math.sqrt(5))
    assert layer_norm(layer, (1, 200)) == pytest.approx(5.0, rel=NORM_ERROR)


def test_a_parametrised_layer_and_a_token_axis() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    assert layer_norm(layer, (10, 6)) == pytest.approx(largest(layer.weight.detach().double()), rel=1e-6)


def test_all_norms_of_the_autoencoder_within_seconds() -> None:
    torch.manual_seed(0)
    graph = trace(ResidualAutoencoder(), torch.zeros(1, 12, 256))
    layers = [node for node in graph if node.kind is OperationKind.CONV]
    start = time.process_time()
    norms = [linear_norm(node, {node.inputs[0]: torch.zeros(graph[node.inputs[0]].shape)}) for node in layers]
    assert time.process_time() - start < 20.0
    assert len(norms) == 19 and min(norms) > 0


# ------------------------------------------------------------------------------------------------- activations

TORCH: list[tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("relu", {}, F.relu),
    ("relu6", {}, F.relu6),
    ("leaky_relu", {"negative_slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    ("leaky_relu", {"negative_slope": -1.5}, lambda x: F.leaky_relu(x, -1.5)),
    ("prelu", {"weight": torch.tensor([0.3])}, lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype))),
    ("hardtanh", {"min_val": -0.3, "max_val": 2.0}, lambda x: F.hardtanh(x, -0.3, 2.0)),
    ("hardsigmoid", {}, lambda x: (x / 6 + 0.5).clamp(0, 1)),  # F.hardsigmoid has 1/6 in float32
    ("hardswish", {}, F.hardswish),
    ("softshrink", {"lambd": 0.4}, lambda x: F.softshrink(x, 0.4)),
    ("gelu", {}, F.gelu),
    ("gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("silu", {}, F.silu),
    ("mish", {}, F.mish),
    ("tanh", {}, torch.tanh),
    ("sigmoid", {}, torch.sigmoid),
    ("log_sigmoid", {}, F.logsigmoid),
    ("softplus", {"beta": 3.0}, lambda x: F.softplus(x, 3.0)),
    ("elu", {"alpha": 1.7}, lambda x: F.elu(x, 1.7)),
    ("celu", {"alpha": 0.5}, lambda x: F.celu(x, 0.5)),  # F.celu takes 1/alpha in float32
    ("selu", {}, F.selu),
    ("abs", {}, torch.abs),
    ("sin", {}, torch.sin),
    ("cos", {}, torch.cos),
    ("atan", {}, torch.atan),
    ("erf", {}, torch.erf),
]
LABELS = [f"{name}{list(options.values()) or ''}" for name, options, _ in TORCH]


def torch_slope(f: Callable[[torch.Tensor], torch.Tensor], z: Array) -> Array:
    x = torch.from_numpy(np.array(z, np.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    return np.asarray(gradient.numpy())


def corners(f: Callable[[Tensor], Tensor]) -> list[float]:
    """Where |f'| jumps or bends, to 1e-4: its sharpest changes on a fine grid."""
    z = np.linspace(-12, 12, 240_001)
    change = np.abs(np.diff(np.abs(torch_slope(f, z)), 2))
    return [float(v) for v in z[1:-1][change > 1e-5]]


def reference(f: Callable[[Tensor], Tensor], mean: float, std: float) -> float:
    """E|f'(Z)| by scipy's Gauss rule on short panels cut at the corners, with torch's own derivative."""
    grid = {mean + std * k / 4 for k in range(-40, 41)} | {*corners(f)} | {float(k) for k in range(-9, 10)}
    points = sorted(p for p in grid if abs(p - mean) <= 10 * std)

    def integrand(z: Array) -> Array:
        return np.asarray(np.abs(torch_slope(f, z)) * stats.norm.pdf(z, mean, std))

    return sum(integrate.fixed_quad(integrand, low, high, n=12)[0] for low, high in pairwise(points))


def slope(f: Callable[[Tensor], Tensor], mean: float, std: float = 1.0, largest: float = 1.2) -> float:
    return expected_slope(f, mean, std, largest)


def test_every_activation_has_an_oracle_and_a_supremum() -> None:
    traced = {name for name, kind in OPERATION_KINDS.items() if kind is OperationKind.ACTIVATION}
    traced -= {"exp"}  # has none: it takes that of the clamp before it, or is refused (test_bounds.py)
    assert {name for name, _, _ in TORCH} | {"clamp", "clamp_min", "clamp_max"} == traced
    assert set(_LARGEST_SLOPES) | {"leaky_relu", "prelu", "elu"} == traced


@pytest.mark.parametrize(
    ("f", "mean", "value"),
    [
        (F.gelu, 0.0, 0.5393), (F.gelu, -1.0, 0.2306), (F.gelu, 1.0, 0.8766), (F.silu, 0.0, 0.51164),
        (F.silu, 1.0, 0.82315), (F.relu, 0.0, 0.5), (F.relu, 1.0, 0.841345),
    ],
)  # fmt: skip
def test_the_values_of_the_theory(f: Any, mean: float, value: float) -> None:
    assert slope(f, mean) == pytest.approx(value, abs=SLOPE_ERROR)


def test_the_suprema_of_the_theory() -> None:
    assert round(largest_slope("gelu", {}), 3) == 1.129
    assert round(largest_slope("silu", {}), 4) == 1.0998
    assert dropout_slope(0.2) == pytest.approx(1.25)
    with raises_code("sensitivity.dropout-rate"):
        dropout_slope(1.0)


@pytest.mark.parametrize(("f", "mean", "std"), [(F.gelu, -1.0, 1.0), (F.silu, 0.5, 2.0), (F.mish, -1.0, 0.7)])
def test_monte_carlo_agrees(f: Any, mean: float, std: float) -> None:
    z = np.random.default_rng(4).normal(mean, std, 1_000_000)
    steep = np.abs(torch_slope(f, z))
    assert abs(steep.mean() - slope(f, mean, std)) < 5 * steep.std() / math.sqrt(len(z)) + SLOPE_ERROR


@pytest.mark.parametrize(("name", "options", "f"), TORCH, ids=LABELS)
def test_suprema_are_attained_and_never_passed(name: str, options: dict[str, Any], f: Any) -> None:
    z = np.concatenate([np.linspace(-40, 40, 200_001), [-1e-9, 1e-9, 3 - 1e-9]])
    steepest = float(np.abs(torch_slope(f, z)).max())
    assert steepest * (1 - 1e-12) <= largest_slope(name, options) <= steepest + 1e-6


@pytest.mark.parametrize(("name", "options", "f"), TORCH, ids=LABELS)
@pytest.mark.parametrize(("mean", "std"), [(-1.2, 0.8), (0.7, 3.0)])
def test_expected_slopes_against_quadrature(
    name: str, options: dict[str, Any], f: Any, mean: float, std: float
) -> None:
    found = expected_slope(f, mean, std, largest_slope(name, options))
    assert found == pytest.approx(reference(f, mean, std), abs=SLOPE_ERROR)


def test_gelu_against_mpmath() -> None:
    for mean, std in [(0.0, 1.0), (-1.0, 1.0), (-0.75, 0.3), (-4.0, 0.5), (2.5, 40.0)]:

        def f(z: Any, mean: float = mean, std: float = std) -> Any:
            return abs(mpmath.ncdf(z) + z * mpmath.npdf(z)) * mpmath.npdf(z, mean, std)

        cuts = sorted({mean + k * std for k in range(-12, 13, 2)} | {-0.7517915246935645, -3.0, 0.0, 3.0})
        wanted = float(mpmath.quad(f, [c for c in cuts if abs(c - mean) <= 12 * std]))
        assert slope(F.gelu, mean, std) == pytest.approx(wanted, abs=SLOPE_ERROR)


@given(mean=st.floats(-1e6, 1e6) | st.floats(-10, 10), std=st.floats(1e-9, 1e3) | st.just(0.0))
@settings(max_examples=20)
def test_between_zero_and_the_supremum(mean: float, std: float) -> None:
    for name, options, f in TORCH:
        most = largest_slope(name, options)
        assert most / 8192 <= expected_slope(f, mean, std, most) <= most, name


def test_channels_with_slopes_of_their_own_are_averaged() -> None:
    weight = torch.tensor([0.1, -0.5, 2.0], dtype=torch.float64)
    found = expected_slope(lambda z: F.prelu(z, weight), 0.0, 1.0, 2.0, channels=3)
    assert found == pytest.approx(0.5 + 0.5 * float(weight.abs().mean()), abs=SLOPE_ERROR)


# ------------------------------------------------------------------------------------------------- normalisation, softmax


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


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: affine_norm_constant(1.0, 0.0, 0.0), "sensitivity.normalises-by-zero"),
        (lambda: spectral_norm(torch.full((2, 2), math.nan)), "sensitivity.weight-not-finite"),
    ],
)
def test_refusals(call: Callable[[], Any], code: str) -> None:
    with raises_code(code):
        call()


def dense_norm(a: Tensor) -> Tensor:
    jacobian = torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2)
    return torch.linalg.matrix_norm(jacobian, 2)


def rows(seed: int, count: int, n: int, temperature: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(temperature * torch.randn(count, n, generator=generator, dtype=torch.float64), -1)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-3, 0.3, 1.0, 3.0, 12.0, 60.0])
def test_the_softmax_jacobian_has_its_spectral_norm(n: int, temperature: float) -> None:
    a = rows(n, 50, n, temperature)
    torch.testing.assert_close(softmax_jacobian_norm(a), dense_norm(a), rtol=1e-2, atol=3e-16)


def test_it_is_the_jacobian_of_softmax() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, 0), logits)
    norm = torch.linalg.matrix_norm(jacobian, 2)
    torch.testing.assert_close(softmax_jacobian_norm(torch.softmax(logits, 0)), norm, rtol=1e-2, atol=0)


@given(seed=st.integers(0, 10_000), n=st.integers(2, 30), temperature=st.floats(0, 50))
def test_the_softmax_jacobian_is_between_its_bounds(seed: int, n: int, temperature: float) -> None:
    a = rows(seed, 20, n, temperature)
    norm, corner = softmax_jacobian_norm(a), (a * (1 - a)).amax(-1)
    slack = 1e-13 * norm + 1e-16  # 1 - a has lost its digits where a is nearly 1
    assert (corner <= norm + slack).all()
    assert (norm <= 2 * corner + slack).all()
    assert (norm <= 0.5 + 1e-15).all()


def test_two_weights_attain_the_upper_bound() -> None:
    p = torch.tensor([0.5, 0.9, 0.999], dtype=torch.float64)
    other = torch.tensor([0.5, 0.1, 0.001], dtype=torch.float64)
    norms = softmax_jacobian_norm(torch.stack([p, other], -1))
    torch.testing.assert_close(norms, 2 * p * other, rtol=1e-13, atol=0)


def test_known_rows_of_attention_weights() -> None:
    uniform = torch.full((8,), 1 / 8)
    assert float(softmax_jacobian_norm(uniform)) == pytest.approx(1 / 8)
    assert float(softmax_jacobian_norm(torch.tensor([0.0, 1.0, 0.0]))) == 0.0
    assert float(softmax_jacobian_norm(torch.ones(1))) == 0.0


# ------------------------------------------------------------------------------------------------- the paper's formulas


def test_eq_8_is_right_up_to_its_regularisation() -> None:
    for mean in (-2.0, 0.0, 0.5):
        assert float(paper_relu_slope(mean, 4.0)) == pytest.approx(slope(F.relu, mean, 2.0), abs=SLOPE_ERROR)
        assert float(paper_relu_slope(mean, 0.0, 1e-4)) == pytest.approx(slope(F.relu, mean, 1e-2), abs=SLOPE_ERROR)


def test_eq_10_is_wrong_away_from_zero_and_at_zero() -> None:
    for mean, printed, sound in ((0.0, 0.5, 0.5393), (-1.0, 0.0201, 0.2306), (1.0, 0.9799, 0.8766)):
        assert float(paper_gelu_slope(mean, 1.0)) == pytest.approx(printed, abs=5e-5)
        assert slope(F.gelu, mean) == pytest.approx(sound, abs=SLOPE_ERROR)
    assert float(paper_gelu_slope(-3.0, 1.0)) == pytest.approx(-0.0723, abs=5e-5)


def test_eq_10_lacks_r_squared_in_its_second_term() -> None:
    mean, variance = 1.3, 2.0
    r = math.sqrt(1 + variance)
    first, second = stats.norm.cdf(mean / r), mean * stats.norm.pdf(mean / r) / r**3  # E GELU'(Z), without | |
    z = np.random.default_rng(0).normal(mean, math.sqrt(variance), 1_000_000)
    assert torch_slope(F.gelu, z).mean() == pytest.approx(first + second, abs=2e-3)
    assert (float(paper_gelu_slope(mean, variance)) - first) / second == pytest.approx(1 + variance, rel=1e-12)


def test_eq_12_exceeds_one_and_is_clamped() -> None:
    assert paper_compression_clamped(3.0, 2.0) == 1.0
    assert paper_compression_clamped(1.0, 2.0) == 0.5


def test_the_printed_batch_norm_is_1e5_times_too_small() -> None:
    """Below eq. 12, for normalised layers: γ = ε_BN/σ_BN. The layer multiplies by |gain|/√(σ²+ε)."""
    eps, std = 1e-5, 1.0
    assert affine_norm_constant(1.0, std**2, eps) / (eps / std) == pytest.approx(1e5, rel=1e-4)


def test_eq_13_falls_short_by_up_to_root_two() -> None:
    assert 2.0 / paper_residual(1.0, 1.0) == pytest.approx(math.sqrt(2))


def test_eq_15_is_not_4_7() -> None:
    """(local/supremum)^depth·γ^depth at depth 12: the text calls 0.000132 "4.7×"; its inverse is 7,580."""
    ratio = (0.5 / 1.0 * 0.95) ** 12
    assert ratio == pytest.approx(0.000132, abs=5e-7) and round(1 / ratio, -1) == 7580


def test_eq_20_is_half_of_the_norm_at_worst() -> None:
    even = torch.tensor([0.5, 0.5])
    assert float(paper_attention_norm(even)) == 0.25
    assert float(softmax_jacobian_norm(even)) == pytest.approx(0.5, rel=1e-2)
    peaked = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    assert float(paper_attention_norm(peaked)) == pytest.approx(0.09)
    assert float(softmax_jacobian_norm(peaked)) > 1.4 * 0.09
