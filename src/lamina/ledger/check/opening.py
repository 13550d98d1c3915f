"""What is read before the first leaf: where the ledger claims to stand, under which contract, and what it summed up."""

from __future__ import annotations

from lamina.errors import EncodingError
from lamina.ledger import leaf as leaves
from lamina.ledger.check.problem import LEAF, STORE, bad
from lamina.ledger.records import NUMBERS, Aggregate, Header
from lamina.ledger.store.base import Head, Reader


def head(rows: Reader) -> Head:
    found = rows.head()
    if found is None or found.size < 1:
        bad(
            None,
            STORE,
            "verify.ledger-no-head",
            "the ledger has no head: it was never begun, or its head was deleted",
        )
    return found


def header(rows: Reader) -> Header:
    data = rows.leaf(0)
    if data is None:
        bad(
            0,
            LEAF,
            "verify.not-every-ledger",
            "it is not there, and every ledger has a header: it was deleted",
        )
    try:
        record = leaves.decode(data).record
    except EncodingError as error:
        bad(0, LEAF, "verify.not-encoding-record", f"it is not the one encoding of a record: {error.problem}")
    if not isinstance(record, Header):
        bad(0, type(record), "verify.ledger-begins-header-2", "a ledger begins with its header")
    return record


def aggregates(rows: Reader, head: Head) -> dict[int, Aggregate]:
    """What the store lists; whether it lists the right ones is seen when they are reached."""
    found: dict[int, Aggregate] = {}
    for seq, data in rows.of_kind(NUMBERS[Aggregate], 0, head.size):
        try:
            record = leaves.decode(data).record
        except EncodingError:
            continue  # named when it is reached
        if isinstance(record, Aggregate):
            found[seq] = record
    return found
