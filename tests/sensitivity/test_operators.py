"""Norms of layers against the singular values of their dense matrices; what the brackets promise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from torch import Tensor, nn

from lamina.models.autoencoders import ResidualAutoencoder
from lamina.sensitivity.spectral import (
    ConvolutionOperator,
    golub_kahan,
    spectral_bracket,
    spectral_bracket_of,
    spectral_norm,
    spectral_norm_of,
)


def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of a layer's linear part: the layer itself, in float64, applied to every unit vector."""
    twin = type(layer).__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    twin = twin.double()
    unit = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        zero = twin(torch.zeros(1, *shape, dtype=torch.float64))
        return (twin(unit) - zero).flatten(1).T


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix)[0])


CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("linear", lambda: nn.Linear(20, 33), (20,)),
    ("wide linear", lambda: nn.Linear(70, 3), (70,)),
    ("padded", lambda: nn.Conv1d(3, 5, 5, padding=2), (3, 40)),
    ("no padding", lambda: nn.Conv1d(3, 5, 5), (3, 40)),
    ("same", lambda: nn.Conv1d(4, 4, 4, padding="same"), (4, 31)),
    ("valid", lambda: nn.Conv1d(4, 4, 4, padding="valid"), (4, 31)),
    ("too much padding", lambda: nn.Conv1d(2, 3, 3, padding=7), (2, 12)),
    ("stride 2", lambda: nn.Conv1d(4, 8, 4, stride=2, padding=1), (4, 37)),
    ("stride 3 > kernel", lambda: nn.Conv1d(4, 8, 2, stride=3), (4, 37)),
    ("dilated", lambda: nn.Conv1d(4, 5, 3, dilation=4, padding=4), (4, 33)),
    ("dilated, stride", lambda: nn.Conv1d(4, 5, 3, dilation=3, stride=2, padding=2), (4, 33)),
    ("groups", lambda: nn.Conv1d(6, 9, 3, groups=3, padding=1), (6, 25)),
    ("depthwise", lambda: nn.Conv1d(6, 6, 5, groups=6, padding=2), (6, 25)),
    ("one column", lambda: nn.Conv1d(1, 6, 3, padding=1), (1, 1)),
    ("one row", lambda: nn.Conv1d(4, 1, 9), (4, 9)),
    ("circular", lambda: nn.Conv1d(3, 4, 5, padding=2, padding_mode="circular"), (3, 30)),
    ("circular same", lambda: nn.Conv1d(3, 4, 4, padding="same", padding_mode="circular"), (3, 30)),
    ("circular, stride", lambda: nn.Conv1d(3, 4, 4, stride=2, padding=1, padding_mode="circular"), (3, 30)),
    ("circular, odd", lambda: nn.Conv1d(3, 4, 4, stride=2, padding=2, padding_mode="circular"), (3, 31)),
    ("circular, twice", lambda: nn.Conv1d(3, 4, 1, padding=9, padding_mode="circular"), (3, 10)),
    ("circular, short", lambda: nn.Conv1d(3, 4, 7, padding=3, padding_mode="circular"), (3, 4)),
    ("reflect", lambda: nn.Conv1d(3, 4, 5, padding=2, padding_mode="reflect"), (3, 30)),
    ("replicate", lambda: nn.Conv1d(3, 4, 5, padding=2, padding_mode="replicate"), (3, 30)),
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


