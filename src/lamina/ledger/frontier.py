"""`Frontier`: the right edge of a growing tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from lamina import cbor
from lamina.errors import EncodingError
from lamina.ledger.errors import LedgerError
from lamina.ledger.hashing import HASH, MAX_SIZE, is_hash, is_size, join, parents

_BATCH = 4096  # leaves that are worked on at once: memory stays bounded however many are appended

Tap = Callable[[int, int, bytes], None]  # level, index of the first hash, the hashes one after the other


@dataclass(slots=True)
class Frontier:
    """All that is needed to append to a tree and to know its root, in O(log n) memory.

    `hashes` are the roots of the complete subtrees that make up `size` leaves, left to right: one for each bit that
    is set in `size`, 63 at most.
    """

    size: int = 0
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not is_size(self.size):
            raise LedgerError(
                "ledger.tree-leaves-lie",
                f"the tree has {self.size!r} leaves, must lie in [0, 2^63)",
                "give its size",
            )
        if len(self.hashes) != self.size.bit_count() or not all(map(is_hash, self.hashes)):
            raise LedgerError(
                "ledger.edge-tree-leaves-hashes",
                f"the edge of a tree of {self.size} leaves must be {self.size.bit_count()} hashes of {HASH} bytes, "
                f"not these {len(self.hashes)}",
                "take size and edge from the same tree",
            )

    def append(self, leaf: bytes) -> None:
        """Append one leaf, given its hash."""
        self.extend((leaf,))

    def extend(self, leaves: Iterable[bytes], tap: Tap | None = None) -> None:
        """Append leaves, given their hashes: all of them, or none. One node is hashed for each.

        `tap` is shown every hash that becomes complete, on every level: bottom up for a stretch of leaves, in
        order within a level.
        """
        rest, before = iter(leaves), (self.size, self.hashes)
        try:
            while batch := list(islice(rest, _BATCH)):
                self._check(batch)
                self._grow(b"".join(batch), tap)
        except BaseException:
            self.size, self.hashes = before
            raise

    def _check(self, batch: list[bytes]) -> None:
        if not all(map(is_hash, batch)):
            raise LedgerError(
                "ledger.leaf-hash-bytes",
                f"a leaf hash must have {HASH} bytes",
                "append leaf_hash(leaf), not the leaf",
            )
        if self.size + len(batch) > MAX_SIZE:
            raise LedgerError(
                "ledger.tree-leaves", "the tree would have 2^63 leaves or more", "begin another ledger"
            )

    def _grow(self, row: bytes, tap: Tap | None) -> None:
        size, edge = self.size + len(row) // HASH, list(self.hashes)
        first, level, single = self.size, 0, []
        while row:
            if tap is not None:
                tap(level, first, row)
            if first & 1:  # the edge has a subtree of this level, which waits for its sibling
                row = edge.pop() + row
            if len(row) // HASH & 1:
                single.append(row[-HASH:])
            row, first, level = parents(row), first >> 1, level + 1
        self.size, self.hashes = size, edge + single[::-1]

    def root(self) -> bytes:
        """The root of the tree as it is now."""
        return join(self.hashes)

    def copy(self) -> Frontier:
        """An edge to extend for a trial."""
        return Frontier(self.size, list(self.hashes))

    def encode(self) -> bytes:
        """[size, [hash, …]] in deterministic CBOR."""
        return cbor.encode([self.size, self.hashes])

    @classmethod
    def decode(cls, data: bytes) -> Frontier:
        """Read what `encode` wrote."""
        found = cbor.decode(data)
        if type(found) is not list or len(found) != 2 or type(found[1]) is not list:
            raise EncodingError(
                "ledger.edge-tree-not",
                "the edge of a tree is not [size, hashes]",
                "give what Frontier.encode wrote",
            )
        try:
            return cls(*found)
        except LedgerError as error:
            raise EncodingError("ledger.decode", error.problem, error.remedy) from None
