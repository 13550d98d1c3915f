"""Reads CSV tables and .npz archives: columns of numbers, labels and names. Needs no torch."""

from __future__ import annotations

import csv
import io
import math
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lamina.admit.npz import ArrayHeader, BadArray, read_arrays, read_headers
from lamina.errors import CorpusError
from lamina.run.column_checks import FILL_REMEDY, LABEL_MISSING_REMEDY, LABELS_REMEDY, text_remedy
from lamina.validate import open_regular

ROWS_PER_CHUNK = 4096
MAX_COLUMNS = 1 << 18
_MAX_LINE = 1 << 26  # characters
_COLUMNS_NAMED = 20  # in a message
MISSING_VALUES = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
CsvLine = tuple[int, list[str]]
CHUNK_BYTES = 1 << 24  # hashed at a time: a memmap is never held in memory as a whole


@dataclass(frozen=True, kw_only=True)
class CsvTable:
    """`x` (rows × `features`), `y` (rows, or rows × labels; int64 if every label is whole), named columns as text."""

    x: NDArray[Any]
    y: NDArray[Any] | None
    names: dict[str, list[str]]
    features: list[str]


def read_table(
    path: Path,
    *,
    x: Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    names: Sequence[str] = (),
    delimiter: str = ",",
    dtype: type[Any] = np.float32,
    filled: bool = False,
) -> CsvTable:
    """Read a CSV file with a header. `x` defaults to all columns that are neither `y` nor among `names`.

    `filled`: missing values of x become NaN.
    """
    labels = [] if y is None else [y] if isinstance(y, str) else list(y)
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n"':
        problem = f"delimiter is {delimiter!r}, must be one character"
        raise CorpusError("corpus.csv-delimiter", problem, "give the character between cells: ',', ';' or '\\t'")
    with open_csv(path) as file:
        lines = csv_lines(path, file, delimiter)
        header = csv_header(path, lines, delimiter)
        for name in [*(x or ()), *labels, *names]:
            check_column(path, name, header)
        others = {*labels, *names}
        features = list(x) if x is not None else [c for c in header if c not in others]
        if not features:
            problem = f"'{path}' has no column left for x"
            raise CorpusError("corpus.no-inputs", problem, "name the feature columns with x=[…]")
        inputs: list[NDArray[Any]] = []
        targets: list[NDArray[Any]] = []  # whole numbers become floats if any chunk has a fraction
        texts: dict[str, list[str]] = {name: [] for name in names}
        while chunk := list(islice(lines, ROWS_PER_CHUNK)):
            inputs.append(_numbers(path, _places(header, features), chunk, filled=filled).astype(dtype))
            targets.append(_numbers(path, _places(header, labels), chunk, label=True))
            for name, values in texts.items():
                values += name_column(path, header, name, chunk)
    if not inputs:
        raise CorpusError("corpus.no-examples", f"'{path}' has a header and no rows", "give one row per example")
    found = np.concatenate(targets) if labels else None
    y_found = found[:, 0] if found is not None and isinstance(y, str) else found
    return CsvTable(x=np.concatenate(inputs), y=y_found, names=texts, features=features)


def read_matrix(path: str | Path, content: bytes | None = None) -> tuple[tuple[str, ...] | None, NDArray[np.float32]]:
    """A CSV file that is one example: (its header or None, the table rows × columns).

    `content` is what the file holds, where it was read already; `path` then only names it.
    """
    with open_csv(path) if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="") as file:
        lines = list(csv_lines(path, file))
    if not lines:
        raise CorpusError("corpus.file-empty", f"'{path}' is empty", "give a table of numbers")
    header = None if _all_numbers(lines[0][1]) else tuple(cell.strip() for cell in lines.pop(0)[1])
    if not lines:
        raise CorpusError("corpus.no-examples", f"'{path}' has a header and no rows", "give a table of numbers")
    columns = list(enumerate(header or map(str, range(len(lines[0][1])))))
    return header, _numbers(path, columns, lines).astype(np.float32)


def _places(header: list[str], columns: Sequence[str]) -> list[tuple[int, str]]:
    places = {name: i for i, name in enumerate(header)}
    return [(places[name], name) for name in columns]


