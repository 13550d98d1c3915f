"""`SpendLedger`: reserve, charge and record what runs take from a ledger's accounts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import RLock
from typing import TypeVar

from lamina import cbor, validate
from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account, Charge
from lamina.account.schedule import Event, EventCounts, bisect_int
from lamina.errors import LedgerDamaged, RunError
from lamina.ledger.attempts import (
    AccountTotal,
    Attempt,
    NoiseByStep,
    RunSpend,
    SpendTransaction,
    SpendView,
    add_charges,
)
from lamina.ledger.checked_leaves import CheckedLeaves
from lamina.ledger.records import Epoch, EpochAccount, NoiseChange, Segment, SegmentOutcome
from lamina.ledger.run_records import RunBegin
from lamina.ledger.spend_limits import (
    LimitExceeded,
    SpendLimits,
    budget_exceeded,
    checked_bounds,
    checked_charges,
    checked_nonce,
    checked_run,
    checked_text,
)
from lamina.ledger.spending import Limit, Spending, planned_charges, signed_limit
from lamina.ledger.store.rows import WHOLE_BUDGET_SEGMENT, RunHold, StoreReader, StoreWriter, head_of
from lamina.ledger.writer import Ledger
from lamina.plan.charges import SignedAccount, bound_charges, follows_budget, plan_charges, remaining_accounts
from lamina.plan.risk import RiskBound
from lamina.plan.step_plan import StepPlan


class StaleEpoch(Exception):
    """Another epoch was appended in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochBuilder:
    """Makes the epoch of an attempt from its open charges.

    Where noise follows a budget, the attempt itself charges nothing; the first epoch of the run records the whole budget.
    """

    run: bytes
    segment: Segment
    plan: StepPlan
    digest: bytes
    variance: Sequence[float]
    changes: NoiseByStep = ()

    def there(self, rows: StoreReader, leaves: CheckedLeaves) -> int | None:
        """The leaf that records the attempt already."""
        key = (self.run, self.segment.index, self.segment.generation)
        if (seq := leaves.attempts(rows).get(key)) is None:
            return None
        found = recorded_segment(rows, leaves, key, seq)
        if found.nonce != self.segment.nonce:
            problem = f"leaf {seq} records {self._name} with another nonce: a copy of the run made it"
            raise RunError("spend.recorded-by-other-run", problem, "give the ledger that the run was charged in")
        if (found.outcome, self.segment.outcome) == (SegmentOutcome.ABANDONED, SegmentOutcome.CLOSED):
            problem = f"leaf {seq} records {self._name} as abandoned, by a copy of the run or by lamina spend --lost"
            remedy = "start the run again: the segment is done again, and charged again"
            raise RunError("spend.recorded-as-abandoned", problem, remedy)
        return seq

    @property
    def _name(self) -> str:
        return f"segment {self.segment.index}, generation {self.segment.generation} of run {self.run.hex()[:8]}"

    def epoch(
        self, rows: StoreReader, leaves: CheckedLeaves, recorded: Spending, scales: Mapping[str, float]
    ) -> tuple[Epoch, tuple[RunHold, ...]]:
        """The record, with the spend of every account after it; and the open charges that it records."""
        key = (self.run, self.segment.index, self.segment.generation)
        mine = rows.hold(*key)
        if mine is None or mine.nonce != self.segment.nonce:
            remedy = "give the ledger that the run was charged in"
            raise RunError("spend.never-charged", f"{self._name} was never charged to this ledger", remedy)
        holds = rows.holds(self.run)
        whole = [h for h in holds if h.segment >= WHOLE_BUDGET_SEGMENT and Attempt.decode(h).plan == self.digest]
        held = {each: Attempt.decode(each) for each in (mine, *whole)}
        if held[mine].plan not in (b"", self.digest):  # a leaf that would not verify is there for good
            before, now = held[mine].plan.hex()[:16], self.digest.hex()[:16]
            problem = f"{self._name} was charged under plan {before}, and is to be recorded under {now}"
            raise RunError("spend.plan-differs", problem, "give the plan that it was charged under")
        own = {Account.parse(name): scale for each in held.values() for name, scale in each.scales.items()}
        known = {**{Account.parse(name): scale for name, scale in scales.items()}, **own}
        taken: dict[Account, list[Event]] = {}
        if follows_budget(self.plan) or self.plan.injection.occurrences is not None:
            charged = {*recorded.scales(self.run, self.digest), *own}
            taken = {name: [] for name in (*self._trained(), *(known.keys() & charged))}  # some epochs take nothing
        for found in held.values():
            for one in found.charges:
                taken.setdefault(one.account, []).append(one.event)
        if unknown := [account for account in taken if account.signed and account not in known]:
            problem = f"the scale of account {str(unknown[0])!r} in this run is not known"
            raise RunError("spend.scale-unknown", problem, "give the accounts that the run was charged with")
        factors: dict[Account, float | None] = {}
        for account, factor in ((Account.parse(name), factor) for name, factor in held[mine].factors.items()):
            view = SpendView(rows, recorded)
            factors[account], charges = self._shown_factor(view, account, known[account], factor)
            taken[account] = list(charges)
        after = recorded.copy()
        for account, events in taken.items():
            after.charge(account, events)
        accounts = []
        for account in sorted(taken):
            cls, clip, noise = account
            scale = known[account] if account.signed else 1.0
            made = EpochAccount(
                cls=cls, clip_norm=clip, noise_multiplier=noise, scale=scale, charges=tuple(taken[account]),
                spend=after.spend(account), exhausted=factors.get(account),
            )  # fmt: skip
            accounts.append(made)
        earlier = [(*key[:2], generation) for generation in range(self.segment.generation)]
        known_attempts = leaves.attempts(rows)
        unrecorded = sum(
            each not in known_attempts for each in earlier
        )  # includes open ones, which only the store records
        epoch = Epoch(
            run=self.run,
            segments=(replace(self.segment, unrecorded=unrecorded or None),),
            plan=self.digest,
            variance=tuple(float(each) for each in self.variance),
            accounts=tuple(accounts),
            state=after.state(),
            changes=tuple(NoiseChange(step=step, variance=noise) for step, noise in self.changes) or None,
        )
        return epoch, tuple(held)

    def _shown_factor(
        self, view: SpendView, account: Account, scale: float, factor: float
    ) -> tuple[float | None, tuple[Event, ...]]:
        """The factor of an exhausted bound, and its charges; None if it is not exhausted.

        A ledger that was put back may lack the charges that exhausted it. Then the bound has room, and is charged for
        the next larger factor: more than was taken, and nobody who verifies has to believe what the ledger lacks.
        """
        (cls, clip, noise), segments = account, [self.segment]
        before = view.spending(account, without=(self.run, self.segment.index, self.segment.generation))
        while factor < 1:
            asked = EpochAccount(
                cls=cls, clip_norm=clip, noise_multiplier=noise, scale=scale, charges=(), spend=0, exhausted=factor
            )
            if before.exhausted(asked, self.plan, segments):
                break
            factor = asked.next_factor
        return factor if factor < 1 else None, planned_charges(self.plan, cls, scale * factor, segments)

    def settle(self, rows: StoreWriter, seq: int, parts: Sequence[RunHold], epochs: int) -> None:
        """In the transaction of the leaf: replace the open charges by the leaf."""
        if head_of(rows).epoch != epochs:
            raise StaleEpoch
        for each in parts:
            held = Attempt.decode(each)
            kept = Attempt(plan=held.plan, units=held.units).encode() if held.units else b""
            rows.put_hold(each._replace(leaf=seq, body=kept))
            for name in (
                held.factors.keys() & rows.terms().keys()
            ):  # the leaf may charge more (`_shown_factor`): price it
                rows.put_terms(name, cbor.encode([]))

    def _trained(self) -> list[Account]:
        """The classes that the plan charges. Where it charges unevenly, each is in every epoch."""
        return [each.account for each in plan_charges(self.plan, 0, self.plan.steps)]


