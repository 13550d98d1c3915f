"""A leaf: a record at its place in the ledger.

    {1: kind, 2: seq, 3: time, 4: epoch, 5: body}         deterministic CBOR; hash = SHA-256(0x00 ‖ leaf)

seq is the index in the tree, time is in seconds and never falls, epoch counts the epochs that were closed before.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lamina import cbor
from lamina.admit.times import LAST
from lamina.errors import EncodingError
from lamina.ledger.errors import LedgerError
from lamina.ledger.records import KINDS, NUMBERS, Admitted, Record, quick
from lamina.ledger.records.admitted import UINT
from lamina.ledger.records.fields import schema

LEAF_LIMIT = 1 << 20  # bytes; an epoch of a thousand layers and a hundred bounds takes some 40 kB
_MOST_SEQ = 2**63 - 1
_HEAD = re.compile(rb"\xa5\x01%b\x02%b\x03%b\x04%b\x05" % (UINT, UINT, UINT, UINT), re.DOTALL).match


class Leaf(NamedTuple):
    """A record, where it stands, and since when."""

    kind: type[Record]
    seq: int
    time: int
    epoch: int
    record: Record


def body(record: Record) -> bytes:
    """The CBOR of a record by itself: the same wherever it will stand."""
    if type(record) is Admitted:
        return quick.write(record)
    if type(record) not in NUMBERS:
        raise LedgerError(
            "ledger.no-record-ledger",
            f"{type(record).__name__} is no record of a ledger",
            "append one of lamina.ledger.records",
        )
    try:
        return cbor.encode(schema(type(record)).plain(record), max_size=LEAF_LIMIT - 64)
    except EncodingError as error:
        raise LedgerError(
            "ledger.record-not-written",
            f"a {type(record).__name__} record cannot be written: {error.problem}",
            "split it",
        ) from error


def encode(record: Record, seq: int, time: int, epoch: int) -> bytes:
    """The leaf of a record."""
    for name, value, most in (("seq", seq, _MOST_SEQ), ("time", time, LAST), ("epoch", epoch, _MOST_SEQ)):
        if type(value) is not int or not 0 <= value <= most:
            raise LedgerError(
                "ledger.leaf-integer",
                f"{name} of a leaf is {value!r}, must be an integer in [0, {most}]",
                "correct it",
            )
    written = body(record)
    place = (quick.uint(NUMBERS[type(record)]), quick.uint(seq), quick.uint(time), quick.uint(epoch), written)
    return b"\xa5" + b"".join(bytes((key,)) + part for key, part in enumerate(place, start=1))


def decode(data: bytes) -> Leaf:
    """The leaf that these bytes are; EncodingError for anything that `encode` would not have written."""
    if (found := quick.read(data)) is not None:
        return Leaf(Admitted, *found)
    plain = cbor.decode(data, max_size=LEAF_LIMIT)
    if type(plain) is not dict or plain.keys() != {1, 2, 3, 4, 5}:
        raise EncodingError(
            "ledger.leaf-map-keys",
            "a leaf must be a map of the keys 1 to 5",
            "read it with the version that wrote it",
        )
    which, seq, time, epoch = (plain[key] for key in (1, 2, 3, 4))
    if type(which) is not int or which not in KINDS:
        raise EncodingError(
            "ledger.leaf-kind-not",
            f"a leaf is of kind {which!r}, which is not known",
            "read it with a newer version",
        )
    for name, value, most in (("seq", seq, _MOST_SEQ), ("time", time, LAST), ("epoch", epoch, _MOST_SEQ)):
        if type(value) is not int or not 0 <= value <= most:
            raise EncodingError(
                "ledger.leaf", f"{name} of a leaf is {value!r}, must be in [0, {most}]", "it is damaged"
            )
    kind = KINDS[which]
    return Leaf(kind, seq, time, epoch, schema(kind).value(plain[5]))


def split(data: bytes) -> tuple[int, int, int, int, int] | None:
    """Kind, seq, time and epoch of a leaf and where its body begins; None if it does not begin like one."""
    found = _HEAD(data)
    if found is None:
        return None
    kind, seq, time, epoch = found.groups()
    return _number(kind), _number(seq), _number(time), _number(epoch), found.end()


def _number(text: bytes) -> int:
    return text[0] if len(text) == 1 else int.from_bytes(text[1:], "big")
