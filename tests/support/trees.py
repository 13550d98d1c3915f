"""Merkle trees that are all there, by the definition of RFC 6962, and keys that are the same in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lamina.ledger.merkle import TILE_WIDTH, Frontier, leaf_hashes
from lamina.ledger.signed_checkpoint import LedgerCheckpoint
from lamina.sign.keys import PrivateKey

ORIGIN = "example.org/ledger"


def private(seed: int) -> PrivateKey:
    return PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


class Rows:
    """Every complete subtree of a tree, level by level: the oracle."""

    def __init__(self, leaves: Iterable[bytes]) -> None:
        self.rows = [leaf_hashes(leaves)]
        while len(self.rows[-1]) > 1:
            row = self.rows[-1]
            pairs = (row[at] + row[at + 1] for at in range(0, len(row) - 1, 2))
            self.rows.append([hashlib.sha256(b"\x01" + pair).digest() for pair in pairs])

    def node(self, level: int, index: int) -> bytes:
        return self.rows[level][index]

    def head(self, size: int) -> LedgerCheckpoint:
        frontier = Frontier()
        frontier.extend(self.rows[0][:size])
        return LedgerCheckpoint(ORIGIN, size, frontier.root())

    def tiles(self, size: int) -> dict[tuple[int, int], bytes]:
        """MTH(D[(n·256 + i)·256^L : (n·256 + i + 1)·256^L]) for i = 0 … 255, as far as the tree goes."""
        found, level = {}, 0
        while whole := size >> 8 * level:
            for index in range(-(-whole // 256)):
                row = self.rows[8 * level][256 * index : min(256 * index + 256, whole)]
                found[level, index] = b"".join(row)
            level += 1
        return found


def partial_tiles(size: int) -> list[tuple[int, int, int]]:
    """(level, index, width) of the tiles of a tree of `size` leaves that are not full."""
    places, level = [], 0
    while size:
        if size % TILE_WIDTH:
            places.append((level, size // TILE_WIDTH, size % TILE_WIDTH))
        size, level = size // TILE_WIDTH, level + 1
    return places
