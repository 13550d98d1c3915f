"""`lamina ledger copy`: a ledger in a file of its own, to hand out or to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.cli.ledger.common import Json, Where, looked_at, printed, say
from lamina.cli.output import print_json
from lamina.ledger.errors import LedgerError
from lamina.ledger.show import counted
from lamina.ledger.store.sqlite import SqliteStore


def copy(
    ledger: Where,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="the copy; must not exist yet")],
    as_json: Json = False,
) -> None:
    """Copy a ledger as it is at one moment, also while runs write it.

    A plain cp may miss the last records, which lie in a second file (-wal) until SQLite moves them over.

    Examples:

      lamina ledger copy runs/clinic.ledger.db for-the-auditor.db
    """
    with looked_at(ledger) as book:
        if not isinstance(book.store, SqliteStore):
            raise LedgerError("cli.database", f"{printed(ledger)} is a database", "copy it with pg_dump")
        book.store.copy(target)
    with looked_at(str(target)) as book:
        size = book.size
    if as_json:
        print_json({"ledger": printed(ledger), "copy": str(target), "size": size})
        return
    say(f"{target}: {counted(size, 'leaf', 'leaves')}")
