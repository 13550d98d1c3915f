"""`lamina spend`: what the classes of a corpus have lost over all runs, and who holds the rest."""

from __future__ import annotations

import math
from itertools import groupby
from shlex import quote
from typing import Annotated, Any

import typer

from lamina.cli.ledgers import ledgers_in, reading, shown, writing
from lamina.cli.output import columns, out, print_json, round_up
from lamina.errors import RunError
from lamina.train.book import Booked
from lamina.train.book.account import MARK, is_bound
from lamina.train.book.total import Total, called

_Priced = list[tuple[Booked, Total]]


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
    origin: Annotated[str | None, typer.Option(help="only this corpus")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show ε spent by every class of every corpus, over all runs, retrainings and abandoned attempts.

    A run reserves its whole plan before its first step and is charged segment by segment, before each is
    trained. What is charged is spent for good: nothing gives it back, neither deleting a run nor --release. What
    is reserved counts against the bound of the class too, until the run ends or is released.

    ε of several runs is priced jointly, at the δ and by the accountant that the runs were planned with: as a rule
    less than the sum of their ε. Printed figures are rounded up. The bounds are in the policy. Nothing is verified
    here: lamina ledger verify recomputes every figure of what has ended.

    Examples:

      lamina spend
      lamina spend runs/cardiology.ledger.db
      lamina spend --release 3f9c21aa
    """
    places = _by_origin(ledgers_in(where), where, origin)
    released = None if release is None else _release(list(places.values()), where, release)
    priced = {name: _priced(place) for name, place in places.items()}
    if as_json:
        print_json(
            {
                "ledger": shown(where),
                **({"released": released} if released else {}),
                "origins": {name: _tree(each) for name, each in priced.items()},
            }
        )
        return
    if released:
        out.print(
            f"Run {released[:8]} holds no reservation any more. What it was charged stays charged; if it still "
            "trains, each further segment must find room under the bound.",
            markup=False,
        )
    for name, each in priced.items():
        out.print(_page(name, each), markup=False, soft_wrap=True)


def _by_origin(ledgers: list[str], where: str, wanted: str | None) -> dict[str, str]:
    """The ledger of each corpus."""
    found: dict[str, str] = {}
    for ledger in ledgers:
        with reading(ledger) as book:
            name = book.origin
        if name in found and wanted in (None, name):
            raise RunError(
                f"'{shown(found[name])}' and '{shown(ledger)}' are both of corpus {name!r}: neither knows all of its ε",
                "give one of them; a corpus has one ledger",
            )
        found[name] = ledger
    if wanted is not None and wanted not in found:
        known = ", ".join(map(repr, sorted(found)))
        raise RunError(f"'{shown(where)}' knows no corpus {wanted!r}", f"it has {known}")
    return {name: place for name, place in sorted(found.items()) if wanted in (None, name)}


def _priced(ledger: str) -> _Priced:
    with reading(ledger) as book:
        return [
            (each, book.total(each.cls, delta=each.delta, accountant=each.accountant))
            for each in book.accounts()
        ]


def _release(ledgers: list[str], where: str, name: str) -> str:
    """The run of this id, beginning of an id, or label gives its reservation back; returns its id."""
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
            f"no run {name!r} is known in '{shown(where)}'", f"lamina spend {quote(shown(where))} lists them"
        )
    if len(found) > 1:
        listed = ", ".join(called(run, labels[run]) for run in found[:5])
        raise RunError(f"{name!r} could be any of {len(found)} runs: {listed}", "give more digits of its id")
    with writing(home[found[0]]) as book:
        book.finish(found[0])
    return found[0]


def _tree(priced: _Priced) -> dict[str, Any]:
    """By class. The terms of the last booking come first, others are in `also`.

    Signed bounds that are stricter than their class are in its `bounds`.
    """
    tree: dict[str, Any] = {}
    for account, total in priced:
        figures = {
            "epsilon": _finite(total.spent),
            "committed": _finite(total.committed),
            "delta": account.delta,
            "accountant": account.accountant,
        }
        classes = tree
        if is_bound(account.cls):
            owner = tree.setdefault(account.cls.partition(MARK)[0], {"also": [], "bounds": {}})
            classes = owner.setdefault("bounds", {})
        if account.cls in classes:
            classes[account.cls]["also"].append(figures)
            continue
        runs = [
            {
                "run": each.run,
                "label": each.label,
                "since": each.day,
                "steps": each.steps,
                "redone": each.redone,
                "reserved": each.reserved,
                "finished": each.finished,
            }
            for each in total.runs
        ]
        classes[account.cls] = {**figures, "runs": runs, "also": []}
    return tree


def _page(origin: str, priced: _Priced) -> str:
    """One corpus: each class with its ε, a line per δ, and its runs below."""
    lines = [f"corpus {_printable(origin)}", *(() if priced else ("  nothing is spent or reserved",))]
    for cls, group in groupby(priced, key=lambda pair: pair[0].cls):
        name, mark, label = cls.partition(MARK)
        lines.append(f"  class {_printable(name)}" + (f", signed bound {_printable(label)}" if mark else ""))
        for account, total in (found := list(group)):
            lines.append(
                f"    ε {_epsilon(total.spent)} spent, {_epsilon(total.committed)} with what is reserved "
                f"(δ = {account.delta:g}, {account.accountant})"
            )
        lines.extend(f"      {row}" for row in _runs(found[0][1]))
    return "\n".join(lines)


def _runs(total: Total) -> list[str]:
    rows = [["run", "label", "state", "steps", "redone", "reserved"]]
    for each in total.runs:
        counts = [f"{count:,}" for count in (each.steps, each.redone, each.reserved)]
        state = "finished" if each.finished else "open"
        rows.append([_printable(each.run[:8]), _printable(each.label), state, *counts])
    return columns(rows, left=3).split("\n") if total.runs else []


def _epsilon(value: float) -> str:
    return round_up(value) if math.isfinite(value) else "∞"


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _printable(text: str) -> str:
    """Names are the user's: control characters in them do not reach the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
