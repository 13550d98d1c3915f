"""The tree against the definitions of RFC 6962, written out, and against the reference vectors of its authors."""

from __future__ import annotations

import hashlib
import tracemalloc
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code

from lamina.errors import EncodingError, LaminaError, LedgerError
from lamina.ledger.merkle import (
    EMPTY_ROOT,
    Frontier,
    consistency_proof,
    frontier_at,
    inclusion_proof,
    leaf_hash,
    leaf_hashes,
    node_hash,
    root_at,
    root_from_inclusion,
    verify_consistency,
    verify_inclusion,
)

# ------------------------------------------------------------------- the definitions, as RFC 6962 §2.1 states them


def mth(leaves: list[bytes]) -> bytes:
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = split(len(leaves))
    return hashlib.sha256(b"\x01" + mth(leaves[:k]) + mth(leaves[k:])).digest()


def path(m: int, leaves: list[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if m < k:
        return [*path(m, leaves[:k]), mth(leaves[k:])]
    return [*path(m - k, leaves[k:]), mth(leaves[:k])]


def subproof(m: int, leaves: list[bytes], whole: bool) -> list[bytes]:
    if m == len(leaves):
        return [] if whole else [mth(leaves)]
    k = split(len(leaves))
    if m <= k:
        return [*subproof(m, leaves[:k], whole), mth(leaves[k:])]
    return [*subproof(m - k, leaves[k:], False), mth(leaves[:k])]


def split(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


LEAVES = [f"leaf {i}".encode() for i in range(64)]
HASHES = leaf_hashes(LEAVES)
ROOTS = [mth(LEAVES[:n]) for n in range(65)]


class Plain:
    """Nodes by definition, of a tree that is all there."""

    def __init__(self, leaves: list[bytes]) -> None:
        self.leaves = leaves
        self.node = cache(self._node)

    def _node(self, level: int, index: int) -> bytes:
        assert index + 1 << level <= len(self.leaves), "asked for a subtree that is not complete"
        return mth(self.leaves[index << level : index + 1 << level])


TREE = Plain(LEAVES)


# ------------------------------------------------------------------------------------------------ reference vectors

INPUTS = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
REFERENCE_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
A = "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
B = "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e"
C = "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"
D = "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"
E = "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0"
F = "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
REFERENCE_PATHS = [  # index, size, path
    (0, 1, []),
    (0, 8, [A, B, C]),
    (5, 8, [D, E, REFERENCE_ROOTS[4]]),
    (2, 3, [REFERENCE_ROOTS[2]]),
    (1, 5, [REFERENCE_ROOTS[1], B, D]),
]
REFERENCE_CONSISTENCY = [  # old, new, proof
    (1, 1, []),
    (1, 8, [A, B, C]),
    (6, 8, [F, E, REFERENCE_ROOTS[4]]),
    (2, 5, [B, D]),
]


def test_the_reference_roots_of_certificate_transparency() -> None:
    leaves = [bytes.fromhex(text) for text in INPUTS]
    frontier = Frontier()
    for size, root in enumerate(REFERENCE_ROOTS):
        assert frontier.root().hex() == root
        assert root_at(Plain(leaves), size).hex() == root
        if size < 8:
            frontier.extend([leaf_hash(leaves[size])])


def test_the_reference_proofs_of_certificate_transparency() -> None:
    leaves = [bytes.fromhex(text) for text in INPUTS]
    roots = [bytes.fromhex(text) for text in REFERENCE_ROOTS]
    for index, size, proof in REFERENCE_PATHS:
        found = inclusion_proof(Plain(leaves), index, size)
        assert [step.hex() for step in found] == proof
        assert verify_inclusion(leaf_hash(leaves[index]), index, size, found, roots[size])
    for old, new, proof in REFERENCE_CONSISTENCY:
        found = consistency_proof(Plain(leaves), old, new)
        assert [step.hex() for step in found] == proof
        assert verify_consistency(old, new, found, roots[old], roots[new])


# ------------------------------------------------------------------------------------------- every proof up to 64


def test_every_root_and_edge_up_to_64() -> None:
    frontier = Frontier()
    for size in range(65):
        assert frontier.root() == ROOTS[size] == root_at(TREE, size)
        assert frontier == frontier_at(TREE, size) == Frontier.decode(frontier.encode())
        assert len(frontier.hashes) <= size.bit_length()
        if size < 64:
            frontier.extend([HASHES[size]])


def test_every_inclusion_proof_up_to_64_and_none_of_another_length() -> None:
    for size in range(1, 65):
        for index in range(size):
            proof = inclusion_proof(TREE, index, size)
            assert proof == path(index, LEAVES[:size])
            assert verify_inclusion(HASHES[index], index, size, proof, ROOTS[size])
            assert verify_inclusion(HASHES[index], index, size, tuple(proof), ROOTS[size])
            for wrong in _other_lengths(proof):
                assert root_from_inclusion(HASHES[index], index, size, wrong) is None
                assert not verify_inclusion(HASHES[index], index, size, wrong, ROOTS[size])
            for other in range(size if size <= 33 else 0):
                same = verify_inclusion(HASHES[index], other, size, proof, ROOTS[size])
                assert same == (other == index), "a path belongs to one index of a tree of known size"


def test_every_consistency_proof_up_to_64_and_none_of_another_length() -> None:
    for new in range(65):
        assert consistency_proof(TREE, 0, new) == []
        assert verify_consistency(0, new, [], EMPTY_ROOT, ROOTS[new])
        assert not verify_consistency(0, new, [EMPTY_ROOT], EMPTY_ROOT, ROOTS[new])
        for old in range(1, new + 1):
            proof = consistency_proof(TREE, old, new)
            assert proof == subproof(old, LEAVES[:new], True)
            assert verify_consistency(old, new, proof, ROOTS[old], ROOTS[new])
            for wrong in _other_lengths(proof):
                assert not verify_consistency(old, new, wrong, ROOTS[old], ROOTS[new])
            if old < new:
                assert not verify_consistency(new, old, proof, ROOTS[new], ROOTS[old])
                assert not verify_consistency(old, new, proof, ROOTS[new], ROOTS[old])


def _other_lengths(proof: list[bytes]) -> list[list[bytes]]:
    longer = [[*proof[:at], extra, *proof[at:]] for at in range(len(proof) + 1) for extra in (EMPTY_ROOT, *proof[:1])]
    shorter = [proof[:at] + proof[at + 1 :] for at in range(len(proof))]
    return longer + shorter


def _one_bit_off(value: bytes, bits: range) -> list[bytes]:
    return [(int.from_bytes(value, "big") ^ 1 << bit).to_bytes(len(value), "big") for bit in bits]


def _no_single_bit_passes(sizes: range, step: int) -> int:
    """Flip single bits of everything that a proof is made of: every `step`-th, from a moving start."""
    tried = 0
    for new in sizes:
        for old in range(1, new + 1):
            bits = range((old + new) % step, 256, step)
            index = old - 1
            parts = [HASHES[index], ROOTS[new], *inclusion_proof(TREE, index, new)]
            assert verify_inclusion(parts[0], index, new, parts[2:], parts[1])
            for at, part in enumerate(parts):
                for wrong in _one_bit_off(part, bits):
                    leaf, root, *proof = [*parts[:at], wrong, *parts[at + 1 :]]
                    assert not verify_inclusion(leaf, index, new, proof, root)
                    tried += 1
            parts = [ROOTS[old], ROOTS[new], *consistency_proof(TREE, old, new)]
            assert verify_consistency(old, new, parts[2:], parts[0], parts[1])
            for at, part in enumerate(parts):
                for wrong in _one_bit_off(part, bits):
                    old_root, new_root, *proof = [*parts[:at], wrong, *parts[at + 1 :]]
                    assert not verify_consistency(old, new, proof, old_root, new_root)
                    tried += 1
    return tried


def test_no_proof_survives_a_flipped_bit() -> None:
    assert _no_single_bit_passes(range(1, 10), 1) > 80_000
    assert _no_single_bit_passes(range(10, 65), 128) > 30_000


@pytest.mark.slow
def test_no_proof_survives_a_flipped_bit_exhaustively() -> None:
    assert _no_single_bit_passes(range(10, 65), 1) > 4_000_000


# ------------------------------------------------------------------------------------------------------- attacks


def test_an_inner_node_never_passes_as_a_leaf() -> None:
    for size in range(2, 65):
        for index in range(size):
            proof = inclusion_proof(TREE, index, size)
            # The node above the leaf, presented as a leaf: by its hash, and as the leaf whose bytes are its children.
            sibling = index ^ 1
            if sibling >= size:
                continue
            pair = HASHES[min(index, sibling)] + HASHES[max(index, sibling)]
            above = node_hash(pair[:32], pair[32:])
            assert leaf_hash(pair) != above
            for claimed in range(size):
                assert not verify_inclusion(above, claimed, size, proof[1:], ROOTS[size])
                assert not verify_inclusion(leaf_hash(pair), claimed, size, proof[1:], ROOTS[size])


def test_a_leaf_beyond_the_end_is_in_no_tree() -> None:
    for size in range(33):
        for index in range(size, 33):
            for larger in range(index + 1, 34):
                proof = inclusion_proof(TREE, index, larger)
                assert root_from_inclusion(HASHES[index], index, size, proof) is None
                assert not verify_inclusion(HASHES[index], index, size, proof, ROOTS[larger])


def test_a_proof_is_made_of_hashes_alone() -> None:
    """Whoever may choose the length of a step may move the border between two of them."""
    root = hashlib.sha256(b"\x01" + HASHES[0] + b"short").digest()
    assert not verify_inclusion(HASHES[0], 0, 2, [b"short"], root)
    assert not verify_inclusion(HASHES[0] + b"short", 0, 1, [], HASHES[0] + b"short")
    assert not verify_consistency(1, 2, [b"short"], HASHES[0], root)
    assert not verify_inclusion(HASHES[0], 0, 2, [bytearray(HASHES[1])], ROOTS[2])  # type: ignore[list-item]
    assert verify_inclusion(HASHES[0], 0, 2, [HASHES[1]], ROOTS[2])


def test_a_root_alone_does_not_tell_the_size_of_its_tree() -> None:
    proof = inclusion_proof(TREE, 2, 3)
    assert verify_inclusion(HASHES[2], 2, 3, proof, ROOTS[3])
    assert verify_inclusion(HASHES[2], 1, 2, proof, ROOTS[3]), "hence sizes are signed beside roots"


def test_a_rewritten_tree_is_not_consistent_with_what_was_seen() -> None:
    for size in range(2, 14):
        for changed in range(size):
            forged = [*LEAVES[:changed], b"another", *LEAVES[changed + 1 : size]]
            for old in range(1, size):
                proof = consistency_proof(Plain(forged), old, size)
                kept = changed >= old  # what was not there yet may still become anything
                assert verify_consistency(old, size, proof, ROOTS[old], mth(forged)) == kept


# ------------------------------------------------------------------------------------------------------ properties

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)
hashes = st.binary(min_size=32, max_size=32)
sizes = st.integers(-2, 70) | st.sampled_from([2**62, 2**63 - 1, 2**63, 2**64, 10**30])


@given(anything, anything, anything, anything, anything)
def test_garbage_is_refused_without_a_word(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    assert verify_inclusion(a, b, c, d, e) is False
    assert root_from_inclusion(a, b, c, d) is None or (type(b) is int and len(d) == 0)
    assert isinstance(verify_consistency(b, c, a, d, e), bool)


@given(hashes, sizes, sizes, st.lists(hashes, max_size=70), hashes, hashes)
def test_random_hashes_prove_nothing(leaf: bytes, a: int, b: int, proof: list[bytes], x: bytes, y: bytes) -> None:
    assert not verify_inclusion(leaf, a, b, proof, x) or (a, b, proof, x) == (0, 1, [], leaf)
    if verify_consistency(a, b, proof, x, y):
        assert proof == [] and ((a == b and x == y) or (a == 0 and x == EMPTY_ROOT))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 700), max_size=6))
