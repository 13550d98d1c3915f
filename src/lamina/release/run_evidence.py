"""What ledger and folder of a run say together: the epochs of the run, its plans, its charges, the files that it wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.account.schedule import EventKey
from lamina.admit.keys import read_small
from lamina.admit.signed_json import parse_json
from lamina.errors import RunError
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch, SegmentOutcome
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, parse_checkpoint
from lamina.ledger.spending import Spending
from lamina.plan.step_plan import PlannedClass, StepPlan
from lamina.spend.accounts import RecordedSpend, account_name

WEIGHTS = "model.safetensors"
_MAX_METRICS_BYTES = 64 << 20
_HASH_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """metrics.json of a run: what it says of itself. Nobody but the run vouches for it.

    conditions  what its guarantee needs and no ledger shows: where the noise came from, whether it was probed, …
    files       SHA-256 of the weights that it wrote, in hex
    """

    run: bytes
    origin: str
    steps: int
    planned_steps: int
    conditions: Mapping[str, Any]
    files: Mapping[str, str]
    max_occurrences: Mapping[str, int]
    notes: tuple[str, ...]
    evaluations: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RunFacts:
        """Read metrics.json in the folder of a run; RunError if the run has not ended."""
        path = Path(folder) / "metrics.json"
        if not path.is_file():
            problem = f"'{folder}' is no folder of a run that has begun: it has no metrics.json"
            raise RunError("release.not-a-run", problem, "name the folder that lamina train wrote: runs/NAME")
        found = parse_json(read_small(path, "the figures of the run", most=_MAX_METRICS_BYTES), f"'{path}'")
        try:
            caps = {name: entry.get("max_occurrences") for name, entry in found["classes"].items()}
            return cls(
                run=bytes.fromhex(found["run"]),
                origin=found["origin"],
                steps=int(found["steps"]),
                planned_steps=int(found["planned_steps"]),
                conditions=dict(found.get("conditions", {})),
                files=dict(found.get("files", {})),
                max_occurrences={name: int(cap) for name, cap in caps.items() if cap is not None},
                notes=tuple(map(str, found.get("notes", ()))),
                evaluations=tuple(found.get("evaluations", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = f"'{path}' is not what a run writes"
            raise RunError("release.metrics-malformed", problem, "restore it, or train again") from None


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """The leaves of a ledger up to its newest checkpoint, as they bear on one run.

    epochs     (leaf, epoch) of the run, in order
    plans      by digest; of every epoch of the run
    later      epochs of the run that no checkpoint covers
    split      classes of which an epoch of any run charges signed bounds and not the whole class
    spent      charges of all runs, up to the checkpoint
    """

    run: bytes
    checkpoint: LedgerCheckpoint
    checkpoint_text: str
    header_hash: bytes
    time: int
    epochs: tuple[tuple[int, Epoch], ...]
    plans: Mapping[bytes, StepPlan]
    later: int
    split: frozenset[str]
    spent: RecordedSpend = field(repr=False)

    @classmethod
    def read(cls, ledger: LedgerReader, run: bytes) -> RunEvidence:
        """What the ledger says of a run; RunError if it knows nothing of it."""
        text = ledger.latest()
        if text is None:
            problem = f"the ledger {ledger.name} has no checkpoint"
            raise RunError("release.ledger-not-signed", problem, "sign one: lamina ledger checkpoint LEDGER")
        checkpoint, _ = parse_checkpoint(text)
        mine: list[tuple[int, Epoch]] = []
        split: set[str] = set()
        for leaf in ledger.of_kind(Epoch):
            assert isinstance(leaf.record, Epoch)
            whole = {account.cls for account in leaf.record.accounts if not account.noise_multiplier}
            split |= {account.cls for account in leaf.record.accounts} - whole
            if leaf.record.run == run:
                mine.append((leaf.seq, leaf.record))
        covered = tuple((seq, epoch) for seq, epoch in mine if seq < checkpoint.size)
        if not covered:
            problem = f"the ledger {ledger.name} has no signed record of run {run.hex()[:8]}"
            raise RunError("release.run-not-in-ledger", problem, "name the ledger in which it was charged: --ledger")
        plans: dict[bytes, StepPlan] = {}
        for _, epoch in covered:
            data = ledger.blob(epoch.plan)
            if data is None:
                problem = f"the ledger {ledger.name} lacks the plan {epoch.plan.hex()[:16]} of run {run.hex()[:8]}"
                raise RunError("release.plan-missing", problem, "restore the ledger from a copy")
            plans.setdefault(epoch.plan, StepPlan.from_cbor(data))
        spent = RecordedSpend(ledger.header)
        with ledger.store.read() as rows:
            spent.follow(rows, checkpoint.size, ledger.checked(rows))
        return cls(
            run=run, checkpoint=checkpoint, checkpoint_text=text, header_hash=ledger.header_hash,
            time=ledger.leaf(checkpoint.size - 1).time, epochs=covered, plans=plans,
            later=len(mine) - len(covered), split=frozenset(split), spent=spent,
        )  # fmt: skip

    @property
    def plan(self) -> StepPlan:
        """The plan of its last epoch."""
        return self.plans[self.epochs[-1][1].plan]

    @property
    def steps(self) -> int:
        """The step that the model is at: where the last segment ends whose steps are in it."""
        closed = [s for _, epoch in self.epochs for s in epoch.segments if s.outcome is SegmentOutcome.CLOSED]
        return closed[-1].last if closed else 0

    def classes(self) -> list[PlannedClass]:
        """The classes of all plans of the run, each as its newest plan has it; as a private one, if it ever was that."""
        found: dict[str, PlannedClass] = {}
        for _, epoch in self.epochs:
            for entry in self.plans[epoch.plan].classes:
                if not entry.public or found.get(entry.name, entry).public:
                    found[entry.name] = entry
        return list(found.values())

    @property
    def spending(self) -> Spending:
        """What all runs of the ledger cost together."""
        return self.spent.spending

    def events(self, bound: tuple[str, int, int]) -> dict[EventKey, int]:
        """What this run was charged for an account."""
        return self.spent.of_run(self.run, account_name(bound))

    def charged(self, cls: str) -> bool:
        """Whether the account of the whole class says what any of its members can have lost: no epoch leaves it out."""
        return cls not in self.split and (cls, 0, 0) in self.bounds()

    def bounds(self) -> list[tuple[str, int, int]]:
        """The accounts that it charged."""
        return sorted({account.bound for _, epoch in self.epochs for account in epoch.accounts})

    def scale(self, bound: tuple[str, int, int]) -> float:
        """The largest scale at which contributions of an account took part; 0 if they were left out of every segment."""
        return max(a.scaled for _, epoch in self.epochs for a in epoch.accounts if a.bound == bound)

    def abandoned_steps(self) -> list[int]:
        """How many steps each attempt had whose steps are not in the model."""
        segments = (each for _, epoch in self.epochs for each in epoch.segments)
        return [each.last - each.first for each in segments if each.outcome is SegmentOutcome.ABANDONED]

    def reached(self) -> dict[str, tuple[str, ...]]:
        """By layer, the classes whose gradient may have entered it in a step that is in the model."""
        found: dict[str, dict[str, None]] = {}
        for _, epoch in self.closed():
            plan = self.plans[epoch.plan]
            for at, layer in enumerate(plan.layers):
                classes = found.setdefault(layer.name, {})
                classes |= {entry.name: None for k, entry in enumerate(plan.classes) if plan.clip[k][at] > 0}
        return {name: tuple(classes) for name, classes in found.items()}

    def least_noise(self) -> dict[str, float]:
        """By layer, the least S that was applied in a step that is in the model."""
        found: dict[str, float] = {}
        for _, epoch in self.closed():
            for _, variance in epoch.applied:
                for layer, value in zip(self.plans[epoch.plan].layers, variance, strict=True):
                    found[layer.name] = min(found.get(layer.name, float("inf")), value**0.5)
        return found

    def closed(self) -> list[tuple[int, Epoch]]:
        """Its epochs of which steps are in the model."""
        return [
            (seq, epoch)
            for seq, epoch in self.epochs
            if any(each.outcome is SegmentOutcome.CLOSED for each in epoch.segments)
        ]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_HASH_CHUNK):
            state.update(data)
    return state.hexdigest()
