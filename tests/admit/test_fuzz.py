"""Bytes from anywhere: refused by an error of ours, or accepted and then exactly what they encode to again."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import cbor2
import pytest
from signed_descriptor import KEY, described

from lamina import cbor
from lamina.admit import attestation
from lamina.admit.attestation import (
    MAX_ATTESTATION,
    MAX_DESCRIPTOR,
    Attestation,
    Descriptor,
    attest,
    match_message,
    subject_tag,
)
from lamina.errors import AdmissionError, BadKey, EncodingError
from lamina.sign.keys import PublicKey

OPEN: dict[str, Any] = {"floats": True, "null": True, "tags": (18, 61)}
HEADS = [  # the least and the largest argument of every width, and the reserved ones
    bytes([major << 5 | info]) + fill * (1 << (info - 24) if info < 28 else 0)
    for major in range(8)
    for info in range(24, 32)
    for fill in (b"\x00", b"\xff")
]


def seeds() -> list[bytes]:
    """Valid messages of every kind, short and long."""
    found = []
    for number in range(8):
        descriptor = described(
            data_class="ecg"[: 1 + number % 3],
            admissibility="sensitive-"[: 1 + number],
            clip_norm=10 ** (number + 3) if number % 4 else 0,
            noise_multiplier=4_224_679 if number % 4 else 0,
            not_before=2**number,
            expires=2 ** (number * 4 + 5),
            profile="top=0.25" if number % 2 else None,
            commitment=bytes([number]) * 32,
            items=1 + 100**number,
            nonce=bytes([number]) * 16,
            audience="o" * (1 + 30 * number),
            anchor=bytes(32) if number % 3 == 0 else None,
        )
        tag = subject_tag(bytes(32), str(number)) if number % 2 else None
        only = bytes([number]) * 32 if number % 4 < 2 else None
        found += [descriptor.encode(), attest(descriptor, KEY, issued_at=number, subject_tag=tag, ledger=only)]
        found.append(Attestation.decode(found[-1]).protected)
    return [*found, KEY.public.cose(), cbor.encode({"a": [1.5, None, True, -(2**64)], 300: {}}, **OPEN)]


def inputs(count: int, seed: int) -> Iterator[bytes]:
    """Valid messages that were cut, joined, turned and written over, and noise; the same for a given seed."""
    rng, valid = random.Random(seed), seeds()
    for _ in range(count):
        if rng.random() < 0.1:
            yield rng.randbytes(rng.randrange(60))
            continue
        data = bytearray(rng.choice(valid))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(9):
                case 0 | 1 if data:
                    data[at % len(data)] ^= 1 << rng.randrange(8)
                case 2 if data:
                    data[at % len(data)] = rng.randrange(256)
                case 3:
                    del data[at : at + rng.randrange(1, 5)]
                case 4:
                    data[at:at] = rng.choice(HEADS)
                case 5:
                    data[at : at + 1] = rng.choice(HEADS)
                case 6:
                    other = rng.choice(valid)
                    cut = rng.randrange(len(other) + 1)
                    data[at:] = other[cut : cut + rng.randrange(200)]
                case 7:
                    data[at:at] = data[max(0, at - rng.randrange(1, 40)) : at]
                case _:
                    data += rng.randbytes(rng.randrange(3))
        yield bytes(data)


def look(data: bytes, seen: Counter[str]) -> None:
    """Give the bytes to every decoder. An exception that is not ours fails the test by itself."""
    before = seen["attestation accepted"]
    for options in (OPEN, {}, {"null": True, "tags": (18,), "max_depth": 3}):
        try:
            value = cbor.decode(data, **options)
        except EncodingError:
            seen["cbor refused"] += 1
        else:
            assert cbor.encode(value, **options) == data
            cbor2.loads(data)
            seen["cbor accepted"] += 1
    try:
        described = Descriptor.decode(data)
    except (EncodingError, AdmissionError):
        seen["descriptor refused"] += 1
    else:
        assert described.encode() == data
        assert len(data) <= MAX_DESCRIPTOR
        seen["descriptor accepted"] += 1
    try:
        found = Attestation.decode(data)
    except (EncodingError, AdmissionError):
        seen["attestation refused"] += 1
    else:
        again = cbor.Tag(number=18, value=[found.protected, {}, None, found.signature])
        assert cbor.encode(again, null=True, tags=(18,)) == data
        assert cbor.encode(cbor.decode(found.protected)) == found.protected
        assert len(data) <= MAX_ATTESTATION
        assert attestation.match_header(found.protected) is not None
        found.signed_by(KEY.public, bytes(32))
        seen["attestation accepted"] += 1
    if (fields := attestation.match_header(data)) is None:
        seen["pattern refused"] += 1
    else:
        assert fields == attestation._decode_header(data)
        seen["pattern accepted"] += 1
    if (parts := match_message(data)) is not None:
        general = cbor.decode(data, null=True, tags=(18,), max_depth=3, max_size=len(data))
        assert general == cbor.Tag(number=18, value=[parts[0], {}, None, parts[1]])
        seen["shortcut accepted"] += 1
    else:
        assert seen["attestation accepted"] == before
        seen["shortcut refused"] += 1
    try:
        assert PublicKey.from_cose(data).x in data
        seen["key accepted"] += 1
    except BadKey:
        seen["key refused"] += 1


def check(count: int, seed: int) -> None:
    seen: Counter[str] = Counter()
    for data in inputs(count, seed):
        look(data, seen)
    for kind in (
        "cbor",
        "descriptor",
        "attestation",
        "shortcut",
        "pattern",
        "key",
    ):  # it looked at both sides of every decision
        assert seen[f"{kind} accepted"] > count // 500
        assert seen[f"{kind} refused"] > count // 2


def test_a_seeded_part() -> None:
    check(4_000, seed=9052)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_thousand() -> None:
    check(200_000, seed=8949)


def hostile() -> Iterator[bytes]:
    """Few bytes that promise many: lengths up to 2^64, nesting, arrays of arrays."""
    for major in (2, 3, 4, 5):
        for info, size in ((25, 2), (26, 4), (27, 8)):
            head = bytes([major << 5 | info]) + b"\xff" * size
            yield head
            yield head + bytes(100)
            yield b"\x81" * 10 + head
            yield b"\xd2\x84" + head + bytes(50)
            yield b"\xaf\x01\x01\x02" + head
            yield b"\xd2\x84\x59\x03\xe8" + head + bytes(1000)
            yield head * 5_000
    for opener in (b"\x81", b"\xa1\x00", b"\xd2", b"\x9b\x00\x00\x00\x00\x00\x00\xff\xff"):
        yield opener * (60_000 // len(opener))
    yield b"\x99\xff\xf0" + b"\x80" * 0xFFF0
    yield b"\x99\xff\xf0" + b"\xa0" * 0xFFF0
    yield bytes(1_000_000)


def test_memory_is_bounded_by_what_was_received() -> None:
    """An empty map in a list takes 72 bytes and arrived as one: a small multiple of the input, never of a length."""
    decoders = (lambda data: cbor.decode(data, **OPEN), Descriptor.decode, Attestation.decode, PublicKey.from_cose)
    for data in hostile():
        for decode in decoders:
            tracemalloc.start()
            try:
                with suppress(EncodingError, AdmissionError):
                    decode(data)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 16 * 1024 + 128 * min(len(data), cbor.MAX_SIZE) + len(data), data[:16].hex()
