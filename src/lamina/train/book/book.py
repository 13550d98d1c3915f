"""`Book`: a ledger as runs charge it. What each class and signed bound of a corpus has lost, over all runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TypeVar

from lamina.account.pooled import Events, pooled
from lamina.errors import RunError
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import Segment
from lamina.ledger.store.base import Hold, Reader, Writer
from lamina.ledger.view import head_of
from lamina.plan import StepPlan
from lamina.train.book.account import Account, is_bound
from lamina.train.book.charge import Charge
from lamina.train.book.checks import (
    checked_bounds,
    checked_charges,
    checked_count,
    checked_nonce,
    checked_run,
    checked_text,
)
from lamina.train.book.desk import Desk, Reading
from lamina.train.book.ended import Ended, Stale
from lamina.train.book.held import Held, add, kind
from lamina.train.book.limits import Limits, Refused
from lamina.train.book.recorded import Recorded
from lamina.train.book.total import Terms, Total, refusal, total

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Booked:
    """An account, by its name (a class, or CLASS@c=…,z=…), with a δ and accountant of its charges."""

    cls: str
    delta: float
    accountant: str


class Book:
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

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._recorded = Recorded(ledger.header)
        self._limits = Limits(ledger.header)
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

    # ----------------------------------------------------------------------------------- booking

    def reserve(
        self, run: str, *, charges: Sequence[Charge], bounds: Mapping[str, float], label: str = ""
    ) -> None:
        """Promise the run the steps of `charges`, in place of what it had reserved before.

        Raises BudgetExceeded, and changes nothing, if a class with a bound would pass it.
        """
        run, label = checked_run(run), checked_text(label, "label", empty=True)
        asked, limits = checked_charges(charges), checked_bounds(bounds)

        def work(desk: Desk, rows: Writer) -> None:
            desk.enter(run, label)
            before = {each.cls: desk.standing(each.cls) for each in asked}
            desk.reserve(run, asked)
            self._limits.admit(desk, rows, asked, limits, before)

        self._booking(work, run, label)

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
        already: bool = False,
    ) -> bool:
        """Hold a segment, before its first coin is drawn; its steps come off the run's reservation.

        True: it is charged, now or earlier with the same nonce. False: this generation was charged with another
        nonce, so somebody else runs a copy of this run; nothing is charged. BudgetExceeded: it would pass a
        bound; nothing is charged. `already`: what was drawn is charged, whatever the bounds say now. `scales` of
        signed bounds and the digest of the `plan` are for the record.
        """
        run, held = checked_run(run), Held(checked_charges(charges), dict(scales or {}), plan)
        limits = checked_bounds(bounds)
        segment, generation = checked_count(segment, "segment"), checked_count(generation, "generation")
        key, nonce = (bytes.fromhex(run), segment, generation), checked_nonce(nonce)

        def work(desk: Desk, rows: Writer) -> bool:
            if (earlier := _earlier(self.ledger, rows, key)) is not None:
                if earlier.nonce == nonce and earlier.leaf is None and not _same(earlier.body, held):
                    raise RunError(
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

        return self._booking(work, run, "")

    def record(
        self,
        run: str,
        *,
        segment: Segment,
        plan: StepPlan,
        variance: Sequence[float],
        accounts: Sequence[Account] = (),
    ) -> int:
        """Append the epoch of an attempt that was charged and has ended, and sign a checkpoint; its leaf.

        Once: an attempt that a leaf records already, under the same nonce, is left as it is.
        """
        id, data = bytes.fromhex(checked_run(run)), self._encoded(plan)
        ended = Ended(run=id, segment=segment, plan=plan, digest=self.digest(plan), variance=variance)
        known = {each.name: each.scale for each in accounts}

        def once() -> int:
            with self._turn, self.ledger.store.read() as rows:
                recorded = self._followed(rows)
                if (there := ended.there(rows)) is not None:
                    return there
                epoch, parts = ended.epoch(rows, recorded, known)
                expected = recorded.epochs + 1

            def settle(rows: Writer, seqs: list[int]) -> None:
                ended.settle(rows, seqs[0], parts, expected)

            try:
                return self.ledger.append_with([epoch], [data], settle)[0]
            except Stale:  # another run was quicker: what everybody has lost by now is another figure
                return once()

        leaf = self.ledger.patiently(once)
        if self.ledger.signs:
            self.ledger.checkpoint()
        return leaf

    def finish(self, run: str) -> None:
        """Give back what is left of the run's reservation. Its charges stay."""
        run = checked_run(run)
        self._booking(lambda desk, rows: desk.leave(run), run, "")

    # ----------------------------------------------------------------------------------- asking

    def next_generation(self, run: str, segment: int) -> int:
        """The generation under which the segment is still to be charged: 0 if it never was."""
        id = bytes.fromhex(checked_run(run))
        return self._ask(lambda _, rows: rows.generations(id, segment))

    def recorded(self, run: str, segment: int, generation: int) -> bool:
        """Whether a leaf records the attempt."""
        id = bytes.fromhex(checked_run(run))
        return self._ask(lambda _, rows: rows.attempt(id, segment, generation)) is not None

    def fits(self, run: str, *, charge: Charge, bound: float, besides: Sequence[Charge] = ()) -> int:
        """How many further steps like `charge`, at most charge.steps, the run may reserve together with `besides`.

        What it has reserved already does not stand in its own way. What `fits` says, `reserve` admits, unless
        another process comes between.
        """
        (charge,), bound = checked_charges([charge]), checked_bounds({charge.cls: bound})[charge.cls]
        run = checked_run(run)
        name, besides = charge.cls, checked_charges(besides)
        asked = Terms(bound=bound, delta=charge.delta, accountant=charge.accountant)

        def look(desk: Reading, rows: Reader) -> tuple[Events, Events, tuple[Terms, ...], list[Terms]]:
            wanted = self._limits.wanted(rows, name, asked)
            return desk.standing(name, without=run), desk.reserved(name, run), desk.terms(name), wanted

        others, own, held, wanted = self._ask(look)
        others = add(dict(others), besides)
        event = kind(charge)
        covered = all(any(h.within(terms) for h in held) for terms in wanted)
        covered = covered and all(own.get(kind(c), 0) >= c.steps for c in besides)
        promised = own.get(event, 0) if covered else 0

        def admitted(steps: int) -> bool:
            together = add(dict(others), [charge.times(steps)])
            return steps <= promised or all(
                pooled(together, delta=terms.delta, name=terms.accountant) <= terms.bound for terms in wanted
            )

        if admitted(charge.steps):
            return charge.steps
        low, high = 0, charge.steps  # bisection: `low` is admitted, or 0; `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if admitted(middle) else (low, middle)
        return low

    def total(self, name: str, *, delta: float, accountant: str = "pld") -> Total:
        """What the account has lost over all runs, at the δ and by the accountant asked for."""
        charged, committed, runs = self._ask(
            lambda desk, _: (desk.charged(name), desk.standing(name), desk.runs(name))
        )
        return total(charged, committed, runs, delta=delta, name=accountant)

    def spent(self, run: str, name: str, *, delta: float, accountant: str = "pld") -> float:
        """ε of what one run was charged for an account, redone segments included."""
        run = checked_run(run)
        events = self._ask(lambda desk, _: desk.of_run(run, name))
        return pooled(events, delta=delta, name=accountant)

    def accounts(self) -> tuple[Booked, ...]:
        """Every account: at the terms of its last booking first, then as the ledger states it."""

        def look(desk: Reading, _: Reader) -> list[tuple[str, Sequence[Terms]]]:
            return [(name, desk.terms(name)) for name in desk.names()]

        header, found = self.ledger.header, []
        for name, terms in self._ask(look):
            kinds = dict.fromkeys((t.delta, t.accountant) for t in terms)
            kinds |= {(header.delta, header.accountant): None}
            found += [Booked(cls=name, delta=delta, accountant=accountant) for delta, accountant in kinds]
        return tuple(found)

    def labels(self) -> dict[str, str]:
        """Every run that ever reserved or was charged, with its label."""
        return self._ask(lambda desk, _: desk.labels())

    def scales(self, run: str, plan: StepPlan) -> dict[str, float]:
        """The signed bounds that a run has charged under a plan so far, each with its scale."""
        id, digest = bytes.fromhex(checked_run(run)), self.digest(plan)

        def look(desk: Reading, rows: Reader) -> dict[str, float]:
            found = dict(self._recorded.scales(id, digest))
            for hold in rows.holds(id):
                held = Held.decode(hold.body)
                if held.plan == digest:
                    found |= held.scales
            return {name: scale for name, scale in found.items() if is_bound(name)}

        return self._ask(look)

    def digest(self, plan: StepPlan) -> bytes:
        """Of a plan; worked out once for one that is asked for again and again."""
        return hashlib.sha256(self._encoded(plan)).digest()

    # ----------------------------------------------------------------------------------- inside

    def _encoded(self, plan: StepPlan) -> bytes:
        if self._plan is None or self._plan[0] is not plan:
            self._plan = plan, plan.to_cbor()
        return self._plan[1]

    def _followed(self, rows: Reader) -> Recorded:
        self._recorded.follow(rows, head_of(rows).size)
        return self._recorded

    def _ask(self, look: Callable[[Reading, Reader], T]) -> T:
        def once() -> T:
            with self._turn, self.ledger.store.read() as rows:
                return look(Reading(rows, self._followed(rows)), rows)

        return self.ledger.patiently(once)

    def _booking(self, work: Callable[[Desk, Writer], T], run: str, label: str) -> T:
        def once(rows: Writer) -> T:
            return work(Desk(rows, self._followed(rows)), rows)

        try:
            with self._turn:
                return self.ledger.transact(once)
        except Refused as refused:  # the words are found after the ledger is free again
            terms = refused.terms
            raise refusal(
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


def _earlier(ledger: Ledger, rows: Reader, key: tuple[bytes, int, int]) -> Hold | None:
    """How an attempt was charged before: as it is held, or as a leaf records it."""
    if (hold := rows.hold(*key)) is not None:
        return hold
    leaf = rows.attempt(*key)
    return None if leaf is None else Ended.recorded_as(rows, key, leaf)


def _same(body: bytes, held: Held) -> bool:
    return sorted(Held.decode(body).charges, key=repr) == sorted(held.charges, key=repr)
