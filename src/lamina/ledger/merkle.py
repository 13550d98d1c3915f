"""The Merkle tree of RFC 6962 and RFC 9162: hashes, the growing right edge, proofs and their checks, C2SP tiles."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from struct import iter_unpack
from threading import Lock
from typing import Protocol

from lamina import cbor
from lamina.errors import EncodingError, LedgerError

# Hashes of the Merkle tree of RFC 6962 and RFC 9162 §2.1 over SHA-256.
#
#     leaf d            SHA-256(0x00 ‖ d)
#     node of l and r   SHA-256(0x01 ‖ l ‖ r)
#     no leaf           SHA-256 of nothing
#
# The first byte keeps a node from passing as a leaf, and a leaf as a node.

HASH_SIZE = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
MAX_TREE_SIZE = 2**63 - 1  # leaves; what other implementations count with

_HASH_STATE = hashlib.sha256()  # a copy of a started hash costs less than a new one
_LEAF_HASH_STATE = hashlib.sha256(b"\x00")
_NODE_HASH_STATE = hashlib.sha256(b"\x01")


def leaf_hash(data: bytes) -> bytes:
    """The hash of a leaf.

    >>> leaf_hash(b"").hex()[:16]
    '6e340b9cffb37a98'
    """
    state = _LEAF_HASH_STATE.copy()
    state.update(data)
    return state.digest()


def hash_all(parts: Iterable[bytes], begun: hashlib._Hash = _HASH_STATE) -> list[bytes]:
    """The SHA-256 of each, after what `begun` has read."""
    start, hashes = begun.copy, []
    for data in parts:
        state = start()
        state.update(data)
        hashes.append(state.digest())
    return hashes


def leaf_hashes(leaves: Iterable[bytes]) -> list[bytes]:
    """The hashes of many leaves."""
    return hash_all(leaves, _LEAF_HASH_STATE)


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node with these children."""
    state = _NODE_HASH_STATE.copy()
    state.update(left + right)
    return state.digest()


