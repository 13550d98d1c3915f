"""Checks of epochs (every spend computed again), of aggregates that stand for pruned leaves, and of releases."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from lamina.account.accountants import EventCounts, pooled_epsilon
from lamina.admit.keys import format_utc
from lamina.ledger.governance_records import Aggregate, Header, LeafSpan, Release, Role
from lamina.ledger.records import KIND_NAMES, Epoch, EpochAccount, Leaf, Segment, SegmentOutcome
from lamina.ledger.schema import NANO, UNBOUNDED, nano_epsilon
from lamina.ledger.spending import Bound, Spending, adaptive_order, signed_spend
from lamina.ledger.store.interface import StoreReader
from lamina.ledger.verify.contribution_checks import WithdrawalChecks
from lamina.ledger.verify.plan_checks import ChargeChecks, PlanChecks
from lamina.ledger.verify.replay_state import Finding, PolicyInForce, ReplayedKeys, fail
from lamina.ledger.verify.tree_checks import AggregateTallies
from lamina.plan.step_plan import StepPlan

_MULTIPLIER_TOLERANCE = 1e-12  # relative: a multiplier that is computed twice on two machines
_EPSILON_TOLERANCE = 1e-7  # relative: an ε that is; accountants sum many small numbers
_CLASS_TOLERANCE = 1e-6  # relative: a class's own bound is kept in 1e-6

Eligible = Callable[[Bound, int], bool]  # whether somebody with this bound, or of this class, is in the leaves before


@dataclass(frozen=True, slots=True)
class SpendClaim:
    """A spend that an epoch states, and all that was charged until then: to be priced."""

    seq: int
    account: EpochAccount
    events: EventCounts
    most: int | None  # what was signed

    def problem(self, header: Header) -> Finding | None:
        """What is wrong with it."""
        found = nano_epsilon(pooled_epsilon(self.events, delta=header.delta, name=header.accountant))
        stated, name = self.account.spend, f"account {self.account.name}"
        if abs(stated - found) > 1 + _EPSILON_TOLERANCE * found and stated != found:
            word = "under-reported" if stated < found else "over-reported"
            reason = (
                f"{name} states ε = {_epsilon_text(stated)}, {header.accountant} finds {_epsilon_text(found)}: {word}"
            )
            return Finding(self.seq, KIND_NAMES[Epoch], "verify.problem", reason)
        if self.most is not None and found > self.most:
            reason = (
                f"{name} has lost ε = {_epsilon_text(found)}, more than the {_epsilon_text(self.most)} that was signed"
            )
            return Finding(self.seq, KIND_NAMES[Epoch], "verify.problem", reason)
        return None


class EpochChecks:
    """Epochs as they come. What they state is collected in `claims`, to be priced when the leaves are read."""

    def __init__(
        self,
        header: Header,
        plans: PlanChecks,
        policy: PolicyInForce,
        withdrawals: WithdrawalChecks,
        signed: Mapping[Bound, object],
    ) -> None:
        """`signed` are the bounds of contributions so far."""
        self._header, self._plans, self._policy, self._signed = header, plans, policy, signed
        self._withdrawals = withdrawals
        self.spending = Spending(header)
        self.claims: list[SpendClaim] = []
        self.attempts: dict[tuple[bytes, int, int], int] = {}
        self.runs: set[bytes] = set()
        self._before: dict[tuple[bytes, bytes], set[Bound]] = {}  # run and plan → what it has charged
        self._scales: dict[tuple[bytes, bytes, Bound], float] = {}
        self._ends: dict[tuple[bytes, int, int], tuple[int, int]] = {}  # attempt that closed → its last step, its leaf
        self.spent: dict[str, int] = {}  # by class, the most that an account of it is stated to have lost
        self._stated: dict[Bound, int] = {}
        self._charges = ChargeChecks()
        self._previous = -1
        self.count = 0
        self.epochs_without_account = 0  # epochs that charge nothing to a bound that somebody eligible has signed

    def see(self, leaf: Leaf, time: int, digests: Mapping[bytes, int], eligible: Eligible) -> None:
        """`time` is that of the leaf before, `digests` are of the checkpoints before."""
        record = leaf.record
        assert isinstance(record, Epoch)
        self._check_form(leaf, record, time)
        self._check_chain(leaf.seq, record, digests)
        plan = self._plans.of(leaf.seq, record)
        self._charges.begin(record, plan)
        for account in record.accounts:
            self._check_account(leaf.seq, record, plan, account)
        self._check_missing(leaf.seq, record, plan, eligible)
        if self.spending.state() != record.state:
            fail(
                leaf.seq,
                Epoch,
                "verify.digest-accountant-state",
                "its digest of the accountant's state is not of what was charged until then",
            )
        self.runs.add(record.run)
        self._before.setdefault((record.run, record.plan), set()).update(each.bound for each in record.accounts)
        self.count += 1

    def _check_form(self, leaf: Leaf, record: Epoch, time: int) -> None:
        seq = leaf.seq
        closed = sum(each.outcome is SegmentOutcome.CLOSED for each in record.segments)
        if closed > self._header.granularity:
            fail(
                seq,
                Epoch,
                "verify.closes-segments-header",
                f"it closes {closed} segments, the header allows {self._header.granularity}",
            )
        if leaf.time % self._header.epoch_clock and leaf.time != time:
            clock = self._header.epoch_clock
            fail(
                seq,
                Epoch,
                "verify.time-finer-tells",
                f"its time {format_utc(leaf.time)} is finer than {clock} s, and tells how long steps took",
            )
        for segment in record.segments:
            attempt = (record.run, segment.index, segment.generation)
            if (before := self.attempts.setdefault(attempt, seq)) != seq:
                name = f"segment {segment.index}, generation {segment.generation} of run {record.run.hex()[:8]}"
                fail(
                    seq,
                    Epoch,
                    "verify.ledger-already-leaf",
                    f"{name} is in the ledger already, as leaf {before}: it was replayed",
                )
            if not 1 <= segment.eligibility <= seq:
                fail(
                    seq,
                    Epoch,
                    "verify.segment-read-members",
                    f"segment {segment.index} read its members after {segment.eligibility} leaves",
                )
            self._withdrawals.check_segment(seq, record.run, segment)
            self._check_continues(seq, record.run, segment)
            if segment.outcome is SegmentOutcome.CLOSED:
                self._ends[attempt] = segment.last, seq

    def _check_continues(self, seq: int, run: bytes, segment: Segment) -> None:
        """A segment goes on where one before it ended, and was frozen after that one's leaf."""
        if segment.index == segment.first == 0 and segment.after is None:
            return
        end, before = self._ends.get((run, segment.index - 1, segment.after or 0), (-1, -1))
        name = f"segment {segment.index} of run {run.hex()[:8]}"
        if end != segment.first:
            fail(
                seq,
                Epoch,
                "verify.begins-step-no",
                f"{name} begins at step {segment.first}, where no segment before it ended: one is left out",
            )
        if before < seq and segment.eligibility <= before:
            reason = f"{name} read its members after {segment.eligibility} leaves"
            fail(seq, Epoch, "verify.goes-leaf-came", f"{reason}, and goes on from leaf {before}, which came later")

    def _check_chain(self, seq: int, record: Epoch, digests: Mapping[bytes, int]) -> None:
        size = -1 if record.previous is None else digests.get(record.previous)
        if size is None:
            fail(
                seq,
                Epoch,
                "verify.names-checkpoint-before",
                "it names a checkpoint before it that is not one of this ledger",
            )
        if size < self._previous:
            fail(seq, Epoch, "verify.names-older-checkpoint", "it names an older checkpoint than the epoch before it")
        self._previous = size

    # ----------------------------------------------------------------------------------- accounts

    def _check_account(self, seq: int, record: Epoch, plan: StepPlan, account: EpochAccount) -> None:
        entry = next((each for each in plan.classes if each.name == account.cls), None)
        if entry is None:
            fail(
                seq,
                Epoch,
                "verify.account-class-plan",
                f"account {account.name} is of a class that its plan does not have",
            )
        if account.bound == (account.cls, 0, 0) and account.scale != 1.0:
            fail(
                seq,
                Epoch,
                "verify.account-class-thresholds",
                f"account {account.name} is a class, and its thresholds are scaled by {account.scale:g}",
            )
        scale = self._scales.setdefault((record.run, record.plan, account.bound), account.scale)
        if account.scale != scale:
            fail(
                seq,
                Epoch,
                "verify.account-scale-before",
                f"account {account.name} has scale {account.scale:g}, {scale:g} before in the same run",
            )
        norm = 0.0 if entry.public else account.scale * plan.norm(account.cls)
        if account.clip_norm and norm > account.clip_norm / 1e6 * (1 + _MULTIPLIER_TOLERANCE):
            fail(
                seq,
                Epoch,
                "verify.account-clipped-above",
                f"account {account.name} is clipped at {norm:.9g}, above what was signed",
            )
        counted = self._charges.counted(record, plan, account)
        if isinstance(counted, str):
            fail(seq, Epoch, "verify.account", f"account {account.name} {counted}")
        self.spending.charge(account.bound, counted)
        if account.spend < self._stated.get(account.bound, 0):
            fail(
                seq,
                Epoch,
                "verify.account-lost-less",
                f"account {account.name} has lost less than an earlier epoch states",
            )
        self._stated[account.bound] = account.spend
        self.spent[account.cls] = max(account.spend, self.spent.get(account.cls, 0))
        most = min(self._allowed_spends(account, record), default=None) if counted else None
        self.claims.append(SpendClaim(seq, account, self.spending.events(account.bound), most))

    def _allowed_spends(self, account: EpochAccount, record: Epoch) -> list[int]:
        """Of every segment: what was promised when its members were read."""
        found = (self._most(account, each.eligibility) for each in record.segments)
        return [most for most in found if most is not None]

    def _most(self, account: EpochAccount, opened: int) -> int | None:
        """What may be lost: what was signed, or what the class promised those who signed nothing."""
        if account.noise_multiplier:
            return signed_spend(account.noise_multiplier, self._header.delta)
        promised = self._policy.promised(account.cls, opened)
        if not promised:
            return None
        most = signed_spend(promised, self._header.delta)
        return most if most == UNBOUNDED else math.ceil(most * (1 + _CLASS_TOLERANCE))

    def _check_missing(self, seq: int, record: Epoch, plan: StepPlan, eligible: Eligible) -> None:
        """Nobody is left out of whom it is known that they took part.

        A bound whose members are eligible and that a run never charged may have stayed out of it: no scale kept it, or
        they are not in its corpus. But a run that has charged a bound goes on charging it under the same plan, and a
        class that has members and is trained on charges somebody.
        """
        trained, here = _trained_classes(plan, record), {account.bound for account in record.accounts}
        reads = {segment.eligibility for segment in record.segments}
        for bound in sorted(self._before.get((record.run, record.plan), set()) - here):
            if bound[0] in trained and any(eligible(bound, read) for read in reads):
                reason = f"it charges nothing to bound {_bound_text(bound)}, as its run did before"
                fail(seq, Epoch, "verify.somebody-eligible", f"{reason}, and somebody who has it is eligible")
        self.epochs_without_account += any(
            bound[0] in trained and bound not in here and eligible(bound, read)
            for bound in self._signed
            for read in reads
        )
        uneven = plan.injection.occurrences is not None or adaptive_order(plan) is not None
        for cls in sorted(trained - {bound[0] for bound in here if not uneven or bound == (bound[0], 0, 0)}):
            whom = "does not charge it as a whole" if uneven else "charges nobody of it"
            fail(seq, Epoch, "verify.trains-class", f"it trains on class {cls!r} and {whom}")


