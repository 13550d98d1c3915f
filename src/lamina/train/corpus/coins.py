"""The secret coins of a step: who is sampled, and which examples of a contribution are used."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lamina.engine.stream import CELL, Words

Rows = NDArray[np.int64]
Coins = NDArray[np.uint32]

WORDS_PER_BLOCK = 4
AT_ONCE = CELL // 2 * WORDS_PER_BLOCK  # words that one run of a key stream gives
SECOND = 1 << 63  # second words lie here, beyond all first words
WINDOWS = 1 << 63  # tensors from here on are contributions


class Stream(Protocol):
    """Blocks of one key: `engine.stream.KeyStream`."""

    def run(self, tensor: int, block: int, out: Words) -> None: ...

    def gather(self, counters: NDArray[np.uint8], out: Words) -> None: ...


def threshold(rate: float) -> int:
    """⌊q · 2^64⌋, exactly: q is a binary fraction already."""
    return math.floor(math.ldexp(rate, 64))


def heads(stream: Stream, row: int, members: int, rate: float) -> Rows:
    """The members 0 … members-1 of class `row` whose coin falls on the side of probability `rate`.

    Member j is in if a 64-bit number is below T = ⌊q · 2^64⌋, so with probability T/2^64: at most 2^-64 too small,
    never too large; q = 1 takes everyone. Of that number, the high half is the 32-bit word j (little-endian) of
    tensor `row` of the stream. It decides unless it equals the high half of T, which happens once in 2^32 coins;
    then the low half is the first word of block 2^63 + j of that tensor. Every word belongs to one coin of one
    class, so the coins are independent as far as AES is a random function.
    """
    bound = threshold(rate)
    if bound == 1 << 64:
        return np.arange(members, dtype=np.int64)
    high, low = np.uint32(bound >> 32), bound & 0xFFFFFFFF
    space = np.empty(min(AT_ONCE, members + WORDS_PER_BLOCK - 1) // WORDS_PER_BLOCK * 2, dtype=np.uint64)
    found = []
    for start in range(0, members, AT_ONCE):
        count = min(AT_ONCE, members - start)
        blocks = (count + WORDS_PER_BLOCK - 1) // WORDS_PER_BLOCK
        stream.run(row, start // WORDS_PER_BLOCK, space[: 2 * blocks])
        words: Coins = space.view("<u4")[:count]
        near = np.flatnonzero(words <= high)
        ties = np.flatnonzero(words[near] == high)
        if len(ties):
            lost = [i for i in ties if _second_word(stream, row, start + int(near[i])) >= low]
            near = np.delete(near, lost)
        found.append(near + start)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _second_word(stream: Stream, row: int, member: int) -> int:
    words = np.empty(2, dtype=np.uint64)
    stream.run(row, SECOND + member, words)
    return int(words.view("<u4")[0])


def windows(stream: Stream, units: Rows, sizes: Rows, most: int) -> NDArray[np.bool_]:
    """Which examples are used, where a contribution may use at most `most` of its `sizes[i]`.

    The answer has one entry per example, contribution after contribution. A contribution with more gets a subset
    that is uniform among those of size `most`: the positions of the smallest of its 64-bit words, which are
    numbers 0, 1, … of tensor 2^63 + unit. It does not depend on who else was sampled. (Two equal words, which
    happens once in 2^64 pairs, favour the earlier. No guarantee rests on this choice: whatever a contribution
    uses is clipped as one.)
    """
    used = np.ones(int(sizes.sum()), dtype=np.bool_)
    large = np.flatnonzero(sizes > most)
    if not len(large):
        return used
    begins = np.cumsum(sizes) - sizes
    at = _ranges(begins[large], sizes[large])
    words = _words(stream, units[large], sizes[large])
    owner = np.repeat(np.arange(len(large)), sizes[large])
    order = np.lexsort((words, owner))  # by word inside each contribution
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes[large]) - sizes[large], sizes[large])
    used[at[order[rank >= most]]] = False
    return used


def _words(stream: Stream, units: Rows, sizes: Rows) -> Words:
    """The first sizes[i] words of each contribution's tensor, in one call of the cipher."""
    blocks = (sizes + 1) // 2
    table = np.empty((int(blocks.sum()), 2), dtype=">u8")
    table[:, 0] = np.repeat(units.astype(np.uint64) + np.uint64(WINDOWS), blocks)
    table[:, 1] = _ranges(np.zeros_like(blocks), blocks)
    out = np.empty(2 * len(table) + 2, dtype=np.uint64)  # the cipher wants a block to spare
    stream.gather(table.view(np.uint8).reshape(-1), out)
    words = out[:-2].view("<u8")
    return words[_ranges(2 * (np.cumsum(blocks) - blocks), sizes)]


def _ranges(begins: Rows, sizes: Rows) -> Rows:
    """begins[0] … begins[0]+sizes[0]-1, begins[1] …, end to end."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begins - (ends - sizes), sizes) + np.arange(total)
