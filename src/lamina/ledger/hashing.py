"""Hashes of the Merkle tree of RFC 6962 and RFC 9162 §2.1 over SHA-256.

    leaf d            SHA-256(0x00 ‖ d)
    node of l and r   SHA-256(0x01 ‖ l ‖ r)
    no leaf           SHA-256 of nothing

The first byte keeps a node from passing as a leaf, and a leaf as a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

HASH = 32
EMPTY = hashlib.sha256(b"").digest()
MAX_SIZE = 2**63 - 1  # leaves; what other implementations count with

_LEAF = hashlib.sha256(b"\x00")  # a copy of a started hash costs less than a new one
_NODE = hashlib.sha256(b"\x01")


def leaf_hash(data: bytes) -> bytes:
    """The hash of a leaf.

    >>> leaf_hash(b"").hex()[:16]
    '6e340b9cffb37a98'
    """
    state = _LEAF.copy()
    state.update(data)
    return state.digest()


def leaf_hashes(leaves: Iterable[bytes]) -> list[bytes]:
    """The hashes of many leaves."""
    start, hashes = _LEAF.copy, []
    for data in leaves:
        state = start()
        state.update(data)
        hashes.append(state.digest())
    return hashes


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node with these children."""
    state = _NODE.copy()
    state.update(left + right)
    return state.digest()


def parents(row: bytes) -> bytes:
    """The hashes of the nodes above a row of hashes; a last one without a sibling is left out."""
    start, hashes = _NODE.copy, []
    for at in range(0, len(row) - HASH, 2 * HASH):
        state = start()
        state.update(row[at : at + 2 * HASH])
        hashes.append(state.digest())
    return b"".join(hashes)


def join(hashes: Sequence[bytes]) -> bytes:
    """The root over complete subtrees that stand side by side, each smaller than the one on its left."""
    if not hashes:
        return EMPTY
    root = hashes[-1]
    for left in hashes[-2::-1]:
        root = node_hash(left, root)
    return root


def is_hash(value: object) -> bool:
    """Whether a value can be a hash at all."""
    return type(value) is bytes and len(value) == HASH


def is_size(value: object) -> bool:
    """Whether a value can be a number of leaves at all."""
    return type(value) is int and 0 <= value <= MAX_SIZE