def _trained_classes(plan: StepPlan, record: Epoch) -> set[str]:
    """The classes that its steps take something from; of capped ones also where all that they may lose is charged."""
    capped = plan.injection.occurrences is not None
    spans = [(0, plan.steps)] if capped else [(each.first, each.last) for each in record.segments]
    return {e.name for e in plan.classes if any(plan.schedule_between(e.name, *span) for span in spans)}


def _bound_text(bound: Bound) -> str:
    return "/".join(map(str, bound))


def _epsilon_text(spend: int) -> str:
    return "∞" if spend == UNBOUNDED else f"{spend / NANO:.9f}"


class AggregateChecks:
    """The aggregates of a ledger, in order. `countersigned` are those that an auditor looked at."""

    def __init__(self, header: Header, keys: ReplayedKeys, tallies: AggregateTallies) -> None:
        self._header, self._keys, self._tallies = header, keys, tallies
        self._spans: list[LeafSpan] = []
        self.summed = 0
        self.countersigned = 0
        self.alone = 0  # without any countersignature

    def see(self, leaf: Leaf, withdrawn: Mapping[int, int], spent: Mapping[str, int]) -> None:
        """`withdrawn` are the targets of withdrawals before it, `spent` is the most that an account of a class lost."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Aggregate)
        if record.horizon + self._header.retention > leaf.time:
            fail(
                seq,
                Aggregate,
                "verify.sums-up-contributions",
                f"it sums up contributions until {format_utc(record.horizon)}, the header keeps them for "
                f"{self._header.retention} s, and it is of {format_utc(leaf.time)}: pruned beyond the horizon",
            )
        self._check_spans(seq, record)
        self._check_members(leaf, record)
        self._check_figures(seq, record, withdrawn, spent)
        signers, wrong = self._keys.signers(
            record.message(self._header.origin), record.signatures, (Role.AUDITOR,), leaf.time
        )
        if wrong is not None:
            fail(
                seq,
                Aggregate,
                "verify.countersignature-under-not",
                f"a countersignature under it does not count: {wrong}",
            )
        self.summed += record.count
        self.countersigned += bool(signers)
        self.alone += not signers

    def _check_spans(self, seq: int, record: Aggregate) -> None:
        if record.spans[-1].stop > seq:
            fail(
                seq,
                Aggregate,
                "verify.sums-up-leaves",
                f"it sums up leaves until {record.spans[-1].stop}, which come after it",
            )
        spans = sorted([*self._spans, *record.spans], key=lambda span: span.first)
        for one, two in pairwise(spans):
            if two.first < one.stop:
                fail(seq, Aggregate, "verify.leaves-summed-up", f"leaves from {two.first} on were summed up before")
        self._spans = spans

    def _check_members(self, leaf: Leaf, record: Aggregate) -> None:
        """What can be seen of the contributions themselves."""
        seq, tally = leaf.seq, self._tallies.of(leaf.seq)
        if tally is None or tally.aggregate != record:
            fail(seq, Aggregate, "verify.store-finds-another", "the store finds another aggregate here than the leaf")
        if tally.latest >= record.horizon or tally.earliest >= record.horizon:
            fail(
                seq,
                Aggregate,
                "verify.sums-up-contribution",
                f"it sums up a contribution that was admitted at {format_utc(max(tally.latest, tally.earliest))} or later, "
                f"its horizon is {format_utc(record.horizon)}: pruned beyond the horizon",
            )
        if tally.expires > leaf.time:
            fail(
                seq,
                Aggregate,
                "verify.sums-up-contribution-expires",
                f"it sums up a contribution that expires at {format_utc(tally.expires)}, after it",
            )
        if (sealed := tally.sealed) is not None and sealed != record.digest:
            fail(seq, Aggregate, "verify.digest-not-leaves", "its digest is not of the leaves that it sums up")
        stated = {each.cls: each.count for each in record.classes}
        for cls, count in tally.counts.items():
            if count > stated.get(cls, 0) or (tally.present == record.count and count != stated[cls]):
                fail(
                    seq,
                    Aggregate,
                    "verify.counts-contributions-class",
                    f"it counts {stated.get(cls, 0)} contributions of class {cls!r}, {count} are there",
                )

    def _check_figures(
        self, seq: int, record: Aggregate, withdrawn: Mapping[int, int], spent: Mapping[str, int]
    ) -> None:
        gone = _count_within(withdrawn, record.spans)
        if (stated := sum(each.withdrawn for each in record.classes)) != gone:
            fail(
                seq,
                Aggregate,
                "verify.counts-withdrawn-contributions",
                f"it counts {stated} withdrawn contributions, {gone} were withdrawn before it",
            )
        for each in record.classes:
            if each.spend != spent.get(each.cls, 0):
                found = spent.get(each.cls, 0)
                fail(
                    seq,
                    Aggregate,
                    "verify.class-lost-epochs",
                    f"class {each.cls!r} lost {each.spend} (1e-9) by it, {found} by the epochs",
                )


def _count_within(seqs: Iterable[int], spans: Iterable[LeafSpan]) -> int:
    sorted_spans = sorted((span.first, span.stop) for span in spans)
    found = 0
    for seq in seqs:
        at = bisect_right(sorted_spans, (seq, 1 << 63)) - 1
        found += at >= 0 and seq < sorted_spans[at][1]
    return found


def check_release(leaf: Leaf, runs: Container[bytes], rows: StoreReader) -> None:
    """`runs` are those that have an epoch before it."""
    record, seq = leaf.record, leaf.seq
    assert isinstance(record, Release)
    for run in record.runs:
        if run not in runs:
            fail(
                seq,
                Release,
                "verify.run-model-no",
                f"run {run.hex()[:8]} is in the model, and no epoch of it is in the ledger before",
            )
    if len(set(record.runs)) < len(record.runs):
        fail(seq, Release, "verify.run-named-twice", "a run is named twice")
    if record.not_after is not None and record.not_after <= leaf.time:
        fail(
            seq,
            Release,
            "verify.served-until",
            f"it may be served until {format_utc(record.not_after)}, and is of {format_utc(leaf.time)}",
        )
    data = rows.blob(record.manifest)
    if data is not None and hashlib.sha256(data).digest() != record.manifest:
        fail(seq, Release, "verify.manifest-kept-another", "the manifest that is kept is another one than it names")