def test_how_leaves_are_cut_into_batches_does_not_matter(batches: list[int]) -> None:
    leaves = leaf_hashes(n.to_bytes(2, "big") for n in range(sum(batches)))
    whole, cut, single = Frontier(), Frontier(), Frontier()
    whole.extend(leaves)
    rest = iter(leaves)
    for count in batches:
        cut.extend(next(rest) for _ in range(count))
    for leaf in leaves:
        single.extend([leaf])
    assert whole == cut == single


@given(st.integers(1, 2**40), st.data())
def test_proofs_of_large_trees(size: int, data: st.DataObject) -> None:
    """A tree of equal leaves: node (level, ·) is the same everywhere, so that any size can be had."""
    levels = [leaf_hash(b"same")]
    while len(levels) < 42:
        levels.append(node_hash(levels[-1], levels[-1]))

    asked = 0

    class Same:
        def node(self, level: int, index: int) -> bytes:
            nonlocal asked
            asked += 1
            assert index + 1 << level <= size
            return levels[level]

    index = data.draw(st.integers(0, size - 1))
    proof = inclusion_proof(Same(), index, size)
    assert len(proof) <= size.bit_length() and asked <= 2 * size.bit_length()
    assert verify_inclusion(levels[0], index, size, proof, root_at(Same(), size))
    assert not verify_inclusion(leaf_hash(b"other"), index, size, proof, root_at(Same(), size))
    old = data.draw(st.integers(1, size))
    asked = 0
    proof = consistency_proof(Same(), old, size)
    assert len(proof) <= size.bit_length() + 1 and asked <= 2 * size.bit_length() + 1
    assert verify_consistency(old, size, proof, root_at(Same(), old), root_at(Same(), size))
    assert root_at(Same(), size) == frontier_at(Same(), size).root()


