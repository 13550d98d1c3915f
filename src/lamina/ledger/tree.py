"""The tree: its root at any size, and proofs about it (RFC 6962 §2.1).

(level, index) names the complete subtree over leaves [index·2^level, (index+1)·2^level). Such a hash never changes as
the tree grows, and every root and every proof is made of O(log n) of them. `leaf` is always a leaf's hash here.
"""

from __future__ import annotations

from typing import Protocol

from lamina.ledger.errors import LedgerError
from lamina.ledger.frontier import Frontier
from lamina.ledger.hashing import EMPTY, HASH, MAX_SIZE, is_size, join, leaf_hash, leaf_hashes, node_hash
from lamina.ledger.proof import root_from_inclusion, verify_consistency, verify_inclusion

__all__ = [
    "EMPTY", "HASH", "MAX_SIZE", "leaf_hash", "leaf_hashes", "node_hash",
    "Frontier", "Nodes", "root_at", "frontier_at", "inclusion", "consistency",
    "root_from_inclusion", "verify_inclusion", "verify_consistency",
]  # fmt: skip


class Nodes(Protocol):
    """Where hashes of complete subtrees are looked up."""

    def node(self, level: int, index: int) -> bytes:
        """The hash over leaves [index·2^level, (index+1)·2^level)."""


def root_at(nodes: Nodes, size: int) -> bytes:
    """The root of the tree of the first `size` leaves."""
    return join(_cover(nodes, 0, _checked(size)))


def frontier_at(nodes: Nodes, size: int) -> Frontier:
    """The right edge of the tree of the first `size` leaves."""
    return Frontier(size, _cover(nodes, 0, _checked(size)))


def inclusion(nodes: Nodes, index: int, size: int) -> list[bytes]:
    """PATH(index, D[size]) of RFC 6962 §2.1.1: from the leaf's sibling up to the root's child."""
    if not is_size(index) or index >= _checked(size):
        raise LedgerError(
            "ledger.leaf-not-tree",
            f"leaf {index!r} is not in a tree of {size} leaves",
            "give an index below the size",
        )
    first, stop, proof = 0, size, []
    while stop - first > 1:
        middle = first + _split(stop - first)
        if index < middle:
            proof.append(join(_cover(nodes, middle, stop)))
            stop = middle
        else:
            proof.append(join(_cover(nodes, first, middle)))
            first = middle
    return proof[::-1]


def consistency(nodes: Nodes, old: int, new: int) -> list[bytes]:
    """PROOF(old, D[new]) of RFC 6962 §2.1.2; there is nothing to show for old = 0 and for old = new."""
    if not is_size(old) or old > _checked(new):
        raise LedgerError(
            "ledger.tree-leaves-not-begin",
            f"a tree of {new} leaves does not begin with {old!r}",
            "give the smaller size first",
        )
    if old == 0:
        return []
    first, stop, proof = 0, new, []
    while stop != old:
        middle = first + _split(stop - first)
        if old <= middle:
            proof.append(join(_cover(nodes, middle, stop)))
            stop = middle
        else:
            proof.append(join(_cover(nodes, first, middle)))
            first = middle
    if first:  # at first = 0 this is the old root, which the verifier has
        proof.append(join(_cover(nodes, first, stop)))
    return proof[::-1]


def _checked(size: int) -> int:
    if not is_size(size):
        raise LedgerError(
            "ledger.tree-leaves-lie-give",
            f"the tree has {size!r} leaves, must lie in [0, 2^63)",
            "give a size of this tree",
        )
    return size


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1


def _cover(nodes: Nodes, first: int, stop: int) -> list[bytes]:
    """The complete subtrees over leaves [first, stop), left to right. `first` is a multiple of the largest one."""
    hashes = []
    while first < stop:
        level = (stop - first).bit_length() - 1
        hashes.append(nodes.node(level, first >> level))
        first += 1 << level
    return hashes
