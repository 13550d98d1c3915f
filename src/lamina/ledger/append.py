"""Appending a batch of records in one transaction.

Index keys, records that are there already, append rules, leaves and tiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

from lamina.errors import LedgerDamaged, LedgerError
from lamina.ledger import merkle, records
from lamina.ledger import records as leaf
from lamina.ledger.governance_records import (
    Aggregate,
    Header,
    KeyChange,
    KeyEvent,
    PolicyChange,
    Release,
    Role,
    Withdrawal,
    loosened,
    wrong_predecessor,
)
from lamina.ledger.key_state import KeyState
from lamina.ledger.merkle import Frontier, leaf_hashes
from lamina.ledger.records import (
    KIND_NUMBERS,
    ContributionRecord,
    Epoch,
    Record,
    SegmentOutcome,
    cbor_uint,
    decode_leaf,
)
from lamina.ledger.schema import rounded_epoch_time
from lamina.ledger.store.interface import AttemptRow, LeafRow, LedgerHead, StoreReader, StoreWriter

# Under which keys contributions are found again, and what may be in a ledger only once.
#
# Keys are digests, so each belongs at a random place of an index: a thousand new ones would touch a thousand pages,
# for every batch. Hence the index of the store grows in large steps, sorted, and the keys of the leaves after the
# last step are kept in memory by whoever needs them, from the leaves themselves. That is a bounded number, however
# long the ledger.

INDEX_KEY_BYTES = 16  # bytes: enough that nobody finds two with the same, and a small index
INDEX_STEP = 65_536  # leaves after which the index grows
_CONTRIBUTION_KIND = KIND_NUMBERS[ContributionRecord]
_ANCHOR_PREFIX = ord("a")


def descriptor_key(digest: bytes) -> bytes:
    """A contribution, by the digest of its descriptor: once, until it has expired and is pruned."""
    return b"d" + digest[: INDEX_KEY_BYTES - 1]


def anchor_key(digest: bytes) -> bytes:
    """A contribution, by its content anchor: any number of times."""
    return b"a" + digest[: INDEX_KEY_BYTES - 1]


def subject_key(tag: bytes) -> bytes:
    """A contribution, by the keyed tag of who it is about: once, for good."""
    return b"s" + tag[: INDEX_KEY_BYTES - 1]


def index_keys(record: ContributionRecord) -> list[bytes]:
    """All keys of a contribution."""
    keys = [descriptor_key(record.descriptor)]
    if record.anchor is not None:
        keys.append(anchor_key(record.anchor))
    if record.subject is not None:
        keys.append(subject_key(record.subject))
    return keys


def index_key_ranges(digits: str) -> list[tuple[bytes, bytes]]:
    """First and last key of descriptors, and of anchors, whose digest begins with these hex digits."""
    width = 2 * (INDEX_KEY_BYTES - 1)
    first, last = (bytes.fromhex(digits[:width].ljust(width, rest)) for rest in "0f")
    return [(make(first), make(last)) for make in (descriptor_key, anchor_key)]


def survives_pruning(key: bytes) -> bool:
    """Whether a key stays when its leaf is pruned."""
    return key[:1] == b"s"


class UnindexedKeys:
    """The keys of leaves [start, stop), which are not in the store's index yet."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._once: dict[bytes, int] = {}
        self._anchors: dict[bytes, list[int]] = {}

    def follow(self, rows: StoreReader, head: LedgerHead) -> None:
        """Make it the tail of what `rows` sees: read what others appended, forget what others indexed."""
        if head.indexed != self.start or head.size < self.stop:
            self.start = self.stop = head.indexed
            self._once.clear()
            self._anchors.clear()
        if self.stop < head.size:
            pairs = []
            for seq, data in rows.of_kind(_CONTRIBUTION_KIND, self.stop, head.size):
                record = records.decode_leaf(data).record
                assert isinstance(record, ContributionRecord)
                pairs += [(key, seq) for key in index_keys(record)]
            self.grow(pairs, head.size)

    def grow(self, pairs: Sequence[tuple[bytes, int]], stop: int) -> None:
        """Leaves up to `stop` are committed, with these keys."""
        anchors = [pair for pair in pairs if pair[0][0] == _ANCHOR_PREFIX]
        self._once.update([pair for pair in pairs if pair[0][0] != _ANCHOR_PREFIX] if anchors else pairs)
        for key, seq in anchors:
            self._anchors.setdefault(key, []).append(seq)
        self.stop = stop

    def find(self, rows: StoreReader, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """(key, seq) of every leaf that has one of these keys, indexed or not."""
        found = [(key, self._once[key]) for key in keys if key in self._once]
        found += [(key, seq) for key in keys if key in self._anchors for seq in self._anchors[key]]
        return [*found, *rows.find(keys)] if self.start else found

    def between(self, rows: StoreReader, first: bytes, last: bytes, most: int) -> list[bytes]:
        """The keys in [first, last], indexed or not, in order and each once; at most so many."""
        found = {key for keys in (self._once, self._anchors) for key in keys if first <= key <= last}
        for _ in range(most if self.start else 0):
            if not (there := rows.find_between(first, last, 1)):
                break
            found.add(there[0][0])  # an anchor may be that of any number of leaves: on from the key after it
            first = (int.from_bytes(there[0][0], "big") + 1).to_bytes(INDEX_KEY_BYTES, "big")
        return sorted(found)[:most]

    def index(self, rows: StoreWriter, more: Sequence[tuple[bytes, int]]) -> None:
        """Write everything, and `more`, into the index of the store, in order."""
        anchors = [(key, seq) for key, seqs in self._anchors.items() for seq in seqs]
        rows.add_keys(sorted([*self._once.items(), *anchors, *more], key=itemgetter(0)))


FindKeys = Callable[[Sequence[bytes]], Sequence[tuple[bytes, int]]]


def find_repeated_contributions(
    rows: StoreReader, find: FindKeys, once: Mapping[bytes, int], bodies: Sequence[bytes]
) -> dict[int, int]:
    """Position in the batch → leaf, of the contributions that are there. `once` are unique keys → position."""
    there = find(list(once)) if once else ()
    found = {
        once[key]: seq
        for key, seq in there
        if not survives_pruning(key) and _same_body(rows.leaf(seq), bodies[once[key]])
    }
    for key, seq in there:
        if found.get(once[key]) != seq:
            what = "subject" if survives_pruning(key) else "contribution"
            raise LedgerError(
                "ledger.record-batch-ledger",
                f"the {what} of record {once[key]} of the batch is in the ledger already, as leaf {seq}",
                "leave it out: it counts once, under the bound that was signed first",
            )
    return found


def find_repeated_epoch(rows: StoreReader, record: Epoch) -> int | None:
    """The leaf in which the same segments were closed in the same way."""
    seqs = {rows.attempt(*attempt) for attempt in record.attempts}
    if seqs == {None}:
        return None
    seq = next(iter(seqs)) if len(seqs) == 1 else None
    if seq is not None:
        there = _read_record(rows, seq)
        if isinstance(there, Epoch) and replace(record, previous=there.previous) == there:
            return seq
    first = min(one for one in seqs if one is not None)
    raise LedgerError(
        "ledger.segment-run-ledger",
        f"a segment of run {record.run.hex()[:8]} is in the ledger already, as leaf {first}, with another content",
        "give the next attempt a generation of its own: what was charged stays charged",
    )


def find_repeated_withdrawal(rows: StoreReader, record: Withdrawal, body: bytes, size: int) -> int | None:
    """The leaf in which the same contribution was withdrawn for the same reason."""
    data = rows.leaf(record.target) if record.target < size else None
    parts = records.split_leaf(data) if data is not None else None
    if parts is None or parts[0] != _CONTRIBUTION_KIND:
        state = "is pruned or no contribution" if record.target < size else "is not there"
        raise LedgerError(
            "ledger.leaf-not-withdrawn",
            f"leaf {record.target} cannot be withdrawn: it {state}",
            "give the leaf of a contribution",
        )
    seq = rows.withdrawn(record.target)
    if seq is not None and not _same_body(rows.leaf(seq), body):
        raise LedgerError(
            "ledger.leaf-withdrawn-already",
            f"leaf {record.target} was withdrawn already, in leaf {seq}",
            "nothing is left to do: it is out",
        )
    return seq


def _same_body(there: bytes | None, body: bytes) -> bool:
    parts = records.split_leaf(there) if there is not None else None
    return parts is not None and there is not None and there[parts[4] :] == body


def _read_record(rows: StoreReader, seq: int) -> Record | None:
    data = rows.leaf(seq)
    return None if data is None else records.decode_leaf(data).record


_RESERVED_KINDS = {Header, Aggregate}


def refuse_reserved_records(records: Sequence[Record]) -> None:
    """A header comes first and once; aggregates come from pruning."""
    for record in records:
        if type(record) in _RESERVED_KINDS:
            raise LedgerError(
                "ledger.not-appended-like",
                f"{type(record).__name__} is not appended like others",
                "a header comes first and once; prune writes aggregates",
            )


def check_may_follow(
    rows: StoreReader, records: Sequence[Record], header: Header, size: int, now: int, parties: Callable[[], KeyState]
) -> None:
    """LedgerError if one of the records may not follow the first `size` leaves and those before it."""
    policy: Header | PolicyChange | None = None
    keys: KeyState | None = None
    for record in records:
        if isinstance(record, Epoch):
            _check_epoch(record, header, size)
        elif isinstance(record, KeyEvent):
            keys = keys or parties()
            check_key_event(record, keys, now)
            keys.apply(record)
        elif isinstance(record, PolicyChange):
            keys = keys or parties()
            _check_policy_change(record, policy or _last_policy_record(rows, header, size), header.origin, keys, now)
            policy = record


def check_key_event(event: KeyEvent, keys: KeyState, now: int) -> None:
    """A key that is there, in its one role; and somebody is left who signs."""
    target = None if event.target is None else keys.get(event.target)
    if event.target is not None and target is None:
        raise LedgerError(
            "ledger.key-not-ledger",
            f"key {event.target.hex()[:16]} is not one of the ledger",
            "lamina ledger key LEDGER lists them",
        )
    if (new := event.key) is not None:
        known, role = keys.get(new.id), new.role.name.lower()
        if known is not None and known.role is not new.role:
            raise LedgerError(
                "ledger.key-already-not",
                f"key {new.id.hex()[:16]} is for {known.role.name.lower()} already, not for {role}",
                "make another key: one key has one role",
            )
        if known is not None and event.change is KeyChange.ROTATE:
            raise LedgerError(
                "ledger.key-ledger-already",
                f"key {new.id.hex()[:16]} is one of the ledger already, and cannot take over",
                "make a new key; or revoke the old one",
            )
        if target is not None and target.role is not new.role:
            raise LedgerError(
                "ledger.key-not-take",
                f"a key for {role} cannot take over from one for {target.role.name.lower()}",
                "give the new key the role of the old one",
            )
        if new.role is Role.LEDGER and new.name != keys.origin:
            raise LedgerError(
                "ledger.key-ledger-named",
                f"a key of the ledger is named {new.name!r}",
                f"name it like the ledger: {keys.origin!r}",
            )
    if event.change is KeyChange.REVOKE and target is not None and target.role is Role.LEDGER:
        _check_signing_key_left(event, keys, max(now, event.effective))


def _check_signing_key_left(event: KeyEvent, keys: KeyState, time: int) -> None:
    """Nothing after it could be signed, for good, if the last key that signs went."""
    others = (key.id for key in keys.all() if key.id != event.target)
    if all(keys.why_not_signing(kid, time) is not None for kid in others):
        raise LedgerError(
            "ledger.key-last-signs",
            f"key {(event.target or b'').hex()[:16]} is the last that signs checkpoints of {keys.origin!r}, "
            "and without it nothing could be signed any more",
            "let a new key take over, sign a checkpoint with the old one, and revoke it with the new one",
        )


def _check_policy_change(
    change: PolicyChange, before: Header | PolicyChange, origin: str, keys: KeyState, now: int
) -> None:
    names = [each.cls for each in change.presets]
    if len(set(names)) < len(names):
        raise LedgerError("ledger.policy-names-class", "the policy names a class twice", "name each once")
    looser = loosened(before.floors, before.presets, change.floors, change.presets)
    if looser and not keys.signed_by_two(change, origin, now):
        raise LedgerError(
            "ledger.policy-protect-less", f"the policy would protect less: {looser[0]}", "have it signed by two parties"
        )
    if (wrong := wrong_predecessor(change, before)) is not None:
        raise LedgerError(
            "ledger.policy-not-changed",
            f"the policy cannot be changed so: {wrong}",
            "make the change anew, and have that signed",
        )
    good = keys.signers(change.message(origin), change.signatures, (Role.LEDGER, Role.AUDITOR), now)
    for signed in change.signatures:
        if signed.key not in good:
            raise LedgerError(
                "ledger.signature-policy-key",
                f"the signature of the policy by key {signed.key.hex()[:16]} does not count",
                "give those of the ledger's keys and auditors, over this very change, or leave it out",
            )


def _check_epoch(record: Epoch, header: Header, size: int) -> None:
    closed = sum(each.outcome is SegmentOutcome.CLOSED for each in record.segments)
    if closed > header.granularity:
        raise LedgerError(
            "ledger.epoch-closes-segments",
            f"an epoch closes {closed} segments, the header allows {header.granularity}",
            "split it",
        )
    for each in record.segments:
        if each.eligibility > size:
            raise LedgerError(
                "ledger.segment-opened-after",
                f"segment {each.index} was opened after {each.eligibility} leaves, the ledger has {size}",
                "give the size of the ledger when its membership was frozen",
            )


def _last_policy_record(rows: StoreReader, header: Header, size: int) -> Header | PolicyChange:
    last: Header | PolicyChange = header
    for _, data in rows.of_kind(KIND_NUMBERS[PolicyChange], 0, size):
        record = decode_leaf(data).record
        assert isinstance(record, PolicyChange)
        last = record
    return last


@dataclass(frozen=True, slots=True)
class AppendContext:
    """Where a batch goes: the head, the time, the header's epoch_clock, the digest of the last checkpoint, the tail."""

    head: LedgerHead
    now: int
    step: int
    previous: bytes | None
    tail: UnindexedKeys


class AppendBatch:
    """Records that are appended together, and the bytes that they refer to by digest.

    What does not depend on the place in the ledger is made here, before anybody is kept waiting. `grown` is what the
    tail must learn once the transaction is committed.
    """

    def __init__(self, records: Sequence[Record], blobs: Iterable[bytes]) -> None:
        self.records = list(records)
        self.bodies = [leaf.encode_body(record) for record in self.records]  # refuses what is no record
        self._once: dict[bytes, int] = {}  # keys that may be in a ledger once → position
        self._anchors: list[tuple[bytes, int]] = []
        others: dict[Any, int] = {}  # attempts and targets
        self.others: list[Record] = []  # that are no contributions
        for at, record in enumerate(self.records):
            if type(record) is ContributionRecord:
                self._name(at, record)
                continue
            self.others.append(record)
            if isinstance(record, Epoch):
                _claim_once(others, record.attempts, at)
            elif isinstance(record, Withdrawal):
                _claim_once(others, (record.target,), at)
        self._blobs = {hashlib.sha256(data).digest(): data for data in blobs}
        self._refuse_unreferenced_blobs()
        self.new_index_keys: list[tuple[bytes, int]] = []
        self.stop = 0

    def _name(self, at: int, record: ContributionRecord) -> None:
        key = descriptor_key(record.descriptor)
        if (before := self._once.setdefault(key, at)) != at:
            raise _repeated_in_batch(before, at)
        if record.subject is not None:
            _claim_once(self._once, (subject_key(record.subject),), at)
        if record.anchor is not None:
            self._anchors.append((anchor_key(record.anchor), at))

    def write(self, rows: StoreWriter, stand: AppendContext) -> list[int]:
        """Append what is not there yet; the leaf of every record, in order."""
        self.new_index_keys, self.stop = [], 0  # of an attempt that was not committed
        head, there = stand.head, self._find_repeated(rows, stand)
        new = [at for at in range(len(self.records)) if at not in there] if there else range(len(self.records))
        if new:
            self._write(rows, stand, new)
        fresh = iter(range(head.size, head.size + len(new)))
        return [there[at] if at in there else next(fresh) for at in range(len(self.records))]

    def _find_repeated(self, rows: StoreWriter, stand: AppendContext) -> dict[int, int]:
        tail = stand.tail
        tail.follow(rows, stand.head)
        found = find_repeated_contributions(rows, lambda keys: tail.find(rows, keys), self._once, self.bodies)
        for at, record in enumerate(self.records):
            if type(record) is Epoch:
                seq = find_repeated_epoch(rows, record)
            elif type(record) is Withdrawal:
                seq = find_repeated_withdrawal(rows, record, self.bodies[at], stand.head.size)
            else:
                continue
            if seq is not None:
                found[at] = seq
        return found

    def _write(self, rows: StoreWriter, stand: AppendContext, new: Sequence[int]) -> None:
        head = stand.head
        placed, time, epoch = self._encode_leaves(new, stand)
        frontier = Frontier.decode(head.frontier)
        if frontier.size != head.size:
            raise LedgerDamaged(
                "ledger.edge-tree-leaves",
                f"the edge of the tree has {frontier.size} leaves, the ledger {head.size}",
                "restore it",
            )
        changed = merkle.grow_tiles(frontier, leaf_hashes([data for _, _, data in placed]), tile_reader(rows))
        rows.add_leaves(placed)
        rows.put_tiles(changed)
        self._write_side_rows(rows, new, head.size)
        keys, size = chain(self._once.items(), self._anchors), head.size
        if len(new) == len(self.records):
            self.new_index_keys = [(key, size + at) for key, at in keys]
        else:
            seqs = dict(zip(new, range(size, frontier.size), strict=True))
            self.new_index_keys = [(key, seqs[at]) for key, at in keys if at in seqs]
        self.stop = frontier.size
        indexed = head.indexed
        if frontier.size - indexed >= INDEX_STEP:
            stand.tail.index(rows, self.new_index_keys)
            indexed = frontier.size
        rows.put_head(LedgerHead(frontier.size, time, epoch, indexed, frontier.encode()))

    def _encode_leaves(self, new: Sequence[int], stand: AppendContext) -> tuple[list[LeafRow], int, int]:
        """The leaves, the time of the last one, and the epochs that are closed after it."""
        time, epoch = stand.head.time, stand.head.epoch
        placed: list[LeafRow] = []
        stamp = b""  # time and epoch in CBOR: the same for most leaves of a batch
        for seq, at in enumerate(new, start=stand.head.size):
            record, body = self.records[at], self.bodies[at]
            kind = KIND_NUMBERS[type(record)]
            if kind == _EPOCH_KIND:
                assert isinstance(record, Epoch)
                time, body = (rounded_epoch_time(time, stand.now, stand.step), _epoch_body(record, stand.previous))
                leaf_stamp, stamp = _encode_time_epoch(time, epoch), b""
                epoch += 1
            else:
                if not stamp:
                    time, stamp = stand.now, _encode_time_epoch(stand.now, epoch)
                leaf_stamp = stamp
            placed.append((seq, kind, _LEAF_HEADS[kind] + cbor_uint(seq) + leaf_stamp + body))
        return placed, time, epoch

    def _write_side_rows(self, rows: StoreWriter, new: Sequence[int], first: int) -> None:
        """What single records have beside their leaf."""
        attempts: list[AttemptRow] = []
        withdrawn: list[tuple[int, int]] = []
        evidence: list[tuple[int, bytes]] = []
        for seq, at in enumerate(new, start=first):
            record = self.records[at]
            if type(record) is ContributionRecord:
                if self._blobs and (data := self._blobs.get(record.attestation)) is not None:
                    evidence.append((seq, data))
            elif isinstance(record, Epoch):
                attempts += [AttemptRow(*attempt, seq) for attempt in record.attempts]
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

    def _put(self, rows: StoreWriter, digest: bytes) -> None:
        if digest in self._blobs:
            rows.put_blob(digest, self._blobs[digest])

    def _refuse_unreferenced_blobs(self) -> None:
        if not self._blobs:
            return
        for digest in self._blobs.keys() - {digest for record in self.records for digest in _blob_digests(record)}:
            raise LedgerError(
                "ledger.blob-digest-no",
                f"a blob has the digest {digest.hex()}, which no record of the batch holds",
                "leave it out",
            )


_EPOCH_KIND = KIND_NUMBERS[Epoch]
_LEAF_HEADS = {kind: b"\xa5\x01" + cbor_uint(kind) + b"\x02" for kind in KIND_NUMBERS.values()}


def _claim_once(names: dict[Any, int], asked: Iterable[Any], at: int) -> None:
    for name in asked:
        if (before := names.setdefault(name, at)) != at:
            raise _repeated_in_batch(before, at)


def _repeated_in_batch(before: int, at: int) -> LedgerError:
    return LedgerError(
        "ledger.records-batch-same", f"records {before} and {at} of the batch are about the same", "append each once"
    )


def _encode_time_epoch(time: int, epoch: int) -> bytes:
    return b"".join((b"\x03", cbor_uint(time), b"\x04", cbor_uint(epoch), b"\x05"))


def _epoch_body(record: Epoch, previous: bytes | None) -> bytes:
    """The body of an epoch with the digest of the checkpoint before it."""
    if record.previous not in (None, previous):
        raise LedgerError(
            "ledger.epoch-names-another", "the epoch names another checkpoint than the last one", "leave previous out"
        )
    return leaf.encode_body(replace(record, previous=previous))


def tile_reader(rows: StoreReader) -> merkle.ReadTile:
    """Tiles of a transaction."""

    def read(level: int, index: int, width: int) -> bytes:
        data = rows.tile(level, index)
        if data is None:
            raise LedgerDamaged(
                "ledger.not", f"{merkle.tile_path(level, index, width)} is not there", "restore the ledger from a copy"
            )
        return data

    return read


def _blob_digests(record: Record) -> tuple[bytes, ...]:
    """The digests in a record whose bytes a store may keep."""
    if isinstance(record, ContributionRecord):
        return (record.attestation,)
    if isinstance(record, Epoch):
        return (record.plan,)
    if isinstance(record, Release):
        return (record.manifest,)
    if isinstance(record, Withdrawal) and record.request is not None:
        return (record.request,)
    return ()
