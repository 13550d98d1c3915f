"""What of a batch is in the ledger already: the same again is found again, anything else under its name is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lamina.ledger import leaf
from lamina.ledger.errors import LedgerError
from lamina.ledger.lookup import lasting
from lamina.ledger.records import NUMBERS, Admitted, Epoch, Record, Withdrawal
from lamina.ledger.store.base import Reader

_ADMITTED = NUMBERS[Admitted]
Find = Callable[[Sequence[bytes]], Sequence[tuple[bytes, int]]]


def contributions(
    rows: Reader, find: Find, once: Mapping[bytes, int], bodies: Sequence[bytes]
) -> dict[int, int]:
    """Position in the batch → leaf, of the contributions that are there. `once` are unique keys → position."""
    there = find(list(once)) if once else ()
    found = {
        once[key]: seq for key, seq in there if not lasting(key) and _same(rows.leaf(seq), bodies[once[key]])
    }
    for key, seq in there:
        if found.get(once[key]) != seq:
            what = "subject" if lasting(key) else "contribution"
            raise LedgerError(
                "ledger.record-batch-ledger",
                f"the {what} of record {once[key]} of the batch is in the ledger already, as leaf {seq}",
                "leave it out: it counts once, under the bound that was signed first",
            )
    return found


def epoch(rows: Reader, record: Epoch) -> int | None:
    """The leaf in which the same segments were closed in the same way."""
    seqs = {rows.attempt(*attempt) for attempt in record.attempts}
    if seqs == {None}:
        return None
    seq = next(iter(seqs)) if len(seqs) == 1 else None
    if seq is not None:
        there = _read(rows, seq)
        if isinstance(there, Epoch) and replace(record, previous=there.previous) == there:
            return seq
    first = min(one for one in seqs if one is not None)
    raise LedgerError(
        "ledger.segment-run-ledger",
        f"a segment of run {record.run.hex()[:8]} is in the ledger already, as leaf {first}, with another content",
        "give the next attempt a generation of its own: what was charged stays charged",
    )


def withdrawal(rows: Reader, record: Withdrawal, body: bytes, size: int) -> int | None:
    """The leaf in which the same contribution was withdrawn for the same reason."""
    data = rows.leaf(record.target) if record.target < size else None
    parts = leaf.split(data) if data is not None else None
    if parts is None or parts[0] != _ADMITTED:
        state = "is pruned or no contribution" if record.target < size else "is not there"
        raise LedgerError(
            "ledger.leaf-not-withdrawn",
            f"leaf {record.target} cannot be withdrawn: it {state}",
            "give the leaf of a contribution",
        )
    seq = rows.withdrawn(record.target)
    if seq is not None and not _same(rows.leaf(seq), body):
        raise LedgerError(
            "ledger.leaf-withdrawn-already",
            f"leaf {record.target} was withdrawn already, in leaf {seq}",
            "nothing is left to do: it is out",
        )
    return seq


def _same(there: bytes | None, body: bytes) -> bool:
    parts = leaf.split(there) if there is not None else None
    return parts is not None and there is not None and there[parts[4] :] == body


def _read(rows: Reader, seq: int) -> Record | None:
    data = rows.leaf(seq)
    return None if data is None else leaf.decode(data).record
