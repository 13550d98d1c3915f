"""What `lamina train` says at the end, for people and for machines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lamina.cli import run_folder
from lamina.cli.explain.words import rules_in_words
from lamina.cli.output import columns, out, print_json, round_up
from lamina.cli.prepare import Planned
from lamina.train import Outcome, SpendBook
from lamina.train.book.charge import charges


def result(outcome: Outcome, planned: Planned, book: Path) -> dict[str, Any]:
    """Keys that machines read."""
    return {
        "run": outcome.run,
        "folder": str(outcome.folder),
        "steps": outcome.steps,
        "planned_steps": planned.plan.steps,
        "private": outcome.private,
        "classes": {
            entry.name: {
                "epsilon": _finite(outcome.epsilon.get(entry.name, 0.0)),
                "total": _finite(outcome.total.get(entry.name, 0.0)),
                "delta": entry.delta,
                "unit": entry.unit,
            }
            for entry in planned.plan.classes
        },
        "allocation": planned.plan.allocation,
        "rules": list(rules_in_words(planned.plan)),
        "metrics": dict(outcome.metrics),
        "notes": list(outcome.notes),
        "model": str(outcome.folder / "model.safetensors"),
        "book": str(book),
    }


def tell(outcome: Outcome, planned: Planned, book: Path) -> None:
    rows = [["class", "unit", "δ", "ε of this run", "ε over all runs", "steps"]]
    for entry in planned.plan.classes:
        name = entry.name
        if entry.public:
            rows.append([name, entry.unit, "0", "public", "public", f"{outcome.steps:,}"])
            continue
        spent, total = (_told(_finite(found.get(name, 0.0))) for found in (outcome.epsilon, outcome.total))
        rows.append([name, entry.unit, f"{entry.delta:g}", spent, total, f"{outcome.steps:,}"])
    lines = [columns(rows, left=2), ""]
    if not outcome.private:
        lines.append("NOT PRIVATE: something about this run voids its guarantee")
    lines += [f"rule: {rule}" for rule in rules_in_words(planned.plan)]
    lines += [f"{name}: {value:.4g}" for name, value in outcome.metrics.items()]
    lines += [f"note: {note}" for note in outcome.notes]
    folder = outcome.folder
    lines += [
        f"model:   {folder / 'model.safetensors'}",
        f"figures: {folder / 'metrics.json'}",
        f"book:    {book}  (to read it: lamina spend {book})",
        f"journal: {folder / 'journal'}  (secret, like checkpoint/: they never leave this machine)",
    ]
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def tell_plan(planned: Planned, folder: Path, book: Path, notes: tuple[str, ...], *, as_json: bool) -> bool:
    """What would happen: which folder, and what the book says about each class. False if it would be refused."""
    begun = run_folder.figures(folder).get("steps") if (folder / "journal").exists() else None
    held = SpendBook(book, create=False) if book.exists() else None
    standing: dict[str, Any] = {}
    for entry in planned.plan.classes:
        if not entry.public:
            total = held and held.total(
                planned.policy.corpus.origin,
                entry.name,
                delta=entry.delta,
                accountant=planned.plan.accountant,
            )
            standing[entry.name] = {
                "planned": planned.plan.epsilon(entry.name),
                "spent": _finite(total.spent if total else 0.0),
                "committed": _finite(total.committed if total else 0.0),
                "bound": planned.policy.bound(entry.name),
            }
    refused = [] if begun is not None or held is None else _without_room(planned, held)
    if as_json:
        facts = {
            "folder": str(folder),
            "begun": begun,
            "book": standing,
            "refused": refused,
            "notes": list(notes),
        }
        print_json({**planned.plan.to_dict(), **facts})
        return not refused
    rows = [["class", "ε planned", "ε spent by all runs", "with what is reserved", "bound"]]
    for name, row in standing.items():
        bound = "none" if row["bound"] is None else f"{row['bound']:g}"
        rows.append([name, *(_told(row[key]) for key in ("planned", "spent", "committed")), bound])
    state = f"would go on at step {begun} of {planned.plan.steps}" if begun is not None else "would begin"
    if refused:
        state = f"would be refused: there is no room in the book for class {', '.join(map(repr, refused))}"
    lines = [columns(rows), "", f"{folder}: {state}", f"book: {book}{'' if held else ' (not there yet)'}"]
    out.print("\n".join([*lines, "nothing was spent or written"]), markup=False, soft_wrap=True)
    return not refused


def _without_room(planned: Planned, book: SpendBook) -> list[str]:
    """The classes whose bound does not allow a new run of this plan, by what all runs have spent and reserved."""
    plan, found = planned.plan, []
    for k, entry in enumerate(plan.classes):
        bound = planned.policy.bound(entry.name)
        due = [c for c in charges(plan, 0, plan.steps) if c.cls == entry.name]
        if due and bound is not None:
            most, *besides = due
            origin = planned.policy.corpus.origin
            fit = book.fits("a new run", origin=origin, charge=most, bound=bound, besides=besides)
            if fit < plan.steps or plan.epsilon(k) > bound:
                found.append(entry.name)
    return found


def _finite(value: float) -> float | None:
    """JSON has no infinity: an account without any bound left is null."""
    return value if math.isfinite(value) else None


def _told(value: float | None) -> str:
    return "∞" if value is None else round_up(value)
