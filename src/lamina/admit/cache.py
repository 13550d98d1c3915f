"""What was verified already, and until when that counts."""

from __future__ import annotations

from typing import NamedTuple

LIMIT = 1 << 16  # entries, of a kilobyte each


class Kept(NamedTuple):
    """What is left to check of a contribution whose attestation was verified: its payload. And when it ends."""

    until: int
    descriptor: bytes
    nonce: bytes
    commitment: bytes


class Cache:
    """Contributions whose attestation was verified, by its bytes.

    An entry dies with its epoch, with its window, when its key is revoked, and all die with any change of the key
    ring. Refusals are not remembered: whoever sends rubbish fills nothing. When it is full the oldest entry goes.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept: dict[bytes, Kept] = {}
        self._version = b""

    def __len__(self) -> int:
        return len(self._kept)

    def get(
        self, attestation: bytes | None, descriptor: bytes | None, now: int, version: bytes
    ) -> Kept | None:
        """What was verified of these very bytes under this key ring, if it still counts."""
        kept = self._kept.get(attestation) if attestation is not None else None
        if kept is None or version != self._version or kept.until <= now or kept.descriptor != descriptor:
            return None
        return kept

    def put(self, attestation: bytes, kept: Kept, version: bytes) -> None:
        """Remember what was verified just now."""
        if version != self._version:
            self._kept.clear()
            self._version = version
        self._kept.pop(attestation, None)
        if len(self._kept) >= self._limit:
            del self._kept[next(iter(self._kept))]
        self._kept[attestation] = kept
