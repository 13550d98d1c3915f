"""`lamina spend`: what the classes of a corpus have lost over all runs, and which runs hold the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, localcontext
from shlex import quote
from typing import Annotated, Any

import typer

from lamina.cli.open_ledger import find_ledgers, printable_location, read_spend, write_spend
from lamina.cli.terminal import columns, out, print_json, round_up
from lamina.errors import RunError
from lamina.ledger.reader import head_of
from lamina.ledger.show import pluralize
from lamina.spend.accounts import BOUND_SEPARATOR, AccountTotal, RecordedSpend, RunSpend, is_bound, run_name
from lamina.spend.reservation import SpendLimits, SpendView
from lamina.spend.spend_ledger import SpendLedger

_MAX_ACCOUNTS_NAMED = 3  # accounts with the same runs that are told above them


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountLine:
    """An account at one δ, by one accountant.

    bound    the most that it may lose there over all runs; inf if it is held to nothing
    """

    account: str
    delta: float
    accountant: str
    bound: float
    total: AccountTotal

    @property
    def remaining(self) -> float:
        """bound - committed, never more than there is; 0 where the bound is passed."""
        if math.isinf(self.bound):
            return math.inf
        return max(0.0, math.nextafter(self.bound - self.total.committed, -math.inf))

    @property
    def passed(self) -> bool:
        return self.total.committed > self.bound


def account_lines(book: SpendLedger) -> list[AccountLine]:
    """Every account of a ledger, in one view of it."""
    header = book.ledger.header
    with book.ledger.store.read() as rows:
        head_of(rows)  # begins the view of PostgreSQL, so that what the book asks is a part of it
        held, limits = SpendView(rows, RecordedSpend(header)), SpendLimits(header)
        found = []
        for each in book.accounts():
            wanted = limits.wanted(rows, each.cls, *held.terms(each.cls))
            mine = (t.bound for t in wanted if (t.delta, t.accountant) == (each.delta, each.accountant))
            found.append(
                AccountLine(
                    account=each.cls,
                    delta=each.delta,
                    accountant=each.accountant,
                    bound=min(mine, default=math.inf),
                    total=book.total(each.cls, delta=each.delta, accountant=each.accountant),
                )
            )
    return found


# ----------------------------------------------------------------------------------- for machines


def spend_json(lines: Sequence[AccountLine]) -> dict[str, Any]:
    """By class. The terms of the last booking come first, others are in `also`.

    Signed bounds that are stricter than their class are in its `bounds`.
    """
    found: dict[str, Any] = {}
    for line in lines:
        figures = {
            "epsilon": _finite_or_none(line.total.spent),
            "committed": _finite_or_none(line.total.committed),
            "bound": _finite_or_none(line.bound),
            "remaining": _finite_or_none(line.remaining),
            "delta": line.delta,
            "accountant": line.accountant,
        }
        classes = found
        if is_bound(line.account):
            owner = found.setdefault(line.account.partition(BOUND_SEPARATOR)[0], {"also": [], "bounds": {}})
            classes = owner.setdefault("bounds", {})
        if line.account in classes:
            classes[line.account]["also"].append(figures)
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
            for each in line.total.runs
        ]
        classes[line.account] = {**figures, "runs": runs, "also": []}
    return found


# ----------------------------------------------------------------------------------- for people


def spend_page(origin: str, lines: Sequence[AccountLine]) -> str:
    """One corpus: ε of every account in a table, then the runs of each."""
    head = f"corpus {_printable(origin)}"
    if not lines:
        return f"{head}\n  nothing is spent or reserved"
    rows = [["class (signed bound)", "ε spent", "committed", "bound", "remains", "at δ", "by"], *map(_table_row, lines)]
    told = [head, *(f"  {line}" for line in columns(rows, left=1).split("\n"))]
    for line in lines:
        if line.passed:
            told.append(
                f"  note: {_account_text(line.account)} is past its bound at δ = {line.delta:g}: no run may take more of it"
            )
    alike: dict[tuple[RunSpend, ...], list[str]] = {}
    for account, runs in {line.account: line.total.runs for line in lines}.items():
        alike.setdefault(runs, []).append(_account_text(account))
    for runs, names in alike.items():
        if runs:
            more = f" and {len(names) - _MAX_ACCOUNTS_NAMED} more" if len(names) > _MAX_ACCOUNTS_NAMED else ""
            told += [
                "",
                f"  runs of {', '.join(names[:_MAX_ACCOUNTS_NAMED])}{more}",
                *(f"    {row}" for row in _run_lines(runs)),
            ]
    return "\n".join(told)


def _table_row(line: AccountLine) -> list[str]:
    bounded = math.isfinite(line.bound)
    return [
        _account_text(line.account),
        _epsilon_text(line.total.spent),
        _epsilon_text(line.total.committed),
        _bound_text(line) if bounded else "no bound",
        _round_down(line.remaining) if bounded else "-",
        f"{line.delta:g}",
        line.accountant,
    ]


def _account_text(account: str) -> str:
    """A class; with what was signed, if that is stricter than the class."""
    cls, mark, label = account.partition(BOUND_SEPARATOR)
    return _printable(f"{cls} ({label.replace(',', ', ')})" if mark else cls)


def _run_lines(runs: Sequence[RunSpend]) -> list[str]:
    rows = [["run", "label", "state", "steps", "redone", "reserved"]]
    for each in runs:
        counts = [f"{count:,}" for count in (each.steps, each.redone, each.reserved)]
        state = "ended" if each.finished else "open"
        rows.append([_printable(each.run[:8]), _printable(each.label), state, *counts])
    return columns(rows, left=3).split("\n")


def _bound_text(line: AccountLine) -> str:
    """Not more than was promised; but what just fits into it does not look like more."""
    nearest = f"{line.bound:.4f}"
    fits = line.passed or float(round_up(line.total.committed)) <= float(nearest)
    return nearest if fits else round_up(line.bound)


def _epsilon_text(value: float) -> str:
    return round_up(value) if math.isfinite(value) else "∞"


def _round_down(value: float) -> str:
    """What is left is never printed larger than it is."""
    with localcontext() as context:
        context.prec = 400  # digits: more than a float has
        return str(Decimal(value).quantize(Decimal("0.0001"), rounding=ROUND_FLOOR))


def _finite_or_none(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _printable(text: str) -> str:
    """Names are the user's: control characters in them do not reach the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


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
        typer.Option("--lost", help="with --release: the run will never go on; record what it had begun, as given up"),
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
        raise typer.BadParameter("--lost says of a run that is released that it is gone: give --release RUN too")
    places = _by_origin(find_ledgers(where), where, origin)
    released, recorded = ("", 0) if release is None else _release(list(places.values()), where, release, lost)
    found = {}
    for name, place in places.items():
        with read_spend(place) as book:
            found[name] = account_lines(book)
    if as_json:
        print_json(
            {
                "ledger": printable_location(where),
                **({"released": released} if released else {}),
                **({"recorded": recorded} if lost else {}),
                "origins": {name: spend_json(each) for name, each in found.items()},
            }
        )
        return
    if released:
        attempts = pluralize(recorded, "attempt")
        begun = f" What it had begun ({attempts}) is recorded as given up." if recorded else ""
        goes_on = "" if lost else "; if it still trains, each further segment must find room under the bound"
        out.print(
            f"Run {released[:8]} holds no reservation any more.{begun} What it was charged stays charged{goes_on}.",
            markup=False,
            soft_wrap=True,
        )
    out.print("\n\n".join(spend_page(name, each) for name, each in found.items()), markup=False, soft_wrap=True)


