"""Coins: the words they are made of, the exact probability, ties, independence at 10⁶ draws, window choice."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from lamina.engine.noise.random_stream import KeyStream, StreamPurpose, Words, block_counter, step_key
from lamina.run.sampler import WORDS_PER_RUN, choose_examples, poisson_sample, sampling_threshold

SEED = bytes(range(32))


def key(step: int) -> bytes:
    return step_key(SEED, step=step, purpose=StreamPurpose.COINS)


def aes_word(secret: bytes, tensor: int, block: int, word: int) -> int:
    """One 32-bit word by AES on one explicit counter: an oracle that shares no code with the key stream."""
    plain = tensor.to_bytes(8, "big") + block.to_bytes(8, "big")
    cipher = Cipher(algorithms.AES(secret), modes.ECB()).encryptor().update(plain)
    return int.from_bytes(cipher[4 * word : 4 * word + 4], "little")


class Forced:
    """A stream that says what a test wants: first words from a list, second words from a dict by member."""

    def __init__(self, first: NDArray[np.uint32], second: dict[int, int]) -> None:
        self.first, self.second, self.asked = first, second, []

    def run(self, tensor: int, block: int, out: Words) -> None:
        words = out.view("<u4")
        if block >= 1 << 63:
            self.asked.append(block - (1 << 63))
            words[:] = 0xFFFFFFFF
            words[0] = self.second[block - (1 << 63)]
            return
        part = self.first[4 * block : 4 * block + len(words)]
        words[:] = 0
        words[: len(part)] = part

    def gather(self, counters: NDArray[np.uint8], out: Words) -> None:
        raise AssertionError("coins do not gather")


# ------------------------------------------------------------------------------------------ which words


@pytest.mark.parametrize("row", [0, 3])
def test_first_words_are_those_of_aes(row: int) -> None:
    words = [aes_word(key(5), row, j // 4, j % 4) for j in range(2001)]
    for rate in (0.5, 0.01, 1 / 3):
        expected = [j for j, word in enumerate(words) if Fraction(word, 2**32) < Fraction(rate)]
        assert poisson_sample(KeyStream(key(5)), row, 2001, rate).tolist() == expected


def test_chunks_of_the_stream_join_without_seam() -> None:
    members = 2 * WORDS_PER_RUN + 3
    found = set(poisson_sample(KeyStream(key(1)), 2, members, 0.25).tolist())
    for j in [
        0,
        WORDS_PER_RUN - 1,
        WORDS_PER_RUN,
        WORDS_PER_RUN + 1,
        2 * WORDS_PER_RUN - 1,
        2 * WORDS_PER_RUN,
        members - 1,
    ]:
        assert (aes_word(key(1), 2, j // 4, j % 4) < 1 << 30) == (j in found)
    assert poisson_sample(KeyStream(key(1)), 2, WORDS_PER_RUN, 0.25).tolist() == sorted(
        j for j in found if j < WORDS_PER_RUN
    )


@pytest.mark.parametrize("members", [0, 1, 2, 3, 4, 5, 8, 9])
def test_everyone_at_rate_one_and_nobody_below_the_resolution(members: int) -> None:
    assert poisson_sample(KeyStream(key(0)), 0, members, 1.0).tolist() == list(range(members))
    assert poisson_sample(KeyStream(key(0)), 0, members, 2.0**-70).tolist() == []
    most = math.nextafter(1.0, 0.0)
    assert len(poisson_sample(KeyStream(key(0)), 0, members, most)) == members  # misses with probability 2^-53


# ------------------------------------------------------------------------------------------ probability


@given(rate=st.floats(min_value=1e-30, max_value=1.0))
def test_threshold_is_at_most_2_to_minus_64_below_the_rate(rate: float) -> None:
    gap = Fraction(rate) - Fraction(sampling_threshold(rate), 2**64)
    assert 0 <= gap < Fraction(1, 2**64)


@given(rate=st.floats(min_value=2.0**-70, max_value=math.nextafter(1.0, 0.0)), low=st.integers(0, 2**32 - 1))
def test_a_tie_is_decided_by_the_low_half(rate: float, low: int) -> None:
    """Words just below, at and above the high half of T: in, decided by a further word, out."""
    bound = math.floor(Fraction(rate) * 2**64)
    high = bound >> 32
    words = [max(high - 1, 0), high, min(high + 1, 2**32 - 1), high, 0, 2**32 - 1]
    stream = Forced(np.array(words, dtype=np.uint32), dict.fromkeys(range(6), low))
    expected = [j for j, word in enumerate(words) if (word << 32) + low < bound]
    assert poisson_sample(stream, 0, 6, rate).tolist() == expected
    assert stream.asked == [j for j, word in enumerate(words) if word == high]  # no other word is spent


def test_ties_probability_counted_out() -> None:
    """All pairs (first word at the tie, second word on a coarse grid): the share of heads is that of T."""
    rate = 0.3
    bound = sampling_threshold(rate)
    seconds = [i << 24 for i in range(256)]
    stream = Forced(np.full(256, bound >> 32, dtype=np.uint32), dict(enumerate(seconds)))
    assert len(poisson_sample(stream, 0, 256, rate)) == math.ceil((bound & 0xFFFFFFFF) / 2**24)


def test_a_tie_takes_the_word_beyond_all_first_words() -> None:
    """In the real stream: choose the rate so that a given member ties."""
    member = 6
    word = aes_word(key(9), 1, member // 4, member % 4)
    second = aes_word(key(9), 1, (1 << 63) + member, 0)
    exact = math.ldexp(word, -32)  # T's low half is 0: the tie is lost whatever the second word
    assert member not in poisson_sample(KeyStream(key(9)), 1, 10, exact)
    above = next(r for r in _above(exact) if (sampling_threshold(r) & 0xFFFFFFFF) > second)
    below = next(r for r in reversed(list(_above(exact))) if (sampling_threshold(r) & 0xFFFFFFFF) <= second)
    assert sampling_threshold(above) >> 32 == sampling_threshold(below) >> 32 == word
    assert member in poisson_sample(KeyStream(key(9)), 1, 10, above)
    assert member not in poisson_sample(KeyStream(key(9)), 1, 10, below)


def _above(exact: float) -> list[float]:
    return [exact + math.ldexp(i, -42) for i in range(1024)]


# ------------------------------------------------------------------------------------------ independence

STEPS, MEMBERS = 2500, 400  # 10⁶ coins per class
RATES = (0.3, 0.05)


@pytest.fixture(scope="module")
def coins() -> list[NDArray[np.float64]]:
    """One matrix (step, member) per class: centred coins, (coin - q)/sqrt(q(1-q))."""
    tables = []
    for row, rate in enumerate(RATES):
        table = np.zeros((STEPS, MEMBERS))
        for step in range(STEPS):
            table[step, poisson_sample(KeyStream(key(step)), row, MEMBERS, rate)] = 1.0
        tables.append((table - rate) / math.sqrt(rate * (1 - rate)))
    return tables


def bounded(scores: NDArray[np.float64], tail: float = 1e-7) -> None:
    """No single standard score is beyond what `tail` allows for that many, and their squares average to 1."""
    flat = scores.ravel()
    assert np.abs(flat).max() < stats.norm.isf(tail / 2 / flat.size)
    assert abs(flat.mean()) * math.sqrt(flat.size) < stats.norm.isf(tail / 2)
    spread = (flat**2).sum()
    low, high = stats.chi2.ppf([tail / 2, 1 - tail / 2], flat.size)
    assert low * 0.99 < spread < high * 1.01  # sums of binary variables are not quite normal


def test_marginal_rates(coins: list[NDArray[np.float64]]) -> None:
    for table in coins:
        bounded(table.sum(0) / math.sqrt(STEPS))  # per member, over steps
        assert abs(table.sum()) / math.sqrt(table.size) < 5  # all 10⁶ together


def test_batch_sizes_are_binomial(coins: list[NDArray[np.float64]]) -> None:
    """The sum over members has variance N q (1-q): no quota, no shared coin."""
    for table in coins:
        bounded(table.sum(1) / math.sqrt(MEMBERS))


def test_members_are_independent_of_each_other(coins: list[NDArray[np.float64]]) -> None:
    above = np.triu_indices(MEMBERS, 1)
    for table in coins:
        bounded((table.T @ table)[above] / math.sqrt(STEPS))


def test_steps_are_independent_of_each_other(coins: list[NDArray[np.float64]]) -> None:
    for table in coins:
        for lag in (1, 2, 7):
            products = (table[lag:] * table[:-lag]).sum(0) / math.sqrt(STEPS - lag)
            bounded(products)
        bounded((table[1:].T @ table[:-1])[np.triu_indices(MEMBERS, 1)] / math.sqrt(STEPS - 1))


def test_classes_are_independent_of_each_other(coins: list[NDArray[np.float64]]) -> None:
    """The same member number in two classes has two coins."""
    bounded((coins[0].T @ coins[1]) / math.sqrt(STEPS))


def test_the_checks_can_fail(coins: list[NDArray[np.float64]]) -> None:
    """A coin that two members share, a coin that is kept for two steps, a rate 2 % too high: each is seen."""
    table = coins[0]
    shared = table.copy()
    shared[:, 1] = shared[:, 0]
    with pytest.raises(AssertionError):
        test_members_are_independent_of_each_other([shared])
    kept = np.repeat(table[::2], 2, axis=0)
    with pytest.raises(AssertionError):
        test_steps_are_independent_of_each_other([kept])
    with pytest.raises(AssertionError):
        test_marginal_rates([table + 0.02 * 0.3 / math.sqrt(0.21)])
    with pytest.raises(AssertionError):
        test_classes_are_independent_of_each_other([table, table])
    with pytest.raises(AssertionError):
        test_batch_sizes_are_binomial([table - table.mean(1, keepdims=True)])


def test_one_draw_of_a_million() -> None:
    count = len(poisson_sample(KeyStream(key(0)), 0, 10**6, 0.001))
    assert abs(count - 1000) < 5 * math.sqrt(1000)


# ------------------------------------------------------------------------------------------ windows


def augment(step: int) -> KeyStream:
    return KeyStream(step_key(SEED, step=step, purpose=StreamPurpose.AUGMENT))


def rows(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def test_windows_keep_at_most_so_many_of_each() -> None:
    sizes = rows(1, 5, 3, 8, 2)
    used = choose_examples(augment(0), rows(4, 9, 2, 11, 0), sizes, 3)
    assert [int(part.sum()) for part in np.split(used, np.cumsum(sizes)[:-1])] == [1, 3, 3, 3, 2]
    assert used.dtype == np.bool_ and len(used) == 19


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    most=st.integers(1, 5),
    step=st.integers(0, 50),
    first=st.integers(0, 10**9),
)
def test_windows_of_a_contribution_do_not_depend_on_the_others(
    sizes: list[int], most: int, step: int, first: int
) -> None:
    units = first + np.arange(len(sizes))
    used = choose_examples(augment(step), units, rows(*sizes), most)
    for unit, size, part in zip(units, sizes, np.split(used, np.cumsum(sizes)[:-1]), strict=True):
        alone = choose_examples(augment(step), rows(int(unit)), rows(size), most)
        assert part.tolist() == alone.tolist()
        assert part.sum() == min(size, most)


def test_windows_are_those_with_the_smallest_words() -> None:
    unit, size, most = 77, 7, 3
    secret = step_key(SEED, step=3, purpose=StreamPurpose.AUGMENT)
    cipher = Cipher(algorithms.AES(secret), modes.ECB()).encryptor()
    stream = cipher.update(b"".join(block_counter((1 << 63) + unit, block) for block in range(4)))
    words = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(size)]
    expected = sorted(range(size), key=words.__getitem__)[:most]
    used = choose_examples(augment(3), rows(unit), rows(size), most)
    assert np.flatnonzero(used).tolist() == sorted(expected)


def test_every_subset_of_windows_is_equally_likely() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    units = np.arange(200)
    for step in range(60):
        used = choose_examples(augment(step), units, np.full(200, 5), 2).reshape(200, 5)
        counts.update(tuple(np.flatnonzero(row)) for row in used)
    assert set(counts) == set(itertools.combinations(range(5), 2))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6
    again = choose_examples(augment(0), units, np.full(200, 5), 2)
    assert again.tolist() == choose_examples(augment(0), units, np.full(200, 5), 2).tolist()
    assert again.tolist() != choose_examples(augment(1), units, np.full(200, 5), 2).tolist()
