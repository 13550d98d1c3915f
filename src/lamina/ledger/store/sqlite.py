"""A ledger in one SQLite file: the default, for one machine. And which store a path or an address means.

WAL with synchronous = FULL: a commit returns after its frames are on the disk, and readers are never in the way.
`BEGIN IMMEDIATE` is the one writer's lock; the system gives it back when its holder dies, however that happens.

The library is the one inside apsw, not the one of Python's sqlite3: that one is whatever the system has, and SQLite
before 3.51.3 can lose a commit when a WAL is reset while another process checkpoints it. For the same reason the file
must not be opened with another SQLite library in the same process: POSIX locks of a file are per process, and whoever
closes it first gives back the other's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import apsw

from lamina.errors import LedgerDamaged, LedgerError, StoreBusy, StoreError
from lamina.files import NEW, sync_folder
from lamina.ledger.store.rows import (
    ADDED_COLUMNS,
    MAX_BLOB_BYTES,
    TABLES,
    TABLES_VERSION,
    Store,
    StoreReader,
    StoreWriter,
)

MIN_SQLITE_VERSION = (3, 51, 3)  # the first version without the WAL-reset bug
_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x4C6D4C67  # "LmLg", in the header of the file
_SQLITE_TYPES = {"number": "INTEGER", "bytes": "BLOB", "sorted": "WITHOUT ROWID"}
_OPEN_FLAGS = apsw.SQLITE_OPEN_NOFOLLOW | apsw.SQLITE_OPEN_URI
_CACHE_SIZE = -32 * 1024  # KiB of pages in memory
_WAL_CHECKPOINT_PAGES = 4096  # pages of WAL after which it is copied into the file: 16 MB


def is_ledger_file(path: Path) -> bool:
    """Return whether a file states in its header that it is a SQLite database with a ledger, damaged or not."""
    try:
        header = _file_header(path)
    except OSError:
        return False
    return header is None or (header.startswith(_MAGIC) and header[68:72] == APPLICATION_ID.to_bytes(4, "big"))


def _file_header(path: Path) -> bytes | None:
    """Return the first 100 bytes of a file, none of a pipe or device; None if this process has the file open by SQLite.

    POSIX drops all locks of a process on a file when the process closes any descriptor of it. Another process would then
    take itself for the only one, and remove the WAL and the shared memory under this process. So the files beside a
    database are not opened either.
    """
    if not path.is_file() or path.name.endswith(("-wal", "-shm", "-journal")):  # a pipe would be waited for
        return b""
    here = path.stat()
    for db in apsw.connections():
        with suppress(OSError, apsw.Error):
            if os.path.samestat(os.stat(db.filename), here):
                return None
    with path.open("rb") as file:
        return file.read(100)


class SqliteStore(Store):
    """`create` makes a new file, mode 0600, unless there is one; without it there must be one.

    `readonly` changes nothing, not even the version of the tables; it also opens a copy on a medium that cannot be
    written.
    """

    remote = False

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = False, readonly: bool = False,
        patience: float = 30.0, vfs: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(readonly, patience)
        if tuple(map(int, apsw.sqlite_lib_version().split("."))) < MIN_SQLITE_VERSION:
            problem = f"SQLite {apsw.sqlite_lib_version()} can lose committed rows; {'.'.join(map(str, MIN_SQLITE_VERSION))} cannot"
            raise StoreError("store.sqlite-too-old", problem, "install a newer apsw")
        self._given = os.path.abspath(path)
        self.path = Path(os.path.realpath(path))  # runs have links to it; beside it lie its WAL and its key
        self.name = self.where = str(self.path)
        self._vfs, self._immutable = vfs, False
        self._wal: int | None = None  # inode of the WAL after the first transaction, 0 without one
        if create:
            self._make_file()
        elif not self.path.is_file():
            raise self._no_ledger()
        self._stamp = self._file_stamp()
        with _sqlite_errors(self.name):
            if readonly:
                self._finish_rollback()
            self._prepare(create)
        self._refuse_other_file()

    # ----------------------------------------------------------------------------------- transactions

    @contextmanager
    def read(self) -> Iterator[StoreReader]:
        with self._transaction("read", "BEGIN") as rows:
            yield rows

    @contextmanager
    def write(self) -> Iterator[StoreWriter]:
        with self._transaction("write", "BEGIN IMMEDIATE") as rows:
            yield rows

    @contextmanager
    def _transaction(self, purpose: str, begin: str) -> Iterator[StoreWriter]:
        self._check_usable(purpose)
        with self.turn, _sqlite_errors(self.name):
            db = self._connection(purpose)
            rows = StoreWriter(_SqliteConnection(db))
            if db.in_transaction and purpose == "read":  # a view inside a view is the same view
                yield rows
                return
            self._refuse_other_file()
            db.execute(begin)
            try:
                yield rows
                db.execute("COMMIT")
                self._wal = self._wal_inode() if self._wal is None else self._wal
            except BaseException:
                self._undo(purpose, db)
                raise
            if purpose == "write":  # otherwise the rows were written into a file that no process opens again
                self._refuse_other_file()

    def _undo(self, purpose: str, db: apsw.Connection) -> None:
        """Back to what is committed. A connection that cannot even do that is not used again."""
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except apsw.Error:
            self._open.pop(purpose).close(True)

    # ----------------------------------------------------------------------------------- the file

    def another(self) -> SqliteStore:
        return SqliteStore(self._given, readonly=True, patience=self._patience, vfs=self._vfs)

    def replaced(self) -> bool:
        """Return whether the path leads to another file or WAL, or the file was changed outside of this connection.

        The cache of SQLite may miss such a change. A copy of the WAL into the file, by SQLite itself, also counts as a
        change, which costs a reader a new connection.
        """
        return self._wal not in (None, self._wal_inode()) or self._file_stamp() != self._stamp

    def _wal_inode(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_ino
        except OSError:
            return 0

    def _file_stamp(self) -> tuple[int, ...]:
        """Return device, inode, size and change time of the file at the given path; empty if there is none."""
        try:
            found = os.stat(self._given)
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _refuse_other_file(self) -> None:
        """Raise StoreError if the path leads to another file than the open one."""
        if self._file_stamp()[:2] != self._stamp[:2]:
            problem = f"the file of the ledger '{self.name}' was moved, deleted or replaced while it was open"
            remedy = "put the ledger back in its place, or restart with the file that is there now"
            raise StoreError("store.file-replaced", problem, remedy)

    def compact(self) -> None:
        with self.turn, _sqlite_errors(self.name):
            db = self._connection("write")
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def copy(self, path: str | os.PathLike[str]) -> None:
        """One moment of it as one new file, whoever writes meanwhile: what is still in the WAL is in the copy."""
        target = Path(os.path.abspath(path))
        if os.path.lexists(target):
            problem = f"'{target}' exists and is not overwritten"
            raise LedgerError("store.file-exists", problem, "give another path, or move it away")
        with self.turn, _sqlite_errors(self.name):
            self._connection("read").execute("VACUUM INTO ?", (str(target),))

    def _close(self, db: apsw.Connection) -> None:
        db.close(True)

    def _finish_rollback(self) -> None:
        """Undo what a process left half written that was killed before the file had a WAL: a reader cannot."""
        if os.path.exists(f"{self.path}-journal") and os.access(self.path, os.W_OK):
            db = apsw.Connection(self._address(), flags=apsw.SQLITE_OPEN_READWRITE | _OPEN_FLAGS, vfs=self._vfs)
            try:
                db.set_busy_timeout(int(self._patience * 1000))  # it may be at work still
                db.pragma("user_version")
            finally:
                db.close(True)

    def _make_file(self) -> None:
        try:
            os.close(os.open(self.path, NEW, 0o600))
            sync_folder(self.path.parent)
        except FileExistsError:
            pass  # perhaps one that a killed process left empty; whether it is, is seen inside a transaction
        except OSError as error:
            problem = f"cannot create the ledger '{self.path}': {error.strerror}"
            raise StoreError("store.cannot-create", problem, "give a folder that can be written") from None

    def _no_ledger(self) -> LedgerError:
        return LedgerError("store.no-ledger", f"there is no ledger '{self.path}'", "give the path of one, or create it")

    def _foreign(self) -> bool:
        """Whether it is something else than a ledger: looked at before anything is changed in it, or a pipe waited for."""
        if not self.path.is_file():
            return True
        first = _file_header(self.path)
        if first is None or len(first) < 100 or not first.startswith(_MAGIC):
            return False
        tables, application = int.from_bytes(first[40:44], "big"), int.from_bytes(first[68:72], "big")
        return application != APPLICATION_ID and bool(tables or application)

    def _prepare(self, create: bool) -> None:
        if self._vfs is None and self._foreign():
            raise LedgerError("store.not-a-ledger", f"'{self.path}' is not a ledger", "give the path of one")
        purpose = "read" if self._readonly else "write"
        db = self._connection(purpose)
        db.execute("BEGIN IMMEDIATE" if create else "BEGIN")
        try:
            application, version = db.pragma("application_id"), db.pragma("user_version")
            if (application, version) == (0, 0) and not db.execute("SELECT 1 FROM sqlite_schema").fetchall():
                if not create:  # what a killed process left of making one
                    raise self._no_ledger()
                db.pragma("application_id", APPLICATION_ID)
            elif application != APPLICATION_ID:
                raise LedgerError("store.not-a-ledger", f"'{self.path}' is not a ledger", "give the path of one")
            if self._make_tables(_SqliteConnection(db), version, _SQLITE_TYPES):
                db.pragma("user_version", TABLES_VERSION)
            self._refuse_other_tables(_catalogue(db), _expected_catalogue())
            db.execute("COMMIT")
        except BaseException:
            self._undo(purpose, db)
            raise

    def _connection(self, purpose: str) -> apsw.Connection:
        if (there := self._open.get(purpose)) is not None:
            return cast(apsw.Connection, there)
        flags = apsw.SQLITE_OPEN_READONLY if self._readonly else apsw.SQLITE_OPEN_READWRITE
        db = apsw.Connection(self._address(), flags=flags | _OPEN_FLAGS, vfs=self._vfs)
        try:
            db.set_busy_timeout(int(self._patience * 1000))
            db.limit(apsw.SQLITE_LIMIT_LENGTH, 2 * MAX_BLOB_BYTES)
            if not self._readonly and db.pragma("journal_mode", "wal") != "wal":
                problem = f"the file system of '{self.path}' has no shared memory for SQLite's WAL"
                raise StoreError("store.no-shared-memory", problem, "use a local disk, or PostgreSQL")
            for name, value in (
                ("synchronous", "FULL"),
                ("wal_autocheckpoint", _WAL_CHECKPOINT_PAGES),
                ("cache_size", _CACHE_SIZE),
                ("secure_delete", "ON"),  # what is pruned is overwritten
                ("trusted_schema", "OFF"),
                ("cell_size_check", "ON"),
            ):
                db.pragma(name, value)
            if db.pragma("synchronous") != 2:
                problem = f"SQLite refuses synchronous = FULL for '{self.path}'"
                raise StoreError("store.not-durable", problem, "install another apsw")
        except BaseException:
            db.close(True)
            raise
        self._open[purpose] = db
        return db

    def _address(self) -> str:
        """The file; as one that nobody can change, where there is no room for the files that readers share."""
        alone = not os.access(self.path.parent, os.W_OK) and not Path(f"{self.path}-wal").exists()
        self._immutable = self._readonly and alone
        return f"file:{quote(os.fsencode(self.path))}{'?immutable=1' if self._immutable else ''}"


class _SqliteConnection:
    """SQLite's side of `Rows`."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except UnicodeDecodeError as error:  # SQLite accepts text of any bytes in any column
            problem = f"a row of the store holds a text that is not UTF-8: {error}"
            raise LedgerDamaged("store.row-wrong-type", problem, "restore the ledger from a copy") from None

    def insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        columns = ADDED_COLUMNS[table]
        marks = ", ".join("?" * len(columns))
        self._db.executemany(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", rows)

    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        self._db.executemany(statement, rows)

    def find(self, table: str, columns: str, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        query = f"SELECT {columns} FROM {table} WHERE key IN carray(?)"
        return self._db.execute(query, (apsw.carray(tuple(sorted(keys))),)).fetchall()


def _catalogue(db: apsw.Connection) -> list[tuple[Any, ...]]:
    """Tables, indexes, views and triggers, each with the statement that made it."""
    return db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()


@lru_cache(maxsize=1)
def _expected_catalogue() -> list[tuple[Any, ...]]:
    db = apsw.Connection(":memory:")
    for statement in TABLES:
        db.execute(statement.format(**_SQLITE_TYPES).strip())
    return _catalogue(db)


@contextmanager
def _sqlite_errors(name: str) -> Iterator[None]:
    """SQLite's refusals in our words."""
    try:
        yield
    except (apsw.BusyError, apsw.LockedError):
        problem = f"another process holds the ledger '{name}'"
        raise StoreBusy("store.busy", problem, "wait until it is done, or stop it, then try again") from None
    except (apsw.CorruptError, apsw.NotADBError) as error:
        problem = f"the ledger '{name}' is damaged: {error}"
        raise LedgerDamaged("store.damaged", problem, "restore it from a copy") from None
    except apsw.TooBigError:
        problem = f"the ledger '{name}' holds more bytes in one place than a ledger can"
        raise LedgerDamaged("store.row-too-long", problem, "restore it from a copy") from None
    except apsw.FullError:
        problem = f"no space left for the ledger '{name}'; what was acknowledged is there"
        raise StoreError("store.disk-full", problem, "free space, then try again") from None
    except (apsw.ReadOnlyError, apsw.PermissionsError, apsw.AuthError) as error:
        problem = f"cannot write the ledger '{name}': {error}"
        raise StoreError("store.not-writable", problem, "make it writable for this user") from None
    except apsw.ConstraintError as error:
        problem = f"the ledger '{name}' holds a row that should not be there: {error}"
        raise LedgerDamaged("store.row-unexpected", problem, "restore it from a copy") from None
    except apsw.Error as error:
        problem = f"cannot read or write the ledger '{name}': {error}; what was acknowledged is there"
        raise StoreError("store.unusable", problem, "fix what the system reports, then try again") from None


# Which store: a path means a file of SQLite, an address PostgreSQL.

_SHOWN_OPTIONS = {"host", "hostaddr", "port", "dbname", "user", "sslmode", "target_session_attrs", "connect_timeout"}
DEFAULT_SCHEMA = "lamina"  # of a PostgreSQL address without one
_ADDRESS_REMEDY = "write postgresql://USER@HOST/DATABASE#schema; in a password, / is %2F, @ is %40, # is %23, ? is %3F"
_LOOKS_LIKE_URL = re.compile(
    r"\s*postgres\w*(\+\w+)?\s*:|\s*[a-z][a-z0-9+.-]*://|.*\bpassword\s*=", re.IGNORECASE | re.DOTALL
)
_HOST = r"(?:\[[^\]]*\]|[^:@/?#,\[]*)(?::[0-9]*)?"
_OPTION = r"(?:user=[^&#]*|[^&#@]*)"  # some servers have an @ in the names of users
_ADDRESS = re.compile(
    rf"(postgres(?:ql)?://)(?:([^:@/?#]*)(?::[^@/?#]*)?(@))?({_HOST}(?:,{_HOST})*(?:/[^@?#]*)?)"
    rf"(?:\?({_OPTION}(?:&{_OPTION})*))?(?:#(\w*))?",
    re.ASCII,
)


def is_postgres_url(where: str) -> bool:
    """Whether it is a database server's, and no path. LedgerError if it was meant to be, and is not.

    >>> is_postgres_url("postgresql://me@host/db"), is_postgres_url("runs/ward.ledger.db")
    (True, False)
    """
    if where.startswith(("postgresql://", "postgres://")):
        return True
    if _LOOKS_LIKE_URL.match(where):  # not repeated: it may hold a password
        problem = "the ledger is neither a path nor a PostgreSQL address"
        raise LedgerError("store.address-invalid", problem, _ADDRESS_REMEDY)
    return False


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """conninfo: what libpq takes, with the password. schema: '' if none is named. shown: for messages, without both."""

    conninfo: str
    schema: str
    shown: str

    @classmethod
    def parse(cls, where: str) -> PostgresAddress:
        """Of "postgresql://user:password@host/database?option=value#schema".

        LedgerError if a character of the password could be taken for the end of it: libpq would look for a host that is
        named like the rest, and say so. Only what is known to be no secret is shown.
        """
        if (found := _ADDRESS.fullmatch(where)) is None:
            problem = f"the address {where.partition(':')[0]}://… has an @, a / or a : too many"
            problem += ", or a schema of other signs"
            raise LedgerError("store.address-invalid", problem, _ADDRESS_REMEDY)
        scheme, user, at, place, query, schema = found.groups(default="")
        kept = "&".join(each for each in query.split("&") if each.partition("=")[0] in _SHOWN_OPTIONS)
        return cls(where.partition("#")[0], schema, f"{scheme}{user}{at}{place}{'?' * bool(kept)}{kept}")


def printable_location(where: str) -> str:
    """Where a ledger is, without a password.

    >>> printable_location("postgresql://me:secret@host/db#ward"), printable_location("postgresql:///db?host=/run&password=secret")
    ('postgresql://me@host/db#ward', 'postgresql:///db?host=/run')
    """
    if not is_postgres_url(where):
        return where
    try:
        found = PostgresAddress.parse(where)
    except LedgerError:
        return f"{where.partition(':')[0]}://…"
    return f"{found.shown}{'#' * bool(found.schema)}{found.schema}"


def make_store(where: str | os.PathLike[str], *, create: bool = False, readonly: bool = False) -> Store:
    """The store at a path, or at "postgresql://…/database" with "#schema" for one of several ledgers in it."""
    if isinstance(where, str) and is_postgres_url(where):
        try:
            from lamina.ledger.store.postgres import PostgresStore  # an extra: only who uses it needs psycopg
        except ImportError:
            problem = "PostgreSQL needs psycopg, which is not installed"
            raise StoreError("store.psycopg-missing", problem, "pip install 'lamina[postgres]'") from None
        return PostgresStore(where, create=create, readonly=readonly)
    return SqliteStore(where, create=create, readonly=readonly)


def ledger_exists(where: str) -> bool:
    """Whether there is a ledger, and not only what a killed process left of making one. Changes nothing."""
    if not is_postgres_url(where):
        where = os.path.realpath(where)
        if not os.path.exists(where):
            return False
        if not os.path.isfile(where):
            remedy = "give the path of a ledger, or of one to be created"
            raise LedgerError("ledger.not-a-file", f"'{where}' is not a file", remedy)
        if not os.path.getsize(where):
            return False
    try:
        store = make_store(where, readonly=True)
    except LedgerError as error:
        if error.code == "store.no-ledger":
            return False
        raise
    try:
        with store.read() as rows:
            return rows.head() is not None
    finally:
        store.close()
