"""Strict deterministic CBOR: what is accepted re-encodes to the same bytes, the rest is refused by name."""

from __future__ import annotations

import random
import struct
from typing import Any

import cbor2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.cbor import MAX_SIZE, Tag, decode, encode
from lamina.errors import EncodingError

OPEN = {"floats": True, "null": True, "tags": (18,)}  # everything that can be allowed

integers = st.integers(-(2**64), 2**64 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
scalars = st.one_of(integers, texts, st.binary(max_size=12), st.booleans(), st.none(), st.floats(allow_nan=False))
keys = st.one_of(integers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(keys, inner, max_size=5),
        inner.map(lambda value: Tag(number=18, value=value)),
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type and in the bits of floats, unlike ==."""
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, Tag) and isinstance(right, Tag):
        return left.number == right.number and same(left.value, right.value)
    return type(left) is type(right) and left == right


def deep_enough(value: Any) -> bool:
    try:
        encode(value, **OPEN)
    except EncodingError as error:
        if "max_depth" not in str(error):
            raise
        return False
    return True


@given(values)
@example([0.0, -0.0, float("inf"), -float("inf"), 5e-324, 65504.0, 65505.0, 1e-8])
def test_round_trip(value: Any) -> None:
    if deep_enough(value):
        assert same(decode(encode(value, **OPEN), **OPEN), value)


@given(values)
def test_cbor2_reads_what_we_write(value: Any) -> None:
    if not deep_enough(value):
        return

    def plain(item: Any) -> Any:
        if isinstance(item, cbor2.CBORTag):
            return Tag(number=item.tag, value=plain(item.value))
        if isinstance(item, list | tuple):
            return [plain(x) for x in item]
        return {k: plain(v) for k, v in item.items()} if hasattr(item, "items") else item

    read = cbor2.loads(encode(value, **OPEN))
    assert same(plain(read), value)


@given(st.one_of(scalars, st.lists(scalars, max_size=4), st.dictionaries(st.integers(0, 2**40), scalars)))
def test_equals_cbor2_canonical_where_key_orders_agree(value: Any) -> None:
    # cbor2 sorts keys length first (RFC 7049); for non-negative integers that is our order too.
    assert encode(value, **OPEN) == cbor2.dumps(value, canonical=True)


@settings(max_examples=500)
@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_a_value_or_an_encoding_error(data: bytes) -> None:
    check(data)


def check(data: bytes) -> bool:
    try:
        value = decode(data, **OPEN)
    except EncodingError as error:
        if "CBOR at byte" not in str(error):
            raise
        return False
    assert encode(value, **OPEN) == data
    cbor2.loads(data)  # whatever we accept, another decoder can read
    return True


def test_random_and_mutated_bytes() -> None:
    """Random bytes, and valid encodings with bytes flipped, cut, doubled or inserted."""
    rng = random.Random(20240229)
    seeds = [
        encode({1: [1, -1, 2**40], "a": {"b": b"xyz", "c": [True, False, None]}, 300: 1.5}, **OPEN),
        encode(Tag(number=18, value=[b"\xa0", {}, None, bytes(64)]), **OPEN),
        encode([0.1, float("inf"), 1e10, "héé", -(2**64)], **OPEN),
    ]
    accepted = refused = 0
    for _ in range(10_000):
        data = bytearray(rng.choice(seeds) if rng.random() < 0.8 else rng.randbytes(rng.randrange(30)))
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0 if data:
                    data[at % len(data)] ^= 1 << rng.randrange(8)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = rng.randbytes(1)
                case _:
                    data[at:at] = data[max(0, at - 3) : at]
        if check(bytes(data)):
            accepted += 1
        else:
            refused += 1
    assert accepted > 250
    assert refused > 5_000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("", "needs 1 bytes"),
        ("1817", "shortest"),
        ("190017", "shortest"),
        ("1a00000017", "shortest"),
        ("1b00000000ffffffff", "shortest"),
        ("3817", "shortest"),
        ("5800", "shortest"),
        ("7800", "shortest"),
        ("980101", "shortest"),
        ("b8010101", "shortest"),
        ("d81200", "shortest"),
        ("d90012f6", "shortest"),
        ("5f4100ff", "indefinite"),
        ("7f6100ff", "indefinite"),
        ("9fff", "indefinite"),
        ("bfff", "indefinite"),
        ("ff", "indefinite"),
        ("1c", "reserved"),
        ("fc", "reserved"),
        ("a201010101", "duplicate"),
        ("a2616101616102", "duplicate"),
        ("a202010101", "out of order"),
        ("a2616201616102", "out of order"),
        ("a261610118180a", "out of order"),  # 24 (1818) sorts before "a" (6161)
        ("a10a", "cannot fit"),
        ("a1f501", "neither an integer nor text"),  # True beside 1
        ("a1f93c0001", "neither an integer nor text"),  # 1.0 beside 1
        ("a1410001", "neither an integer nor text"),
        ("a18001", "neither an integer nor text"),
        ("a1f601", "neither an integer nor text"),
        ("f7", "undefined"),
        ("e0", "simple value 0"),
        ("f3", "simple value 19"),
        ("f814", "simple value 20"),
        ("f8ff", "simple value 255"),
        ("c249010000000000000000", "tag 2"),
        ("c11a514b67b0", "tag 1"),
        ("0000", "trailing"),
        ("4201", "needs 2 bytes"),
        ("62c328", "UTF-8"),
        ("63eda080", "UTF-8"),
        ("5bffffffffffffffff", "needs 18446744073709551615 bytes"),
        ("9bffffffffffffffff00", "cannot fit"),
        ("bb7fffffffffffffff00", "cannot fit"),
        ("9affffffff", "cannot fit"),
        ("f97e00", "NaN"),
        ("fa7fc00000", "NaN"),
        ("fb7ff8000000000000", "NaN"),
        ("fb7ff0000000000001", "NaN"),
        ("fa3fc00000", "shortest"),
        ("fb3ff8000000000000", "shortest"),
        ("fa7f800000", "shortest"),
        ("fb8000000000000000", "shortest"),
        ("fb47efffffe0000000", "shortest"),
    ],
)
def test_refusals_name_offset_and_reason(data: str, reason: str) -> None:
    with raises_code("cbor.not-deterministic") as caught:
        decode(bytes.fromhex(data), floats=True, null=True, tags=(18,))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [  # RFC 8949 appendix A
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-18446744073709551616, "3bffffffffffffffff"),
        (-0.0, "f98000"),
        (1.5, "f93e00"),
        (65504.0, "f97bff"),
        (100000.0, "fa47c35000"),
        (3.4028234663852886e38, "fa7f7fffff"),
        (1.1, "fb3ff199999999999a"),
        (5.960464477539063e-8, "f90001"),
        (float("inf"), "f97c00"),
        (-float("inf"), "f9fc00"),
        (None, "f6"),
        ("\U00010151", "64f0908591"),
        ([1, [2, 3], [4, 5]], "8301820203820405"),
        ({10: 1, 100: 2, -1: 3, "z": 4, "aa": 5}, "a50a01186402200361 7a04 62616105"),  # RFC 8949 §4.2.1
    ],
)
def test_published_examples(value: Any, encoded: str) -> None:
    data = bytes.fromhex(encoded)
    assert encode(value, **OPEN) == data
    assert same(decode(data, **OPEN), value)


def test_what_a_schema_forbids() -> None:
    for value, word in (
        (1.0, "cbor.float-forbidden"),
        (None, "cbor.none-forbidden"),
        (Tag(number=18, value=1), "cbor.tag-forbidden"),
    ):
        data = encode(value, **OPEN)
        with raises_code(word):
            encode({"k": [value]})
        with raises_code("cbor.not-deterministic"):
            decode(data)
    with raises_code("cbor.tag-forbidden"):
        encode(Tag(number=17, value=1), tags=(18,))
    with raises_code("cbor.nan-not-encodable"):
        encode(float("nan"), floats=True)


@pytest.mark.parametrize(
    "value", [2**64, -(2**64) - 1, {True: 1}, {1.0: 1}, {b"x": 1}, {(1,): 1}, {None: 1}, {1, 2}, object(), 1j, "\ud800"]
)
def test_values_without_an_encoding(value: Any) -> None:
    with pytest.raises(EncodingError):
        encode(value, **OPEN)
    with pytest.raises(EncodingError, match=r"value\['k'\]\[1\]"):
        encode({"k": [0, value]}, **OPEN)


def test_depth_and_size() -> None:
    deep: Any = 0
    for _ in range(16):
        deep = [deep]
    assert decode(encode(deep)) == deep
    with raises_code("cbor.too-deep"):
        encode([deep])
    with raises_code("cbor.not-deterministic"):
        decode(b"\x81" * 17 + b"\x00")
    for opener in (b"\x81", b"\xd2", b"\xa1\x00"):
        with raises_code("cbor.not-deterministic"):
            decode(opener * 30_000 + b"\x00", tags=(18,))
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with raises_code("cbor.too-deep"):
        encode(cyclic)
    assert len(encode(bytes(MAX_SIZE - 3))) == MAX_SIZE
    with raises_code("cbor.too-long"):
        encode(bytes(MAX_SIZE))
    with raises_code("cbor.too-long"):
        decode(bytes(MAX_SIZE + 1))
    assert decode(encode(bytes(MAX_SIZE), max_size=2 * MAX_SIZE), max_size=2 * MAX_SIZE) == bytes(MAX_SIZE)
    with raises_code("cbor.max-depth"):
        decode(b"\x00", max_depth=10_000)
    with raises_code("cbor.not-bytes"):
        decode("00")  # type: ignore[arg-type]


def test_bytes_like_input_and_tuples() -> None:
    assert decode(memoryview(b"\x82\x01\x02")) == decode(bytearray(b"\x82\x01\x02")) == [1, 2]
    assert encode((1, (2,))) == encode([1, [2]])


def test_where_cbor2_is_too_lenient() -> None:
    """Why there is a codec of our own: the library accepts what a signature must not leave open."""
    for data in ("1817", "a202010101", "0000", "c249010000000000000000"):
        cbor2.loads(bytes.fromhex(data))
        with pytest.raises(EncodingError):
            decode(bytes.fromhex(data), **OPEN)
    # RFC 7049 order: the shorter key first, though 100 (1864) sorts after -1 (20) only bytewise before it
    assert cbor2.dumps({100: 0, -1: 0}, canonical=True) != encode({100: 0, -1: 0})
