"""A ledger in PostgreSQL: for several trainers, processes and machines.

The one row of `head` is the sequencer: whoever writes locks it first, so writers take turns and each sees what the one
before committed. Rows go in by COPY. The session insists on synchronous_commit; a server without fsync is refused,
since it would acknowledge what a power cut takes back.

When the connection is lost in the middle of a commit nobody can know whether it took place. That is `StoreLost`; the
ledger connects again and looks for the batch by its token.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg
from psycopg import sql

from lamina.ledger.errors import LedgerError
from lamina.ledger.store.address import SCHEMA, Address
from lamina.ledger.store.errors import StoreError, StoreLost
from lamina.ledger.store.migrations import VERSION, migrate
from lamina.ledger.store.pgdatabase import PgDatabase, pg_errors
from lamina.ledger.store.refusal import refusal
from lamina.ledger.store.rows import Rows

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_WORDS = {"number": "BIGINT", "bytes": "BYTEA", "sorted": ""}
_LISTED = 5  # schemas with a ledger that are told
_LEDGERS = (
    "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND c.relname IN ('leaf', 'head', 'tile', 'checkpoint') "
    "GROUP BY n.nspname HAVING count(*) = 4 ORDER BY n.nspname"
)
_IDLE = 300  # seconds after which a writer that stopped in the middle loses its turn


class PostgresStore:
    """`where` is "postgresql://host/database", and "#schema" behind it for one of several ledgers."""

    remote = True

    def __init__(
        self, where: str, *, create: bool = False, readonly: bool = False, patience: float = 30.0
    ) -> None:
        self._address = Address.parse(where)
        self._schema = self._address.schema or SCHEMA
        if not _NAME.fullmatch(self._schema):
            raise LedgerError(
                "store.schema-behind-address",
                "the schema behind the # of the address is no plain name",
                "use small letters, digits and underscores; options come before the #",
            )
        self.name = f"{self._address.shown}#{self._schema}"
        self._served = False  # whether it ever answered
        self._patience, self._pid, self._readonly = patience, os.getpid(), readonly
        self._locks = {"read": threading.RLock(), "write": threading.RLock()}
        self._open: dict[str, psycopg.Connection] = {}
        try:
            with pg_errors(self.name):
                self._prepare(create)
        except BaseException:
            self.close()
            raise

    # ----------------------------------------------------------------------------------- transactions

    @contextmanager
    def read(self) -> Iterator[Rows]:
        self._refresh()
        with self._transaction("read") as db:
            yield Rows(db)

    @contextmanager
    def write(self) -> Iterator[Rows]:
        if self._readonly:
            raise LedgerError(
                "store.ledger-opened-reading",
                f"the ledger '{self.name}' was opened for reading",
                "open it for writing",
            )
        with self._transaction("write") as db:
            if not db.rows("SELECT id FROM head FOR UPDATE"):
                db.rows(
                    "LOCK TABLE head IN EXCLUSIVE MODE"
                )  # still empty: who comes second finds the first's header
            yield Rows(db)

    @contextmanager
    def _transaction(self, purpose: str) -> Iterator[PgDatabase]:
        if self._pid != os.getpid():
            raise LedgerError(
                "store.ledger-opened-before",
                f"the ledger '{self.name}' was opened before a fork",
                "open it in the process that uses it",
            )
        with self._locks[purpose], pg_errors(self.name):
            db = self._connection(purpose)
            if db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE and purpose == "read":
                yield PgDatabase(db)  # a view inside a view is the same view
                return
            try:
                yield PgDatabase(db)
                db.commit()
            except BaseException:
                self._undo(purpose, db)
                raise

    def _refresh(self) -> None:
        """A server that was started again since the last view is none that went away: forget the old connection."""
        with self._locks["read"]:
            db = self._open.get("read")
            if db is None or db.closed or db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                return
            if select.select([db.fileno()], [], [], 0)[0]:  # nothing was asked: this is the end, or a notice
                try:
                    db.execute("SELECT 1")
                    db.rollback()
                except psycopg.Error:
                    self._undo("read", db)

    def _undo(self, purpose: str, db: psycopg.Connection) -> None:
        """Back to what is committed. A connection that cannot even do that is not used again."""
        with suppress(psycopg.Error):
            db.rollback()
        if db.closed or db.broken:
            self._open.pop(purpose, None)
            with suppress(psycopg.Error):
                db.close()

    # ----------------------------------------------------------------------------------- the database

    def compact(self) -> None:
        with self._locks["write"], pg_errors(self.name):
            db = self._connection("write")
            db.autocommit = True
            try:
                for table in ("leaf", "tile", "evidence", "known"):
                    db.execute(sql.SQL("VACUUM (FULL) {}").format(sql.Identifier(table)))
            finally:
                db.autocommit = False

    def size_on_disk(self) -> int:
        """Tables with their indexes."""
        with self._transaction("read") as db:
            found = db.rows(
                "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ? AND c.relkind = 'r'",
                self._schema,
            )
        return int(found[0][0])

    def close(self) -> None:
        for purpose in ("read", "write"):
            with self._locks[purpose]:
                if (db := self._open.pop(purpose, None)) is not None and self._pid == os.getpid():
                    with suppress(psycopg.Error):
                        db.close()

    def _prepare(self, create: bool) -> None:
        purpose = "read" if self._readonly else "write"
        db = self._connection(purpose)
        plain = PgDatabase(db)
        try:
            plain.rows("SELECT pg_advisory_xact_lock(hashtext(?))", f"lamina {self._schema}")
            if create:
                db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
            made = plain.rows("SELECT to_regclass('meta') IS NOT NULL")[0][0]
            if not made and not create:
                raise self._nothing(plain)
            version = int(plain.rows("SELECT value FROM meta WHERE name = 'tables'")[0][0]) if made else 0
            if self._readonly and version < VERSION:
                raise LedgerError(
                    "store.tables-version-brought",
                    f"{self.name} has tables of version {version}, to be brought up to {VERSION}",
                    "open it for writing once",
                )
            current = migrate(plain, version, _WORDS)
            if current != version:
                # Hashes do not compress: do not try.
                plain.rows("ALTER TABLE tile ALTER COLUMN data SET STORAGE EXTERNAL")
                Rows(plain).put_meta("tables", str(current).encode())
            db.commit()
        except BaseException:
            self._undo(purpose, db)
            raise

    def _connection(self, purpose: str) -> psycopg.Connection:
        db = self._open.get(purpose)
        if db is not None and not (db.closed or db.broken):
            return db
        address = self._address
        try:
            db = psycopg.connect(
                address.conninfo, autocommit=True, connect_timeout=10, application_name="lamina ledger"
            )
        except psycopg.Error as error:
            found = refusal(error, address)
            if isinstance(found, StoreLost) and self._served:
                found = StoreLost(
                    "store.server-went-away-start",
                    f"the server of {self.name} went away: {found.problem}",
                    "start it, then try again",
                )
            raise found from None
        try:
            self._insist(db, purpose)
        except BaseException:
            db.close()
            raise
        self._open[purpose], self._served = db, True
        return db

    def _nothing(self, db: PgDatabase) -> LedgerError:
        """Why there is no ledger under this name, and where there are some."""
        schema = self._schema
        found = db.rows(
            "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = ?", schema
        )
        if found and not found[0][0]:
            return StoreError(
                "store.user-not-look",
                f"the user may not look into schema {schema!r} of {self.name}",
                f"have it granted: GRANT USAGE ON SCHEMA {schema}, and SELECT on its tables",
            )
        others = [f"#{name}" for (name,) in db.rows(_LEDGERS)]
        has = "has none" if found else "is not there"
        return LedgerError(
            "store.no-ledger-schema",
            f"there is no ledger in {self.name}: schema {schema!r} {has}",
            f"name one that has, after the #: {', '.join(others[:_LISTED])}{', …' * (len(others) > _LISTED)}"
            if others
            else "give the database of one, or let a run make it: no schema of this one has a ledger",
        )

    def _insist(self, db: psycopg.Connection, purpose: str) -> None:
        """Durable, or not at all; and nobody waits for ever."""
        plain = PgDatabase(db)
        for name in ("fsync", "full_page_writes"):
            if plain.rows(f"SHOW {name}")[0][0] == "off":
                raise StoreError(
                    "store.server-runs-off",
                    f"the server of {self.name} runs with {name} = off, and would lose what it acknowledged",
                    f"turn {name} on",
                )
        if plain.rows("SHOW synchronous_commit")[0][0] == "off":
            plain.rows("SET synchronous_commit = on")
        plain.rows("SELECT set_config('search_path', ?, false)", self._schema)
        plain.rows("SELECT set_config('lock_timeout', ?, false)", f"{int(self._patience * 1000)}ms")
        plain.rows("SELECT set_config('idle_in_transaction_session_timeout', ?, false)", f"{_IDLE}s")
        db.autocommit = False
        if purpose == "read":
            db.isolation_level, db.read_only = psycopg.IsolationLevel.REPEATABLE_READ, True