def _by_origin(ledgers: list[str], where: str, wanted: str | None) -> dict[str, str]:
    """The ledger of each corpus."""
    found: dict[str, str] = {}
    for ledger in ledgers:
        with read_spend(ledger) as book:
            name = book.origin
        if name in found and wanted in (None, name):
            raise RunError(
                "cli.both-corpus-neither",
                f"'{printable_location(found[name])}' and '{printable_location(ledger)}' are both of corpus "
                f"{name!r}: neither knows all of its ε",
                "give one of them; a corpus has one ledger",
            )
        found[name] = ledger
    if wanted is not None and wanted not in found:
        known = ", ".join(map(repr, sorted(found)))
        raise RunError(
            "cli.knows-no-corpus", f"'{printable_location(where)}' knows no corpus {wanted!r}", f"it has {known}"
        )
    return {name: place for name, place in sorted(found.items()) if wanted in (None, name)}


def _release(ledgers: list[str], where: str, name: str, lost: bool) -> tuple[str, int]:
    """The run of this id, beginning of an id, or label gives its reservation back; its id, and attempts recorded."""
    labels: dict[str, str] = {}
    home: dict[str, str] = {}
    for ledger in ledgers:
        with read_spend(ledger) as book:
            labels |= (mine := book.labels())
            home |= dict.fromkeys(mine, ledger)
    found = [name] if name in labels else [run for run, label in labels.items() if name and name == label]
    found = found or [run for run in labels if name and run.startswith(name)]
    if not found:
        raise RunError(
            "cli.no-run-known",
            f"no run {name!r} is known in '{printable_location(where)}'",
            f"lamina spend {quote(printable_location(where))} lists them",
        )
    if len(found) > 1:
        listed = ", ".join(run_name(run, labels[run]) for run in found[:5])
        raise RunError(
            "cli.could-runs", f"{name!r} could be any of {len(found)} runs: {listed}", "give more digits of its id"
        )
    with write_spend(home[found[0]]) as book:
        if lost:
            return found[0], book.abandon_run(found[0])
        book.finish(found[0])
    return found[0], 0
