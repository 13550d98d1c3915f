"""Everything that happened to one contribution: admission, epochs and spend, withdrawal, releases.

Eligible is not sampled: who took part in which step is known to nobody, and stands nowhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.schedule import Event, EventCounts, EventKey, add_events, event_counts
from lamina.admit.attestation import Attestation, Descriptor, commit
from lamina.admit.contribution_sources import Contribution
from lamina.errors import LaminaError
from lamina.ledger.governance_records import Header, KeyChange, KeyEvents, PolicyChange, Release
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import (
    ContributionRecord,
    Epoch,
    EpochAccount,
    KeptContribution,
    Leaf,
    Segment,
    SegmentOutcome,
)
from lamina.ledger.schema import UNBOUNDED, nano_epsilon
from lamina.ledger.show import epsilon_or_none, leaf_excerpt, leaf_to_dict
from lamina.ledger.spending import adaptive_order, planned_charges, signed_spend
from lamina.ledger.verify.contribution_checks import recorded_terms
from lamina.plan.step_plan import StepPlan
from lamina.sign.keys import format_utc


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochExposure:
    """One epoch in which it was eligible.

    variance    S² of the layers that its class reaches, the least that was applied; by name, where the plan is known
    events      what it was charged itself
    multiplier  sigma of one step, for this contribution
    spend       ε that it has lost after this epoch, in 1e-9, over all runs: by its own charges alone
    account     what the ledger states for its bound; not less, since others were eligible before it
    own         whether its bound has an account here. If not, it counts with its class as a whole, or with a stricter
                bound where the class has no account: then `spend` is the most that it can have lost, if it was used
    factor      below 1 where its bound was exhausted: its clip norms were multiplied by it; 0: it was left out
    exposed     whether it signed a bound, and the plan declares its class public or is not known: nothing bounds its loss
    """

    leaf: Leaf
    segments: tuple[Segment, ...]
    events: EventCounts
    variance: dict[str, float]
    multiplier: float
    spend: int
    account: int
    own: bool = True
    factor: float = 1.0
    exposed: bool = False

    @property
    def steps(self) -> int:
        return sum(each.last - each.first for each in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionTrace:
    """What a ledger says of one contribution."""

    leaf: Leaf
    epochs: tuple[EpochExposure, ...]
    withdrawal: Leaf | None
    releases: tuple[Leaf, ...]
    signed: int | None  # the most that it may lose, in 1e-9; None if it is public
    unused: int  # epochs in which it was eligible and nobody with its bound was charged
    depths: tuple[tuple[int, str], ...] = ()  # the depth profile of its class: from which leaf on, which

    @property
    def record(self) -> ContributionRecord | KeptContribution:
        """What the ledger holds of it: the whole record, or what its leaf says if its body is pruned."""
        assert isinstance(self.leaf.record, ContributionRecord | KeptContribution)
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
        """Digests in hexadecimal, times as UTC, ε as plain numbers, null where it is infinite."""
        told, gone = leaf_to_dict(self.leaf), self.withdrawal
        return {
            "index": self.leaf.seq,
            "admitted": told["time"],
            **{name: told[name] for name in ("descriptor", "anchor", "attestation", "key", "not_before", "expires")},
            **told["terms"],
            "pruned": told["pruned"],
            "depth": [{"index": seq, "profile": profile} for seq, profile in self.depths],
            "epsilon": epsilon_or_none(self.spend),
            "epsilon_signed": None if self.signed is None else epsilon_or_none(self.signed),
            "epsilon_remaining": None if self.remaining is None else epsilon_or_none(self.remaining),
            "epochs": [_exposure_to_dict(each) for each in self.epochs],
            "not_used_in": self.unused,
            "withdrawn": None if gone is None else leaf_excerpt(gone, "reason", "effect", "request", "by"),
            "releases": [leaf_excerpt(each, "manifest", "runs", "not_after") for each in self.releases],
        }


def leaf_differences(record: ContributionRecord | KeptContribution, given: Contribution) -> list[str]:
    """What in a leaf is not what the contributor has: descriptor, attestation, payload if any. Empty: all is equal."""
    if given.read_error is not None or given.descriptor is None or given.attestation is None:
        return [str(given.read_error[1] if given.read_error else "descriptor or attestation is missing")]
    try:
        signed, claims = Descriptor.decode(given.descriptor), Attestation.decode(given.attestation)
        payload = signed.commitment if given.payload is None else commit(signed.nonce, given.payload)
    except LaminaError as error:
        return [error.problem]
    there = {
        "descriptor": signed.digest(), "attestation": hashlib.sha256(given.attestation).digest(),
        "key": signed.contributor, "not_before": signed.not_before, "expires": signed.expires, "anchor": signed.anchor,
        "subject": None if claims.tag is None else bytes.fromhex(claims.tag), "payload": signed.commitment,
        **signed.terms._asdict(),
    }  # fmt: skip
    here = {name: getattr(record, name) for name in there if hasattr(record, name)} | {"payload": payload}
    if isinstance(record, ContributionRecord):  # of a pruned one the leaf has no more than that, and the class
        here |= recorded_terms(record)._asdict()
    else:
        here |= {"admissibility": record.cls, "public": not record.noise_multiplier}
    return [name for name, said in there.items() if here.get(name, said) != said]


def trace_contribution(ledger: LedgerReader, leaf: Leaf, size: int | None = None) -> ContributionTrace:
    """Return the trace of the contribution in a leaf over the first `size` leaves; by default over all."""
    story, epochs, exposed = _ContributionHistory(ledger, leaf, size), [], False
    events: dict[EventKey, int] = {}
    for each in story.epochs():
        add_events(events, each.events)
        exposed = exposed or each.exposed
        epochs.append(replace(each, spend=UNBOUNDED if exposed else _epsilon_in_nano(ledger, events)))
    return ContributionTrace(
        leaf=leaf, epochs=tuple(epochs), withdrawal=story.withdrawal, releases=story.releases(), signed=story.signed(),
        unused=story.unused, depths=tuple(_class_depths(ledger, leaf, story.record.bound.cls)),
    )  # fmt: skip


def _class_depths(ledger: LedgerReader, leaf: Leaf, cls: str) -> list[tuple[int, str]]:
    """The depth profile of a class when a leaf was written, and every other one that was in force later."""
    found: list[tuple[int, str]] = []
    records = [(0, ledger.header), *((each.seq, each.record) for each in ledger.of_kind(PolicyChange))]
    for seq, record in records:
        assert isinstance(record, Header | PolicyChange)
        for preset in (each for each in record.presets if each.cls == cls):
            if seq < leaf.seq:
                found = [(leaf.seq, preset.profile)]
            elif not found or preset.profile != found[-1][1]:
                found.append((seq, preset.profile))
    return found


@dataclass(frozen=True, slots=True)
class ContributionSpend:
    """What a contribution has lost so far, in 1e-9, of what it signed; in how many epochs; and its releases."""

    spend: int
    signed: int | None
    epochs: int
    releases: tuple[Leaf, ...]


def contribution_spend(ledger: LedgerReader, leaf: Leaf) -> ContributionSpend:
    """The sum of a trace: an accountant is asked once."""
    story = _ContributionHistory(ledger, leaf)
    epochs, events = list(story.epochs()), dict[EventKey, int]()
    for each in epochs:
        add_events(events, each.events)
    spend = UNBOUNDED if any(each.exposed for each in epochs) else _epsilon_in_nano(ledger, events)
    return ContributionSpend(spend, story.signed(), len(epochs), story.releases())


class _ContributionHistory:
    def __init__(self, ledger: LedgerReader, leaf: Leaf, size: int | None = None) -> None:
        self._ledger, self._leaf, self._size = ledger, leaf, size
        assert isinstance(leaf.record, ContributionRecord | KeptContribution)
        self.record = leaf.record
        key = leaf.record.key if isinstance(leaf.record, ContributionRecord) else None  # without it none is revoked
        withdrawn = ledger.withdrawn(leaf.seq)
        covered = withdrawn is not None and (size is None or withdrawn < size)
        self.withdrawal = ledger.checked_leaf(withdrawn) if withdrawn is not None and covered else None
        self.unused = 0
        self._revoked = [
            (found.seq, event.effective)
            for found in ledger.of_kind(KeyEvents, leaf.seq, size)
            if isinstance(found.record, KeyEvents)
            for event in found.record.events
            if event.change is KeyChange.REVOKE and event.target == key
        ]
        self._closed: list[tuple[bytes, int]] = []  # (run, leaf) of epochs that put it into a model

    def signed(self) -> int | None:
        """The most that it may lose."""
        z = self.record.bound.noise_micro
        return signed_spend(z, self._ledger.header.delta) if z else None

    def epochs(self) -> Iterator[EpochExposure]:
        """Return the epochs in which it was eligible (and charged if private), with `spend` 0; the others are counted."""
        for leaf in self._ledger.of_kind(Epoch, self._leaf.seq, self._size):
            epoch = leaf.record
            assert isinstance(epoch, Epoch)
            segments = tuple(each for each in epoch.segments if self._eligible(each))
            account = account_of(epoch.accounts, self.record.bound)
            if not segments:
                continue
            plan, bound = self._plan(epoch), self.record.bound
            exposed = bound.signed and (account is None if plan is None else bound.cls in plan.public_classes)
            if account is None and bound.signed and not exposed:
                self.unused += 1
            else:
                charges = () if account is None else _own_charges(plan, account, segments)
                used = account is None or exposed or account.factor > 0
                if used and any(each.outcome is SegmentOutcome.CLOSED for each in segments):
                    self._closed.append((epoch.run, leaf.seq))
                yield EpochExposure(
                    leaf=leaf,
                    segments=segments,
                    events=event_counts(charges),
                    variance=_reached_variance(plan, epoch, bound.cls),
                    multiplier=min((one.sigma for one in charges), default=math.inf),
                    spend=0,
                    account=0 if account is None else account.spend,
                    own=account is None or account.bound == bound,
                    factor=1.0 if account is None or exposed else account.factor,
                    exposed=exposed,
                )

    def releases(self) -> tuple[Leaf, ...]:
        """The releases of runs that trained while it was eligible; after `epochs` was read."""
        return tuple(
            leaf
            for leaf in self._ledger.of_kind(Release, self._leaf.seq, self._size)
            if isinstance(leaf.record, Release)
            and any(run in leaf.record.runs and seq < leaf.seq for run, seq in self._closed)
        )

    def _eligible(self, segment: Segment) -> bool:
        """Whether it was a member when the segment's members were frozen."""
        before = segment.eligibility
        if before <= self._leaf.seq or (self.withdrawal is not None and self.withdrawal.seq < before):
            return False
        time = self._ledger.checked_leaf(before - 1).time
        gone = any(seq < before and effective <= time for seq, effective in self._revoked)
        return not gone and time < self.record.expires

    def _plan(self, epoch: Epoch) -> StepPlan | None:
        data = self._ledger.blob(epoch.plan)
        return None if data is None else StepPlan.from_cbor(data)