def _numbers(
    path: str | Path, columns: Sequence[tuple[int, str]], lines: Sequence[CsvLine], *, label: bool = False,
    filled: bool = False,
) -> NDArray[Any]:  # fmt: skip
    """Columns of numbers, lines × columns: float64, or int64 where they are labels and all of them whole."""
    cells = [[row[i] for i, _ in columns] for _, row in lines]
    if filled:
        cells = [["nan" if cell.strip().lower() in MISSING_VALUES else cell for cell in row] for row in cells]
    if label:
        with suppress(ValueError, OverflowError):
            return np.array([[int(cell) for cell in row] for row in cells], dtype=np.int64)
    with suppress(ValueError):
        values = np.array(cells, dtype=np.float64)
        if filled or np.isfinite(values).all():
            return values
    raise _first_bad_cell(path, columns, lines, label)


def _first_bad_cell(
    path: str | Path, columns: Sequence[tuple[int, str]], lines: Sequence[CsvLine], label: bool
) -> CorpusError:
    missing = LABEL_MISSING_REMEDY if label else FILL_REMEDY
    for number, row in lines:
        for i, column in columns:
            value = _number(row[i])
            if row[i].strip().lower() in MISSING_VALUES or (value is not None and math.isnan(value)):
                problem = f"'{path}' line {number} has no value in column {column!r}"
                return CorpusError("corpus.value-missing", problem, missing)
            if value is not None and math.isinf(value):
                problem = f"'{path}' line {number} has an infinite value in column {column!r}"
                return CorpusError("corpus.value-missing", problem, missing)
            if value is None:
                problem = f"'{path}' line {number} has text in column {column!r}"
                return CorpusError(
                    "corpus.value-not-a-number", problem, LABELS_REMEDY if label else text_remedy(column)
                )
    raise AssertionError("numpy and float() read a number differently")


def name_column(path: Path, header: list[str], column: str, lines: Sequence[CsvLine]) -> Iterator[str]:
    """A column of names, none of them missing. Equal names are one object: a patient has many rows."""
    at = header.index(column)
    for number, row in lines:
        if not (text := row[at].strip()):
            problem = f"'{path}' line {number} has no {column!r}"
            raise CorpusError("corpus.value-missing", problem, f"give every row a {column!r}")
        yield sys.intern(text)


def read_names(path: Path, *columns: str) -> list[list[str]]:
    """Columns of names of a CSV file."""
    header, lines = _read_lines(path)
    for name in columns:
        check_column(path, name, header)
    return [list(name_column(path, header, name, lines)) for name in columns]


def _read_lines(path: Path) -> tuple[list[str], list[CsvLine]]:
    with open_csv(path) as file:
        lines = csv_lines(path, file)
        return csv_header(path, lines, ","), list(lines)


def open_csv(path: str | Path) -> Any:
    try:
        return open(open_regular(path), encoding="utf-8-sig", newline="")
    except OSError as error:
        problem = f"'{path}' cannot be read: {error.strerror}"
        raise CorpusError("corpus.file-unreadable", problem, "give the path of a CSV file") from None


def csv_lines(path: str | Path, file: Any, delimiter: str = ",") -> Iterator[CsvLine]:
    """Yield the non-empty lines with their numbers. All have one width; a line that is too wide is refused unparsed."""
    delimiters, width = 0, None

    def lines() -> Iterator[str]:
        nonlocal delimiters
        while line := file.readline(_MAX_LINE + 1):
            delimiters += line.count(delimiter)  # of one row, which may span several lines in quotes
            if delimiters >= MAX_COLUMNS or len(line) > _MAX_LINE:
                problem = f"'{path}' has a line with more than {MAX_COLUMNS} cells or {_MAX_LINE} characters"
                remedy = "give one row per example and one column per feature; larger tables as .npz"
                raise CorpusError("corpus.csv-too-wide", problem, remedy)
            yield line

    try:
        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        for row in reader:
            delimiters = 0
            if not row:
                continue
            width = len(row) if width is None else width
            if len(row) != width:
                problem = f"'{path}' line {reader.line_num} has {len(row)} cells, the first line has {width}"
                raise CorpusError("corpus.csv-line-width", problem, "give every line as many cells as the header")
            yield reader.line_num, row
    except UnicodeDecodeError:
        problem = f"'{path}' is not text in UTF-8 (after line {reader.line_num})"
        remedy = 'save it as "CSV UTF-8"; or, if it is Latin-1: iconv -f latin1 -t utf-8 OLD.csv > NEW.csv'
        raise CorpusError("corpus.csv-not-utf8", problem, remedy) from None
    except csv.Error as error:
        problem = f"'{path}' after line {reader.line_num} is not CSV ({error})"
        raise CorpusError("corpus.csv-malformed", problem, "save it as comma-separated values in UTF-8") from None