def parent_hashes(row: bytes) -> bytes:
    """The hashes of the nodes above a row of hashes; a last one without a sibling is left out."""
    pairs = iter_unpack("64s", row[: len(row) // 64 * 64])
    return b"".join(hash_all([pair for (pair,) in pairs], _NODE_HASH_STATE))


def root_of_subtrees(hashes: Sequence[bytes]) -> bytes:
    """The root over complete subtrees that stand side by side, each smaller than the one on its left."""
    if not hashes:
        return EMPTY_ROOT
    root = hashes[-1]
    for left in hashes[-2::-1]:
        root = node_hash(left, root)
    return root


def is_hash(value: object) -> bool:
    """Whether a value can be a hash at all."""
    return type(value) is bytes and len(value) == HASH_SIZE


def is_tree_size(value: object) -> bool:
    """Whether a value can be a number of leaves at all."""
    return type(value) is int and 0 <= value <= MAX_TREE_SIZE


_HASHES_AT_ONCE = 4096  # leaves that are worked on at once: memory stays bounded however many are appended

NodeCallback = Callable[[int, int, bytes], None]  # level, index of the first hash, the hashes one after the other


@dataclass(slots=True)
class Frontier:
    """All that is needed to append to a tree and to know its root, in O(log n) memory.

    `hashes` are the roots of the complete subtrees that make up `size` leaves, left to right: one for each bit that
    is set in `size`, 63 at most.
    """

    size: int = 0
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not is_tree_size(self.size):
            raise LedgerError("ledger.tree-size-invalid", f"the tree size is {self.size!r}, must be in [0, 2^63)")
        if len(self.hashes) != self.size.bit_count() or not all(map(is_hash, self.hashes)):
            raise LedgerError(
                "ledger.frontier-invalid",
                f"the frontier of {self.size} leaves has {len(self.hashes)} hashes, must have {self.size.bit_count()} of 32 bytes",
            )

    def extend(self, leaves: Iterable[bytes], tap: NodeCallback | None = None) -> None:
        """Append leaves, given their hashes: all of them, or none. One node is hashed for each.

        `tap` is shown every hash that becomes complete, on every level: bottom up for a stretch of leaves, in
        order within a level.
        """
        rest, before = iter(leaves), (self.size, self.hashes)
        try:
            while batch := list(islice(rest, _HASHES_AT_ONCE)):
                self._check(batch)
                self._grow(b"".join(batch), tap)
        except BaseException:
            self.size, self.hashes = before
            raise

    def _check(self, batch: list[bytes]) -> None:
        if set(map(type, batch)) != {bytes} or set(map(len, batch)) != {HASH_SIZE}:
            problem = f"a leaf hash must have {HASH_SIZE} bytes"
            raise LedgerError("ledger.leaf-hash-invalid", problem, "append leaf_hash(leaf), not the leaf")
        if self.size + len(batch) > MAX_TREE_SIZE:
            raise LedgerError("ledger.tree-full", "the tree would have 2^63 leaves or more", "start another ledger")

    def _grow(self, row: bytes, tap: NodeCallback | None) -> None:
        size, edge = self.size + len(row) // HASH_SIZE, list(self.hashes)
        first, level, single = self.size, 0, []
        while row:
            if tap is not None:
                tap(level, first, row)
            if first & 1:  # the edge has a subtree of this level, which waits for its sibling
                row = edge.pop() + row
            if len(row) // HASH_SIZE & 1:
                single.append(row[-HASH_SIZE:])
            row, first, level = parent_hashes(row), first >> 1, level + 1
        self.size, self.hashes = size, edge + single[::-1]

    def root(self) -> bytes:
        """The root of the tree as it is now."""
        return root_of_subtrees(self.hashes)

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
            problem = "a frontier must be [size, hashes]"
            raise EncodingError("ledger.frontier-malformed", problem, "give what Frontier.encode wrote")
        try:
            return cls(*found)
        except LedgerError as error:
            raise EncodingError("ledger.frontier-malformed", error.problem, error.remedy) from None


# Checking proofs of the tree (RFC 9162 §2.1.3.2 and §2.1.4.2).
#
# Every function here answers for any input whatever and never raises: what is no proof proves nothing. For given
# sizes a proof has one length, and no other is accepted.
#
# A root does not say how many leaves are under it: a proof of leaf 2 of 3 is one of leaf 1 of 2 as well. The size must
# come from where the root comes from: a signed checkpoint, or a receipt whose signature covers the size.


def root_from_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes]) -> bytes | None:
    """The root of the tree of `size` leaves that has the leaf hash `leaf` at `index`; None if this is no such proof."""
    if not (is_tree_size(index) and is_tree_size(size) and index < size and is_hash(leaf) and _is_hash_list(proof)):
        return None
    sides = _sibling_sides(index, size - 1, len(proof))
    if sides is None:
        return None
    root = leaf
    for left, sibling in zip(sides, proof, strict=True):
        root = node_hash(sibling, root) if left else node_hash(root, sibling)
    return root


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether the tree (size, root) has the leaf hash `leaf` at `index`."""
    return is_hash(root) and root_from_inclusion(leaf, index, size, proof) == root


def verify_consistency(old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """Whether the tree (new, new_root) begins with all leaves of the tree (old, old_root), in their order."""
    if not (is_tree_size(old) and is_tree_size(new) and old <= new and is_hash(old_root) and is_hash(new_root)):
        return False
    if not _is_hash_list(proof) or (old == 0 and old_root != EMPTY_ROOT):
        return False
    if old in (0, new):
        return not proof and (old < new or old_root == new_root)
    # The last complete subtree of the old tree is in both; paths lead from it to the old root and to the new one.
    level = (old & -old).bit_length() - 1
    index = (old - 1) >> level
    start, path = (proof[:1], proof[1:]) if index else ((old_root,), proof)  # at index 0 it is the whole old tree
    sides = _sibling_sides(index, (new - 1) >> level, len(path))
    if not start or sides is None:
        return False
    before = after = start[0]
    for left, sibling in zip(sides, path, strict=True):
        if left:
            before, after = node_hash(sibling, before), node_hash(sibling, after)
        else:
            after = node_hash(after, sibling)
    return before == old_root and after == new_root


def _sibling_sides(index: int, last: int, count: int) -> list[bool] | None:
    """For each hash of a path from `index`, whether it stands on the left; None if a path has not `count` hashes.

    `last` is the index at the right end of the same level. Below the level where the two paths meet there is a sibling
    each time, on the side that the index says; above it the path runs along the right edge, with one on its left
    where the edge has a subtree.
    """
    inner = (index ^ last).bit_length()
    if count != inner + (index >> inner).bit_count():
        return None
    return [level >= inner or bool(index >> level & 1) for level in range(count)]


def _is_hash_list(values: object) -> bool:
    return isinstance(values, list | tuple) and all(map(is_hash, values))


# The tree: its root at any size, and proofs about it (RFC 6962 §2.1).
#
# (level, index) names the complete subtree over leaves [index·2^level, (index+1)·2^level). Such a hash never changes as
# the tree grows, and every root and every proof is made of O(log n) of them. `leaf` is always a leaf's hash here.


class NodeSource(Protocol):
    """Where hashes of complete subtrees are looked up."""

    def node(self, level: int, index: int) -> bytes:
        """The hash over leaves [index·2^level, (index+1)·2^level)."""


def root_at(nodes: NodeSource, size: int) -> bytes:
    """The root of the tree of the first `size` leaves."""
    return root_of_subtrees(_complete_subtrees(nodes, 0, _check_tree_size(size)))


def frontier_at(nodes: NodeSource, size: int) -> Frontier:
    """The right edge of the tree of the first `size` leaves."""
    return Frontier(size, _complete_subtrees(nodes, 0, _check_tree_size(size)))


def inclusion_proof(nodes: NodeSource, index: int, size: int) -> list[bytes]:
    """PATH(index, D[size]) of RFC 6962 §2.1.1: from the leaf's sibling up to the root's child."""
    if not is_tree_size(index) or index >= _check_tree_size(size):
        raise LedgerError("ledger.leaf-not-in-tree", f"leaf {index!r} is not in a tree of {size} leaves")
    first, stop, proof = 0, size, []
    while stop - first > 1:
        middle = first + _left_subtree_size(stop - first)
        if index < middle:
            proof.append(root_of_subtrees(_complete_subtrees(nodes, middle, stop)))
            stop = middle
        else:
            proof.append(root_of_subtrees(_complete_subtrees(nodes, first, middle)))
            first = middle
    return proof[::-1]


def consistency_proof(nodes: NodeSource, old: int, new: int) -> list[bytes]:
    """PROOF(old, D[new]) of RFC 6962 §2.1.2; there is nothing to show for old = 0 and for old = new."""
    if not is_tree_size(old) or old > _check_tree_size(new):
        problem = f"a tree of {new} leaves has no beginning of {old!r} leaves"
        raise LedgerError("ledger.sizes-swapped", problem, "give the smaller size first")
    if old == 0:
        return []
    first, stop, proof = 0, new, []
    while stop != old:
        middle = first + _left_subtree_size(stop - first)
        if old <= middle:
            proof.append(root_of_subtrees(_complete_subtrees(nodes, middle, stop)))
            stop = middle
        else:
            proof.append(root_of_subtrees(_complete_subtrees(nodes, first, middle)))
            first = middle
    if first:  # at first = 0 this is the old root, which the verifier has
        proof.append(root_of_subtrees(_complete_subtrees(nodes, first, stop)))
    return proof[::-1]


def _check_tree_size(size: int) -> int:
    if not is_tree_size(size):
        raise LedgerError("ledger.tree-size-invalid", f"the tree size is {size!r}, must be in [0, 2^63)")
    return size


def _left_subtree_size(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1


def _complete_subtrees(nodes: NodeSource, first: int, stop: int) -> list[bytes]:
    """The complete subtrees over leaves [first, stop), left to right. `first` is a multiple of the largest one."""
    hashes = []
    while first < stop:
        level = (stop - first).bit_length() - 1
        hashes.append(nodes.node(level, first >> level))
        first += 1 << level
    return hashes


# Tiles: the hashes of the tree in blocks of 256, laid out as C2SP tlog-tiles.
#
# Tile n of tile level L holds, one after the other, the hashes of the subtrees (8·L, 256·n) … (8·L, 256·n + 255). The
# levels between are not kept: 255 hashes make them anew. Tiles on the right edge are shorter; they only ever grow at
# their end, so what was read from a tile stays true.

TILE_WIDTH = 256
TILE_HEIGHT = 8  # levels of the tree in one level of tiles
CACHED_TILES = 1024  # tiles; 16 KB each with the levels between

# (level, index, width): at least the first `width` hashes of that tile, one after the other.
ReadTile = Callable[[int, int, int], bytes]


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile that is to be written, whole, in place of a shorter one."""

    level: int
    index: int
    data: bytes


