"""What a ledger asks of its store: one narrow interface for SQLite and PostgreSQL.

A store keeps rows and promises three things. A transaction is all or nothing. Once `write` has ended without an error
it is durable: a kill or a power cut after that loses nothing of it. And writers take turns, over threads, processes
and (PostgreSQL) machines: between the beginning of `write` and its end nobody else changes anything, so the head that
was read in it is the head. What rows *mean* is the ledger's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from lamina.errors import LedgerDamaged
from lamina.ledger.merkle import ReadTile, Tile, tile_path

LeafRow = tuple[int, int, bytes]  # a leaf: its index, the number of its kind, its bytes


class LedgerHead(NamedTuple):
    """Where the ledger stands: leaves, time of the last one, epochs closed, and the encoded right edge of the tree.

    `indexed` is the number of leaves whose keys are in the index; those of the last ones are found by reading them.
    """

    size: int
    time: int
    epoch: int
    indexed: int
    frontier: bytes


class AttemptRow(NamedTuple):
    """An attempt of a run, and the leaf of the epoch that closed it."""

    run: bytes
    segment: int
    generation: int
    seq: int


class PruningRow(NamedTuple):
    """An aggregate that was appended, and whether what it stands for is gone already."""

    seq: int
    done: bool


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

    `leaf` is the epoch that recorded the attempt; from then on the leaf counts, and the body is empty.
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


class StoreReader(Protocol):
    """One consistent view."""

    def head(self) -> LedgerHead | None:
        """None in a store that is still empty."""

    def leaf(self, seq: int) -> bytes | None:
        """A leaf; None if it is not there (not yet, or not any more)."""

    def leaves(self, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(seq, leaf) of those in [first, stop) that are there, in order, in bounded memory."""

    def of_kind(self, kind: int, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """The same of one kind. Quick for every kind but contributions."""

    def tile(self, level: int, index: int) -> bytes | None:
        """A tile as far as it is filled."""

    def checkpoint(self, size: int | None = None) -> StoredCheckpoint | None:
        """The checkpoint of that size; without a size the newest."""

    def checkpoints(self) -> Iterator[StoredCheckpoint]:
        """Every checkpoint that was ever signed, by size."""

    def evidence(self, seq: int) -> bytes | None:
        """The bytes whose digest stands in that leaf (an attestation, a request)."""

    def evidences(self, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(seq, bytes) of those in [first, stop) that are there, in order, in bounded memory."""

    def blob(self, digest: bytes) -> bytes | None:
        """Bytes by their SHA-256 (a plan, a manifest)."""

    def find(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
        """(key, seq) of every indexed leaf that has one of these keys."""

    def find_between(self, first: bytes, last: bytes, limit: int) -> list[tuple[bytes, int]]:
        """(key, seq) of indexed leaves whose key is in [first, last], in order; at most so many."""

    def attempt(self, run: bytes, segment: int, generation: int) -> int | None:
        """The leaf of the epoch that closed an attempt."""

    def withdrawn(self, target: int) -> int | None:
        """The leaf of the withdrawal of a contribution."""

    def withdrawals(self) -> Iterator[tuple[int, int]]:
        """(target, leaf of its withdrawal) of every contribution that was withdrawn, by target."""

    def prunings(self) -> list[PruningRow]:
        """The aggregates, in order."""

    def runs(self) -> list[RunRow]:
        """Every run, by id."""

    def hold(self, run: bytes, segment: int, generation: int) -> RunHold | None:
        """One of them."""

    def holds(self, run: bytes | None = None) -> list[RunHold]:
        """What is held and not recorded in a leaf; of one run, or of all."""

    def kept(self, run: bytes) -> list[RunHold]:
        """The same of one run, with those that a leaf records."""

    def generations(self, run: bytes, segment: int) -> int:
        """One more than the largest generation of a segment that was held or recorded; 0 if none was."""

    def terms(self) -> dict[str, bytes]:
        """By account."""

    def tokens(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these keys that are there."""

    def batch(self, writer: bytes) -> WriterBatch | None:
        """The last batch of a writer."""

    def meta(self, name: str) -> bytes | None:
        """A small thing by its name."""


class StoreWriter(StoreReader, Protocol):
    """A transaction. What it read stays true until it ends."""

    def add_leaves(self, rows: Sequence[LeafRow]) -> None: ...
    def add_evidence(self, rows: Sequence[tuple[int, bytes]]) -> None: ...
    def add_keys(self, rows: Sequence[tuple[bytes, int]]) -> None: ...
    def add_attempts(self, rows: Sequence[AttemptRow]) -> None: ...
    def add_withdrawals(self, rows: Sequence[tuple[int, int]]) -> None: ...
    def put_tiles(self, tiles: Iterable[Tile]) -> None: ...
    def put_head(self, head: LedgerHead) -> None: ...
    def put_checkpoint(self, signed: StoredCheckpoint) -> None: ...
    def put_blob(self, digest: bytes, data: bytes) -> None: ...
    def put_pruning(self, pruning: PruningRow) -> None: ...
    def put_batch(self, writer: bytes, batch: WriterBatch, day: int) -> None:
        """The day is all that is kept of when."""

    def forget_writers(self, day: int) -> None:
        """Those who were silent since before that day."""

    def put_meta(self, name: str, value: bytes) -> None: ...
    def put_run(self, run: RunRow) -> None: ...
    def put_hold(self, hold: RunHold) -> None: ...
    def drop_hold(self, run: bytes, segment: int) -> None:
        """All generations of it."""

    def put_terms(self, account: str, body: bytes) -> None: ...
    def add_tokens(self, keys: Sequence[bytes]) -> None: ...
    def drop_leaves(self, first: int, stop: int) -> None:
        """Delete leaves [first, stop) and what belongs to them alone."""

    def drop_keys(self, rows: Sequence[tuple[bytes, int]]) -> None: ...
    def drop_tiles(self, level: int, indices: Sequence[int]) -> None: ...
    def drop_blob(self, digest: bytes) -> None: ...


class Store(Protocol):
    """Rows that last."""

    name: str  # for messages; without passwords
    remote: bool  # whether the answer to a commit can get lost on the way

    def read(self) -> AbstractContextManager[StoreReader]:
        """A view of what is committed."""

    def write(self) -> AbstractContextManager[StoreWriter]:
        """A transaction; StoreBusy if the others do not let go."""

    def compact(self) -> None:
        """Give space back that dropped rows took, and leave nothing of them in free pages."""

    def size_on_disk(self) -> int:
        """Bytes."""

    def close(self) -> None: ...


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
