"""A secret beside the book: names accounts of data whose origin nobody declared."""

from __future__ import annotations

import os
from pathlib import Path

from lamina.errors import StorageError
from lamina.train.store.durable import write_atomically

_BYTES = 32


def secret_beside(book: Path) -> bytes:
    """32 bytes of `BOOK.key` (mode 0600), drawn once. Two that begin at the same moment agree on what is on disk."""
    path = book.with_name(book.name + ".key")
    try:
        if not path.exists():
            write_atomically(path, os.urandom(_BYTES))
        key = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"'{path}' cannot be read: {error}", "restore it: it belongs to the book"
        ) from error
    if len(key) != _BYTES:
        raise StorageError(
            f"'{path}' has {len(key)} bytes, must have {_BYTES}", "restore it: it belongs to the book"
        )
    return key
