"""`Rows`: the questions and entries of a spend book, inside one transaction."""

from __future__ import annotations

import datetime
import hashlib
import math
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from lamina.account import order_of
from lamina.account.pooled import Events, Kind
from lamina.train.book.charge import Charge
from lamina.train.book.total import RunSpend, Terms

Attempt = tuple[str, int, int]  # run, segment, generation

_CHARGED = (
    "SELECT sigma, q, accountant, sum(steps) FROM charged WHERE account = ? GROUP BY sigma, q, accountant"
)
_RESERVED = "SELECT sigma, q, '', sum(steps) FROM reserved WHERE account = ? AND run {} ? GROUP BY sigma, q"
_RUNS = """
WITH
    latest AS (SELECT run, segment, max(generation) AS generation FROM attempt GROUP BY run, segment),
    paid AS (
        SELECT run, sum(steps) AS steps,
            sum(CASE WHEN charged.generation < latest.generation THEN steps ELSE 0 END) AS redone
        FROM charged JOIN latest USING (run, segment) WHERE account = :account GROUP BY run
    ),
    held AS (SELECT run, sum(steps) AS steps FROM reserved WHERE account = :account GROUP BY run)
SELECT run, label, day, finished, coalesce(paid.steps, 0), coalesce(paid.redone, 0), coalesce(held.steps, 0)
FROM run LEFT JOIN paid USING (run) LEFT JOIN held USING (run)
WHERE paid.steps IS NOT NULL OR held.steps IS NOT NULL
ORDER BY day, run
"""
_ACCOUNTS = """
SELECT origin, cls, account.delta, account.accountant, 0 AS older FROM account
UNION
SELECT origin, cls, charged.delta, charged.accountant, 1 FROM account JOIN charged ON account.id = charged.account
WHERE charged.delta <> account.delta OR charged.accountant <> account.accountant
ORDER BY origin, cls, older, 3, 4
"""
_ATTEMPTS = """
SELECT attempt.run, attempt.segment, attempt.generation, nonce, seal,
    origin, cls, sigma, q, steps, charged.delta, charged.accountant
FROM attempt LEFT JOIN charged USING (run, segment, generation) LEFT JOIN account ON account.id = charged.account
ORDER BY attempt.run, attempt.segment, attempt.generation
"""


