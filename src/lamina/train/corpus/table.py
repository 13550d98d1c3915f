"""A CSV file as columns of numbers and of names. Messages say the column and the line, never the value."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lamina.errors import CorpusError
from lamina.train.corpus.leaves import NUMBER_LABELS

AT_ONCE = 4096
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
Line = tuple[int, list[str]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """`x` (rows × features), `y` (rows, or rows × labels; int64 if every label is whole), named columns as text."""

    x: NDArray[Any]
    y: NDArray[Any] | None
    names: dict[str, list[str]]


def read_table(
    path: Path,
    *,
    x: Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    names: Sequence[str] = (),
    delimiter: str = ",",
    dtype: type[Any] = np.float32,
) -> Table:
    """Read a CSV file with a header. `x` defaults to all columns that are neither `y` nor among `names`."""
    labels = [] if y is None else [y] if isinstance(y, str) else list(y)
    with opened(path) as file:
        lines = lines_of(path, csv.reader(file, delimiter=delimiter, strict=True))
        header = header_of(path, lines, delimiter)
        for name in [*(x or ()), *labels, *names]:
            check_column(path, name, header)
        features = list(x) if x is not None else [c for c in header if c not in {*labels, *names}]
        if not features:
            raise CorpusError(
                "corpus.no-column-left",
                f"'{path}' has no column left for x",
                "name the feature columns with x=[…]",
            )
        numbers = Numbers(path, header, features, dtype)
        targets = Labels(path, header, labels)
        texts = {name: Names(path, header, name) for name in names}
        while chunk := list(islice(lines, AT_ONCE)):
            numbers.read(chunk)
            targets.read(chunk)
            for reader in texts.values():
                reader.read(chunk)
    if not numbers.parts:
        raise CorpusError(
            "corpus.header-no-rows", f"'{path}' has a header and no rows", "give one row per example"
        )
    found = targets.array() if labels else None
    return Table(
        x=np.concatenate(numbers.parts),
        y=found[:, 0] if found is not None and isinstance(y, str) else found,
        names={name: reader.values for name, reader in texts.items()},
    )


def read_matrix(path: Path, held: bytes | None = None) -> tuple[tuple[str, ...] | None, NDArray[np.float32]]:
    """A CSV file that is one example: (its header or None, the table rows × columns).

    `held` is what the file holds, where it was read already; `path` then only names it.
    """
    with (
        opened(path) if held is None else io.TextIOWrapper(io.BytesIO(held), "utf-8-sig", newline="") as file
    ):
        lines = list(lines_of(path, csv.reader(file, strict=True)))
    if not lines:
        raise CorpusError("corpus.empty", f"'{path}' is empty", "give a table of numbers")
    header = None if _all_numbers(lines[0][1]) else tuple(cell.strip() for cell in lines.pop(0)[1])
    if not lines:
        raise CorpusError(
            "corpus.header-no-rows", f"'{path}' has a header and no rows", "give a table of numbers"
        )
    columns = header or tuple(str(i) for i in range(len(lines[0][1])))
    numbers = Numbers(path, list(columns), None, np.float32)
    numbers.read(lines)
    return header, numbers.parts[0]


# ------------------------------------------------------------------------------------------ columns


class Numbers:
    """Feature columns."""

    def __init__(self, path: Path, header: list[str], columns: list[str] | None, dtype: type[Any]) -> None:
        self.path, self.dtype = path, dtype
        self.columns = header if columns is None else columns
        self.at = [header.index(c) for c in columns] if columns is not None else list(range(len(header)))
        self.width = len(header)
        self.parts: list[NDArray[Any]] = []

    def read(self, lines: Sequence[Line]) -> None:
        cells = [[row[i] for i in self.at] for row in _of_width(self.path, lines, self.width)]
        self.parts.append(_floats(self.path, self.columns, cells, lines, label=False).astype(self.dtype))


class Labels:
    """Label columns: whole numbers as long as all of them are."""

    def __init__(self, path: Path, header: list[str], columns: list[str]) -> None:
        self.path, self.columns, self.width = path, columns, len(header)
        self.at = [header.index(c) for c in columns]
        self.parts: list[NDArray[Any]] = []

    def read(self, lines: Sequence[Line]) -> None:
        cells = [[row[i] for i in self.at] for row in _of_width(self.path, lines, self.width)]
        try:
            self.parts.append(np.array([[int(c) for c in row] for row in cells], dtype=np.int64))
        except (ValueError, OverflowError):
            self.parts.append(_floats(self.path, self.columns, cells, lines, label=True))

    def array(self) -> NDArray[Any]:
        return np.concatenate(self.parts)  # whole numbers become floats if any part has a fraction


class Names:
    """A column of names, none of them missing. Equal names are one object: a patient has many rows."""

    def __init__(self, path: Path, header: list[str], column: str) -> None:
        self.path, self.column, self.at, self.width = path, column, header.index(column), len(header)
        self.values: list[str] = []
        self._known: dict[str, str] = {}

    def read(self, lines: Sequence[Line]) -> None:
        for (number, _), row in zip(lines, _of_width(self.path, lines, self.width), strict=True):
            text = row[self.at].strip()
            if not text:
                raise CorpusError(
                    "corpus.line-no",
                    f"'{self.path}' line {number} has no {self.column!r}",
                    f"give every row a {self.column!r}",
                )
            self.values.append(self._known.setdefault(text, text))


# ------------------------------------------------------------------------------------------ lines


def opened(path: Path) -> Any:
    try:
        return open(path, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise CorpusError(
            "corpus.not-read-give",
            f"'{path}' cannot be read: {error.strerror}",
            "give the path of a CSV file",
        ) from None


def lines_of(path: Path, reader: Any) -> Iterator[Line]:
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise CorpusError(
            "corpus.after-line-not",
            f"'{path}' after line {reader.line_num} is not CSV in UTF-8 ({type(error).__name__})",
            "save it as comma-separated values in UTF-8",
        ) from None


def header_of(path: Path, lines: Iterator[Line], delimiter: str) -> list[str]:
    _, first = next(lines, (0, []))
    if not first:
        raise CorpusError("corpus.empty", f"'{path}' is empty", "give a header line and one row per example")
    header = [cell.strip() for cell in first]
    if _all_numbers(header):
        raise CorpusError(
            "corpus.begins-numbers-header",
            f"'{path}' begins with numbers where the header should be",
            "name the columns in the first line",
        )
    if len(header) == 1 and any(sign in header[0] for sign in ";\t|"):
        raise CorpusError(
            "corpus.column-cut",
            f"'{path}' has one column if cut at {delimiter!r}",
            "say how it is cut: delimiter=';' or '\\t'",
        )
    twice = next((name for i, name in enumerate(header) if name in header[:i]), None)
    if twice is not None:
        raise CorpusError(
            "corpus.two-columns", f"'{path}' has two columns {twice!r}", "give every column its own name"
        )
    return header


def check_column(path: Path, name: str, header: list[str]) -> None:
    if name not in header:
        raise CorpusError(
            "corpus.no-column", f"'{path}' has no column {name!r}", f"its columns are {', '.join(header)}"
        )


def _of_width(path: Path, lines: Sequence[Line], width: int) -> list[list[str]]:
    for number, row in lines:
        if len(row) != width:
            raise CorpusError(
                "corpus.line-cells-header",
                f"'{path}' line {number} has {len(row)} cells, the header has {width}",
                "give every line as many cells as the header",
            )
    return [row for _, row in lines]


def _floats(
    path: Path, columns: list[str], cells: list[list[str]], lines: Sequence[Line], label: bool
) -> NDArray[np.float64]:
    try:
        values = np.array(cells, dtype=np.float64)
    except ValueError:
        _explain(path, columns, cells, lines, label)
    if np.isnan(values).any():
        _explain(path, columns, cells, lines, label)
    return values


def _explain(
    path: Path, columns: list[str], cells: list[list[str]], lines: Sequence[Line], label: bool
) -> NoReturn:
    """Raise for the first cell that is not a number: there is one."""
    encode = "leave it out by naming the feature columns (x=[…]), or encode it with a public table"
    for (number, _), row in zip(lines, cells, strict=True):
        for column, cell in zip(columns, row, strict=True):
            if cell.strip().lower() in MISSING or _is_nan(cell):
                raise CorpusError(
                    "corpus.line-no-value",
                    f"'{path}' line {number} has no value in column {column!r}",
                    "fill it with a public constant (never with a mean of the data), or leave the row out",
                )
            if not _is_number(cell):
                raise CorpusError(
                    "corpus.line-text-column",
                    f"'{path}' line {number} has text in column {column!r}",
                    NUMBER_LABELS if label else encode,
                )
    raise AssertionError("numpy and float() read a number differently")


def _all_numbers(cells: Sequence[str]) -> bool:
    return all(_is_number(cell) for cell in cells)


def _is_nan(cell: str) -> bool:
    return _is_number(cell) and math.isnan(float(cell))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
