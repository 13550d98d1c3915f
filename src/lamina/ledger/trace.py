"""`trace`: everything that happened to one contribution, from its admission to the models that it is in.

    admitted     when, under which bound, how deep
    epochs       those in which it was eligible: the noise that was applied, and what it has lost after each
    withdrawn    when, and why
    releases     models that were trained while it was eligible

Eligible is not sampled: who took part in which step is known to nobody, and stands nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina.admit.times import shown
from lamina.errors import LaminaError
from lamina.ledger.amounts import NANO, UNBOUNDED, nano
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import (
    Account,
    Admitted,
    Change,
    Charge,
    Epoch,
    KeyEvent,
    Outcome,
    Release,
    Segment,
    Withdrawal,
)
from lamina.ledger.spend import Bound, Events, due, followed_order, price, signed_spend, summed
from lamina.ledger.view import View
from lamina.plan.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One epoch in which it was eligible.

    variance    S² of the layers that its class reaches, as applied; by name, where the plan is known
    multiplier  sigma of one step, for this contribution
    spend       ε that it has lost after this epoch, in 1e-9, over all runs: by its own charges alone
    account     what the ledger states for its bound; not less, since others were eligible before it
    """

    leaf: Leaf
    segments: tuple[Segment, ...]
    variance: dict[str, float]
    multiplier: float
    spend: int
    account: int

    @property
    def steps(self) -> int:
        return sum(each.last - each.first for each in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a ledger says of one contribution."""

    leaf: Leaf
    epochs: tuple[Exposure, ...]
    withdrawal: Leaf | None
    releases: tuple[Leaf, ...]
    signed: int | None  # the most that it may lose, in 1e-9; None if it is public
    unused: int  # epochs in which it was eligible and nobody with its bound was charged

    @property
    def record(self) -> Admitted:
        assert isinstance(self.leaf.record, Admitted)
        return self.leaf.record

    @property
    def spend(self) -> int:
        """What it has lost so far."""
        return self.epochs[-1].spend if self.epochs else 0

    def to_dict(self) -> dict[str, Any]:
        """For machines; ε as plain numbers, null where it is infinite."""
        record = self.record
        return {
            "index": self.leaf.seq,
            "admitted": shown(self.leaf.time),
            "descriptor": record.descriptor.hex(),
            "anchor": None if record.anchor is None else record.anchor.hex(),
            "attestation": record.attestation.hex(),
            "key": record.key.hex(),
            "class": record.terms.cls,
            "data_class": record.terms.data_class,
            "clip_norm": record.terms.clip_norm / 1e6,
            "noise_multiplier": record.terms.noise_multiplier / 1e6,
            "profile": record.terms.profile,
            "expires": shown(record.expires),
            "epsilon": plain(self.spend),
            "epsilon_signed": None if self.signed is None else plain(self.signed),
            "epochs": [_epoch(each) for each in self.epochs],
            "not_used_in": self.unused,
            "withdrawn": None if self.withdrawal is None else _withdrawal(self.withdrawal),
            "releases": [_release(each) for each in self.releases],
        }


def trace(ledger: View, leaf: Leaf) -> Trace:
    """The trace of the contribution in a leaf."""
    record = leaf.record
    assert isinstance(record, Admitted)
    story = _Story(ledger, leaf)
    epochs, unused = story.exposures()
    private = record.terms.noise_multiplier
    return Trace(
        leaf=leaf,
        epochs=tuple(epochs),
        withdrawal=story.withdrawal,
        releases=story.releases(),
        signed=signed_spend(private, ledger.header.delta) if private else None,
        unused=unused,
    )


class _Story:
    def __init__(self, ledger: View, leaf: Leaf) -> None:
        self._ledger, self._leaf = ledger, leaf
        assert isinstance(leaf.record, Admitted)
        self._record = leaf.record
        withdrawn = ledger.withdrawn(leaf.seq)
        self.withdrawal = None if withdrawn is None else ledger.leaf(withdrawn)
        self._revoked = [
            (event.seq, event.record.effective)
            for event in ledger.of_kind(KeyEvent, leaf.seq)
            if isinstance(event.record, KeyEvent)
            and event.record.change is Change.REVOKE
            and event.record.target == self._record.key
        ]
        self._closed: list[tuple[bytes, int]] = []  # (run, leaf) of epochs that put it into a model

    def exposures(self) -> tuple[list[Exposure], int]:
        """The epochs in which it was eligible and charged; and how many others it was eligible in."""
        found, unused, events = [], 0, dict[tuple[float, float, float], int]()
        for leaf in self._ledger.of_kind(Epoch, self._leaf.seq):
            epoch = leaf.record
            assert isinstance(epoch, Epoch)
            segments = tuple(each for each in epoch.segments if self._eligible(each))
            if not segments:
                continue
            plan = self._plan(epoch)
            account = account_of(epoch.accounts, self._record.bound)
            if account is None and self._record.terms.noise_multiplier:
                unused += 1
                continue
            charges = () if account is None else _own(plan, account, segments)
            for kind, steps in summed(charges).items():
                events[kind] = events.get(kind, 0) + steps
            if any(each.outcome is Outcome.CLOSED for each in segments):
                self._closed.append((epoch.run, leaf.seq))
            found.append(
                Exposure(
                    leaf=leaf,
                    segments=segments,
                    variance=_variance(plan, epoch, self._record.terms.cls),
                    multiplier=min((each.sigma for each in charges), default=math.inf),
                    spend=self._priced(events),
                    account=0 if account is None else account.spend,
                )
            )
        return found, unused

    def releases(self) -> tuple[Leaf, ...]:
        """The releases of runs that trained while it was eligible."""
        return tuple(
            leaf
            for leaf in self._ledger.of_kind(Release, self._leaf.seq)
            if isinstance(leaf.record, Release)
            and any(run in leaf.record.runs and seq < leaf.seq for run, seq in self._closed)
        )

    def _eligible(self, segment: Segment) -> bool:
        """Whether it was a member when the segment's members were frozen."""
        before = segment.eligibility
        if before <= self._leaf.seq or (self.withdrawal is not None and self.withdrawal.seq < before):
            return False
        try:
            time = self._ledger.leaf(before - 1).time
        except LaminaError:  # that leaf is pruned
            return True
        gone = any(seq < before and effective <= time for seq, effective in self._revoked)
        return not gone and time < self._record.expires

    def _plan(self, epoch: Epoch) -> StepPlan | None:
        data = self._ledger.blob(epoch.plan)
        return None if data is None else StepPlan.from_cbor(data)

    def _priced(self, events: Events) -> int:
        header = self._ledger.header
        return nano(price(events, delta=header.delta, name=header.accountant))


def account_of(accounts: Sequence[Account], bound: Bound) -> Account | None:
    """The account that a bound is charged to: its own, a stricter one that it was taken to, or its class's."""
    cls, clip, noise = bound
    mine = [each for each in accounts if each.cls == cls]
    exact = [each for each in mine if each.bound == bound]
    stricter = [
        each for each in mine if each.noise_multiplier >= noise and 0 < each.clip_norm <= clip and noise
    ]
    nearest = sorted(stricter, key=lambda each: (each.noise_multiplier, -each.clip_norm))
    whole = [each for each in mine if not each.noise_multiplier]
    return next(iter([*exact, *nearest, *whole]), None)


def _own(plan: StepPlan | None, account: Account, segments: Sequence[Segment]) -> tuple[Charge, ...]:
    """What it was charged itself: for the segments in which it was eligible, where that can be told apart."""
    if plan is None or followed_order(plan) is not None or plan.injection.occurrences is not None:
        return account.charges
    return due(plan, account.cls, account.scale, segments)


def _variance(plan: StepPlan | None, epoch: Epoch, cls: str) -> dict[str, float]:
    if plan is None:
        return {f"layer {at}": value for at, value in enumerate(epoch.variance)}
    reached = plan.clip[plan.index(cls)] if any(each.name == cls for each in plan.classes) else ()
    return {
        layer.name: value
        for layer, value, clip in zip(plan.layers, epoch.variance, reached, strict=False)
        if clip > 0
    }


# ----------------------------------------------------------------------------------- for machines


def plain(spend: int) -> float | None:
    """ε as a number."""
    return None if spend == UNBOUNDED else spend / NANO


def _epoch(each: Exposure) -> dict[str, Any]:
    epoch = each.leaf.record
    assert isinstance(epoch, Epoch)
    return {
        "index": each.leaf.seq,
        "time": shown(each.leaf.time),
        "run": epoch.run.hex(),
        "plan": epoch.plan.hex(),
        "segments": [
            {"segment": one.index, "generation": one.generation, "steps": [one.first, one.last],
             "outcome": one.outcome.name.lower()}
            for one in each.segments
        ],
        "variance": each.variance,
        "multiplier": each.multiplier if math.isfinite(each.multiplier) else None,
        "steps": each.steps,
        "epsilon": plain(each.spend),
        "epsilon_account": plain(each.account),
    }  # fmt: skip


def _withdrawal(leaf: Leaf) -> dict[str, Any]:
    record = leaf.record
    assert isinstance(record, Withdrawal)
    return {
        "index": leaf.seq,
        "time": shown(leaf.time),
        "reason": record.reason.name.lower(),
        "effect": record.effect.name.lower(),
        "request": None if record.request is None else record.request.hex(),
    }


def _release(leaf: Leaf) -> dict[str, Any]:
    record = leaf.record
    assert isinstance(record, Release)
    return {
        "index": leaf.seq,
        "time": shown(leaf.time),
        "manifest": record.manifest.hex(),
        "runs": [run.hex() for run in record.runs],
        "not_after": None if record.not_after is None else shown(record.not_after),
    }
