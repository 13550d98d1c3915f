"""`SpendBook`: what each class of a corpus has lost over all runs, kept on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.account.pooled import Events, pooled
from lamina.errors import RunError
from lamina.train.book.charge import Charge
from lamina.train.book.checks import checked_bounds, checked_charges, checked_count, checked_text
from lamina.train.book.file import BookFile
from lamina.train.book.rows import Rows
from lamina.train.book.total import Terms, Total, refusal, total


@dataclass(frozen=True, kw_only=True, slots=True)
class Booked:
    """What is kept apart: one class, or signed bound, of one corpus, and a δ and accountant of its charges."""

    origin: str
    cls: str
    delta: float
    accountant: str


class SpendBook:
    """Charges of all runs by (origin, class), in one SQLite file that several processes may use.

    A signed bound that is stricter than its class (account.py) is an account like a class, under its own name: a run
    charges both, and is refused by either.

    Promise. Let C be all that was ever charged to an account, over runs, redone generations and abandoned
    attempts, and R what runs have reserved. A booking under a bound at (δ, accountant) succeeds only if
    afterwards ε(C + R) ≤ bound, all events priced jointly; otherwise nothing is booked. Charged means spent:
    nothing is ever taken off C. A reservation may be given back or replaced.

    When no price need be asked. An account remembers the terms of its last admission, and at all times
    ε(C + R) ≤ bound at those terms. It held when they were written, since C + R was priced then. A charge
    out of the run's own reservation moves steps from R to C and leaves C + R as it is; giving back makes C + R
    smaller, and fewer events never cost more; everything else is an admission, which prices C + R with the
    reservations of all runs in it and writes its own terms. So a booking that adds nothing to C + R is within
    its bound if its terms are no stricter than the account's: same δ and accountant, bound not lower. Under
    any other terms C + R is priced again. Hence a plan made for exactly the bound is charged to its last step,
    a bound that was lowered is obeyed at the next charge, and a run whose bound was passed by another run with
    a looser one is stopped.

    A book that was lost is made whole by booking again: the same charge twice is charged once.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self._file = BookFile(path, create=create)
        self.path = self._file.path
        with self._file.read() as db:
            if not Rows(db).intact():
                raise self._file.damaged()

    # ----------------------------------------------------------------------------------- booking

    def reserve(
        self,
        run: str,
        *,
        origin: str,
        charges: Sequence[Charge],
        bounds: Mapping[str, float],
        label: str = "",
    ) -> None:
        """Promise the run the steps of `charges`, in place of what it had reserved before.

        Raises BudgetExceeded, and changes nothing, if a class with a bound would pass it.
        """
        run, origin = checked_text(run, "run"), checked_text(origin, "origin")
        label = checked_text(label, "label", empty=True)
        asked, limits = checked_charges(charges), checked_bounds(bounds)
        try:
            with self._file.write() as db:
                rows = Rows(db)
                rows.enter(run, label)
                before = {each.cls: rows.standing(rows.account(origin, each)) for each in asked}
                rows.give_back(run)
                for each in asked:
                    rows.reserve(run, rows.account(origin, each), each)
                _admit(rows, origin, asked, limits, before)
        except _Refused as refused:
            raise self._refusal(refused, run, label) from None

    def charge(
        self,
        run: str,
        *,
        origin: str,
        segment: int,
        generation: int,
        nonce: bytes,
        charges: Sequence[Charge],
        bounds: Mapping[str, float],
    ) -> bool:
        """Book a segment, before its first coin is drawn; its steps come off the run's reservation.

        True: it is booked, now or earlier with the same nonce. False: this generation was booked with another
        nonce, so somebody else runs a copy of this run; nothing is booked. BudgetExceeded: it would pass a
        bound; nothing is booked.
        """
        run, origin = checked_text(run, "run"), checked_text(origin, "origin")
        asked, limits = checked_charges(charges), checked_bounds(bounds)
        key = (run, checked_count(segment, "segment"), checked_count(generation, "generation"))
        if not isinstance(nonce, bytes) or not nonce:
            raise RunError("the nonce of a charge is empty or not bytes", "draw 16 bytes from the system")
        try:
            with self._file.write() as db:
                rows = Rows(db)
                if (earlier := rows.nonce(key)) is not None:
                    if earlier == nonce and not rows.same(key, asked):
                        raise RunError(
                            f"segment {segment}, generation {generation} of run {run[:8]} is booked with other "
                            f"charges than asked now in spend book '{self.path}'",
                            "what changed needs a new generation, charged anew",
                        )
                    return earlier == nonce
                rows.enter(run)
                before = {each.cls: rows.standing(rows.account(origin, each)) for each in asked}
                rows.attempt(key, nonce, origin, asked)
                for each in asked:
                    rows.charge(key, rows.account(origin, each), each)
                _admit(rows, origin, asked, limits, before)
        except _Refused as refused:
            raise self._refusal(refused, run, "") from None
        return True

    def finish(self, run: str) -> None:
        """Give back what is left of the run's reservation. Its charges stay."""
        with self._file.write() as db:
            Rows(db).leave(run)

    # ----------------------------------------------------------------------------------- asking

    def next_generation(self, run: str, segment: int) -> int:
        """The generation under which the segment is still to be booked: 0 if it never was."""
        with self._file.read() as db:
            return Rows(db).generations(run, segment)

    def fits(
        self, run: str, *, origin: str, charge: Charge, bound: float, besides: Sequence[Charge] = ()
    ) -> int:
        """How many further steps like `charge`, at most charge.steps, the run may reserve together with `besides`.

        What it has reserved already does not stand in its own way. What `fits` says, `reserve` admits, unless
        another process comes between.
        """
        (charge,), bound = checked_charges([charge]), checked_bounds({charge.cls: bound})[charge.cls]
        with self._file.read() as db:
            rows = Rows(db)
            account = rows.find(origin, charge.cls)
            others, own, held = (
                rows.standing(account, without=run),
                rows.reserved(account, run),
                rows.terms(account),
            )
        event = (charge.sigma, charge.q, 0.0)
        terms = Terms(bound=bound, delta=charge.delta, accountant=charge.accountant)
        others = _added(others, checked_charges(besides))
        covered = held is not None and held.within(terms)
        covered = covered and all(own.get((c.sigma, c.q, 0.0), 0) >= c.steps for c in besides)
        promised = own.get(event, 0) if covered else 0

        def admitted(steps: int) -> bool:
            together = _added(others, [charge.times(steps)])
            return steps <= promised or pooled(together, delta=terms.delta, name=terms.accountant) <= bound

        if admitted(charge.steps):
            return charge.steps
        low, high = 0, charge.steps  # bisection: `low` is admitted, or 0; `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if admitted(middle) else (low, middle)
        return low

    def total(self, origin: str, cls: str, *, delta: float, accountant: str = "pld") -> Total:
        """What the class has lost over all runs, at the δ and by the accountant asked for."""
        with self._file.read() as db:
            rows = Rows(db)
            account = rows.find(origin, cls)
            charged, committed, runs = rows.charged(account), rows.standing(account), rows.runs(account)
        return total(charged, committed, runs, delta=delta, name=accountant)

    def spent(
        self, run: str, cls: str, *, delta: float, accountant: str = "pld", origin: str | None = None
    ) -> float:
        """ε of what one run was charged for a class, redone segments included."""
        with self._file.read() as db:
            events = Rows(db).of_run(run, cls, origin)
        return pooled(events, delta=delta, name=accountant)

    def accounts(self) -> tuple[Booked, ...]:
        """Every account, once per δ and accountant under which it was booked; those of the last booking first."""
        with self._file.read() as db:
            found = Rows(db).accounts()
        return tuple(Booked(origin=o, cls=c, delta=delta, accountant=name) for o, c, delta, name in found)

    def labels(self) -> dict[str, str]:
        """Every run that ever reserved or was charged, with its label."""
        with self._file.read() as db:
            return Rows(db).labels()

    def _refusal(self, refused: _Refused, run: str, label: str) -> Exception:
        terms = refused.terms
        now = self.total(refused.origin, refused.cls, delta=terms.delta, accountant=terms.accountant)
        return refusal(
            book=str(self.path),
            origin=refused.origin,
            cls=refused.cls,
            terms=terms,
            now=now,
            run=run,
            label=label,
            asked=refused.asked,
            epsilon=refused.epsilon,
        )


