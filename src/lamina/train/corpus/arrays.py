"""Examples that lie in arrays: numpy (memmaps too), torch, tuples and dicts of them."""

from __future__ import annotations

from typing import Any

import torch

from lamina.errors import CorpusError
from lamina.train.corpus.keyed import Hasher, keyed, put
from lamina.train.corpus.leaves import Rows, feed, leaves, map_leaves, plain, settle, take


class ArraySource:
    """Rows of arrays. Nothing is copied until it is fetched, so a memmap larger than memory works.

    NaN and infinite values pass: the engine zeroes the contribution that they spoil, and looking for them here
    would be a look at private data whose outcome shows.
    """

    def __init__(self, x: Any, y: Any = None, *, dtype: torch.dtype | None = None) -> None:
        self._x = map_leaves(plain, x, "x")
        self._y = None if y is None else map_leaves(plain, y, "y")
        self._dtype = dtype
        self._size = self._common_length()

    def _common_length(self) -> int:
        sizes = {name: len(leaf) for name, leaf in self._leaves()}
        if not any(name.startswith("x") for name in sizes):
            raise CorpusError(
                "corpus.no-arrays", "x has no arrays", "give an array, or a tuple or dict of arrays"
            )
        (first, size), *others = sizes.items()
        for name, other in others:
            if other != size:
                raise CorpusError(
                    "corpus.examples",
                    f"{first} has {size} examples, {name} has {other}",
                    "the first axis of every array counts examples: give as many labels as examples",
                )
        return size

    def _leaves(self) -> list[tuple[str, Any]]:
        return [*leaves(self._x, "x"), *(leaves(self._y, "y") if self._y is not None else ())]

    @property
    def y(self) -> Any:
        """The labels as they were given, where they are one array; None otherwise."""
        return None if isinstance(self._y, tuple | dict) else self._y

    def __len__(self) -> int:
        return self._size

    def fetch(self, rows: Rows) -> tuple[Any, Any]:
        """(x, y) of these examples; y is None where there are no labels."""

        def rows_of(name: str, leaf: Any) -> Any:
            return settle(take(leaf, rows), label=name.startswith("y"), dtype=self._dtype)

        x = map_leaves(rows_of, self._x, "x")
        return x, None if self._y is None else map_leaves(rows_of, self._y, "y")

    def digest(self, key: bytes) -> bytes:
        """Over names, dtypes, shapes and all bytes, and over the dtype that they are converted to."""
        hasher = keyed(key, "lamina/arrays")
        self.feed(hasher)
        return hasher.digest()

    def feed(self, hasher: Hasher) -> None:
        """All of it into a digest."""
        every = self._leaves()
        put(hasher, [str(self._dtype), len(every)])
        for name, leaf in every:
            feed(hasher, name, leaf)

    def __repr__(self) -> str:
        return f"ArraySource({', '.join(name for name, _ in self._leaves())})"