def tile_path(level: int, index: int, width: int = TILE_WIDTH) -> str:
    """The path of a tile under the prefix of a log (C2SP tlog-tiles).

    >>> tile_path(0, 1234067), tile_path(1, 3, 17)
    ('tile/0/x001/x234/067', 'tile/1/003.p/17')
    """
    if not (0 <= level < 64 and is_tree_size(index) and 1 <= width <= TILE_WIDTH):
        raise LedgerError("ledger.tile-invalid", f"there is no tile (level {level}, index {index}, width {width})")
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    name = "/".join([f"x{part}" for part in parts[:-1]] + parts[-1:])
    return f"tile/{level}/{name}" + (f".p/{width}" if width < TILE_WIDTH else "")


def grow_tiles(frontier: Frontier, leaves: Iterable[bytes], read: ReadTile) -> list[Tile]:
    """Append leaf hashes to the tree; every tile that changed, with its new content, levels from the bottom up.

    `read` is asked for the tiles on the right edge that go on. If it fails, nothing was appended.
    """
    first: dict[int, int] = {}
    rows: dict[int, bytearray] = {}

    def tap(level: int, index: int, row: bytes) -> None:
        if level % TILE_HEIGHT == 0:
            first.setdefault(level // TILE_HEIGHT, index)
            rows.setdefault(level // TILE_HEIGHT, bytearray()).extend(row)

    grown = frontier.copy()
    grown.extend(leaves, tap)
    tiles, full = [], TILE_WIDTH * HASH_SIZE
    for level, row in rows.items():
        index, filled = divmod(first[level], TILE_WIDTH)
        data = bytes(row)
        if filled:
            data = _read_tile(read, level, index, filled)[: filled * HASH_SIZE] + data
        for at in range(0, len(data), full):
            tiles.append(Tile(level, index + at // full, data[at : at + full]))
    frontier.size, frontier.hashes = grown.size, grown.hashes
    return tiles


class TileNodes:
    """Nodes of the tree, looked up in tiles. Keeps the last used tiles, with the levels between made.

    `read(level, index, width)` gives a tile: the first `width` hashes, or more. Several threads may share one.
    """

    def __init__(self, read: ReadTile, *, cached: int = CACHED_TILES) -> None:
        self._read, self._cached = read, cached
        self._tiles: OrderedDict[tuple[int, int], _TileLevels] = OrderedDict()
        self._lock = Lock()

    def node(self, level: int, index: int) -> bytes:
        """The hash over leaves [index·2^level, (index+1)·2^level); LedgerError if its tile is not there."""
        above, inside = divmod(level, TILE_HEIGHT)
        tile, at = divmod(index, TILE_WIDTH >> inside)
        need = at + 1 << inside
        with self._lock:
            rows = self._tiles.get((above, tile))
            if rows is not None and rows.width >= need:
                self._tiles.move_to_end((above, tile))
                return rows.hash(inside, at)
        rows = _TileLevels(_read_tile(self._read, above, tile, need))
        with self._lock:
            self._tiles[above, tile] = rows
            self._tiles.move_to_end((above, tile))
            while len(self._tiles) > self._cached:
                self._tiles.popitem(last=False)
        return rows.hash(inside, at)


class _TileLevels:
    """A tile and the levels above its hashes that lie within it."""

    __slots__ = ("_rows", "width")

    def __init__(self, data: bytes) -> None:
        self.width = len(data) // HASH_SIZE
        self._rows = [data]
        while len(self._rows[-1]) > HASH_SIZE:
            self._rows.append(parent_hashes(self._rows[-1]))

    def hash(self, level: int, index: int) -> bytes:
        return self._rows[level][index * HASH_SIZE : (index + 1) * HASH_SIZE]


def _read_tile(read: ReadTile, level: int, index: int, width: int) -> bytes:
    data = read(level, index, width)
    if len(data) % HASH_SIZE or not width * HASH_SIZE <= len(data) <= TILE_WIDTH * HASH_SIZE:
        name, least = tile_path(level, index, width), width * HASH_SIZE
        problem = f"{name} has {len(data)} bytes, must have {least} or more of a full tile"
        raise LedgerError("ledger.tile-malformed", problem, "restore it from a copy")
    return bytes(data)
