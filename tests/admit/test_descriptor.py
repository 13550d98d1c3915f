"""The descriptor: one encoding, every field in its range, nothing unknown."""

from __future__ import annotations

import hashlib

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code
from signed_descriptor import FULL_VALUES, encoded

from lamina.admit.attestation import MAX_DESCRIPTOR, MAX_ITEMS, MAX_MICRO, Descriptor
from lamina.errors import AdmissionError, EncodingError, UnknownSchema
from lamina.sign.keys import LAST_SECOND

KEYS = {
    1: "schema", 2: "contributor", 3: "data_class", 4: "admissibility", 5: "clip_norm", 6: "noise_multiplier",
    7: "not_before", 8: "expires", 9: "profile", 10: "commitment", 11: "items", 12: "nonce", 13: "policy",
    14: "audience", 15: "anchor",
}  # fmt: skip
FULL = {key: FULL_VALUES.get(name, 1) for key, name in KEYS.items()}


@pytest.mark.parametrize("left_out", [(), ("profile",), ("anchor",), ("profile", "anchor")])
def test_the_encoding_is_what_another_codec_writes(left_out: tuple[str, ...]) -> None:
    made = Descriptor(**{name: value for name, value in FULL_VALUES.items() if name not in left_out})
    data = made.encode()
    assert data == cbor2.dumps({key: value for key, value in FULL.items() if KEYS[key] not in left_out}, canonical=True)
    assert Descriptor.decode(data) == made
    assert made.digest() == Descriptor.decode(data).digest() == hashlib.sha256(data).digest()


