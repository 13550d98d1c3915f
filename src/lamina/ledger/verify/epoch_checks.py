"""Checks of epochs: form and order, charges against the plan, members, and every spend computed again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, EventCounts, EventKey, event_counts
from lamina.ledger.governance_records import Header
from lamina.ledger.key_state import PolicyInForce, Violation
from lamina.ledger.occurrences import AttemptTree
from lamina.ledger.records import KIND_NAMES, Epoch, EpochAccount, Leaf, Segment, SegmentOutcome
from lamina.ledger.run_records import RunEnd
from lamina.ledger.schema import NANO, UNBOUNDED, nano_epsilon
from lamina.ledger.spending import (
    CLASS_TOLERANCE,
    Spending,
    adaptive_order,
    epoch_marks,
    planned_charges,
    signed_spend,
    whole_plan_charges,
)
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.verify.contribution_checks import AdmittedMembers, WithdrawalChecks
from lamina.ledger.verify.plan_checks import ADAPTED_TOLERANCE, PlanChecks, clip_norms_stay
from lamina.ledger.verify.tree_checks import Finding, fail
from lamina.plan.risk import UNPROVEN, ZERO_OUT, RiskBound
from lamina.plan.rules import FollowBudget, effective_sigma
from lamina.plan.signed_bounds import REMAINING_FACTORS
from lamina.plan.step_plan import StepPlan
from lamina.sign.keys import format_utc

_MULTIPLIER_TOLERANCE = 1e-12  # a noise multiplier computed on two machines
_EPSILON_TOLERANCE = 1e-7  # an ε computed on two machines: accountants sum many small numbers


def declared_steps_used(plan: StepPlan, cls: str, scale: float, variance: Sequence[float], steps: int) -> float:
    """How many steps at the declared noise cost at least as much as these steps of a class.

    At the plan's one Rényi order prices add: n steps at f times the declared sigma cost as much as
    n·RDP(f·sigma)/RDP(sigma) declared ones. A run is charged its budget once, as a whole, and may not use more of it.
    """
    order, schedule = adaptive_order(plan), plan.schedule(cls, scale)
    if order is None or not schedule:
        return 0.0
    event = schedule[0]
    price = step_rdp(event.q, event.sigma * _noise_factor(plan, cls, variance), order)
    return steps * price / step_rdp(event.q, event.sigma, order)


def _noise_factor(plan: StepPlan, cls: str, variance: Sequence[float]) -> float:
    """The ratio of applied to declared sigma. Where clip norms move too, the most that the rule allows."""
    budget = plan.rule(FollowBudget)
    assert budget is not None
    if not clip_norms_stay(plan):
        return budget.most
    k = plan.index(cls)
    return effective_sigma(plan.clip[k], [math.sqrt(v) for v in variance]) / plan.sigma(k)


class ChargeChecks:
    """Checks that epochs charge their accounts what the plan takes in the steps of their segments.

    exact     the plan's schedule over the steps of every attempt, abandoned or not: neither more nor less
    adaptive  noise that follows its budget: a filter proves that the run never passes its budget, not that it cost
              less. So the whole budget is charged when the run first charges the account, and again every time that
              its attempts have used it up (`declared_steps_used`)
    capped    raw noise with a cap on occurrences: as often as one contribution may have occurred over all attempts
              (`AttemptTree`). A run that was copied, or redid steps, may have paid for more
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._charged: dict[tuple[bytes, bytes], Spending] = {}  # by run and plan
        self._used: dict[tuple[bytes, bytes, Account], float] = {}  # of an adaptive budget, in declared steps
        self._capped: dict[bytes, dict[bytes, AttemptTree]] = {}  # run → plan → attempts

    def begin(self, epoch: Epoch, plan: StepPlan) -> None:
        """Add the segments of an epoch."""
        self._charged.setdefault((epoch.run, epoch.plan), Spending(self._header))
        plans = self._capped.setdefault(epoch.run, {})
        if (cap := plan.injection.occurrences) is not None:
            plans.setdefault(epoch.plan, AttemptTree(cap))
        for digest, attempts in plans.items():
            attempts.add(epoch.segments, counts=digest == epoch.plan)

    def counted(self, epoch: Epoch, plan: StepPlan, account: EpochAccount) -> tuple[Event, ...] | Violation:
        """What to count for an account; or why its charges are wrong."""
        cap = plan.injection.occurrences
        if adaptive_order(plan) is None and cap is None:
            expected = planned_charges(plan, account.cls, account.scaled, epoch.segments)
            wrong = _charge_difference(event_counts(account.charges), event_counts(expected), exact=True)
            return expected if wrong is None else wrong
        charged = self._charged[epoch.run, epoch.plan]
        charged.charge(account.bound, account.charges)
        total = charged.events(account.bound)
        least = event_counts(whole_plan_charges(plan, account.cls, account.scale))
        if cap is not None:
            least = dict.fromkeys(least, self._capped[epoch.run][epoch.plan].most)
        wrong = _charge_difference(total, least, exact=False)
        if wrong is None and cap is None and least:
            key = epoch.run, epoch.plan, account.bound
            for steps, variance in epoch.applied:
                more = declared_steps_used(plan, account.cls, account.scale, variance, steps)
                self._used[key] = self._used.get(key, 0.0) + more
            wrong = _budget_overdrawn(self._used[key], total, least)
        return account.charges if wrong is None else wrong


