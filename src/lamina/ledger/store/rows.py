"""The rows of a ledger, in SQL that SQLite and PostgreSQL share: what is read and written, and the tables.

A store keeps rows and promises three things. A transaction is all or nothing. Once `write` has ended without an error
it is durable: a kill or a power cut after that loses nothing of it. And writers take turns, over threads, processes
and (PostgreSQL) machines: between the beginning of `write` and its end nobody else changes anything, so the head that
was read in it is the head. What rows *mean* is the ledger's business.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from lamina.errors import LedgerDamaged, LedgerError
from lamina.ledger.merkle import ReadTile, Tile, tile_path

LeafRow = tuple[int, bytes, bytes | None]  # a leaf: its index, its bytes, its body


class StoredLeaf(NamedTuple):
    """The bytes of a leaf, which the tree hashes, and of the body whose hash it holds; None where that is pruned."""

    leaf: bytes
    body: bytes | None


@dataclass(frozen=True, slots=True)
class LeafBlock:
    """Consecutive leaves and their bodies, side by side: for who reads many."""

    leaves: Sequence[bytes]
    bodies: Sequence[bytes | None]

    def __len__(self) -> int:
        return len(self.leaves)

    def __getitem__(self, at: int) -> StoredLeaf:
        return StoredLeaf(self.leaves[at], self.bodies[at])

    def part(self, start: int, stop: int) -> LeafBlock:
        return LeafBlock(self.leaves[start:stop], self.bodies[start:stop])

    def pick(self, places: Sequence[int]) -> LeafBlock:
        return LeafBlock([self.leaves[at] for at in places], [self.bodies[at] for at in places])


class LedgerHead(NamedTuple):
    """Where the ledger stands: leaves, time of the last one, epochs closed, and the encoded right edge of the tree."""

    size: int
    time: int
    epoch: int
    frontier: bytes


class AttemptRow(NamedTuple):
    """An attempt of a run, and the leaf of the epoch that closed it."""

    run: bytes
    segment: int
    generation: int
    seq: int


class StoredCheckpoint(NamedTuple):
    """A checkpoint as it was published, and the seal (key id, signature) of the same tree for receipts."""

    size: int
    text: str
    seal: bytes


class RunRow(NamedTuple):
    """A run that reserved or was charged: its id, what people call it, since which day, whether it will take more."""

    id: bytes
    label: str
    day: int
    finished: bool


RESERVATION_SEGMENT = -1  # the segment under which the rest of a plan is held
WHOLE_BUDGET_SEGMENT = 2**62  # from this one on: a budget that noise follows, charged as a whole when its run begins


class RunHold(NamedTuple):
    """What a run holds of its accounts: an attempt that it was charged for, a whole budget, or a reservation.

    `leaf` is the epoch that recorded the attempt; from then on the leaf counts. The body is empty then, unless the
    attempt took of an adaptive budget, of which no leaf tells.
    """

    run: bytes
    segment: int
    generation: int
    nonce: bytes
    leaf: int | None
    body: bytes

    @property
    def attempt(self) -> bool:
        """Whether contributions may have been read for it."""
        return RESERVATION_SEGMENT < self.segment < WHOLE_BUDGET_SEGMENT


class WriterBatch(NamedTuple):
    """The last batch of a writer: what it was called, and the leaves that it became."""

    token: bytes
    seqs: bytes


_ROWS_AT_ONCE = 4096  # rows that are in memory at a time
_LEAVES_PICKED = 256  # leaves in one query by number
_MAX_READ_RATIO = 4  # leaves of a range per wanted leaf, up to which the whole range is read


class SqlConnection(Protocol):
    """One connection inside a transaction. Questions marks stand for values in both dialects."""

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows of a query or statement."""

    def insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """Many new rows with the columns of `ADDED_COLUMNS`, as fast as it goes."""

    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """A statement for each of these rows."""

    def find(self, table: str, columns: str, keys: Sequence[bytes]) -> list[Any]:
        """The rows of a table that have one of these keys."""


