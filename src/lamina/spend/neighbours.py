"""Ledgers that lie beside each other: a person whose data is in two of them has lost what both record together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import LaminaError, LedgerError
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.schema import pluralize
from lamina.ledger.show import epsilon_or_none
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import epsilon_text, printable

LEDGER_SUFFIX = ".ledger.db"


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourLedger:
    """What a ledger says of itself. Nothing of it was verified.

    name          its file
    units         what ε protects, by private class that was charged
    epsilon       by private class: what its last epoch says, over all runs; None if no finite figure is known
    other_people  the owner's reason why it holds other people than the ledgers beside it; None if nobody stated one
    """

    name: str
    origin: str
    units: dict[str, str]
    delta: float
    runs: int
    epsilon: dict[str, float | None]
    other_people: str | None

    @classmethod
    def read(cls, ledger: LedgerReader) -> NeighbourLedger:
        """What an open ledger says of itself."""
        runs: set[bytes] = set()
        epsilon: dict[str, float | None] = {}
        for leaf in ledger.of_kind(Epoch):
            assert isinstance(leaf.record, Epoch)
            runs.add(leaf.record.run)
            epsilon |= {
                each.cls: epsilon_or_none(each.spend) for each in leaf.record.accounts if not each.noise_multiplier
            }
        header = ledger.header
        return cls(
            name=ledger.name, origin=header.origin, units=ledger_units(ledger), delta=header.delta, runs=len(runs),
            epsilon=epsilon, other_people=header.other_people,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """For machines. The file without its folder: a certificate names no path of a machine."""
        found = {"ledger": os.path.basename(self.name), "origin": self.origin, "units": self.units, "delta": self.delta}
        return found | {"runs": self.runs, "epsilon": self.epsilon, "other_people": self.other_people}

    def __str__(self) -> str:
        units = ", ".join(sorted(set(map(printable, self.units.values()))))
        spent = (f"ε {'∞' if e is None else epsilon_text(e)} of {cls}" for cls, e in sorted(self.epsilon.items()))
        facts = [f"per {units}"] * bool(units) + [f"δ = {self.delta:g}", pluralize(self.runs, "run"), *spent]
        stated = (
            "" if self.other_people is None else f"; its owner states that it holds other people: {self.other_people}"
        )
        return f"'{printable(self.name)}' (origin {self.origin!r}, {', '.join(facts)}{stated})"


def ledger_units(ledger: LedgerReader) -> dict[str, str]:
    """What ε protects, by private class, as the plans of the ledger's epochs say."""
    found: dict[str, str] = {}
    for digest in {leaf.record.plan: None for leaf in ledger.of_kind(Epoch) if isinstance(leaf.record, Epoch)}:
        if (data := ledger.blob(digest)) is not None:
            found |= {each.name: each.unit for each in StepPlan.from_cbor(data).classes if not each.public}
    return found


def check_units(ledger: LedgerReader, plan: StepPlan) -> None:
    """LedgerError if the ledger has protected another unit than the plan does: ε of a patient and of a visit do not add."""
    known = ledger_units(ledger)
    for entry in plan.classes:
        if not entry.public and (unit := known.get(entry.name, entry.unit)) != entry.unit:
            problem = (
                f"the ledger {ledger.name} of origin {ledger.origin!r} counts class {entry.name!r} per {unit}, "
                f"this run per {entry.unit}"
            )
            remedy = (
                f"give the data by {unit}, or name another origin for it: what a person loses is then the sum of both"
            )
            raise LedgerError("ledger.unit-differs", problem, remedy)


def neighbour_ledgers(own: str | os.PathLike[str], *around: Path) -> list[NeighbourLedger]:
    """The other ledgers beside a ledger in a file: in its folder, the folders in it and the one above, and around a run."""
    home = Path(os.path.realpath(own)).parent
    found: dict[str, NeighbourLedger] = {}
    for path in _ledger_files(home, *around):
        real = os.path.realpath(path)
        if real != os.path.realpath(own) and real not in found:
            with suppress(LaminaError), LedgerReader.read_only(real) as ledger:
                found[real] = NeighbourLedger.read(ledger)
    return [found[real] for real in sorted(found)]


def _ledger_files(home: Path, *around: Path) -> Iterator[Path]:
    for folder in dict.fromkeys((home, *(each.resolve() for each in around))):
        for pattern in (f"*{LEDGER_SUFFIX}", f"*/*{LEDGER_SUFFIX}", "*/ledger.db"):
            yield from (path for path in folder.glob(pattern) if path.is_file())
    yield from (path for path in home.parent.glob(f"*{LEDGER_SUFFIX}") if path.is_file())
