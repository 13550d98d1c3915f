"""`lamina ledger show`: what a ledger says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import typer

from lamina.admit.times import shown, when
from lamina.cli.ledger.common import Json, Where, opened, say
from lamina.cli.output import columns, print_json
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import WORDS
from lamina.ledger.show import KINDS, Filter, as_object, in_words

_SHOWN = 50

Moment = Annotated[str | None, typer.Option(metavar="TIME", help="2026-03-01, or 2026-03-01T12:00Z")]


def show(
    ledger: Where,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"only these: {', '.join(KINDS)}", autocompletion=lambda: list(KINDS)),
    ] = None,
    cls: Annotated[str | None, typer.Option("--class", help="only what is about this class")] = None,
    run: Annotated[str | None, typer.Option(help="only what is about this run: its first hex digits")] = None,
    since: Moment = None,
    until: Moment = None,
    first: Annotated[int, typer.Option(min=0, help="from this leaf on")] = 0,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"so many records, the last ones; 0: all. Default: {_SHOWN} on the screen"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the records of a ledger, one line each, with filters.

    The last records are shown. ε is rounded up. Nothing here is verified: lamina ledger verify does that.

    Examples:

      lamina ledger show ledger.db
      lamina ledger show ledger.db --kind epoch --run 3f9c
      lamina ledger show ledger.db --kind withdrawal --since 2026-01-01 --json
      lamina ledger show ledger.db --class clinical --limit 0
    """
    wanted = Filter(
        kinds=tuple(kind or ()),
        cls=cls,
        run=run,
        since=None if since is None else when(since),
        until=None if until is None else when(until),
        first=first,
    )
    most = limit if limit is not None else 0 if as_json else _SHOWN
    with opened(ledger) as book:
        found, left_out = _last(wanted.leaves(book), most)
        if as_json:
            records = [as_object(leaf) for leaf in found]
            print_json({"ledger": ledger, "origin": book.origin, "size": book.size, "records": records})
            return
        say(f"{book.origin}, {book.size:,} leaves")
    if left_out:
        say(f"({left_out:,} earlier ones are not shown: --limit 0 shows all)")
    say(_table(found))


def _last(leaves: Iterable[Leaf], most: int) -> tuple[list[Leaf], int]:
    """The last ones, and how many came before them."""
    if most == 0:
        return list(leaves), 0
    found = iter(leaves)
    kept, gone = deque(islice(found, most), maxlen=most), 0
    for leaf in found:
        kept.append(leaf)
        gone += 1
    return list(kept), gone


def _table(leaves: Iterable[Leaf]) -> str:
    rows = [["leaf", "time", "kind", "what it says"]]
    rows += [[str(leaf.seq), shown(leaf.time), WORDS[leaf.kind], in_words(leaf)] for leaf in leaves]
    return columns(rows, left=4) if len(rows) > 1 else "no record fits"
