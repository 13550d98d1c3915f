"""A ledger in PostgreSQL: for several trainers, processes and machines."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from lamina.errors import LedgerDamaged, LedgerError, StoreBusy, StoreError, StoreLost
from lamina.ledger.store.rows import ADDED_COLUMNS, TABLES, TABLES_VERSION, Store, StoreReader, StoreWriter
from lamina.ledger.store.sqlite import DEFAULT_SCHEMA, PostgresAddress
from lamina.sign.keys import CLOCK_SKEW

_PASSWORD_REMEDY = "give the right one in ~/.pgpass or PGPASSWORD, or in the address, where / is %2F and @ is %40"
_NOT_READY = re.compile("starting up|shutting down|recovery mode|not yet accepting|too many clients|connection slots")
_UNREACHABLE = re.compile(
    "connection refused|no such file|timeout|timed out|unreachable|no route|closed the connection"
)


def connection_error(error: psycopg.Error, address: PostgresAddress) -> LedgerError:
    """Of an attempt to connect. libpq gives a text and no code, so the text decides.

    `StoreLost`, which is tried again, is whatever may be over in a moment.
    """
    if isinstance(error, psycopg.ProgrammingError):  # its text may hold any part of the address
        problem = f"cannot read the address {address.shown.partition('?')[0]}"
        return LedgerError("store.address-invalid", problem, "write postgresql://USER@HOST/DATABASE#schema")
    known = _ConnectionTarget(error, address)
    text = str(error).lower()
    server, user, database = known.server, repr(known.user), repr(known.database)
    if 'database "' in text and "does not exist" in text:
        remedy = f"give another database, or create it: createdb {known.database}"
        return StoreError("store.database-unknown", f"{server} has no database {database}", remedy)
    if 'role "' in text and "does not exist" in text:
        remedy = "give another user, postgresql://USER@…, or create it: createuser"
        return StoreError("store.user-unknown", f"{server} knows no user {user}", remedy)
    if "password authentication failed" in text:
        problem = f"{server} refuses the password of user {user}"
        return StoreError("store.password-wrong", problem, _PASSWORD_REMEDY)
    if "no password supplied" in text:
        problem = f"{server} asks for the password of user {user}, and none is given"
        return StoreError("store.password-missing", problem, _PASSWORD_REMEDY)
    if "pg_hba.conf" in text or "authentication failed" in text or "permission denied for database" in text:
        problem = f"{server} does not let user {user} in to database {database} from here"
        remedy = "give another user, add a line for this one to pg_hba.conf"
        remedy += f", or GRANT CONNECT ON DATABASE {known.database}"
        return StoreError("store.access-refused", problem, remedy)
    if "resolve host" in text or "translate host name" in text:
        return StoreLost("store.host-unknown", f"there is no host {known.host!r}", "correct the host in the address")
    if _NOT_READY.search(text):
        problem = f"{known.server} is not ready: {first_line(error)}"
        return StoreLost("store.server-not-ready", problem, "wait a little, then try again")
    if _UNREACHABLE.search(text):
        problem = f"{known.server} does not answer"
        return StoreLost("store.server-not-answering", problem, "start it, or correct host and port in the address")
    problem = f"{known.server} cannot be used: {first_line(error)}"
    return StoreLost("store.server-unusable", problem, "fix what the server reports, then try again")


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

    def insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        text = f"COPY {table} ({', '.join(ADDED_COLUMNS[table])}) FROM STDIN (FORMAT BINARY)"
        with self._db.cursor() as cursor, cursor.copy(text) as copy:
            copy.set_types(list(ADDED_COLUMNS[table].values()))
            for row in rows:
                copy.write_row(row)

    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(statement.replace("?", "%b"), rows)

    def find(self, table: str, columns: str, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        query = f"SELECT {columns} FROM {table} WHERE key = ANY(%b)"
        return self._db.execute(query, [sorted(keys)], binary=True).fetchall()


@contextmanager
def postgres_errors(name: str) -> Iterator[None]:
    """PostgreSQL's refusals in our words."""
    try:
        yield
    except (errors.LockNotAvailable, errors.QueryCanceled):
        problem = f"another process holds the ledger '{name}'"
        raise StoreBusy("store.busy", problem, "wait until it is done, or stop it, then try again") from None
    except _LOST_ERRORS as error:
        raise _lost(name, first_line(error)) from None
    except errors.InsufficientPrivilege as error:
        problem = f"the user may not do that in the ledger '{name}': {first_line(error)}"
        remedy = "ask its owner for USAGE on the schema, and on its tables SELECT to read, ALL to write"
        raise StoreError("store.access-refused", problem, remedy) from None
    except errors.ReadOnlySqlTransaction as error:
        problem = f"the server of {name} is read-only: {first_line(error)}"
        raise StoreError("store.server-read-only", problem, "give the address of one that can be written") from None
    except psycopg.IntegrityError as error:
        problem = f"the ledger '{name}' holds a row that should not be there: {first_line(error)}"
        raise LedgerDamaged("store.row-unexpected", problem, "restore it from a copy") from None
    except _NO_SPACE_ERRORS:
        problem = f"no space left for the ledger '{name}'; what was acknowledged is there"
        raise StoreError("store.disk-full", problem, "free space, then try again") from None
    except psycopg.Error as error:
        lost = error.sqlstate is None or error.sqlstate[:2] in ("08", "57")
        if isinstance(error, psycopg.OperationalError) and lost:
            raise _lost(name, first_line(error)) from None
        problem = f"cannot use the ledger '{name}': {first_line(error)}"
        raise StoreError("store.unusable", problem, "fix what it reports") from None