texts = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=60)
micros = st.integers(1, MAX_MICRO)
descriptors = st.builds(
    Descriptor,
    contributor=st.binary(min_size=32, max_size=32),
    data_class=st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True),
    admissibility=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True),
    clip_norm=micros,
    noise_multiplier=micros,
    not_before=st.integers(0, LAST_SECOND // 2),
    expires=st.integers(LAST_SECOND // 2 + 1, LAST_SECOND),
    profile=st.none() | texts,
    commitment=st.binary(min_size=32, max_size=32),
    items=st.integers(1, MAX_ITEMS),
    nonce=st.binary(min_size=16, max_size=16),
    policy=st.binary(min_size=32, max_size=32),
    audience=texts,
    anchor=st.none() | st.binary(min_size=32, max_size=32),
)


@given(descriptors)
def test_round_trip(made: Descriptor) -> None:
    data = made.encode()
    assert len(data) <= MAX_DESCRIPTOR
    assert Descriptor.decode(data) == made
    assert Descriptor.decode(data).encode() == data


def test_the_largest_descriptor_fits() -> None:
    made = Descriptor(
        **FULL_VALUES
        | {"data_class": "a" * 64, "admissibility": "b" * 64, "clip_norm": MAX_MICRO, "noise_multiplier": MAX_MICRO}
        | {
            "expires": LAST_SECOND,
            "not_before": LAST_SECOND - 1,
            "profile": "c" * 1024,
            "items": MAX_ITEMS,
            "audience": "d" * 255,
        }
    )
    assert len(made.encode()) <= MAX_DESCRIPTOR
    assert Descriptor.decode(made.encode()) == made


def test_a_public_bound_is_zero_twice() -> None:
    made = Descriptor(**FULL_VALUES | {"clip_norm": 0, "noise_multiplier": 0})
    assert Descriptor.decode(made.encode()) == made
    for one in ("clip_norm", "noise_multiplier"):
        with raises_code("admit.descriptor-field-invalid"):
            Descriptor.decode(encoded(FULL | {5 if one == "clip_norm" else 6: 0}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (2, bytes(31)), (2, bytes(33)), (2, "00" * 32), (2, 5),
        (3, ""), (3, "a" * 65), (3, "ECG"), (3, "e c"), (3, "ecg\n"), (3, "é"), (3, b"ecg"), (3, 7),
        (4, ""), (4, "-a"), (4, "a" * 65), (4, "a b"), (4, "a\n"), (4, b"a"),
        (5, -1), (5, MAX_MICRO + 1), (5, "1"), (5, True), (5, 2**64 - 1),
        (6, -1), (6, MAX_MICRO + 1), (6, b"1"), (6, False),
        (7, -1), (7, LAST_SECOND + 1), (7, 1_798_761_600), (7, 1_798_761_601), (7, True),
        (8, -1), (8, LAST_SECOND + 1), (8, 1_767_225_600), (8, 0), (8, "2027-01-01"),
        (9, ""), (9, "a" * 1025), (9, "a\nb"), (9, "\u202e"), (9, 0), (9, b"top"), (9, False),
        (10, bytes(31)), (10, bytes(64)), (10, 1),
        (11, 0), (11, -5), (11, MAX_ITEMS + 1), (11, True), (11, "12"),
        (12, bytes(15)), (12, bytes(17)), (12, b""), (12, 16),
        (13, bytes(31)), (13, ""),
        (14, ""), (14, "a" * 256), (14, "é" * 128), (14, "a\x00"), (14, b"origin"),
        (15, bytes(31)), (15, b""), (15, ""), (15, 0),
    ],
)  # fmt: skip
def test_each_field_has_its_range(key: int, value: object) -> None:
    with raises_code("admit.descriptor-field-invalid"):
        Descriptor.decode(encoded(FULL | {key: value}))


@pytest.mark.parametrize("key", sorted(set(KEYS) - {9, 15}))
def test_each_field_is_needed(key: int) -> None:
    with pytest.raises(AdmissionError, match=KEYS[key]):
        Descriptor.decode(encoded({k: v for k, v in FULL.items() if k != key}))


@pytest.mark.parametrize("key", [0, 16, 23, 24, 99, -1, "schema", "note", ""])
def test_unknown_keys_are_refused(key: int | str) -> None:
    with raises_code("admit.descriptor-fields"):
        Descriptor.decode(encoded(FULL | {key: 1}))


@pytest.mark.parametrize("version", [0, 2, 3, 2**40])
def test_other_schemas_have_a_refusal_of_their_own(version: int) -> None:
    """Also where their fields are not ours: what a later program wrote is not called damaged."""
    for content in (FULL | {1: version}, {1: version}, FULL | {1: version, 16: "new"}):
        with raises_code("admit.schema-unknown"):
            Descriptor.decode(encoded(content))


@pytest.mark.parametrize("version", [True, "1", b"1"])
def test_a_schema_that_is_no_number(version: object) -> None:
    with raises_code("admit.schema-not-number") as caught:
        Descriptor.decode(encoded(FULL | {1: version}))
    assert not isinstance(caught.value, UnknownSchema)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x01",
        b"\x60",
        encoded(FULL) + b"\x00",
        encoded(FULL)[:-1],
        b"\xbf" + encoded(FULL)[1:] + b"\xff",
        b"\xb8\x0f" + encoded(FULL)[1:],
        encoded(FULL).replace(b"\x0b\x0c", b"\x0b\x18\x0c"),
        encoded(FULL | {5: 1.0}),
        encoded(FULL | {9: None}),
        encoded(FULL | {8: cbor2.CBORTag(1, 1_798_761_600)}),
        encoded(FULL | {6: [1]}),
        encoded(FULL | {14: []}),
        encoded(FULL | {14: {}}),
        bytes(MAX_DESCRIPTOR + 1),
    ],
    ids=lambda data: data[:8].hex(),
)
def test_anything_but_the_one_encoding_is_refused(data: bytes) -> None:
    with pytest.raises((EncodingError, AdmissionError)):
        Descriptor.decode(data)


def test_keys_out_of_order_or_twice() -> None:
    pairs = [cbor2.dumps(key) + cbor2.dumps(value) for key, value in FULL.items()]
    swapped = b"\xaf" + b"".join([pairs[1], pairs[0], *pairs[2:]])
    with raises_code("cbor.not-deterministic"):
        Descriptor.decode(swapped)
    with raises_code("cbor.not-deterministic"):
        Descriptor.decode(b"\xb0" + b"".join([pairs[0], *pairs]))


def test_the_nonce_is_not_shown() -> None:
    made = Descriptor(**FULL_VALUES)
    assert repr(made.nonce) not in repr(made)


def test_it_is_checked_where_it_is_made() -> None:
    with raises_code("admit.descriptor-field-invalid"):
        Descriptor(**FULL_VALUES | {"schema": 2})
    with raises_code("admit.descriptor-field-invalid"):
        Descriptor(**FULL_VALUES | {"items": 1.0})
