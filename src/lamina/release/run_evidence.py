"""What the ledger records about a run (start, epochs, plans, charges, end), and the figures in the folder of the run."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, TypeVar

from lamina.account.charges import Account
from lamina.account.schedule import EventKey
from lamina.codec import schema_of
from lamina.errors import RunError
from lamina.ledger.records import Epoch, SegmentOutcome
from lamina.ledger.run_records import ProgramVersions, RunBegin, RunEnd
from lamina.ledger.show import record_to_dict
from lamina.ledger.signed_checkpoint import LedgerCheckpoint, parse_checkpoint
from lamina.ledger.spending import Spending
from lamina.plan.risk import ZERO_OUT, curve_marks
from lamina.plan.step_plan import PlannedClass, StepPlan
from lamina.release.enclosed_ledger import ReadableLedger
from lamina.sign.keys import read_small
from lamina.sign.signed_json import parse_json

_MAX_METRICS_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetrics:
    """metrics.json of a run. It is for people and not signed; a certificate takes only the name of the run from it.

    stated  the fields that the end record of the run states as well
    """

    run: bytes
    notes: tuple[str, ...]
    evaluations: tuple[Mapping[str, Any], ...]
    stated: Mapping[str, Any]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RunMetrics:
        """Read metrics.json in the folder of a run; raise RunError if it is missing or malformed."""
        path = Path(folder) / "metrics.json"
        if not path.is_file():
            problem = f"'{folder}' is no folder of a run that has begun: it has no metrics.json"
            inside = sorted(str(each.parent) for each in Path(folder).glob("*/metrics.json"))
            named = f"; runs in it: {', '.join(inside[:3])}" if inside else ": runs/NAME"
            raise RunError("release.not-a-run", problem, f"name the folder that lamina train wrote{named}")
        found = parse_json(read_small(path, "the figures of the run", most=_MAX_METRICS_BYTES), f"'{path}'")
        try:
            run = bytes.fromhex(found["run"])
            caps = {name: entry.get("max_occurrences") for name, entry in found["classes"].items()}
            known = {name: found.get(name) for name in ("steps", "plan")}
            final = {name: found.get(name) for name in ("conditions", "files")}
            if len(run) != 16 or not all(isinstance(each, dict | None) for each in final.values()):
                raise ValueError
            known |= final | {"max_occurrences": {name: cap for name, cap in caps.items() if cap is not None}}
            notes, evaluations = tuple(map(str, found.get("notes", ()))), tuple(found.get("evaluations", ()))
            return cls(run=run, notes=notes, evaluations=evaluations, stated=known)
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = f"'{path}' is not what a run writes"
            raise RunError("release.metrics-malformed", problem, "restore it, or open the run again") from None

    def differences(self, end: RunEnd, adjacency: str) -> list[str]:
        """Return the fields that differ from the end record of the run. Missing fields do not count as different."""
        conditions, files = self.stated["conditions"], self.stated["files"]
        recorded = {"steps": end.steps, "plan": end.plan.hex(), "max_occurrences": end.max_occurrences}
        found = [name for name, value in recorded.items() if not _same(self.stated[name], value)]
        if conditions is not None:
            stated = end.conditions(adjacency)
            found += [f"conditions.{name}" for name in stated if not _same(conditions.get(name), stated[name])]
        if files is not None:
            found += [f"files.{name}" for name in end.digests if files.get(name) != end.digests[name]]
        return found


def _same(one: object, two: object) -> bool:
    """Return whether two values are equal and of one type: 1 is not true."""
    return type(one) is type(two) and one == two


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """The leaves of a ledger up to its newest checkpoint, as they bear on one run.

    begin, end (leaf, record) of its start and its newest end; None if they are not recorded
    epochs     (leaf, epoch) of the run, in order
    plans      by digest; of every epoch of the run
    later      epochs of the run that no checkpoint covers
    leaves     by run, the leaves of all epochs up to the checkpoint; of every run in the ledger
    all_plans  by run, the plans of these epochs
    ends       by run, (leaf, record) of the newest end up to the checkpoint
    split      classes of which an epoch of any run charges signed bounds and not the whole class
    spent      charges of all runs, up to the checkpoint
    first_leaves  by run, the first leaf that is about it, up to the checkpoint
    signed     by signed bound that the run charged, how many contributions of the ledger have it, up to the checkpoint
    admitted   by class, how many contributions the ledger had when the run first read its members
    evaluation the bytes of evaluation.json, which are in no ledger; None if they are not given
    """

    run: bytes
    checkpoint: LedgerCheckpoint
    checkpoint_text: str
    header_hash: bytes
    time: int
    begin: tuple[int, RunBegin] | None
    end: tuple[int, RunEnd] | None
    epochs: tuple[tuple[int, Epoch], ...]
    plans: Mapping[bytes, StepPlan]
    later: int
    leaves: Mapping[bytes, tuple[int, ...]]
    all_plans: Mapping[bytes, tuple[StepPlan, ...]]
    ends: Mapping[bytes, tuple[int, RunEnd]]
    split: frozenset[str]
    spending: Spending = field(repr=False)
    first_leaves: Mapping[bytes, int]
    signed: Mapping[Account, int]
    admitted: Mapping[str, int]
    evaluation: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(cls, ledger: ReadableLedger, run: bytes, checkpoint: str | None = None) -> RunEvidence:
        """Read what the ledger records about a run up to a checkpoint, by default the newest; raise RunError if nothing.

        Neither the ledger nor the checkpoint is verified here. Leaves after a given checkpoint do not count.
        """
        text = ledger.latest() if checkpoint is None else checkpoint
        if text is None:
            problem = f"the ledger {ledger.name} has no checkpoint"
            raise RunError("release.ledger-not-signed", problem, "sign one: lamina ledger checkpoint LEDGER")
        (head, _), spending = parse_checkpoint(text), Spending(ledger.header)
        mine: list[tuple[int, Epoch]] = []
        leaves: dict[bytes, list[int]] = {}
        planned: dict[bytes, dict[bytes, None]] = {}  # digests by run
        begins = ledger.of_kind(RunBegin, 0, head.size)
        firsts = [(leaf.seq, leaf.record.run) for leaf in begins if isinstance(leaf.record, RunBegin)]
        for leaf in ledger.of_kind(Epoch, 0, None if checkpoint is None else head.size):
            assert isinstance(leaf.record, Epoch)
            if leaf.seq >= head.size:
                mine += [(leaf.seq, leaf.record)] if leaf.record.run == run else []
                continue
            leaves.setdefault(leaf.record.run, []).append(leaf.seq)
            planned.setdefault(leaf.record.run, {})[leaf.record.plan] = None
            spending.add(leaf.record)
            firsts.append((leaf.seq, leaf.record.run))
            if leaf.record.run == run:
                mine.append((leaf.seq, leaf.record))
        covered = tuple((seq, epoch) for seq, epoch in mine if seq < head.size)
        if not covered:
            problem = f"the ledger {ledger.name} has no signed record of run {run.hex()[:8]}"
            remedy = "name the ledger in which it was charged: --ledger"
            if began := [seq for seq, each in firsts if each == run]:
                problem = (
                    f"run {run.hex()[:8]} began in leaf {began[0]} of the ledger, which has no signed segment of it"
                )
                remedy = "repeat the command that trained it: this ends or continues the run"
            raise RunError("release.run-not-in-ledger", problem, remedy)
        plans: dict[bytes, StepPlan] = {}
        for owner, digest in ((owner, digest) for owner, digests in planned.items() for digest in digests):
            data = ledger.blob(digest)
            if data is None:
                problem = f"the ledger {ledger.name} lacks the plan {digest.hex()[:16]} of run {owner.hex()[:8]}"
                raise RunError("release.plan-missing", problem, "restore the ledger from a copy")
            plans.setdefault(digest, StepPlan.from_cbor(data))
        ends, first = (
            newest_by_run(ledger, RunEnd, head.size),
            min(e.eligibility for _, each in covered for e in each.segments),
        )
        admitted = Counter[str]()
        for bound, count in ledger.bound_counts(first).items():
            admitted[bound.cls] += count
        counts = ledger.bound_counts(head.size)
        signed = {
            each.bound: counts.get(each.bound, 0)
            for _, epoch in covered
            for each in epoch.accounts
            if each.bound.signed
        }
        return cls(
            run=run, checkpoint=head, checkpoint_text=text, header_hash=ledger.header_hash,
            begin=newest_by_run(ledger, RunBegin, head.size).get(run), end=ends.get(run), ends=ends,
            time=ledger.leaf(head.size - 1).time, epochs=covered, plans={each: plans[each] for each in planned[run]},
            later=len(mine) - len(covered), split=frozenset(spending.split), spending=spending,
            leaves={each: tuple(seqs) for each, seqs in leaves.items()},
            all_plans={each: tuple(plans[digest] for digest in digests) for each, digests in planned.items()},
            first_leaves={each: seq for seq, each in sorted(firsts, reverse=True)}, signed=signed, admitted=admitted,
        )  # fmt: skip

    @property
    def plan(self) -> StepPlan:
        """The plan under which the run ended; before its end, the plan of its last epoch."""
        return self.plans[self.epochs[-1][1].plan if self.end is None else self.end[1].plan]

    @property
    def ended(self) -> RunEnd:
        """The end of the run; raises RunError if the ledger records none."""
        if self.end is None:
            problem = f"the ledger has no signed record of the end of run {self.run.hex()[:8]}"
            remedy = "run the command that trained it again; this records the end"
            remedy += " and does not train a finished run further"
            raise RunError("release.run-not-ended", problem, remedy)
        return self.end[1]

    def program(self) -> dict[str, Any]:
        """Return the section `program` of a certificate: the trainer's statements about the program in the end record."""
        assert self.end is not None
        leaf, end = self.end
        unknown = {each.name: "not stated" for each in schema_of(ProgramVersions).fields}
        programs = map(record_to_dict, end.programs or ())
        stated = [{name: value or "none" for name, value in each.items()} for each in programs]
        return {"leaf": leaf, **(stated or [unknown])[-1], "earlier": stated[:-1]}

    def tuning(self) -> dict[str, Any]:
        """Return the section `tuning`: the runs of the ledger, and the optimiser by the start record of the run.

        The owner states other trials in [about].
        """
        leaves = sorted(self.first_leaves.values())
        return {
            "runs_in_ledger": len(leaves),
            "runs_before_this": leaves.index(self.first_leaves[self.run]),
            "leaves": leaves,
            "optimizer": (None if self.begin is None else self.begin[1].optimizer) or "not stated",
        }

    def classes(self) -> list[PlannedClass]:
        """Return the classes of all plans of the run from the newest plan; a class that was ever public is returned as public."""
        found: dict[str, PlannedClass] = {}
        for _, epoch in self.epochs:
            for entry in self.plans[epoch.plan].classes:
                if entry.public or not found.get(entry.name, entry).public:
                    found[entry.name] = entry
        return list(found.values())

    def purposes(self, cls: str) -> list[str]:
        """Return the purposes that every plan of the run allows a class."""
        stated = (set(each.purposes) for plan in self.plans.values() for each in plan.classes if each.name == cls)
        return sorted(reduce(and_, stated))

    @property
    def exposed(self) -> frozenset[str]:
        """The classes that some run of the ledger declared public: what they lost over all runs has no bound."""
        return frozenset[str]().union(*(plan.public_classes for each in self.all_plans.values() for plan in each))

    @property
    def continued(self) -> bool:
        """Return whether another run of the ledger wrote the starting weights."""
        return self.begin is not None and self.begin[1].parent is not None

    @property
    def attested(self) -> bool:
        """Return whether the run used signed contributions alone, by the leaves of the ledger.

        A run whose contributions nobody signed is refused by a ledger that has signed ones, so there are signed
        contributions before its first segment; and each epoch charges each private class by bounds that were signed.
        """
        charged = ({each.cls for each in epoch.accounts} for _, epoch in self.epochs)
        bounds = ({each.cls for each in epoch.accounts if self.signed.get(each.bound)} for _, epoch in self.epochs)
        return any(self.admitted.values()) and all(map(set.issubset, charged, bounds))

    def events(self, bound: Account) -> dict[EventKey, int]:
        """What this run was charged for an account."""
        return self.spending.events(bound, self.run)

    def runs(self, bound: Account) -> list[bytes]:
        """Return the runs that charged an account, up to the checkpoint."""
        return [run for run in self.all_plans if self.spending.events(bound, run)]

    def marks(self, runs: Sequence[bytes]) -> frozenset[str]:
        """Return the limits of the curves of these runs (`curve_marks`). A run without an end record claims no membership."""
        found = frozenset[str]().union(*(curve_marks(plan) for run in runs for plan in self.all_plans[run]))
        claimed = all(run in self.ends and not self.ends[run][1].public_number for run in runs)
        return found if claimed else found | {ZERO_OUT}

    def charged(self, cls: str) -> bool:
        """Whether the account of the whole class says what any of its members can have lost: no epoch leaves it out."""
        return cls not in self.split and Account(cls) in self.bounds()

    def bounds(self) -> list[Account]:
        """The accounts that it charged."""
        return sorted({account.bound for _, epoch in self.epochs for account in epoch.accounts})

    def scales(self, bound: Account) -> list[float]:
        """Return the scale at which contributions of an account took part in each epoch; 0 if they were left out."""
        return [a.scaled for _, epoch in self.epochs for a in epoch.accounts if a.bound == bound]

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
        return [(seq, epoch) for seq, epoch in self.epochs if in_model(epoch)]


def in_model(epoch: Epoch) -> bool:
    """Return whether steps of an epoch are in the model of its run."""
    return any(each.outcome is SegmentOutcome.CLOSED for each in epoch.segments)


R = TypeVar("R", RunBegin, RunEnd)


def newest_by_run(ledger: ReadableLedger, kind: type[R], size: int) -> dict[bytes, tuple[int, R]]:
    """Return the newest record of this kind by run, with its leaf."""
    found = ((leaf.seq, leaf.record) for leaf in ledger.of_kind(kind, 0, size))
    return {record.run: (seq, record) for seq, record in found if isinstance(record, kind)}


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
