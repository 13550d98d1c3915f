"""`SpendLedger`: reserve, charge and record what runs take from a ledger's accounts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import TypeVar

from lamina.account.accountants import pooled_epsilon
from lamina.account.schedule import EventCounts, rdp_order_of
from lamina.errors import LedgerDamaged, RunError
from lamina.ledger import records as leaves
from lamina.ledger.store.interface import head_of
from lamina.ledger.records import Epoch, EpochAccount, EpochCharge, Segment, SegmentOutcome
from lamina.ledger.store.interface import WHOLE_BUDGET_SEGMENT, RunHold, StoreReader, StoreWriter
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.spend import charge as charges
from lamina.spend.accounts import (
    AccountBudget,
    AccountTotal,
    RecordedSpend,
    SignedAccount,
    account_bound,
    account_total,
    budget_exceeded,
    is_bound,
)
from lamina.spend.charge import (
    Charge,
    checked_bounds,
    checked_charges,
    checked_count,
    checked_nonce,
    checked_run,
    checked_text,
    follows_budget,
)
from lamina.spend.reservation import (
    BoundExceeded,
    OpenAttempt,
    OpenCharges,
    SpendLimits,
    SpendTransaction,
    SpendView,
    add_charges,
    event_key,
)


class StaleEpoch(Exception):
    """Another epoch was appended meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochBuilder:
    """An attempt of a run under a plan. Its charges are those that are held, neither more nor less.

    Where noise follows a budget, an attempt itself is charged nothing; the first epoch of the run records the whole.
    """

    run: bytes
    segment: Segment
    plan: StepPlan
    digest: bytes
    variance: Sequence[float]

    def there(self, rows: StoreReader) -> int | None:
        """The leaf that records it already."""
        key = (self.run, self.segment.index, self.segment.generation)
        if (seq := rows.attempt(*key)) is None:
            return None
        found, name = (recorded_segment(rows, key, seq), f"segment {self.segment.index} of run {self.run.hex()[:8]}")
        if found.nonce != self.segment.nonce:
            raise RunError(
                "spend.leaf-records-generation",
                f"leaf {seq} records generation {self.segment.generation} of {name} as somebody else's",
                "give the ledger that the run was charged in",
            )
        if (found.outcome, self.segment.outcome) == (SegmentOutcome.ABANDONED, SegmentOutcome.CLOSED):
            raise RunError(
                "spend.leaf-records-given",
                f"leaf {seq} records {name} as given up: a copy of the run says so, or somebody who took it for lost "
                "(lamina spend --lost)",
                "start the run again: the segment is done again, and charged again",
            )
        return seq

    def epoch(
        self, rows: StoreReader, recorded: RecordedSpend, scales: Mapping[str, float]
    ) -> tuple[Epoch, tuple[RunHold, ...]]:
        """The record, with what every account has lost after it; and what is held and stands in it."""
        key = (self.run, self.segment.index, self.segment.generation)
        mine = rows.hold(*key)
        if mine is None or mine.nonce != self.segment.nonce:
            raise RunError(
                "spend.segment-generation-run-ended",
                f"segment {self.segment.index}, generation {self.segment.generation} of run {self.run.hex()[:8]} has "
                "ended, and was never charged to this ledger",
                "give the ledger that the run was charged in",
            )
        whole = [each for each in rows.holds(self.run) if each.segment >= WHOLE_BUDGET_SEGMENT and self._of_plan(each)]
        held = {each: OpenCharges.decode(each.body) for each in (mine, *whole)}
        if held[mine].plan not in (b"", self.digest):  # a leaf that would not verify is there for good
            raise RunError(
                "spend.segment-run-charged",
                f"segment {self.segment.index} of run {self.run.hex()[:8]} was charged under plan "
                f"{held[mine].plan.hex()[:16]}, and is to be recorded under {self.digest.hex()[:16]}",
                "give the plan that it was charged under",
            )
        known = {**scales, **{name: scale for each in held.values() for name, scale in each.scales.items()}}
        taken: dict[str, list[EpochCharge]] = {}
        if follows_budget(self.plan) or self.plan.injection.occurrences is not None:
            charged = {*recorded.scales(self.run, self.digest), *(n for each in held.values() for n in each.scales)}
            taken = {name: [] for name in (*self._trained(), *(known.keys() & charged))}  # some epochs take nothing
        for found in held.values():
            for one in found.charges:
                taken.setdefault(one.cls, []).append(_recorded_charge(one))
        if unknown := [name for name in taken if is_bound(name) and name not in known]:
            raise RunError(
                "spend.scale-account-trained",
                f"the scale at which account {unknown[0]!r} was trained on is not known",
                "give the accounts that the run was charged with",
            )
        after = recorded.spending.copy()
        for name, mine_of in taken.items():
            after.charge(account_bound(name), mine_of)
        accounts = []
        for name in sorted(taken, key=account_bound):
            cls, clip, noise = account_bound(name)
            accounts.append(
                EpochAccount(
                    cls=cls,
                    clip_norm=clip,
                    noise_multiplier=noise,
                    scale=known[name] if is_bound(name) else 1.0,
                    charges=tuple(taken[name]),
                    spend=after.spend((cls, clip, noise)),
                )
            )
        epoch = Epoch(
            run=self.run,
            segments=(self.segment,),
            plan=self.digest,
            variance=tuple(float(each) for each in self.variance),
            accounts=tuple(accounts),
            state=after.state(),
        )
        return epoch, tuple(held)

    def settle(self, rows: StoreWriter, seq: int, parts: Sequence[RunHold], epochs: int) -> None:
        """In the transaction of the leaf: from now on it counts, and nothing is held any more."""
        if head_of(rows).epoch != epochs:
            raise StaleEpoch
        for each in parts:
            left = OpenCharges((), place=OpenCharges.decode(each.body).place)
            rows.put_hold(each._replace(leaf=seq, body=left.encode()))

    def _trained(self) -> list[str]:
        """The classes that a plan which charges unevenly takes something from: each is in every epoch."""
        return [each.cls for each in charges.plan_charges(self.plan, 0, self.plan.steps)]

    def _of_plan(self, hold: RunHold) -> bool:
        """Whether a budget that is held as a whole is this plan's."""
        return OpenCharges.decode(hold.body).plan == self.digest


