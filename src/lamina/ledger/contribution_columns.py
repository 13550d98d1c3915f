"""Contributions as columns: many leaves of one layout at a time, and the index of a store compared with them.

Leaves of contributions differ only in a few fields of known width. So the strict reader reads one of them, and the
others are compared with it byte by byte where they must be equal; their fields become columns, without a Python object
for each. Leaves that differ elsewhere are grouped again, or left to the strict reader: nothing is ever read here that
`decode_leaf` would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lamina.admit.keys import LAST_SECOND
from lamina.errors import EncodingError
from lamina.ledger.append import INDEX_KEY_BYTES, index_keys
from lamina.ledger.records import (
    CONTRIBUTION_BODY,
    CONTRIBUTION_LEAF,
    CONTRIBUTION_STARTS,
    ContributionRecord,
    ContributionTerms,
    KeptContribution,
    KeptLeaf,
    decode_kept,
    decode_leaf,
)
from lamina.ledger.store.rows import LeafBlock, StoredLeaf, StoreReader

if TYPE_CHECKING:
    from lamina.ledger.spending import Bound


Contribution = ContributionRecord | KeptContribution
Ints = NDArray[np.int64]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Prefixes = NDArray[np.uint64]  # the first 8 bytes of digests

_MOST_LAYOUTS = 32  # different layouts in one block; the rest is read one by one
_FEWEST_ROWS = 16  # fewer leaves than these are read one by one
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
    bound: Bound
    descriptor: Prefixes
    subject: Prefixes | None
    keys: tuple[
        NDArray[np.uint8], ...
    ]  # their index keys: of descriptors, and of subjects and anchors if they have them
    terms: ContributionTerms | None
    not_before: Ints | None = None
    attestation: Prefixes | None = None
    key: Prefixes | None = None
    kids: frozenset[bytes] = frozenset()


def other_kinds(data: LeafBlock) -> list[int]:
    """Positions of the leaves that do not begin like a contribution."""
    return [at for at, one in enumerate(data.leaves) if one[:3] not in CONTRIBUTION_STARTS]


def kept_contributions(rows: StoreReader, first: int, stop: int) -> Iterator[ContributionColumns | KeptLeaf]:
    """The contributions among leaves [first, stop), by what the leaves say: those of one layout together, or one."""
    for _, block in rows.blocks(first, stop):
        leaves = [leaf for leaf in block.leaves if leaf[:3] in CONTRIBUTION_STARTS]
        for group in read_columns(LeafBlock(leaves, [None] * len(leaves))):
            if isinstance(group, ContributionColumns):
                yield group
            else:
                yield from (decode_kept(leaves[at]) for at in group.tolist())


def read_columns(block: LeafBlock) -> Iterator[ContributionColumns | Ints]:
    """The block in groups of one layout; last, the positions of the leaves to be read one by one."""
    left: list[Ints] = []
    alike: dict[tuple[int, int], list[int]] = {}
    widths = zip(map(len, block.leaves), [-1 if body is None else len(body) for body in block.bodies], strict=True)
    for row, width in enumerate(widths):
        alike.setdefault(width, []).append(row)
    for same in alike.values():
        rows: Ints = np.array(same, dtype=np.int64)
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
    spans = _layout(model)
    if spans is None or not isinstance(first, ContributionRecord | KeptContribution):
        return None
    numbers = [group for group in (_SEQ, _TIME, _EPOCH, _END, _BEGIN) if group in spans]
    length = len(model.leaf) + len(model.body or b"")
    key_places = [(b"d", spans[_DESCRIPTOR][0])]
    if first.subject is not None:
        key_places.append((b"s", len(model.leaf) - 32))
    if isinstance(first, ContributionRecord) and first.anchor is not None:
        key_places.append((b"a", length - 32))
    free = np.zeros(length, dtype=np.bool_)
    for group, (start, stop) in spans.items():
        free[start + (group in numbers and stop - start > 1) : stop] = True  # the width of a number stays
    for _, at in key_places:
        free[at : at + 32] = True
    places, whole = rows.tolist(), isinstance(first, ContributionRecord)
    bodies = [block.bodies[row] or b"" for row in places]
    leaves = [block.leaves[row] for row in places]
    parts = chain.from_iterable(zip(leaves, bodies, strict=True)) if whole else leaves
    table = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, length)
    same = (table[:, ~free] == table[0, ~free]).all(axis=1)
    columns = {group: _number_column(table, *spans[group]) for group in numbers}
    for group, column in columns.items():
        start, stop = spans[group]
        same &= column >= _LEAST_BY_WIDTH[stop - start]
        if stop - start == 1:
            same &= column < 24
    same &= (columns[_TIME] <= LAST_SECOND) & (columns[_END] <= LAST_SECOND)
    if whole:
        same &= columns[_BEGIN] < columns[_END]
        start, stop = spans[_BODY_HASH]
        hashes = b"".join([sha256(body).digest() for body in bodies])
        same &= (table[:, start:stop] == np.frombuffer(hashes, np.uint8).reshape(-1, 32)).all(axis=1)

    def prefixes(at: int) -> Prefixes:
        return np.ascontiguousarray(table[same, at : at + 8]).view("<u8").ravel()

    made = ContributionColumns(
        rows=rows[same],
        seq=columns[_SEQ][same],
        time=columns[_TIME][same],
        epoch=columns[_EPOCH][same],
        expires=columns[_END][same],
        bound=first.bound,
        descriptor=prefixes(spans[_DESCRIPTOR][0]),
        subject=None if first.subject is None else prefixes(len(model.leaf) - 32),
        keys=tuple(_index_keys(table[same], prefix, at) for prefix, at in key_places),
        terms=None,
    )
    if isinstance(first, ContributionRecord):
        start, stop = (at - len(model.leaf) for at in spans[_KEY])
        made = replace(
            made,
            terms=first.terms,
            not_before=columns[_BEGIN][same],
            attestation=prefixes(spans[_ATTESTATION][0]),
            key=prefixes(spans[_KEY][0]),
            kids=frozenset([(block.bodies[row] or b"")[start:stop] for row in made.rows.tolist()]),
        )
    return made, rows[~same]


def _index_keys(table: NDArray[np.uint8], prefix: bytes, at: int) -> NDArray[np.uint8]:
    """The index keys of the digests that begin in that column: a letter and 15 bytes."""
    found = np.empty((len(table), INDEX_KEY_BYTES), dtype=np.uint8)
    found[:, 0], found[:, 1:] = prefix[0], table[:, at : at + INDEX_KEY_BYTES - 1]
    return found


def _layout(model: StoredLeaf) -> dict[int, tuple[int, int]] | None:
    """Where the fields are in leaf and body, one after the other; None if there are none."""
    if (leaf := CONTRIBUTION_LEAF.match(model.leaf)) is None:
        return None
    spans = {group: leaf.span(group) for group in range(1, _ATTESTATION)}
    if model.body is not None:
        if (body := CONTRIBUTION_BODY.match(model.body)) is None:
            return None
        after = len(model.leaf)
        spans |= {_END + group: (after + body.start(group), after + body.end(group)) for group in range(1, 4)}
    return spans


_LEAST_BY_WIDTH = {1: 0, 2: 24, 3: 1 << 8, 5: 1 << 16, 9: 1 << 32}  # CBOR writes smaller numbers shorter


def _number_column(table: NDArray[np.uint8], start: int, stop: int) -> Ints:
    """A column of CBOR numbers of one width; one above 2^63 becomes negative, and so out of range."""
    if stop - start == 1:
        return table[:, start].astype(np.int64)
    kind = {2: ">u1", 3: ">u2", 5: ">u4", 9: ">u8"}[stop - start]
    return np.ascontiguousarray(table[:, start + 1 : stop]).view(kind).ravel().astype(np.int64)


class KeyIndexChecks:
    """Compares the store's index of contributions with the leaves: whom it hides could be admitted again."""

    def __init__(self) -> None:
        self._keys: list[NDArray[np.uint8]] = []
        self._seqs: list[Ints] = []
        self._pruned: list[Ints] = []

    def many(self, seqs: Ints, keys: Sequence[NDArray[np.uint8]], pruned: bool) -> None:
        self._keys += keys
        self._seqs += [seqs] * len(keys)
        if pruned:
            self._pruned.append(seqs)

    def one(self, seq: int, record: Contribution, pruned: bool) -> None:
        keys = [np.frombuffer(key, np.uint8).reshape(1, -1) for key in index_keys(record)]
        self.many(np.array([seq], dtype=np.int64), keys, pruned)

    def first_difference(self, rows: StoreReader, indexed: int) -> int | None:
        """The first leaf of which the index says something else. It holds the keys of the first `indexed` leaves.

        Anchors of those whose bodies are pruned may be left in it.
        """
        pairs = list(rows.known_keys())
        keys = b"".join([key.ljust(INDEX_KEY_BYTES, b"?")[:INDEX_KEY_BYTES] for key, _ in pairs])
        found = np.frombuffer(keys, np.uint8).reshape(-1, INDEX_KEY_BYTES)
        seqs: Ints = np.array([seq for _, seq in pairs], dtype=np.int64)
        stays = ~((found[:, 0] == ord("a")) & np.isin(seqs, _joined(self._pruned)))
        found, seqs = found[stays], seqs[stays]
        places = _joined(self._seqs)
        real = np.concatenate([*self._keys, np.empty((0, INDEX_KEY_BYTES), dtype=np.uint8)])[places < indexed]
        places = places[places < indexed]
        halves = np.ascontiguousarray(real).view(">u8")
        order = np.lexsort((places, halves[:, 1], halves[:, 0]))
        if len(found) == len(real) and (found == real[order]).all() and (seqs == places[order]).all():
            return None
        stored = {(key.tobytes(), seq) for key, seq in zip(found, seqs.tolist(), strict=True)}
        stated = {(key.tobytes(), seq) for key, seq in zip(real, places.tolist(), strict=True)}
        return int(min(seq for _, seq in stored ^ stated))


def first_index_difference(rows: StoreReader, indexed: int) -> int | None:
    """The first leaf of which the store's index does not say what the leaf says; None if it is right."""
    index = KeyIndexChecks()
    for each in kept_contributions(rows, 0, indexed):
        if isinstance(each, ContributionColumns):
            index.many(each.seq, each.keys, pruned=True)
        elif each.contribution is not None:
            index.one(each.seq, each.contribution, pruned=True)
    return index.first_difference(rows, indexed)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([*parts, np.empty(0, dtype=np.int64)])
