"""Epochs: every spend, computed again from the plans, over all runs and generations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lamina.account.pooled import Events, pooled
from lamina.admit.times import shown
from lamina.ledger.amounts import NANO, UNBOUNDED, nano
from lamina.ledger.check.charges import Charges
from lamina.ledger.check.plans import Plans
from lamina.ledger.check.policy import PolicyInForce
from lamina.ledger.check.problem import Problem, bad
from lamina.ledger.check.withdrawals import Withdrawals
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import WORDS, Account, Epoch, Header, Outcome, Segment
from lamina.ledger.spend import Bound, Spending, followed_order, signed_spend
from lamina.plan.step import StepPlan

_NEAR = 1e-12  # relative: a multiplier that is computed twice on two machines
_SAME = 1e-7  # relative: an ε that is; accountants sum many small numbers
_CLASS = 1e-6  # relative: a class's own bound is kept in 1e-6

Eligible = Callable[
    [Bound, int], bool
]  # whether somebody with this bound, or of this class, is in the leaves before


@dataclass(frozen=True, slots=True)
class Claim:
    """A spend that an epoch states, and all that was charged until then: to be priced."""

    seq: int
    account: Account
    events: Events
    most: int | None  # what was signed

    def problem(self, header: Header) -> Problem | None:
        """What is wrong with it."""
        found = nano(pooled(self.events, delta=header.delta, name=header.accountant))
        stated, name = self.account.spend, f"account {self.account.name}"
        if abs(stated - found) > 1 + _SAME * found and stated != found:
            word = "under-reported" if stated < found else "over-reported"
            reason = (
                f"{name} states ε = {_epsilon(stated)}, {header.accountant} finds {_epsilon(found)}: {word}"
            )
            return Problem(self.seq, WORDS[Epoch], "verify.problem", reason)
        if self.most is not None and found > self.most:
            reason = (
                f"{name} has lost ε = {_epsilon(found)}, more than the {_epsilon(self.most)} that was signed"
            )
            return Problem(self.seq, WORDS[Epoch], "verify.problem", reason)
        return None


class Epochs:
    """Epochs as they come. What they state is collected in `claims`, to be priced when the leaves are read."""

    def __init__(
        self,
        header: Header,
        plans: Plans,
        policy: PolicyInForce,
        withdrawals: Withdrawals,
        signed: Mapping[Bound, object],
    ) -> None:
        """`signed` are the bounds of contributions so far."""
        self._header, self._plans, self._policy, self._signed = header, plans, policy, signed
        self._withdrawals = withdrawals
        self.spending = Spending(header)
        self.claims: list[Claim] = []
        self.attempts: dict[tuple[bytes, int, int], int] = {}
        self.runs: set[bytes] = set()
        self._before: dict[tuple[bytes, bytes], set[Bound]] = {}  # run and plan → what it has charged
        self._scales: dict[tuple[bytes, bytes, Bound], float] = {}
        self._ends: dict[
            tuple[bytes, int, int], tuple[int, int]
        ] = {}  # attempt that closed → its last step, its leaf
        self.spent: dict[str, int] = {}  # by class, the most that an account of it is stated to have lost
        self._stated: dict[Bound, int] = {}
        self._charges = Charges()
        self._previous = -1
        self.count = 0
        self.silent = 0  # epochs that charge nothing to a bound that somebody eligible has signed

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
            bad(
                leaf.seq,
                Epoch,
                "verify.digest-accountant-state",
                "its digest of the accountant's state is not of what was charged until then",
            )
        self.runs.add(record.run)
        self._before.setdefault((record.run, record.plan), set()).update(
            each.bound for each in record.accounts
        )
        self.count += 1

    def _check_form(self, leaf: Leaf, record: Epoch, time: int) -> None:
        seq = leaf.seq
        closed = sum(each.outcome is Outcome.CLOSED for each in record.segments)
        if closed > self._header.granularity:
            bad(
                seq,
                Epoch,
                "verify.closes-segments-header",
                f"it closes {closed} segments, the header allows {self._header.granularity}",
            )
        if leaf.time % self._header.epoch_clock and leaf.time != time:
            clock = self._header.epoch_clock
            bad(
                seq,
                Epoch,
                "verify.time-finer-tells",
                f"its time {shown(leaf.time)} is finer than {clock} s, and tells how long steps took",
            )
        for segment in record.segments:
            attempt = (record.run, segment.index, segment.generation)
            if (before := self.attempts.setdefault(attempt, seq)) != seq:
                name = (
                    f"segment {segment.index}, generation {segment.generation} of run {record.run.hex()[:8]}"
                )
                bad(
                    seq,
                    Epoch,
                    "verify.ledger-already-leaf",
                    f"{name} is in the ledger already, as leaf {before}: it was replayed",
                )
            if not 1 <= segment.eligibility <= seq:
                bad(
                    seq,
                    Epoch,
                    "verify.segment-read-members",
                    f"segment {segment.index} read its members after {segment.eligibility} leaves",
                )
            self._withdrawals.heeded(seq, record.run, segment)
            self._follows(seq, record.run, segment)
            if segment.outcome is Outcome.CLOSED:
                self._ends[attempt] = segment.last, seq

    def _follows(self, seq: int, run: bytes, segment: Segment) -> None:
        """A segment goes on where one before it ended, and was frozen after that one's leaf."""
        if segment.index == segment.first == 0 and segment.after is None:
            return
        end, before = self._ends.get((run, segment.index - 1, segment.after or 0), (-1, -1))
        name = f"segment {segment.index} of run {run.hex()[:8]}"
        if end != segment.first:
            bad(
                seq,
                Epoch,
                "verify.begins-step-no",
                f"{name} begins at step {segment.first}, where no segment before it ended: one is left out",
            )
        if before < seq and segment.eligibility <= before:
            reason = f"{name} read its members after {segment.eligibility} leaves"
            bad(
                seq,
                Epoch,
                "verify.goes-leaf-came",
                f"{reason}, and goes on from leaf {before}, which came later",
            )

    def _check_chain(self, seq: int, record: Epoch, digests: Mapping[bytes, int]) -> None:
        size = -1 if record.previous is None else digests.get(record.previous)
        if size is None:
            bad(
                seq,
                Epoch,
                "verify.names-checkpoint-before",
                "it names a checkpoint before it that is not one of this ledger",
            )
        if size < self._previous:
            bad(
                seq,
                Epoch,
                "verify.names-older-checkpoint",
                "it names an older checkpoint than the epoch before it",
            )
        self._previous = size

    # ----------------------------------------------------------------------------------- accounts

    def _check_account(self, seq: int, record: Epoch, plan: StepPlan, account: Account) -> None:
        entry = next((each for each in plan.classes if each.name == account.cls), None)
        if entry is None:
            bad(
                seq,
                Epoch,
                "verify.account-class-plan",
                f"account {account.name} is of a class that its plan does not have",
            )
        if account.bound == (account.cls, 0, 0) and account.scale != 1.0:
            bad(
                seq,
                Epoch,
                "verify.account-class-thresholds",
                f"account {account.name} is a class, and its thresholds are scaled by {account.scale:g}",
            )
        scale = self._scales.setdefault((record.run, record.plan, account.bound), account.scale)
        if account.scale != scale:
            bad(
                seq,
                Epoch,
                "verify.account-scale-before",
                f"account {account.name} has scale {account.scale:g}, {scale:g} before in the same run",
            )
        norm = 0.0 if entry.public else account.scale * plan.norm(account.cls)
        if account.clip_norm and norm > account.clip_norm / 1e6 * (1 + _NEAR):
            bad(
                seq,
                Epoch,
                "verify.account-clipped-above",
                f"account {account.name} is clipped at {norm:.9g}, above what was signed",
            )
        counted = self._charges.counted(record, plan, account)
        if isinstance(counted, str):
            bad(seq, Epoch, "verify.account", f"account {account.name} {counted}")
        self.spending.charge(account.bound, counted)
        if account.spend < self._stated.get(account.bound, 0):
            bad(
                seq,
                Epoch,
                "verify.account-lost-less",
                f"account {account.name} has lost less than an earlier epoch states",
            )
        self._stated[account.bound] = account.spend
        self.spent[account.cls] = max(account.spend, self.spent.get(account.cls, 0))
        most = min(self._mosts(account, record), default=None) if counted else None
        self.claims.append(Claim(seq, account, self.spending.events(account.bound), most))

    def _mosts(self, account: Account, record: Epoch) -> list[int]:
        """Of every segment: what was promised when its members were read."""
        found = (self._most(account, each.eligibility) for each in record.segments)
        return [most for most in found if most is not None]

    def _most(self, account: Account, opened: int) -> int | None:
        """What may be lost: what was signed, or what the class promised those who signed nothing."""
        if account.noise_multiplier:
            return signed_spend(account.noise_multiplier, self._header.delta)
        promised = self._policy.promised(account.cls, opened)
        if not promised:
            return None
        most = signed_spend(promised, self._header.delta)
        return most if most == UNBOUNDED else math.ceil(most * (1 + _CLASS))

    def _check_missing(self, seq: int, record: Epoch, plan: StepPlan, eligible: Eligible) -> None:
        """Nobody is left out of whom it is known that they took part.

        A bound whose members are eligible and that a run never charged may have stayed out of it: no scale kept it, or
        they are not in its corpus. But a run that has charged a bound goes on charging it under the same plan, and a
        class that has members and is trained on charges somebody.
        """
        trained, here = _trained(plan, record), {account.bound for account in record.accounts}
        reads = {segment.eligibility for segment in record.segments}
        for bound in sorted(self._before.get((record.run, record.plan), set()) - here):
            if bound[0] in trained and any(eligible(bound, read) for read in reads):
                reason = f"it charges nothing to bound {_name(bound)}, as its run did before"
                bad(seq, Epoch, "verify.somebody-eligible", f"{reason}, and somebody who has it is eligible")
        self.silent += any(
            bound[0] in trained and bound not in here and eligible(bound, read)
            for bound in self._signed
            for read in reads
        )
        uneven = plan.injection.occurrences is not None or followed_order(plan) is not None
        for cls in sorted(trained - {bound[0] for bound in here if not uneven or bound == (bound[0], 0, 0)}):
            whom = "does not charge it as a whole" if uneven else "charges nobody of it"
            bad(seq, Epoch, "verify.trains-class", f"it trains on class {cls!r} and {whom}")


def _trained(plan: StepPlan, record: Epoch) -> set[str]:
    """The classes that its steps take something from; of capped ones also where all that they may lose is charged."""
    capped = plan.injection.occurrences is not None
    spans = [(0, plan.steps)] if capped else [(each.first, each.last) for each in record.segments]
    return {e.name for e in plan.classes if any(plan.stretch(e.name, *span) for span in spans)}


def _name(bound: Bound) -> str:
    return "/".join(map(str, bound))


def _epsilon(spend: int) -> str:
    return "∞" if spend == UNBOUNDED else f"{spend / NANO:.9f}"
