"""The key stream: one key per step, disjoint counters per tensor, checked against AES and HKDF by hand."""

from __future__ import annotations

import hmac
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.engine.noise.random_stream import (
    CELL_ELEMENTS,
    MAX_CALL_BYTES,
    PACK_BELOW_ELEMENTS,
    KeyStream,
    Pack,
    StreamPurpose,
    block_counter,
    cut_into_cells,
    plan_packs,
    step_key,
)

SEED = bytes(range(32))
TOO_MANY = np.empty(MAX_CALL_BYTES // 8 + 2, dtype=np.uint64)
SIZES = st.one_of(
    st.integers(0, 40),
    st.integers(0, 3 * PACK_BELOW_ELEMENTS),
    st.sampled_from([CELL_ELEMENTS - 1, CELL_ELEMENTS, CELL_ELEMENTS + 1, 2 * CELL_ELEMENTS + 3]),
)


def hkdf_by_hand(seed: bytes, info: bytes) -> bytes:
    """RFC 5869 with an empty salt, one block of output."""
    extracted = hmac.digest(b"\0" * 32, seed, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")[:16]


def aes(key: bytes, block: bytes) -> bytes:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def test_key_is_hkdf_of_purpose_step_and_rank() -> None:
    info = b"lamina/stream/1" + b"noise".ljust(16, b"\0") + (7).to_bytes(8, "big") + (3).to_bytes(4, "big")
    assert step_key(SEED, step=7, rank=3) == hkdf_by_hand(SEED, info)


def test_keys_never_meet() -> None:
    keys = [
        step_key(SEED, step=step, rank=rank, purpose=purpose)
        for purpose in StreamPurpose
        for step in (0, 1, 2, 255, 256, 2**32, 2**64 - 1)
        for rank in (0, 1, 255, 256, 2**32 - 1)
    ]
    assert len(set(keys)) == len(keys)
    assert step_key(bytes(32), step=0) != step_key(SEED, step=0)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *((lambda s=s: step_key(SEED, step=s), "noise.step-out-of-range") for s in (-1, 2**64)),
        *((lambda r=r: step_key(SEED, step=0, rank=r), "noise.rank-out-of-range") for r in (-1, 2**32)),
        (lambda: step_key(bytes(31), step=0), "noise.seed-length"),
        *((lambda t=t: block_counter(t, 0), "noise.counter-out-of-range") for t in (-1, 2**64)),
        *((lambda b=b: block_counter(0, b), "noise.counter-out-of-range") for b in (-1, 2**64)),
        (lambda: KeyStream(step_key(SEED, step=0)).run(0, 0, TOO_MANY), "noise.call-too-large"),
    ],
)
def test_what_is_outside_the_stream_is_refused(call: Callable[[], object], code: str) -> None:
    with raises_code(code):
        call()


@pytest.mark.parametrize(("tensor", "block"), [(0, 0), (5, 0), (5, 1 << 40), (2**64 - 1, 7)])
def test_run_and_gather_are_aes_of_the_counter(tensor: int, block: int) -> None:
    key = step_key(SEED, step=1)
    stream = KeyStream(key)
    for _ in range(2):  # the second run re-positions the same cipher
        words = np.empty(8, dtype=np.uint64)
        stream.run(tensor, block, words)
        expected = b"".join(aes(key, block_counter(tensor, block + i)) for i in range(4))
        assert words.tobytes() == expected
    counters = np.frombuffer(block_counter(tensor, block + 2) + block_counter(tensor, block), dtype=np.uint8)
    words = np.zeros(6, dtype=np.uint64)
    stream.gather(counters, words)
    assert words[:4].tobytes() == expected[32:48] + expected[:16]


def blocks_of(pack: Pack) -> list[tuple[int, int]]:
    """Every (tensor, block) that a pack encrypts."""
    if pack.counters is None:
        piece = pack.pieces[0]
        return [(piece.tensor, piece.block + i) for i in range(piece.pairs)]
    table = np.ascontiguousarray(pack.counters).view(">u8").reshape(-1, 2)
    return [(int(t), int(b)) for t, b in table]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), numels=st.lists(SIZES, min_size=1, max_size=8))
def test_no_block_is_used_twice_and_every_element_is_drawn_once(data: st.DataObject, numels: list[int]) -> None:
    tensors = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(numels), max_size=len(numels), unique=True))
    packs = plan_packs(tuple(numels), tuple(tensors))
    used = Counter(pair for pack in packs for pair in blocks_of(pack))
    assert not used or max(used.values()) == 1
    drawn = sorted((p.slot, p.start, p.size) for pack in packs for p in pack.pieces)
    for slot, numel in enumerate(numels):
        at = 0
        for _, start, size in (row for row in drawn if row[0] == slot):
            assert start == at
            at += size
        assert at == numel
    assert all(2 * p.pairs >= p.size for pack in packs for p in pack.pieces)
    assert all(pack.pairs <= CELL_ELEMENTS // 2 for pack in packs)


@given(numel=st.integers(1, 5 * CELL_ELEMENTS))
def test_pieces_of_a_tensor_have_disjoint_ranges_of_blocks(numel: int) -> None:
    cut = cut_into_cells(0, 0, numel)
    for piece, following in itertools.pairwise(cut):
        assert piece.block + piece.pairs <= following.block
    assert all(piece.pairs % 2 == 0 for piece in cut)  # radius words end where a block ends


def test_packing_does_not_change_the_words() -> None:
    """The counters of a pack are those of its pieces alone: radius blocks first, then angle blocks."""
    (pack,) = plan_packs((5, 1, 100), (9, 0, 2))
    assert pack.counters is not None
    expected = [(p.tensor, p.block + i) for p in pack.pieces for i in range(p.pairs // 2)]
    expected += [(p.tensor, p.block + p.pairs // 2 + i) for p in pack.pieces for i in range(p.pairs // 2)]
    assert blocks_of(pack) == expected
