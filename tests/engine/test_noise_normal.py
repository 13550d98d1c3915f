"""The draws: distribution, the map from words at its ends, independence of streams."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from lamina.engine.noise import MAX_RADIUS, NoiseSource, SeededNoise, angle, cosine, radius, rounding_grid, sine
from lamina.engine.random_stream import CELL_ELEMENTS, KeyStream, StreamPurpose, step_key

DRAWS = 10_000_000


def draw(
    source: NoiseSource,
    size: int,
    std: float = 1.0,
    *,
    step: int = 0,
    tensor: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.full((size,), math.nan, dtype=dtype)
    source.fill_(out, std, step=step, tensor=tensor)
    return out


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return draw(SeededNoise(20), DRAWS).numpy().astype(np.float64)


def smirnov(ordered: np.ndarray) -> float:
    """The p-value of Kolmogorov and Smirnov's test against N(0, 1), asymptotic."""
    n = ordered.size
    cdf = special.ndtr(ordered)
    rank = np.arange(n + 1) / n
    distance = max((rank[1:] - cdf).max(), (cdf - rank[:-1]).max())
    return float(special.kolmogorov(math.sqrt(n) * distance))


# ------------------------------------------------------------------------------------------- distribution


def test_first_four_moments(many: np.ndarray) -> None:
    n = many.size
    square = many * many
    powers = ((many, 0, 1), (square, 1, 2), (square * many, 0, 15), (square * square, 3, 96))
    for order, (power, mean, variance) in enumerate(powers, start=1):
        assert abs(power.mean() - mean) < 4 * math.sqrt(variance / n), order


def test_kolmogorov_smirnov(many: np.ndarray) -> None:
    ordered = np.sort(many.astype(np.float32)).astype(np.float64)
    assert smirnov(ordered) > 0.01
    assert smirnov(ordered * 1.004) < 1e-3  # the test can see a scale that is 0.4 % off
    assert smirnov(ordered + 0.002) < 1e-3


@pytest.mark.parametrize("sigmas", [1.0, 2.0, 3.0, 4.0, 4.5, 5.0])
def test_tail_counts(many: np.ndarray, sigmas: float) -> None:
    for count in (int((many > sigmas).sum()), int((many < -sigmas).sum())):
        assert stats.binomtest(count, many.size, stats.norm.sf(sigmas)).pvalue > 1e-3


def test_hardened_and_float64_are_normal_too() -> None:
    for source, dtype in ((SeededNoise(3, hardened=True), torch.float32), (SeededNoise(4), torch.float64)):
        z = draw(source, 1_000_000, 3.0, dtype=dtype).double().numpy() / 3.0
        assert abs(z.var() - 1) < 4 * math.sqrt(2 / z.size)
        assert (
            stats.kstest(z + (np.random.default_rng(0).random(z.size) - 0.5) * rounding_grid(3.0) / 3.0, "norm").pvalue
            > 0.01
        )


# --------------------------------------------------------------------------------------------- the map


getcontext().prec = 50


def exact_radius(u: Decimal) -> float:
    return float((-2 * u.ln()).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "word", [-(2**63), 2**63 - 1, 2**62, 2**63 - 2**10, -(2**63) + 2**11, 2**10, -(2**10), 1 << 30, 3, 1, 0, -1]
)
def test_radius_is_exact_at_its_ends(dtype: torch.dtype, word: int) -> None:
    """u = |w | 1| / 2^63, as float64 reads it: from 2^-63 to 1."""
    u = Decimal(float(abs(word | 1))) / 2**63
    assert Decimal(2) ** -63 <= u <= 1
    words = np.array([word], dtype=np.int64).view(np.uint64)
    out = torch.empty(1, dtype=dtype).numpy()
    radius(words, np.empty(1), out)
    expected = exact_radius(u)
    assert abs(out[0]) == pytest.approx(expected, rel=2 * float(np.finfo(out.dtype).eps), abs=0)
    assert math.isfinite(out[0])
    assert abs(out[0]) <= MAX_RADIUS * (1 + 1e-6)


def test_tail_reaches_beyond_eight_sigma() -> None:
    words = np.array([2**10, 5, 3, 0], dtype=np.uint64)
    out = np.empty(4, dtype=np.float32)
    radius(words, np.empty(4), out)
    assert out[0] == pytest.approx(8.5716, abs=2e-4)
    assert all(np.diff(out) > 0)
    assert out[3] == pytest.approx(MAX_RADIUS)