def _budget_overdrawn(used: float, charged: EventCounts, whole: EventCounts) -> Violation | None:
    """Whether the attempts of a run, and of its copies, used more than the budgets that were charged."""
    kind, steps = max(whole.items(), key=lambda pair: pair[1])
    budget = steps * (sum(charged[each] for each in _nearly_equal_keys(charged, kind)) // steps)
    if used > budget * (1 + ADAPTED_TOLERANCE) + ADAPTED_TOLERANCE:
        return Violation("verify.budget-overdrawn", f"used {used:.6g} steps of its budget, {budget} are charged")
    return None


def _charge_difference(stated: EventCounts, expected: EventCounts, *, exact: bool) -> Violation | None:
    """What the plan takes and is not charged; if `exact`, also what is charged beyond that."""
    left: dict[EventKey, int] = dict(stated)
    for kind, steps in expected.items():
        found = sum(left.pop(each) for each in _nearly_equal_keys(left, kind))
        if found < steps or (exact and found > steps):
            reason = f"is charged {found} steps {_event_text(kind)}, its plan takes {steps}"
            return Violation("verify.charge-differs-from-plan", reason)
    for kind, steps in left.items():
        reason = f"is charged {steps} steps {_event_text(kind)}, its plan takes none"
        return Violation("verify.charge-differs-from-plan", reason)
    return None


def _nearly_equal_keys(events: Mapping[EventKey, int], kind: EventKey) -> list[EventKey]:
    """The same event, as computed on another machine."""
    sigma, *rest = kind
    near = [each for each in events if math.isclose(each[0], sigma, rel_tol=_MULTIPLIER_TOLERANCE)]
    return [each for each in near if list(each[1:]) == rest]


def _event_text(kind: EventKey) -> str:
    sigma, rate, order = kind
    return f"at noise multiplier {sigma:.9g} and rate {rate:.9g}" + (f", order {order:g}" if order else "")


@dataclass(frozen=True, slots=True)
class SpendClaim:
    """The spend that an epoch states for an account, and all that was charged until then."""

    seq: int
    account: EpochAccount
    events: EventCounts
    most: int | None  # the bound on ε
    risks: tuple[RiskBound, ...] = ()  # it must keep one of them
    marks: frozenset[str] = frozenset()  # of the plans that charged the class

    def finding(self, header: Header) -> Finding | None:
        """Compute the spend again and compare."""
        found = nano_epsilon(pooled_epsilon(self.events, delta=header.delta, name=header.accountant))
        stated, name = self.account.spend, f"account {self.account.bound}"
        wrong: Violation | None = None
        if abs(stated - found) > 1 + _EPSILON_TOLERANCE * found and stated != found:
            reason = f"{name} states ε = {_epsilon_text(stated)}, {header.accountant} finds {_epsilon_text(found)}"
            wrong = Violation("verify.spend-over-reported", reason)
            if stated < found:
                wrong = Violation("verify.spend-under-reported", reason)
        elif self.most is not None and found > self.most:
            reason = f"{name} has lost ε = {_epsilon_text(found)}, more than its bound of {_epsilon_text(self.most)}"
            wrong = Violation("verify.bound-exceeded", reason)
        elif self.risks and all(self._rate(each, header) > each.tpr * (1 + _EPSILON_TOLERANCE) for each in self.risks):
            risk = max(self.risks, key=lambda each: each.tpr)
            rate = f"an attack finds up to {100 * self._rate(risk, header):.6g} %"
            proven = "nothing is proven" if self._rate(risk, header) == 1 else rate
            wrong = Violation("verify.risk-exceeded", f"{name} has the risk bound {risk}, but {proven}")
        return None if wrong is None else Finding(self.seq, KIND_NAMES[Epoch], *wrong)

    def _rate(self, risk: RiskBound, header: Header) -> float:
        return risk.rate(self.events, accountant=header.accountant, marks=self.marks)


def check_time_rounded(leaf: Leaf, before: int, clock: int) -> None:
    """Check the time of an epoch, or of the start or end of a run; `before` is that of the leaf before it."""
    if leaf.time % clock and leaf.time != before:
        reason = f"its time {format_utc(leaf.time)} is not rounded to {clock} s, so it reveals how long steps took"
        fail(leaf.seq, leaf.kind, "verify.epoch-time-not-rounded", reason)


class EpochChecks:
    """Checks of epochs. The spends that they state are collected in `claims`, to be computed after the replay."""

    def __init__(
        self, header: Header, rows: StoreReader, policy: PolicyInForce, withdrawals: WithdrawalChecks,
        members: AdmittedMembers,
    ) -> None:  # fmt: skip
        """`members` are the contributions so far."""
        self._header, self._policy = header, policy
        self._plans = PlanChecks(rows, policy, header.delta, header.accountant)
        self._withdrawals, self._members = withdrawals, members
        self.spending = Spending(header)
        self.claims: list[SpendClaim] = []
        self.attempts: dict[tuple[bytes, int, int], int] = {}
        self._unrecorded: dict[tuple[bytes, int, int], int] = {}  # attempt → earlier generations that have no leaf
        self.runs: set[bytes] = set()
        self._charged: dict[tuple[bytes, bytes], set[Account]] = {}  # run and plan → accounts charged so far
        self._scales: dict[tuple[bytes, bytes, Account], float] = {}
        self._ends: dict[tuple[bytes, int, int], tuple[int, int]] = {}  # closed attempt → its last step, its leaf
        self.begins: dict[bytes, int] = {}  # run → the leaf of its start
        self.spent: dict[str, int] = {}  # class → the largest stated spend of its accounts
        self._stated: dict[Account, int] = {}
        self._charges = ChargeChecks(header)
        self._marks: dict[str, frozenset[str]] = {}  # class → what limits the curves of its plans
        self._previous = -1
        self.epochs_without_account = 0  # epochs without an account for a bound that somebody eligible signed
        self.unsure_epochs = 0  # epochs that are right only if a pruned contribution had a key that was revoked
        # accounts said to be exhausted where the leaves before do not show it: by leaf, with the check, and what was
        # charged in leaves before, or was open then
        self._unshown: list[tuple[int, EpochAccount, Callable[[Spending], bool], Spending]] = []
        self._left_out: dict[Account, list[Event]] = {}  # what their class was charged there

    def see(self, leaf: Leaf, time: int, digests: Mapping[bytes, int]) -> StepPlan:
        """Check an epoch and return its plan. `time` is that of the previous leaf, `digests` are of earlier checkpoints."""
        record = leaf.record
        assert isinstance(record, Epoch)
        self._check_form(leaf, record, time)
        self._check_chain(leaf.seq, record, digests)
        plan = self._plans.of(leaf.seq, record)
        self._charges.begin(record, plan)
        for cls, marks in epoch_marks(record, plan).items():
            self._marks[cls] = self._marks.get(cls, frozenset()) | marks
        for account in record.accounts:
            self._check_account(leaf.seq, record, plan, account)
        ended = leaf.time + self._header.epoch_clock  # at the latest: its time is rounded down
        self._check_missing(leaf.seq, record, plan, ended)
        self._check_population(leaf.seq, record, plan, ended)
        if self.spending.state() != record.state:
            reason = "its digest of the accountant's state does not match the charges up to here"
            fail(leaf.seq, Epoch, "verify.accountant-state-differs", reason)
        self.runs.add(record.run)
        self._charged.setdefault((record.run, record.plan), set()).update(each.bound for each in record.accounts)
        return plan

    def other_deltas(self) -> set[tuple[str, float]]:
        """(class, δ) of plans whose δ is not the header's: what they say of ε is not what the ledger says."""
        return self._plans.other_deltas

    def beyond_signed(self) -> list[str]:
        """Bounds that some epochs charge and others leave out, and that lost more than was signed if none did, in words.

        A keeper who charges the members of a class now by their bound and now only as a class splits what they lose.
        """
        found = []
        for bound, charges in self._left_out.items():
            most = signed_spend(bound.noise_micro, self._header.delta)
            if self.spending.events(bound) and (spend := nano_epsilon(self.spending.epsilon(bound, charges))) > most:
                lost = f"ε = {_epsilon_text(spend)}, and signed {_epsilon_text(most)}"
                found.append(f"bound {bound} lost up to {lost}")
        return found

    def check_exhausted(self, held: bool) -> int:
        """Check the bounds that were scaled, or left out, before the ledger shows that they were exhausted.

        Attempts of other runs that were open then are charges too; they are recorded later. Returns for how many it is
        not shown that they were open then: only the store says so, or the ledger was put back from a copy.
        """
        unsure = [each for each in self._unshown if not each[2](each[3])]
        for seq, account, exhausted, _ in unsure:
            if not held and not exhausted(self.spending):
                reason = f"account {account.bound} has factor {account.factor:g}, and its charges leave room for more"
                fail(seq, Epoch, "verify.not-exhausted", reason)
        return len(unsure)

    def check_generations(self, held: Iterable[tuple[bytes, int, int]]) -> int:
        """Check that the generations of every segment are there: in a leaf, said to be unrecorded, or `held`.

        Returns how many of them are not there. That an attempt is held, only the store says.
        """
        there: Counter[tuple[bytes, int]] = Counter()
        missing: dict[tuple[bytes, int], int] = {}
        wrong: list[tuple[int, str]] = []
        for run, index, generation in sorted({*self.attempts, *held}):
            segment, attempt = (run, index), (run, index, generation)
            missing[segment] = generation - there[segment]
            there[segment] += 1
            if missing[segment] > self._unrecorded.get(attempt, missing[segment]):
                name = f"generation {generation} of segment {index} of run {run.hex()[:8]}"
                wrong.append((self.attempts[attempt], f"{name} is there, and {missing[segment]} before it are missing"))
        if wrong:
            seq, reason = min(wrong)
            fail(seq, Epoch, "verify.generation-missing", reason)
        return sum(missing.values())

    def _check_form(self, leaf: Leaf, record: Epoch, time: int) -> None:
        seq = leaf.seq
        check_time_rounded(leaf, time, self._header.epoch_clock)
        for segment in record.segments:
            attempt = (record.run, segment.index, segment.generation)
            name = f"segment {segment.index}, generation {segment.generation} of run {record.run.hex()[:8]}"
            if (before := self.attempts.setdefault(attempt, seq)) != seq:
                reason = f"{name} is in the ledger already, in leaf {before}: it was replayed"
                fail(seq, Epoch, "verify.attempt-repeated", reason)
            self._unrecorded[attempt] = segment.unrecorded or 0
            self._withdrawals.check_segment(seq, record.run, segment)
            self._check_continues(seq, record.run, segment)
            if segment.outcome is SegmentOutcome.CLOSED:
                self._ends[attempt] = segment.last, seq

    def _check_continues(self, seq: int, run: bytes, segment: Segment) -> None:
        """Check that a segment starts where an earlier one ended, and that its members were read after that one's leaf.

        The members of the first segment must have been read after the leaf that records the start of the run.
        """
        if segment.index == segment.first == 0 and segment.after is None:
            end, before = 0, self.begins.get(run, -1)
        else:
            end, before = self._ends.get((run, segment.index - 1, segment.after or 0), (-1, -1))
        name = f"segment {segment.index} of run {run.hex()[:8]}"
        if end != segment.first:
            reason = f"{name} starts at step {segment.first}, where no earlier segment ended: one is missing"
            fail(seq, Epoch, "verify.segment-missing", reason)
        if before < seq and segment.eligibility <= before:
            reason = f"{name} continues from leaf {before}, but read its members after {segment.eligibility} leaves"
            fail(seq, Epoch, "verify.members-read-too-early", reason)

    def _check_chain(self, seq: int, record: Epoch, digests: Mapping[bytes, int]) -> None:
        size = -1 if record.previous is None else digests.get(record.previous)
        if size is None:
            fail(seq, Epoch, "verify.previous-checkpoint-unknown", "its previous checkpoint is not in this ledger")
        if size < self._previous:
            reason = "its previous checkpoint is older than that of the epoch before it"
            fail(seq, Epoch, "verify.previous-checkpoint-older", reason)
        self._previous = size

    def _check_account(self, seq: int, record: Epoch, plan: StepPlan, account: EpochAccount) -> None:
        def wrong(code: str, reason: str) -> NoReturn:
            fail(seq, Epoch, code, f"account {account.bound} {reason}")

        entry = next((each for each in plan.classes if each.name == account.cls), None)
        if entry is None:
            wrong("verify.account-class-unknown", "is of a class that its plan does not have")
        read, members = max(segment.eligibility for segment in record.segments), self._members
        unsigned = members.signed(account.cls, read) and not members.signed(account.bound, read)
        if account.noise_multiplier and unsigned:
            wrong("verify.account-bound-unsigned", "names a bound that nobody signed who was admitted")
        if not account.bound.signed and account.scaled != 1.0:
            reason = f"is a whole class, and its clip norms are scaled by {account.scaled:g}"
            wrong("verify.class-account-scaled", reason)
        if account.factor < 1:
            self._check_exhausted(seq, record, plan, account)
        scale = self._scales.setdefault((record.run, record.plan, account.bound), account.scale)
        if account.scale != scale:
            wrong("verify.account-scale-changed", f"has scale {account.scale:g}, earlier in the same run {scale:g}")
        norm = 0.0 if entry.public else account.scale * plan.norm(account.cls)
        if account.clip_norm and norm > account.clip_norm / 1e6 * (1 + _MULTIPLIER_TOLERANCE):
            signed = f"{account.clip_norm / 1e6:.9g}"
            wrong("verify.clip-norm-above-signed", f"is clipped at {norm:.9g}, above the signed clip norm {signed}")
        counted = self._charges.counted(record, plan, account)
        if isinstance(counted, Violation):
            wrong(*counted)
        self.spending.charge(account.bound, counted)
        for before, other, _, spending in self._unshown:
            if other.bound == account.bound and any(each.eligibility <= before for each in record.segments):
                spending.charge(account.bound, counted)
        if account.spend < self._stated.get(account.bound, 0):
            wrong("verify.spend-falls", "has lost less than an earlier epoch states")
        self._stated[account.bound] = account.spend
        self.spent[account.cls] = max(account.spend, self.spent.get(account.cls, 0))
        most = [self._most(account, each.eligibility) for each in record.segments] if counted else []
        bound = min((each for each in most if each is not None), default=None)
        marks = self._marks[account.cls]
        whole = not account.noise_multiplier or UNPROVEN in marks  # the class as a whole bounds each of its accounts
        risks = self._policy.risks(account.cls, read) if counted and whole else ()
        self.claims.append(SpendClaim(seq, account, self.spending.events(account.bound), bound, risks, marks))

    def see_public_number(self, seq: int, end: RunEnd) -> None:
        """Check that a run that protects only content used no class whose policy bounds the membership risk.

        The bound counts if it was in force from the start of the run. Later runs cannot keep such a bound either.
        """
        first = self.begins.get(end.run, seq)
        for cls in sorted({bound.cls for run, _, bound in self._scales if run == end.run}):
            self._marks[cls] |= {ZERO_OUT}
            risks = self._policy.risks(cls, first)
            if risks and all(each.of == "membership" for each in risks):
                reason = f"class {cls!r} has the risk bound {risks[0]}, but the run states that the number of contributions is public"
                fail(seq, RunEnd, "verify.risk-exceeded", reason)

    def _check_exhausted(self, seq: int, record: Epoch, plan: StepPlan, account: EpochAccount) -> None:
        """Check that a bound was scaled down, or left out, because of what was charged before, by a factor of the list."""
        if account.factor not in REMAINING_FACTORS["scale"]:
            reason = f"account {account.bound} has factor {account.factor:g}, which is not on the public list"
            fail(seq, Epoch, "verify.factor-not-listed", reason)
        if plan.rules or not plan.scales or plan.injection.occurrences is not None:
            reason = f"account {account.bound} has factor {account.factor:g} under a plan that cannot scale one by one"
            fail(seq, Epoch, "verify.factor-not-provable", reason)
        if not self.spending.exhausted(account, plan, record.segments):
            exhausted = partial(Spending.exhausted, account=account, plan=plan, segments=record.segments)
            self._unshown.append((seq, account, exhausted, self.spending.copy(account.bound)))

    def _most(self, account: EpochAccount, opened: int) -> int | None:
        """The bound: what was signed, or what the policy promised the class when the members were read."""
        if account.noise_multiplier:
            return signed_spend(account.noise_multiplier, self._header.delta)
        promised = self._policy.promised(account.cls, opened)
        if not promised:
            return None
        most = signed_spend(promised, self._header.delta)
        return most if most == UNBOUNDED else math.ceil(most * (1 + CLASS_TOLERANCE))

    def _check_population(self, seq: int, record: Epoch, plan: StepPlan, ended: int) -> None:
        """Check that a class never had more members than it declared: q is b/N, and N holds all of them."""
        for entry in plan.classes:
            declared = (each.population for each in self._policy.presets_since(entry.name, 0))
            most = max((each for each in (entry.population, *declared) if each is not None), default=math.inf)
            if any(self._members.exceed(entry.name, most, each.eligibility, ended) for each in record.segments):
                reason = f"class {entry.name!r} had more members than the {most} that it declares"
                fail(seq, Epoch, "verify.population-exceeded", reason)

    def _check_missing(self, seq: int, record: Epoch, plan: StepPlan, ended: int) -> None:
        """Check that no account is missing of which it is known that it took part.

        A bound with eligible members that a run never charged may have stayed out of it: no scale kept it, or they are
        not in its corpus. But a run that has charged a bound goes on charging it under the same plan, and a class that
        is trained on is charged as a whole, or at every bound of its members.
        """
        if (wrong := self._missing(record, plan, ended, sure=True)[0]) is not None:
            fail(seq, Epoch, *wrong)
        wrong, left_out = self._missing(record, plan, ended, sure=False)
        self.unsure_epochs += wrong is not None
        self.epochs_without_account += bool(left_out)
        whole = {each.cls: each.charges for each in record.accounts if not each.bound.signed}
        for bound in left_out:
            self._left_out.setdefault(bound, []).extend(whole.get(bound.cls, ()))

    def _missing(
        self, record: Epoch, plan: StepPlan, ended: int, *, sure: bool
    ) -> tuple[Violation | None, set[Account]]:
        """What `_check_missing` checks, and the bounds left out; if not `sure`, as if no pruned key had been revoked."""
        trained, here, members = _trained_classes(plan, record), {each.bound for each in record.accounts}, self._members
        reads = {segment.eligibility for segment in record.segments}
        for bound in sorted(self._charged.get((record.run, record.plan), set()) - here):
            if bound.cls in trained and any(members.eligible(bound, read, ended, sure=sure) for read in reads):
                reason = f"it charges nothing to bound {bound}, which its run charged before"
                reason = f"{reason}, although a contribution with that bound is eligible"
                return Violation("verify.account-missing", reason), set()
        signed = {(bound, read) for cls in trained for read in reads for bound in members.bounds(cls, read)}
        absent = [pair for pair in signed if pair[0] not in here]
        left_out = {bound for bound, read in absent if members.eligible(bound, read, ended, sure=sure)}
        uneven = plan.injection.occurrences is not None or adaptive_order(plan) is not None
        for cls in sorted(cls for cls in trained if Account(cls) not in here):
            charged = any(bound.cls == cls and bound in here for bound, _ in signed)
            if uneven or not charged or any(bound.cls == cls for bound in left_out):
                reason = f"it trains on class {cls!r}, and charges neither the class as a whole nor every bound in it"
                return Violation("verify.trained-class-not-charged", reason), left_out
        return None, left_out


def _trained_classes(plan: StepPlan, record: Epoch) -> set[str]:
    """The classes that its steps charge; under a cap on occurrences, those that any step of the plan charges."""
    capped = plan.injection.occurrences is not None
    spans = [(0, plan.steps)] if capped else [(each.first, each.last) for each in record.segments]
    return {e.name for e in plan.classes if any(plan.schedule_between(e.name, *span) for span in spans)}


def _epsilon_text(spend: int) -> str:
    return "∞" if spend == UNBOUNDED else f"{spend / NANO:.9f}"