def _lost(name: str, reason: str) -> StoreLost:
    problem = f"the connection to {name} was lost: {reason}"
    return StoreLost("store.server-lost", problem, "start the server, then try again")


# The one row of `head` is the sequencer: whoever writes locks it first, so writers take turns and each sees what the
# one before committed. Rows go in by COPY. The session insists on synchronous_commit; a server without fsync is
# refused, since it would acknowledge what a power cut takes back.
#
# When the connection is lost in the middle of a commit nobody can know whether it took place. That is `StoreLost`; the
# ledger connects again and looks for the batch by its token.

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_POSTGRES_TYPES = {"number": "BIGINT", "bytes": "BYTEA", "sorted": ""}
_MAX_LISTED_SCHEMAS = 5  # schemas with a ledger that are told
_TABLE_NAMES = [each.split()[2] for each in TABLES if each.startswith("CREATE TABLE")]
_SELECT_LEDGER_SCHEMAS = (
    "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    f"WHERE c.relkind = 'r' AND c.relname IN ({', '.join(map(repr, _TABLE_NAMES))}) "
    f"GROUP BY n.nspname HAVING count(*) = {len(_TABLE_NAMES)} ORDER BY n.nspname"
)
# Everything in the schema that affects what a row means, or that runs when a row is read or written: relations (and whether
# their rows can be hidden, added or lost), columns, indexes, constraints, triggers, routines and operators.
_SELECT_CATALOGUE = """
WITH own AS (SELECT * FROM pg_class WHERE relnamespace = to_regnamespace(?) AND relkind NOT IN ('i', 't'))
SELECT 'relation', relname::text, '', concat_ws(' ', relkind::text, relpersistence::text,
        CASE WHEN relrowsecurity OR relhasrules THEN 'hides rows' END,
        CASE WHEN EXISTS (SELECT FROM pg_inherits WHERE own.oid IN (inhparent, inhrelid)) THEN 'inherits rows' END) FROM own
UNION ALL SELECT 'column', relname::text, attname::text, concat_ws(' ', format_type(atttypid, atttypmod),
        CASE WHEN attnotnull THEN 'not null' END, nullif(attgenerated::text, ''), nullif(attidentity::text, ''),
        pg_get_expr(adbin, adrelid), CASE WHEN attcollation <> typcollation THEN 'collated' END)
    FROM own JOIN pg_attribute ON attrelid = own.oid AND attnum > 0 AND NOT attisdropped
    JOIN pg_type ON pg_type.oid = atttypid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
UNION ALL SELECT 'index', own.relname::text, index.relname::text, concat_ws(' ', CASE WHEN indisunique THEN 'unique' END,
        CASE WHEN NOT (indisvalid AND indisready AND indimmediate) THEN 'unfinished' END,
        split_part(pg_get_indexdef(indexrelid), ' USING ', 2))
    FROM own JOIN pg_index ON indrelid = own.oid JOIN pg_class AS index ON index.oid = indexrelid
UNION ALL SELECT 'constraint', relname::text, conname::text, pg_get_constraintdef(pg_constraint.oid)
    FROM own JOIN pg_constraint ON own.oid IN (conrelid, confrelid) WHERE contype NOT IN ('p', 'n')
UNION ALL SELECT 'trigger', relname::text, tgname::text, ''
    FROM own JOIN pg_trigger ON tgrelid = own.oid WHERE NOT tgisinternal
UNION ALL SELECT 'routine', proname::text, '', '' FROM pg_proc WHERE pronamespace = to_regnamespace(?)
UNION ALL SELECT 'operator', oprname::text, '', '' FROM pg_operator WHERE oprnamespace = to_regnamespace(?)
"""


