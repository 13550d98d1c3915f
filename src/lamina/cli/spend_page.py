"""What `lamina spend` prints: accounts with what they lost, the bound they are held to, and what remains of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, localcontext
from typing import Any

from lamina.cli.output import columns, round_up
from lamina.ledger.view import head_of
from lamina.train.book import Book
from lamina.train.book.account import MARK, is_bound
from lamina.train.book.desk import Reading
from lamina.train.book.limits import Limits
from lamina.train.book.recorded import Recorded
from lamina.train.book.total import RunSpend, Total

_NAMED = 3  # accounts with the same runs that are told above them


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """An account at one δ, by one accountant.

    bound    the most that it may lose there over all runs; inf if it is held to nothing
    """

    account: str
    delta: float
    accountant: str
    bound: float
    total: Total

    @property
    def remaining(self) -> float:
        """bound - committed, never more than there is; 0 where the bound is passed."""
        if math.isinf(self.bound):
            return math.inf
        return max(0.0, math.nextafter(self.bound - self.total.committed, -math.inf))

    @property
    def passed(self) -> bool:
        return self.total.committed > self.bound


def lines_of(book: Book) -> list[Line]:
    """Every account of a ledger, in one view of it."""
    header = book.ledger.header
    with book.ledger.store.read() as rows:
        head_of(rows)  # begins the view of PostgreSQL, so that what the book asks is a part of it
        held, limits = Reading(rows, Recorded(header)), Limits(header)
        found = []
        for each in book.accounts():
            wanted = limits.wanted(rows, each.cls, *held.terms(each.cls))
            mine = (t.bound for t in wanted if (t.delta, t.accountant) == (each.delta, each.accountant))
            found.append(
                Line(
                    account=each.cls,
                    delta=each.delta,
                    accountant=each.accountant,
                    bound=min(mine, default=math.inf),
                    total=book.total(each.cls, delta=each.delta, accountant=each.accountant),
                )
            )
    return found


# ----------------------------------------------------------------------------------- for machines


def tree(lines: Sequence[Line]) -> dict[str, Any]:
    """By class. The terms of the last booking come first, others are in `also`.

    Signed bounds that are stricter than their class are in its `bounds`.
    """
    found: dict[str, Any] = {}
    for line in lines:
        figures = {
            "epsilon": _finite(line.total.spent),
            "committed": _finite(line.total.committed),
            "bound": _finite(line.bound),
            "remaining": _finite(line.remaining),
            "delta": line.delta,
            "accountant": line.accountant,
        }
        classes = found
        if is_bound(line.account):
            owner = found.setdefault(line.account.partition(MARK)[0], {"also": [], "bounds": {}})
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


def page(origin: str, lines: Sequence[Line]) -> str:
    """One corpus: ε of every account in a table, then the runs of each."""
    head = f"corpus {_printable(origin)}"
    if not lines:
        return f"{head}\n  nothing is spent or reserved"
    rows = [
        ["class (signed bound)", "ε spent", "committed", "bound", "remains", "at δ", "by"],
        *map(_row, lines),
    ]
    told = [head, *(f"  {line}" for line in columns(rows, left=1).split("\n"))]
    for line in lines:
        if line.passed:
            told.append(
                f"  note: {_told(line.account)} is past its bound at δ = {line.delta:g}: no run may take more of it"
            )
    alike: dict[tuple[RunSpend, ...], list[str]] = {}
    for account, runs in {line.account: line.total.runs for line in lines}.items():
        alike.setdefault(runs, []).append(_told(account))
    for runs, names in alike.items():
        if runs:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            told += [
                "",
                f"  runs of {', '.join(names[:_NAMED])}{more}",
                *(f"    {row}" for row in _runs(runs)),
            ]
    return "\n".join(told)


def _row(line: Line) -> list[str]:
    bounded = math.isfinite(line.bound)
    return [
        _told(line.account),
        _epsilon(line.total.spent),
        _epsilon(line.total.committed),
        _bound(line) if bounded else "no bound",
        _down(line.remaining) if bounded else "-",
        f"{line.delta:g}",
        line.accountant,
    ]


def _told(account: str) -> str:
    """A class; with what was signed, if that is stricter than the class."""
    cls, mark, label = account.partition(MARK)
    return _printable(f"{cls} ({label.replace(',', ', ')})" if mark else cls)


def _runs(runs: Sequence[RunSpend]) -> list[str]:
    rows = [["run", "label", "state", "steps", "redone", "reserved"]]
    for each in runs:
        counts = [f"{count:,}" for count in (each.steps, each.redone, each.reserved)]
        state = "ended" if each.finished else "open"
        rows.append([_printable(each.run[:8]), _printable(each.label), state, *counts])
    return columns(rows, left=3).split("\n")


def _bound(line: Line) -> str:
    """Not more than was promised; but what just fits into it does not look like more."""
    nearest = f"{line.bound:.4f}"
    fits = line.passed or float(round_up(line.total.committed)) <= float(nearest)
    return nearest if fits else round_up(line.bound)


def _epsilon(value: float) -> str:
    return round_up(value) if math.isfinite(value) else "∞"


def _down(value: float) -> str:
    """What is left is never printed larger than it is."""
    with localcontext() as context:
        context.prec = 400  # digits: more than a float has
        return str(Decimal(value).quantize(Decimal("0.0001"), rounding=ROUND_FLOOR))


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _printable(text: str) -> str:
    """Names are the user's: control characters in them do not reach the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
