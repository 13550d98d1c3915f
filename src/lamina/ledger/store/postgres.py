"""A ledger in PostgreSQL: for several trainers, processes and machines."""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from lamina.errors import LedgerDamaged, LedgerError, StoreBusy, StoreError, StoreLost
from lamina.ledger.store.open_store import DEFAULT_SCHEMA, PostgresAddress
from lamina.ledger.store.sql_rows import TABLES_VERSION, SqlRows, migrate

_PASSWORD_REMEDY = "give the right one in ~/.pgpass or PGPASSWORD, or in the address, where / is %2F and @ is %40"
_NOT_READY_TEXTS = (
    "starting up",
    "shutting down",
    "recovery mode",
    "not yet accepting",
    "too many clients",
    "connection slots",
)
_UNREACHABLE_TEXTS = (
    "connection refused",
    "no such file",
    "timeout",
    "timed out",
    "unreachable",
    "no route",
    "closed the connection",
)


def connection_error(error: psycopg.Error, address: PostgresAddress) -> LedgerError:
    """Of an attempt to connect. libpq gives a text and no code, so the text decides.

    `StoreLost`, which is tried again, is whatever may be over in a moment.
    """
    if isinstance(error, psycopg.ProgrammingError):  # its text may hold any part of the address
        return LedgerError(
            "store.address-not-read",
            f"the address {address.shown.partition('?')[0]} cannot be read",
            "write postgresql://USER@HOST/DATABASE#schema",
        )
    known = _ConnectionTarget(error, address)
    text = str(error).lower()
    if 'database "' in text and "does not exist" in text:
        problem = f"{known.server} has no database {known.database!r}"
        return StoreError(
            "store.give-another-after",
            problem,
            f"give another after the host, or have it made: createdb {known.database}",
        )
    if 'role "' in text and "does not exist" in text:
        problem = f"{known.server} knows no user {known.user!r}"
        return StoreError(
            "store.give-user-postgresql",
            problem,
            "give a user of it, postgresql://USER@…, or have one made: createuser",
        )
    if "password authentication failed" in text:
        return StoreError(
            "store.not-take-password",
            f"{known.server} does not take the password of user {known.user!r}",
            _PASSWORD_REMEDY,
        )
    if "no password supplied" in text:
        return StoreError(
            "store.asks-password-user",
            f"{known.server} asks for the password of user {known.user!r}, and has none",
            _PASSWORD_REMEDY,
        )
    if "pg_hba.conf" in text or "authentication failed" in text:
        problem = f"{known.server} does not let user {known.user!r} in to database {known.database!r} from here"
        return StoreError(
            "store.give-another-user", problem, "give another user, or have a line for this one in its pg_hba.conf"
        )
    if "permission denied for database" in text:
        problem = f"user {known.user!r} may not connect to database {known.database!r} of {known.server}"
        return StoreError(
            "store.granted-grant-connect",
            problem,
            f"have it granted: GRANT CONNECT ON DATABASE {known.database} TO {known.user}",
        )
    if "resolve host" in text or "translate host name" in text:
        return StoreLost(
            "store.no-host", f"there is no host {known.host!r}", "correct the name of the host in the address"
        )
    if any(each in text for each in _NOT_READY_TEXTS):
        return StoreLost(
            "store.not-ready", f"{known.server} is not ready: {first_line(error)}", "wait a little, then try again"
        )
    if any(each in text for each in _UNREACHABLE_TEXTS):
        return StoreLost(
            "store.not-answer", f"{known.server} does not answer", "start it, or correct host and port in the address"
        )
    return StoreLost(
        "store.not-used",
        f"{known.server} cannot be used: {first_line(error)}",
        "repair what it reports, then try again",
    )


