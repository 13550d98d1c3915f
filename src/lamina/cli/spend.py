"""Show ε spent by every class of every corpus, over all runs, retrainings and abandoned attempts.

A run reserves its whole plan before its first step. It is charged segment by segment, before each is trained. What is charged is
spent for good: neither deleting the run nor --release gives it back. What is reserved counts against the bound too, until the run
ends or is released.

The ε of several runs is computed jointly and is usually less than the sum. Committed: spent and reserved ε. Bound: the strictest of
the ledger's limits, the signed bounds and the limit of the last run. Remains: the bound minus the committed ε, rounded down; the
other figures are rounded up. The risk bound of a class is shown below the table: the share that an attack finds, computed for all
charges together, and the rest of the bound.

Ledgers in neighbouring folders are listed at the end, with the statements of their owners.

Charges are read from the leaves under the newest checkpoint; lamina ledger verify recomputes every figure.

Examples:

  lamina spend
  lamina spend runs/cardiology.ledger.db
  lamina spend --release 3f9c21aa
  lamina spend --release 3f9c21aa --lost    if its folder is gone
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from lamina.account.charges import Account
from lamina.cli.command import Answer, argument, command, misuse, option, table
from lamina.cli.open_ledger import default_place, find_ledgers, read_spend, write_spend
from lamina.cli.terminal import open_private_key
from lamina.errors import RunError
from lamina.ledger.attempts import SpendView, run_name
from lamina.ledger.neighbours import NeighbourLedger, neighbour_ledgers
from lamina.ledger.schema import pluralize
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spend_limits import SpendLimits
from lamina.ledger.spending import Spending
from lamina.ledger.store.rows import head_of
from lamina.ledger.store.sqlite import printable_location
from lamina.plan.risk import RiskBound
from lamina.plan.table import epsilon_text, finite_or_none, percent_text, printable, remaining_text
from lamina.sign.keys import PrivateKey

_MAX_ACCOUNTS_NAMED = 3  # above a table of runs that several accounts share


@command(keys=True)
def spend(
    where: str | None = argument(
        "WHERE",
        "a ledger (file or postgresql://…), or a folder that holds ledgers; default: runs, or this folder",
        default=None,
    ),
    release: str | None = option(
        "give back what this run has reserved; its id, the first digits of it, or its label", metavar="RUN"
    ),
    lost: bool = option("with --release: the run will never go on; record what it had begun as abandoned"),
    key: Path | None = option(
        "with --release: key of the ledger, which signs what stays open; default: the key beside the ledger file"
    ),
    origin: str | None = option("only this corpus"),
) -> Answer:
    if lost and release is None:
        raise misuse("give --release RUN too", "--lost")
    where = default_place() if where is None else where
    places = _by_origin(find_ledgers(where), where, origin)
    signer = None if key is None else open_private_key(key)
    facts: dict[str, Any] = {"ledger": printable_location(where)}
    lines = []
    if release is not None:
        released, recorded = _release(list(places.values()), where, release, lost, signer)
        facts |= {"released": released} | ({"recorded": recorded} if lost else {})
        begun = f" What it had begun ({pluralize(recorded, 'attempt')}) is recorded as abandoned." if recorded else ""
        goes_on = "" if lost else "; if it still trains, each further segment must fit under the bound"
        told = f"Run {released[:8]} holds no reservation any more.{begun}"
        lines = [f"{told} What it was charged stays charged{goes_on}."]
    found, beside = {}, {}
    for name, place in places.items():
        with read_spend(place) as book:
            found[name] = account_figures(book)
            beside[book.ledger.name] = NeighbourLedger.read(book.ledger)
        beside |= {each.name: each for each in neighbour_ledgers(place)}
    together = [each for _, each in sorted(beside.items())] if len(beside) > 1 else []
    facts["origins"] = {name: _by_class(each) for name, each in found.items()}
    facts["beside_each_other"] = [each.to_dict() for each in together]
    pages = [spend_page(name, each) for name, each in found.items()] + ["\n".join(_together(together))] * bool(together)
    return Answer(facts, *lines, "\n\n".join(pages))


Figures = tuple[Account, dict[str, Any]]


def account_figures(book: SpendLedger) -> list[Figures]:
    """Every account of a ledger with its limit over all runs, its spending and its runs, in one view of the ledger."""
    header = book.ledger.header
    with book.ledger.store.read() as rows:
        head_of(rows)  # opens the snapshot in PostgreSQL; the reads below share it
        held, limits = SpendView(rows, Spending(header)), SpendLimits(book.ledger)
        found = []
        for account, asked in book.accounts():
            wanted, name = limits.wanted(rows, account, *held.terms(account)), str(account)
            same = [t for t in wanted if (t.delta, t.accountant) == (asked.delta, asked.accountant)]
            terms: dict[str, Any] = {"delta": asked.delta, "accountant": asked.accountant}
            bound, total = min(each.epsilon for each in (asked, *same)), book.total(name, **terms)
            figures = figures_of(total.spent, total.committed, bound) | terms
            risk = min((t.risk for t in same if t.risk is not None), key=lambda each: each.tpr, default=None)
            if risk is not None:
                rates = book.total(name, **terms, risk=risk)
                rest = {"remaining": max(0.0, risk.tpr - rates.committed)}
                figures["risk"] = risk.model_dump() | {"spent": rates.spent, "committed": rates.committed} | rest
            figures["runs"] = [
                {"run": each.run, "label": each.label, "since": each.day, "steps": each.steps, "redone": each.redone}
                | {"reserved": each.reserved, "finished": each.finished}
                for each in total.runs
            ]
            found.append((account, figures))
    return found


def figures_of(spent: float, committed: float, bound: float) -> dict[str, Any]:
    """ε spent and committed, the bound, and what remains of it, rounded down; null where there is no bound."""
    remaining = None if math.isinf(bound) else max(0.0, math.nextafter(bound - committed, -math.inf))
    epsilon, held = finite_or_none(spent), finite_or_none(committed)
    return {"epsilon": epsilon, "committed": held, "bound": finite_or_none(bound), "remaining": remaining}


def _by_class(accounts: Sequence[Figures]) -> dict[str, Any]:
    """By class: figures at the terms of the last charge, others in `also`, stricter signed bounds in `bounds`."""
    found: dict[str, Any] = {}
    for account, figures in accounts:
        classes, name = found, str(account)
        if account.signed:
            owner = found.setdefault(account.cls, {"also": [], "bounds": {}})
            classes = owner.setdefault("bounds", {})
        if name in classes:
            classes[name]["also"].append({key: value for key, value in figures.items() if key != "runs"})
        else:
            classes[name] = {**figures, "also": []}
    return found


def spend_page(origin: str, accounts: Sequence[Figures]) -> str:
    """A table of one corpus, ε of every account, then the runs of each."""
    head = f"corpus {printable(origin)}"
    if not accounts:
        return f"{head}\n  nothing is spent or reserved"
    rows = [["class (signed bound)", "ε spent", "committed", "bound", "remains", "at δ", "by"]]
    lines = []
    alike: dict[str, list[str]] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    for account, figures in accounts:
        name = printable(str(account))
        spent, committed = (_epsilon(figures[key]) for key in ("epsilon", "committed"))
        bound, remaining = figures["bound"], figures["remaining"]
        bounded = ["no bound", "-"] if bound is None else [epsilon_text(bound), remaining_text(remaining)]
        rows.append([name, spent, committed, *bounded, f"{figures['delta']:g}", figures["accountant"]])
        if risk := figures.get("risk"):
            rates = f"{percent_text(risk['spent'])} spent, {percent_text(risk['committed'])} committed"
            what = RiskBound(**{key: risk[key] for key in RiskBound.model_fields})
            lines.append(f"  risk of {name}: {what}: {rates}, {remaining_text(100 * risk['remaining'], 2)} % remains")
        if bound is not None and (figures["committed"] is None or figures["committed"] > bound):
            over = f"{name} is over its bound at δ = {figures['delta']:g}"
            lines.append(f"  note: {over}: no run may spend more of it")
        if figures["runs"]:
            same = alike.setdefault(repr(figures["runs"]), [])
            same += [] if name in same else [name]
            runs[repr(figures["runs"])] = figures["runs"]
    for each, names in alike.items():
        more = f" and {len(names) - _MAX_ACCOUNTS_NAMED} more" if len(names) > _MAX_ACCOUNTS_NAMED else ""
        lines += ["", f"  runs of {', '.join(names[:_MAX_ACCOUNTS_NAMED])}{more}", _run_table(runs[each])]
    return "\n".join([head, table(rows, indent=2), *lines])


def _epsilon(value: float | None) -> str:
    return "∞" if value is None else epsilon_text(value)


def _run_table(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [["run", "label", "state", "steps", "redone", "reserved"]]
    for each in runs:
        counts = [f"{each[name]:,}" for name in rows[0][3:]]
        state = "ended" if each["finished"] else "open"
        rows.append([printable(each["run"][:8]), printable(each["label"]), state, *counts])
    return table(rows, left=3, indent=4)


def _together(ledgers: Sequence[NeighbourLedger]) -> Iterator[str]:
    """Yield the table of neighbouring ledgers, and what their owners state."""
    rows = [["ledger", "origin", "class", "per", "at δ", "runs", "ε"]]
    for each in ledgers:
        name = printable(os.path.basename(each.name))
        for cls, epsilon in sorted(each.epsilon.items()) or [("-", 0.0)]:
            unit = printable(each.units.get(cls, "-"))
            rows.append(
                [name, printable(each.origin), cls, unit, f"{each.delta:g}", f"{each.runs:,}", _epsilon(epsilon)]
            )
    yield f"{len(ledgers)} ledgers lie beside each other; a person in several has lost the sum"
    yield table(rows, left=4, indent=2)
    for each in ledgers:
        if each.other_people is not None:
            name = printable(os.path.basename(each.name))
            yield f"  {name}: its owner states that it holds other people: {each.other_people}"


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