def recorded_segment(rows: StoreReader, leaves: CheckedLeaves, key: tuple[bytes, int, int], seq: int) -> Segment:
    """An attempt as its leaf records it."""
    record = next(leaves.records(rows, Epoch, seq, seq + 1)).record
    assert isinstance(record, Epoch)
    return next(each for each in record.segments if (each.index, each.generation) == key[1:])


T = TypeVar("T")
_MOST = 2**63 - 1
_MOST_TRIES = 1000  # how often another run may record an epoch first


class SpendLedger:
    """The charges of all runs by account. Several processes, and with PostgreSQL machines, may use one ledger.

    An attempt that has ended is a leaf, an `Epoch`. Open attempts, which are charged like any other, and reservations
    of runs have no leaf yet and are rows in the ledger's store.

    Guarantee. Let C be all that was ever charged to an account, over runs, redone generations and abandoned attempts,
    and R what runs have reserved. A charge or reservation under a bound at (δ, accountant) succeeds only if afterwards
    ε(C + R) ≤ bound, all events priced jointly; otherwise nothing changes. The same holds for the signed bound, or the
    bounds on ε and risk in the ledger's policy, at the ledger's own δ and accountant, which `verify` checks. Charged means spent:
    nothing is ever taken off C. A reservation may be dropped or replaced.

    When nothing need be priced. An account keeps the budgets of its last admission, and at all times ε(C + R) ≤
    bound for these. It held when they were written, since C + R was priced then. A charge out of the run's own
    reservation moves steps from R to C and leaves C + R as it is; so does an epoch that records an attempt, except
    of a bound that was exhausted, whose budgets it drops; dropping a reservation makes C + R smaller, and fewer
    events never cost more; everything else is an admission, which prices C + R with the reservations of all runs
    and writes its own budgets. So a charge that adds nothing to C + R is within its bound if its budget is no
    stricter than the account's: same δ and accountant, bound not lower. Under any other budget C + R is priced
    again. Hence a plan made for exactly the bound is charged to its last step, a lowered bound applies at the next
    charge, and a run stops whose bound was exceeded by another run with a looser one.

    A ledger restored from a copy is completed by charging again: the same charge twice is charged once.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._recorded = Spending(ledger.header)
        self._limits = SpendLimits(ledger)
        self._plan: tuple[StepPlan, bytes] | None = None  # the last plan, and its bytes
        self._ended: dict[bytes, tuple[int, list[Attempt]]] = {}  # run → leaves read, its attempts in them
        self._turn = RLock()  # threads take turns in reading on

    @property
    def path(self) -> str:
        """The store of the ledger, for messages."""
        return self.ledger.name

    @property
    def origin(self) -> str:
        """The origin of the ledger."""
        return self.ledger.origin

    def next_generation(self, run: str, segment: int) -> int:
        """The next generation of a segment to charge: 0 if it never was charged."""
        id = bytes.fromhex(checked_run(run))
        return self._ask(lambda _, rows: self.ledger.checked(rows).generations(rows, id, segment))

    def recorded(self, run: str, segment: int, generation: int) -> Segment | None:
        """The attempt as a leaf records it; None if none does."""
        key = (bytes.fromhex(checked_run(run)), segment, generation)

        def look(_: SpendView, rows: StoreReader) -> Segment | None:
            leaves = self.ledger.checked(rows)
            leaf = leaves.attempts(rows).get(key)
            return None if leaf is None else recorded_segment(rows, leaves, key, leaf)

        return self._ask(look)

    def attempts(self, run: str) -> list[Attempt]:
        """Return every charged attempt of a run: those that have ended, in the order of their leaves, then the open one."""
        id = bytes.fromhex(checked_run(run))

        def look(_: SpendView, rows: StoreReader) -> list[Attempt]:
            leaves = self.ledger.checked(rows)
            read, ended = self._ended.get(id, (0, []))
            if leaves.size < read:  # the view of an older transaction
                read, ended = 0, []
            epochs = (leaf.record for leaf in leaves.records(rows, Epoch, read, leaves.size))
            ended = [
                *ended,
                *(_ended_attempt(rows, each) for each in epochs if isinstance(each, Epoch) and each.run == id),
            ]
            self._ended[id] = leaves.size, ended
            return [*ended, *(Attempt.decode(each) for each in rows.holds(id) if each.attempt)]

        return self._ask(look)

    def fits(self, run: str, *, charge: Charge, bound: float, besides: Sequence[Charge] = ()) -> int:
        """How many steps of `charge`, at most charge.steps, the run may reserve together with `besides`.

        Its present reservation does not count against it. `reserve` admits the result, unless another process charges
        or reserves in between.
        """
        (charge,), (bound,) = checked_charges([charge]), checked_bounds({"": bound}).values()
        run = checked_run(run)
        name, besides, asked_steps = charge.account, checked_charges(besides), charge.event.steps
        asked = Limit(epsilon=bound, delta=charge.delta, accountant=charge.accountant)

        def look(
            view: SpendView, rows: StoreReader
        ) -> tuple[EventCounts, EventCounts, tuple[Limit, ...], list[Limit], frozenset[str]]:
            wanted = self._limits.wanted(rows, name, asked)
            marks = view.marks(name.cls) if any(each.risk for each in wanted) else frozenset()
            return view.standing(name, without=run), view.reserved(name, run), view.terms(name), wanted, marks

        others, own, held, wanted, marks = self._ask(look)
        others = add_charges(dict(others), besides)
        event = charge.event.key
        covered = all(any(h.within(terms) for h in held) for terms in wanted)
        covered = covered and all(own.get(c.event.key, 0) >= c.event.steps for c in besides)
        promised = own.get(event, 0) if covered else 0

        def admitted(steps: int) -> bool:
            together = add_charges(dict(others), [charge.times(steps)])
            return steps <= promised or all(terms.price(together, marks) <= terms.most for terms in wanted)

        if admitted(asked_steps):
            return asked_steps
        return bisect_int(lambda steps: not admitted(steps), 0, asked_steps)[0]

    def total(
        self, name: str, *, delta: float, accountant: str = "pld", besides: Sequence[Charge] = (),
        risk: RiskBound | None = None,
    ) -> AccountTotal:  # fmt: skip
        """Return ε of an account over all runs at this δ by this accountant; `besides` also counts as committed.

        With `risk`: the rate that this bound limits, instead of ε.
        """

        def look(
            view: SpendView, _: StoreReader
        ) -> tuple[EventCounts, EventCounts, tuple[RunSpend, ...], frozenset[str]]:
            account = Account.parse(name)
            marks = view.marks(account.cls) if risk else frozenset[str]()
            return view.charged(account), view.standing(account), view.runs(account), marks

        charged, committed, runs, marks = self._ask(look)
        committed = add_charges(dict(committed), checked_charges(besides))
        limit = Limit(delta=delta, accountant=accountant, risk=risk)
        most = limit.price(committed, marks)  # bounds what was charged too: it is part of it
        return AccountTotal(spent=min(most, limit.price(charged, marks)), committed=most, runs=runs)

    def spent(self, run: str, name: str, *, delta: float, accountant: str = "pld") -> float:
        """ε of what one run charged to an account, redone segments included."""
        run = checked_run(run)
        events = self._ask(lambda view, _: view.of_run(run, Account.parse(name)))
        return pooled_epsilon(events, delta=delta, name=accountant)

    def accounts(self) -> tuple[tuple[Account, Limit], ...]:
        """Return every account, first with the δ and accountant of its last charge, then with those of the ledger."""

        def look(view: SpendView, _: StoreReader) -> list[tuple[Account, Sequence[Limit]]]:
            return [(account, view.terms(account)) for account in view.accounts()]

        header, found = self.ledger.header, []
        for account, terms in self._ask(look):
            kinds = dict.fromkeys((t.delta, t.accountant) for t in terms)
            kinds |= {(header.delta, header.accountant): None}
            found += [(account, Limit(delta=delta, accountant=accountant)) for delta, accountant in kinds]
        return tuple(found)

    def labels(self) -> dict[str, str]:
        """Every run that ever reserved or charged, with its label."""
        return self._ask(lambda view, _: view.labels())

    def scales(self, run: str, plan: StepPlan) -> dict[str, float]:
        """The signed bounds that a run charged under a plan so far, each with its scale."""
        id, digest = bytes.fromhex(checked_run(run)), self.digest(plan)

        def look(view: SpendView, rows: StoreReader) -> dict[str, float]:
            found = {str(account): scale for account, scale in self._recorded.scales(id, digest).items()}
            for hold in rows.holds(id):
                held = Attempt.decode(hold)
                if held.plan == digest:
                    found |= held.scales
            return {name: scale for name, scale in found.items() if Account.parse(name).signed}

        return self._ask(look)

    def exhausted(
        self, plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount], factors: Sequence[float]
    ) -> dict[str, float]:
        """The signed bounds that are exhausted for the steps first … last-1, each with the largest factor that fits.

        A factor fits if all that was ever charged, and the steps at that factor, keep the signed bound, as `charge` asks.
        Reservations have no part in it: who reads the ledger finds the same.
        """
        spending, found = self._ask(lambda view, _: view.spending(*(Account.parse(each.name) for each in accounts))), {}
        for each in accounts:
            bound = Account.parse(each.name)
            for factor in factors:
                scaled = remaining_accounts([each], {each.name: factor})
                more = [one.event for one in bound_charges(plan, first, last, scaled)]
                if not more or spending.epsilon(bound, more) <= signed_limit(bound[2], spending.delta):
                    break
            if factor < 1:
                found[each.name] = factor
        return found

    def digest(self, plan: StepPlan) -> bytes:
        """The digest of a plan. The last plan is encoded only once."""
        return hashlib.sha256(self._encoded(plan)).digest()

    def _encoded(self, plan: StepPlan) -> bytes:
        if self._plan is None or self._plan[0] is not plan:
            self._plan = plan, plan.to_cbor()
        return self._plan[1]

    def _followed(self, rows: StoreReader) -> Spending:
        leaves = self.ledger.checked(rows)
        self._recorded.follow(rows, leaves.size, leaves)
        return self._recorded

    def _ask(self, look: Callable[[SpendView, StoreReader], T]) -> T:
        def once() -> T:
            with self._turn, self.ledger.store.read() as rows:
                self.ledger.check_open(rows)
                return look(SpendView(rows, self._followed(rows)), rows)

        return self.ledger.retry_while_lost(once)

    def reserve(
        self, run: str, *, charges: Sequence[Charge], bounds: Mapping[str, float], label: str = "",
        plan: StepPlan | None = None,
    ) -> None:  # fmt: skip
        """Reserve the steps of `charges` for the run, in place of its earlier reservation.

        Raises BudgetExceeded, and changes nothing, if an account would exceed its bound. `plan` is kept for the record.
        """
        run, label = checked_run(run), checked_text(label, "label")
        asked, limits = checked_charges(charges), checked_bounds(bounds)

        def work(transaction: SpendTransaction, rows: StoreWriter) -> None:
            transaction.enter(run, label)
            before = {each.account: transaction.standing(each.account) for each in asked}
            if plan is not None:
                rows.put_blob(self.digest(plan), self._encoded(plan))
            transaction.reserve(run, asked, b"" if plan is None else self.digest(plan))
            self._limits.admit(transaction, rows, asked, limits, before)

        self._in_transaction(work, run, label)

    def charge(
        self, run: str, *, segment: int, generation: int, nonce: bytes, charges: Sequence[Charge],
        bounds: Mapping[str, float], scales: Mapping[str, float] | None = None, plan: bytes = b"",
        begun: Attempt | None = None, already: bool = False, factors: Mapping[str, float] | None = None,
        units: Sequence[Charge] = (), prev: bytes | None = None,
    ) -> bool:  # fmt: skip
        """Charge a segment before its first random draw; its steps come off the run's reservation.

        Args:
            scales: of signed bounds, for the record.
            plan: its digest, for the record.
            begun: the attempt, for the record.
            already: noise was drawn before, so the charge counts whatever the bounds are now.
            factors: of the signed bounds that are exhausted, for the record.
            units: what the attempt takes of an adaptive budget, for `attempts`.
            prev: the nonce of the run's latest attempt, which must have ended; 16 zeros if there is none. None for a
                whole budget, and for what is entered again.

        Returns:
            True if it is charged, now or earlier with the same nonce. False if this generation was charged with another
            nonce: somebody runs a copy of this run, and nothing is charged. Raises BudgetExceeded, and charges nothing,
            if an account would exceed its bound; RunError if `prev` is not the latest attempt.
        """
        run = checked_run(run)
        limits = checked_bounds(bounds)
        segment = validate.whole(RunError, "spend.number-out-of-range", least=0, most=_MOST, segment=segment)
        generation = validate.whole(RunError, "spend.number-out-of-range", least=0, most=_MOST, generation=generation)
        key, nonce = (bytes.fromhex(run), segment, generation), checked_nonce(nonce)
        held = replace(
            begun or Attempt(), segment=segment, generation=generation, nonce=nonce, charges=checked_charges(charges),
            units=checked_charges(units), plan=plan, scales=dict(scales or {}), factors=dict(factors or {}),
        )  # fmt: skip

        def work(transaction: SpendTransaction, rows: StoreWriter) -> bool:
            if (earlier := _earlier_charge(rows, self.ledger.checked(rows), key)) is not None:
                if earlier.nonce == nonce and earlier.leaf is None and not _same_charges(Attempt.decode(earlier), held):
                    problem = (
                        f"segment {segment}, generation {generation} of run {run[:8]} is charged in ledger '{self.path}' "
                        "already, with other charges"
                    )
                    raise RunError("spend.charged-differently", problem, "charge a new generation")
                return earlier.nonce == nonce
            if prev is not None and (latest := latest_nonce(rows, self.ledger.checked(rows), key[0])) != prev:
                problem = (
                    f"the latest attempt of run {run[:8]} in the ledger '{self.path}' is {latest.hex()[:8]}, and segment "
                    f"{segment} was to follow attempt {prev.hex()[:8]}: another process continued this run"
                )
                raise RunError("spend.not-latest", problem, "start the run again")
            if prev is not None and any(each.attempt for each in rows.holds(key[0])):
                problem = f"run {run[:8]} has an open attempt in the ledger '{self.path}'"
                raise RunError("spend.attempt-open", problem, "start the run again")
            transaction.enter(run)
            before = {each.account: transaction.standing(each.account) for each in held.charges}
            transaction.charge(run, held)
            if already:
                for name in before:
                    transaction.set_terms(name, ())  # nothing is known of them until they are priced again
            else:
                self._limits.admit(transaction, rows, held.charges, limits, before)
            return True

        return self._in_transaction(work, run, "")

    def record(
        self, run: str, key: tuple[int, int, bytes], begun: Attempt, outcome: SegmentOutcome, *, plan: StepPlan,
        scales: Mapping[str, float],
    ) -> int:  # fmt: skip
        """Append the epoch of a charged attempt that has ended, and sign a checkpoint; the index of its leaf.

        An attempt that a leaf records already, under the same nonce, is not recorded again.

        Args:
            key: segment, generation and nonce.
            scales: of signed bounds, as far as their charges do not say them.
        """
        id, data = bytes.fromhex(checked_run(run)), self._encoded(plan)

        # in a ledger that was restored from an older copy, leaves are not where they were when the segment was opened
        def look(_: SpendView, rows: StoreReader) -> tuple[int | None, int]:
            leaves = self.ledger.checked(rows)
            if key[0]:
                return leaves.attempts(rows).get((id, key[0] - 1, begun.after)), leaves.size
            starts = leaves.records(rows, RunBegin)
            mine = (each.seq for each in starts if isinstance(each.record, RunBegin) and each.record.run == id)
            return next(mine, None), leaves.size

        before, size = self._ask(look)
        read = min(max(begun.eligibility, 1 if before is None else before + 1), size)
        begun = replace(begun, segment=key[0], generation=key[1], nonce=key[2])
        segment, variance = begun.as_segment(outcome, read), begun.applied(plan)
        ended = EpochBuilder(
            run=id, segment=segment, plan=plan, digest=self.digest(plan), variance=variance, changes=begun.changes
        )

        def once() -> int | None:
            with self._turn, self.ledger.store.read() as rows:
                self.ledger.check_open(rows)
                recorded, leaves = self._followed(rows), self.ledger.checked(rows)
                if (there := ended.there(rows, leaves)) is not None:
                    return there
                epoch, parts = ended.epoch(rows, leaves, recorded, scales)
                expected = recorded.epochs + 1

            def settle(rows: StoreWriter, seqs: list[int]) -> None:
                ended.settle(rows, seqs[0], parts, expected)

            try:
                return self.ledger.append_with([epoch], [data], settle)[0]
            except StaleEpoch:  # another run was quicker, so the spends have changed
                return None

        leaf = None
        for _ in range(_MOST_TRIES):
            if (leaf := self.ledger.retry_while_lost(once)) is not None:
                break
        if leaf is None:
            problem = f"other runs recorded epochs {_MOST_TRIES} times while segment {key[0]} of run {run[:8]} waited"
            raise RunError("spend.too-many-writers", problem, "start the run again; nothing is lost")
        if self.ledger.signs:
            self.ledger.checkpoint()
        return leaf

    def finish(self, run: str) -> None:
        """Drop the rest of the run's reservation. Its charges stay."""
        run = checked_run(run)
        self._in_transaction(lambda transaction, rows: transaction.leave(run), run, "")

    def abandon_run(self, run: str) -> int:
        """Finish a lost run and record its open attempts as abandoned; the number of attempts.

        Should it continue after all, it does them again.
        """
        count = self.give_up(run)
        self.finish(run)
        return count

    def give_up(self, run: str) -> int:
        """Record the open attempts of a run as abandoned; the number of attempts."""
        id = bytes.fromhex(run := checked_run(run))
        found = [hold for hold in self._ask(lambda _, rows: rows.holds(id)) if hold.attempt]
        for hold in found:
            held = Attempt.decode(hold)
            if (data := self.ledger.blob(held.plan)) is None or not held.last:
                problem = f"the ledger does not know enough of segment {hold.segment} of run {run[:8]} to record it"
                raise RunError("spend.attempt-unknown", problem, "resume the run, which knows")
            plan = StepPlan.from_cbor(data)
            self.record(run, held.key, held, SegmentOutcome.ABANDONED, plan=plan, scales=held.scales)
        return len(found)

    def _in_transaction(self, work: Callable[[SpendTransaction, StoreWriter], T], run: str, label: str) -> T:
        def once(rows: StoreWriter) -> T:
            return work(SpendTransaction(rows, self._followed(rows)), rows)

        try:
            with self._turn:
                return self.ledger.change_open(once)
        except LimitExceeded as refused:  # the message is made after the ledger is free again
            account, limit, asked, epsilon = refused.args
            now = self.total(str(account), delta=limit.delta, accountant=limit.accountant, risk=limit.risk)
            raise budget_exceeded(
                path=self.path, origin=self.origin, account=account, limit=limit, now=now, run=run, label=label,
                asked=asked, epsilon=epsilon,
            ) from None  # fmt: skip


