"""Many short byte strings in one buffer: a million ids without a million objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Packed:
    """An append-only list of byte strings. It takes their bytes, and eight more for each."""

    __slots__ = ("_data", "_ends")

    def __init__(self, items: Iterable[bytes] = ()) -> None:
        self._data = bytearray()
        self._ends = array("q")
        for item in items:
            self.append(item)

    def append(self, item: bytes) -> None:
        self._data += item
        self._ends.append(len(self._data))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> bytes:
        end = self._ends[row]  # raises IndexError, and takes -1 for the last
        row %= len(self._ends)
        return bytes(self._data[self._ends[row - 1] if row else 0 : end])

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the others."""
        kept = Packed(self[int(row)] for row in np.flatnonzero(mask))
        self._data, self._ends = kept._data, kept._ends

    @property
    def nbytes(self) -> int:
        return len(self._data) + 8 * len(self._ends)
