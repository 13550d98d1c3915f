"""`Look`: what one payload holds, by its first bytes and what it says of itself. Its values are not looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.admit.npz import Header
from lamina.errors import CorpusError
from lamina.train.corpus.leaves import plain, settle, take
from lamina.train.corpus.payloads import is_table
from lamina.train.corpus.read import payload_headers
from lamina.train.corpus.table import read_matrix

_WRITE = "write it with np.savez(path, x=x, y=y)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """What all payloads have in common: shape and dtype of one example and of one label, columns of a CSV."""

    x: Tensor  # no rows
    y: Tensor | None
    header: tuple[str, ...] | None

    def told(self) -> str:
        label = "no y" if self.y is None else f"y {tuple(self.y.shape[1:])} {self.y.dtype}"
        return f"x {tuple(self.x.shape[1:])} {self.x.dtype}, {label}"


class Said(NamedTuple):
    """What a payload says of its arrays: shape of one row, and kind of number."""

    x: tuple[tuple[int, ...], np.dtype[Any]]
    y: tuple[tuple[int, ...], np.dtype[Any]] | None = None
    header: tuple[str, ...] | None = None


class Look:
    """Looks at one payload after the other. `labels` come from elsewhere, so that payloads must have none.

    `said` opens a payload, `form` is what follows from it: worked out once, since nearly all say the same.
    """

    def __init__(self, labels: NDArray[Any] | None, dtype: torch.dtype | None) -> None:
        self._labels, self._dtype = labels, dtype
        self._forms: dict[Said, Form] = {}

    def said(self, path: str, held: bytes | None) -> tuple[int, Said]:
        """The number of examples of a payload, and what it says. Whatever is wrong with it is a CorpusError."""
        try:
            return self._read(path, held)
        except CorpusError:
            raise
        except Exception as error:  # the payload was written by anybody
            raise CorpusError(
                "corpus.not-read", f"'{path}' cannot be read ({type(error).__name__})", _WRITE
            ) from None

    def form(self, said: Said) -> Form:
        """What a model is given. CorpusError if it cannot be given that."""
        if (known := self._forms.get(said)) is not None:
            return known
        try:
            y = None if said.y is None else _none_of(*said.y)
            if self._labels is not None:
                y = take(self._labels[:0], np.empty(0, np.int64))
            form = Form(
                x=settle(_none_of(*said.x), label=False, dtype=self._dtype),
                y=None if y is None else settle(y, label=True, dtype=self._dtype),
                header=said.header,
            )
        except CorpusError:
            raise
        except Exception as error:  # numpy or torch
            kinds = " and ".join(str(each[1]) for each in (said.x, said.y) if each is not None)
            raise CorpusError(
                "corpus.arrays-no-use", f"arrays of {kinds} are of no use ({type(error).__name__})", _WRITE
            ) from None
        return self._forms.setdefault(said, form)

    def _read(self, path: str, held: bytes | None) -> tuple[int, Said]:
        if is_table(path):
            header, table = read_matrix(Path(path), held)
            return 1, Said((table.shape, table.dtype), header=header)
        found = payload_headers(path, held)
        if "x" not in found:
            raise CorpusError("corpus.no-array", f"'{path}' has no array 'x'", _WRITE)
        count, x = _column(path, "x", found["x"])
        if "y" not in found:
            return count, Said(x)
        labels, y = _column(path, "y", found["y"])
        if labels != count:
            raise CorpusError(
                "corpus.examples-shape",
                f"'{path}' has {count} examples in x and y of shape {found['y'].shape}",
                "give one label per example",
            )
        if self._labels is not None:
            raise CorpusError(
                "corpus.contributions-csv",
                f"'{path}' has y, and so has contributions.csv",
                "keep the labels in one of the two places",
            )
        return count, Said(x, y)


def _none_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    return take(plain("x", np.empty((0, *shape), dtype=dtype)), np.empty(0, np.int64))


def _column(path: str, name: str, header: Header) -> tuple[int, tuple[tuple[int, ...], np.dtype[Any]]]:
    """How many rows an array has, and what each is."""
    if header.dtype.hasobject:
        raise CorpusError(
            "corpus.array-holds-python",
            f"array {name!r} of '{path}' holds Python objects, which only pickle can read, and a pickle can run code",
            "save numbers of one shape: np.stack(list_of_arrays)",
        )
    if not header.shape:
        raise CorpusError(
            "corpus.array-single-number",
            f"array {name!r} of '{path}' is a single number",
            "its first axis counts examples",
        )
    if not header.shape[0]:
        raise CorpusError(
            "corpus.array-no-examples",
            f"array {name!r} of '{path}' has no examples",
            "leave the contribution out",
        )
    if 0 in header.shape:
        raise CorpusError(
            "corpus.example-no-numbers",
            f"an example in {name!r} of '{path}' has no numbers",
            "leave the contribution out",
        )
    return header.shape[0], (header.shape[1:], header.dtype)
