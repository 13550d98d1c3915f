"""`Book`: a ledger as runs charge it. What each class and signed bound of a corpus has lost, over all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lamina.errors import RunError
from lamina.ledger.records import Outcome, Segment
from lamina.ledger.store.base import Hold, Reader, Writer
from lamina.plan import StepPlan
from lamina.train.book.account import Account
from lamina.train.book.asking import Asking
from lamina.train.book.charge import Charge
from lamina.train.book.checks import (
    checked_bounds,
    checked_charges,
    checked_count,
    checked_nonce,
    checked_run,
    checked_text,
)
from lamina.train.book.desk import Desk
from lamina.train.book.ended import Ended, Stale, recorded
from lamina.train.book.held import Begun, Held
from lamina.train.book.limits import Refused
from lamina.train.book.total import refusal

T = TypeVar("T")


class Book(Asking):
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

        def work(desk: Desk, rows: Writer) -> None:
            desk.enter(run, label)
            before = {each.cls: desk.standing(each.cls) for each in asked}
            desk.reserve(run, asked)
            self._limits.admit(desk, rows, asked, limits, before)
            if plan is not None:
                rows.put_blob(self.digest(plan), self._encoded(plan))

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
        begun: Begun | None = None,
        place: int = 0,
        already: bool = False,
    ) -> bool:
        """Hold a segment, before its first coin is drawn; its steps come off the run's reservation.

        True: it is charged, now or earlier with the same nonce. False: this generation was charged with another
        nonce, so somebody else runs a copy of this run; nothing is charged. BudgetExceeded: it would pass a
        bound; nothing is charged. `already`: what was drawn is charged, whatever the bounds say now. `scales` of
        signed bounds, the digest of the `plan` and what has `begun` are for the record; `place` is the journal's.
        """
        run, held = checked_run(run), Held(checked_charges(charges), dict(scales or {}), plan, begun, place)
        limits = checked_bounds(bounds)
        segment, generation = checked_count(segment, "segment"), checked_count(generation, "generation")
        key, nonce = (bytes.fromhex(run), segment, generation), checked_nonce(nonce)

        def work(desk: Desk, rows: Writer) -> bool:
            if (earlier := _earlier(rows, key)) is not None:
                if earlier.nonce == nonce and earlier.leaf is None and not _same(earlier.body, held):
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
        return self._record(run, segment, plan, variance, {each.name: each.scale for each in accounts})

    def _record(
        self,
        run: str,
        segment: Segment,
        plan: StepPlan,
        variance: Sequence[float],
        known: Mapping[str, float],
    ) -> int:
        id, data = bytes.fromhex(checked_run(run)), self._encoded(plan)
        ended = Ended(run=id, segment=segment, plan=plan, digest=self.digest(plan), variance=variance)

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

    def lose(self, run: str) -> int:
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
        found = [(hold, held) for hold in open if which(hold.nonce, (held := Held.decode(hold.body)).place)]
        for hold, held in found:
            data, begun = self.ledger.blob(held.plan), held.begun
            if data is None or begun is None:
                raise RunError(
                    "spend.ledger-not-know",
                    f"the ledger does not know enough of segment {hold.segment} of run {run[:8]} to record it",
                    "resume the run, which does",
                )
            plan = StepPlan.from_cbor(data)
            least, most = self.readable(run, hold.segment - 1, begun.after)
            begun = replace(begun, eligibility=min(max(begun.eligibility, least), most))
            segment = begun.segment(hold.segment, hold.generation, hold.nonce, Outcome.ABANDONED)
            self._record(run, segment, plan, begun.applied(plan), held.scales)
        return len(found)

    # ----------------------------------------------------------------------------------- inside

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


def _earlier(rows: Reader, key: tuple[bytes, int, int]) -> Hold | None:
    """How an attempt was charged before: as it is held, or as a leaf records it."""
    if (hold := rows.hold(*key)) is not None:
        return hold
    leaf = rows.attempt(*key)
    return None if leaf is None else Hold(*key, recorded(rows, key, leaf).nonce, leaf, b"")


def _same(body: bytes, held: Held) -> bool:
    return sorted(Held.decode(body).charges, key=repr) == sorted(held.charges, key=repr)
