"""`lamina spend`: what the classes of a corpus have lost over all runs, and which runs hold the rest."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from lamina.account.charges import Account
from lamina.cli.open_ledger import find_ledgers, read_spend, write_spend
from lamina.cli.options import JsonOption, PassphraseOption, argument, option
from lamina.cli.terminal import columns, open_private_key, print_json, print_line
from lamina.errors import RunError
from lamina.ledger.attempts import AccountTotal, RunSpend, SpendView, run_name
from lamina.ledger.neighbours import NeighbourLedger, neighbour_ledgers
from lamina.ledger.schema import pluralize
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spend_limits import SpendLimits
from lamina.ledger.spending import Limit, Spending
from lamina.ledger.store.rows import head_of
from lamina.ledger.store.sqlite import printable_location
from lamina.plan.risk import RiskBound
from lamina.plan.table import epsilon_text, finite_or_none, percent_text, printable, remaining_text
from lamina.sign.keys import PrivateKey

_MAX_ACCOUNTS_NAMED = 3  # above a table of runs that several accounts share


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountLine:
    """An account with its limit over all runs and its spending."""

    account: Account
    limit: Limit
    total: AccountTotal
    risk: RiskBound | None = None  # of a class, over all runs
    rates: AccountTotal | None = None  # the rates that `risk` limits

    @property
    def remaining(self) -> float:
        """Return limit - committed, rounded down; 0 if the limit is passed."""
        if math.isinf(self.limit.epsilon):
            return math.inf
        return max(0.0, math.nextafter(self.limit.epsilon - self.total.committed, -math.inf))

    @property
    def passed(self) -> bool:
        return self.total.committed > self.limit.epsilon


def account_lines(book: SpendLedger) -> list[AccountLine]:
    """Every account of a ledger, in one view of it."""
    header = book.ledger.header
    with book.ledger.store.read() as rows:
        head_of(rows)  # opens the snapshot in PostgreSQL; the reads below share it
        held, limits = SpendView(rows, Spending(header)), SpendLimits(book.ledger)
        found = []
        for account, asked in book.accounts():
            wanted, name = limits.wanted(rows, account, *held.terms(account)), str(account)
            same = [t for t in wanted if (t.delta, t.accountant) == (asked.delta, asked.accountant)]
            terms: dict[str, Any] = {"delta": asked.delta, "accountant": asked.accountant}
            limit = Limit(epsilon=min(each.epsilon for each in (asked, *same)), **terms)
            risk = min((t.risk for t in same if t.risk is not None), key=lambda each: each.tpr, default=None)
            total, rates = book.total(name, **terms), book.total(name, **terms, risk=risk) if risk else None
            found.append(AccountLine(account=account, limit=limit, total=total, risk=risk, rates=rates))
    return found


def spend_json(lines: Sequence[AccountLine]) -> dict[str, Any]:
    """By class: figures at the terms of the last charge, others in `also`, stricter signed bounds in `bounds`."""
    found: dict[str, Any] = {}
    for line in lines:
        figures = {
            "epsilon": finite_or_none(line.total.spent),
            "committed": finite_or_none(line.total.committed),
            "bound": finite_or_none(line.limit.epsilon),
            "remaining": finite_or_none(line.remaining),
            "delta": line.limit.delta,
            "accountant": line.limit.accountant,
            **_risk_json(line),
        }
        classes, name = found, str(line.account)
        if line.account.signed:
            owner = found.setdefault(line.account.cls, {"also": [], "bounds": {}})
            classes = owner.setdefault("bounds", {})
        if name in classes:
            classes[name]["also"].append(figures)
            continue
        runs = [
            {"run": each.run, "label": each.label, "since": each.day, "steps": each.steps, "redone": each.redone}
            | {"reserved": each.reserved, "finished": each.finished}
            for each in line.total.runs
        ]
        classes[name] = {**figures, "runs": runs, "also": []}
    return found


def _risk_json(line: AccountLine) -> dict[str, Any]:
    if line.risk is None or line.rates is None:
        return {}
    figures = {"spent": line.rates.spent, "committed": line.rates.committed}
    return {"risk": line.risk.model_dump() | figures | {"remaining": max(0.0, line.risk.tpr - line.rates.committed)}}


def spend_page(origin: str, lines: Sequence[AccountLine]) -> str:
    """A table of one corpus, ε of every account, then the runs of each."""
    head = f"corpus {printable(origin)}"
    if not lines:
        return f"{head}\n  nothing is spent or reserved"
    rows = [["class (signed bound)", "ε spent", "committed", "bound", "remains", "at δ", "by"], *map(_table_row, lines)]
    told = [head, *(f"  {line}" for line in columns(rows, left=1).split("\n"))]
    for line in lines:
        if line.risk is not None and line.rates is not None:
            left = remaining_text(100 * max(0.0, line.risk.tpr - line.rates.committed), 2)
            figures = f"{percent_text(line.rates.spent)} spent, {percent_text(line.rates.committed)} committed, {left} % remains"
            told.append(f"  risk of {printable(str(line.account))}: {line.risk}: {figures}")
        if line.passed:
            over = f"{printable(str(line.account))} is over its bound at δ = {line.limit.delta:g}"
            told.append(f"  note: {over}: no run may spend more of it")
    alike: dict[tuple[RunSpend, ...], list[str]] = {}
    for account, runs in {line.account: line.total.runs for line in lines}.items():
        alike.setdefault(runs, []).append(printable(str(account)))
    for runs, names in alike.items():
        if runs:
            more = f" and {len(names) - _MAX_ACCOUNTS_NAMED} more" if len(names) > _MAX_ACCOUNTS_NAMED else ""
            told += ["", f"  runs of {', '.join(names[:_MAX_ACCOUNTS_NAMED])}{more}"]
            told += [f"    {row}" for row in _run_lines(runs)]
    return "\n".join(told)


def _table_row(line: AccountLine) -> list[str]:
    bounded = math.isfinite(line.limit.epsilon)
    return [
        printable(str(line.account)),
        epsilon_text(line.total.spent),
        epsilon_text(line.total.committed),
        epsilon_text(line.limit.epsilon) if bounded else "no bound",
        remaining_text(line.remaining) if bounded else "-",
        f"{line.limit.delta:g}",
        line.limit.accountant,
    ]


def _run_lines(runs: Sequence[RunSpend]) -> list[str]:
    rows = [["run", "label", "state", "steps", "redone", "reserved"]]
    for each in runs:
        counts = [f"{count:,}" for count in (each.steps, each.redone, each.reserved)]
        state = "ended" if each.finished else "open"
        rows.append([printable(each.run[:8]), printable(each.label), state, *counts])
    return columns(rows, left=3).split("\n")


def spend(
    where: Annotated[
        str, argument("WHERE", "a ledger (file or postgresql://…), or a folder that holds ledgers")
    ] = "runs",
    release: Annotated[
        str | None,
        option("give back what this run has reserved; its id, the first digits of it, or its label", metavar="RUN"),
    ] = None,
    lost: Annotated[
        bool, option("with --release: the run will never go on; record what it had begun as abandoned", "--lost")
    ] = False,
    key: Annotated[
        Path | None,
        option(
            "with --release: key of the ledger, which signs what stays open; default: the key beside the ledger file"
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    origin: Annotated[str | None, option("only this corpus")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show ε spent by every class of every corpus, over all runs, retrainings and abandoned attempts.

    A run reserves its whole plan before its first step. It is charged segment by segment, before each is trained. What
    is charged is spent for good: neither deleting the run nor --release gives it back. What is reserved counts against
    the bound too, until the run ends or is released.

    The ε of several runs is computed jointly and is usually less than the sum. Committed: spent and reserved ε. Bound:
    the strictest of the ledger's limits, the signed bounds and the limit of the last run. Remains: the bound minus the
    committed ε, rounded down; the other figures are rounded up. The risk bound of a class is shown below the table: the
    share that an attack finds, computed for all charges together, and the rest of the bound.

    Ledgers in neighbouring folders are listed at the end, with the statements of their owners.

    Charges are read from the leaves under the newest checkpoint; lamina ledger verify recomputes every figure.

    Examples:

      lamina spend
      lamina spend runs/cardiology.ledger.db
      lamina spend --release 3f9c21aa
      lamina spend --release 3f9c21aa --lost    if its folder is gone
    """
    if lost and release is None:
        raise typer.BadParameter("give --release RUN too", param_hint="--lost")
    places = _by_origin(find_ledgers(where), where, origin)
    signer = None if key is None else open_private_key(key, passphrase_file)
    released, recorded = ("", 0) if release is None else _release(list(places.values()), where, release, lost, signer)
    found, beside = {}, {}
    for name, place in places.items():
        with read_spend(place) as book:
            found[name] = account_lines(book)
            beside[book.ledger.name] = NeighbourLedger.read(book.ledger)
        beside |= {each.name: each for each in neighbour_ledgers(place)}
    together = [each for _, each in sorted(beside.items())] if len(beside) > 1 else []
    if as_json:
        done = ({"released": released} if released else {}) | ({"recorded": recorded} if lost else {})
        origins = {name: spend_json(each) for name, each in found.items()}
        listed = [each.to_dict() for each in together]
        print_json({"ledger": printable_location(where), **done, "origins": origins, "beside_each_other": listed})
        return
    if released:
        attempts = pluralize(recorded, "attempt")
        begun = f" What it had begun ({attempts}) is recorded as abandoned." if recorded else ""
        goes_on = "" if lost else "; if it still trains, each further segment must fit under the bound"
        told = f"Run {released[:8]} holds no reservation any more.{begun}"
        print_line(f"{told} What it was charged stays charged{goes_on}.")
    print_line("\n\n".join([*(spend_page(name, each) for name, each in found.items()), *_together(together)]))