class StoreReader:
    """One consistent view."""

    def __init__(self, db: SqlConnection) -> None:
        self._db = db

    def head(self) -> LedgerHead | None:
        """None in a store that is still empty."""
        found = self._db.rows("SELECT size, time, epoch, frontier FROM head")
        if not found:
            return None
        size, time, epoch, frontier = found[0]
        return LedgerHead(size, time, epoch, _as_bytes(frontier))

    def leaf(self, seq: int) -> StoredLeaf | None:
        """A leaf with its body; None if it is not there."""
        return next((found for _, found in self.leaves(seq, seq + 1)), None)

    def leaves(self, first: int, stop: int) -> Iterator[tuple[int, StoredLeaf]]:
        """(seq, leaf) of those in [first, stop) that are there, in order, in bounded memory."""
        return self._leaves("", (), first, stop)

    def beginning(self, starts: Sequence[bytes], first: int, stop: int) -> Iterator[tuple[int, StoredLeaf]]:
        """Yield the leaves in [first, stop) whose bytes begin with one of these, all of one length, in order.

        The database compares the leaves themselves, so no list of kinds is kept that could differ from them.
        """
        condition = f"substr(data, 1, {len(starts[0])}) IN ({', '.join('?' * len(starts))}) AND "
        return self._leaves(condition, starts, first, stop)

    def blocks(self, first: int, stop: int) -> Iterator[tuple[Sequence[int], LeafBlock]]:
        """The same as `leaves`, many at a time."""
        query = "SELECT seq, data, body FROM leaf WHERE seq >= ? AND seq < ? ORDER BY seq LIMIT ?"
        while first < stop and (found := self._db.rows(query, first, stop, _ROWS_AT_ONCE)):
            seqs, leaves, bodies = (list(map(itemgetter(column), found)) for column in range(3))
            yield seqs, LeafBlock(leaves, bodies)
            first = seqs[-1] + 1

    def kept_blocks(self, first: int, stop: int) -> Iterator[tuple[int, list[bytes]]]:
        """Yield blocks of the kept bytes of the leaves in [first, stop), without bodies, each with its first number."""
        query = "SELECT {} FROM leaf WHERE seq >= ? AND seq < ? ORDER BY seq"
        for at in range(first, stop, _ROWS_AT_ONCE):
            end = min(stop, at + _ROWS_AT_ONCE)
            leaves = [data for (data,) in self._db.rows(query.format("data"), at, end)]
            if len(leaves) != end - at:
                there = {seq for (seq,) in self._db.rows(query.format("seq"), at, end)}
                problem = f"leaf {min(set(range(at, end)) - there)} is missing"
                raise LedgerDamaged("ledger.leaf-missing", problem, "restore the ledger from a copy")
            if set(map(type, leaves)) != {bytes}:
                list(map(_as_bytes, leaves))
            yield at, leaves

    def pick(self, seqs: Sequence[int]) -> Iterator[tuple[int, StoredLeaf]]:
        """Yield (seq, leaf) of those leaves that are stored, in order and in bounded memory."""
        for at in range(0, len(seqs), _LEAVES_PICKED):
            part = seqs[at : at + _LEAVES_PICKED]
            if part[-1] - part[0] < _MAX_READ_RATIO * len(part):  # close together: in one sweep
                wanted = set(part)
                yield from (found for found in self.leaves(part[0], part[-1] + 1) if found[0] in wanted)
                continue
            query = f"SELECT seq, data, body FROM leaf WHERE seq IN ({', '.join('?' * len(part))}) ORDER BY seq"
            for seq, data, body in self._db.rows(query, *part):
                yield seq, StoredLeaf(_as_bytes(data), None if body is None else _as_bytes(body))

    def with_body(self, first: int, stop: int) -> Iterator[int]:
        """Yield the leaves in [first, stop) that have their bodies, in order."""
        query = "SELECT seq FROM leaf WHERE seq >= ? AND seq < ? AND body IS NOT NULL ORDER BY seq LIMIT ?"
        return (seq for (seq,) in self._range(query, first, stop))

    def _leaves(
        self, condition: str, values: Sequence[bytes], first: int, stop: int
    ) -> Iterator[tuple[int, StoredLeaf]]:
        query = f"SELECT seq, data, body FROM leaf WHERE {condition}seq >= ? AND seq < ? ORDER BY seq LIMIT ?"
        for seq, data, body in self._range(query, first, stop, *values):
            yield seq, StoredLeaf(_as_bytes(data), None if body is None else _as_bytes(body))

    def tile(self, level: int, index: int) -> bytes | None:
        """A tile as far as it is filled."""
        return self._bytes("SELECT data FROM tile WHERE id = ?", _tile_id(level, index))

    def checkpoint(self, size: int | None = None) -> StoredCheckpoint | None:
        """The checkpoint of that size; without a size the newest."""
        query = "SELECT size, text, seal FROM checkpoint "
        if size is None:
            found = self._db.rows(query + "ORDER BY size DESC LIMIT 1")
        else:
            found = self._db.rows(query + "WHERE size = ?", size)
        return _checkpoint_of_row(found[0]) if found else None

    def checkpoints(self) -> Iterator[StoredCheckpoint]:
        """Every checkpoint that was ever signed, by size."""
        query, last = "SELECT size, text, seal FROM checkpoint WHERE size > ? ORDER BY size LIMIT ?", -1
        while found := self._db.rows(query, last, _ROWS_AT_ONCE):
            yield from map(_checkpoint_of_row, found)
            last = found[-1][0]

    def checkpoint_before(self, size: int) -> int:
        """Return the size of the newest checkpoint with fewer than `size` leaves; 0 if there is none."""
        return self._db.rows("SELECT max(size) FROM checkpoint WHERE size < ?", size)[0][0] or 0

    def evidence(self, seq: int) -> bytes | None:
        """The bytes whose digest stands in that leaf (an attestation, a request)."""
        return self._bytes("SELECT data FROM evidence WHERE seq = ?", seq)

    def evidences(self, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(seq, bytes) of those in [first, stop) that are there, in order, in bounded memory."""
        query = "SELECT seq, data FROM evidence WHERE seq >= ? AND seq < ? ORDER BY seq LIMIT ?"
        return ((seq, _as_bytes(data)) for seq, data in self._range(query, first, stop))

    def blob(self, digest: bytes) -> bytes | None:
        """Bytes by their SHA-256 (a plan, a manifest)."""
        return self._bytes("SELECT data FROM blob WHERE digest = ?", digest)

    def attempts(self) -> Iterator[AttemptRow]:
        """Every attempt that an epoch closed."""
        query = "SELECT run, segment, generation, seq FROM attempt"
        return (AttemptRow(_as_bytes(run), *rest) for run, *rest in self._db.rows(query))

    def too_long(self) -> str | None:
        """A column that holds more bytes than it may, and in which row; they are counted, and not read."""
        for table, limits in COLUMN_LIMITS.items():  # each is read through once
            key, sizes = _ROW_NUMBERS.get(table, "0"), [f"octet_length({column})" for column in limits]
            wrong = " OR ".join(f"{size} > {most}" for size, most in zip(sizes, limits.values(), strict=True))
            for row, *found in self._db.rows(f"SELECT {key}, {', '.join(sizes)} FROM {table} WHERE {wrong} LIMIT 1"):
                column, size = next((each, n) for each, n in zip(limits, found, strict=True) if (n or 0) > limits[each])
                of_row = f" of row {row}" if table in _ROW_NUMBERS else ""
                return f"{column}{of_row} of table {table} has {size} bytes, at most {limits[column]} are read"
        return None

    def batch(self, writer: bytes) -> WriterBatch | None:
        """The last batch of a writer."""
        found = self._db.rows("SELECT token, seqs FROM writer WHERE id = ?", writer)
        return WriterBatch(_as_bytes(found[0][0]), _as_bytes(found[0][1])) if found else None

    def meta(self, name: str) -> bytes | None:
        """A small thing by its name."""
        return self._bytes("SELECT value FROM meta WHERE name = ?", name)

    def runs(self) -> list[RunRow]:
        """Every run, by id."""
        found = self._db.rows("SELECT id, label, day, finished FROM run ORDER BY id")
        return [RunRow(_as_bytes(id), label, day, bool(finished)) for id, label, day, finished in found]

    def hold(self, run: bytes, segment: int, generation: int) -> RunHold | None:
        """One of them."""
        found = self._holds("run = ? AND segment = ? AND generation = ?", run, segment, generation)
        return found[0] if found else None

    def holds(self, run: bytes | None = None) -> list[RunHold]:
        """What is held and not recorded in a leaf; of one run, or of all."""
        return self._holds("leaf IS NULL") if run is None else self._holds("leaf IS NULL AND run = ?", run)

    def signed_holds(self) -> list[RunHold]:
        """Return the charges that no leaf records yet, and facts that only rows hold."""
        return self._holds("leaf IS NULL OR octet_length(body) > 0")

    def kept(self, run: bytes) -> list[RunHold]:
        """The same of one run, with those that a leaf records."""
        return self._holds("run = ?", run)

    def _holds(self, condition: str, *values: Any) -> list[RunHold]:
        columns = "run, segment, generation, nonce, leaf, body"
        query = f"SELECT {columns} FROM held WHERE {condition} ORDER BY run, segment, generation"
        return [
            RunHold(_as_bytes(run), segment, generation, _as_bytes(nonce), leaf, _as_bytes(body))
            for run, segment, generation, nonce, leaf, body in self._db.rows(query, *values)
        ]

    def terms(self) -> dict[str, bytes]:
        """By account."""
        return {account: _as_bytes(body) for account, body in self._db.rows("SELECT account, body FROM terms")}

    def tokens(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these keys that are there."""
        parts = (keys[at : at + _ROWS_AT_ONCE] for at in range(0, len(keys), _ROWS_AT_ONCE))
        return {_as_bytes(key) for part in parts for (key,) in self._db.find("token", "key", part)}

    def all_tokens(self) -> set[bytes]:
        """Every one that is there."""
        return {_as_bytes(key) for (key,) in self._db.rows("SELECT key FROM token")}

    def _bytes(self, query: str, value: Any) -> bytes | None:
        found = self._db.rows(query, value)
        return _as_bytes(found[0][0]) if found else None

    def _range(self, query: str, first: int, stop: int, *values: Any) -> Iterator[tuple[Any, ...]]:
        while first < stop and (found := self._db.rows(query, *values, first, stop, _ROWS_AT_ONCE)):
            yield from found
            first = found[-1][0] + 1


class StoreWriter(StoreReader):
    """A transaction. What it read stays true until it ends."""

    def add(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """Add new rows to a table, with the columns of `ADDED_COLUMNS`."""
        if rows:
            self._db.insert(table, rows)

    def put_tiles(self, tiles: Iterable[Tile]) -> None:
        statement = _upsert("tile", ("id",), ("data",))
        self._db.many(statement, [(_tile_id(tile.level, tile.index), tile.data) for tile in tiles])

    def put_head(self, head: LedgerHead) -> None:
        self._db.rows(_upsert("head", ("id",), LedgerHead._fields), 1, *head)

    def put_checkpoint(self, signed: StoredCheckpoint) -> None:
        self._db.rows(_upsert("checkpoint", ("size",), ("text",), ("seal",)), *signed)

    def put_blob(self, digest: bytes, data: bytes) -> None:
        self._db.rows("INSERT INTO blob (digest, data) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING", digest, data)

    def put_batch(self, writer: bytes, batch: WriterBatch, day: int) -> None:
        """The day is all that is kept of when."""
        self._db.rows(_upsert("writer", ("id",), ("token", "seqs", "day")), writer, *batch, day)

    def forget_writers(self, day: int) -> None:
        """Those who were silent since before that day."""
        self._db.rows("DELETE FROM writer WHERE day < ?", day)

    def put_meta(self, name: str, value: bytes) -> None:
        self._db.rows(_upsert("meta", ("name",), ("value",)), name, value)

    def drop_meta(self, name: str) -> None:
        self._db.rows("DELETE FROM meta WHERE name = ?", name)

    def put_run(self, run: RunRow) -> None:
        statement = _upsert("run", ("id",), ("label", "finished"), ("day",))
        self._db.rows(statement, run.id, run.label, int(run.finished), run.day)

    def put_hold(self, hold: RunHold) -> None:
        self._db.rows(_upsert("held", RunHold._fields[:3], RunHold._fields[3:]), *hold)

    def drop_hold(self, run: bytes, segment: int) -> None:
        """All generations of it."""
        self._db.rows("DELETE FROM held WHERE run = ? AND segment = ?", run, segment)

    def put_terms(self, account: str, body: bytes) -> None:
        self._db.rows(_upsert("terms", ("account",), ("body",)), account, body)

    def cut(self, size: int, tokens: Sequence[bytes]) -> None:
        """Delete all leaves from `size` on, what refers to them, these tokens, and the tiles."""
        for table in ("leaf", "evidence", "attempt"):
            self._db.rows(f"DELETE FROM {table} WHERE seq >= ?", size)
        self._db.rows("DELETE FROM held WHERE leaf >= ?", size)
        self._db.rows("DELETE FROM tile")
        self._db.many("DELETE FROM token WHERE key = ?", [(token,) for token in tokens])

    def drop_bodies(self, first: int, stop: int) -> None:
        """Delete the bodies of the leaves in [first, stop), which are contributions, and their attestations."""
        self._db.rows("UPDATE leaf SET body = NULL WHERE seq >= ? AND seq < ?", first, stop)
        self._db.rows("DELETE FROM evidence WHERE seq >= ? AND seq < ?", first, stop)


def _as_bytes(value: Any) -> bytes:
    """What a column of bytes holds; SQLite lets it hold anything, of which `bytes` would make what is not there."""
    if type(value) is not bytes:
        problem = f"a row of the store holds a wrong type: {type(value).__name__} where bytes belong"
        raise LedgerDamaged("store.row-wrong-type", problem, "restore the ledger from a copy")
    return value


def _checkpoint_of_row(row: tuple[Any, ...]) -> StoredCheckpoint:
    size, text, seal = row
    return StoredCheckpoint(size, text, _as_bytes(seal))


def _upsert(table: str, key: Sequence[str], changes: Sequence[str], fixed: Sequence[str] = ()) -> str:
    """Insert a row, or change these columns of the one with the same key; `fixed` ones stay as they were."""
    columns = (*key, *changes, *fixed)
    changed = ", ".join(f"{name} = excluded.{name}" for name in changes)
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changed}"
    )


