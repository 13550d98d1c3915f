"""`BookFile`: the SQLite file of a spend book, and what is said when a disk does not do what it must."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from lamina.errors import RunError, StorageError
from lamina.train.store.durable import make_folder, storage_error, sync_folder

VERSION = 1
_MARK = 0x4C414D42  # "LAMB", SQLite's application_id: another program's database is not taken for a book
_PATIENCE = 60.0  # seconds to wait for another process; pricing takes a few at worst

# A charge is a row that is never changed or deleted; `seal` is a checksum of an attempt and its charges. `account`
# keeps the terms of the last admission: the ε of all that is charged or reserved there is at most `bound` (null:
# unbounded) at `delta` by `accountant`.
SCHEMA = """
CREATE TABLE run (
    run TEXT PRIMARY KEY CHECK (run <> ''),
    label TEXT NOT NULL,
    day TEXT NOT NULL,
    finished INTEGER NOT NULL CHECK (finished IN (0, 1))
) STRICT, WITHOUT ROWID;
CREATE TABLE account (
    id INTEGER PRIMARY KEY,
    origin TEXT NOT NULL,
    cls TEXT NOT NULL,
    bound REAL CHECK (bound >= 0),
    delta REAL NOT NULL CHECK (delta >= 0 AND delta < 1),
    accountant TEXT NOT NULL,
    UNIQUE (origin, cls)
) STRICT;
CREATE TABLE attempt (
    run TEXT NOT NULL REFERENCES run,
    segment INTEGER NOT NULL CHECK (segment >= 0),
    generation INTEGER NOT NULL CHECK (generation >= 0),
    nonce BLOB NOT NULL CHECK (length(nonce) > 0),
    seal BLOB NOT NULL CHECK (length(seal) = 16),
    PRIMARY KEY (run, segment, generation)
) STRICT, WITHOUT ROWID;
CREATE TABLE charged (
    run TEXT NOT NULL,
    segment INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    account INTEGER NOT NULL REFERENCES account,
    sigma REAL NOT NULL CHECK (sigma > 0 AND sigma < 9e999),
    q REAL NOT NULL CHECK (q >= 0 AND q <= 1),
    steps INTEGER NOT NULL CHECK (steps BETWEEN 0 AND 1099511627776),
    delta REAL NOT NULL CHECK (delta >= 0 AND delta < 1),
    accountant TEXT NOT NULL,
    FOREIGN KEY (run, segment, generation) REFERENCES attempt
) STRICT;
CREATE INDEX charged_events ON charged (account, sigma, q, steps); -- all that a price needs
CREATE INDEX charged_run ON charged (run, segment, generation);
CREATE TRIGGER attempt_stays BEFORE DELETE ON attempt BEGIN SELECT RAISE(ABORT, 'charged means spent'); END;
CREATE TRIGGER attempt_is_fixed BEFORE UPDATE ON attempt BEGIN SELECT RAISE(ABORT, 'charged means spent'); END;
CREATE TRIGGER charged_stays BEFORE DELETE ON charged BEGIN SELECT RAISE(ABORT, 'charged means spent'); END;
CREATE TRIGGER charged_is_fixed BEFORE UPDATE ON charged BEGIN SELECT RAISE(ABORT, 'charged means spent'); END;
CREATE TABLE reserved (
    run TEXT NOT NULL REFERENCES run,
    account INTEGER NOT NULL REFERENCES account,
    sigma REAL NOT NULL CHECK (sigma > 0 AND sigma < 9e999),
    q REAL NOT NULL CHECK (q >= 0 AND q <= 1),
    steps INTEGER NOT NULL CHECK (steps >= 0),
    PRIMARY KEY (run, account, sigma, q)
) STRICT, WITHOUT ROWID;
CREATE INDEX reserved_account ON reserved (account);
"""


class BookFile:
    """One SQLite file, mode 0600, in which a transaction is there as a whole, on the disk, or not at all.

    Rollback journal with synchronous = EXTRA: when a write returns, it survives a power cut. Every write takes
    the lock before it reads, so two processes never decide on the same state. A connection lives for one
    transaction: nothing is shared by threads or inherited by forked workers, and a file that vanishes under a
    run is noticed, never begun afresh.

    A new book is made under another name and linked into its place, so a book is never seen half made and
    an empty file is a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool) -> None:
        self.path = Path(path).absolute()  # the working folder may change during a run
        if create and not os.path.lexists(self.path):
            self._create()
        with self._connection() as db:
            self._check(db)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """One consistent view. Writers wait for it: read, leave, then compute."""
        with self._connection() as db:
            db.execute("BEGIN")
            yield db
            db.execute("COMMIT")

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and synced on leaving, undone if anything is raised inside."""
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            # The file is never opened by other means: closing such a handle would drop SQLite's locks on it.
            if self.path.is_dir():
                raise StorageError(*self._words("is a folder", "give the path of a file, e.g. runs/spend.db"))
            if self.path.stat().st_size == 0:
                raise StorageError(*self._words("is empty, though a spend book never is", _RESTORE))
            with contextlib.closing(_connect(self.path)) as db:
                self._identify(db)
                try:
                    yield db
                finally:
                    if db.in_transaction:
                        with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
                            db.execute("ROLLBACK")
        except UnicodeDecodeError as error:  # a damaged text, even one of the schema
            raise self.damaged() from error
        except UnicodeEncodeError as error:
            raise RunError(
                f"{error.object!r} is a name that no encoding can write", "use Unicode text"
            ) from error
        except (sqlite3.Error, OSError) as error:
            raise self._explain(error) from error

    def _identify(self, db: sqlite3.Connection) -> None:
        mark, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _IDENTITY)
        if mark != _MARK:
            raise StorageError(*self._words("is a database, but not a spend book", _OTHER))
        if version != VERSION:
            raise StorageError(
                *self._words(
                    f"has format {version}, this Lamina reads format {VERSION}",
                    "use the Lamina that wrote it, or a newer one: its charges must not be forgotten",
                )
            )

    def _check(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN")  # first of all this rolls back what a killed process left half written
        found = [row[0] for row in db.execute("PRAGMA integrity_check(1)")]
        pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        strays = db.execute("PRAGMA foreign_key_check").fetchone()
        if found != ["ok"] or strays is not None or self.path.stat().st_size < pages * size:
            raise self.damaged()
        db.execute("COMMIT")

    def _create(self) -> None:
        make_folder(self.path.parent)
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.lamina-tmp")
        try:
            _touch(draft)
            try:
                with contextlib.closing(_connect(draft)) as db:
                    db.executescript(
                        f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {_MARK};"
                        f"PRAGMA user_version = {VERSION}; COMMIT;"
                    )
                with contextlib.suppress(FileExistsError):  # another process was first: its book is the book
                    _give_name(draft, self.path)
            finally:
                draft.unlink(missing_ok=True)
        except (sqlite3.Error, OSError) as error:
            raise self._explain(error) from error
        sync_folder(self.path.parent)

    def damaged(self) -> StorageError:
        return StorageError(*self._words("is damaged", _RESTORE))

    def _words(self, problem: str, remedy: str) -> tuple[str, str]:
        return f"spend book '{self.path}' {problem}", remedy

    def _explain(self, error: Exception) -> StorageError:
        """What SQLite or the system said, in words that name the file and the way out."""
        if isinstance(error, FileNotFoundError):
            return StorageError(*self._words("is not there", _GONE))
        if isinstance(error, OSError):
            return storage_error(error, f"spend book '{self.path}' cannot be used", "nothing was booked")
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        problem, remedy = _SQLITE.get(code, ("cannot be used", _RESTORE))
        return StorageError(*self._words(f"{problem} ({error})", remedy))


_IDENTITY = ("application_id", "user_version")
_RESTORE = (
    "restore it from a copy, and book what was trained since; to begin a new one is to forget what was spent, "
    "which is for whoever answers for the corpus to decide"
)
_OTHER = "give the path of a spend book, or of a file that does not exist yet"
_GONE = "restore it or give the right path; a book is begun by the first training run"
_SQLITE = {
    sqlite3.SQLITE_BUSY: (
        f"was held by another process for more than {_PATIENCE:.0f} s; nothing was booked",
        "try again; look for a process that is stopped or a program that has the file open",
    ),
    sqlite3.SQLITE_FULL: ("has no room on its disk; nothing was booked", "free some space and resume"),
    sqlite3.SQLITE_READONLY: (
        "cannot be written; nothing was booked",
        "make the file and its folder writable, or put the book elsewhere",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        "cannot be opened; nothing was booked",
        "make the file and its folder readable and writable, or put the book elsewhere",
    ),
    sqlite3.SQLITE_IOERR: (
        "met a failing, full or vanished disk",
        "mend the disk and resume: a booking that did arrive is not made twice",
    ),
    sqlite3.SQLITE_NOTADB: ("is not a spend book", _OTHER),
    sqlite3.SQLITE_CORRUPT: ("is damaged", _RESTORE),
}


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_PATIENCE, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA trusted_schema = OFF")
    except BaseException:
        db.close()
        raise
    return db


def _touch(path: Path) -> None:
    """A new, empty file of mode 0600, which SQLite gives to its journal too."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _give_name(draft: Path, path: Path) -> None:
    """Rename, unless the name is taken: FileExistsError."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: claim the name first, at the risk of an empty file
        _touch(path)
        os.replace(draft, path)