def recorded_segment(rows: StoreReader, key: tuple[bytes, int, int], seq: int) -> Segment:
    """An attempt, as its leaf has it."""
    data = rows.leaf(seq)
    record = None if data is None else leaves.decode_leaf(data).record
    if not isinstance(record, Epoch):
        raise LedgerDamaged(
            "spend.leaf-no-epoch", f"leaf {seq} is no epoch, and an attempt is recorded there", "restore the ledger"
        )
    return next(each for each in record.segments if (each.index, each.generation) == key[1:])


def _recorded_charge(one: charges.Charge) -> EpochCharge:
    return EpochCharge(sigma=one.sigma, rate=one.q, steps=one.steps, order=rdp_order_of(one.accountant))


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedAccount:
    """An account, by its name (a class, or CLASS@c=…,z=…), with a δ and accountant of its charges."""

    cls: str
    delta: float
    accountant: str


class SpendReader:
    """The reading half of `SpendLedger`. Nothing here changes anything."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._recorded = RecordedSpend(ledger.header)
        self._limits = SpendLimits(ledger.header)
        self._plan: tuple[StepPlan, bytes] | None = None  # the last that was recorded, and its bytes
        self._turn = RLock()  # threads take turns: what was recorded is read on, from where the last one was

    @property
    def path(self) -> str:
        """Where it is kept, for messages."""
        return self.ledger.name

    @property
    def origin(self) -> str:
        """Whose corpus it is."""
        return self.ledger.origin

    def next_generation(self, run: str, segment: int) -> int:
        """The generation under which the segment is still to be charged: 0 if it never was."""
        id = bytes.fromhex(checked_run(run))
        return self._ask(lambda _, rows: rows.generations(id, segment))

    def recorded(self, run: str, segment: int, generation: int) -> Segment | None:
        """The attempt as a leaf records it, if one does."""
        key = (bytes.fromhex(checked_run(run)), segment, generation)

        def look(_: SpendView, rows: StoreReader) -> Segment | None:
            leaf = rows.attempt(*key)
            return None if leaf is None else recorded_segment(rows, key, leaf)

        return self._ask(look)

    def forgotten(self, run: str, place: int, known: Collection[bytes]) -> int:
        """How many attempts were charged for the run from this place whose nonces it does not know.

        None, unless its folder was put back to an older state where it lies: there it has done more than it remembers.
        """
        id = bytes.fromhex(checked_run(run))
        kept = self._ask(lambda _, rows: [each for each in rows.kept(id) if each.attempt and each.body])
        return sum(each.nonce not in known and OpenCharges.decode(each.body).place == place for each in kept)

    def eligibility_range(self, run: str, segment: int, generation: int) -> tuple[int, int]:
        """Between how many leaves, and how many, who goes on from this attempt may have read its members."""
        id = bytes.fromhex(checked_run(run))

        def look(_: SpendView, rows: StoreReader) -> tuple[int, int]:
            leaf = rows.attempt(id, segment, generation)
            return 1 if leaf is None else leaf + 1, head_of(rows).size

        return self._ask(look)

    def fits(self, run: str, *, charge: Charge, bound: float, besides: Sequence[Charge] = ()) -> int:
        """How many further steps like `charge`, at most charge.steps, the run may reserve together with `besides`.

        What it has reserved already does not stand in its own way. What `fits` says, `reserve` admits, unless
        another process comes between.
        """
        (charge,), bound = checked_charges([charge]), checked_bounds({charge.cls: bound})[charge.cls]
        run = checked_run(run)
        name, besides = charge.cls, checked_charges(besides)
        asked = AccountBudget(bound=bound, delta=charge.delta, accountant=charge.accountant)

        def look(
            desk: SpendView, rows: StoreReader
        ) -> tuple[EventCounts, EventCounts, tuple[AccountBudget, ...], list[AccountBudget]]:
            wanted = self._limits.wanted(rows, name, asked)
            return desk.standing(name, without=run), desk.reserved(name, run), desk.terms(name), wanted

        others, own, held, wanted = self._ask(look)
        others = add_charges(dict(others), besides)
        event = event_key(charge)
        covered = all(any(h.within(terms) for h in held) for terms in wanted)
        covered = covered and all(own.get(event_key(c), 0) >= c.steps for c in besides)
        promised = own.get(event, 0) if covered else 0

        def admitted(steps: int) -> bool:
            together = add_charges(dict(others), [charge.times(steps)])
            return steps <= promised or all(
                pooled_epsilon(together, delta=terms.delta, name=terms.accountant) <= terms.bound for terms in wanted
            )

        if admitted(charge.steps):
            return charge.steps
        low, high = 0, charge.steps  # bisection: `low` is admitted, or 0; `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if admitted(middle) else (low, middle)
        return low

    def total(self, name: str, *, delta: float, accountant: str = "pld") -> AccountTotal:
        """What the account has lost over all runs, at the δ and by the accountant asked for."""
        charged, committed, runs = self._ask(lambda desk, _: (desk.charged(name), desk.standing(name), desk.runs(name)))
        return account_total(charged, committed, runs, delta=delta, name=accountant)

    def spent(self, run: str, name: str, *, delta: float, accountant: str = "pld") -> float:
        """ε of what one run was charged for an account, redone segments included."""
        run = checked_run(run)
        events = self._ask(lambda desk, _: desk.of_run(run, name))
        return pooled_epsilon(events, delta=delta, name=accountant)

    def accounts(self) -> tuple[PricedAccount, ...]:
        """Every account: at the terms of its last booking first, then as the ledger states it."""

        def look(desk: SpendView, _: StoreReader) -> list[tuple[str, Sequence[AccountBudget]]]:
            return [(name, desk.terms(name)) for name in desk.names()]

        header, found = self.ledger.header, []
        for name, terms in self._ask(look):
            kinds = dict.fromkeys((t.delta, t.accountant) for t in terms)
            kinds |= {(header.delta, header.accountant): None}
            found += [PricedAccount(cls=name, delta=delta, accountant=accountant) for delta, accountant in kinds]
        return tuple(found)

    def labels(self) -> dict[str, str]:
        """Every run that ever reserved or was charged, with its label."""
        return self._ask(lambda desk, _: desk.labels())

    def scales(self, run: str, plan: StepPlan) -> dict[str, float]:
        """The signed bounds that a run has charged under a plan so far, each with its scale."""
        id, digest = bytes.fromhex(checked_run(run)), self.digest(plan)

        def look(desk: SpendView, rows: StoreReader) -> dict[str, float]:
            found = dict(self._recorded.scales(id, digest))
            for hold in rows.holds(id):
                held = OpenCharges.decode(hold.body)
                if held.plan == digest:
                    found |= held.scales
            return {name: scale for name, scale in found.items() if is_bound(name)}

        return self._ask(look)

    def digest(self, plan: StepPlan) -> bytes:
        """Of a plan; worked out once for one that is asked for again and again."""
        return hashlib.sha256(self._encoded(plan)).digest()

    def _encoded(self, plan: StepPlan) -> bytes:
        if self._plan is None or self._plan[0] is not plan:
            self._plan = plan, plan.to_cbor()
        return self._plan[1]

    def _followed(self, rows: StoreReader) -> RecordedSpend:
        self._recorded.follow(rows, head_of(rows).size)
        return self._recorded

    def _ask(self, look: Callable[[SpendView, StoreReader], T]) -> T:
        def once() -> T:
            with self._turn, self.ledger.store.read() as rows:
                return look(SpendView(rows, self._followed(rows)), rows)

        return self.ledger.retry_while_lost(once)


class SpendLedger(SpendReader):
    """Charges of all runs by account. Several processes, and with PostgreSQL machines, may use one ledger.

    What ended is a leaf: an `Epoch`. What has no leaf yet lies beside the leaves in the ledger's store, in rows: the
    attempts that are open, which are charged like any other, and what runs have reserved of their plans.

    Promise. Let C be all that was ever charged to an account, over runs, redone generations and abandoned
    attempts, and R what runs have reserved. A booking under a bound at (δ, accountant) succeeds only if
    afterwards ε(C + R) ≤ bound, all events priced jointly; otherwise nothing is booked. So with what was signed, or
    the policy of the ledger promises, at the ledger's own δ and accountant: what `verify` will hold against it.
    Charged means spent: nothing is ever taken off C. A reservation may be given back or replaced.

    When no price need be asked. An account remembers the terms of its last admission, and at all times
    ε(C + R) ≤ bound at those terms. It held when they were written, since C + R was priced then. A charge
    out of the run's own reservation moves steps from R to C and leaves C + R as it is; so does an epoch that records
    an attempt; giving back makes C + R smaller, and fewer events never cost more; everything else is an admission,
    which prices C + R with the reservations of all runs in it and writes its own terms. So a booking that adds
    nothing to C + R is within its bound if its terms are no stricter than the account's: same δ and accountant,
    bound not lower. Under any other terms C + R is priced again. Hence a plan made for exactly the bound is charged
    to its last step, a bound that was lowered is obeyed at the next charge, and a run whose bound was passed by
    another run with a looser one is stopped.

    A ledger that was restored from a copy is made whole by booking again: the same charge twice is charged once.
    """

    # ----------------------------------------------------------------------------------- booking

    def reserve(
        self,
        run: str,
        *,
        charges: Sequence[Charge],
        bounds: Mapping[str, float],
        label: str = "",
        plan: StepPlan | None = None,
    ) -> None:
        """Promise the run the steps of `charges`, in place of what it had reserved before.

        Raises BudgetExceeded, and changes nothing, if a class with a bound would pass it. `plan` is kept for
        the record.
        """
        run, label = checked_run(run), checked_text(label, "label", empty=True)
        asked, limits = checked_charges(charges), checked_bounds(bounds)

        def work(desk: SpendTransaction, rows: StoreWriter) -> None:
            desk.enter(run, label)
            before = {each.cls: desk.standing(each.cls) for each in asked}
            desk.reserve(run, asked)
            self._limits.admit(desk, rows, asked, limits, before)
            if plan is not None:
                rows.put_blob(self.digest(plan), self._encoded(plan))

        self._in_transaction(work, run, label)

    def charge(
        self,
        run: str,
        *,
        segment: int,
        generation: int,
        nonce: bytes,
        charges: Sequence[Charge],
        bounds: Mapping[str, float],
        scales: Mapping[str, float] | None = None,
        plan: bytes = b"",
        begun: OpenAttempt | None = None,
        place: int = 0,
        already: bool = False,
    ) -> bool:
        """Hold a segment, before its first coin is drawn; its steps come off the run's reservation.

        True: it is charged, now or earlier with the same nonce. False: this generation was charged with another
        nonce, so somebody else runs a copy of this run; nothing is charged. BudgetExceeded: it would pass a
        bound; nothing is charged. `already`: what was drawn is charged, whatever the bounds say now. `scales` of
        signed bounds, the digest of the `plan` and what has `begun` are for the record; `place` is the journal's.
        """
        run, held = (checked_run(run), OpenCharges(checked_charges(charges), dict(scales or {}), plan, begun, place))
        limits = checked_bounds(bounds)
        segment, generation = checked_count(segment, "segment"), checked_count(generation, "generation")
        key, nonce = (bytes.fromhex(run), segment, generation), checked_nonce(nonce)

        def work(desk: SpendTransaction, rows: StoreWriter) -> bool:
            if (earlier := _earlier_charge(rows, key)) is not None:
                if earlier.nonce == nonce and earlier.leaf is None and not _same_charges(earlier.body, held):
                    raise RunError(
                        "spend.segment-generation-run",
                        f"segment {segment}, generation {generation} of run {run[:8]} is charged with other "
                        f"charges than asked now in ledger '{self.path}'",
                        "what changed needs a new generation, charged anew",
                    )
                return earlier.nonce == nonce
            desk.enter(run)
            before = {each.cls: desk.standing(each.cls) for each in held.charges}
            desk.charge(run, segment, generation, nonce, held)
            if already:
                for name in before:
                    desk.set_terms(name, ())  # nothing is known of them until they are priced again
            else:
                self._limits.admit(desk, rows, held.charges, limits, before)
            return True

        return self._in_transaction(work, run, "")

    def record(
        self,
        run: str,
        *,
        segment: Segment,
        plan: StepPlan,
        variance: Sequence[float],
        accounts: Sequence[SignedAccount] = (),
    ) -> int:
        """Append the epoch of an attempt that was charged and has ended, and sign a checkpoint; its leaf.

        Once: an attempt that a leaf records already, under the same nonce, is left as it is.
        """
        return self._record(run, segment, plan, variance, {each.name: each.scale for each in accounts})

    def _record(
        self, run: str, segment: Segment, plan: StepPlan, variance: Sequence[float], known: Mapping[str, float]
    ) -> int:
        id, data = bytes.fromhex(checked_run(run)), self._encoded(plan)
        ended = EpochBuilder(run=id, segment=segment, plan=plan, digest=self.digest(plan), variance=variance)

        def once() -> int:
            with self._turn, self.ledger.store.read() as rows:
                recorded = self._followed(rows)
                if (there := ended.there(rows)) is not None:
                    return there
                epoch, parts = ended.epoch(rows, recorded, known)
                expected = recorded.epochs + 1

            def settle(rows: StoreWriter, seqs: list[int]) -> None:
                ended.settle(rows, seqs[0], parts, expected)

            try:
                return self.ledger.append_with([epoch], [data], settle)[0]
            except StaleEpoch:  # another run was quicker: what everybody has lost by now is another figure
                return once()

        leaf = self.ledger.retry_while_lost(once)
        if self.ledger.signs:
            self.ledger.checkpoint()
        return leaf

    def finish(self, run: str) -> None:
        """Give back what is left of the run's reservation. Its charges stay."""
        run = checked_run(run)
        self._in_transaction(lambda desk, rows: desk.leave(run), run, "")

    def abandon_run(self, run: str) -> int:
        """Finish a run that will never go on, and record what it had begun as given up; how many attempts that are.

        Should it go on after all, it finds that and does them again.
        """
        count = self.give_up(run, lambda nonce, place: True)
        self.finish(run)
        return count

    def give_up(self, run: str, which: Callable[[bytes, int], bool]) -> int:
        """Record attempts that are open as given up, chosen by nonce and the place of their journal; how many."""
        id = bytes.fromhex(run := checked_run(run))
        open = [hold for hold in self._ask(lambda _, rows: rows.holds(id)) if hold.attempt]
        found = [(hold, held) for hold in open if which(hold.nonce, (held := OpenCharges.decode(hold.body)).place)]
        for hold, held in found:
            data, begun = self.ledger.blob(held.plan), held.begun
            if data is None or begun is None:
                raise RunError(
                    "spend.ledger-not-know",
                    f"the ledger does not know enough of segment {hold.segment} of run {run[:8]} to record it",
                    "resume the run, which does",
                )
            plan = StepPlan.from_cbor(data)
            least, most = self.eligibility_range(run, hold.segment - 1, begun.after)
            begun = replace(begun, eligibility=min(max(begun.eligibility, least), most))
            segment = begun.segment(hold.segment, hold.generation, hold.nonce, SegmentOutcome.ABANDONED)
            self._record(run, segment, plan, begun.applied(plan), held.scales)
        return len(found)

    # ----------------------------------------------------------------------------------- inside

    def _in_transaction(self, work: Callable[[SpendTransaction, StoreWriter], T], run: str, label: str) -> T:
        def once(rows: StoreWriter) -> T:
            return work(SpendTransaction(rows, self._followed(rows)), rows)

        try:
            with self._turn:
                return self.ledger.transact(once)
        except BoundExceeded as refused:  # the words are found after the ledger is free again
            terms = refused.terms
            raise budget_exceeded(
                book=self.path,
                origin=self.origin,
                cls=refused.cls,
                terms=terms,
                now=self.total(refused.cls, delta=terms.delta, accountant=terms.accountant),
                run=run,
                label=label,
                asked=refused.asked,
                epsilon=refused.epsilon,
            ) from None


def _earlier_charge(rows: StoreReader, key: tuple[bytes, int, int]) -> RunHold | None:
    """How an attempt was charged before: as it is held, or as a leaf records it."""
    if (hold := rows.hold(*key)) is not None:
        return hold
    leaf = rows.attempt(*key)
    return None if leaf is None else RunHold(*key, recorded_segment(rows, key, leaf).nonce, leaf, b"")


def _same_charges(body: bytes, held: OpenCharges) -> bool:
    return sorted(OpenCharges.decode(body).charges, key=repr) == sorted(held.charges, key=repr)
