"""What `lamina train` says at the end, for people and for machines."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from lamina.cli import run_folder
from lamina.cli.admit import page
from lamina.cli.explain.words import rules_in_words
from lamina.cli.ledgers import check_policy, is_there, is_url, reading, shown
from lamina.cli.notes import admission_notes
from lamina.cli.output import columns, out, print_json, round_up
from lamina.cli.prepare import Planned
from lamina.ledger.opening import ledger_key_beside
from lamina.train import Corpus, Outcome, Trainer
from lamina.train.book import Book
from lamina.train.book.account import is_bound, told
from lamina.train.book.charge import charges
from lamina.train.corpus.signed import AdmittedCorpus

_SHOWN = 20  # bounds in the table
_NOBODY = "00" * 16  # a run that holds nothing yet


def tell_admission(trainer: Trainer, screen: Console) -> tuple[str, ...]:
    """Who was let in, who was not, and what their bounds come to under the plan; returns what is to be noted."""
    corpus = trainer.corpus
    if isinstance(corpus, AdmittedCorpus):
        found = page(corpus.admission, corpus.resolution(trainer.plan, trainer.max_occurrences))
        screen.print(f"{found}\n", markup=False, soft_wrap=True)
    return admission_notes(corpus)


def result(outcome: Outcome, planned: Planned, corpus: Corpus, ledger: str) -> dict[str, Any]:
    """Keys that machines read."""
    admission = corpus.admission
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
        "admission": None if admission is None else admission.to_dict(),
        "bounds": run_folder.figures(outcome.folder).get("bounds", {}),
        "metrics": dict(outcome.metrics),
        "notes": list(outcome.notes),
        "model": str(outcome.folder / "model.safetensors"),
        "ledger": ledger,
    }


def tell(outcome: Outcome, planned: Planned, corpus: Corpus, ledger: str) -> None:
    rows = [["class", "unit", "δ", "ε of this run", "ε over all runs", "steps"]]
    for entry in planned.plan.classes:
        name = entry.name
        if entry.public:
            rows.append([name, entry.unit, "0", "public", "public", f"{outcome.steps:,}"])
            continue
        spent, total = (_told(_finite(found.get(name, 0.0))) for found in (outcome.epsilon, outcome.total))
        rows.append([name, entry.unit, f"{entry.delta:g}", spent, total, f"{outcome.steps:,}"])
    lines = [columns(rows, left=2), "", *_told_bounds(outcome)]
    if (admission := corpus.admission) is not None:
        lines.append(f"admitted by signature: {len(admission):,}; refused: {len(admission.refused):,}")
    if not outcome.private:
        lines.append("NOT PRIVATE: something about this run voids its guarantee")
    lines += [f"rule: {rule}" for rule in rules_in_words(planned.plan)]
    lines += [f"{name}: {value:.4g}" for name, value in outcome.metrics.items()]
    lines += [f"note: {note}" for note in outcome.notes]
    folder = outcome.folder
    lines += [
        f"model:   {folder / 'model.safetensors'}",
        f"figures: {folder / 'metrics.json'}",
        f"ledger:  {ledger}",
        f"         lamina spend {quote(ledger)} reads it, lamina ledger verify {quote(ledger)} checks it",
        *_told_key(ledger),
        f"journal: {folder / 'journal'}  (secret, like checkpoint/: they never leave this machine)",
    ]
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def _told_key(ledger: str) -> list[str]:
    """Where the ledger's key lies, if it lies beside it."""
    beside = None if is_url(ledger) else ledger_key_beside(ledger)
    if beside is None or not beside.exists():
        return []
    return [f"key:     {beside}  (secret: whoever has it can sign another history)"]


def _told_bounds(outcome: Outcome) -> list[str]:
    """What was signed, and what was spent on it."""
    bounds = run_folder.figures(outcome.folder).get("bounds", {})
    if not bounds:
        return []
    rows = [["signed bound", "δ", "ε signed", "ε of this run", "ε over all runs", "scale"]]
    for name, row in list(bounds.items())[:_SHOWN]:
        signed, scale = row.get("signed"), row.get("scale")
        figures = [_told(_finite(row[key])) for key in ("epsilon", "total")]
        rows.append(
            [
                name,
                f"{row['delta']:g}",
                "–" if signed is None else f"{signed:.4f}",
                *figures,
                "–" if scale is None else f"{scale:.4g}",
            ]
        )
    more = [f"… and {len(bounds) - _SHOWN} more, in metrics.json"] if len(bounds) > _SHOWN else []
    return [columns(rows), *more, ""]


def tell_plan(
    planned: Planned, trainer: Trainer, folder: Path, where: str, notes: tuple[str, ...], *, as_json: bool
) -> bool:
    """What would happen: which folder, and what the ledger says about each class. False if it would be refused."""
    begun = run_folder.figures(folder).get("steps") if (folder / "journal").exists() else None
    with reading(where) if (there := is_there(where)) else nullcontext() as held:
        if held is not None:
            check_policy(held.ledger, planned.contract())
        standing = _standing(planned, held)
        refused = [] if begun is not None or held is None else _without_room(planned, trainer, held)
    if as_json:
        facts = {
            "folder": str(folder),
            "begun": begun,
            "ledger": shown(where),
            "standing": standing,
            "refused": refused,
            "admission": None if trainer.corpus.admission is None else trainer.corpus.admission.to_dict(),
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
        state = f"would be refused: there is no room in the ledger for {', '.join(map(told, refused))}"
    place = f"ledger: {shown(where)}{'' if there else ' (not there yet)'}"
    lines = [columns(rows), "", f"{folder}: {state}", place]
    out.print("\n".join([*lines, "nothing was spent or written"]), markup=False, soft_wrap=True)
    return not refused


def _standing(planned: Planned, held: Book | None) -> dict[str, Any]:
    """What is planned, spent, and allowed, by class."""
    found: dict[str, Any] = {}
    for entry in planned.plan.classes:
        if not entry.public:
            total = held and held.total(entry.name, delta=entry.delta, accountant=planned.plan.accountant)
            found[entry.name] = {
                "planned": planned.plan.epsilon(entry.name),
                "spent": _finite(total.spent if total else 0.0),
                "committed": _finite(total.committed if total else 0.0),
                "bound": planned.policy.bound(entry.name),
            }
    return found


def _without_room(planned: Planned, trainer: Trainer, book: Book) -> list[str]:
    """The classes and signed bounds that do not allow a new run of this plan, by what all have spent and reserved."""
    plan, found = planned.plan, []
    bounds = {entry.name: planned.policy.bound(entry.name) for entry in plan.classes}
    bounds |= {each.name: each.epsilon for each in trainer.accounts}
    every = charges(plan, 0, plan.steps, trainer.accounts)
    for name, bound in bounds.items():
        due = [c for c in every if c.cls == name]
        if due and bound is not None:
            most, *besides = due
            fit = book.fits(_NOBODY, charge=most, bound=bound, besides=besides)
            whole = plan.epsilon(name) if not is_bound(name) else 0.0
            if fit < most.steps or whole > bound:
                found.append(name)
    return found


def _finite(value: float) -> float | None:
    """JSON has no infinity: an account without any bound left is null."""
    return value if math.isfinite(value) else None


def _told(value: float | None) -> str:
    return "∞" if value is None else round_up(value)