def _epsilon_in_nano(ledger: LedgerReader, events: EventCounts) -> int:
    return nano_epsilon(pooled_epsilon(events, delta=ledger.header.delta, name=ledger.header.accountant))


def account_of(accounts: Sequence[EpochAccount], bound: Account) -> EpochAccount | None:
    """The account that a bound is charged to: its own, its class's, or a stricter one that it was taken to.

    Of the last two its class's loses more: where it is not known which it was, nothing is told too small.
    """
    cls, clip, noise = bound
    mine = [each for each in accounts if each.cls == cls]
    exact = [each for each in mine if each.bound == bound]
    stricter = [each for each in mine if each.noise_multiplier >= noise and 0 < each.clip_norm <= clip and noise]
    nearest = sorted(stricter, key=lambda each: (each.noise_multiplier, -each.clip_norm))
    whole = [each for each in mine if not each.noise_multiplier]
    return next(iter([*exact, *whole, *nearest]), None)


def _own_charges(plan: StepPlan | None, account: EpochAccount, segments: Sequence[Segment]) -> tuple[Event, ...]:
    """What it was charged itself: for the segments in which it was eligible, where that can be told apart."""
    if plan is None or adaptive_order(plan) is not None or plan.injection.occurrences is not None:
        return account.charges
    return planned_charges(plan, account.cls, account.scaled, segments)


def _reached_variance(plan: StepPlan | None, epoch: Epoch, cls: str) -> dict[str, float]:
    least = [min(values) for values in zip(*(variance for _, variance in epoch.applied), strict=True)]
    if plan is None:
        return {f"layer {at}": value for at, value in enumerate(least)}
    reached = plan.clip[plan.index(cls)] if any(each.name == cls for each in plan.classes) else ()
    return {layer.name: value for layer, value, clip in zip(plan.layers, least, reached, strict=False) if clip > 0}


def _exposure_to_dict(each: EpochExposure) -> dict[str, Any]:
    epoch = each.leaf.record
    assert isinstance(epoch, Epoch)
    return {
        "index": each.leaf.seq,
        "time": format_utc(each.leaf.time),
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
        "epsilon": epsilon_or_none(each.spend),
        "epsilon_account": epsilon_or_none(each.account),
        "own_account": each.own,
        "factor": each.factor,
    }  # fmt: skip