def _expected_catalogue() -> set[tuple[str, str, str, str]]:
    found = {("constraint", "head", "head_id_check", "CHECK ((id = 1))")}
    for statement in TABLES:
        table, columns = re.findall(r"CREATE \w+ (\w+) (.*)", statement.format(**_POSTGRES_TYPES))[0]
        if statement.startswith("CREATE TABLE"):
            found.add(("relation", table, "", "r p"))
            defined = re.findall(r"[(,] ?(\w+) (BIGINT|INTEGER|BYTEA|TEXT)( NOT NULL| PRIMARY KEY)?", columns)
            for column, kind, required in defined:
                found.add(("column", table, column, kind.lower() + " not null" * bool(required)))
            key = re.findall(r"PRIMARY KEY \((.*?)\)", columns) or [c for c, _, how in defined if how == " PRIMARY KEY"]
            found.add(("index", table, f"{table}_pkey", f"unique btree ({key[0]})"))
    return found


def ledgers_in_database(where: str) -> list[str]:
    """Return the addresses of all ledgers in the database of an address."""
    address = PostgresAddress.parse(where)
    try:
        with psycopg.connect(address.conninfo, connect_timeout=10, client_encoding="utf8") as db:
            found = PostgresConnection(db).rows(_SELECT_LEDGER_SCHEMAS)
    except psycopg.Error as error:
        raise connection_error(error, address) from None
    return [f"{address.conninfo}#{name}" for (name,) in found]


_IDLE_SECONDS = 300  # seconds after which a writer that stopped in the middle loses its turn


