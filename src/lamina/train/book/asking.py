"""`Asking`: what a ledger says of its accounts: what runs were charged, hold, and may still take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TypeVar

from lamina.account.pooled import Events, pooled
from lamina.ledger.ledger import Ledger
from lamina.ledger.records import Segment
from lamina.ledger.store.base import Reader
from lamina.ledger.view import head_of
from lamina.plan import StepPlan
from lamina.train.book.account import is_bound
from lamina.train.book.charge import Charge
from lamina.train.book.checks import checked_bounds, checked_charges, checked_run
from lamina.train.book.desk import Reading
from lamina.train.book.ended import recorded
from lamina.train.book.held import Held, add, kind
from lamina.train.book.limits import Limits
from lamina.train.book.recorded import Recorded
from lamina.train.book.total import Terms, Total, total

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Booked:
    """An account, by its name (a class, or CLASS@c=…,z=…), with a δ and accountant of its charges."""

    cls: str
    delta: float
    accountant: str


class Asking:
    """The reading half of `Book`. Nothing here changes anything."""

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

    def next_generation(self, run: str, segment: int) -> int:
        """The generation under which the segment is still to be charged: 0 if it never was."""
        id = bytes.fromhex(checked_run(run))
        return self._ask(lambda _, rows: rows.generations(id, segment))

    def recorded(self, run: str, segment: int, generation: int) -> Segment | None:
        """The attempt as a leaf records it, if one does."""
        key = (bytes.fromhex(checked_run(run)), segment, generation)

        def look(_: Reading, rows: Reader) -> Segment | None:
            leaf = rows.attempt(*key)
            return None if leaf is None else recorded(rows, key, leaf)

        return self._ask(look)

    def forgotten(self, run: str, place: int, known: Collection[bytes]) -> int:
        """How many attempts were charged for the run from this place whose nonces it does not know.

        None, unless its folder was put back to an older state where it lies: there it has done more than it remembers.
        """
        id = bytes.fromhex(checked_run(run))
        kept = self._ask(lambda _, rows: [each for each in rows.kept(id) if each.attempt and each.body])
        return sum(each.nonce not in known and Held.decode(each.body).place == place for each in kept)

    def readable(self, run: str, segment: int, generation: int) -> tuple[int, int]:
        """Between how many leaves, and how many, who goes on from this attempt may have read its members."""
        id = bytes.fromhex(checked_run(run))

        def look(_: Reading, rows: Reader) -> tuple[int, int]:
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
