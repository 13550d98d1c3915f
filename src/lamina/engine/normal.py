"""Normal draws from uniform words: Box–Muller with the tail kept, in float32 or float64.

A pair takes two 64-bit words, read as signed integers w1, w2; the last bit of w1 is set:

    u = |w1| / 2^63  in (0, 1]     r = sqrt(-2 ln u)     theta = pi · w2 / 2^63  in [-pi, pi]
    (r cos theta, r sin theta)     two independent N(0, 1)

u has the 53 bits of a float64 *relative* to itself on a grid of 2^-62, so the tail, which is made near u = 0,
goes on: the largest r is sqrt(126 ln 2) = 9.35, the smallest 0. The logarithm is always taken in float64: in
float32 u would round to 1, and r to 0, once in 2^25 draws, and the exact sum would be released there. Everything
after it (root, angle, cosine, sine, product) is smooth, so float32 there moves a draw by at most a few 1e-7 of its
radius, the size of the rounding when it is added to a float32 sum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.engine.stream import CELL, KeyStream, Pack, Words

GRID_BITS = 8
LARGEST = math.sqrt(126 * math.log(2.0))

Reals = NDArray[Any]  # float32 or float64
Store = Callable[
    [int, int, Reals, Reals], None
]  # (slot, first element, r, cos or sin): put their product there

_UNIT = 2.0**-63
_TURN = math.pi * 2.0**-63


def radius(words: Words, work: NDArray[np.float64], out: Reals) -> None:
    """out = sqrt(-ln u²) = sqrt(-2 ln u). `work` is float64 scratch; the cast comes after the logarithm.

    Signed words, because uint64 to float64 is a branch per element. Setting the last bit of `words`, in place,
    keeps u from 0; u² is at most 1.
    """
    np.bitwise_or(words, np.uint64(1), out=words)
    np.copyto(work, words.view(np.int64))
    np.multiply(work, _UNIT, out=work)
    np.multiply(work, work, out=work)
    np.log(work, out=work)
    np.copyto(out, work, casting="same_kind")
    np.negative(out, out=out)
    np.sqrt(out, out=out)


def angle(words: Words, out: Reals) -> None:
    """out = theta. The same word gives the same angle in both precisions, up to their rounding."""
    np.copyto(out, words.view(np.int64), casting="same_kind")
    np.multiply(out, _TURN, out=out)


def cosine(theta: Reals, out: Reals) -> None:
    if theta.dtype == np.float32:
        np.cos(theta, out=out)
    else:  # four times as fast as numpy's float64, and parallel: on the main thread only
        torch.cos(torch.from_numpy(theta), out=torch.from_numpy(out))


def sine(theta: Reals, out: Reals) -> None:
    if theta.dtype == np.float32:
        np.sin(theta, out=out)
    else:
        torch.sin(torch.from_numpy(theta), out=torch.from_numpy(out))


def grid(std: float) -> float:
    """The public grid of a hardened release: the power of two with 2^8 <= std/grid < 2^9."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - GRID_BITS)


def add_rounded(total: Reals, noise: NDArray[np.float64], spacing: float) -> None:
    """total = the multiple of `spacing` nearest to total + noise, computed in float64. Overwrites `noise`."""
    np.add(total, noise, out=noise)
    np.multiply(noise, 1.0 / spacing, out=noise)
    np.rint(noise, out=noise)
    np.multiply(noise, spacing, out=total, casting="same_kind")


def _aligned(size: int, dtype: torch.dtype) -> NDArray[Any]:
    """Uninitialised memory on a cache line, which torch gives and numpy does not: a quarter of the time."""
    return torch.empty(size, dtype=dtype).numpy()


class Workspace:
    """The buffers of one thread: words and two precisions of (radius, angle, product). Made once."""

    def __init__(self) -> None:
        self.words: Words = _aligned(CELL + 2, torch.int64).view(np.uint64)
        self._log: NDArray[np.float64] = _aligned(CELL // 2, torch.float64)
        self._real: dict[torch.dtype, tuple[Reals, Reals, Reals]] = {}

    def polar(self, pairs: int, dtype: torch.dtype) -> tuple[Reals, Reals, Reals]:
        """(r, theta, scratch) in this precision from the first 2·pairs words."""
        if dtype not in self._real:
            size = CELL // 2
            self._real[dtype] = (_aligned(size, dtype), _aligned(size, dtype), _aligned(size, dtype))
        r, theta, scratch = (buffer[:pairs] for buffer in self._real[dtype])
        radius(self.words[:pairs], self._log[:pairs], r)
        angle(self.words[pairs : 2 * pairs], theta)
        return r, theta, scratch


_local = threading.local()


def workspace() -> Workspace:
    """The buffers of the calling thread."""
    if not hasattr(_local, "space"):
        _local.space = Workspace()
    space: Workspace = _local.space
    return space


def add_pack(
    stream: KeyStream, pack: Pack, space: Workspace, stds: Reals, precise: bool, store: Store
) -> None:
    """Draw one pack and store it. The one place that a native kernel has to replace."""
    pairs = pack.pairs
    if pack.counters is None:
        piece = pack.pieces[0]
        stream.run(piece.tensor, piece.block, space.words[: 2 * pairs])
        scale = stds[piece.slot]
    else:
        stream.gather(pack.counters, space.words)
        scale = np.repeat(stds[pack.slots], pack.widths)
    r, theta, noise = space.polar(pairs, torch.float64 if precise else torch.float32)
    np.multiply(r, scale, out=r)
    for function, spans in ((cosine, pack.cosines), (sine, pack.sines)):
        function(theta, noise)
        for slot, start, count, at in spans:
            store(slot, start, r[at : at + count], noise[at : at + count])
