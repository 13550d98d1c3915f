"""Neighbouring ledgers: a person whose data is in two of them has lost what both record together."""

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
    """What a neighbouring ledger states about itself. It is not verified.

    name          its file
    units         what ε protects, by private class that was charged
    epsilon       by private class, over all runs, as its last epoch states it; None if no finite figure is known
    other_people  the owner's statement why it holds other people than the ledgers beside it; None if there is none
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
        """Read what an open ledger states about itself."""
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
        """Return the fields for JSON. The folder is left out, because a certificate contains no path of a machine."""
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
    """Return what ε protects, by private class, from the plans of the ledger's epochs."""
    found: dict[str, str] = {}
    for digest in {leaf.record.plan: None for leaf in ledger.of_kind(Epoch) if isinstance(leaf.record, Epoch)}:
        if (data := ledger.blob(digest)) is not None:
            found |= {each.name: each.unit for each in StepPlan.from_cbor(data).classes if not each.public}
    return found


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
    """Return the other ledgers near a ledger file: in its folder, its subfolders, the folder above, and around a run."""
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
