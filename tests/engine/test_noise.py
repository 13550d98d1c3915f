"""The sources: determinism, hardening, refusals, secrecy; the draws: distribution, ends of the map, independence."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Iterator
from decimal import Decimal, getcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from scipy import special, stats

from lamina.engine import native
from lamina.engine.noise.random_stream import CELL_ELEMENTS, PACK_BELOW_ELEMENTS, KeyStream, StreamPurpose, step_key
from lamina.engine.noise.source import (
    GRID_BITS,
    MAX_RADIUS,
    NoiseBuffers,
    NoiseSource,
    SecureNoise,
    SeededNoise,
    angle,
    cosine,
    native_noise,
    radius,
    rounding_grid,
    sine,
)  # fmt: skip
from lamina.errors import NoiseError

DRAWS = 10_000_000


def draw(
    source: NoiseSource, size: int, std: float = 1.0, *, dtype: torch.dtype = torch.float32, **where: int
) -> torch.Tensor:
    out = torch.full((size,), math.nan, dtype=dtype)
    source.fill_(out, std, **{"step": 0, **where})
    return out


# ----------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_packing_and_company_change_nothing(hardened: bool, dtype: torch.dtype) -> None:
    sizes = [3, PACK_BELOW_ELEMENTS - 1, CELL_ELEMENTS + 1, 1, 0, 2 * CELL_ELEMENTS + 77, PACK_BELOW_ELEMENTS, 129, 2]
    source = SeededNoise(5, hardened=hardened)
    alone = [draw(source, n, 0.5 + i, step=2, tensor=i, dtype=dtype) for i, n in enumerate(sizes)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together = [torch.zeros(n, dtype=dtype) for n in sizes]
            source.add_many_(together, [0.5 + i for i in range(len(sizes))], step=2)
            for a, b in zip(alone, together, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
    order = list(range(len(sizes)))[::-1]
    backwards = [torch.zeros(sizes[i], dtype=dtype) for i in order]
    source.add_many_(backwards, [0.5 + i for i in order], step=2, tensors=order)
    assert all(torch.equal(alone[i], b) for i, b in zip(order, backwards, strict=True))


EDGES = [PACK_BELOW_ELEMENTS - 1, PACK_BELOW_ELEMENTS + 1, CELL_ELEMENTS - 1, CELL_ELEMENTS, 2 * CELL_ELEMENTS + 5]


@settings(max_examples=30, deadline=None)
@given(size=st.one_of(st.integers(1, 70), st.sampled_from(EDGES)))
def test_every_element_is_noised_once(size: int) -> None:
    out = torch.full((size,), 1e6, dtype=torch.float64)
    SeededNoise(1, hardened=False).add_(out, 1.0, step=0)
    z = out - 1e6
    assert bool((z != 0).all())
    assert float(z.abs().max()) < 7
    assert torch.allclose(z, draw(SeededNoise(1, hardened=False), size, dtype=torch.float64), atol=1e-9)


def test_mixed_dtypes_in_one_call() -> None:
    source = SeededNoise(2, hardened=False)
    outs = [torch.zeros(100), torch.zeros(100, dtype=torch.float64), torch.zeros(7)]
    source.add_many_(outs, [1.0, 2.0, 3.0], step=0)
    for i, out in enumerate(outs):
        assert torch.equal(out, draw(source, out.numel(), i + 1.0, tensor=i, dtype=out.dtype))


def test_non_contiguous_tensors_get_the_noise_of_their_logical_order() -> None:
    out = torch.ones(30, 40).t()
    assert not out.is_contiguous()
    SeededNoise(9, hardened=False).add_(out, 1.0, step=0)
    assert torch.equal(out.reshape(-1), 1 + draw(SeededNoise(9, hardened=False), 1200))


def test_autograd_sees_the_change() -> None:
    out = torch.zeros(5, requires_grad=True)
    before = out._version
    SeededNoise(9, hardened=False).add_(out, 1.0, step=0)
    assert out._version > before
    assert out.requires_grad
    assert out.grad_fn is None


# -------------------------------------------------------------------------------------------- hardened


@pytest.mark.parametrize("std", [1.0, 0.75, 3.1e-5, 1.99999, 4096.0])
def test_hardened_results_lie_on_a_grid_that_depends_on_std_alone(std: float) -> None:
    spacing = rounding_grid(std)
    assert math.frexp(spacing)[0] == 0.5
    assert 2**GRID_BITS <= std / spacing < 2 ** (GRID_BITS + 1)
    total = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * std * 3
    plain, hard = total.clone(), total.clone()
    SeededNoise(1, hardened=False).add_(plain, std, step=0)
    SeededNoise(1, hardened=True).add_(hard, std, step=0)
    steps = hard.double() / spacing
    assert torch.equal(steps, steps.round())
    assert float((plain.double() - hard.double()).abs().max()) <= spacing / 2 * (1 + 1e-2)
    exact = total.double() + draw(SeededNoise(1, hardened=False), 10_000, std, dtype=torch.float64)
    assert torch.equal(hard.double(), (exact / spacing).round() * spacing)


def test_declared() -> None:
    assert SecureNoise().private
    assert not SeededNoise(1).private


def test_noise_is_hardened_unless_plain_noise_is_asked_for_by_name() -> None:
    seed = bytes(range(32))
    for made in (
        SecureNoise,
        partial(SeededNoise, 1),
        partial(SecureNoise.of_segment, seed),
        partial(SeededNoise.of_segment, seed),
    ):
        assert made().hardened and "hardened" in repr(made())
        assert not made(hardened=False).hardened and "plain" in repr(made(hardened=False))


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("on", [False, True], ids=["numpy", "native"])
def test_the_division_comes_after_the_rounding(hardened: bool, on: bool) -> None:
    with native.switched(on):
        for dtype in (torch.float32, torch.float64):
            source, stds = SeededNoise(3, hardened=hardened), [0.75, 0.0, 4.0]
            whole = [torch.full((n,), 0.3, dtype=dtype) for n in (5, 7, 70_000)]
            divided = [total.clone() for total in whole]
            source.add_many_(whole, stds, step=0)
            source.add_many_(divided, stds, step=0, divisor=7.0)
            for a, b in zip(whole, divided, strict=True):
                assert torch.allclose(a / 7, b, rtol=3e-7 if dtype == torch.float32 else 1e-15, atol=0)


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("std", [-1.0, -1e-300, math.nan, math.inf, -math.inf, 1e31, 1e-31])
def test_bad_std_is_refused_before_anything_changes(std: float) -> None:
    outs = [torch.zeros(4), torch.zeros(4)]
    source = SecureNoise()
    with raises_code("noise.std-out-of-range"):
        source.add_many_(outs, [1.0, std], step=0)
    assert not outs[0].any()
    source.add_many_(outs, [1.0, 1.0], step=0)  # nothing was spent


def test_no_std_no_noise() -> None:
    outs = [torch.ones(4), torch.ones(4)]
    SecureNoise(hardened=True).add_many_(outs, [0.0, 1.0], step=0)
    assert torch.equal(outs[0], torch.ones(4))
    assert not torch.equal(outs[1], torch.ones(4))
    SecureNoise().fill_(outs[0], 0.0, step=0)
    assert torch.equal(outs[0], torch.zeros(4))


SHARED = torch.zeros(4)


@pytest.mark.parametrize(
    ("totals", "code"),
    [
        ([torch.zeros(1, 3).expand(4, 3)], "noise.tensor-shares-memory"),
        ([SHARED, SHARED.view(2, 2)], "noise.tensor-shares-memory"),
        ([torch.zeros(4, device="meta")], "noise.tensor-not-dense"),
        ([torch.zeros(4, 4).to_sparse()], "noise.tensor-not-dense"),
        *(([torch.zeros(4, dtype=d)], "noise.tensor-dtype") for d in (torch.bfloat16, torch.int64, torch.complex64)),
        ([torch.zeros(4, dtype=torch.float16)], "noise.tensor-dtype"),
    ],
)
def test_tensors_that_cannot_be_noised_in_place_are_refused(totals: list[torch.Tensor], code: str) -> None:
    with raises_code(code):
        SecureNoise().add_many_(totals, [1.0] * len(totals), step=0)


@pytest.mark.parametrize("tensors", [[0], [0, 0], [0, -1], [0, 1 << 64], [0, 1, 2]])
def test_bad_indices_are_refused(tensors: list[int]) -> None:
    with raises_code("noise.tensor-index", "noise.lengths-differ"):
        SecureNoise().add_many_([torch.zeros(2), torch.zeros(2)], [1.0, 1.0], step=0, tensors=tensors)


def test_empty_tensors_and_empty_calls() -> None:
    SecureNoise().add_many_([], [], step=0)
    SecureNoise().add_many_([torch.zeros(0), torch.zeros(3, 0)], [1.0, 1.0], step=0)


# --------------------------------------------------------------------------------------------- secrecy


def test_a_secure_source_never_draws_twice() -> None:
    source = SecureNoise()
    x = torch.zeros(4)
    source.add_(x, 1.0, step=3, tensor=0)
    source.add_(x, 1.0, step=3, tensor=1)
    kept = x.clone()
    for again in (source.add_, source.fill_):
        with raises_code("noise.drawn-twice"):
            again(x, 1.0, step=3, tensor=1)
    source.add_(torch.zeros(4), 1.0, step=4, tensor=1)
    with raises_code("noise.step-repeated"):
        source.add_(x, 1.0, step=3, tensor=7)
    assert torch.equal(x, kept)


def test_a_key_that_is_kept_is_never_that_of_another_thread() -> None:
    """Another thread draws for step 6 just after this one made its key of step 5."""

    class Interrupted(SeededNoise):
        @property
        def _last_key(self) -> tuple[tuple[int, int], bytes]:
            return self.__dict__["kept"]  # type: ignore[no-any-return]

        @_last_key.setter
        def _last_key(self, kept: tuple[tuple[int, int], bytes]) -> None:
            self.__dict__["kept"] = kept
            if kept[0] == (5, 0):
                self._key_of(6, 0)

    source, alone = Interrupted(1), SeededNoise(1)
    for step in (5, 6, 5):
        assert source._key_of(step, 0) == alone._key_of(step, 0)


def test_two_secure_sources_share_nothing() -> None:
    a, b = (draw(SecureNoise(hardened=False), 200_000, dtype=torch.float64).numpy() for _ in range(2))
    assert not np.intersect1d(a, b).size
    assert abs(np.dot(a, b)) < 7 * math.sqrt(a.size)


def test_a_journal_replays_and_only_a_journal() -> None:
    seed = os.urandom(32)
    x = draw(SecureNoise.of_segment(seed, hardened=True), 1000, step=5)
    replayed = SecureNoise.of_segment(seed, hardened=True)
    assert replayed.private
    assert torch.equal(x, draw(replayed, 1000, step=5))
    with raises_code("noise.drawn-twice"):
        draw(replayed, 1000, step=5)
    assert not torch.equal(x, draw(SecureNoise.of_segment(seed, rank=1, hardened=True), 1000, step=5))
    for bad in (bytes(32), b"secret" * 5 + b"se", os.urandom(31)):
        with raises_code("noise.seed-not-random", "noise.seed-length"):
            SecureNoise.of_segment(bad)


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(123456789)])
def test_no_copies_and_no_seed_in_sight(source: NoiseSource) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with raises_code("noise.source-copied"):
            attempt(source)
    shown = repr(source) + str(source)
    assert "123456789" not in shown
    assert source._seed.hex() not in shown
    assert repr(source._seed) not in shown


def in_child(work: object) -> bytes:
    """What `work` returns in a forked child."""
    assert callable(work)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, work())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_cannot_repeat_its_parent() -> None:
    source = SecureNoise()
    draw(source, 8)

    def attempt() -> bytes:
        try:
            draw(source, 8, step=1)
        except NoiseError as error:
            return error.code.encode()
        return b"drawn"

    assert in_child(attempt) == b"noise.forked-source"
    assert draw(source, 8, step=1).isfinite().all()  # the parent goes on
    first, second = (in_child(lambda: draw(SecureNoise(), 8).numpy().tobytes()) for _ in range(2))
    assert first != second


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    def last() -> bytes:
        out = np.zeros(4 * CELL_ELEMENTS, dtype=np.float32)  # torch's threads do not survive a fork: not torch.zeros
        SeededNoise(1).add_(torch.from_numpy(out), 1.0, step=0)
        return out[-100:].tobytes()

    parent = last()  # and now its pool exists
    assert in_child(last) == parent


def test_workspace_has_room_for_a_cell() -> None:
    space = NoiseBuffers()
    assert space.words.size >= CELL_ELEMENTS + 2
    r, theta, scratch = space.polar(CELL_ELEMENTS // 2, torch.float32)
    assert r.size == theta.size == scratch.size == CELL_ELEMENTS // 2


# ------------------------------------------------------------------------------------------- the draws


@pytest.fixture(scope="module", params=["native", "numpy"])
def many(request: pytest.FixtureRequest) -> Iterator[np.ndarray]:
    with native.switched(request.param == "native"):
        if request.param == "native" and native_noise() is None:
            pytest.skip(native.missing() or "the processor lacks the instructions of the native kernel")
        yield draw(SeededNoise(20, hardened=False), DRAWS).numpy().astype(np.float64)


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
        within = (np.random.default_rng(0).random(z.size) - 0.5) * rounding_grid(3.0) / 3.0
        assert stats.kstest(z + within, "norm").pvalue > 0.01


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
    source = SeededNoise(8, hardened=False)
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
        (SeededNoise(20, hardened=False), 0, 1),
        (SeededNoise(20, hardened=False), 0, 1 << 40),
        (SeededNoise(20, hardened=False), 1, 0),
        (SeededNoise(20, rank=1, hardened=False), 0, 0),
        (SeededNoise(21, hardened=False), 0, 0),
        (SeededNoise(-20, hardened=False), 0, 0),
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
