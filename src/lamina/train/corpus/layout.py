"""Where the examples of each contribution lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.train.corpus.keyed import Hasher, put

Rows = NDArray[np.int64]


class Layout:
    """The examples of contributions 0 … P-1.

    Two arrays at most: where the examples of each contribution begin, and, unless contributions lie end to end
    already, the examples in that order. They are of 32 bits where these suffice.

    >>> Layout(np.array([0, 1, 0])).rows_of(np.array([0, 1]))
    array([0, 2, 1])
    """

    def __init__(self, codes: Rows) -> None:
        self._narrow = np.int32 if len(codes) < 1 << 31 else np.int64
        sizes = np.bincount(codes)
        self._starts: NDArray[Any] = np.concatenate([[0], np.cumsum(sizes)]).astype(self._narrow)
        self._order: NDArray[Any] | None = None
        if not bool((codes[1:] >= codes[:-1]).all()):
            self._order = np.argsort(codes, kind="stable").astype(self._narrow)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def examples(self) -> int:
        return int(self._starts[-1])

    @property
    def trivial(self) -> bool:
        """Whether every example is a contribution of its own."""
        return len(self) == self.examples and self._order is None

    def sizes(self, rows: Rows) -> Rows:
        """The number of examples of these contributions."""
        sizes: Rows = (self._starts[rows + 1] - self._starts[rows]).astype(np.int64)
        return sizes

    def rows_of(self, rows: Rows) -> Rows:
        """The examples of these contributions, contribution after contribution."""
        sizes = self.sizes(rows)
        before = np.cumsum(sizes) - sizes
        at = np.repeat(self._starts[rows] - before, sizes) + np.arange(int(sizes.sum()))
        found: Rows = (at if self._order is None else self._order[at]).astype(np.int64, copy=False)
        return found

    def feed(self, hasher: Hasher) -> None:
        """Into a digest: the same for the same assignment, whatever the width of the arrays."""
        for array in (self._starts, np.empty(0, np.int64) if self._order is None else self._order):
            put(hasher, [len(array)])
            for start in range(0, len(array), 1 << 20):
                hasher.update(array[start : start + (1 << 20)].astype("<i8").tobytes())
