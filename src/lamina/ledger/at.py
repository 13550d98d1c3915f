"""`append_at`: append what was decided by the first `size` leaves, if there are no more by now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lamina.ledger.errors import LedgerError
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import Record
from lamina.ledger.store.base import Writer
from lamina.ledger.view import head_of


class Moved(Exception):
    """Somebody else appended something meanwhile. Nothing was written: decide again."""


def append_at(
    ledger: Ledger,
    size: int,
    records: Sequence[Record],
    blobs: Iterable[bytes] = (),
    more: Callable[[Writer], None] = lambda rows: None,
) -> list[int]:
    """Make the records the leaves from `size` on, and write `more` with them; Moved if others stand there.

    Records that others appended meanwhile with the same content count as ours: what holds of the ledger is the same.
    """

    def beside(rows: Writer, seqs: list[int]) -> None:
        if head_of(rows).size != size + len(records):
            raise Moved
        more(rows)

    try:
        return ledger.append_with(records, blobs, beside)
    except LedgerError as error:
        if (
            type(error) is LedgerError and ledger.size != size
        ):  # refused for what others said meanwhile, perhaps
            raise Moved from error
        raise
