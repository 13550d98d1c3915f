"""Noise on a grid of integers, drawn exactly: discrete Gaussian, Skellam, Laplace; and the grid of a plan.

A step with such noise rounds every clipped gradient to a grid, adds up in int64 and adds integers: no floating-point
number is released that depends on a contribution other than through them (docs/decisions/integer_noise.md).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.engine import native
from lamina.engine.execute.grads import CHUNK_ELEMENTS, ClipWeights, ContributionGrads, row_norm_sq
from lamina.engine.noise.random_stream import BLOCK_BYTES, MAX_CALL_BYTES, KeyStream, Words
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan

# The grid of a layer. The scale s of its noise (S of the discrete Gaussian, √(π/2)·S of Laplace noise) is 2^b units of it,
# so that one unit is g = s/2^b. It depends on the plan alone:
#
#     b = ⌈log2(2^8 √d s / C)⌉, at least 12 and at most 25        C: the smallest threshold of a class that reaches it
#
# with d for √d where norms are L1. A clipped gradient of norm C then has coordinates of 2^8 units on average. Coordinates
# are cut toward zero, which never makes a vector longer in any norm: whatever a contribution was clipped to, ‖y‖·g is at
# most that, in box and joint clipping, under any scale. What is cut off is below one unit a coordinate, at most C/2^8 in
# norm (more where b is at its limit).
#
# Skellam noise of variance v = 4^b units costs a little more than Gaussian noise: for whole orders α and a whole shift y,
# RDP(α) ≤ α‖y‖²/(2v) + ((2α-1)‖y‖² + 6‖y‖₁)/(4v²) (Agarwal, Kairouz and Liu 2021), and ‖y‖₁ ≤ ‖y‖² for whole numbers, so it
# is at most α‖y‖²/(2v)·(1 + 3.5/v). So its unit is larger by √(1 + 3.5/v), which gives sigma back.
#
# Laplace noise costs what Gaussian noise of std S costs. A shift by n units of noise of scale 2^b changes every
# probability by a factor of at most e^ε, ε = n/2^b. What does that is a post-processing of two answers with odds e^ε
# and e^-ε (Kairouz, Oh and Viswanath 2015), and these of N(μ, 1) against N(0, 1), cut at μ/2, with Φ(μ/2) = 1/(1 + e^-ε):
# so μ ≤ √(π/2)·ε = n·g/S. Tensors are noised apart, so a step is a post-processing of Gaussians side by side, of
# μ² = Σ_t (‖g_t‖₁/S_t)². A layer's norm is therefore √Σ_t ‖g_t‖₁², and everything else is as for Gaussian noise.

LEAST_BITS, MOST_BITS = 12, 25
_UNITS_PER_COORDINATE = 2.0**8


class Grid(NamedTuple):
    """The grid of a layer: 2^bits units are the scale of its noise. `taxicab`: its norms are L1. No bits: no noise."""

    bits: int
    unit: float
    taxicab: bool


class GridSums(dict[str, Tensor]):
    """Clipped sums by tensor, in whole units of the grids of their layers: of one draw, for one step.

    `plan`: the digest of the plan that clipped them. `sent`: whether they went into a message.
    """

    def __init__(self, sums: Mapping[str, Tensor], grids: Sequence[Grid], plan: bytes) -> None:
        super().__init__(sums)
        self.grids, self.plan, self.sent = tuple(grids), plan, False


def layer_grids(plan: StepPlan, least: int = LEAST_BITS) -> tuple[Grid, ...]:
    """The grid of every layer, with at least so many bits: noise that comes in shares needs more."""
    taxicab = plan.noise_kind is NoiseKind.LAPLACE
    found = []
    for i, (layer, s) in enumerate(zip(plan.layers, plan.noise, strict=True)):
        scale = math.sqrt(math.pi / 2) * s if taxicab else s
        if taxicab:
            scale = math.nextafter(scale, math.inf)
        reached = [row[i] for row in plan.clip if row[i] > 0]
        spread = float(layer.size) if taxicab else math.sqrt(layer.size)
        wanted = math.log2(_UNITS_PER_COORDINATE * spread * scale / min(reached)) if reached and s else 0.0
        bits = min(MOST_BITS, max(least, math.ceil(wanted))) if s else 0
        if plan.noise_kind is NoiseKind.SKELLAM:
            scale *= math.sqrt(1 + 3.5 * 4.0**-bits)
        found.append(Grid(bits, math.ldexp(scale, -bits), taxicab))
    return tuple(found)


def row_taxicab_sq(rows: Tensor) -> Tensor:
    """(P, n) → (P,) squared L1 norms in float64."""
    length: Tensor = torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float64)
    return length.square_()


def _add_cut(grads: Tensor, factor: Tensor, out: Tensor) -> None:
    """out += Σ_p trunc(factor[p]·grads[p]) for grads (P, n), out (n,) int64. Who has factor 0 is left out, finite or not.

    The kernel and torch give the same integers.
    """
    library, shape = native.library(), tuple(grads.shape)
    if library is None:
        scaled = torch.where((factor > 0).unsqueeze(1), grads.double() * factor.unsqueeze(1), 0.0)
        out.add_(scaled.trunc_().to(torch.int64).sum(0))
        return
    at = native.pointer(grads, grads.dtype, *shape), native.pointer(out, torch.int64, shape[1])
    factors = native.pointer(factor.contiguous(), torch.float64, shape[0])
    sizes = ctypes.c_int64(shape[0]), ctypes.c_int64(shape[1])
    threads, wide = torch.get_num_threads(), int(grads.dtype == torch.float64)
    assert grads.dtype in (torch.float32, torch.float64)
    library.lamina_cut_add(
        ctypes.c_void_p(at[0]), wide, *sizes, ctypes.c_void_p(factors), ctypes.c_void_p(at[1]), threads
    )


class GridGrads(ContributionGrads):
    """A gradient that is added up in whole units: what each contribution adds is cut toward zero, then summed in int64.

    It is measured on the very numbers that are cut.
    """

    def __init__(self, inner: ContributionGrads, grid: Grid) -> None:
        self.inner, self.grid, self.units, self.shape = inner, grid, inner.units, inner.shape

    def _chunks(self) -> Iterator[tuple[int, int]]:
        size = max(1, CHUNK_ELEMENTS // max(1, self.shape.numel()))
        return ((low, min(low + size, self.units)) for low in range(0, self.units, size))

    def norm_sq(self) -> Tensor:
        measure = row_taxicab_sq if self.grid.taxicab else row_norm_sq
        parts = [measure(self.inner.dense(low, high)) for low, high in self._chunks()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        for low, high in self._chunks():
            factor = weights.factor[low:high] / self.grid.unit
            _add_cut(self.inner.dense(low, high).contiguous(), factor, out.view(-1))

    def dense(self, low: int, high: int) -> Tensor:
        return self.inner.dense(low, high)


# The samplers of Canonne, Kamath and Steinke (2020) for a scale of s = 2^b, many draws at a time. Every probability is
# a fraction of whole numbers, compared with uniform bits of its own: nothing is rounded, so nothing is approximated.
#
#     Bernoulli(exp(-γ)), γ in [0, 1]   the first K ≥ 1 with a Bernoulli(γ/K) that fails is odd
#     Laplace, P(x) ∝ exp(-|x|/s)       U of b bits, kept by Bernoulli(exp(-U/s)); V successes of Bernoulli(exp(-1));
#                                       ±(U + sV), a negative 0 thrown away
#     Gaussian, P(x) ∝ exp(-x²/2s²)     a Laplace draw, kept by Bernoulli(exp(-(|x| - s)²/2s²))

Integers = NDArray[np.int64]
_DRAWS_AT_ONCE = 1 << 14
_MOST_WRAPS = 90  # (|x| - s)² fits int64 up to here, and V is larger with a probability of e^-90


class WordSource:
    """The words of one tensor's key stream, one after another."""

    def __init__(self, key: bytes, tensor: int) -> None:
        self._stream, self._tensor, self._block = KeyStream(key), tensor, 0
        self._buffer: Words = np.empty(MAX_CALL_BYTES // 8, dtype=np.uint64)
        self._left = 0

    def take(self, count: int) -> Words:
        out = np.empty(count, dtype=np.uint64)
        done = 0
        while done < count:
            if self._left == 0:
                self._stream.run(self._tensor, self._block, self._buffer)
                self._block += self._buffer.nbytes // BLOCK_BYTES
                self._left = self._buffer.size
            size = min(count - done, self._left)
            at = self._buffer.size - self._left
            out[done : done + size] = self._buffer[at : at + size]
            done, self._left = done + size, self._left - size
        return out

    def bits(self, count: int, bits: int) -> Integers:
        """Uniform in [0, 2^bits), bits ≤ 62."""
        if bits == 0:
            return np.zeros(count, dtype=np.int64)
        return (self.take(count) >> np.uint64(64 - bits)).view(np.int64)

    def one_in(self, count: int, k: int) -> NDArray[np.bool_]:
        """Bernoulli(1/k)."""
        limit = (1 << 64) // k * k
        words = self.take(count)
        while limit < 1 << 64 and bool((over := words >= np.uint64(limit)).any()):
            words[over] = self.take(int(over.sum()))
        return np.asarray(words % np.uint64(k) == 0)


def bernoulli_exp(words: WordSource, numerator: Integers, bits: int) -> NDArray[np.bool_]:
    """Bernoulli(exp(-numerator/2^bits)) for numerators up to 2^bits."""
    odd, k = np.ones(numerator.size, dtype=np.bool_), 1
    going = np.arange(numerator.size)
    while going.size:
        going = going[words.bits(going.size, bits) < numerator[going]]
        if k > 1:
            going = going[words.one_in(going.size, k)]
        odd[going] ^= True
        k += 1
    return odd


def _bernoulli_of_whole(words: WordSource, times: Integers) -> NDArray[np.bool_]:
    """Bernoulli(exp(-times)) for whole numbers."""
    held, left = np.ones(times.size, dtype=np.bool_), times.copy()
    going = np.flatnonzero(left)
    while going.size:
        kept = bernoulli_exp(words, np.ones(going.size, dtype=np.int64), 0)
        held[going[~kept]] = False
        left[going] -= 1
        going = going[kept & (left[going] > 0)]
    return held


def _some_laplace(words: WordSource, tries: int, bits: int) -> Integers:
    """Laplace draws of scale 2^bits from so many tries."""
    low = words.bits(tries, bits)
    low = low[bernoulli_exp(words, low, bits)]
    high = np.zeros(low.size, dtype=np.int64)
    going = np.arange(low.size)
    while going.size:
        going = going[bernoulli_exp(words, np.ones(going.size, dtype=np.int64), 0)]
        high[going] += 1
    if high.size and int(high.max()) > _MOST_WRAPS:
        raise AssertionError("a draw of the discrete Laplace distribution beyond 90 scales")
    size = low + (high << bits)
    minus = words.bits(size.size, 1) == 1
    return np.asarray(np.where(minus, -size, size)[~(minus & (size == 0))])


def _some_gaussian(words: WordSource, tries: int, bits: int) -> Integers:
    """Gaussian draws of standard deviation 2^bits from so many tries."""
    draws = _some_laplace(words, tries, bits)
    square, shift = (np.abs(draws) - (1 << bits)) ** 2, 2 * bits + 1
    draws_kept = bernoulli_exp(words, square & ((1 << shift) - 1), shift)
    draws, square = draws[draws_kept], square[draws_kept]
    return np.asarray(draws[_bernoulli_of_whole(words, square >> shift)])


# A Poisson draw of mean λ = 4^b/2, less λ: a Laplace draw k of scale t = 2^b, kept with probability p(λ+k)/p(λ)·e^(|k|/t)/M,
#
#     log p(λ)/p(λ+k) = λ·h(k/λ) + ½·log(1 + k/λ) + 1/(12(λ+k)) - 1/(12λ) + …,     h(x) = (1+x)·log(1+x) - x     (Stirling)
#
# where log M = 0.251 is above the largest of |k|/t - log p(λ)/p(λ+k), which is 1/4 + O(1/t). A comparison with a uniform
# word is decided in float64 where that is certain, and by 60 digits and more uniform bits where it is not.

_LOG_M = 0.251
_SERIES = [(-1) ** n / (n * (n - 1)) for n in range(11, 1, -1)]  # of h, from x^11 to x^2
_FAR = 2.0**-6  # beyond this k/λ the probability is below e^-700
_DOUBT = 2.0**-36


def _some_poisson(words: WordSource, tries: int, bits: int) -> Integers:
    """Poisson draws of mean 4^bits/2, less that mean, from so many tries; bits ≥ 12."""
    mean, k = 1 << (2 * bits - 1), _some_laplace(words, tries, bits)
    x, word = k / mean, words.take(k.size)
    loss = k * x * np.polyval(_SERIES, x) + 0.5 * np.log1p(x) + 1 / (12.0 * (mean + k)) - 1 / (12.0 * mean)
    log_keep = np.where(np.abs(x) > _FAR, -np.inf, np.abs(k) / 2.0**bits - loss - _LOG_M)
    size = np.maximum(word.astype(np.float64), 1.0)
    log_word = np.log(size) - 64 * math.log(2)
    kept = log_word < log_keep
    for i in np.flatnonzero((np.abs(log_word - log_keep) < _DOUBT + 2 / size) | (size < 2.0**12)):
        kept[i] = _kept_exactly(int(k[i]), bits, int(word[i]), int(words.take(1)[0]))
    return np.asarray(k[kept])


def _kept_exactly(k: int, bits: int, first: int, second: int) -> bool:
    """The same decision for a uniform number of 128 bits."""
    with localcontext() as context:
        context.prec = 60
        mean, after = Decimal(1 << (2 * bits - 1)), Decimal((1 << (2 * bits - 1)) + k)
        correction = sum((1 / after**n - 1 / mean**n) / c for n, c in ((1, Decimal(12)), (3, Decimal(-360))))
        loss = (after + Decimal("0.5")) * (after / mean).ln() - k + correction
        log_keep = Decimal(abs(k)) / (1 << bits) - loss - Decimal(str(_LOG_M))
        low, high = (((Decimal((first << 64) + second + more)) / (1 << 128)) for more in (0, 1))
        if high.ln() < log_keep - Decimal("1e-33"):
            return True
        if low > 0 and low.ln() > log_keep + Decimal("1e-33"):
            return False
    raise AssertionError("a draw of Poisson noise is undecided at 128 bits")


def discrete_skellam(words: WordSource, count: int, bits: int) -> Integers:
    """The difference of two Poisson draws of mean 4^bits/2: variance 4^bits."""
    return _fill(_some_poisson, words, count, bits) - _fill(_some_poisson, words, count, bits)


def _fill(some: Callable[[WordSource, int, int], Integers], words: WordSource, count: int, bits: int) -> Integers:
    out, done = np.empty(count, dtype=np.int64), 0
    while done < count:
        wanted = min(count - done, _DRAWS_AT_ONCE)
        made = some(words, 2 * wanted + 8, bits)[:wanted]
        out[done : done + made.size] = made
        done += made.size
    return out


def discrete_laplace(words: WordSource, count: int, bits: int) -> Integers:
    """P(x) ∝ exp(-|x|/2^bits), x whole."""
    return _fill(_some_laplace, words, count, bits)


def discrete_gaussian(words: WordSource, count: int, bits: int) -> Integers:
    """P(x) ∝ exp(-x²/(2·4^bits)), x whole."""
    return _fill(_some_gaussian, words, count, bits)


_SAMPLERS = {
    NoiseKind.DISCRETE_GAUSSIAN: discrete_gaussian,
    NoiseKind.SKELLAM: discrete_skellam,
    NoiseKind.LAPLACE: discrete_laplace,
}


def integer_noise(kind: NoiseKind, words: WordSource, count: int, bits: int) -> Integers:
    """Draws of this kind, of scale 2^bits."""
    return _SAMPLERS[kind](words, count, bits)
