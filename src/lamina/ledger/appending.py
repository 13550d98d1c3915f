"""One batch on its way into the ledger: places, hashes, tiles and rows, all in one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lamina.ledger import leaf, repeats, tiles
from lamina.ledger.clock import epoch_time
from lamina.ledger.errors import LedgerError
from lamina.ledger.frontier import Frontier
from lamina.ledger.hashing import leaf_hashes
from lamina.ledger.lookup import STEP, Tail, anchor_key, descriptor_key, subject_key
from lamina.ledger.records import NUMBERS, Admitted, Epoch, Record, Release, Withdrawal
from lamina.ledger.records.quick import uint
from lamina.ledger.store.base import Attempt, Head, LeafRow, Reader, Writer
from lamina.ledger.store.errors import Damaged


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a batch goes: the head, the time, the header's epoch_clock, the digest of the last checkpoint, the tail."""

    head: Head
    now: int
    step: int
    previous: bytes | None
    tail: Tail


class Batch:
    """Records that are appended together, and the bytes that they refer to by digest.

    What does not depend on the place in the ledger is made here, before anybody is kept waiting. `grown` is what the
    tail must learn once the transaction is committed.
    """

    def __init__(self, records: Sequence[Record], blobs: Iterable[bytes]) -> None:
        self.records = list(records)
        self.bodies = [leaf.body(record) for record in self.records]  # refuses what is no record
        self._once: dict[bytes, int] = {}  # keys that may be in a ledger once → position
        self._anchors: list[tuple[bytes, int]] = []
        others: dict[Any, int] = {}  # attempts and targets
        self.others: list[Record] = []  # that are no contributions
        for at, record in enumerate(self.records):
            if type(record) is Admitted:
                self._name(at, record)
                continue
            self.others.append(record)
            if isinstance(record, Epoch):
                _claim(others, record.attempts, at)
            elif isinstance(record, Withdrawal):
                _claim(others, (record.target,), at)
        self._blobs = {hashlib.sha256(data).digest(): data for data in blobs}
        self._refuse_strays()
        self.grown: list[tuple[bytes, int]] = []
        self.stop = 0

    def _name(self, at: int, record: Admitted) -> None:
        key = descriptor_key(record.descriptor)
        if (before := self._once.setdefault(key, at)) != at:
            raise _twice(before, at)
        if record.subject is not None:
            _claim(self._once, (subject_key(record.subject),), at)
        if record.anchor is not None:
            self._anchors.append((anchor_key(record.anchor), at))

    def write(self, rows: Writer, stand: Stand) -> list[int]:
        """Append what is not there yet; the leaf of every record, in order."""
        self.grown, self.stop = [], 0  # of an attempt that was not committed
        head, there = stand.head, self._there(rows, stand)
        new = (
            [at for at in range(len(self.records)) if at not in there] if there else range(len(self.records))
        )
        if new:
            self._write(rows, stand, new)
        fresh = iter(range(head.size, head.size + len(new)))
        return [there[at] if at in there else next(fresh) for at in range(len(self.records))]

    def _there(self, rows: Writer, stand: Stand) -> dict[int, int]:
        tail = stand.tail
        tail.follow(rows, stand.head)
        found = repeats.contributions(rows, lambda keys: tail.find(rows, keys), self._once, self.bodies)
        for at, record in enumerate(self.records):
            if type(record) is Epoch:
                seq = repeats.epoch(rows, record)
            elif type(record) is Withdrawal:
                seq = repeats.withdrawal(rows, record, self.bodies[at], stand.head.size)
            else:
                continue
            if seq is not None:
                found[at] = seq
        return found

    def _write(self, rows: Writer, stand: Stand, new: Sequence[int]) -> None:
        head = stand.head
        placed, time, epoch = self._placed(new, stand)
        frontier = Frontier.decode(head.frontier)
        if frontier.size != head.size:
            raise Damaged(
                "ledger.edge-tree-leaves",
                f"the edge of the tree has {frontier.size} leaves, the ledger {head.size}",
                "restore it",
            )
        changed = tiles.grow(frontier, leaf_hashes([data for _, _, data in placed]), reader(rows))
        rows.add_leaves(placed)
        rows.put_tiles(changed)
        self._write_about(rows, new, head.size)
        keys, size = chain(self._once.items(), self._anchors), head.size
        if len(new) == len(self.records):
            self.grown = [(key, size + at) for key, at in keys]
        else:
            seqs = dict(zip(new, range(size, frontier.size), strict=True))
            self.grown = [(key, seqs[at]) for key, at in keys if at in seqs]
        self.stop = frontier.size
        indexed = head.indexed
        if frontier.size - indexed >= STEP:
            stand.tail.index(rows, self.grown)
            indexed = frontier.size
        rows.put_head(Head(frontier.size, time, epoch, indexed, frontier.encode()))

    def _placed(self, new: Sequence[int], stand: Stand) -> tuple[list[LeafRow], int, int]:
        """The leaves, the time of the last one, and the epochs that are closed after it."""
        time, epoch = stand.head.time, stand.head.epoch
        placed: list[LeafRow] = []
        stamp = b""  # time and epoch in CBOR: the same for most leaves of a batch
        for seq, at in enumerate(new, start=stand.head.size):
            record, body = self.records[at], self.bodies[at]
            kind = NUMBERS[type(record)]
            if kind == _EPOCH:
                assert isinstance(record, Epoch)
                time, body = epoch_time(time, stand.now, stand.step), _linked(record, stand.previous)
                leaf_stamp, stamp = _stamp(time, epoch), b""
                epoch += 1
            else:
                if not stamp:
                    time, stamp = stand.now, _stamp(stand.now, epoch)
                leaf_stamp = stamp
            placed.append((seq, kind, _HEADS[kind] + uint(seq) + leaf_stamp + body))
        return placed, time, epoch

    def _write_about(self, rows: Writer, new: Sequence[int], first: int) -> None:
        """What single records have beside their leaf."""
        attempts: list[Attempt] = []
        withdrawn: list[tuple[int, int]] = []
        evidence: list[tuple[int, bytes]] = []
        for seq, at in enumerate(new, start=first):
            record = self.records[at]
            if type(record) is Admitted:
                if self._blobs and (data := self._blobs.get(record.attestation)) is not None:
                    evidence.append((seq, data))
            elif isinstance(record, Epoch):
                attempts += [Attempt(*attempt, seq) for attempt in record.attempts]
                self._put(rows, record.plan)
            elif isinstance(record, Withdrawal):
                withdrawn.append((record.target, seq))
                if record.request is not None and (data := self._blobs.get(record.request)) is not None:
                    evidence.append((seq, data))
            elif isinstance(record, Release):
                self._put(rows, record.manifest)
        rows.add_attempts(attempts)
        rows.add_withdrawals(withdrawn)
        rows.add_evidence(evidence)

    def _put(self, rows: Writer, digest: bytes) -> None:
        if digest in self._blobs:
            rows.put_blob(digest, self._blobs[digest])

    def _refuse_strays(self) -> None:
        if not self._blobs:
            return
        for digest in self._blobs.keys() - {digest for record in self.records for digest in _digests(record)}:
            raise LedgerError(
                "ledger.blob-digest-no",
                f"a blob has the digest {digest.hex()}, which no record of the batch holds",
                "leave it out",
            )


