"""Open charges and reservations of runs, kept in the store beside the leaves."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, Self

from lamina import cbor
from lamina.account.charges import Account, Charge, stored_charge
from lamina.account.schedule import EventCounts, EventKey, add_events, event_counts
from lamina.errors import EncodingError, LaminaError, LedgerDamaged, RunError
from lamina.ledger.records import Segment, SegmentOutcome
from lamina.ledger.spending import Limit, Spending
from lamina.ledger.store.rows import RESERVATION_SEGMENT, RunHold, RunRow, StoreReader, StoreWriter
from lamina.plan.risk import UNPROVEN, ZERO_OUT, RiskBound, curve_marks
from lamina.plan.step_plan import StepPlan

_MOST_BYTES = 1 << 24
NoiseByStep = tuple[tuple[int, tuple[float, ...]], ...]  # from which step on, S² per layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What a run was charged for an attempt at the steps [first, last); or, without steps, for a budget or a reservation.

    charges      what it adds to the charges of the ledger
    units        what it takes of an adaptive budget, in declared steps: the budget was charged when the run began
    plan         its digest
    scales       of the signed bounds among the charges; `factors` of those that are exhausted, 0: left out
    eligibility  how many leaves were read when its members were frozen
    after        the generation of the segment before it from whose weights it goes on
    variance     S² per layer at its first step, where a rule moved it; `changes`: from which later step on, which S²
    outcome      how it ended; None while it is open
    """

    segment: int = 0
    generation: int = 0
    nonce: bytes = b""
    first: int = 0
    last: int = 0
    charges: tuple[Charge, ...] = ()
    units: tuple[Charge, ...] = ()
    plan: bytes = b""
    scales: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    eligibility: int = 0
    after: int = 0
    variance: tuple[float, ...] = ()
    changes: NoiseByStep = ()
    outcome: SegmentOutcome | None = None

    @property
    def key(self) -> tuple[int, int, bytes]:
        return (self.segment, self.generation, self.nonce)

    @property
    def taken(self) -> tuple[Charge, ...]:
        """Return the cost of its steps: charged with it, or taken from an adaptive budget."""
        return self.units or self.charges

    def as_segment(self, outcome: SegmentOutcome, eligibility: int | None = None) -> Segment:
        """The attempt as an epoch records it."""
        read = self.eligibility if eligibility is None else eligibility
        return Segment(
            index=self.segment, generation=self.generation, nonce=self.nonce, first=self.first, last=self.last,
            eligibility=read, outcome=outcome, after=self.after or None,
        )  # fmt: skip

    def applied(self, plan: StepPlan) -> tuple[float, ...]:
        """The noise variance of each layer: the plan's, unless a rule moved it."""
        return self.variance or tuple(s * s for s in plan.noise)

    def of(self, account: Account) -> tuple[Charge, ...]:
        """The charges of one account."""
        return tuple(each for each in self.charges if each.account == account)

    def encode(self) -> bytes:
        """The body of its row in the store."""
        steps = [self.first, self.last, self.eligibility, self.after, list(self.variance)]
        whole = [_rows(self.charges), dict(self.scales), self.plan, steps if self.last else []]
        whole += [dict(self.factors), _rows(self.units)] if self.factors or self.units else []
        return cbor.encode(whole, floats=True, max_size=_MOST_BYTES)

    @classmethod
    def decode(cls, hold: RunHold) -> Attempt:
        """The charge, attempt or reservation of a row that is open."""
        try:
            rows, scales, plan, steps, *more = cbor.decode(hold.body, floats=True, max_size=_MOST_BYTES)
            factors, units = more or ({}, [])
            first, last, eligibility, after, variance = steps or (0, 0, 0, 0, ())
            return cls(
                segment=hold.segment, generation=hold.generation, nonce=hold.nonce, first=first, last=last,
                charges=tuple(stored_charge(*row) for row in rows), units=tuple(stored_charge(*row) for row in units),
                plan=plan, scales=dict(scales), factors=dict(factors), eligibility=eligibility, after=after,
                variance=tuple(variance),
            )  # fmt: skip
        except (LaminaError, TypeError, ValueError):
            raise _unreadable("the open charges of a run") from None

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as CBOR carries them; those of a subclass too."""
        changed = {
            "charges": [each.row() for each in self.charges],
            "units": [each.row() for each in self.units],
            "variance": list(self.variance),
            "changes": [[step, list(noise)] for step, noise in self.changes],
            "scales": dict(self.scales),
            "factors": dict(self.factors),
            "outcome": 0 if self.outcome is None else self.outcome.value,
        }
        return {each.name: getattr(self, each.name) for each in fields(self)} | changed

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the attempt that `to_plain` gave; TypeError, ValueError or KeyError if it is none."""
        charges, units = (tuple(stored_charge(**row) for row in plain[name]) for name in ("charges", "units"))
        changed = {
            "charges": charges,
            "units": units,
            "variance": tuple(plain["variance"]),
            "changes": tuple((step, tuple(noise)) for step, noise in plain["changes"]),
            "outcome": SegmentOutcome(plain["outcome"]) if plain["outcome"] else None,
        }
        return cls(**{**plain, **changed})


