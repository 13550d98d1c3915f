"""What a record may say, given what was said before it. The rest of it is for `verify`, which sees everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import decode
from lamina.ledger.parties import Parties
from lamina.ledger.records import (
    NUMBERS,
    Aggregate,
    Epoch,
    Floors,
    Header,
    Outcome,
    PolicyChange,
    Preset,
    Record,
    loosened,
)
from lamina.ledger.store.base import Reader


def refuse_reserved(records: Sequence[Record]) -> None:
    """A header comes first and once; aggregates come from pruning."""
    for record in records:
        if isinstance(record, Header | Aggregate):
            raise LedgerError(
                f"{type(record).__name__} is not appended like others",
                "a header comes first and once; prune writes aggregates",
            )


def check(
    rows: Reader,
    records: Sequence[Record],
    header: Header,
    size: int,
    now: int,
    parties: Callable[[], Parties],
) -> None:
    """LedgerError if one of the records may not follow the first `size` leaves."""
    policy: tuple[Floors, tuple[Preset, ...]] | None = None
    for record in records:
        if isinstance(record, Epoch):
            _check_epoch(record, header, size)
        elif isinstance(record, PolicyChange):
            floors, presets = policy or _in_force(rows, header, size)
            looser = loosened(floors, presets, record.floors, record.presets)
            if looser and not parties().allow(record, header.origin, now):
                raise LedgerError(
                    f"the policy would protect less: {looser[0]}", "have it signed by two parties"
                )
            policy = record.floors, record.presets


def _check_epoch(record: Epoch, header: Header, size: int) -> None:
    closed = sum(each.outcome is Outcome.CLOSED for each in record.segments)
    if closed > header.granularity:
        raise LedgerError(
            f"an epoch closes {closed} segments, the header allows {header.granularity}", "split it"
        )
    for each in record.segments:
        if each.eligibility > size:
            raise LedgerError(
                f"segment {each.index} was opened after {each.eligibility} leaves, the ledger has {size}",
                "give the size of the ledger when its membership was frozen",
            )


def _in_force(rows: Reader, header: Header, size: int) -> tuple[Floors, tuple[Preset, ...]]:
    last: Header | PolicyChange = header
    for _, data in rows.of_kind(NUMBERS[PolicyChange], 0, size):
        record = decode(data).record
        assert isinstance(record, PolicyChange)
        last = record
    return last.floors, last.presets