def _tile_id(level: int, index: int) -> int:
    return level << 56 | index


def head_of(rows: StoreReader) -> LedgerHead:
    """The head of a ledger that has one."""
    if (head := rows.head()) is None:
        raise LedgerDamaged("ledger.head-missing", "the ledger has lost its head", "restore it from a copy")
    return head


def tile_reader(rows: StoreReader) -> ReadTile:
    """Tiles of a transaction."""

    def read(level: int, index: int, width: int) -> bytes:
        if (data := rows.tile(level, index)) is None:
            problem = f"{tile_path(level, index, width)} is missing"
            raise LedgerDamaged("ledger.tile-missing", problem, "restore the ledger from a copy")
        return data

    return read


# The tables of a ledger.
#
# leaf        the leaves: index, bytes; and the body of each, but those of pruned contributions
# tile        hashes of the tree, by level·2^56 + index
# head        one row: where the ledger stands. In PostgreSQL whoever writes holds its lock
# checkpoint  every checkpoint that was signed, with its signatures
# evidence    bytes of which a leaf holds the digest, by the leaf's index
# blob        bytes that several leaves may refer to, by their digest
# attempt     (run, segment, generation) of every epoch: each at most once
# writer      the last batch of each writer: whether a commit whose answer was lost took place
# run         runs that reserved or were charged
# held        what has no leaf: the reservation of a run's plan, and attempts that are open
# terms       the bound at which an account was last found to have room
# token       (key, token) of attestations that were admitted, hashed: none is admitted twice
# meta        version of the tables; what leaves a keeper wrote (checked_leaves.WriterMark); the signed head over run,
#             held and terms (open_rows.OpenHead)

