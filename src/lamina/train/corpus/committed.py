"""Payloads as they were signed: whatever is trained on is committed to again, on the very bytes that are read."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.admit.commitment import commit
from lamina.admit.refusal import Refused
from lamina.admit.source import open_plain
from lamina.train.corpus.keyed import Hasher, put
from lamina.train.corpus.payloads import KINDS, PayloadChanged, Payloads
from lamina.train.corpus.text import Texts


class Given:
    """Payloads that were handed over: bytes, or paths."""

    where = "that was handed over"
    frozen = False

    def __init__(self, ids: Sequence[str], payloads: Sequence[bytes | Path]) -> None:
        self.ids, self._payloads = Texts(ids), payloads

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, row: int) -> Path:
        payload = self._payloads[row]
        return payload if isinstance(payload, Path) else Path(self.ids[row]) / f"payload.{_sniffed(payload)}"

    def look(self, row: int) -> bytes | None:
        payload = self._payloads[row]
        return None if isinstance(payload, Path) else payload

    def read(self, row: int) -> bytes | None:
        return self.look(row)

    def take(self, rows: NDArray[np.int64]) -> Given:
        return Given([self.ids[row] for row in rows.tolist()], [self._payloads[row] for row in rows.tolist()])

    def feed(self, hasher: Hasher) -> None:
        """Ids and contents."""
        for row, name in enumerate(self.ids):
            held = self.look(row)
            put(hasher, [name, _whole(self.path(row)) if held is None else held])

    def __repr__(self) -> str:
        return "given"


class Committed:
    """The payloads of admitted contributions.

    A payload is read once and whole; its bytes are held against the signed commitment, and only then taken for data.
    Swapping a file after it was admitted, even while it is read, stops the run, and nothing is learned from it.
    """

    frozen = True

    def __init__(self, payloads: Payloads, *, nonces: NDArray[Any], commitments: NDArray[Any]) -> None:
        self._payloads, self._nonces, self._commitments = payloads, nonces, commitments
        self.where, self.ids = payloads.where, payloads.ids

    def __len__(self) -> int:
        return len(self._payloads)

    def path(self, row: int) -> Path:
        return self._payloads.path(row)

    def look(self, row: int) -> bytes | None:
        return self._payloads.look(row)

    def read(self, row: int) -> bytes:
        try:
            held = self._payloads.read(row)
            held = _whole(self._payloads.path(row)) if held is None else held
        except (OSError, Refused):
            raise self._changed() from None
        found = commit(self._nonces[row].tobytes(), held)
        if not hmac.compare_digest(found, self._commitments[row].tobytes()):
            raise self._changed()
        return held

    def take(self, rows: NDArray[np.int64]) -> Committed:
        return Committed(
            self._payloads.take(rows), nonces=self._nonces[rows], commitments=self._commitments[rows]
        )

    def feed(self, hasher: Hasher) -> None:
        """Ids and commitments: no other bytes are ever read under them."""
        for row, name in enumerate(self.ids):
            put(hasher, [name, self._commitments[row].tobytes()])

    def _changed(self) -> PayloadChanged:
        return PayloadChanged(
            "corpus.payload-not-signed",
            f"a payload {self.where} is not the one that was signed and admitted; nothing was learned from it",
            "put back what was signed, or leave it out; admitting the contributions again names it",
        )

    def __repr__(self) -> str:
        return f"signed, {self._payloads!r}"


def _whole(path: Path) -> bytes:
    with os.fdopen(open_plain(path), "rb") as file:
        return file.read()


def _sniffed(payload: bytes) -> str:
    """What bytes without a name are: an .npz is a zip archive."""
    return KINDS[0] if payload.startswith(b"PK") else KINDS[1]