_EPOCH = NUMBERS[Epoch]
_HEADS = {kind: b"\xa5\x01" + uint(kind) + b"\x02" for kind in NUMBERS.values()}


def _claim(names: dict[Any, int], asked: Iterable[Any], at: int) -> None:
    for name in asked:
        if (before := names.setdefault(name, at)) != at:
            raise _twice(before, at)


def _twice(before: int, at: int) -> LedgerError:
    return LedgerError(
        "ledger.records-batch-same",
        f"records {before} and {at} of the batch are about the same",
        "append each once",
    )


def _stamp(time: int, epoch: int) -> bytes:
    return b"".join((b"\x03", uint(time), b"\x04", uint(epoch), b"\x05"))


def _linked(record: Epoch, previous: bytes | None) -> bytes:
    """The body of an epoch with the digest of the checkpoint before it."""
    if record.previous not in (None, previous):
        raise LedgerError(
            "ledger.epoch-names-another",
            "the epoch names another checkpoint than the last one",
            "leave previous out",
        )
    return leaf.body(replace(record, previous=previous))


def reader(rows: Reader) -> tiles.ReadTile:
    """Tiles of a transaction."""

    def read(level: int, index: int, width: int) -> bytes:
        data = rows.tile(level, index)
        if data is None:
            raise Damaged(
                "ledger.not",
                f"{tiles.path(level, index, width)} is not there",
                "restore the ledger from a copy",
            )
        return data

    return read


def _digests(record: Record) -> tuple[bytes, ...]:
    """The digests in a record whose bytes a store may keep."""
    if isinstance(record, Admitted):
        return (record.attestation,)
    if isinstance(record, Epoch):
        return (record.plan,)
    if isinstance(record, Release):
        return (record.manifest,)
    if isinstance(record, Withdrawal) and record.request is not None:
        return (record.request,)
    return ()