def csv_header(path: Path, lines: Iterator[CsvLine], delimiter: str) -> list[str]:
    _, first = next(lines, (0, []))
    if not first:
        raise CorpusError("corpus.file-empty", f"'{path}' is empty", "give a header line and one row per example")
    header = [cell.strip() for cell in first]
    if _all_numbers(header):
        problem = f"'{path}' begins with numbers where the header should be"
        raise CorpusError("corpus.csv-without-header", problem, "name the columns in the first line")
    if len(header) == 1 and any(sign in header[0] for sign in ";\t|"):
        problem = f"'{path}' has one column if cut at {delimiter!r}"
        raise CorpusError("corpus.csv-wrong-delimiter", problem, "say how it is cut: delimiter=';' or '\\t'")
    known: set[str] = set()
    twice = next((name for name in header if name in known or known.add(name)), None)  # type: ignore[func-returns-value]
    if twice is not None:
        problem = f"'{path}' has two columns {twice!r}"
        raise CorpusError("corpus.column-repeated", problem, "give every column its own name")
    return header


def check_column(where: str | Path, name: str, header: list[str]) -> None:
    if name not in header:
        problem = f"{where if isinstance(where, str) else repr(str(where))} has no column {name!r}"
        shown = ", ".join(header[:_COLUMNS_NAMED]) + (", …" if len(header) > _COLUMNS_NAMED else "")
        raise CorpusError("corpus.column-unknown", problem, f"its columns are {shown}")


def _all_numbers(cells: Sequence[str]) -> bool:
    return all(_number(cell) is not None for cell in cells)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


_READ_AT_ONCE = 1 << 16  # bytes: most payloads have fewer
SAVEZ_REMEDY = "write it with np.savez(path, x=x, y=y)"


