"""`lamina ledger show`: what a ledger says."""

from __future__ import annotations

import re
import textwrap
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import typer

from lamina.admit.times import shown, when
from lamina.cli.ledger.common import Json, Where, looked_at, printed, say
from lamina.cli.output import columns, out, print_json
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import WORDS
from lamina.ledger.show import KINDS, Filter, as_object, counted, in_words

_SHOWN = 50
_LEAST = 24  # columns for what a record says, however narrow the screen

Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="from then on: 2026-03-01, or 2026-03-01T12:00Z")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="before then; written like --since")]


def show(
    ledger: Where,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"only these: {', '.join(KINDS)}", autocompletion=lambda: list(KINDS)),
    ] = None,
    cls: Annotated[str | None, typer.Option("--class", help="only what is about this class")] = None,
    run: Annotated[str | None, typer.Option(help="only what is about this run: its first hex digits")] = None,
    since: Since = None,
    until: Until = None,
    first: Annotated[int, typer.Option(min=0, help="from this leaf on")] = 0,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"so many records, the last ones; 0: all. Default: {_SHOWN} on the screen"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the records of a ledger, one line each, with filters.

    The last records are shown. c is a clip norm, z a noise multiplier; segment 2.1 [20, 30) is the second attempt at
    segment 2, steps 20 to 29; ε is what a bound has lost by then over all runs, rounded up. Times are UTC; that of an
    epoch is rounded down to the hour, if the header says nothing else. Nothing here is verified: lamina ledger verify
    does that.

    With --json: plain numbers, times as 2026-03-01T12:00:00Z, digests in hexadecimal, and every field of the record.

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
    with looked_at(ledger) as book:
        found, left_out = _last(wanted.leaves(book), most)
        if as_json:
            records = [as_object(leaf) for leaf in found]
            print_json(
                {"ledger": printed(ledger), "origin": book.origin, "size": book.size, "records": records}
            )
            return
        say(f"{book.origin}, {counted(book.size, 'leaf', 'leaves')}")
    if left_out:
        say(f"({counted(left_out, 'earlier one is', 'earlier ones are')} not shown: --limit 0 shows all)")
    say(table(found, out.width if out.is_terminal else None))


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


def table(leaves: Iterable[Leaf], width: int | None = None) -> str:
    """One line each; on a screen so wide, what a record says goes on below itself."""
    rows = [["leaf", "time", "kind", "what it says"]]
    rows += [[str(leaf.seq), shown(leaf.time), WORDS[leaf.kind], in_words(leaf)] for leaf in leaves]
    if len(rows) == 1:
        return "no record fits"
    if width is not None:
        room = max(
            _LEAST, width - sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:3])
        )
        rows = [line for row in rows for line in _folded(row, room)]
    return columns(rows, left=4)


def _folded(row: list[str], room: int) -> list[list[str]]:
    whole = re.sub(r"\b([εcz]) (?=[0-9∞])", "\\1\u00a0", row[3])  # a figure stays with its name
    lines = textwrap.wrap(whole, room, subsequent_indent="  ", break_on_hyphens=False)
    first, *more = (line.replace("\u00a0", " ") for line in lines)
    return [[*row[:3], first], *(["", "", "", line] for line in more)]