@pytest.mark.parametrize(("make", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_bracket_holds_the_largest_singular_value(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(7)
    layer = make()
    norm = largest(dense(layer, shape))
    found = spectral_bracket(layer, shape)
    assert found.lower <= norm <= found.upper
    assert found.width <= 1e-3
    assert spectral_norm(layer, shape) == found.upper
    sharp = spectral_bracket(layer, shape, tolerance=1e-9)
    assert sharp.lower <= norm <= sharp.upper
    assert sharp.upper == pytest.approx(norm, rel=2e-9)


@pytest.mark.parametrize(("make", "shape"), [case[1:] for case in CASES[2:]], ids=[case[0] for case in CASES[2:]])
def test_the_torus_bounds_from_above(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(8)
    layer: Any = make()
    given = ConvolutionOperator.of(layer.double())
    bound, norm = given.bound(shape), largest(dense(layer, shape))
    if given.padding_mode in ("reflect", "replicate"):
        assert bound == math.inf
    else:
        assert norm <= bound * (1 + 1e-13)
    if given.padding_mode == "zeros" and min(shape[1:]) >= 20:
        assert bound <= 1.1 * norm  # and it says something


def test_a_circular_convolution_is_its_symbol() -> None:
    torch.manual_seed(9)
    for kernel, stride in ((5, 1), (4, 2), (3, 3)):
        layer = nn.Conv1d(
            3, 4, kernel, stride=stride, padding=kernel // 2 - (stride > 1), padding_mode="circular"
        ).double()
        matrix = dense(layer, (3, 30))
        assert matrix.shape[0] == 4 * 30 // stride
        assert ConvolutionOperator.of(layer).bound((3, 30)) == pytest.approx(largest(matrix), rel=1e-13)


def test_the_excess_of_the_torus_falls_with_the_length() -> None:
    torch.manual_seed(10)
    layer = nn.Conv1d(3, 3, 5, padding=2).double()
    excess = [ConvolutionOperator.of(layer).bound((3, n)) / largest(dense(layer, (3, n))) - 1 for n in (10, 40, 160)]
    assert excess[0] > 4 * excess[1] > 16 * excess[2] > 0


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
    norm = largest(dense(layer, (wide, length)))
    assert ConvolutionOperator.of(layer.double()).bound((wide, length)) >= norm * (1 - 1e-13)
    found = spectral_bracket(layer, (wide, length))
    assert found.lower <= norm <= found.upper <= found.lower * (1 + 1e-3)


SPECTRA = {
    "a tie": torch.cat([torch.ones(2), torch.rand(298, generator=torch.Generator().manual_seed(0))]),
    "a narrow gap": torch.cat([torch.tensor([1.0, 0.9999]), torch.linspace(0, 0.99, 298)]),
    "one far outlier": torch.cat([torch.tensor([1e6]), torch.rand(299)]),
    "an edge that is dense": torch.cos(torch.linspace(0, math.pi / 2, 300)),
    "low rank": torch.cat([torch.tensor([3.0, 2.0]), torch.zeros(298)]),
    "all equal": torch.ones(300),
    "nearly equal": 1 + 1e-5 * torch.linspace(0, 1, 300, dtype=torch.float64) ** 9,
    "equal but for rounding": 1 + 1e-13 * torch.linspace(0, 1, 300, dtype=torch.float64) ** 9,
    "geometric": torch.logspace(0, -12, 300),
}


@pytest.mark.parametrize("spectrum", list(SPECTRA.values()), ids=list(SPECTRA))
@pytest.mark.parametrize("most", [2, 5, 12, 40, 300])
def test_brackets_hold_at_every_number_of_steps(spectrum: Tensor, most: int) -> None:
    """Singular values as given; eight starts. Early stops give wide brackets, never wrong ones."""
    values = spectrum.double()
    for seed in range(8):
        found = golub_kahan(
            lambda v: values * v, lambda u: values * u, (300, 300), tolerance=1e-6, most=most, seed=seed
        )
        assert found.lower <= float(values.max()) <= found.upper, (seed, found)
        assert found.steps <= most + 1
        if most == 300:
            assert found.width <= 1e-6


def test_a_top_vector_that_the_start_hardly_sees_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest value belongs to one coordinate, of which the start holds 1e-9 (by chance: once in 5e7)."""
    generator = torch.Generator().manual_seed(5)
    values = 0.9 * torch.rand(400, generator=generator, dtype=torch.float64)
    values[0] = 1.0
    start = torch.randn(400, generator=generator, dtype=torch.float64)
    start[0] = 1e-9 * start.norm()
    monkeypatch.setattr("lamina.sensitivity.spectral.torch.randn", lambda *size, **options: start)
    for most in (5, 10, 15, 20, 40, 80):
        found = golub_kahan(lambda v: values * v, lambda u: values * u, (400, 400), tolerance=1e-6, most=most, seed=0)
        assert found.upper >= 1.0
        if most <= 10:
            assert found.lower < 0.95  # not found yet, and nothing claims otherwise


def test_a_large_matrix() -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(1100, 1300, generator=generator, dtype=torch.float64)
    found = spectral_bracket(w)
    norm = largest(w)
    assert found.method == "random start" and found.lower <= norm <= found.upper and found.width <= 1e-3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    torch.manual_seed(0)
    layer = nn.Conv1d(3, 4, 5, padding=2)
    plain = spectral_norm(layer, (3, 20))
    with torch.no_grad():
        layer.weight.mul_(scale)
    assert spectral_norm(layer, (3, 20)) == pytest.approx(scale * plain, rel=1e-6)
    w = torch.randn(50, 30, dtype=torch.float64) * scale**5
    assert spectral_norm(w) == pytest.approx(scale**5 * largest(w / scale**5), rel=1e-11)
    assert spectral_norm_of(lambda x: scale**5 * x, (7,)) == pytest.approx(scale**5, rel=1e-9)


def test_zero_layers_have_norm_zero() -> None:
    layer = nn.Conv1d(3, 4, 5)
    with torch.no_grad():
        layer.weight.zero_()
    assert spectral_bracket(layer, (3, 20)).upper == 0.0
    assert spectral_norm(torch.zeros(3, 3)) == 0.0
    assert spectral_norm_of(lambda x: 0.0 * x, (5,)) == 0.0


def test_the_residual_is_that_of_the_top_pair() -> None:
    values = torch.linspace(0, 1, 200, dtype=torch.float64)
    found = golub_kahan(lambda v: values * v, lambda u: values * u, (200, 200), tolerance=1e-9, most=200, seed=1)
    assert found.residual < 1e-6
    early = golub_kahan(lambda v: values * v, lambda u: values * u, (200, 200), tolerance=1e-9, most=6, seed=1)
    assert early.residual > 1e-3


def test_any_linear_map() -> None:
    x = torch.eye(24, dtype=torch.float64).reshape(24, 2, 12)
    pooled = F.avg_pool1d(x, 3, stride=2).flatten(1).T
    assert spectral_norm_of(lambda v: F.avg_pool1d(v, 3, stride=2), (2, 12)) == pytest.approx(
        largest(pooled), rel=1.1e-3
    )
    assert spectral_norm_of(lambda v: v.cumsum(0), (30,)) == pytest.approx(
        largest(torch.ones(30, 30, dtype=torch.float64).tril()), rel=1.1e-3
    )
    with torch.no_grad():
        assert spectral_bracket_of(lambda v: 3 * v, (4, 4)).width <= 1e-3
    assert spectral_norm_of(lambda v: v.sum().reshape(1), (9,)) == pytest.approx(3.0)


def test_the_norm_is_not_that_of_the_reshaped_weight() -> None:
    layer = nn.Conv1d(1, 1, 5, padding=2)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert float(torch.linalg.vector_norm(layer.weight.detach())) == pytest.approx(math.sqrt(5))
    assert spectral_norm(layer, (1, 200)) == pytest.approx(5.0, rel=2e-3)


def test_a_parametrised_layer_and_a_token_axis() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    weight = layer.weight.detach().double()
    assert spectral_norm(layer, (10, 6)) == pytest.approx(largest(weight), rel=1e-9)


def test_all_norms_of_the_autoencoder_within_seconds() -> None:
    torch.manual_seed(0)
    model = ResidualAutoencoder()
    seen: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
            layer.register_forward_hook(lambda m, x, y, n=name: seen.update({n: tuple(x[0].shape[1:])}))
    with torch.no_grad():
        model(torch.zeros(1, 12, 256))
    start = time.perf_counter()
    found = [spectral_bracket(model.get_submodule(name), shape) for name, shape in seen.items()]
    assert time.perf_counter() - start < 10.0  # 1.4 s on one quiet core
    assert len(found) == 19 and max(b.width for b in found) <= 1e-3


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: spectral_norm(nn.Conv1d(3, 4, 5)), "measure.norm-convolution-depends"),
        (lambda: spectral_norm(nn.Conv1d(3, 4, 5), (4, 20)), "measure.input-shape-not"),
        (lambda: spectral_norm(nn.Conv1d(3, 4, 5), (1, 3, 20)), "measure.input-shape-not"),
        (lambda: spectral_norm(nn.Conv1d(3, 4, 5), (3, 2)), "measure.convolution-not-accept"),
        (lambda: spectral_norm(nn.LazyLinear(4)), "measure.not-exist-yet"),
        (lambda: spectral_norm(torch.full((2, 2), math.nan)), "measure.empty-not-finite"),
        (lambda: spectral_norm(torch.empty(0, 2)), "measure.empty-not-finite"),
        (lambda: spectral_norm(torch.ones(2, 2, 2)), "measure.tensor-shape-not"),
        (lambda: spectral_norm(nn.ReLU()), "measure.not-linear-layer"),
        (lambda: spectral_norm_of(torch.relu, (5,)), "measure.operator-not-linear"),
        (lambda: spectral_norm_of(lambda x: x + 1, (5,)), "measure.operator-not-linear"),
        (lambda: spectral_norm_of(lambda x: x.float(), (5,)), "measure.operator-not-give"),
        (lambda: spectral_norm_of(lambda x: x.detach(), (5,)), "measure.operator-output-not"),
        (lambda: spectral_norm_of(lambda x: x, (0, 3)), "measure.shape-holds-no"),
        (lambda: spectral_norm_of(lambda x: x, (3,), tolerance=0.0), "measure.tolerance-leave"),
    ],
)
def test_refusals(call: Callable[[], Any], told: str) -> None:
    with raises_code(told) as caught:
        call()
    assert caught.value.remedy