# {number}, {bytes}, {sorted}: what the dialects call a 64-bit integer, bytes, and a table kept in order of its key
TABLES = (
    "CREATE TABLE leaf (seq {number} PRIMARY KEY, data {bytes} NOT NULL, body {bytes})",
    "CREATE TABLE tile (id {number} PRIMARY KEY, data {bytes} NOT NULL)",
    "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), size {number} NOT NULL, time {number} NOT NULL, "
    "epoch {number} NOT NULL, frontier {bytes} NOT NULL)",
    "CREATE TABLE checkpoint (size {number} PRIMARY KEY, text TEXT NOT NULL, seal {bytes} NOT NULL)",
    "CREATE TABLE evidence (seq {number} PRIMARY KEY, data {bytes} NOT NULL)",
    "CREATE TABLE blob (digest {bytes} PRIMARY KEY, data {bytes} NOT NULL)",
    "CREATE TABLE attempt (run {bytes} NOT NULL, segment {number} NOT NULL, generation {number} NOT NULL, "
    "seq {number} NOT NULL, PRIMARY KEY (run, segment, generation)) {sorted}",
    "CREATE TABLE writer (id {bytes} PRIMARY KEY, token {bytes} NOT NULL, seqs {bytes} NOT NULL, "
    "day {number} NOT NULL) {sorted}",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value {bytes} NOT NULL) {sorted}",
    "CREATE TABLE run (id {bytes} PRIMARY KEY, label TEXT NOT NULL, day {number} NOT NULL, "
    "finished INTEGER NOT NULL) {sorted}",
    "CREATE TABLE held (run {bytes} NOT NULL, segment {number} NOT NULL, generation {number} NOT NULL, "
    "nonce {bytes} NOT NULL, leaf {number}, body {bytes} NOT NULL, "
    "PRIMARY KEY (run, segment, generation)) {sorted}",
    "CREATE TABLE terms (account TEXT PRIMARY KEY, body {bytes} NOT NULL) {sorted}",
    "CREATE TABLE token (key {bytes} PRIMARY KEY) {sorted}",
)
TABLES_VERSION = 4