def read_npz(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Some arrays of an .npz file. Arrays of Python objects would have to be unpickled, so they are refused."""
    try:
        with open(open_regular(path), "rb") as raw:
            if not zipfile.is_zipfile(raw):
                raise CorpusError("corpus.npz-unreadable", f"'{path}' is not an .npz file", SAVEZ_REMEDY)
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                for name in names:
                    if name not in file.files:
                        problem = f"'{path}' has no array {name!r}; it has {', '.join(file.files)}"
                        remedy = "name the arrays: x='…', y='…', or y=None where there are no labels"
                        raise CorpusError("corpus.array-missing", problem, remedy)
                return {name: _load_array(path, file, name) for name in names}
    except FileNotFoundError:
        raise CorpusError("corpus.file-missing", f"'{path}' is not there", "give the path of an .npz file") from None
    except CorpusError:
        raise
    except Exception as error:
        raise _unreadable_npz(path, error) from None


def _load_array(path: Path, file: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = file[name]
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise array_of_objects(path, name) from None
    return array


def array_of_objects(path: str | Path, name: str) -> CorpusError:
    """The refusal of an array that only pickle can read: a pickle can run code."""
    problem = f"array {name!r} of '{path}' holds Python objects, which Lamina does not unpickle"
    remedy = "save numbers of one shape: np.stack(list_of_arrays), and names as an array of text"
    return CorpusError("corpus.array-of-objects", problem, remedy)


def payload_headers(path: str, content: bytes | None = None) -> dict[str, ArrayHeader]:
    """What the arrays x and y of a payload say of themselves, as far as they are there and can be read."""
    try:
        with open(open_regular(path), "rb", buffering=0) if content is None else io.BytesIO(content) as raw:
            begin = raw.read(_READ_AT_ONCE)  # zipfile reads in many small steps
            return read_headers(io.BytesIO(begin) if len(begin) < _READ_AT_ONCE else raw, ("x", "y"))
    except Exception as error:
        raise _unreadable_npz(path, error) from None


def payload_arrays(path: str, names: Sequence[str], content: bytes | None = None) -> dict[str, NDArray[Any]]:
    """These arrays of a payload. `content` was compared with a commitment: no checksum adds to that."""
    try:
        with open(open_regular(path), "rb") if content is None else io.BytesIO(content) as raw:
            found = read_arrays(raw, names, crc=content is None)
    except Exception as error:
        raise _unreadable_npz(path, error) from None
    if missing := next((name for name in names if name not in found), None):
        raise CorpusError("corpus.array-missing", f"'{path}' has no array {missing!r}", SAVEZ_REMEDY)
    return found


def _unreadable_npz(path: str | Path, error: Exception) -> CorpusError:
    """Of what numpy, zipfile and zlib say only the kind is told: their words may quote the file."""
    why = str(error) if isinstance(error, BadArray) else type(error).__name__
    return CorpusError("corpus.npz-unreadable", f"'{path}' cannot be read as .npz ({why})", SAVEZ_REMEDY)


LISTING_COLUMNS = ("id", "class", "subject", "y")
LISTING = "contributions.csv"


@dataclass(frozen=True, kw_only=True)
class ContributionListing:
    """ROOT/contributions.csv: one line per contribution, sorted by id, which is the order of a corpus of a folder."""

    ids: list[str]
    classes: list[str] | None
    subjects: list[str] | None
    y: NDArray[Any] | None

    @classmethod
    def of_folders(cls, roots: Sequence[Path]) -> ContributionListing | None:
        """The listings of these folders as one, sorted by id; None where there is none. All have the same columns."""
        found = [cls.read(root / LISTING) for root in roots if (root / LISTING).exists()]
        if not found or len(roots) == 1:
            return found[0] if found else None
        columns = [[each.y is not None, each.classes is not None, each.subjects is not None] for each in found]
        if len(found) < len(roots) or any(each != columns[0] for each in columns):
            problem = f"the folders have no {LISTING}, or one with other columns: {', '.join(map(str, roots))}"
            raise CorpusError("corpus.listings-differ", problem, "give each folder one, with the same columns")
        ids = [id for each in found for id in each.ids]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        classes, subjects = (
            [name for each in found for name in getattr(each, what) or ()] for what in ("classes", "subjects")
        )
        return cls(
            ids=[ids[i] for i in order],
            classes=[classes[i] for i in order] if classes else None,
            subjects=[subjects[i] for i in order] if subjects else None,
            y=np.concatenate([each.y for each in found if each.y is not None])[order] if columns[0][0] else None,
        )

    @classmethod
    def read(cls, path: Path) -> ContributionListing:
        header, rows = _read_lines(path)
        strange = [name for name in header if name not in LISTING_COLUMNS]
        if strange or "id" not in header:
            what = f"has a column {strange[0]!r}" if strange else "has no column 'id'"
            remedy = f"its columns are {', '.join(LISTING_COLUMNS)}; only id is required"
            raise CorpusError("corpus.listing-columns", f"'{path}' {what}", remedy)
        if not rows:
            problem = f"'{path}' lists no contributions"
            raise CorpusError("corpus.no-contributions", problem, "give one line per contribution")

        rows.sort(key=lambda line: line[1][header.index("id")].strip())
        ids, classes, subjects = (
            list(name_column(path, header, name, rows)) if name in header else None for name in LISTING_COLUMNS[:3]
        )
        y = _numbers(path, _places(header, ["y"]), rows, label=True)[:, 0] if "y" in header else None
        return cls(ids=ids or [], classes=classes, subjects=subjects, y=y)


class Hasher(Protocol):
    """What hashlib gives."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def hash_parts(hasher: Hasher, parts: Iterable[bytes | str | int]) -> None:
    """Feed parts so that different sequences of parts never feed the same bytes: each behind its length."""
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "big"))
        hasher.update(data)


def torch_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The kind of number that torch has for it."""
    if dtype.kind == "f" and dtype.itemsize > 8:
        return np.dtype(np.float64)
    if dtype.kind == "c" and dtype.itemsize > 16:
        return np.dtype(np.complex128)
    return dtype.newbyteorder("=")


def model_dtype(name: str, *, label: bool, asked: str | None = None) -> str:
    """The dtype that a model expects, by name.

    x: floating point becomes float32; small integers (bytes of images, counts, token ids) stay as they are;
    `asked` overrides both. y: integers become int64, floating point float32 or a floating `asked`.
    """
    asked = None if label and asked is not None and "float" not in asked else asked
    if "float" in name:
        return asked or "float32"
    if label:
        return name if "complex" in name else "int64"
    if name in ("uint16", "uint32", "uint64"):  # torch can do next to nothing with these
        return asked or "int64"
    return asked or name
