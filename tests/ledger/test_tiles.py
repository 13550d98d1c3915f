"""Tiles against the C2SP layout written out, and proofs from tiles against proofs from the whole tree."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from trees import Rows, partial_tiles

from lamina.errors import LedgerError
from lamina.ledger.merkle import (
    TILE_WIDTH,
    Frontier,
    TileNodes,
    consistency_proof,
    grow_tiles,
    inclusion_proof,
    root_at,
    tile_path,
    verify_consistency,
    verify_inclusion,
)

SIZE = 70_000  # the example of the C2SP page: three levels of tiles
ORACLE = Rows(n.to_bytes(4, "big") for n in range(SIZE))
HASHES = ORACLE.rows[0]


class Shelf:
    """Tiles in a dictionary, as a store would keep them."""

    def __init__(self, tiles: dict[tuple[int, int], bytes] | None = None) -> None:
        self.tiles = dict(tiles or {})
        self.asked: list[tuple[int, int, int]] = []

    def read(self, level: int, index: int, width: int) -> bytes:
        self.asked.append((level, index, width))
        if (level, index) not in self.tiles:
            raise LedgerError("ledger.tile-missing", f"tile {level}/{index} is missing")
        return self.tiles[level, index]

    def append(self, frontier: Frontier, leaves: list[bytes]) -> None:
        for tile in grow_tiles(frontier, leaves, self.read):
            assert 32 <= len(tile.data) <= 32 * TILE_WIDTH
            self.tiles[tile.level, tile.index] = tile.data


FULL = Shelf(ORACLE.tiles(SIZE))


# ---------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((0, 0, 256), "tile/0/000"),
        ((0, 999, 256), "tile/0/999"),
        ((0, 1000, 256), "tile/0/x001/000"),
        ((0, 1234067, 256), "tile/0/x001/x234/067"),
        ((1, 3, 17), "tile/1/003.p/17"),
        ((63, 123456, 1), "tile/63/x123/456.p/1"),
    ],
)
def test_paths_are_those_of_c2sp(place: tuple[int, int, int], expected: str) -> None:
    assert tile_path(*place) == expected


@pytest.mark.parametrize("place", [(-1, 0, 1), (64, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 257), (0, 2**63, 1)])
def test_there_are_no_other_tiles(place: tuple[int, int, int]) -> None:
    with raises_code("ledger.tile-invalid"):
        tile_path(*place)


def test_the_example_of_the_c2sp_page() -> None:
    tiles = ORACLE.tiles(70_000)
    assert sum(level == 0 and len(data) == 8192 for (level, _), data in tiles.items()) == 273
    assert partial_tiles(70_000) == [(0, 273, 112), (1, 1, 17), (2, 0, 1)]


# --------------------------------------------------------------------------------------------------------- growing


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0, 1, 2, 100, 255, 256, 257, 1000, 5000]), max_size=12))
def test_growing_by_any_batches_gives_the_tiles_of_the_tree(batches: list[int]) -> None:
    shelf, frontier, size = Shelf(), Frontier(), 0
    for count in batches:
        shelf.append(frontier, HASHES[size : size + count])
        size += count
    assert shelf.tiles == ORACLE.tiles(size)
    assert frontier.root() == root_at(ORACLE, size)
    assert all(place in partial_tiles(size) or place[2] < TILE_WIDTH for place in shelf.asked), (
        "only tiles that go on are read"
    )


def test_growing_past_the_third_level() -> None:
    shelf, frontier = Shelf(), Frontier()
    for first in range(0, SIZE, 9973):
        shelf.append(frontier, HASHES[first : first + 9973])
    assert shelf.tiles == FULL.tiles
    assert frontier.root() == root_at(ORACLE, SIZE)


def test_a_tile_that_cannot_be_read_leaves_the_edge_as_it_was() -> None:
    shelf, frontier = Shelf(), Frontier()
    shelf.append(frontier, HASHES[:100])
    before = frontier.copy()
    for broken in ({}, {(0, 0): b"short"}, {(0, 0): bytes(99 * 32)}, {(0, 0): bytes(257 * 32)}):
        shelf.tiles = dict(broken)
        with pytest.raises(LedgerError):
            shelf.append(frontier, HASHES[100:300])
        assert frontier == before


def test_a_longer_tile_than_the_tree_is_cut_to_it() -> None:
    """A crash between tiles and head leaves tiles that are ahead: what is beyond the head is written anew."""
    shelf, frontier = Shelf(), Frontier()
    shelf.append(frontier, HASHES[:100])
    shelf.tiles[0, 0] += b"\xff" * 64
    shelf.append(frontier, HASHES[100:120])
    assert shelf.tiles == ORACLE.tiles(120)


# ---------------------------------------------------------------------------------------------------------- proofs


@given(st.data())
def test_proofs_from_tiles_are_those_of_the_tree(data: st.DataObject) -> None:
    nodes = TileNodes(FULL.read, cached=data.draw(st.integers(1, 5)))
    size = data.draw(st.integers(1, SIZE))
    index = data.draw(st.integers(0, size - 1))
    old = data.draw(st.integers(0, size))
    assert root_at(nodes, size) == root_at(ORACLE, size)
    assert inclusion_proof(nodes, index, size) == inclusion_proof(ORACLE, index, size)
    assert consistency_proof(nodes, old, size) == consistency_proof(ORACLE, old, size)


def test_every_node_of_a_tree() -> None:
    nodes = TileNodes(FULL.read)
    for level, row in enumerate(ORACLE.rows):
        for index in {0, len(row) // 3, len(row) // 2, len(row) - 1}:
            assert nodes.node(level, index) == row[index]


def test_tiles_are_read_once_and_the_oldest_are_forgotten() -> None:
    shelf = Shelf(FULL.tiles)
    nodes = TileNodes(shelf.read, cached=2)
    for index in (0, 300, 1, 301, 2):
        nodes.node(0, index)
    assert len(shelf.asked) == 2
    nodes.node(0, 600)  # pushes out tile 1, used before tile 0
    nodes.node(0, 3)
    assert len(shelf.asked) == 3
    nodes.node(0, 302)
    assert len(shelf.asked) == 4


def test_a_tile_that_grew_is_read_again() -> None:
    shelf, frontier = Shelf(), Frontier()
    shelf.append(frontier, HASHES[:10])
    nodes = TileNodes(shelf.read)
    assert root_at(nodes, 10) == root_at(ORACLE, 10)
    shelf.append(frontier, HASHES[10:300])
    assert root_at(nodes, 300) == root_at(ORACLE, 300)
    assert root_at(nodes, 10) == root_at(ORACLE, 10)


def test_threads_share_the_tiles() -> None:
    nodes = TileNodes(FULL.read, cached=3)
    indices = [n * 6971 % SIZE for n in range(400)]
    with ThreadPoolExecutor(8) as pool:
        proofs = list(pool.map(lambda index: inclusion_proof(nodes, index, SIZE), indices))
    assert proofs == [inclusion_proof(ORACLE, index, SIZE) for index in indices]


@pytest.mark.parametrize("data", [b"", b"x", bytes(31), bytes(32 * 3), bytes(32 * 257), bytes(32 * 5 + 1)])
def test_a_damaged_tile_is_named(data: bytes) -> None:
    nodes = TileNodes(lambda level, index, width: data)
    with raises_code("ledger.tile-malformed"):
        nodes.node(0, 4)


def test_a_changed_tile_never_yields_a_proof_of_the_signed_root() -> None:
    root = root_at(ORACLE, SIZE)
    places = [place for place, data in FULL.tiles.items() if len(data) > 32]
    for level, tile in places[::25] + places[-2:]:
        changed = Shelf(FULL.tiles)
        data = changed.tiles[level, tile]
        changed.tiles[level, tile] = bytes((data[0] ^ 1,)) + data[1:]
        index = (256 * tile + 1) << 8 * level  # the first leaf under the sibling of the changed hash
        proof = inclusion_proof(TileNodes(changed.read), index, SIZE)
        assert not verify_inclusion(HASHES[index], index, SIZE, proof, root)
        assert verify_inclusion(HASHES[index], index, SIZE, inclusion_proof(ORACLE, index, SIZE), root)


# -------------------------------------------------------------------------------------------------------- few tiles


def test_checkpoints_are_proven_consistent_from_the_few_tiles_of_level_0_at_their_edges() -> None:
    checkpoints = [2, 100, 256, 257, 1000, 4096, 65_535, 65_536, 65_537, 69_999, SIZE]
    kept = {place[:2] for size in checkpoints for place in partial_tiles(size)}
    few = Shelf({place: data for place, data in FULL.tiles.items() if place[0] > 0 or place in kept})
    assert len(few.tiles) < 20 < len(FULL.tiles)
    nodes = TileNodes(few.read)
    for old in checkpoints:
        assert root_at(nodes, old) == root_at(ORACLE, old)
        for new in checkpoints:
            if old <= new:
                proof = consistency_proof(nodes, old, new)
                assert verify_consistency(old, new, proof, root_at(ORACLE, old), root_at(ORACLE, new))
    with raises_code("ledger.tile-missing"):
        inclusion_proof(nodes, 30_000, SIZE)
