"""Keyed digests: what a run compares, and nobody without the key can guess and confirm."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from lamina.errors import CorpusError

DIGEST_BYTES = 32
MOST_KEY_BYTES = 64


class Hasher(Protocol):
    """What hashlib gives."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def keyed(key: bytes, purpose: str) -> Hasher:
    """BLAKE2b-256 under `key`, with a purpose of at most 16 letters: other purposes, other functions."""
    if len(key) > MOST_KEY_BYTES:
        raise CorpusError(
            "corpus.key-digest-bytes",
            f"the key of a digest has {len(key)} bytes, at most {MOST_KEY_BYTES}",
            "use os.urandom(32)",
        )
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=purpose.encode())


def put(hasher: Hasher, parts: Iterable[bytes | str | int]) -> None:
    """Feed parts so that different sequences of parts never feed the same bytes: each behind its length."""
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "big"))
        hasher.update(data)