class PostgresStore(Store):
    """`where` is "postgresql://host/database", and "#schema" behind it for one of several ledgers."""

    remote = True

    def __init__(self, where: str, *, create: bool = False, readonly: bool = False, patience: float = 30.0) -> None:
        super().__init__(readonly, patience)
        self.where, self._address = where, PostgresAddress.parse(where)
        self._schema = self._address.schema or DEFAULT_SCHEMA
        if not _SCHEMA_NAME.fullmatch(self._schema):
            problem = "the schema after the # of the address is not a plain name"
            remedy = "use small letters, digits and underscores; options come before the #"
            raise LedgerError("store.schema-name-invalid", problem, remedy)
        self.name = f"{self._address.shown}#{self._schema}"
        self._answered_before = False  # whether it ever answered
        self._prepared = False  # whether its tables were created or checked
        try:
            with postgres_errors(self.name):
                self._prepare(create)
        except BaseException:
            self.close()
            raise
        self._prepared = True

    # ----------------------------------------------------------------------------------- transactions

    def another(self) -> PostgresStore:
        return PostgresStore(self.where, readonly=True, patience=self._patience)

    @contextmanager
    def read(self) -> Iterator[StoreReader]:
        self._refresh()
        with self._transaction("read") as db:
            yield StoreReader(db)

    @contextmanager
    def write(self) -> Iterator[StoreWriter]:
        with self._transaction("write") as db:
            if not db.rows("SELECT id FROM head FOR UPDATE"):
                db.rows("LOCK TABLE head IN EXCLUSIVE MODE")  # still empty: who comes second finds the first's header
            yield StoreWriter(db)

    @contextmanager
    def _transaction(self, purpose: str) -> Iterator[PostgresConnection]:
        self._check_usable(purpose)
        with self.turn, postgres_errors(self.name):
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
        with self.turn:
            db = self._open.get("read")
            if db is None or db.closed or db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                return
            waiting = select.poll()  # works for any number of open files, unlike select.select
            waiting.register(db.fileno(), select.POLLIN)
            if waiting.poll(0):  # no query is pending, so this is a closed connection or a notice
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
            self._close(db)

    # ----------------------------------------------------------------------------------- the database

    def compact(self) -> None:
        with self.turn, postgres_errors(self.name):
            db = self._connection("write")
            db.autocommit = True
            try:
                for table in ("leaf", "evidence"):
                    db.execute(sql.SQL("VACUUM (FULL) {}").format(sql.Identifier(table)))
            finally:
                db.autocommit = False

    def _close(self, db: psycopg.Connection) -> None:
        with suppress(psycopg.Error):
            db.close()

    def _prepare(self, create: bool) -> None:
        purpose = "read" if self._readonly else "write"
        db = self._connection(purpose)
        plain = PostgresConnection(db)
        try:
            version = self._tables_version(plain)
            if not version and create:  # only creating tables takes the lock, which any user who can connect can hold
                plain.rows("SELECT pg_advisory_xact_lock(hashtext(?))", f"lamina {self._schema}")
                db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
                version = self._tables_version(plain)
            if not version and not create:
                raise self._nothing(plain)
            if self._make_tables(plain, int(version[0][0]) if version else 0, _POSTGRES_TYPES):
                # Hashes do not compress: do not try.
                plain.rows("ALTER TABLE tile ALTER COLUMN data SET STORAGE EXTERNAL")
                StoreWriter(plain).put_meta("tables", str(TABLES_VERSION).encode())
            self._check_catalogue(plain)
            db.commit()
        except BaseException:
            self._undo(purpose, db)
            raise

    def _check_catalogue(self, db: PostgresConnection) -> None:
        self._refuse_other_tables(db.rows(_SELECT_CATALOGUE, *[self._schema] * 3), _expected_catalogue())

    def _tables_version(self, db: PostgresConnection) -> list[tuple[Any, ...]]:
        made = db.rows("SELECT to_regclass('meta') IS NOT NULL")[0][0]
        return db.rows("SELECT value FROM meta WHERE name = 'tables'") if made else []

    def _connection(self, purpose: str) -> psycopg.Connection:
        if (there := self._open.get(purpose)) is not None and not (there.closed or there.broken):
            return cast(psycopg.Connection, there)
        address = self._address
        try:
            db = psycopg.connect(
                address.conninfo, autocommit=True, connect_timeout=10, application_name="lamina ledger",
                client_encoding="utf8",
            )  # fmt: skip
        except psycopg.Error as error:
            found = connection_error(error, address)
            if isinstance(found, StoreLost) and self._answered_before:
                found = _lost(self.name, found.problem)
            raise found from None
        try:
            self._set_up(db, purpose)
            if self._prepared:
                self._check_catalogue(PostgresConnection(db))
                db.commit()
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
            problem = f"the user may not use schema {schema!r} of {self.name}"
            remedy = f"have it granted: GRANT USAGE ON SCHEMA {schema}, and SELECT on its tables"
            return StoreError("store.access-refused", problem, remedy)
        others = [f"#{name}" for (name,) in db.rows(_SELECT_LEDGER_SCHEMAS)]
        has = "has none" if found else "is not there"
        problem = f"there is no ledger in {self.name}: schema {schema!r} {has}"
        remedy = "give the database of one, or let a run make it: no schema of this one has a ledger"
        if others:
            more = ", …" * (len(others) > _MAX_LISTED_SCHEMAS)
            remedy = f"name one that has, after the #: {', '.join(others[:_MAX_LISTED_SCHEMAS])}{more}"
        return LedgerError("store.no-ledger", problem, remedy)

    def _set_up(self, db: psycopg.Connection, purpose: str) -> None:
        """Set durable commits, bounded waits, and every default of the server or user that affects what is read."""
        plain = PostgresConnection(db)
        for name in ("fsync", "full_page_writes"):
            if plain.rows(f"SHOW {name}")[0][0] == "off":
                problem = f"the server of {self.name} runs with {name} = off and could lose committed rows"
                raise StoreError("store.not-durable", problem, f"turn {name} on")
        if (encoding := plain.rows("SHOW server_encoding")[0][0]) != "UTF8":
            problem = f"the database of {self.name} stores text as {encoding}, must be UTF8"
            raise StoreError("store.encoding-not-utf8", problem, "use a database that was created with ENCODING 'UTF8'")
        if plain.rows("SHOW synchronous_commit")[0][0] == "off":
            plain.rows("SET synchronous_commit = on")
        # pg_temp is listed last. If it were not listed, temporary tables would be found before those of the ledger.
        plain.rows("SELECT set_config('search_path', ?, false)", f'"{self._schema}", pg_temp')
        plain.rows("SELECT set_config('lock_timeout', ?, false)", f"{int(self._patience * 1000)}ms")
        plain.rows("SELECT set_config('idle_in_transaction_session_timeout', ?, false)", f"{_IDLE_SECONDS}s")
        if purpose == "write":
            self._check_clock(plain)
        db.autocommit = False
        if purpose == "read":
            db.isolation_level, db.read_only = psycopg.IsolationLevel.REPEATABLE_READ, True
        else:  # a snapshot from before the lock would miss what the previous writer committed
            db.isolation_level = psycopg.IsolationLevel.READ_COMMITTED

    def _check_clock(self, db: PostgresConnection) -> None:
        """Raise StoreError if the clocks of this machine and the server differ: a leaf of the future blocks other writers."""
        ahead = time.time() - db.rows("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0]
        if abs(ahead) > CLOCK_SKEW:
            problem = f"the clocks of this machine and of the server of {self.name} differ by {abs(ahead):.0f} s"
            raise StoreError("store.clocks-differ", problem, f"synchronise them to within {CLOCK_SKEW} s")
