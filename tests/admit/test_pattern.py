"""Patterns take what the general decoder takes, in the same sense, and nothing more."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from signed_descriptor import described

from lamina import cbor
from lamina.admit import attestation
from lamina.admit.attestation import LENGTH, NUMBER, Attestation, attest, compile_pattern, read_length, read_number
from lamina.errors import EncodingError
from lamina.sign.keys import PrivateKey

edges = st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1])


@given(edges | st.integers(0, 2**64 - 1))
def test_numbers(value: int) -> None:
    data = cbor.encode(value)
    found = compile_pattern(NUMBER).fullmatch(data)
    assert found is not None and read_number(found[1]) == value


@given(st.binary(min_size=1, max_size=9))
@example(b"\x18\x17")
@example(b"\x19\x00\xff")
@example(b"\x1a\x00\x00\xff\xff")
@example(b"\x1b\x00\x00\x00\x00\xff\xff\xff\xff")
def test_no_number_but_the_shortest(data: bytes) -> None:
    found = compile_pattern(NUMBER).fullmatch(data)
    try:
        value = cbor.decode(data)
    except EncodingError:
        assert found is None
    else:
        assert (found is not None) == (type(value) is int and value >= 0)


@given(st.integers(1, 300) | st.sampled_from([23, 24, 255, 256, 65535]))
def test_lengths(size: int) -> None:
    data = cbor.encode("a" * size, max_size=2**20)
    found = compile_pattern(LENGTH).match(data)
    assert found is not None and read_length(found[1]) == size == len(data) - found.end()


@pytest.mark.parametrize("data", [b"\x60", b"\x78\x17", b"\x79\x00\xff", b"\x7a\x00\x01\x00\x00", b"\x7f", b"\x41"])
def test_no_length_but_the_shortest(data: bytes) -> None:
    assert compile_pattern(LENGTH).match(data + bytes(100)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xad\x01\x01\x02\x58\x20" + bytes(32) + b"\x03\x78\x40" + b"a" * 1900,
        b"\xad\x01\x01\x02\x58\x20" + bytes(32) + b"\x03\x61a\x04\x78\x40" + b"a" * 1900,
        b"\xa6\x01\x27\x04\x58\x20" + bytes(32) + b"\x0f\xac\x01\x78\x40" + b"0" * 64 + b"\x02\x78\x44tag:" * 90,
        b"\x19\x01" * 900,
        b"a" * 2000,
    ],
)  # fmt: skip
def test_the_time_is_that_of_one_pass(data: bytes) -> None:
    """What only just does not match costs microseconds, not the square of its length."""
    begin = time.process_time()
    for _ in range(100):
        assert attestation.match_header(data) is None
    assert time.process_time() - begin < 1.0


def test_no_pattern_looks_further_than_it_is_told() -> None:
    """A text that holds what follows a text ends where its length says."""
    key = PrivateKey.generate()
    signed = attest(described(contributor=key.public.id, audience="o"), key, issued_at=1_800_000_000)
    header = cbor.decode(Attestation.decode(signed).protected)
    data = cbor.encode(header[15])
    header[15][3] = longer = "o" + data[data.index(b"\x03\x61o") + 3 :].decode("latin1")
    found = attestation.match_header(cbor.encode(header))
    assert found is not None and found[4] == longer