@given(word=st.integers(-(2**63), 2**63 - 1))
def test_radius_and_angle_everywhere(word: int) -> None:
    words = np.array([word], dtype=np.int64).view(np.uint64)
    r, theta = np.empty(1), np.empty(1)
    radius(words.copy(), np.empty(1), r)  # it sets the last bit in place
    u = Decimal(abs(word | 1)) / Decimal(2) ** 63
    above = min(u * Decimal(1 + 2e-16), Decimal(1))  # u is rounded to 53 bits
    assert exact_radius(above) * (1 - 1e-15) <= abs(r[0])
    assert abs(r[0]) <= exact_radius(u * Decimal(1 - 2e-16)) * (1 + 1e-15)
    angle(words, theta)
    assert theta[0] == pytest.approx(math.pi * word / 2.0**63, rel=1e-15)
    assert -math.pi <= theta[0] <= math.pi


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sine_and_cosine_of_all_directions(dtype: type) -> None:
    theta = np.linspace(-np.pi, np.pi, 100_001).astype(dtype)
    c, s = np.empty_like(theta), np.empty_like(theta)
    cosine(theta, c)
    sine(theta, s)
    exact = theta.astype(np.longdouble)
    assert np.abs(c - np.cos(exact)).max() < 2 * np.finfo(dtype).eps
    assert np.abs(s - np.sin(exact)).max() < 2 * np.finfo(dtype).eps


def test_draws_follow_the_specification_word_by_word() -> None:
    """From key to draw with nothing but HKDF, AES and the math module."""
    source = SeededNoise(8)
    size = 11
    stream = KeyStream(step_key(source._seed, step=6))
    h = 6  # 2·ceil(11/4)
    words = np.empty(2 * h, dtype=np.uint64)
    stream.run(4, 0, words)
    expected = np.zeros(2 * h)
    for i in range(h):
        w1, w2 = (int(x) for x in words[[i, h + i]].view(np.int64))
        r, theta = math.sqrt(-2 * math.log(abs(w1) / 2**63)), math.pi * w2 / 2**63
        expected[i], expected[h + i] = r * math.cos(theta), r * math.sin(theta)
    got = draw(source, size, 2.5, step=6, tensor=4, dtype=torch.float64).numpy()
    np.testing.assert_allclose(got, 2.5 * expected[:size], rtol=1e-12)
    got = draw(source, size, 2.5, step=6, tensor=4).numpy()
    np.testing.assert_allclose(got, 2.5 * expected[:size], rtol=0, atol=3e-6)


# ---------------------------------------------------------------------------------------- independence


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Of two samples with mean 0 and variance 1, in units of its standard deviation under independence."""
    return float(np.dot(x, y) / math.sqrt(x.size))


def energy(z: np.ndarray) -> np.ndarray:
    return (z * z - 1) / math.sqrt(2)


@pytest.mark.parametrize(
    ("other", "step", "tensor"),
    [
        (SeededNoise(20), 0, 1),
        (SeededNoise(20), 0, 1 << 40),
        (SeededNoise(20), 1, 0),
        (SeededNoise(20, rank=1), 0, 0),
        (SeededNoise(21), 0, 0),
        (SeededNoise(-20), 0, 0),
    ],
    ids=["tensor", "tensor far", "step", "rank", "seed", "minus seed"],
)
def test_streams_are_independent(many: np.ndarray, other: NoiseSource, step: int, tensor: int) -> None:
    z = draw(other, DRAWS, step=step, tensor=tensor).numpy().astype(np.float64)
    assert abs(correlation(many, z)) < 4
    assert abs(correlation(energy(many), energy(z))) < 4


def test_purposes_have_streams_of_their_own() -> None:
    bits = []
    for purpose in StreamPurpose:
        words = np.empty(CELL_ELEMENTS, dtype=np.uint64)
        KeyStream(step_key(bytes(range(32)), step=0, purpose=purpose)).run(0, 0, words)
        bits.append(np.unpackbits(words.view(np.uint8)).astype(np.float64) * 2 - 1)
    for i, a in enumerate(bits):
        assert abs(a.sum()) < 4 * math.sqrt(a.size)
        for b in bits[:i]:
            assert abs(correlation(a, b)) < 4


@pytest.mark.parametrize(
    "lag", [1, 2, 3, 8, 1000, CELL_ELEMENTS // 2, CELL_ELEMENTS, CELL_ELEMENTS + 1, 3 * CELL_ELEMENTS]
)
def test_lags(many: np.ndarray, lag: int) -> None:
    """Lag CELL/2 sets the cosine against the sine member of each pair."""
    assert abs(correlation(many[:-lag], many[lag:])) < 4
    squares = energy(many)
    assert abs(correlation(squares[:-lag], squares[lag:])) < 4


def test_pair_members_share_a_radius_and_are_independent(many: np.ndarray) -> None:
    pairs = many[: many.size // CELL_ELEMENTS * CELL_ELEMENTS].reshape(-1, 2, CELL_ELEMENTS // 2)
    c, s = pairs[:, 0].ravel(), pairs[:, 1].ravel()
    scores = {
        "sign": np.sign,
        "size": lambda z: (np.abs(z) - math.sqrt(2 / math.pi)) / math.sqrt(1 - 2 / math.pi),
        "square": energy,
        "cube": lambda z: z * z * z / math.sqrt(15),
    }
    for a, f in scores.items():
        for b, g in scores.items():
            assert abs(correlation(f(c), g(s))) < 4, (a, b)
    u = np.exp(-(c * c + s * s) / 2)  # the uniform that made the radius
    assert stats.kstest(u[:1_000_000], "uniform").pvalue > 0.01
