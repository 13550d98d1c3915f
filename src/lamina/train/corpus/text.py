"""Many texts in little memory: ids and subject tags of a large corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 15


class Texts:
    """Texts end to end in UTF-8, and where each of them begins: 8 bytes a text more than its letters.

    A Python string takes some 50 bytes more than its letters, and a dict to find it another hundred; a corpus of
    10⁶ contributions has no room for that.

    >>> Texts(["a", "βγ", ""])[1]
    'βγ'
    """

    def __init__(self, values: Iterable[Any]) -> None:
        data = bytearray()
        lengths: list[NDArray[np.int64]] = []
        rest = iter(values)
        while chunk := [str(value).encode("utf-8", "surrogatepass") for value in islice(rest, CHUNK)]:
            data += b"".join(chunk)
            lengths.append(np.fromiter(map(len, chunk), dtype=np.int64, count=len(chunk)))
        self.data = bytes(data)
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), *lengths]).cumsum()

    @classmethod
    def packed(cls, data: bytes, starts: NDArray[np.int64]) -> Texts:
        """From `data` and `starts` as they were."""
        made = cls(())
        made.data, made.starts = data, starts
        return made

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> str:
        return self._bytes(row).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (text.decode("utf-8", "surrogatepass") for text in self._all())

    def _bytes(self, row: int) -> bytes:
        return self.data[self.starts[row] : self.starts[row + 1]]

    def _all(self) -> Iterator[bytes]:
        for start in range(0, len(self), CHUNK):
            bounds = self.starts[start : start + CHUNK + 1].tolist()
            for i in range(len(bounds) - 1):
                yield self.data[bounds[i] : bounds[i + 1]]

    def find(self, wanted: Iterable[str]) -> dict[str, int]:
        """The rows of those that are there. One pass over all texts, however many are wanted."""
        missing = {text.encode("utf-8", "surrogatepass"): text for text in wanted}
        found: dict[str, int] = {}
        for row, text in enumerate(self._all()):
            if text in missing:
                found.setdefault(missing[text], row)
        return found

    def repeat(self) -> tuple[int, int] | None:
        """Two rows with the same text, or None. Equal texts have equal hashes: only those are compared."""
        hashes = np.fromiter(map(hash, self._all()), dtype=np.int64, count=len(self))
        order = np.argsort(hashes, kind="stable")
        twins = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        seen: dict[bytes, int] = {}
        for row in np.unique(order[np.concatenate([twins, twins + 1])]).tolist():
            first = seen.setdefault(self._bytes(row), row)
            if first != row:
                return first, row
        return None

    def empty(self) -> int | None:
        """The first row without any text, or None."""
        rows = np.flatnonzero(self.starts[1:] == self.starts[:-1])
        return int(rows[0]) if len(rows) else None