MAX_BLOB_BYTES = 1 << 26  # bytes of a plan or manifest
MAX_BATCH_BYTES = 1 << 24  # bytes of the numbers of the leaves of one batch
COLUMN_LIMITS = {  # bytes that a column may hold: more is refused before it is read
    "meta": {"name": 64, "value": 1 << 10}, "head": {"frontier": 1 << 12}, "leaf": {"data": 1 << 9, "body": 1 << 20},
    "tile": {"data": 1 << 13}, "checkpoint": {"text": 1 << 18, "seal": 96}, "evidence": {"data": 1 << 20},
    "blob": {"digest": 32, "data": MAX_BLOB_BYTES}, "attempt": {"run": 16},
    "run": {"id": 16, "label": 1 << 12}, "held": {"run": 16, "nonce": 16, "body": 1 << 24},
    "terms": {"account": 1 << 10, "body": 1 << 20}, "token": {"key": 16},
    "writer": {"id": 16, "token": 16, "seqs": MAX_BATCH_BYTES},
}  # fmt: skip
ADDED_COLUMNS = {  # of tables to which many rows are added at a time: name and type, as PostgreSQL calls it
    "leaf": {"seq": "int8", "data": "bytea", "body": "bytea"},
    "evidence": {"seq": "int8", "data": "bytea"},
    "attempt": {"run": "bytea", "segment": "int8", "generation": "int8", "seq": "int8"},
    "token": {"key": "bytea"},
}
_ROW_NUMBERS = {"leaf": "seq", "tile": "id", "checkpoint": "size", "evidence": "seq"}


