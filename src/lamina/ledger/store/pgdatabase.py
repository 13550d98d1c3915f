"""PostgreSQL's side of `Rows`: statements, COPY, and its refusals in our words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors

from lamina.ledger.store.errors import Damaged, StoreBusy, StoreError, StoreLost
from lamina.ledger.store.refusal import told

_TYPES = {
    "leaf": ("int8", "int4", "bytea"),
    "evidence": ("int8", "bytea"),
    "known": ("bytea", "int8"),
    "attempt": ("bytea", "int8", "int8", "int8"),
    "withdrawn": ("int8", "int8"),
    "token": ("bytea",),
}
_FULL = (errors.DiskFull, errors.OutOfMemory, errors.InsufficientResources)
_AGAIN = (
    psycopg.InterfaceError,
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.TooManyConnections,
    errors.IdleInTransactionSessionTimeout,
)


class PgDatabase:
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
            copy.set_types(_TYPES[table])
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
def pg_errors(name: str) -> Iterator[None]:
    """PostgreSQL's refusals in our words."""
    try:
        yield
    except (errors.LockNotAvailable, errors.QueryCanceled) as error:
        raise StoreBusy(
            "store.another-process-holds",
            f"another process holds the ledger '{name}'",
            "wait until it is done, or stop it, then try again",
        ) from error
    except _AGAIN as error:
        raise StoreLost(
            "store.server-went-away",
            f"the server of {name} went away: {told(error)}",
            "start it, then try again",
        ) from error
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            "store.user-not-ledger",
            f"the user may not do that in the ledger '{name}': {told(error)}",
            "have its owner grant it: USAGE on the schema, and on its tables SELECT to read, all to write",
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        raise StoreError(
            "store.server-takes-no",
            f"the server of {name} takes no changes: {told(error)}",
            "give the address of the one that does",
        ) from error
    except psycopg.IntegrityError as error:
        raise Damaged(
            "store.ledger-holds-row",
            f"the ledger '{name}' holds a row that should not be there: {told(error)}",
            "restore it from a copy",
        ) from error
    except _FULL as error:
        raise StoreError(
            "store.no-space-left",
            f"no space left for the ledger '{name}'; what was acknowledged is there",
            "free space, then try again",
        ) from error
    except psycopg.OperationalError as error:
        if error.sqlstate is None or error.sqlstate[:2] in ("08", "57"):
            raise StoreLost(
                "store.server-went-away",
                f"the server of {name} went away: {told(error)}",
                "start it, then try again",
            ) from error
        raise StoreError(
            "store.ledger-not-used",
            f"the ledger '{name}' cannot be used: {told(error)}",
            "repair what it reports",
        ) from error
    except psycopg.Error as error:
        raise StoreError(
            "store.ledger-not-used",
            f"the ledger '{name}' cannot be used: {told(error)}",
            "repair what it reports",
        ) from error
