"""What pages show of a ledger: classes and their budgets over time, runs, layers, withdrawals, releases.

Everything here is public: it is in the ledger, or follows from it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lamina.errors import LaminaError
from lamina.ledger.governance_records import Header, PolicyChange, Release, Withdrawal, parse_profile
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import (
    KIND_NAMES,
    ContributionRecord,
    Epoch,
    KeptContribution,
    Leaf,
    SegmentOutcome,
    decode_leaf,
)
from lamina.ledger.schema import UNBOUNDED
from lamina.ledger.show import describe_by, describe_leaf, epsilon_or_none
from lamina.ledger.signed_checkpoint import parse_checkpoint
from lamina.ledger.spending import signed_spend
from lamina.plan.step_plan import StepPlan
from lamina.release.posture import Posture, read_posture
from lamina.release.run_evidence import RunEvidence
from lamina.sign.keys import format_utc

PAGE_ROWS = 50  # contributions on one page


@dataclass(kw_only=True)
class ClassView:
    """A class in a ledger. `points` are (number of the epoch, time, ε after it); `bound` is what its policy allows."""

    name: str
    public: bool
    profile: str
    population: int | None
    bound: float | None
    unit: str = "contribution"
    admitted: int = 0
    withdrawn: int = 0
    points: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def epsilon(self) -> float:
        """What everybody who was always there has lost."""
        return self.points[-1][2] if self.points else 0.0

    @property
    def remaining(self) -> float | None:
        """Of the bound; None without one."""
        return None if self.bound is None else max(0.0, self.bound - self.epsilon)


def _reach(profile: str) -> str:
    """Return a depth profile in words; a digest of a long one, and a profile that this version does not know, as they are."""
    try:
        return parse_profile(profile).words()
    except (LaminaError, ValueError, TypeError, ArithmeticError, RecursionError):  # whatever its signer wrote
        return profile


class LedgerView:
    """A ledger as pages show it. `follow` reads what is new since the last call."""

    def __init__(self, ledger: LedgerReader) -> None:
        self.ledger = ledger
        self.classes: dict[str, ClassView] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.withdrawals: list[dict[str, Any]] = []
        self.releases: list[dict[str, Any]] = []
        self.size = self.epochs = self.contributions = self.time = 0
        self._turn = threading.Lock()  # pages are made in several threads, and each leaf counts once
        self._plans: dict[bytes, StepPlan | None] = {}
        self._read_policy(ledger.header)

    def follow(self, most: int | None = None, ledger: LedgerReader | None = None) -> bool:
        """Read on, at most so many leaves; whether it is up to date. `ledger`: through another connection."""
        ledger = ledger or self.ledger
        with self._turn:
            end = ledger.size
            stop = end if most is None else min(end, self.size + most)
            for _, data in ledger.raw_leaves(self.size, stop):
                self._see(decode_leaf(data))
            self.size = stop
            return stop == end

    def _see(self, leaf: Leaf) -> None:
        record = leaf.record
        self.time = leaf.time
        if isinstance(record, ContributionRecord | KeptContribution):
            self.contributions += 1
            if (cls := self.classes.get(record.bound.cls)) is not None:
                cls.admitted += 1
        elif isinstance(record, Epoch):
            self._see_epoch(leaf, record)
        elif isinstance(record, Withdrawal):
            target = self.ledger.leaf(record.target).record
            name = target.bound.cls if isinstance(target, ContributionRecord | KeptContribution) else "unknown"
            if name in self.classes:
                self.classes[name].withdrawn += 1
            told = {"index": leaf.seq, "target": record.target, "cls": name, "time": format_utc(leaf.time)}
            self.withdrawals.append(told | {"reason": record.reason.name.lower(), "by": describe_by(record)})
        elif isinstance(record, PolicyChange):
            self._read_policy(record)
        elif isinstance(record, Release):
            told_release = {"index": leaf.seq, "time": format_utc(leaf.time), "manifest": record.manifest.hex()}
            until = None if record.not_after is None else format_utc(record.not_after)
            runs = [each.hex() for each in record.runs]
            self.releases.append(told_release | {"not_after": until, "runs": runs})

    def _read_policy(self, record: Header | PolicyChange) -> None:
        for preset in record.presets:
            bound = signed_spend(preset.noise_multiplier, self.ledger.header.delta) if preset.noise_multiplier else None
            new = ClassView(name=preset.cls, public=preset.public, profile="", population=None, bound=None)
            made = self.classes.setdefault(preset.cls, new)
            made.public, made.profile, made.population = preset.public, _reach(preset.profile), preset.population
            made.bound = None if bound is None or bound == UNBOUNDED else epsilon_or_none(bound)

    def _see_epoch(self, leaf: Leaf, epoch: Epoch) -> None:
        self.epochs += 1
        for account in epoch.accounts:
            if not account.noise_multiplier and account.cls in self.classes:
                spent = epsilon_or_none(account.spend)
                point = (self.epochs, leaf.time, float("inf") if spent is None else spent)
                self.classes[account.cls].points.append(point)
        plan = self.plan(epoch.plan)
        for entry in () if plan is None else plan.classes:
            if entry.name in self.classes:
                self.classes[entry.name].unit = entry.unit
        run = self.runs.setdefault(epoch.run.hex(), {"steps": 0, "abandoned": 0, "epochs": 0, "last": ""})
        for each in epoch.segments:
            kind = "steps" if each.outcome is SegmentOutcome.CLOSED else "abandoned"
            run[kind] += each.last - each.first
        run["epochs"] += 1
        run["last"] = format_utc(leaf.time)

    def plan(self, digest: bytes) -> StepPlan | None:
        """A plan by its digest."""
        if digest not in self._plans:
            data = self.ledger.blob(digest)
            self._plans[digest] = None if data is None else StepPlan.from_cbor(data)
        return self._plans[digest]

    # ------------------------------------------------------------------------------------ what pages ask for

    @property
    def origin(self) -> str:
        return self.ledger.origin

    def head(self) -> dict[str, Any]:
        """Size, root and the newest checkpoint."""
        text = self.ledger.latest()
        signed = 0 if text is None else parse_checkpoint(text)[0].size
        tree = self.ledger.tree()
        return {"size": tree.size, "root": tree.root.hex(), "signed": signed, "checkpoint": text}

    def run_list(self) -> list[dict[str, Any]]:
        """Return every run, the newest last: steps in the model, abandoned steps, epochs, and the end of the last epoch."""
        return [{"id": name, **found} for name, found in self.runs.items()]

    def posture(self, run: str) -> tuple[Posture, StepPlan] | None:
        """The posture of a run's model, and its plan; None before its first signed epoch or without closed steps."""
        try:
            evidence = RunEvidence.read(self.ledger, bytes.fromhex(run))
        except (ValueError, LookupError):
            return None
        return (read_posture(self.ledger, [evidence]), evidence.plan) if evidence.closed() else None

    def rows(self, first: int, count: int = PAGE_ROWS) -> tuple[list[dict[str, Any]], int | None]:
        """Contributions from a leaf on, and the leaf from which the next page goes on; None after the last leaf."""
        found: list[dict[str, Any]] = []
        first, size = max(0, first), self.ledger.size
        end = min(size, first + 20 * count)  # enough of a stretch with few
        for at in range(first, end, count):
            for seq, data in self.ledger.raw_leaves(at, min(end, at + count)):
                if len(found) == count:
                    return found, seq
                leaf = decode_leaf(data)
                if leaf.kind is ContributionRecord:
                    found.append(self.row(leaf))
        return found, end if end < size else None

    def row(self, leaf: Leaf) -> dict[str, Any]:
        """A contribution as a list shows it."""
        record = leaf.record
        assert isinstance(record, ContributionRecord | KeptContribution)
        facts = {"index": leaf.seq, "time": format_utc(leaf.time), "expires": format_utc(record.expires)}
        facts |= {"descriptor": record.descriptor.hex(), "cls": record.bound.cls}
        withdrawn, pruned = self.ledger.withdrawn(leaf.seq) is not None, isinstance(record, KeptContribution)
        return facts | {"withdrawn": withdrawn, "pruned": pruned}

    def recent(self, count: int = 20) -> Iterator[tuple[int, str, str, str]]:
        """The newest leaves that are no contributions: (index, time, kind, what it says)."""
        size = self.ledger.size
        leaves = [leaf for leaf in self.ledger.leaves(max(0, size - 400), size) if leaf.kind is not ContributionRecord]
        for leaf in leaves[: -count - 1 : -1]:
            yield leaf.seq, format_utc(leaf.time), KIND_NAMES[leaf.kind], describe_leaf(leaf)
