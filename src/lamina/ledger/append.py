"""Append a batch of records in one transaction: repeated records, append rules, leaves and tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count
from operator import attrgetter
from typing import Any

from lamina.errors import LedgerDamaged, LedgerError
from lamina.ledger import merkle
from lamina.ledger.append_rules import Place, check_record
from lamina.ledger.checked_leaves import CheckedLeaves, tokens_of
from lamina.ledger.contribution_columns import INDEX_KEY_BYTES, SUBJECT_PREFIX, descriptor_key, subject_key
from lamina.ledger.governance_records import GoverningRecord, Withdrawal
from lamina.ledger.merkle import Frontier, leaf_hashes
from lamina.ledger.records import (
    CONTRIBUTION_STARTS,
    KINDS,
    ContributionRecord,
    EncodedRecord,
    Epoch,
    Record,
    cbor_uint,
    cbor_uints,
    decode_leaf,
    encode_record,
    encode_time_epoch,
    leaf_tail,
)
from lamina.ledger.run_history import RecordedRuns
from lamina.ledger.run_records import RunBegin, RunEnd, RunRecord
from lamina.ledger.schema import rounded_epoch_time
from lamina.ledger.store.rows import AttemptRow, LeafRow, LedgerHead, StoredLeaf, StoreReader, StoreWriter, tile_reader


def find_repeated_contributions(
    rows: StoreReader, leaves: CheckedLeaves, once: Mapping[bytes, int], encoded: Sequence[EncodedRecord]
) -> dict[int, int]:
    """Position in the batch → leaf, of the contributions that are there. `once` are unique keys → position."""
    there = leaves.find(rows, list(once))
    found = {once[key]: seq for key, seq in there if _same_record(leaves.leaf(rows, seq), encoded[once[key]])}
    for key, seq in there:
        if found.get(once[key]) != seq:
            what = "subject" if key[0] == SUBJECT_PREFIX else "contribution"
            problem = f"the {what} of record {once[key]} is in the ledger already, as leaf {seq}"
            remedy = "leave it out: it counts once, under the bound that was signed first"
            raise LedgerError("ledger.already-admitted", problem, remedy)
    return found


def find_repeated_epoch(rows: StoreReader, record: Epoch, leaves: CheckedLeaves) -> int | None:
    """Return the leaf that already closes the same segments in the same way, or None."""
    known = leaves.attempts(rows)
    seqs = {known.get(attempt) for attempt in record.attempts}
    if seqs == {None}:
        return None
    seq = next(iter(seqs)) if len(seqs) == 1 else None
    if seq is not None:
        there = next(leaves.records(rows, Epoch, seq, seq + 1)).record
        if isinstance(there, Epoch) and replace(record, previous=there.previous) == there:
            return seq
    first = min(one for one in seqs if one is not None)
    problem = f"a segment of run {record.run.hex()[:8]} was closed otherwise in leaf {first}"
    remedy = "give the next attempt its own generation: what was charged stays charged"
    raise LedgerError("ledger.segment-already-closed", problem, remedy)


def find_repeated_withdrawal(
    rows: StoreReader, record: Withdrawal, encoded: EncodedRecord, leaves: CheckedLeaves
) -> int | None:
    """Return the leaf that already withdraws the same contribution for the same reason, or None."""
    size = leaves.size
    data = leaves.leaf(rows, record.target) if record.target < size else None
    if data is None or type(decode_leaf(data).record) is not ContributionRecord:
        state = "is pruned or no contribution" if record.target < size else "is not there"
        problem = f"cannot withdraw leaf {record.target}: it {state}"
        raise LedgerError("ledger.withdrawal-target", problem, "give the leaf of a contribution")
    seq = leaves.withdrawals(rows).get(record.target)
    if seq is not None and not _same_record(leaves.leaf(rows, seq), encoded):
        raise LedgerError("ledger.already-withdrawn", f"leaf {record.target} was withdrawn already, in leaf {seq}")
    return seq


def find_repeated_run_record(
    rows: StoreReader, record: RunRecord, encoded: EncodedRecord, leaves: CheckedLeaves
) -> int | None:
    """Return the leaf that already holds the same record, or None."""
    there = leaves.records(rows, type(record))
    return next((leaf.seq for leaf in there if _same_record(leaves.leaf(rows, leaf.seq), encoded)), None)


def _same_record(there: StoredLeaf | None, encoded: EncodedRecord) -> bool:
    """Return whether a leaf, pruned or not, holds this record, by the hash of the body."""
    head, tail, _ = encoded
    return there is not None and leaf_tail(there.leaf) == tail and there.leaf[:3] == head[:3]


def check_may_follow(records: Sequence[Record], place: Place, leaves: Callable[[], CheckedLeaves]) -> None:
    """Raise LedgerError if one of the records, which are no contributions, may not follow all leaves and those before it."""
    governing = sum(isinstance(record, GoverningRecord) for record in records)
    if governing > 1:
        problem = f"the batch has {governing} governing records, each of which must name the leaf before it"
        raise LedgerError("ledger.several-governing-records", problem, "append one after the other")
    if governing and any(isinstance(record, Withdrawal) for record in records):
        problem = "the batch has a withdrawal beside a governing record, which may change who may withdraw"
        raise LedgerError("ledger.withdrawal-beside-governing-record", problem, "append one after the other")
    runs = cache(lambda: _recorded_runs(place.rows, leaves()))
    for record in records:
        check_record(record, replace(place, runs=runs))
        if runs.cache_info().currsize:
            runs().see(record)


def _recorded_runs(rows: StoreReader, leaves: CheckedLeaves) -> RecordedRuns:
    """Attempts, starts and ends of runs in all leaves."""
    found = RecordedRuns()
    before = chain.from_iterable(leaves.records(rows, kind) for kind in (RunBegin, Epoch, RunEnd))
    for leaf in sorted(before, key=attrgetter("seq")):
        found.see(leaf.record)
    return found


@dataclass(frozen=True, slots=True)
class AppendContext:
    """Position at which a batch is appended: the head, the time, the header's epoch_clock, the digest of the last checkpoint.

    `header_hash` is that of leaf 0, once it is there.

    `check` takes positions in the batch and refuses records that may not come next. `leaves` returns the leaves
    before the batch.
    """

    head: LedgerHead
    now: int
    step: int
    previous: bytes | None
    header_hash: bytes | None = None
    check: Callable[[Sequence[int]], None] = lambda at: None
    leaves: Callable[[], CheckedLeaves] | None = None


class AppendBatch:
    """Records that are appended together, and the bytes that they refer to by digest.

    Everything that does not depend on the place in the ledger is prepared here, before the ledger is locked.
    """

    def __init__(self, records: Sequence[Record], blobs: Iterable[bytes]) -> None:
        self.records = list(records)
        self.encoded = list(map(encode_record, self.records))  # refuses what is no record
        self.others = [record for record in self.records if type(record) is not ContributionRecord]
        self._once = self._name()
        others: dict[Any, int] = {}
        for at, record in enumerate(self.records if self.others else ()):
            _claim_once(others, ((type(record), claim) for claim in KINDS[type(record)].claims(record)), at)
        self._blobs = {hashlib.sha256(data).digest(): data for data in blobs}
        self._refuse_unreferenced_blobs()
        self._begin()

    def _begin(self) -> None:
        """Discard what an earlier try that was not committed has left."""
        self.new_keys: dict[bytes, int] = {}  # keys of the contributions that were written → leaf
        self.hashes: list[bytes] = []  # hashes of the leaves that were written
        self.placed: list[LeafRow] = []  # rows of written leaves that are not contributions
        self.after: LedgerHead | None = None
        self.frontier = Frontier()

    def _name(self) -> dict[bytes, int]:
        """Keys of contributions, each of which may be in a ledger once → position."""
        given = [(at, one) for at, one in enumerate(self.records) if type(one) is ContributionRecord]
        subjects = [(subject_key(one.subject), at) for at, one in given if one.subject is not None]
        once = {b"d" + one.descriptor[: INDEX_KEY_BYTES - 1]: at for at, one in given}  # as `descriptor_key`, faster
        once.update(subjects)
        if len(once) < len(given) + len(subjects):
            first: dict[Any, int] = {}
            for key, at in chain(((descriptor_key(one.descriptor), at) for at, one in given), subjects):
                _claim_once(first, (key,), at)
        return once

    def write(self, rows: StoreWriter, stand: AppendContext) -> list[int]:
        """Append the records that are not in the ledger yet; return the leaf of every record, in order."""
        self._begin()
        head, there = stand.head, self._find_repeated(rows, stand)
        new = [at for at in range(len(self.records)) if at not in there] if there else range(len(self.records))
        if new:
            stand.check(new)
            self._write(rows, stand, new)
        fresh = iter(range(head.size, head.size + len(new)))
        return [there[at] if at in there else next(fresh) for at in range(len(self.records))]

    def _find_repeated(self, rows: StoreWriter, stand: AppendContext) -> dict[int, int]:
        found: dict[int, int] = {}
        if self._once and stand.leaves is not None:
            found = find_repeated_contributions(rows, stand.leaves(), self._once, self.encoded)
        for at, record in enumerate(self.records if self.others else ()):
            if type(record) is Epoch and stand.leaves is not None:
                seq = find_repeated_epoch(rows, record, stand.leaves())
            elif type(record) is Withdrawal and stand.leaves is not None:
                seq = find_repeated_withdrawal(rows, record, self.encoded[at], stand.leaves())
            elif isinstance(record, RunRecord) and stand.leaves is not None:
                seq = find_repeated_run_record(rows, record, self.encoded[at], stand.leaves())
            else:
                continue
            if seq is not None:
                found[at] = seq
        return found

    def _write(self, rows: StoreWriter, stand: AppendContext, new: Sequence[int]) -> None:
        head = stand.head
        placed, time, epoch = self._encode_leaves(new, stand)
        frontier = self.frontier = Frontier.decode(head.frontier)
        if frontier.size != head.size:
            problem = f"the tree has {frontier.size} leaves, the ledger {head.size}"
            raise LedgerDamaged("ledger.head-inconsistent", problem, "restore the ledger from a copy")
        self.hashes = leaf_hashes([data for _, data, _ in placed])
        self.placed = [each for each in placed if each[1][:3] not in CONTRIBUTION_STARTS] if self.others else []
        changed = merkle.grow_tiles(frontier, self.hashes, tile_reader(rows))
        rows.add("leaf", placed)
        rows.put_tiles(changed)
        self._write_side_rows(rows, new, head.size, stand.header_hash)
        seqs = dict(zip(new, range(head.size, frontier.size), strict=True))
        self.new_keys = {key: seqs[at] for key, at in self._once.items() if at in seqs}
        self.after = LedgerHead(frontier.size, time, epoch, frontier.encode())
        rows.put_head(self.after)

    def _encode_leaves(self, new: Sequence[int], stand: AppendContext) -> tuple[list[LeafRow], int, int]:
        """Return the rows of the leaves, the time of the last one, and the number of epochs after it."""
        time, epoch = stand.head.time, stand.head.epoch
        placed: list[LeafRow] = []
        if not self.others:
            stamp = encode_time_epoch(stand.now, epoch)
            numbers = cbor_uints(stand.head.size, len(new))
            parts = self.encoded if len(new) == len(self.encoded) else [self.encoded[at] for at in new]
            placed = [
                (seq, b"".join((start, number, stamp, tail)), body)
                for seq, number, (start, tail, body) in zip(count(stand.head.size), numbers, parts, strict=False)
            ]
            return placed, stand.now, epoch
        stamp = b""  # time and epoch in CBOR: the same for most leaves of a batch
        for seq, at in enumerate(new, start=stand.head.size):
            record, (start, tail, body) = self.records[at], self.encoded[at]
            if isinstance(record, Epoch | RunRecord):  # an exact time would reveal how long steps took
                time = rounded_epoch_time(time, stand.now, stand.step)
                leaf_stamp, stamp = encode_time_epoch(time, epoch), b""
                if isinstance(record, Epoch):
                    _, tail, body = _encode_epoch(record, stand.previous)
                    epoch += 1
            else:
                if not stamp:
                    time, stamp = stand.now, encode_time_epoch(stand.now, epoch)
                leaf_stamp = stamp
            placed.append((seq, start + cbor_uint(seq) + leaf_stamp + tail, body))
        return placed, time, epoch

    def _write_side_rows(self, rows: StoreWriter, new: Sequence[int], first: int, header_hash: bytes | None) -> None:
        """Write what records have beside their leaves: attempts, attestations, requests, plans and manifests."""
        if not self.others and not self._blobs:
            return
        attempts: list[AttemptRow] = []
        evidence: list[tuple[int, bytes]] = []
        tokens: set[bytes] = set()
        for seq, at in enumerate(new, start=first):
            record = self.records[at]
            if type(record) is ContributionRecord:
                if self._blobs and (data := self._blobs.get(record.attestation)) is not None:
                    evidence.append((seq, data))
                    tokens.update(tokens_of(data, header_hash))
            elif isinstance(record, Withdrawal):
                if record.request is not None and (data := self._blobs.get(record.request)) is not None:
                    evidence.append((seq, data))
            else:
                for digest in self._blobs.keys() & KINDS[type(record)].digests(record):
                    rows.put_blob(digest, self._blobs[digest])
                if isinstance(record, Epoch):
                    attempts += [AttemptRow(*attempt, seq) for attempt in record.attempts]
        rows.add("attempt", attempts)
        rows.add("evidence", evidence)
        rows.add("token", [(token,) for token in sorted(tokens - rows.tokens(list(tokens)))])

    def _refuse_unreferenced_blobs(self) -> None:
        if not self._blobs:
            return
        for digest in self._blobs.keys() - {
            digest for record in self.records for digest in KINDS[type(record)].digests(record)
        }:
            problem = f"no record of the batch refers to the blob {digest.hex()}"
            raise LedgerError("ledger.blob-unreferenced", problem, "leave it out")


def _claim_once(names: dict[Any, int], asked: Iterable[Any], at: int) -> None:
    for name in asked:
        if (before := names.setdefault(name, at)) != at:
            problem = f"records {before} and {at} of the batch are about the same thing"
            raise LedgerError("ledger.batch-repeats", problem, "append each once")


def _encode_epoch(record: Epoch, previous: bytes | None) -> EncodedRecord:
    """Encode an epoch with the digest of the checkpoint before it."""
    if record.previous not in (None, previous):
        problem = "the epoch names another checkpoint than the last one"
        raise LedgerError("ledger.epoch-wrong-previous", problem, "leave `previous` out")
    return encode_record(replace(record, previous=previous))