def _added(events: Events, charges: Sequence[Charge]) -> Events:
    together = dict(events)
    for c in charges:
        kind = (c.sigma, c.q, 0.0)
        together[kind] = together.get(kind, 0) + c.steps
    return together


class _Refused(Exception):
    """Ends the transaction; the words are found after the file is free again."""

    def __init__(self, origin: str, cls: str, terms: Terms, asked: int, epsilon: float) -> None:
        super().__init__(origin, cls)
        self.origin, self.cls, self.terms, self.asked, self.epsilon = origin, cls, terms, asked, epsilon


def _admit(
    rows: Rows,
    origin: str,
    charges: Sequence[Charge],
    bounds: Mapping[str, float],
    before: Mapping[str, Events],
) -> None:
    """Raise unless every class, as this transaction would leave it, is within its bound."""
    for cls in before:
        mine = [each for each in charges if each.cls == cls]
        account, bound = rows.account(origin, mine[0]), bounds.get(cls, math.inf)
        after = rows.standing(account)
        grown = any(steps > before[cls].get(event, 0) for event, steps in after.items())
        if not any(each.steps for each in mine):
            continue  # nothing is asked, so nothing can be refused
        for delta, name in sorted({(each.delta, each.accountant) for each in mine}):
            terms, held = Terms(bound=bound, delta=delta, accountant=name), rows.terms(account)
            if not grown and (math.isinf(bound) or (held is not None and held.within(terms))):
                continue
            epsilon = 0.0 if math.isinf(bound) else pooled(after, delta=delta, name=name)
            if not epsilon <= bound:
                raise _Refused(origin, cls, terms, sum(each.steps for each in mine), epsilon)
            rows.set_terms(account, terms)