def _together(ledgers: Sequence[NeighbourLedger]) -> list[str]:
    """Return the table of neighbouring ledgers, or nothing if there is only one."""
    if not ledgers:
        return []
    rows = [["ledger", "origin", "class", "per", "at δ", "runs", "ε"]]
    stated = []
    for each in ledgers:
        name = printable(os.path.basename(each.name))
        for cls, epsilon in sorted(each.epsilon.items()) or [("-", 0.0)]:
            spent = "∞" if epsilon is None else epsilon_text(epsilon)
            unit = printable(each.units.get(cls, "-"))
            rows.append([name, printable(each.origin), cls, unit, f"{each.delta:g}", f"{each.runs:,}", spent])
        if each.other_people is not None:
            stated.append(f"  {name}: its owner states that it holds other people: {each.other_people}")
    head = f"{len(ledgers)} ledgers lie beside each other; a person in several has lost the sum"
    return ["\n".join([head, *(f"  {line}" for line in columns(rows, left=4).split("\n")), *stated])]


def _by_origin(ledgers: list[str], where: str, wanted: str | None) -> dict[str, str]:
    """The ledger of each corpus."""
    found: dict[str, str] = {}
    for ledger in ledgers:
        with read_spend(ledger) as book:
            name = book.origin
        if name in found and wanted in (None, name):
            both = f"'{printable_location(found[name])}' and '{printable_location(ledger)}'"
            problem = f"{both} are both ledgers of corpus {name!r}"
            raise RunError("cli.corpus-in-two-ledgers", problem, "give one of them")
        found[name] = ledger
    if wanted is not None and wanted not in found:
        known = ", ".join(map(repr, sorted(found)))
        problem = f"'{printable_location(where)}' has no corpus {wanted!r}"
        raise RunError("cli.corpus-not-in-ledger", problem, f"it has {known}")
    return {name: place for name, place in sorted(found.items()) if wanted in (None, name)}


def _release(ledgers: list[str], where: str, name: str, lost: bool, key: PrivateKey | None) -> tuple[str, int]:
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
        problem = f"'{printable_location(where)}' has no run {name!r}"
        raise RunError("cli.run-not-found", problem, f"lamina spend {quote(printable_location(where))} lists them")
    if len(found) > 1:
        listed = ", ".join(run_name(run, labels[run]) for run in found[:5])
        raise RunError("cli.run-ambiguous", f"{name!r} fits {len(found)} runs: {listed}", "give more digits of its id")
    with write_spend(home[found[0]], key) as book:
        if lost:
            return found[0], book.abandon_run(found[0])
        book.finish(found[0])
    return found[0], 0
