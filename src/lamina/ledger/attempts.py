"""Open charges and reservations of runs, kept in the store beside the leaves."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache

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


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """What the leaf of an attempt will say beside its charges, so that it can be recorded even if the run is lost.

    `changes` are known when it has ended: the steps at which the noise was moved, and S² per layer from there on.
    """

    first: int
    last: int
    eligibility: int
    after: int = 0
    variance: tuple[float, ...] = ()
    changes: NoiseByStep = ()

    def segment(self, index: int, generation: int, nonce: bytes, outcome: SegmentOutcome) -> Segment:
        """The attempt as an epoch records it."""
        return Segment(
            index=index, generation=generation, nonce=nonce, first=self.first, last=self.last,
            eligibility=self.eligibility, outcome=outcome, after=self.after or None,
        )  # fmt: skip

    def applied(self, plan: StepPlan) -> tuple[float, ...]:
        """The noise variance of each layer: the plan's, unless a rule moved it."""
        return self.variance or tuple(s * s for s in plan.noise)


@dataclass(frozen=True, slots=True)
class OpenCharges:
    """Charges of an attempt or a reservation that no leaf records yet.

    scales   of the signed bounds among them
    plan     its digest
    begun    the attempt; None for a reservation or a whole budget
    place    inode of the run's journal
    factors  of the signed bounds that are exhausted; 0: left out
    """

    charges: tuple[Charge, ...]
    scales: Mapping[str, float] = field(default_factory=dict)
    plan: bytes = b""
    begun: OpenAttempt | None = None
    place: int = 0
    factors: Mapping[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        rows = [list(each.row().values()) for each in self.charges]
        begun = [] if self.begun is None else [*astuple(self.begun)[:4], list(self.begun.variance)]
        whole = [rows, dict(self.scales), self.plan, begun, self.place]
        whole += [dict(self.factors)] if self.factors else []
        return cbor.encode(whole, floats=True, max_size=_MOST_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> OpenCharges:
        try:
            rows, scales, plan, begun, place, *factors = cbor.decode(data, floats=True, max_size=_MOST_BYTES)
            charges = tuple(stored_charge(*row) for row in rows)
            attempt = None
            if begun:
                first, last, eligibility, after, variance = begun
                attempt = OpenAttempt(first, last, eligibility, after, tuple(variance))
            return cls(charges, dict(scales), plan, attempt, place, *map(dict, factors))
        except (LaminaError, TypeError, ValueError):
            raise _unreadable("the open charges of a run") from None

    def of(self, account: Account) -> tuple[Charge, ...]:
        """The charges of one account."""
        return tuple(each for each in self.charges if each.account == account)


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
    def _holds(self) -> dict[tuple[bytes, int, int], OpenCharges]:
        return {(h.run, h.segment, h.generation): OpenCharges.decode(h.body) for h in self._rows.holds()}

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
            self._put(bytes.fromhex(run), RESERVATION_SEGMENT, 0, b"", OpenCharges(tuple(charges), plan=plan))

    def charge(self, run: str, segment: int, generation: int, nonce: bytes, held: OpenCharges) -> None:
        """Charge an attempt, and take its steps off the run's reservation, not below zero."""
        id = bytes.fromhex(run)
        self._put(id, segment, generation, nonce, held)
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

    def _put(self, run: bytes, segment: int, generation: int, nonce: bytes, held: OpenCharges) -> None:
        self._write.put_hold(RunHold(run, segment, generation, nonce, None, held.encode()))
        self._holds[run, segment, generation] = held


@lru_cache(maxsize=256)
def _marks_of_plan(digest: bytes, data: bytes | None) -> frozenset[str]:
    """Return the limits of the curves of a plan; unproven if the ledger lacks it. `data` is the plan in its store."""
    if data is None or hashlib.sha256(data).digest() != digest:
        return frozenset((UNPROVEN,))
    return curve_marks(StepPlan.from_cbor(data))
