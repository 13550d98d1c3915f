"""Tiles: the hashes of the tree in blocks of 256, laid out as C2SP tlog-tiles.

Tile n of tile level L holds, one after the other, the hashes of the subtrees (8·L, 256·n) … (8·L, 256·n + 255). The
levels between are not kept: 255 hashes make them anew. Tiles on the right edge are shorter; they only ever grow at
their end, so what was read from a tile stays true.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock

from lamina.ledger.errors import LedgerError
from lamina.ledger.frontier import Frontier
from lamina.ledger.hashing import HASH, is_size, parents

WIDTH = 256
HEIGHT = 8  # levels of the tree in one level of tiles
CACHED = 1024  # tiles; 16 KB each with the levels between

# (level, index, width): at least the first `width` hashes of that tile, one after the other.
ReadTile = Callable[[int, int, int], bytes]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which tile, and how many hashes of it."""

    level: int
    index: int
    width: int

    @property
    def path(self) -> str:
        """Where C2SP tlog-tiles puts it."""
        return path(self.level, self.index, self.width)


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile that is to be written, whole, in place of a shorter one."""

    level: int
    index: int
    data: bytes

    @property
    def place(self) -> Place:
        """Its level, index and width."""
        return Place(self.level, self.index, len(self.data) // HASH)


def path(level: int, index: int, width: int = WIDTH) -> str:
    """The path of a tile under the prefix of a log (C2SP tlog-tiles).

    >>> path(0, 1234067), path(1, 3, 17)
    ('tile/0/x001/x234/067', 'tile/1/003.p/17')
    """
    if not (0 <= level < 64 and is_size(index) and 1 <= width <= WIDTH):
        raise LedgerError(
            "ledger.no-tile-level",
            f"there is no tile (level {level}, index {index}, width {width})",
            f"a level lies in [0, 63], a width in [1, {WIDTH}]",
        )
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    name = "/".join([f"x{part}" for part in parts[:-1]] + parts[-1:])
    return f"tile/{level}/{name}" + (f".p/{width}" if width < WIDTH else "")


def edge(size: int) -> list[Place]:
    """The tiles of a tree of `size` leaves that are not full.

    Whoever keeps these for every checkpoint, and all tiles of level 1 and above, can still prove each checkpoint
    consistent with each later one.
    """
    if not is_size(size):
        raise LedgerError(
            "ledger.tree-leaves-lie-give",
            f"the tree has {size!r} leaves, must lie in [0, 2^63)",
            "give its size",
        )
    places, level = [], 0
    while size:
        if size % WIDTH:
            places.append(Place(level, size // WIDTH, size % WIDTH))
        size, level = size // WIDTH, level + 1
    return places


def grow(frontier: Frontier, leaves: Iterable[bytes], read: ReadTile) -> list[Tile]:
    """Append leaf hashes to the tree; every tile that changed, with its new content, levels from the bottom up.

    `read` is asked for the tiles on the right edge that go on. If it fails, nothing was appended.
    """
    first: dict[int, int] = {}
    rows: dict[int, bytearray] = {}

    def tap(level: int, index: int, row: bytes) -> None:
        if level % HEIGHT == 0:
            first.setdefault(level // HEIGHT, index)
            rows.setdefault(level // HEIGHT, bytearray()).extend(row)

    grown = frontier.copy()
    grown.extend(leaves, tap)
    tiles, full = [], WIDTH * HASH
    for level, row in rows.items():
        index, filled = divmod(first[level], WIDTH)
        data = bytes(row)
        if filled:
            data = _read(read, Place(level, index, filled))[: filled * HASH] + data
        for at in range(0, len(data), full):
            tiles.append(Tile(level, index + at // full, data[at : at + full]))
    frontier.size, frontier.hashes = grown.size, grown.hashes
    return tiles


class TileNodes:
    """Nodes of the tree, looked up in tiles. Keeps the last used tiles, with the levels between made.

    `read(level, index, width)` gives a tile: the first `width` hashes, or more. With `size` the widths asked for are
    those of the tree of that size, which is what a folder of C2SP tiles has; without it, as many as are needed.
    Several threads may share one.
    """

    def __init__(self, read: ReadTile, *, size: int | None = None, cached: int = CACHED) -> None:
        if cached < 1 or not (size is None or is_size(size)):
            raise LedgerError(
                "ledger.cached-size-no",
                f"cached is {cached}, size {size!r}; there is no such tree",
                "keep one tile at least",
            )
        self._read, self._size, self._cached = read, size, cached
        self._tiles: OrderedDict[tuple[int, int], _Rows] = OrderedDict()
        self._lock = Lock()

    def node(self, level: int, index: int) -> bytes:
        """The hash over leaves [index·2^level, (index+1)·2^level); LedgerError if its tile is not there."""
        above, inside = divmod(level, HEIGHT)
        tile, at = divmod(index, WIDTH >> inside)
        need = at + 1 << inside
        with self._lock:
            rows = self._tiles.get((above, tile))
            if rows is not None and rows.width >= need:
                self._tiles.move_to_end((above, tile))
                return rows.hash(inside, at)
        rows = _Rows(_read(self._read, Place(above, tile, self._width(above, tile, need))))
        with self._lock:
            self._tiles[above, tile] = rows
            self._tiles.move_to_end((above, tile))
            while len(self._tiles) > self._cached:
                self._tiles.popitem(last=False)
        return rows.hash(inside, at)

    def forget(self) -> None:
        """Drop what is kept: the tiles were changed otherwise than by growing, as when an append is undone."""
        with self._lock:
            self._tiles.clear()

    def _width(self, level: int, index: int, need: int) -> int:
        if self._size is None:
            return need
        width = min(WIDTH, (self._size >> HEIGHT * level) - WIDTH * index)
        if width < need:
            raise LedgerError(
                "ledger.tile-level-index",
                f"tile (level {level}, index {index}) has {max(width, 0)} hashes in a tree of {self._size} leaves, "
                f"{need} are needed",
                "ask about leaves that are in the tree",
            )
        return width


class _Rows:
    """A tile and the levels above its hashes that lie within it."""

    __slots__ = ("_rows", "width")

    def __init__(self, data: bytes) -> None:
        self.width = len(data) // HASH
        self._rows = [data]
        while len(self._rows[-1]) > HASH:
            self._rows.append(parents(self._rows[-1]))

    def hash(self, level: int, index: int) -> bytes:
        return self._rows[level][index * HASH : (index + 1) * HASH]


def _read(read: ReadTile, place: Place) -> bytes:
    data = read(place.level, place.index, place.width)
    if len(data) % HASH or not place.width * HASH <= len(data) <= WIDTH * HASH:
        raise LedgerError(
            "ledger.bytes-full-tile",
            f"{place.path} has {len(data)} bytes, must have {place.width * HASH} or more of a full tile",
            "restore it from another copy: the tree cannot be proven without it",
        )
    return bytes(data)
