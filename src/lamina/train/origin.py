"""A secret beside the runs: names the ledgers of data whose origin nobody declared."""

from __future__ import annotations

import os
from pathlib import Path

from lamina.errors import StorageError
from lamina.train.store.durable import replacing, write_all

_BYTES = 32


def origin_secret(folder: Path) -> bytes:
    """32 bytes of `origin.key` there (mode 0600), drawn once: of two that begin at once the first one's count."""
    path = folder / "origin.key"
    try:
        if not path.exists():
            _draw(path)
        key = path.read_bytes()
    except OSError as error:
        raise StorageError(
            "train.not-read",
            f"'{path}' cannot be read: {error}",
            "restore it: it belongs to the ledgers beside it",
        ) from error
    if len(key) != _BYTES:
        raise StorageError(
            "train.bytes",
            f"'{path}' has {len(key)} bytes, must have {_BYTES}",
            "restore it: it belongs to the ledgers beside it",
        )
    return key


def _draw(path: Path) -> None:
    try:
        with replacing(path, fresh=True) as file:
            write_all(file, os.urandom(_BYTES))
    except StorageError:
        if not path.exists():  # nobody was faster: it is the disk
            raise
