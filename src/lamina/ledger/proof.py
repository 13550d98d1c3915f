"""Checking proofs of the tree (RFC 9162 §2.1.3.2 and §2.1.4.2).

Every function here answers for any input whatever and never raises: what is no proof proves nothing. For given sizes a
proof has one length, and no other is accepted.

A root does not say how many leaves are under it: a proof of leaf 2 of 3 is one of leaf 1 of 2 as well. The size must
come from where the root comes from: a signed checkpoint, or a receipt whose signature covers the size.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.ledger.hashing import EMPTY, is_hash, is_size, node_hash


def root_from_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes]) -> bytes | None:
    """The root of the tree of `size` leaves that has the leaf hash `leaf` at `index`; None if this is no such proof."""
    if not (is_size(index) and is_size(size) and index < size and is_hash(leaf) and _is_proof(proof)):
        return None
    sides = _sides(index, size - 1, len(proof))
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
    if not (is_size(old) and is_size(new) and old <= new and is_hash(old_root) and is_hash(new_root)):
        return False
    if not _is_proof(proof) or (old == 0 and old_root != EMPTY):
        return False
    if old in (0, new):
        return not proof and (old < new or old_root == new_root)
    # The last complete subtree of the old tree is in both; paths lead from it to the old root and to the new one.
    level = (old & -old).bit_length() - 1
    index = (old - 1) >> level
    start, path = (
        (proof[:1], proof[1:]) if index else ((old_root,), proof)
    )  # at index 0 it is the whole old tree
    sides = _sides(index, (new - 1) >> level, len(path))
    if not start or sides is None:
        return False
    before = after = start[0]
    for left, sibling in zip(sides, path, strict=True):
        if left:
            before, after = node_hash(sibling, before), node_hash(sibling, after)
        else:
            after = node_hash(after, sibling)
    return before == old_root and after == new_root


def _sides(index: int, last: int, count: int) -> list[bool] | None:
    """For each hash of a path from `index`, whether it stands on the left; None if a path has not `count` hashes.

    `last` is the index at the right end of the same level. Below the level where the two paths meet there is a sibling
    each time, on the side that the index says; above it the path runs along the right edge, with one on its left
    where the edge has a subtree.
    """
    inner = (index ^ last).bit_length()
    if count != inner + (index >> inner).bit_count():
        return None
    return [level >= inner or bool(index >> level & 1) for level in range(count)]


def _is_proof(values: object) -> bool:
    return isinstance(values, list | tuple) and all(map(is_hash, values))
