"""`Desk`: the accounts of a ledger inside one transaction: what leaves charged, and what runs hold."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from lamina import cbor
from lamina.account.pooled import Events
from lamina.errors import EncodingError
from lamina.ledger.store.base import RESERVED, Hold, Reader, RunRow, Writer
from lamina.ledger.store.errors import Damaged
from lamina.train.book.account import bound_of
from lamina.train.book.charge import Charge
from lamina.train.book.held import Held, add
from lamina.train.book.recorded import Recorded
from lamina.train.book.total import RunSpend, Terms

_EPOCH = datetime.date(1970, 1, 1)


class Reading:
    """What is charged and reserved. Runs are 16 bytes here, and 32 hex digits outside."""

    def __init__(self, rows: Reader, recorded: Recorded) -> None:
        self._rows = rows
        self._recorded = recorded

    @cached_property
    def _holds(self) -> dict[tuple[bytes, int, int], Held]:
        return {(h.run, h.segment, h.generation): Held.decode(h.body) for h in self._rows.holds()}

    @cached_property
    def _terms(self) -> dict[str, bytes]:
        return self._rows.terms()

    def _held(self, name: str, *, reserved: bool) -> Iterator[tuple[bytes, int, int, Charge]]:
        for (run, segment, generation), held in self._holds.items():
            if (segment == RESERVED) == reserved:
                yield from ((run, segment, generation, each) for each in held.of(name))

    def charged(self, name: str) -> Events:
        """All that was ever charged to an account, whether a leaf says so yet or not."""
        events = dict(self._recorded.spending.events(bound_of(name)))
        return add(events, (each for *_, each in self._held(name, reserved=False)))

    def standing(self, name: str, *, without: str = "") -> Events:
        """All that was charged, and all that is reserved except by the run `without`."""
        own = bytes.fromhex(without)
        others = (each for run, *_, each in self._held(name, reserved=True) if run != own)
        return add(dict(self.charged(name)), others)

    def reserved(self, name: str, run: str) -> Events:
        own = bytes.fromhex(run)
        return add({}, (c for r, *_, c in self._held(name, reserved=True) if r == own))

    def of_run(self, run: str, name: str) -> Events:
        """What one run was charged."""
        own = bytes.fromhex(run)
        mine = (each for found, *_, each in self._held(name, reserved=False) if found == own)
        return add(self._recorded.of_run(own, name), mine)

    def names(self) -> list[str]:
        """Every account that was charged, or of which something is reserved."""
        held = {each.cls for held in self._holds.values() for each in held.charges}
        return sorted({*self._recorded.names(), *held, *self._terms})

    def terms(self, name: str) -> tuple[Terms, ...]:
        """What is known of all that is charged or reserved there: its ε is at most the bound of each."""
        body = self._terms.get(name)
        try:
            rows = [] if body is None else cbor.decode(body, floats=True, null=True)
        except EncodingError as error:
            raise Damaged(
                "spend.terms-account-not",
                f"the terms of account {name!r} cannot be read",
                "restore the ledger from a copy",
            ) from error
        return tuple(
            Terms(bound=math.inf if bound is None else bound, delta=delta, accountant=accountant)
            for bound, delta, accountant in rows
        )

    def labels(self) -> dict[str, str]:
        return {each.id.hex(): each.label for each in self._rows.runs()}

    def runs(self, name: str) -> tuple[RunSpend, ...]:
        """Who was charged, or has reserved, something of an account; the oldest first."""
        known = {each.id: each for each in self._rows.runs()}
        taken: dict[bytes, dict[tuple[int, int], int]] = {}
        held = [(run, at, gen, each.steps) for run, at, gen, each in self._held(name, reserved=False)]
        for run, segment, generation, steps in (*self._recorded.attempts(name), *held):
            mine = taken.setdefault(run, {})
            mine[segment, generation] = mine.get((segment, generation), 0) + steps
        left: dict[bytes, int] = {}
        for run, _, _, each in self._held(name, reserved=True):
            left[run] = left.get(run, 0) + each.steps
        found = []
        for run in {*taken, *left}:
            row = known.get(run, RunRow(run, "", 0, True))
            attempts = taken.get(run, {})
            latest = dict(sorted(attempts))
            found.append(
                RunSpend(
                    run=run.hex(),
                    label=row.label,
                    day=(_EPOCH + datetime.timedelta(days=row.day)).isoformat(),
                    finished=row.finished,
                    steps=sum(attempts.values()),
                    redone=sum(n for (segment, at), n in attempts.items() if at < latest[segment]),
                    reserved=left.get(run, 0),
                )
            )
        return tuple(sorted(found, key=lambda each: (each.day, each.run)))


class Desk(Reading):
    """The same, to be changed. Thin and literal: what is allowed is decided in `Book`."""

    def __init__(self, rows: Writer, recorded: Recorded) -> None:
        super().__init__(rows, recorded)
        self._write = rows

    def enter(self, run: str, label: str = "") -> None:
        """The run is at work. One day is all that is kept of time."""
        id = bytes.fromhex(run)
        known = {each.id: each for each in self._write.runs()}.get(id)
        today = (datetime.datetime.now(datetime.UTC).date() - _EPOCH).days
        before = known.label if known is not None else ""
        self._write.put_run(RunRow(id, label or before, today, False))

    def leave(self, run: str) -> None:
        """Give back what it has reserved."""
        id = bytes.fromhex(run)
        self.give_back(run)
        for each in self._write.runs():
            if each.id == id:
                self._write.put_run(each._replace(finished=True))

    def give_back(self, run: str) -> None:
        id = bytes.fromhex(run)
        self._write.drop_hold(id, RESERVED)
        self._holds.pop((id, RESERVED, 0), None)

    def reserve(self, run: str, charges: Sequence[Charge]) -> None:
        """In place of what it had reserved before."""
        self.give_back(run)
        if charges:
            self._put(bytes.fromhex(run), RESERVED, 0, b"", Held(tuple(charges)))

    def charge(self, run: str, segment: int, generation: int, nonce: bytes, held: Held) -> None:
        """Hold an attempt, and take its steps off the run's reservation, not below zero."""
        id = bytes.fromhex(run)
        self._put(id, segment, generation, nonce, held)
        before = self._holds.get((id, RESERVED, 0))
        if before is None:
            return
        taken: dict[tuple[str, float, float], int] = {}
        for each in held.charges:
            taken[each.cls, each.sigma, each.q] = taken.get((each.cls, each.sigma, each.q), 0) + each.steps
        left = []
        for each in before.charges:
            off = min(each.steps, taken.get((each.cls, each.sigma, each.q), 0))
            if off:
                taken[each.cls, each.sigma, each.q] -= off
            if each.steps > off:
                left.append(replace(each, steps=each.steps - off))
        self.reserve(run, left)

    def set_terms(self, name: str, terms: Sequence[Terms]) -> None:
        rows = [[None if math.isinf(t.bound) else t.bound, t.delta, t.accountant] for t in terms]
        self._terms[name] = cbor.encode(rows, floats=True, null=True)
        self._write.put_terms(name, self._terms[name])

    def _put(self, run: bytes, segment: int, generation: int, nonce: bytes, held: Held) -> None:
        self._write.put_hold(Hold(run, segment, generation, nonce, None, held.encode()))
        self._holds[run, segment, generation] = held
