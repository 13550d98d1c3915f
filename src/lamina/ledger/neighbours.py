"""Neighbouring ledgers: a person whose data is in two of them has lost what both record together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lamina.errors import LaminaError, LedgerError
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.schema import pluralize
from lamina.ledger.show import epsilon_or_none
from lamina.ledger.store.sqlite import (
    DEFAULT_SCHEMA,
    PostgresAddress,
    is_ledger_file,
    is_postgres_url,
    printable_location,
)
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text, printable

LEDGER_SUFFIX = ".ledger.db"
_MOST_FILES = 4096  # files of other names of which the header is read, in each search


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourLedger:
    """The unverified statements of a neighbouring ledger about itself.

    name          its file, or its address without the password
    units         what ε protects, by private class that was charged
    epsilon       by private class, over all runs, as its last epoch states it; None if no finite figure is known
    other_people  the owner's statement why it holds other people than the ledgers beside it; None if there is none
    unreadable    the error code if it cannot be read, so that nothing else is known of it; None if it can
    """

    name: str
    origin: str
    units: dict[str, str]
    delta: float
    runs: int
    epsilon: dict[str, float | None]
    other_people: str | None
    unreadable: str | None = None

    @classmethod
    def at(cls, place: str) -> NeighbourLedger:
        """Read the ledger at a path or address, or state why it cannot be read."""
        try:
            with LedgerReader.read_only(place) as ledger:
                return cls.read(ledger)
        except LaminaError as error:
            name = printable_location(place)
            return cls(
                name=name, origin="unknown", units={}, delta=0.0, runs=0, epsilon={}, other_people=None,
                unreadable=error.code,
            )  # fmt: skip

    @classmethod
    def read(cls, ledger: LedgerReader) -> NeighbourLedger:
        """Read what an open ledger states about itself."""
        runs: set[bytes] = set()
        epsilon: dict[str, float | None] = {}
        unproven = set[str]().union(*(plan.public_classes for plan in _plans(ledger)))
        for leaf in ledger.of_kind(Epoch):
            assert isinstance(leaf.record, Epoch)
            runs.add(leaf.record.run)
            whole = {each.cls: epsilon_or_none(each.spend) for each in leaf.record.accounts if not each.bound.signed}
            split = {each.cls for each in leaf.record.accounts} - whole.keys()
            epsilon |= whole | dict.fromkeys(split)
            unproven |= split
        epsilon |= dict.fromkeys(epsilon.keys() & unproven)
        header = ledger.header
        return cls(
            name=ledger.name, origin=header.origin, units=ledger_units(ledger), delta=header.delta, runs=len(runs),
            epsilon=epsilon, other_people=header.other_people,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without folder and server, because a certificate names no machine."""
        short = f"#{self.name.rpartition('#')[2]}" if is_postgres_url(self.name) else os.path.basename(self.name)
        found = {"ledger": short, "origin": self.origin, "units": self.units, "delta": self.delta}
        found |= {"runs": self.runs, "epsilon": self.epsilon, "other_people": self.other_people}
        return found if self.unreadable is None else found | {"unreadable": self.unreadable}

    def note(self, origin: str) -> str:
        """Return what a ledger of the given origin states about this one beside it."""
        if self.unreadable is None and self.origin == origin:
            return f"another ledger of this origin lies near (a copy adds nothing, a second one adds its loss): {self}"
        return f"another ledger lies near, and a person in both loses the sum: {self}"

    def __str__(self) -> str:
        if self.unreadable is not None:
            return f"'{printable(self.name)}' (damaged or not readable [{self.unreadable}]: lamina ledger verify)"
        units = ", ".join(sorted(set(map(printable, self.units.values()))))
        spent = (f"ε {'∞' if e is None else epsilon_text(e)} of {cls}" for cls, e in sorted(self.epsilon.items()))
        facts = [f"per {units}"] * bool(units) + [f"δ = {self.delta:g}", pluralize(self.runs, "run"), *spent]
        stated = (
            "" if self.other_people is None else f"; its owner states that it holds other people: {self.other_people}"
        )
        return f"'{printable(self.name)}' (origin {self.origin!r}, {', '.join(facts)}{stated})"


def ledger_units(ledger: LedgerReader) -> dict[str, str]:
    """Return what ε protects, by private class, from the plans of the ledger's epochs."""
    return {each.name: each.unit for plan in _plans(ledger) for each in plan.classes if not each.public}


def _plans(ledger: LedgerReader) -> list[StepPlan]:
    """Return the plans of the ledger's epochs, as far as it has them."""
    digests = {leaf.record.plan: None for leaf in ledger.of_kind(Epoch) if isinstance(leaf.record, Epoch)}
    return [StepPlan.from_cbor(data) for digest in digests if (data := ledger.blob(digest)) is not None]


def check_units(ledger: LedgerReader, plan: StepPlan) -> None:
    """Raise LedgerError if ledger and plan protect different units: ε per patient and ε per visit do not add up."""
    known = ledger_units(ledger)
    for entry in plan.classes:
        if not entry.public and (unit := known.get(entry.name, entry.unit)) != entry.unit:
            problem = (
                f"the ledger {ledger.name} of origin {ledger.origin!r} counts class {entry.name!r} per {unit}, "
                f"but this run per {entry.unit}"
            )
            remedy = f"give the data per {unit}, or use another origin: a person in both ledgers then loses the sum"
            raise LedgerError("ledger.unit-differs", problem, remedy)


def neighbour_ledgers(own: str | os.PathLike[str], *around: Path) -> list[NeighbourLedger]:
    """Return the other ledgers near a ledger, and around a run.

    Near a file: in its folder, its subfolders and the folder above. In PostgreSQL: in all schemas of its database. A
    ledger that cannot be read is named, too.
    """
    places, mine, folders = list[str](), os.path.realpath(own), around
    if isinstance(own, str) and is_postgres_url(own):
        with suppress(LaminaError, ImportError):  # opening the ledger itself reports these
            from lamina.ledger.store.postgres import ledgers_in_database  # an extra: only who uses it needs psycopg

            places = ledgers_in_database(own)
        address = PostgresAddress.parse(own)
        mine = f"{address.conninfo}#{address.schema or DEFAULT_SCHEMA}"
    else:
        folders = (Path(mine).parent, *around)
    places += map(os.path.realpath, _ledger_files(*folders))
    return [NeighbourLedger.at(place) for place in sorted({*places} - {mine})]


def _ledger_files(*folders: Path) -> Iterator[Path]:
    """Yield the ledger files in folders, in their subfolders, and in the folder above the first one.

    A ledger is recognised by the header of its file. That of another file than NAME.ledger.db or ledger.db is read only
    among the first files of each search, because a folder may hold a million payloads.
    """
    for folder in dict.fromkeys(each.resolve() for each in folders):
        for pattern in (f"*{LEDGER_SUFFIX}", f"*/*{LEDGER_SUFFIX}", "*/ledger.db"):
            yield from filter(is_ledger_file, folder.glob(pattern))
        yield from filter(is_ledger_file, islice(chain(folder.glob("*"), folder.glob("*/*")), _MOST_FILES))
    for folder in folders[:1]:
        yield from filter(is_ledger_file, islice(folder.resolve().parent.glob("*"), _MOST_FILES))
        yield from filter(is_ledger_file, folder.resolve().parent.glob(f"*{LEDGER_SUFFIX}"))
