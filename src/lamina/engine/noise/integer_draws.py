"""Noise on integers, drawn exactly: discrete Gaussian, Skellam, Laplace."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from lamina.engine.noise.random_stream import BLOCK_BYTES, MAX_CALL_BYTES, KeyStream, Words
from lamina.plan.rules import NoiseKind

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
