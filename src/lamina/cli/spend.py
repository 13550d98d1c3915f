"""`lamina spend`: what the classes of a corpus have lost over all runs, and who holds the rest."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from lamina.cli.ledgers import ledgers_in, reading, shown, writing
from lamina.cli.output import out, print_json
from lamina.cli.spend_page import lines_of, page, tree
from lamina.errors import RunError
from lamina.ledger.show import counted
from lamina.train.book.total import called


def spend(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE",
            help="a ledger (NAME.ledger.db, postgresql://…/database#schema), or a folder with ledgers in it",
        ),
    ] = "runs",
    release: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="give back what a run has reserved and will not use; its id, the first digits of it, or its label",
        ),
    ] = None,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost", help="with --release: the run will never go on; record what it had begun, as given up"
        ),
    ] = False,
    origin: Annotated[str | None, typer.Option(help="only this corpus")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show ε spent by every class of every corpus, over all runs, retrainings and abandoned attempts.

    A run reserves its whole plan before its first step and is charged segment by segment, before each is
    trained. What is charged is spent for good: nothing gives it back, neither deleting a run nor --release. What
    is reserved counts against the bound of the class too, until the run ends or is released.

    ε of several runs is priced jointly, at the δ and by the accountant that the runs were planned with: as a rule
    less than the sum of their ε. Committed is what is spent and reserved. The bound is what the ledger promises
    for the class, what its contributions signed, or what the last run was held to: the strictest. What remains is the
    bound less what is committed.

    What remains is rounded down, the other figures up. Nothing is verified here: lamina ledger verify recomputes every
    figure of what has ended.

    Examples:

      lamina spend
      lamina spend runs/cardiology.ledger.db
      lamina spend --release 3f9c21aa
      lamina spend --release 3f9c21aa --lost    if its folder is gone
    """
    if lost and release is None:
        raise typer.BadParameter(
            "--lost says of a run that is released that it is gone: give --release RUN too"
        )
    places = _by_origin(ledgers_in(where), where, origin)
    released, recorded = ("", 0) if release is None else _release(list(places.values()), where, release, lost)
    found = {}
    for name, place in places.items():
        with reading(place) as book:
            found[name] = lines_of(book)
    if as_json:
        print_json(
            {
                "ledger": shown(where),
                **({"released": released} if released else {}),
                **({"recorded": recorded} if lost else {}),
                "origins": {name: tree(each) for name, each in found.items()},
            }
        )
        return
    if released:
        attempts = counted(recorded, "attempt")
        begun = f" What it had begun ({attempts}) is recorded as given up." if recorded else ""
        goes_on = "" if lost else "; if it still trains, each further segment must find room under the bound"
        out.print(
            f"Run {released[:8]} holds no reservation any more.{begun} What it was charged stays charged{goes_on}.",
            markup=False,
            soft_wrap=True,
        )
    out.print("\n\n".join(page(name, each) for name, each in found.items()), markup=False, soft_wrap=True)


def _by_origin(ledgers: list[str], where: str, wanted: str | None) -> dict[str, str]:
    """The ledger of each corpus."""
    found: dict[str, str] = {}
    for ledger in ledgers:
        with reading(ledger) as book:
            name = book.origin
        if name in found and wanted in (None, name):
            raise RunError(
                "cli.both-corpus-neither",
                f"'{shown(found[name])}' and '{shown(ledger)}' are both of corpus {name!r}: neither knows all of its ε",
                "give one of them; a corpus has one ledger",
            )
        found[name] = ledger
    if wanted is not None and wanted not in found:
        known = ", ".join(map(repr, sorted(found)))
        raise RunError(
            "cli.knows-no-corpus", f"'{shown(where)}' knows no corpus {wanted!r}", f"it has {known}"
        )
    return {name: place for name, place in sorted(found.items()) if wanted in (None, name)}


def _release(ledgers: list[str], where: str, name: str, lost: bool) -> tuple[str, int]:
    """The run of this id, beginning of an id, or label gives its reservation back; its id, and attempts recorded."""
    labels: dict[str, str] = {}
    home: dict[str, str] = {}
    for ledger in ledgers:
        with reading(ledger) as book:
            labels |= (mine := book.labels())
            home |= dict.fromkeys(mine, ledger)
    found = [name] if name in labels else [run for run, label in labels.items() if name and name == label]
    found = found or [run for run in labels if name and run.startswith(name)]
    if not found:
        raise RunError(
            "cli.no-run-known",
            f"no run {name!r} is known in '{shown(where)}'",
            f"lamina spend {quote(shown(where))} lists them",
        )
    if len(found) > 1:
        listed = ", ".join(called(run, labels[run]) for run in found[:5])
        raise RunError(
            "cli.could-runs",
            f"{name!r} could be any of {len(found)} runs: {listed}",
            "give more digits of its id",
        )
    with writing(home[found[0]]) as book:
        if lost:
            return found[0], book.lose(found[0])
        book.finish(found[0])
    return found[0], 0