class Store(ABC):
    """A ledger's rows that last: a connection for reading and one for writing, of one process."""

    name: str  # for messages; without passwords
    where: str  # path or address
    remote: bool  # whether the answer to a commit can get lost on the way

    def __init__(self, readonly: bool, patience: float) -> None:
        self._readonly, self._patience, self._pid = readonly, patience, os.getpid()
        self.turn = threading.RLock()  # one transaction at a time: what a Ledger checked belongs to its view
        self._open: dict[str, Any] = {}

    @abstractmethod
    def read(self) -> AbstractContextManager[StoreReader]:
        """A view of what is committed."""

    @abstractmethod
    def write(self) -> AbstractContextManager[StoreWriter]:
        """A transaction; StoreBusy if the others do not let go."""

    @abstractmethod
    def another(self) -> Store:
        """The same rows through a connection of its own, to read: whoever reads for long keeps nobody waiting."""

    def replaced(self) -> bool:
        """Return whether the store may have been replaced since it was opened. If so, open `another` to read on."""
        return False

    @abstractmethod
    def compact(self) -> None:
        """Give space back that dropped rows took, and leave nothing of them in free pages."""

    @abstractmethod
    def _close(self, db: Any) -> None:
        """Close one connection."""

    def close(self) -> None:
        for purpose in ("read", "write"):
            with self.turn:
                if (db := self._open.pop(purpose, None)) is not None and self._pid == os.getpid():
                    self._close(db)

    def _check_usable(self, purpose: str) -> None:
        if self._pid != os.getpid():
            problem = f"the ledger '{self.name}' was opened before a fork"
            raise LedgerError("store.used-after-fork", problem, "open it in the process that uses it")
        if self._readonly and purpose == "write":
            problem = f"the ledger '{self.name}' was opened for reading"
            raise LedgerError("store.opened-read-only", problem, "open it for writing")

    def _make_tables(self, db: SqlConnection, found: int, types: dict[str, str]) -> bool:
        """Make the tables if their version is 0, inside a transaction; whether they were made."""
        if found > TABLES_VERSION:
            problem = f"'{self.name}' has tables of version {found}, this program knows {TABLES_VERSION}"
            raise LedgerError("store.tables-too-new", problem, "use a newer version of lamina")
        if found == TABLES_VERSION:
            return False
        if found or self._readonly:
            problem = f"'{self.name}' has tables of version {found}, this program needs {TABLES_VERSION}"
            raise LedgerError("store.tables-outdated", problem, "use the version of lamina that made it")
        for statement in TABLES:
            db.rows(statement.format(**types).strip())
        return True

    def _refuse_other_tables(self, found: Iterable[tuple[Any, ...]], expected: Iterable[tuple[Any, ...]]) -> None:
        """LedgerDamaged if the store has other tables, columns or indexes than ours, or a view or a trigger.

        Asked of the catalogue before any row is read: what a row means then is what it means to us.
        """
        if other := sorted(set(found) ^ set(expected), key=repr):
            problem = f"'{self.name}' has other tables than a ledger: {' '.join(map(str, other[0][:3]))}"
            remedy = "restore it from a copy; tables, views and triggers of your own belong into another database"
            raise LedgerDamaged("store.tables-differ", problem, remedy)