class Rows:
    """Thin and literal: what is allowed is decided in `SpendBook`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    # ----------------------------------------------------------------------------------- accounts

    def find(self, origin: str, cls: str) -> int | None:
        row = self._one("SELECT id FROM account WHERE origin = ? AND cls = ?", origin, cls)
        return None if row is None else int(row[0])

    def account(self, origin: str, charge: Charge) -> int:
        """The account that a charge belongs to, begun without a bound if need be."""
        self._do(
            "INSERT INTO account (origin, cls, bound, delta, accountant) VALUES (?, ?, NULL, ?, ?) "
            "ON CONFLICT DO NOTHING",
            origin,
            charge.cls,
            charge.delta,
            charge.accountant,
        )
        found = self.find(origin, charge.cls)
        assert found is not None
        return found

    def terms(self, account: int | None) -> Terms | None:
        """What is known of all that is charged or reserved there: its ε is at most terms.bound."""
        row = self._one("SELECT bound, delta, accountant FROM account WHERE id = ?", account)
        if row is None:
            return None
        return Terms(bound=math.inf if row[0] is None else row[0], delta=row[1], accountant=row[2])

    def set_terms(self, account: int, terms: Terms) -> None:
        bound = None if math.isinf(terms.bound) else terms.bound
        self._do(
            "UPDATE account SET bound = ?, delta = ?, accountant = ? WHERE id = ?",
            bound,
            terms.delta,
            terms.accountant,
            account,
        )

    def accounts(self) -> list[tuple[str, str, float, str]]:
        return [row[:4] for row in self._db.execute(_ACCOUNTS)]

    # ----------------------------------------------------------------------------------- events

    def charged(self, account: int | None) -> Events:
        return self._events(_CHARGED, account)

    def standing(self, account: int | None, *, without: str = "") -> Events:
        """All that was charged, and all that is reserved except by the run `without`."""
        events = dict(self.charged(account))
        for event, steps in self._events(_RESERVED.format("<>"), account, without).items():
            events[event] = events.get(event, 0) + steps
        return events

    def reserved(self, account: int | None, run: str) -> Events:
        return self._events(_RESERVED.format("="), account, run)

    def of_run(self, run: str, cls: str, origin: str | None) -> Events:
        return self._events(
            "SELECT sigma, q, charged.accountant, sum(steps) FROM charged JOIN account ON account.id = charged.account "
            "WHERE run = ? AND cls = ? AND (? IS NULL OR origin = ?) GROUP BY sigma, q, charged.accountant",
            run,
            cls,
            origin,
            origin,
        )

    # ----------------------------------------------------------------------------------- entries

    def enter(self, run: str, label: str = "") -> None:
        """The run is at work. One day is all that is kept of time."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._do(
            "INSERT INTO run VALUES (?, ?, ?, 0) ON CONFLICT DO UPDATE "
            "SET finished = 0, label = CASE WHEN excluded.label = '' THEN label ELSE excluded.label END",
            run,
            label,
            today,
        )

    def leave(self, run: str) -> None:
        self.give_back(run)
        self._do("UPDATE run SET finished = 1 WHERE run = ?", run)

    def give_back(self, run: str) -> None:
        self._do("DELETE FROM reserved WHERE run = ?", run)

    def reserve(self, run: str, account: int, charge: Charge) -> None:
        self._do(
            "INSERT INTO reserved VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET steps = steps + excluded.steps",
            run,
            account,
            charge.sigma,
            charge.q,
            charge.steps,
        )

    def charge(self, key: Attempt, account: int, charge: Charge) -> None:
        """Book, and take the steps off the run's reservation, not below zero."""
        self._do(
            "INSERT INTO charged VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(*key, account, charge.sigma, charge.q, charge.steps, charge.delta, charge.accountant),
        )
        self._do(
            "UPDATE reserved SET steps = max(0, steps - ?) "
            "WHERE run = ? AND account = ? AND sigma = ? AND q = ?",
            *(charge.steps, key[0], account, charge.sigma, charge.q),
        )

    # ----------------------------------------------------------------------------------- attempts and runs

    def attempt(self, key: Attempt, nonce: bytes, origin: str, charges: Sequence[Charge]) -> None:
        entries = [(origin, c.cls, c.sigma, c.q, c.steps, c.delta, c.accountant) for c in charges]
        self._do("INSERT INTO attempt VALUES (?, ?, ?, ?, ?)", *key, nonce, _seal((*key, nonce), entries))

    def intact(self) -> bool:
        """Whether every attempt and its charges are as they were written: SQLite itself checks no contents."""
        booked = groupby(self._db.execute(_ATTEMPTS), key=lambda row: row[:5])
        return all(
            seal == _seal(attempt, [row[5:] for row in rows if row[5] is not None])
            for (*attempt, seal), rows in booked
        )

    def nonce(self, key: Attempt) -> bytes | None:
        row = self._one("SELECT nonce FROM attempt WHERE run = ? AND segment = ? AND generation = ?", *key)
        return None if row is None else bytes(row[0])

    def same(self, key: Attempt, charges: Sequence[Charge]) -> bool:
        """Whether these are the charges that the attempt was booked with, under whatever origin that was."""
        booked = self._db.execute(
            "SELECT cls, sigma, q, steps, charged.delta, charged.accountant "
            "FROM charged JOIN account ON account.id = charged.account "
            "WHERE run = ? AND segment = ? AND generation = ?",
            key,
        )
        asked = ((c.cls, c.sigma, c.q, c.steps, c.delta, c.accountant) for c in charges)
        return sorted(booked) == sorted(asked)

    def generations(self, run: str, segment: int) -> int:
        """One more than the highest generation that was booked."""
        row = self._one("SELECT max(generation) FROM attempt WHERE run = ? AND segment = ?", run, segment)
        return 0 if row is None or row[0] is None else int(row[0]) + 1

    def runs(self, account: int | None) -> tuple[RunSpend, ...]:
        return tuple(
            RunSpend(
                run=run, label=label, day=day, finished=bool(done), steps=steps, redone=redone, reserved=left
            )
            for run, label, day, done, steps, redone, left in self._db.execute(_RUNS, {"account": account})
        )

    def labels(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT run, label FROM run ORDER BY run"))

    # -----------------------------------------------------------------------------------

    def _do(self, statement: str, *values: Any) -> None:
        self._db.execute(statement, values)

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()

    def _events(self, query: str, *values: Any) -> Events:
        found: dict[Kind, int] = {}
        for sigma, q, name, steps in self._db.execute(query, values):
            kind = (sigma, q, order_of(name) or 0.0)
            found[kind] = found.get(kind, 0) + steps
        return found


def _seal(attempt: Sequence[Any], entries: Iterable[tuple[Any, ...]]) -> bytes:
    """Against bit rot, not against forgery: whoever may write the file may write a checksum too."""
    return hashlib.blake2b(repr((*attempt, *sorted(entries))).encode(), digest_size=16).digest()
