"""The key stream of a step, and which blocks of it belong to which element of which tensor.

One AES-128 key per (seed, step, rank, purpose), by HKDF-SHA256:

    key = HKDF(seed, info = "lamina/stream/1" | purpose | step | rank)           and | part, for parts of a step's noise

Under that key the stream is counter mode: block b of tensor t is AES_key(t | b), with t and b the 64-bit
halves of the counter, big-endian. t | b is injective and AES a permutation, so two tensors (or two blocks)
never share a counter; two (step, rank, purpose) share a key only if HKDF collides. Every value is a function
of (seed, step, rank, purpose, tensor, element): threads, packing and the other tensors of the model have no
part in it, so that a run can replay a segment exactly.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from lamina import validate
from lamina.errors import NoiseError

SEED_BYTES = 32
BLOCK_BYTES = 16
CELL_ELEMENTS = 1 << 16  # elements of a cell; part of the format: another value is another stream
PACK_BELOW_ELEMENTS = 1 << 14  # pieces below this are packed and drawn together; only a matter of speed

MAX_CALL_BYTES = CELL_ELEMENTS // 2 * BLOCK_BYTES  # of one call

Words = NDArray[np.uint64]


class StreamPurpose(enum.Enum):
    """What a stream is for. Streams of different purposes have different keys."""

    NOISE = "noise"
    INTEGER_NOISE = "integer noise"
    COINS = "coins"
    DROPOUT = "dropout"
    AUGMENT = "augment"
    CHOICE = "choice"
    CHOICE_COINS = "choice coins"
    CHOICE_WINDOWS = "choice windows"
    CHOICE_DROPOUT = "choice dropout"


def segment_seed(chosen: int | None, *place: int) -> bytes:
    """The seed of all streams of a segment: from the system; or from a number that somebody chose, and the place of
    the segment, which makes the run repeatable and not private."""
    if chosen is None:
        return os.urandom(SEED_BYTES)
    return hashlib.sha256(f"lamina/chosen seed {chosen} {' '.join(map(str, place))}".encode()).digest()


def step_key(
    seed: bytes, *, step: int, rank: int = 0, purpose: StreamPurpose = StreamPurpose.NOISE, part: int = 0
) -> bytes:
    """The AES key of one step: HKDF(seed, purpose | step | rank), and | part after part 0.

    The info is injective in its fields: those before `part` have fixed lengths, so its presence shows.
    """
    if len(seed) != SEED_BYTES:
        problem = f"the seed has {len(seed)} bytes, must have {SEED_BYTES}"
        raise NoiseError("noise.seed-length", problem, "use os.urandom(32)")
    validate.whole(NoiseError, "noise.step-out-of-range", least=0, most=(1 << 64) - 1, step=step)
    validate.whole(NoiseError, "noise.rank-out-of-range", least=0, most=(1 << 32) - 1, rank=rank)
    validate.whole(NoiseError, "noise.part-out-of-range", least=0, most=(1 << 32) - 1, part=part)
    info = b"lamina/stream/1" + purpose.value.encode().ljust(16, b"\0")
    info += step.to_bytes(8, "big") + rank.to_bytes(4, "big")
    info += part.to_bytes(4, "big") if part else b""
    secret = hmac.digest(bytes(32), seed, "sha256")  # extract and expand of RFC 5869, without a salt
    return hmac.digest(secret, info + b"\1", "sha256")[:16]


class KeyStream:
    """Blocks of one key. Not for several threads at once: each thread makes its own from the same key."""

    def __init__(self, key: bytes) -> None:
        self._cipher = algorithms.AES(key)
        self._ctr: Any = None
        self._ecb: Any = None

    def run(self, tensor: int, block: int, out: Words) -> None:
        """Write blocks `block`, `block`+1, … of `tensor` over all of `out` (two words per block)."""
        size = out.nbytes
        if size > MAX_CALL_BYTES:
            problem = f"one call asks for {size} bytes of a stream, the limit is {MAX_CALL_BYTES}"
            raise NoiseError("noise.call-too-large", problem, "use several calls")
        nonce = block_counter(tensor, block)
        if self._ctr is None:
            self._ctr = Cipher(self._cipher, modes.CTR(nonce)).encryptor()
        else:
            self._ctr.reset_nonce(nonce)
        self._ctr.update_into(_zero_bytes()[:size], out.view(np.uint8))

    def gather(self, counters: NDArray[np.uint8], out: Words) -> None:
        """Write the blocks with these counters to the front of `out`, which has one block to spare.

        AES of an explicit list of counters is counter mode with gaps: one call for many small tensors.
        """
        if self._ecb is None:
            self._ecb = Cipher(self._cipher, modes.ECB()).encryptor()
        self._ecb.update_into(counters, out.view(np.uint8)[: counters.size + BLOCK_BYTES - 1])


def block_counter(tensor: int, block: int) -> bytes:
    """The 128-bit counter of a block: injective, and a run below 2^64 blocks never carries into `tensor`."""
    if not (0 <= tensor < 1 << 64 and 0 <= block < 1 << 64):
        problem = f"tensor index {tensor} or block {block} is outside [0, 2^64)"
        raise NoiseError("noise.counter-out-of-range", problem, "use a tensor index >= 0")
    return tensor.to_bytes(8, "big") + block.to_bytes(8, "big")


@functools.lru_cache(maxsize=1)
def _zero_bytes() -> NDArray[np.uint8]:
    return np.zeros(MAX_CALL_BYTES, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements [start, start + size) of the tensor at position `slot` of a call, at most one cell of it.

    A piece of n elements takes h = 2·ceil(n/4) pairs (radius, angle): h radius words, then h angle words, h
    whole blocks. Element i < h is the cosine member of pair i, element h + i the sine member.
    """

    slot: int
    tensor: int
    start: int
    size: int

    @property
    def pairs(self) -> int:
        return (self.size + 3) // 4 * 2

    @property
    def block(self) -> int:
        """First block. Cell c starts at block c·CELL/2, and a piece takes h <= CELL/2 of them."""
        return self.start // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Pieces that are drawn in one pass: `pairs` in all, those of a piece side by side.

    `counters` lists the blocks where there are several pieces. `cosines` and `sines` say where the draws go:
    (slot, first element, count, first pair), worked out once because a step has no time for it.
    """

    pieces: tuple[Piece, ...]
    pairs: int
    slots: NDArray[np.intp]
    widths: NDArray[np.intp]
    cosines: tuple[tuple[int, int, int, int], ...]
    sines: tuple[tuple[int, int, int, int], ...]
    counters: NDArray[np.uint8] | None


def cut_into_cells(slot: int, tensor: int, numel: int) -> tuple[Piece, ...]:
    """A tensor cut into cells."""
    return tuple(
        Piece(slot=slot, tensor=tensor, start=start, size=min(CELL_ELEMENTS, numel - start))
        for start in range(0, numel, CELL_ELEMENTS)
    )


@functools.lru_cache(maxsize=16)
def plan_packs(numels: tuple[int, ...], tensors: tuple[int, ...]) -> tuple[Pack, ...]:
    """The work of a call: large pieces alone, first, and the tiny ones packed together, last."""
    every = [p for slot, (t, n) in enumerate(zip(tensors, numels, strict=True)) for p in cut_into_cells(slot, t, n)]
    packs = [_make_pack([p]) for p in every if p.size >= PACK_BELOW_ELEMENTS]
    packs.sort(key=lambda pack: -pack.pairs)
    group: list[Piece] = []
    room = CELL_ELEMENTS // 4  # half a cell: two packs keep two threads busy
    for piece in (p for p in every if p.size < PACK_BELOW_ELEMENTS):
        if room < piece.pairs:
            packs.append(_make_pack(group))
            group, room = [], CELL_ELEMENTS // 4
        group.append(piece)
        room -= piece.pairs
    if group:
        packs.append(_make_pack(group))
    return tuple(packs)


def _make_pack(group: list[Piece]) -> Pack:
    cosines, sines = [], []
    at = 0
    for piece in group:
        cosines.append((piece.slot, piece.start, min(piece.pairs, piece.size), at))
        if piece.size > piece.pairs:
            sines.append((piece.slot, piece.start + piece.pairs, piece.size - piece.pairs, at))
        at += piece.pairs
    slots, widths = np.array([piece.slot for piece in group]), np.array([piece.pairs for piece in group])
    return Pack(
        pieces=tuple(group), pairs=at, slots=slots, widths=widths, cosines=tuple(cosines), sines=tuple(sines),
        counters=_block_counters(group) if len(group) > 1 else None,
    )  # fmt: skip


def _block_counters(group: list[Piece]) -> NDArray[np.uint8]:
    """Of all radius words first, then of all angle words, so that the pass sees two plain halves."""
    table = np.empty((sum(piece.pairs for piece in group), 2), dtype=">u8")  # concatenate would turn it native
    at = 0
    for half in (0, 1):
        for piece in group:
            count = piece.pairs // 2
            first = piece.block + half * count
            table[at : at + count, 0] = piece.tensor
            table[at : at + count, 1] = np.arange(count, dtype=np.uint64) + np.uint64(first)
            at += count
    return table.view(np.uint8).reshape(-1)