def _rows(charges: Iterable[Charge]) -> list[list[Any]]:
    return [list(each.row().values()) for each in charges]


def _unreadable(what: str) -> LedgerDamaged:
    return LedgerDamaged("spend.row-unreadable", f"{what} cannot be read", "restore the ledger from a copy")


def add_charges(events: dict[EventKey, int], charges: Iterable[Charge]) -> dict[EventKey, int]:
    """Add charges to events, in place."""
    add_events(events, event_counts(each.event for each in charges))
    return events


_UNIX_EPOCH = datetime.date(1970, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpend:
    """Steps that one run charged to one account, `redone` of them for repeated segments, and steps it reserved."""

    run: str
    label: str
    day: str
    steps: int
    redone: int
    reserved: int
    finished: bool

    @property
    def name(self) -> str:
        return run_name(self.run, self.label)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountTotal:
    """ε (or the rate of a risk bound) of all charges, and of all charges and reservations together; spent ≤ committed."""

    spent: float
    committed: float
    runs: tuple[RunSpend, ...]


def run_name(run: str, label: str = "") -> str:
    return f"{label!r} ({run[:8]})" if label else run[:8]


class SpendView:
    """Reads what is charged and reserved. A run is 16 bytes in the store, and 32 hex digits outside."""

    def __init__(self, rows: StoreReader, recorded: Spending) -> None:
        self._rows = rows
        self._recorded = recorded

    @cached_property
    def _holds(self) -> dict[tuple[bytes, int, int], Attempt]:
        return {(h.run, h.segment, h.generation): Attempt.decode(h) for h in self._rows.holds()}

    @cached_property
    def _terms(self) -> dict[Account, bytes]:
        try:
            return {Account.parse(name): body for name, body in self._rows.terms().items()}
        except RunError:
            raise _unreadable("the name of an account with limits") from None

    def _held(self, name: Account, *, reserved: bool) -> Iterator[tuple[bytes, int, int, Charge]]:
        for (run, segment, generation), held in self._holds.items():
            if (segment == RESERVATION_SEGMENT) == reserved:
                yield from ((run, segment, generation, each) for each in held.of(name))

    def charged(self, name: Account) -> EventCounts:
        """All that was ever charged to an account, recorded in a leaf or not."""
        events = self._recorded.events(name)
        return add_charges(events, (each for *_, each in self._held(name, reserved=False)))

    def spending(self, *names: Account, without: tuple[bytes, int, int] | None = None) -> Spending:
        """All that was ever charged to these accounts, except by one attempt: what leaves will say of it."""
        found = self._recorded.copy(*names)
        for name in names:
            held = ((key, each) for *key, each in self._held(name, reserved=False))
            found.charge(name, [each.event for key, each in held if tuple(key) != without])
        return found

    def standing(self, name: Account, *, without: str = "") -> EventCounts:
        """All that was charged, and all that is reserved except by the run `without`."""
        own = bytes.fromhex(without)
        others = (each for run, *_, each in self._held(name, reserved=True) if run != own)
        return add_charges(dict(self.charged(name)), others)

    def reserved(self, name: Account, run: str) -> EventCounts:
        own = bytes.fromhex(run)
        return add_charges({}, (c for r, *_, c in self._held(name, reserved=True) if r == own))

    def of_run(self, run: str, name: Account) -> EventCounts:
        """What one run was charged."""
        own = bytes.fromhex(run)
        mine = (each for found, *_, each in self._held(name, reserved=False) if found == own)
        return add_charges(self._recorded.events(name, own), mine)

    def accounts(self) -> list[Account]:
        """Every account with a charge or reservation."""
        held = {each.account for held in self._holds.values() for each in held.charges}
        return sorted({*self._recorded.bounds(), *held, *self._terms})

    def terms(self, name: Account) -> tuple[Limit, ...]:
        """The budgets that all charges and reservations of an account are known to keep."""
        body = self._terms.get(name)
        try:
            rows = [] if body is None else cbor.decode(body, floats=True, null=True)
        except EncodingError:
            raise _unreadable(f"the budgets of account {str(name)!r}") from None
        return tuple(
            Limit(
                epsilon=math.inf if most is None or risk else most, delta=delta, accountant=accountant,
                risk=RiskBound(of=risk[0], fpr=risk[1], tpr=most) if risk else None,
            )
            for most, delta, accountant, *risk in rows
        )  # fmt: skip

    def marks(self, cls: str) -> frozenset[str]:
        """Return the limits of the curves of all charges and reservations of a class."""
        plans = {*self._recorded.plans(cls), *(held.plan for held in self._holds.values() if held.of(Account(cls)))}
        limits = {UNPROVEN: cls in self._recorded.split, ZERO_OUT: cls in self._recorded.content_only}
        found = frozenset(mark for mark, holds in limits.items() if holds)
        return found.union(*(_marks_of_plan(digest, self._rows.blob(digest)) for digest in plans))

    def labels(self) -> dict[str, str]:
        return {each.id.hex(): each.label for each in self._rows.runs()}

    def runs(self, name: Account) -> tuple[RunSpend, ...]:
        """The runs with charges to, or reservations of, an account; the oldest first."""
        known = {each.id: each for each in self._rows.runs()}
        taken: dict[bytes, dict[tuple[int, int], int]] = {}
        held = [(run, at, gen, each.event.steps) for run, at, gen, each in self._held(name, reserved=False)]
        for run, segment, generation, steps in (*self._recorded.attempts(name), *held):
            mine = taken.setdefault(run, {})
            mine[segment, generation] = mine.get((segment, generation), 0) + steps
        left: dict[bytes, int] = {}
        for run, _, _, each in self._held(name, reserved=True):
            left[run] = left.get(run, 0) + each.event.steps
        found = []
        for run in {*taken, *left}:
            row = known.get(run, RunRow(run, "", 0, True))
            attempts = taken.get(run, {})
            latest = dict(sorted(attempts))
            found.append(
                RunSpend(
                    run=run.hex(),
                    label=row.label,
                    day=(_UNIX_EPOCH + datetime.timedelta(days=row.day)).isoformat(),
                    finished=row.finished,
                    steps=sum(attempts.values()),
                    redone=sum(n for (segment, at), n in attempts.items() if at < latest[segment]),
                    reserved=left.get(run, 0),
                )
            )
        return tuple(sorted(found, key=lambda each: (each.day, each.run)))


class SpendTransaction(SpendView):
    """Changes what is charged and reserved. `SpendLedger` decides what is allowed."""

    def __init__(self, rows: StoreWriter, recorded: Spending) -> None:
        super().__init__(rows, recorded)
        self._write = rows

    def enter(self, run: str, label: str = "") -> None:
        """Note that the run is active. Of the time only the day is kept."""
        id = bytes.fromhex(run)
        known = {each.id: each for each in self._write.runs()}.get(id)
        today = (datetime.datetime.now(datetime.UTC).date() - _UNIX_EPOCH).days
        before = known.label if known is not None else ""
        self._write.put_run(RunRow(id, label or before, today, False))

    def leave(self, run: str) -> None:
        """Mark the run as finished and drop its reservation."""
        id = bytes.fromhex(run)
        self.drop_reservation(run)
        for each in self._write.runs():
            if each.id == id:
                self._write.put_run(each._replace(finished=True))

    def drop_reservation(self, run: str) -> None:
        id = bytes.fromhex(run)
        self._write.drop_hold(id, RESERVATION_SEGMENT)
        self._holds.pop((id, RESERVATION_SEGMENT, 0), None)

    def reserve(self, run: str, charges: Sequence[Charge], plan: bytes = b"") -> None:
        """Replace the reservation of the run. `plan` is the digest of its plan."""
        self.drop_reservation(run)
        if charges:
            self._put(bytes.fromhex(run), Attempt(segment=RESERVATION_SEGMENT, charges=tuple(charges), plan=plan))

    def charge(self, run: str, held: Attempt) -> None:
        """Charge an attempt, and take its steps off the run's reservation, not below zero."""
        id = bytes.fromhex(run)
        self._put(id, held)
        before = self._holds.get((id, RESERVATION_SEGMENT, 0))
        if before is None:
            return
        taken: Counter[tuple[Account, float, float]] = Counter()
        for each in held.charges:
            taken[each.account, each.event.sigma, each.event.q] += each.event.steps
        left = []
        for each in before.charges:
            kind, steps = (each.account, each.event.sigma, each.event.q), each.event.steps
            off = min(steps, taken[kind])
            taken[kind] -= off
            if steps > off:
                left.append(each.times(steps - off))
        self.reserve(run, left, before.plan)

    def set_terms(self, name: Account, terms: Sequence[Limit]) -> None:
        rows = [
            [
                None if math.isinf(t.most) else t.most,
                t.delta,
                t.accountant,
                *((t.risk.of, t.risk.fpr) if t.risk else ()),
            ]
            for t in terms
        ]
        self._terms[name] = cbor.encode(rows, floats=True, null=True)
        self._write.put_terms(str(name), self._terms[name])

    def _put(self, run: bytes, held: Attempt) -> None:
        self._write.put_hold(RunHold(run, *held.key, None, held.encode()))
        self._holds[run, held.segment, held.generation] = held


@lru_cache(maxsize=256)
def _marks_of_plan(digest: bytes, data: bytes | None) -> frozenset[str]:
    """Return the limits of the curves of a plan; unproven if the ledger lacks it. `data` is the plan in its store."""
    if data is None or hashlib.sha256(data).digest() != digest:
        return frozenset((UNPROVEN,))
    return curve_marks(StepPlan.from_cbor(data))