def first_line(error: psycopg.Error) -> str:
    """The first line; what follows may repeat whole rows."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class _ConnectionTarget:
    """Whom the attempt was about: as libpq says, which knows the defaults, or as the address does."""

    def __init__(self, error: psycopg.Error, address: PostgresAddress) -> None:
        given = conninfo_to_dict(address.conninfo)
        tried = error.pgconn
        self.host = _decode_text(tried.host if tried else None) or str(given.get("host") or "localhost")
        self.user = _decode_text(tried.user if tried else None) or str(given.get("user") or "")
        self.database = _decode_text(tried.db if tried else None) or str(given.get("dbname") or self.user)
        port = _decode_text(tried.port if tried else None) or str(given.get("port") or "5432")
        where = f"on the socket in {self.host}" if self.host.startswith("/") else f"at {self.host}"
        self.server = f"the server {where}, port {port},"


def _decode_text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


_COPY_TYPES = {
    "leaf": ("int8", "int4", "bytea"),
    "evidence": ("int8", "bytea"),
    "known": ("bytea", "int8"),
    "attempt": ("bytea", "int8", "int8", "int8"),
    "withdrawn": ("int8", "int8"),
    "token": ("bytea",),
}
_NO_SPACE_ERRORS = (errors.DiskFull, errors.OutOfMemory, errors.InsufficientResources)
_LOST_ERRORS = (
    psycopg.InterfaceError,
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.TooManyConnections,
    errors.IdleInTransactionSessionTimeout,
)


class PostgresConnection:
    """PostgreSQL's side of `Rows`."""

    def __init__(self, db: psycopg.Connection) -> None:
        self._db = db

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        text = query.replace("?", "%s")
        cursor = self._db.execute(text, values or None, binary=True)
        return cursor.fetchall() if cursor.description else []

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        text = f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)"
        with self._db.cursor() as cursor, cursor.copy(text) as copy:
            copy.set_types(_COPY_TYPES[table])
            for row in rows:
                copy.write_row(row)

    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(statement.replace("?", "%b"), rows)

    def find(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        query = "SELECT key, seq FROM known WHERE key = ANY(%b)"
        found: list[Any] = self._db.execute(query, [sorted(keys)], binary=True).fetchall() if keys else []
        return found

    def tokens(self, keys: Sequence[bytes]) -> set[bytes]:
        query = "SELECT key FROM token WHERE key = ANY(%b)"
        found = self._db.execute(query, [sorted(keys)], binary=True).fetchall() if keys else []
        return {bytes(key) for (key,) in found}

    def discard(self, rows: Sequence[tuple[bytes, int]]) -> None:
        if rows:
            self._db.execute(
                "DELETE FROM known USING unnest(%b::bytea[], %b::int8[]) AS gone (key, seq) "
                "WHERE known.key = gone.key AND known.seq = gone.seq",
                ([key for key, _ in rows], [seq for _, seq in rows]),
            )


@contextmanager
def postgres_errors(name: str) -> Iterator[None]:
    """PostgreSQL's refusals in our words."""
    try:
        yield
    except (errors.LockNotAvailable, errors.QueryCanceled) as error:
        raise StoreBusy(
            "store.another-process-holds",
            f"another process holds the ledger '{name}'",
            "wait until it is done, or stop it, then try again",
        ) from error
    except _LOST_ERRORS as error:
        raise StoreLost(
            "store.server-went-away", f"the server of {name} went away: {first_line(error)}", "start it, then try again"
        ) from error
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            "store.user-not-ledger",
            f"the user may not do that in the ledger '{name}': {first_line(error)}",
            "have its owner grant it: USAGE on the schema, and on its tables SELECT to read, all to write",
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        raise StoreError(
            "store.server-takes-no",
            f"the server of {name} takes no changes: {first_line(error)}",
            "give the address of the one that does",
        ) from error
    except psycopg.IntegrityError as error:
        raise LedgerDamaged(
            "store.ledger-holds-row",
            f"the ledger '{name}' holds a row that should not be there: {first_line(error)}",
            "restore it from a copy",
        ) from error
    except _NO_SPACE_ERRORS as error:
        raise StoreError(
            "store.no-space-left",
            f"no space left for the ledger '{name}'; what was acknowledged is there",
            "free space, then try again",
        ) from error
    except psycopg.OperationalError as error:
        if error.sqlstate is None or error.sqlstate[:2] in ("08", "57"):
            raise StoreLost(
                "store.server-went-away",
                f"the server of {name} went away: {first_line(error)}",
                "start it, then try again",
            ) from error
        raise StoreError(
            "store.ledger-not-used",
            f"the ledger '{name}' cannot be used: {first_line(error)}",
            "repair what it reports",
        ) from error
    except psycopg.Error as error:
        raise StoreError(
            "store.ledger-not-used",
            f"the ledger '{name}' cannot be used: {first_line(error)}",
            "repair what it reports",
        ) from error


# A ledger in PostgreSQL: for several trainers, processes and machines.
#
# The one row of `head` is the sequencer: whoever writes locks it first, so writers take turns and each sees what the
# one before committed. Rows go in by COPY. The session insists on synchronous_commit; a server without fsync is
# refused, since it would acknowledge what a power cut takes back.
#
# When the connection is lost in the middle of a commit nobody can know whether it took place. That is `StoreLost`; the
# ledger connects again and looks for the batch by its token.

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_POSTGRES_TYPES = {"number": "BIGINT", "bytes": "BYTEA", "sorted": ""}
_MAX_LISTED_SCHEMAS = 5  # schemas with a ledger that are told
_SELECT_LEDGER_SCHEMAS = (
    "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND c.relname IN ('leaf', 'head', 'tile', 'checkpoint') "
    "GROUP BY n.nspname HAVING count(*) = 4 ORDER BY n.nspname"
)
_IDLE_SECONDS = 300  # seconds after which a writer that stopped in the middle loses its turn


class PostgresStore:
    """`where` is "postgresql://host/database", and "#schema" behind it for one of several ledgers."""

    remote = True

    def __init__(self, where: str, *, create: bool = False, readonly: bool = False, patience: float = 30.0) -> None:
        self._address = PostgresAddress.parse(where)
        self._schema = self._address.schema or DEFAULT_SCHEMA
        if not _SCHEMA_NAME.fullmatch(self._schema):
            raise LedgerError(
                "store.schema-behind-address",
                "the schema behind the # of the address is no plain name",
                "use small letters, digits and underscores; options come before the #",
            )
        self.name = f"{self._address.shown}#{self._schema}"
        self._answered_before = False  # whether it ever answered
        self._patience, self._pid, self._readonly = patience, os.getpid(), readonly
        self._locks = {"read": threading.RLock(), "write": threading.RLock()}
        self._open: dict[str, psycopg.Connection] = {}
        try:
            with postgres_errors(self.name):
                self._prepare(create)
        except BaseException:
            self.close()
            raise

    # ----------------------------------------------------------------------------------- transactions

    @contextmanager
    def read(self) -> Iterator[SqlRows]:
        self._refresh()
        with self._transaction("read") as db:
            yield SqlRows(db)

    @contextmanager
    def write(self) -> Iterator[SqlRows]:
        if self._readonly:
            raise LedgerError(
                "store.ledger-opened-reading", f"the ledger '{self.name}' was opened for reading", "open it for writing"
            )
        with self._transaction("write") as db:
            if not db.rows("SELECT id FROM head FOR UPDATE"):
                db.rows("LOCK TABLE head IN EXCLUSIVE MODE")  # still empty: who comes second finds the first's header
            yield SqlRows(db)

    @contextmanager
    def _transaction(self, purpose: str) -> Iterator[PostgresConnection]:
        if self._pid != os.getpid():
            raise LedgerError(
                "store.ledger-opened-before",
                f"the ledger '{self.name}' was opened before a fork",
                "open it in the process that uses it",
            )
        with self._locks[purpose], postgres_errors(self.name):
            db = self._connection(purpose)
            if db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE and purpose == "read":
                yield PostgresConnection(db)  # a view inside a view is the same view
                return
            try:
                yield PostgresConnection(db)
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
        with self._locks["write"], postgres_errors(self.name):
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
        plain = PostgresConnection(db)
        try:
            plain.rows("SELECT pg_advisory_xact_lock(hashtext(?))", f"lamina {self._schema}")
            if create:
                db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
            made = plain.rows("SELECT to_regclass('meta') IS NOT NULL")[0][0]
            if not made and not create:
                raise self._nothing(plain)
            version = int(plain.rows("SELECT value FROM meta WHERE name = 'tables'")[0][0]) if made else 0
            if self._readonly and version < TABLES_VERSION:
                raise LedgerError(
                    "store.tables-version-brought",
                    f"{self.name} has tables of version {version}, to be brought up to {TABLES_VERSION}",
                    "open it for writing once",
                )
            current = migrate(plain, version, _POSTGRES_TYPES)
            if current != version:
                # Hashes do not compress: do not try.
                plain.rows("ALTER TABLE tile ALTER COLUMN data SET STORAGE EXTERNAL")
                SqlRows(plain).put_meta("tables", str(current).encode())
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
            found = connection_error(error, address)
            if isinstance(found, StoreLost) and self._answered_before:
                found = StoreLost(
                    "store.server-went-away-start",
                    f"the server of {self.name} went away: {found.problem}",
                    "start it, then try again",
                )
            raise found from None
        try:
            self._require_durability(db, purpose)
        except BaseException:
            db.close()
            raise
        self._open[purpose], self._answered_before = db, True
        return db

    def _nothing(self, db: PostgresConnection) -> LedgerError:
        """Why there is no ledger under this name, and where there are some."""
        schema = self._schema
        found = db.rows("SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = ?", schema)
        if found and not found[0][0]:
            return StoreError(
                "store.user-not-look",
                f"the user may not look into schema {schema!r} of {self.name}",
                f"have it granted: GRANT USAGE ON SCHEMA {schema}, and SELECT on its tables",
            )
        others = [f"#{name}" for (name,) in db.rows(_SELECT_LEDGER_SCHEMAS)]
        has = "has none" if found else "is not there"
        return LedgerError(
            "store.no-ledger-schema",
            f"there is no ledger in {self.name}: schema {schema!r} {has}",
            f"name one that has, after the #: {', '.join(others[:_MAX_LISTED_SCHEMAS])}{', …' * (len(others) > _MAX_LISTED_SCHEMAS)}"
            if others
            else "give the database of one, or let a run make it: no schema of this one has a ledger",
        )

    def _require_durability(self, db: psycopg.Connection, purpose: str) -> None:
        """Durable, or not at all; and nobody waits for ever."""
        plain = PostgresConnection(db)
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
        plain.rows("SELECT set_config('idle_in_transaction_session_timeout', ?, false)", f"{_IDLE_SECONDS}s")
        db.autocommit = False
        if purpose == "read":
            db.isolation_level, db.read_only = psycopg.IsolationLevel.REPEATABLE_READ, True
