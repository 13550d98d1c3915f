"""Contributions as columns: many leaves of one layout at a time, and the index of a store compared with them.

Leaves of contributions differ only in a few fields of known width. So the strict reader reads one of them, and the
others are compared with it byte by byte where they must be equal; their fields become columns, without a Python object
for each. Leaves that differ elsewhere are grouped again, or left to the strict reader: nothing is ever read here that
`decode_leaf` would refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lamina.account.charges import Account
from lamina.errors import EncodingError
from lamina.ledger.merkle import hash_all
from lamina.ledger.records import (
    CONTRIBUTION_BODY,
    CONTRIBUTION_LEAF,
    CONTRIBUTION_STARTS,
    ContributionRecord,
    ContributionTerms,
    KeptContribution,
    KeptLeaf,
    Leaf,
    decode_kept,
    decode_leaf,
)
from lamina.ledger.store.rows import LeafBlock, StoredLeaf
from lamina.sign.keys import LAST_SECOND

# Index keys: contributions are found by them, and those of descriptors and subjects are unique in a ledger.
#
# Keys are digests, so each belongs at a random place of an index: a thousand new ones would touch a thousand pages,
# for every batch. Hence the index of the store grows in large, sorted steps. The keys of the leaves after the last step
# are read from the leaves and kept in memory. Their number is bounded, however long the ledger is.

INDEX_KEY_BYTES = 16  # long enough to rule out collisions, short enough for a small index
_DIGEST_PART = INDEX_KEY_BYTES - 1
ANCHOR_PREFIX, SUBJECT_PREFIX = b"as"


def descriptor_key(digest: bytes) -> bytes:
    """Return the key of a descriptor digest. It stays unique in a ledger."""
    return b"d" + digest[:_DIGEST_PART]


def anchor_key(digest: bytes) -> bytes:
    """Return the key of a content anchor. It may occur several times, and is found while the body is kept."""
    return b"a" + digest[:_DIGEST_PART]


def subject_key(tag: bytes) -> bytes:
    """Return the key of a subject tag. It stays unique in a ledger."""
    return b"s" + tag[:_DIGEST_PART]


def index_keys(record: ContributionRecord | KeptContribution) -> list[bytes]:
    """Return all index keys of a contribution."""
    keys = [descriptor_key(record.descriptor)]
    if isinstance(record, ContributionRecord) and record.anchor is not None:
        keys.append(anchor_key(record.anchor))
    if record.subject is not None:
        keys.append(subject_key(record.subject))
    return keys


def index_key_ranges(digits: str) -> list[tuple[bytes, bytes]]:
    """Return the first and last key of descriptors, and of anchors, whose digest begins with these hex digits."""
    width = 2 * (INDEX_KEY_BYTES - 1)
    first, last = (bytes.fromhex(digits[:width].ljust(width, rest)) for rest in "0f")
    return [(make(first), make(last)) for make in (descriptor_key, anchor_key)]


Contribution = ContributionRecord | KeptContribution
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Prefixes = NDArray[np.uint64]  # the first 8 bytes of digests

_MOST_LAYOUTS = 32  # different layouts in one block; the rest is read one by one
_MOST_NEW_KEYS = 65_536  # keys in a dictionary before they are sorted into columns
_FEWEST_ROWS = 16  # fewer leaves than these are read one by one
_NONE, _NO_PREFIXES = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
_SEQ, _TIME, _EPOCH, _BODY_HASH, _DESCRIPTOR, _END = range(1, 7)  # groups of the leaf
_ATTESTATION, _KEY, _BEGIN = range(7, 10)  # and, counted on, of the body


@dataclass(frozen=True, slots=True)
class ContributionColumns:
    """Contributions of one layout, bound and set of terms. `rows` are their positions in the block.

    Of those whose bodies are pruned there are no terms, and nothing of what comes after these.
    """

    rows: Ints
    seq: Ints
    time: Ints
    epoch: Ints
    expires: Ints
    bound: Account
    descriptor: Prefixes
    subject: Prefixes | None
    keys: tuple[Bytes, ...]  # their index keys: of descriptors, and of subjects and anchors if they have them
    terms: ContributionTerms | None
    not_before: Ints | None = None
    attestation: Prefixes | None = None
    key: Prefixes | None = None
    kids: frozenset[bytes] = frozenset()


def other_kinds(data: LeafBlock) -> list[int]:
    """Positions of the leaves that do not begin like a contribution."""
    if CONTRIBUTION_STARTS.issuperset(map(itemgetter(slice(3)), data.leaves)):  # most blocks have no other
        return []
    return [at for at, one in enumerate(data.leaves) if one[:3] not in CONTRIBUTION_STARTS]


def kept_contributions(blocks: Iterable[Sequence[bytes]]) -> Iterator[ContributionColumns | KeptLeaf]:
    """Yield the contributions among these leaves: as columns where several share a layout, otherwise one by one.

    Columns keep only leaf, expiry, bound and index keys.
    """
    for block in blocks:
        leaves = [leaf for leaf in block if leaf[:3] in CONTRIBUTION_STARTS]
        for group in read_columns(LeafBlock(leaves, [None] * len(leaves))):
            if isinstance(group, ContributionColumns):
                yield replace(group, rows=_NONE, time=_NONE, epoch=_NONE, descriptor=_NO_PREFIXES, subject=None)
            else:
                yield from (decode_kept(leaves[at]) for at in group.tolist())


def read_columns(block: LeafBlock) -> Iterator[ContributionColumns | Ints]:
    """The block in groups of one layout; last, the positions of the leaves to be read one by one."""
    left: list[Ints] = []
    in_leaf: Ints = np.fromiter(map(len, block.leaves), np.int64, len(block))
    in_body: Ints = np.fromiter([-1 if body is None else len(body) for body in block.bodies], np.int64, len(block))
    widths = in_leaf << 32 | in_body + 1
    for width in np.unique(widths):
        rows: Ints = np.flatnonzero(widths == width)
        for _ in range(_MOST_LAYOUTS):
            if len(rows) < _FEWEST_ROWS:
                break
            found = _same_layout_group(block, rows)
            if found is None:
                left.append(rows[:1])
                rows = rows[1:]
                continue
            made, rows = found
            yield made
        left.append(rows)
    if len(alone := np.sort(np.concatenate(left))) if left else 0:
        yield alone


def _same_layout_group(block: LeafBlock, rows: Ints) -> tuple[ContributionColumns, Ints] | None:
    """The leaves of the same layout as the first, and the other rows; None if the first is no valid contribution."""
    model = block[int(rows[0])]
    try:
        first = decode_leaf(model).record
    except EncodingError:
        return None
    fields = _layout(model)
    if fields is None or not isinstance(first, ContributionRecord | KeptContribution):
        return None
    keys = [(b"d", fields[_DESCRIPTOR])]
    if first.subject is not None:
        keys.append((b"s", _Field(0, len(model.leaf) - 32, len(model.leaf))))
    if isinstance(first, ContributionRecord) and first.anchor is not None:
        keys.append((b"a", _Field(1, len(model.body or b"") - 32, len(model.body or b""))))
    alike = block if len(rows) == len(block) else block.pick(rows.tolist())
    bodies = cast(Sequence[bytes], alike.bodies if model.body is not None else ())  # of one width: all, or none
    tables = [_table(alike.leaves), _table(bodies)] if bodies else [_table(alike.leaves)]
    fixed = [np.ones(table.shape[1], dtype=np.bool_) for table in tables]
    numbers = [group for group in (_SEQ, _TIME, _EPOCH, _END, _BEGIN) if group in fields]
    for group, (part, start, stop) in fields.items():
        fixed[part][start + (group in numbers and stop - start > 1) : stop] = False  # the width of a number stays
    for _, (part, start, stop) in keys:
        fixed[part][start:stop] = False
    same: Flags = np.ones(len(rows), dtype=np.bool_)
    for table, columns in zip(tables, fixed, strict=True):
        same &= (table[:, columns] == table[0, columns]).all(axis=1)
    values = {group: _number_column(_column(tables, fields[group])) for group in numbers}
    for group, column in values.items():
        same &= column >= _LEAST_BY_WIDTH[(width := fields[group].stop - fields[group].start)]
        if width == 1:
            same &= column < 24
    same &= (values[_TIME] <= LAST_SECOND) & (values[_END] <= LAST_SECOND)
    if bodies:
        same &= values[_BEGIN] < values[_END]
        stated, hashes = _column(tables, fields[_BODY_HASH]), _table(hash_all(bodies))
        if stated.tobytes() != hashes.tobytes():
            same &= (stated == hashes).all(axis=1)
    others = rows[~same]
    if len(others):
        rows, tables = rows[same], [table[same] for table in tables]
        values = {group: column[same] for group, column in values.items()}
    made = ContributionColumns(
        rows=rows,
        seq=values[_SEQ],
        time=values[_TIME],
        epoch=values[_EPOCH],
        expires=values[_END],
        bound=first.bound,
        descriptor=_prefixes(_column(tables, fields[_DESCRIPTOR])),
        subject=None if first.subject is None else _prefixes(_column(tables, keys[1][1])),
        keys=tuple(_index_keys(prefix, _column(tables, field)) for prefix, field in keys),
        terms=None,
    )
    if isinstance(first, ContributionRecord):
        kids = _column(tables, fields[_KEY])
        made = replace(
            made,
            terms=first.terms,
            not_before=values[_BEGIN],
            attestation=_prefixes(_column(tables, fields[_ATTESTATION])),
            key=_prefixes(kids),
            kids=frozenset(kids.view("V32").ravel().tolist()),
        )
    return made, others


class _Field(NamedTuple):
    """Where a field is: in the leaf (0) or the body (1), and which of its bytes."""

    part: int
    start: int
    stop: int


def _layout(model: StoredLeaf) -> dict[int, _Field] | None:
    """Where the fields are; None if there are none."""
    found = [CONTRIBUTION_LEAF.match(model.leaf)]
    if model.body is not None:
        found.append(CONTRIBUTION_BODY.match(model.body))
    spans = [(part, *each.span(n)) for part, each in enumerate(found) if each for n in range(1, 1 + len(each.groups()))]
    return {group: _Field(*span) for group, span in enumerate(spans, start=1)} if all(found) else None


def _table(parts: Sequence[bytes]) -> Bytes:
    """Byte strings of one length as the rows of a table."""
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)


def _column(tables: Sequence[Bytes], field: _Field) -> Bytes:
    return np.ascontiguousarray(tables[field.part][:, field.start : field.stop])


def _prefixes(digests: Bytes) -> Prefixes:
    return np.ascontiguousarray(digests[:, :8]).view("<u8").ravel()


def _index_keys(prefix: bytes, digests: Bytes) -> Bytes:
    """Their index keys: a letter and 15 bytes."""
    found = np.empty((len(digests), INDEX_KEY_BYTES), dtype=np.uint8)
    found[:, 0], found[:, 1:] = prefix[0], digests[:, : INDEX_KEY_BYTES - 1]
    return found


_LEAST_BY_WIDTH = {1: 0, 2: 24, 3: 1 << 8, 5: 1 << 16, 9: 1 << 32}  # CBOR writes smaller numbers shorter


def _number_column(column: Bytes) -> Ints:
    """CBOR numbers of one width; one above 2^63 becomes negative, and so out of range."""
    if column.shape[1] == 1:
        return column.ravel().astype(np.int64)
    kind = {2: ">u1", 3: ">u2", 5: ">u4", 9: ">u8"}[column.shape[1]]
    return np.ascontiguousarray(column[:, 1:]).view(kind).ravel().astype(np.int64)


class ContributionKeys:
    """Index keys of contributions in memory: sorted columns, and the newest keys in a dictionary.

    letters  the kinds of keys that it holds
    size     the number of leaves whose keys it holds
    """

    def __init__(self, letters: bytes) -> None:
        self.size, self._letters = 0, letters
        self._columns: list[tuple[Prefixes, Prefixes, Ints]] = []  # halves of each key, and its leaf, by the first half
        self._new: dict[bytes, int] = {}

    def grow(self, keys: Mapping[bytes, int], size: int) -> None:
        """Add keys that occur once. These must be all keys of the leaves up to `size`."""
        self._new.update(keys)
        self.size = size
        if len(self._new) > _MOST_NEW_KEYS:
            seqs = np.fromiter(self._new.values(), np.int64, len(self._new))
            self._sort(np.frombuffer(b"".join(self._new), np.uint8).reshape(-1, INDEX_KEY_BYTES), seqs)
            self._new = {}

    def add(self, contributions: Iterable[ContributionColumns | KeptLeaf | Leaf], size: int) -> None:
        """Add the keys of contributions. These must be all contributions up to leaf `size`."""
        keys, seqs = [np.empty((0, INDEX_KEY_BYTES), dtype=np.uint8)], [_NONE]
        for each in contributions:
            if isinstance(each, ContributionColumns):
                found = [one for one in each.keys if len(one) and one[0, 0] in self._letters]
                keys, seqs = [*keys, *found], [*seqs, *[each.seq] * len(found)]
                continue
            record = each.record if isinstance(each, Leaf) else each.contribution
            every = index_keys(record) if isinstance(record, Contribution) else ()
            own = [key for key in every if key[0] in self._letters]
            keys.append(np.frombuffer(b"".join(own), np.uint8).reshape(-1, INDEX_KEY_BYTES))
            seqs.append(np.full(len(own), each.seq))
        self._sort(np.concatenate(keys), np.concatenate(seqs))
        self.size = size

    def find(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Return (key, leaf) of every contribution that has one of these keys."""
        found = [(key, self._new[key]) for key in keys if key in self._new]
        asked = np.frombuffer(b"".join(keys), ">u8").astype(np.uint64).reshape(-1, 2)
        for first, last, seqs in self._columns:
            starts, stops = (np.searchsorted(first, asked[:, 0], side) for side in ("left", "right"))
            for at in np.flatnonzero(starts < stops).tolist():
                here = slice(starts[at], stops[at])
                found += [(keys[at], seq) for seq in seqs[here][last[here] == asked[at, 1]].tolist()]
        return found

    def between(self, first: bytes, last: bytes, most: int) -> list[int]:
        """Return the contributions with one of the first `most` keys in [first, last]."""
        found = [(key, seq) for key, seq in self._new.items() if first <= key <= last]
        low, high = (np.uint64(int.from_bytes(key[:8], "big")) for key in (first, last))
        for begins, ends, seqs in self._columns:
            here = slice(np.searchsorted(begins, low, "left"), np.searchsorted(begins, high, "right"))
            halves = zip(begins[here].tolist(), ends[here].tolist(), seqs[here].tolist(), strict=True)
            pairs = ((one.to_bytes(8, "big") + two.to_bytes(8, "big"), seq) for one, two, seq in halves)
            found += [(key, seq) for key, seq in pairs if first <= key <= last]
        wanted = set(sorted({key for key, _ in found})[:most])
        return [seq for key, seq in found if key in wanted]

    def _sort(self, keys: Bytes, seqs: Ints) -> None:
        halves = np.ascontiguousarray(keys).view(">u8").astype(np.uint64)
        first, last = halves[:, 0], halves[:, 1]
        while self._columns and len(self._columns[-1][2]) < 2 * len(seqs):
            one, two, three = self._columns.pop()
            first, last, seqs = np.concatenate([one, first]), np.concatenate([two, last]), np.concatenate([three, seqs])
        if len(seqs):
            order = np.argsort(first, kind="stable")
            self._columns.append((first[order], last[order], seqs[order]))


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([*parts, np.empty(0, dtype=np.int64)])