FIRST_NONCE = bytes(16)  # what the first attempt of a run follows


def latest_nonce(rows: StoreReader, leaves: CheckedLeaves, run: bytes) -> bytes:
    """Return the nonce of the latest attempt of a run: its open row, or else the newest of its leaves."""
    if opened := [each for each in rows.holds(run) if each.attempt]:
        return opened[-1].nonce
    ended = {key: seq for key, seq in leaves.attempts(rows).items() if key[0] == run}
    if not ended:
        return FIRST_NONCE
    key = max(ended, key=lambda each: (ended[each], each))
    return recorded_segment(rows, leaves, key, ended[key]).nonce


def _ended_attempt(rows: StoreReader, epoch: Epoch) -> Attempt:
    """Return the last attempt of an epoch."""
    last, plan = epoch.segments[-1], _plan_of(epoch.plan, rows.blob(epoch.plan))
    hold = rows.hold(epoch.run, last.index, last.generation) if follows_budget(plan) else None
    if follows_budget(plan) and (hold is None or hold.nonce != last.nonce or not hold.body):
        problem = f"the ledger lost what segment {last.index} of run {epoch.run.hex()[:8]} took of its budget"
        raise LedgerDamaged("spend.row-unreadable", problem, "restore the ledger from a copy")
    charges = tuple(
        Charge(account=each.bound, event=event, delta=plan.delta(each.cls), accountant=plan.accountant)
        for each in (epoch.accounts if hold is None else ())
        for event in each.charges
    )
    return Attempt(
        segment=last.index, generation=last.generation, nonce=last.nonce, first=last.first, last=last.last,
        charges=charges, units=() if hold is None else Attempt.decode(hold).units, plan=epoch.plan,
        scales={str(each.bound): each.scale for each in epoch.accounts if each.bound.signed},
        factors={str(each.bound): each.exhausted for each in epoch.accounts if each.exhausted is not None},
        eligibility=last.eligibility, after=last.after or 0, variance=tuple(epoch.variance),
        changes=tuple((each.step, tuple(each.variance)) for each in epoch.changes or ()), outcome=last.outcome,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _plan_of(digest: bytes, data: bytes | None) -> StepPlan:
    if data is None or hashlib.sha256(data).digest() != digest:
        problem = f"the ledger lost plan {digest.hex()[:16]}, under which it records an epoch"
        raise LedgerDamaged("spend.plan-missing", problem, "restore the ledger from a copy")
    return StepPlan.from_cbor(data)


def _earlier_charge(rows: StoreReader, leaves: CheckedLeaves, key: tuple[bytes, int, int]) -> RunHold | None:
    """Return the earlier charge of an attempt, recorded in a leaf or open."""
    if (leaf := leaves.attempts(rows).get(key)) is not None:
        return RunHold(*key, recorded_segment(rows, leaves, key, leaf).nonce, leaf, b"")
    return rows.hold(*key)


def _same_charges(earlier: Attempt, held: Attempt) -> bool:
    pairs = (earlier.charges, held.charges), (earlier.units, held.units)
    return all(sorted(before, key=repr) == sorted(now, key=repr) for before, now in pairs)
