"""Contributions on disk: ROOT/ID/payload.npz or ROOT/ID/payload.csv, read when they are sampled."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.errors import CorpusError
from lamina.train.corpus.keyed import keyed, put
from lamina.train.corpus.leaves import CHUNK_BYTES, Rows, feed, plain, settle, take
from lamina.train.corpus.read import npz_header, read_npz
from lamina.train.corpus.table import read_matrix
from lamina.train.corpus.text import Texts

KINDS = ("npz", "csv")


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What all payloads have in common: shape and dtype of one example and of one label, columns of a CSV."""

    x: Tensor  # no rows
    y: Tensor | None
    header: tuple[str, ...] | None

    def told(self) -> str:
        label = "no y" if self.y is None else f"y {tuple(self.y.shape[1:])} {self.y.dtype}"
        return f"x {tuple(self.x.shape[1:])} {self.x.dtype}, {label}"


class FolderSource:
    """The examples of all contributions, id after id.

    An .npz payload holds `x` with one example per row and perhaps `y`; a .csv payload is one example, the table
    rows × columns. Every payload is looked at once, here, so that a wrong one is named before anything is spent;
    while a batch is fetched no id is ever told.
    """

    def __init__(
        self, root: Path, ids: list[str], labels: NDArray[Any] | None, *, dtype: torch.dtype | None = None
    ) -> None:
        self._root, self._ids, self._labels, self._dtype = root, Texts(ids), labels, dtype
        self._kinds = np.empty(len(ids), dtype=np.uint8)
        sizes = np.empty(len(ids), dtype=np.int64)
        forms: dict[bool, tuple[str, _Form]] = {}  # the first of all, and the first with named columns
        for row, name in enumerate(ids):
            self._kinds[row] = kind = _kind(root / name)
            sizes[row], found = self._look(root / name / f"payload.{KINDS[kind]}")
            for named in (False, *((True,) if found.header else ())):
                _check_form(name, found, *forms.setdefault(named, (name, found)))
        self._form = forms[False][1]
        self._ends = np.cumsum(sizes)
        self.sizes = sizes

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
                own_x, own_y = self._read(one)
                if len(own_x) != self.sizes[one]:
                    raise ValueError("another number of examples")
                x[at] = settle(take(own_x, inside), label=False, dtype=self._dtype)
                if y is not None:
                    y[at] = settle(take(own_y, inside), label=True, dtype=self._dtype)
            except (CorpusError, OSError, IndexError, RuntimeError, ValueError):
                raise CorpusError(
                    f"a payload under '{self._root}' is not what it was when the corpus was opened",
                    "leave the folder as it is during a run; opening the corpus again names a payload that is wrong",
                ) from None
        return x, y

    def _read(self, row: int) -> tuple[Any, Any]:
        path = self._path(row)
        wants_y = self._form.y is not None and self._labels is None
        if KINDS[self._kinds[row]] == "npz":
            found = read_npz(path, ["x", "y"] if wants_y else ["x"])
            x, y = found["x"], found.get("y")
        else:
            x, y = read_matrix(path)[1][None], None
        return x, y if self._labels is None else np.repeat(self._labels[row : row + 1], len(x), axis=0)

    def _path(self, row: int) -> Path:
        return self._root / self._ids[row] / f"payload.{KINDS[self._kinds[row]]}"

    def _look(self, path: Path) -> tuple[int, _Form]:
        """The number of examples of a payload, and its form."""
        header, y = None, None
        if path.suffix == ".csv":
            header, table = read_matrix(path)
            count, x = 1, _none_of(table.shape, table.dtype)
        else:
            shape, kind = _array(path, "x", required=True)
            count, x = shape[0], _none_of(shape[1:], kind)
            if (found := _array(path, "y", required=False)) is not None:
                if found[0][:1] != (count,):
                    raise CorpusError(
                        f"'{path}' has {count} examples in x and y of shape {found[0]}",
                        "give one label per example",
                    )
                y = settle(_none_of(found[0][1:], found[1]), label=True, dtype=self._dtype)
        if count == 0:
            raise CorpusError(f"'{path}' has no examples", "leave the contribution out")
        if self._labels is not None:
            if y is not None:
                raise CorpusError(
                    f"'{path}' has y, and so has contributions.csv",
                    "keep the labels in one of the two places",
                )
            y = settle(take(self._labels[:0], np.empty(0, np.int64)), label=True, dtype=self._dtype)
        return count, _Form(x=settle(x, label=False, dtype=self._dtype), y=y, header=header)

    def digest(self, key: bytes) -> bytes:
        """Over ids, labels and every byte of every payload file."""
        hasher = keyed(key, "lamina/folder")
        put(hasher, [str(self._dtype), len(self._ids)])
        feed(hasher, "labels", np.empty(0) if self._labels is None else self._labels)
        for row in range(len(self._ids)):
            path = self._path(row)
            put(hasher, [self._ids[row], path.suffix, path.stat().st_size])
            for part in _parts(path):
                hasher.update(part)
        return hasher.digest()

    def __repr__(self) -> str:
        return f"FolderSource('{self._root}')"


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            yield part


def _none_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    return take(plain("x", np.empty((0, *shape), dtype=dtype)), np.empty(0, np.int64))


def _kind(folder: Path) -> int:
    found = [i for i, kind in enumerate(KINDS) if (folder / f"payload.{kind}").is_file()]
    if len(found) != 1:
        have = "two payloads" if found else "no payload"
        raise CorpusError(f"'{folder}' has {have}", "put one payload.npz or one payload.csv there")
    return found[0]


def _array(path: Path, name: str, *, required: bool) -> Any:
    try:
        found = npz_header(path, name)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise CorpusError(
            f"'{path}' cannot be read as .npz ({type(error).__name__})",
            "write it with np.savez(path, x=x, y=y)",
        ) from None
    if found is None and required:
        raise CorpusError(f"'{path}' has no array {name!r}", "write it with np.savez(path, x=x, y=y)")
    if found is not None and found[1].hasobject:
        raise CorpusError(
            f"array {name!r} of '{path}' holds Python objects, which only pickle can read, and a pickle can run code",
            "save numbers of one shape: np.stack(list_of_arrays)",
        )
    if found is not None and not found[0]:
        raise CorpusError(f"array {name!r} of '{path}' is a single number", "its first axis counts examples")
    return found


def _check_form(name: str, found: _Form, first_name: str, first: _Form) -> None:
    if found.told() != first.told():
        raise CorpusError(
            f"contribution {name!r} has {found.told()}; {first_name!r} has {first.told()}",
            "cut or pad every example to one public shape, and label all or none",
        )
    if found.header and first.header and found.header != first.header:
        raise CorpusError(
            f"contribution {name!r} has columns {', '.join(found.header)}; {first_name!r} has "
            f"{', '.join(first.header)}",
            "give every table the same columns in the same order",
        )
