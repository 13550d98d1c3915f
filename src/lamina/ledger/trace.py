"""`trace`: everything that happened to one contribution, from its admission to the models that it is in.

    admitted     when, under which bound, how deep
    epochs       those in which it was eligible: the noise that was applied, and what it has lost after each
    withdrawn    when, and why
    releases     models that were trained while it was eligible

Eligible is not sampled: who took part in which step is known to nobody, and stands nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lamina.account.pooled import Events, pooled
from lamina.errors import LaminaError
from lamina.ledger.amounts import UNBOUNDED, nano
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
)
from lamina.ledger.spend import Bound, due, followed_order, signed_spend, summed
from lamina.ledger.view import View
from lamina.plan.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One epoch in which it was eligible.

    variance    S² of the layers that its class reaches, as applied; by name, where the plan is known
    multiplier  sigma of one step, for this contribution
    spend       ε that it has lost after this epoch, in 1e-9, over all runs: by its own charges alone
    account     what the ledger states for its bound; not less, since others were eligible before it
    own         whether its bound has an account here. If not, it counts with its class as a whole, or with a stricter
                bound where the class has no account: then `spend` is the most that it can have lost, if it was used
    """

    leaf: Leaf
    segments: tuple[Segment, ...]
    variance: dict[str, float]
    multiplier: float
    spend: int
    account: int
    own: bool = True

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

    @property
    def remaining(self) -> int | None:
        """What it may still lose of what it signed, in 1e-9; None if it is public."""
        if self.signed is None or self.signed == UNBOUNDED:
            return self.signed
        return max(0, self.signed - self.spend)

    @property
    def shared(self) -> int:
        """Epochs in which its bound had no account of its own."""
        return sum(not each.own for each in self.epochs)

    def to_dict(self) -> dict[str, Any]:
        """For machines; ε as plain numbers, null where it is infinite."""
        from lamina.ledger.trace_form import as_object

        return as_object(self)


def trace(ledger: View, leaf: Leaf) -> Trace:
    """The trace of the contribution in a leaf."""
    story, epochs = _Story(ledger, leaf), []
    events: dict[tuple[float, float, float], int] = {}
    for each in story.epochs():
        for kind, steps in summed(each.charges).items():
            events[kind] = events.get(kind, 0) + steps
        epochs.append(
            Exposure(
                leaf=each.leaf,
                segments=each.segments,
                variance=_variance(each.plan, each.epoch, story.record.terms.cls),
                multiplier=min((one.sigma for one in each.charges), default=math.inf),
                spend=_priced(ledger, events),
                account=0 if each.account is None else each.account.spend,
                own=each.account is None or each.account.bound == story.record.bound,
            )
        )
    return Trace(
        leaf=leaf,
        epochs=tuple(epochs),
        withdrawal=story.withdrawal,
        releases=story.releases(),
        signed=story.signed(),
        unused=story.unused,
    )


@dataclass(frozen=True, slots=True)
class Lost:
    """What a contribution has lost so far, in 1e-9, of what it signed; in how many epochs; and its releases."""

    spend: int
    signed: int | None
    epochs: int
    releases: tuple[Leaf, ...]


def lost(ledger: View, leaf: Leaf) -> Lost:
    """The sum of a trace: an accountant is asked once."""
    story = _Story(ledger, leaf)
    epochs = list(story.epochs())
    events = summed(charge for each in epochs for charge in each.charges)
    return Lost(_priced(ledger, events), story.signed(), len(epochs), story.releases())


class _Eligible(NamedTuple):
    """An epoch in which it was eligible, and what it was charged itself."""

    leaf: Leaf
    epoch: Epoch
    segments: tuple[Segment, ...]
    plan: StepPlan | None
    account: Account | None
    charges: tuple[Charge, ...]


class _Story:
    def __init__(self, ledger: View, leaf: Leaf) -> None:
        self._ledger, self._leaf = ledger, leaf
        assert isinstance(leaf.record, Admitted)
        self.record = leaf.record
        withdrawn = ledger.withdrawn(leaf.seq)
        self.withdrawal = None if withdrawn is None else ledger.leaf(withdrawn)
        self.unused = 0
        self._revoked = [
            (event.seq, event.record.effective)
            for event in ledger.of_kind(KeyEvent, leaf.seq)
            if isinstance(event.record, KeyEvent)
            and event.record.change is Change.REVOKE
            and event.record.target == self.record.key
        ]
        self._closed: list[tuple[bytes, int]] = []  # (run, leaf) of epochs that put it into a model

    def signed(self) -> int | None:
        """The most that it may lose."""
        z = self.record.terms.noise_multiplier
        return signed_spend(z, self._ledger.header.delta) if z else None

    def epochs(self) -> Iterator[_Eligible]:
        """The epochs in which it was eligible, and charged if it is private; the others are counted."""
        for leaf in self._ledger.of_kind(Epoch, self._leaf.seq):
            epoch = leaf.record
            assert isinstance(epoch, Epoch)
            segments = tuple(each for each in epoch.segments if self._eligible(each))
            account = account_of(epoch.accounts, self.record.bound)
            if segments and account is None and self.record.terms.noise_multiplier:
                self.unused += 1
            elif segments:
                plan = self._plan(epoch)
                charges = () if account is None else _own(plan, account, segments)
                if any(each.outcome is Outcome.CLOSED for each in segments):
                    self._closed.append((epoch.run, leaf.seq))
                yield _Eligible(leaf, epoch, segments, plan, account, charges)

    def releases(self) -> tuple[Leaf, ...]:
        """The releases of runs that trained while it was eligible; after `epochs` was read."""
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
        return not gone and time < self.record.expires

    def _plan(self, epoch: Epoch) -> StepPlan | None:
        data = self._ledger.blob(epoch.plan)
        return None if data is None else StepPlan.from_cbor(data)


def _priced(ledger: View, events: Events) -> int:
    return nano(pooled(events, delta=ledger.header.delta, name=ledger.header.accountant))


def account_of(accounts: Sequence[Account], bound: Bound) -> Account | None:
    """The account that a bound is charged to: its own, its class's, or a stricter one that it was taken to.

    Of the last two its class's loses more: where it is not known which it was, nothing is told too small.
    """
    cls, clip, noise = bound
    mine = [each for each in accounts if each.cls == cls]
    exact = [each for each in mine if each.bound == bound]
    stricter = [
        each for each in mine if each.noise_multiplier >= noise and 0 < each.clip_norm <= clip and noise
    ]
    nearest = sorted(stricter, key=lambda each: (each.noise_multiplier, -each.clip_norm))
    whole = [each for each in mine if not each.noise_multiplier]
    return next(iter([*exact, *whole, *nearest]), None)


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
