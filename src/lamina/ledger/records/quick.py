"""A writer and a reader of their own for contributions: there are many of them, and few of everything else.

They write and read the same bytes as the general ones, several times faster, and are tested against them. The reader
knows one layout, the usual one, with every constant byte of it; whatever is not exactly that it leaves to the strict
reader, which decides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError
from lamina.ledger.records.admitted import Admitted, Terms
from lamina.ledger.records.fields import schema

# What stands before the fields of a body: a map of 6 to 8, and 32 bytes under the keys 1, 2, 3, 7, 8.
_START = {count: bytes((0xA0 | count, 1, 0x58, 32)) for count in (6, 7, 8)}
_HEAD = _START[6][1:]
_SECOND, _THIRD, _ANCHOR, _SUBJECT = (bytes((key, 0x58, 32)) for key in (2, 3, 7, 8))
_WINDOW = struct.Struct(">BBIBBIB").pack  # 4: not_before, 5: expires, both of 32 bits, and the key 6
_LEAF = b"\xa5\x01\x02\x02"  # a map of 5; kind: 2, and the key of seq
_CONSTANT = (_LEAF, b"\x03\x1a", b"\x04", b"\x05", _SECOND, _THIRD, b"\x04\x1a", b"\x05\x1a", b"\x06")
_WIDTHS = {24: 1, 25: 2, 26: 4}  # by the first byte of a number of more than one: how many follow
_LEAST = {24: 24, 25: 1 << 8, 26: 1 << 16}  # a smaller number has a shorter form
_FORMS = {0: "B", 24: "xB", 25: "xH", 26: "xI"}
_LAYOUTS: dict[
    tuple[int, int], tuple[Callable[[bytes], tuple[Any, ...]], int]
] = {}  # by the forms of seq and epoch
for _seq, _epoch in product(_FORMS, _FORMS):
    _form = struct.Struct(f">4s{_FORMS[_seq]}2sIs{_FORMS[_epoch]}s4s32s3s32s3s32s2sI2sIs")
    _LAYOUTS[_seq, _epoch] = (_form.unpack_from, _form.size)
_set, _new = object.__setattr__, object.__new__


def uint(value: int) -> bytes:
    """A number >= 0 as CBOR writes it."""
    if value < 24:
        return bytes((value,))
    if value < 0x100:
        return bytes((24, value))
    if value < 0x10000:
        return b"\x19" + value.to_bytes(2, "big")
    if value < 0x100000000:
        return b"\x1a" + value.to_bytes(4, "big")
    return b"\x1b" + value.to_bytes(8, "big")


def write(record: Admitted) -> bytes:
    """The body of a contribution."""
    start, end, terms = record.not_before, record.expires, record.terms.encoded
    if start > 0xFFFF and end <= 0xFFFFFFFF:
        window = _WINDOW(4, 0x1A, start, 5, 0x1A, end, 6)
    else:
        window = b"".join((b"\x04", uint(start), b"\x05", uint(end), b"\x06"))
    count = 6
    if record.anchor is not None:
        terms, count = terms + _ANCHOR + record.anchor, 7
    if record.subject is not None:
        terms, count = terms + _SUBJECT + record.subject, count + 1
    return b"".join(
        (_START[count], record.descriptor, _SECOND, record.attestation, _THIRD, record.key, window, terms)
    )


def read(data: bytes) -> tuple[int, int, int, Admitted] | None:
    """seq, time, epoch and record of a leaf in the usual layout; None: let the strict reader decide."""
    try:
        one = data[4] if data[4] > 23 else 0
        two = data[12 + _WIDTHS.get(one, 0)]
        two = two if two > 23 else 0
        unpack, begin = _LAYOUTS[one, two]
        c0, seq, c1, time, c2, epoch, c3, head, d, c4, a, c5, k, c6, start, c7, stop, c8 = unpack(data)
    except (IndexError, KeyError, struct.error):
        return None
    if (
        (c0, c1, c2, c3, c4, c5, c6, c7, c8) != _CONSTANT
        or seq < _LEAST.get(one, 0)
        or epoch < _LEAST.get(two, 0)
    ):
        return None
    more, end = head[0] - 0xA6, len(data)
    if not 0 <= more <= 2 or head[1:] != _HEAD or time < 0x10000 or not 0x10000 <= start < stop:
        return None
    anchor = subject = None
    if more and data[end - 35 : end - 32] == _SUBJECT:
        subject, end, more = data[end - 32 :], end - 35, more - 1
    if more and data[end - 35 : end - 32] == _ANCHOR:
        anchor, end, more = data[end - 32 : end], end - 35, more - 1
    terms = _terms(data[begin:end])
    if more or terms is None:
        return None
    record = _new(Admitted)  # what __post_init__ checks was checked here
    _set(record, "descriptor", d)
    _set(record, "attestation", a)
    _set(record, "key", k)
    _set(record, "not_before", start)
    _set(record, "expires", stop)
    _set(record, "terms", terms)
    _set(record, "anchor", anchor)
    _set(record, "subject", subject)
    return seq, time, epoch, record


@lru_cache(maxsize=4096)
def _terms(data: bytes) -> Terms | None:
    try:
        found = schema(Terms).value(cbor.decode(data))
    except EncodingError:
        return None
    assert type(found) is Terms
    return found
