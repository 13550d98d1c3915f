"""The tree, built again from the leaves, and held against what the store keeps of it."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.ledger.check.problem import TILE, bad
from lamina.ledger.check.tallies import Tallies
from lamina.ledger.frontier import Frontier
from lamina.ledger.hashing import HASH, node_hash
from lamina.ledger.store.base import Reader
from lamina.ledger.tiles import HEIGHT, WIDTH, path


class Tree:
    """Grows by leaves that are there and, where they were summed up, by the hashes that were kept of them.

    Tiles are not evidence: every root that they lead to is compared with what was signed. But where a leaf and its tile
    differ, they say which leaf it is.
    """

    def __init__(self, rows: Reader, tallies: Tallies) -> None:
        self._rows, self._tallies = rows, tallies
        self.frontier = Frontier()
        self._tile: tuple[int, bytes | None] = (-1, None)  # the last tile of level 0 that was read

    @property
    def size(self) -> int:
        return self.frontier.size

    def root(self) -> bytes:
        return self.frontier.root()

    def differs(self, hashes: Sequence[bytes]) -> int | None:
        """The place in `hashes`, of the leaves that come next, of the first that is not in its tile."""
        at, first = 0, self.size
        while at < len(hashes):
            index, inside = divmod(first + at, WIDTH)
            part = hashes[at : at + WIDTH - inside]
            tile = self._level0(index)
            if tile is None:
                bad(
                    first + at,
                    TILE,
                    "verify.not-leaves-under",
                    f"{path(0, index)} is not there, and the leaves under it are",
                )
            found, made = tile[inside * HASH : (inside + len(part)) * HASH], b"".join(part)
            if found != made:
                same = (found[HASH * k : HASH * (k + 1)] == one for k, one in enumerate(part))
                return at + list(same).index(False)
            at += len(part)
        return None

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Go on by leaves."""
        self._tallies.hashes(self.size, hashes)
        self.frontier.extend(hashes, self._check)

    def skip(self, stop: int) -> None:
        """Go on to `stop` by leaves that are gone, by what tiles have kept of them."""
        while self.size < stop:
            index, inside = divmod(self.size, WIDTH)
            tile = self._level0(index)
            if tile is not None:
                last = min(stop - index * WIDTH, WIDTH)
                part = [tile[HASH * k : HASH * (k + 1)] for k in range(inside, last)]
                if len(tile) < HASH * last:
                    bad(
                        self.size,
                        TILE,
                        "verify.too-short-hashes",
                        f"{path(0, index)} is too short: {len(tile) // HASH} hashes of {last}",
                    )
                self.extend(part)
            elif inside or stop - self.size < WIDTH:
                bad(
                    self.size,
                    TILE,
                    "verify.not-tree-not-built",
                    f"{path(0, index)} is not there, and the tree cannot be built without it",
                )
            else:
                self._add_block(index)

    def _add_block(self, index: int) -> None:
        """256 leaves of which only their common hash is left, in the tile above."""
        above, inside = divmod(index, WIDTH)
        tile = self._rows.tile(1, above) or b""
        hash = tile[HASH * inside : HASH * (inside + 1)]
        if len(hash) < HASH:
            bad(
                self.size,
                TILE,
                "verify.not-tree-not",
                f"{path(1, above)} is not there, and the tree cannot be built without it",
            )
        self._tallies.unknown(self.size)
        hashes, blocks, level = list(self.frontier.hashes), self.size // WIDTH, HEIGHT
        while True:
            if level % HEIGHT == 0:
                self._check(level, index >> level - HEIGHT, hash)
            if not blocks & 1:
                break
            hash, blocks, level = node_hash(hashes.pop(), hash), blocks >> 1, level + 1
        self.frontier = Frontier(self.size + WIDTH, [*hashes, hash])

    def _check(self, level: int, first: int, row: bytes) -> None:
        """Hashes of complete subtrees that were made, against the tile that holds them."""
        if level == 0 or level % HEIGHT:
            return
        for at in range(0, len(row), HASH):
            index, inside = divmod(first + at // HASH, WIDTH)
            tile = self._rows.tile(level // HEIGHT, index) or b""
            if tile[HASH * inside : HASH * (inside + 1)] != row[at : at + HASH]:
                leaf = (first + at // HASH) << level
                bad(
                    leaf,
                    TILE,
                    "verify.another-hash-leaves",
                    f"{path(level // HEIGHT, index)} has another hash of leaves [{leaf}, {leaf + (1 << level)})",
                )

    def _level0(self, index: int) -> bytes | None:
        if self._tile[0] != index:
            self._tile = (index, self._rows.tile(0, index))
        return self._tile[1]
