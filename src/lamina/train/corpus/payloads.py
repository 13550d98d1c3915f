"""The payloads of contributions: where their bytes lie, and that they are the right ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.keyed import Hasher, put
from lamina.train.corpus.leaves import CHUNK_BYTES
from lamina.train.corpus.text import Texts

KINDS = ("npz", "csv")
_NONE, _TWO = len(KINDS), len(KINDS) + 1


class PayloadChanged(CorpusError):
    """A payload that is not the one that was opened, or signed. The text names nobody: it was sampled."""


class Payloads(Protocol):
    """One payload per contribution, by row.

    `path` names it in messages; `look` and `read` give its bytes, or None where they are simply what the file of that
    name holds; `read` is asked for what is trained on, and raises PayloadChanged rather than give something else.
    """

    where: str
    ids: Texts
    frozen: bool  # what was read once would be the same again, or refused

    def __len__(self) -> int: ...

    def path(self, row: int) -> Path: ...

    def look(self, row: int) -> bytes | None: ...

    def read(self, row: int) -> bytes | None: ...

    def take(self, rows: NDArray[np.int64]) -> Self: ...

    def feed(self, hasher: Hasher) -> None: ...


class Files:
    """ROOT/ID/payload.npz or ROOT/ID/payload.csv."""

    frozen = False

    def __init__(self, root: Path, ids: Sequence[str], kinds: NDArray[np.uint8] | None = None) -> None:
        self._root, self.where, self.ids = root, f"under '{root}'", Texts(ids)
        self._prefix = str(root / "_")[:-1]
        found = (_kind_in(self._prefix + name) for name in ids)
        self._kinds = np.fromiter(found, dtype=np.uint8, count=len(ids)) if kinds is None else kinds

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, row: int) -> Path:
        """CorpusError: there is none, or there are two."""
        return Path(self.name(row))

    def name(self, row: int) -> str:
        """The same as text: to make a Path takes as long as to open a file."""
        folder, kind = self._prefix + self.ids[row], self._kinds[row]
        if kind >= _NONE:
            have = "no payload" if kind == _NONE else "two payloads"
            raise CorpusError(
                "corpus.put-payload-npz",
                f"'{folder}' has {have}",
                "put one payload.npz or one payload.csv there",
            )
        return f"{folder}/payload.{KINDS[kind]}"

    def look(self, row: int) -> bytes | None:
        return None

    def read(self, row: int) -> bytes | None:
        return None

    def take(self, rows: NDArray[np.int64]) -> Files:
        return Files(self._root, [self.ids[row] for row in rows.tolist()], self._kinds[rows])

    def feed(self, hasher: Hasher) -> None:
        """Ids and every byte of every file."""
        for row in range(len(self)):
            path = self.path(row)
            put(hasher, [self.ids[row], path.suffix, path.stat().st_size])
            with path.open("rb") as file:
                while part := file.read(CHUNK_BYTES):
                    hasher.update(part)

    def __repr__(self) -> str:
        return f"'{self._root}'"


def name_of(payloads: Payloads, row: int) -> str:
    """What `path` gives, as text."""
    return payloads.name(row) if isinstance(payloads, Files) else str(payloads.path(row))


def is_table(path: str) -> bool:
    """Whether a payload is one table; if not it is an archive of arrays."""
    return path.endswith(f".{KINDS[1]}")


def _kind_in(folder: str) -> int:
    """Which of KINDS lies in the folder of a contribution."""
    found = [i for i, kind in enumerate(KINDS) if os.path.isfile(f"{folder}/payload.{kind}")]
    return found[0] if len(found) == 1 else _TWO if found else _NONE