def test_appending_takes_memory_for_a_batch_however_many_leaves_come() -> None:
    frontier = Frontier()

    def peak(count: int) -> int:
        tracemalloc.start()
        frontier.extend(n.to_bytes(32, "big") for n in range(count))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few = peak(10_000)
    assert peak(60_000) < 1.1 * few < 5_000_000
    assert frontier.size == 70_000 and len(frontier.encode()) < 63 * 34


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("leaf", [b"", b"x" * 31, b"x" * 33, "x" * 32, bytearray(32), None])
def test_only_hashes_are_appended(leaf: Any) -> None:
    frontier = Frontier()
    frontier.extend([HASHES[0]])
    with raises_code("ledger.leaf-hash-invalid"):
        frontier.extend([HASHES[1], leaf])
    assert frontier.size == 1 and frontier.root() == HASHES[0]
    many = [HASHES[1]] * 5000
    with raises_code("ledger.leaf-hash-invalid"):
        frontier.extend([*many, leaf])
    assert frontier.size == 1 and frontier.root() == HASHES[0], "all or none, in batches too"


@pytest.mark.parametrize("size", [-1, 2**63, 1.0, True, "1", None])
def test_sizes_that_are_none_are_refused(size: Any) -> None:
    for call in (
        lambda: root_at(TREE, size),
        lambda: inclusion_proof(TREE, 0, size),
        lambda: consistency_proof(TREE, 0, size),
        lambda: Frontier(size, []),
        lambda: inclusion_proof(TREE, size, 64),
        lambda: consistency_proof(TREE, size, 64),
    ):
        with pytest.raises(LedgerError):
            call()


def test_a_proof_of_what_is_not_there_is_refused() -> None:
    with raises_code("ledger.leaf-not-in-tree"):
        inclusion_proof(TREE, 5, 5)
    with raises_code("ledger.sizes-swapped"):
        consistency_proof(TREE, 6, 5)


def test_a_full_tree_takes_no_more() -> None:
    full = Frontier(2**63 - 1, [EMPTY_ROOT] * 63)
    with raises_code("ledger.tree-full"):
        full.extend([EMPTY_ROOT])


@given(st.binary(max_size=80))
def test_an_edge_is_read_strictly(data: bytes) -> None:
    try:
        frontier = Frontier.decode(data)
    except LaminaError as error:
        assert isinstance(error, EncodingError)
    else:
        assert frontier.encode() == data


@pytest.mark.parametrize(
    "text",
    ["80", "8200", "820041ff", "820180", "82f580", "82018141ff", "8203815820" + "00" * 32, "a0", "820080" + "00"],
)
def test_damaged_edges_are_refused(text: str) -> None:
    with pytest.raises(EncodingError):
        Frontier.decode(bytes.fromhex(text))
