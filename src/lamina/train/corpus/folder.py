"""Contributions with a payload each: an .npz or a .csv file, read when they are sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.keyed import keyed, put
from lamina.train.corpus.leaves import Rows, feed, settle, take
from lamina.train.corpus.look import Look
from lamina.train.corpus.payloads import PayloadChanged, Payloads, is_table
from lamina.train.corpus.read import payload_arrays
from lamina.train.corpus.survey import Survey, strict
from lamina.train.corpus.table import read_matrix

KEPT = 64 << 20  # bytes


class FolderSource:
    """The examples of all contributions, id after id.

    An .npz payload holds `x` with one example per row and perhaps `y`; a .csv payload is one example, the table
    rows × columns. Every payload is looked at once, before, so that a wrong one is named before anything is spent;
    while a batch is fetched no id is ever told. Payloads that are held to a commitment are kept once they were read, as
    far as KEPT bytes go.
    """

    def __init__(
        self,
        payloads: Payloads,
        labels: NDArray[Any] | None,
        *,
        dtype: torch.dtype | None = None,
        survey: Survey | None = None,
    ) -> None:
        survey = strict(payloads, Look(labels, dtype)) if survey is None else survey
        self._payloads, self._labels, self._dtype = payloads, labels, dtype
        self._form, self.sizes = survey.form, survey.sizes
        self._ends = np.cumsum(survey.sizes)
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._room = KEPT if payloads.frozen else 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, rows: Rows) -> tuple[Any, Any]:
        """(x, y) of these examples. A payload is opened once, however many of its examples are wanted."""
        owner = np.searchsorted(self._ends, rows, side="right")
        x = self._form.x.new_empty((len(rows), *self._form.x.shape[1:]))
        y = None if self._form.y is None else self._form.y.new_empty((len(rows), *self._form.y.shape[1:]))
        for one in np.unique(owner).tolist():
            at = np.flatnonzero(owner == one)
            inside = rows[at] - (self._ends[one] - self.sizes[one])
            try:
                own_x, own_y = self._kept[one] if one in self._kept else self._read(one)
                if len(own_x) != self.sizes[one]:
                    raise ValueError("another number of examples")
                x[at] = settle(take(own_x, inside), label=False, dtype=self._dtype)
                if y is not None:
                    y[at] = settle(take(own_y, inside), label=True, dtype=self._dtype)
            except PayloadChanged:
                raise
            except (CorpusError, OSError, IndexError, RuntimeError, ValueError):
                raise PayloadChanged(
                    "corpus.payload-not-corpus",
                    f"a payload {self._payloads.where} is not what it was when the corpus was opened",
                    "leave the folder as it is during a run; opening the corpus again names a payload that is wrong",
                ) from None
        return x, y

    def _read(self, row: int) -> tuple[Any, Any]:
        path, held = self._payloads.path(row), self._payloads.read(row)
        wants_y = self._form.y is not None and self._labels is None
        if is_table(str(path)):
            x, y = read_matrix(path, held)[1][None], None
        else:
            found = payload_arrays(path, ["x", "y"] if wants_y else ["x"], held)
            x, y = found["x"], found.get("y")
        y = y if self._labels is None else np.repeat(self._labels[row : row + 1], len(x), axis=0)
        if (size := x.nbytes + (0 if y is None else y.nbytes)) <= self._room:
            self._room -= size
            self._kept[row] = x, y
        return x, y

    def digest(self, key: bytes) -> bytes:
        """Over ids, labels and every byte of every payload, or what vouches for them."""
        hasher = keyed(key, "lamina/folder")
        put(hasher, [str(self._dtype), len(self._payloads)])
        feed(hasher, "labels", np.empty(0) if self._labels is None else self._labels)
        self._payloads.feed(hasher)
        return hasher.digest()

    def __repr__(self) -> str:
        return f"FolderSource({self._payloads!r})"
