"""Contributions with one payload file each: found in a folder, inspected, admitted by what they hold. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from lamina.admit.contribution_sources import FolderContributions
from lamina.admit.npz import ArrayHeader
from lamina.admit.rows import PackedTexts
from lamina.admit.workers import WorkerProcess
from lamina.errors import CorpusError
from lamina.run.column_checks import check_numeric_dtype
from lamina.run.table_files import (
    CHUNK_BYTES,
    SAVEZ_REMEDY,
    Hasher,
    array_of_objects,
    hash_parts,
    model_dtype,
    payload_headers,
    read_matrix,
    torch_dtype,
)

PAYLOAD_SUFFIXES = ("npz", "csv")
_NO_PAYLOAD, _TWO_PAYLOADS = len(PAYLOAD_SUFFIXES), len(PAYLOAD_SUFFIXES) + 1


class PayloadChanged(CorpusError):
    """A payload that is not the one that was opened, or signed. The text names nobody: it was sampled."""


class Payloads(Protocol):
    """One payload per contribution, by row.

    `path` names it in messages; `peek` and `read` give its bytes, or None where they are simply what the file of that
    name holds; `read` is asked for what is trained on, and raises PayloadChanged rather than give something else.
    """

    where: str
    ids: PackedTexts
    frozen: bool  # what was read once would be the same again, or refused

    def __len__(self) -> int: ...

    def path(self, row: int) -> str: ...

    def peek(self, row: int) -> bytes | None: ...

    def read(self, row: int) -> bytes | None: ...

    def take(self, rows: NDArray[np.int64]) -> Self: ...

    def feed(self, hasher: Hasher) -> None: ...


class FolderPayloads:
    """ROOT/ID/payload.npz or ROOT/ID/payload.csv; of several roots, each id lies in one."""

    frozen = False

    def __init__(
        self, root: Path | FolderContributions, ids: Sequence[str], kinds: NDArray[np.uint8] | None = None
    ) -> None:
        self._root = root
        self._folder: Callable[[str], str] = (
            root.folder if isinstance(root, FolderContributions) else f"{root / '_'}"[:-1].__add__
        )
        self.where, self.ids = f"under {self!r}", PackedTexts(ids)
        found = (_payload_kind(self._folder(name)) for name in ids)
        self._kinds = np.fromiter(found, dtype=np.uint8, count=len(ids)) if kinds is None else kinds

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, row: int) -> str:
        """Text: to make a Path takes as long as to open a file. CorpusError: there is no payload, or there are two."""
        folder, kind = self._folder(self.ids[row]), self._kinds[row]
        if kind >= _NO_PAYLOAD:
            have = "no payload" if kind == _NO_PAYLOAD else "two payloads"
            problem = f"'{folder}' has {have}"
            raise CorpusError("corpus.payload-missing", problem, "put one payload.npz or one payload.csv there")
        return f"{folder}/payload.{PAYLOAD_SUFFIXES[kind]}"

    def peek(self, row: int) -> bytes | None:
        return None

    def read(self, row: int) -> bytes | None:
        return None

    def take(self, rows: NDArray[np.int64]) -> FolderPayloads:
        return FolderPayloads(self._root, [self.ids[row] for row in rows.tolist()], self._kinds[rows])

    def feed(self, hasher: Hasher) -> None:
        """Ids and every byte of every file."""
        for row in range(len(self)):
            path = Path(self.path(row))
            hash_parts(hasher, [self.ids[row], path.suffix, path.stat().st_size])
            with path.open("rb") as file:
                while part := file.read(CHUNK_BYTES):
                    hasher.update(part)

    def __repr__(self) -> str:
        roots = self._root.paths if isinstance(self._root, FolderContributions) else (self._root,)
        return ", ".join(f"'{path}'" for path in roots)


def is_csv(path: str) -> bool:
    """Whether a payload is one table; if not it is an archive of arrays."""
    return path.endswith(f".{PAYLOAD_SUFFIXES[1]}")


def _payload_kind(folder: str) -> int:
    """Which of PAYLOAD_SUFFIXES lies in the folder of a contribution."""
    found = [i for i, kind in enumerate(PAYLOAD_SUFFIXES) if os.path.isfile(f"{folder}/payload.{kind}")]
    return found[0] if len(found) == 1 else _TWO_PAYLOADS if found else _NO_PAYLOAD


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleFormat:
    """What all payloads have in common: shape and torch dtype of one example and of one label, columns of a CSV."""

    x: tuple[tuple[int, ...], str]
    y: tuple[tuple[int, ...], str] | None
    header: tuple[str, ...] | None

    def text(self) -> str:
        label = "no y" if self.y is None else f"y {self.y[0]} torch.{self.y[1]}"
        return f"x {self.x[0]} torch.{self.x[1]}, {label}"


class PayloadHeaders(NamedTuple):
    """What a payload says of its arrays: shape of one row, and kind of number."""

    x: tuple[tuple[int, ...], np.dtype[Any]]
    y: tuple[tuple[int, ...], np.dtype[Any]] | None = None
    header: tuple[str, ...] | None = None


class PayloadInspector:
    """Looks at one payload after the other. `labels` come from elsewhere, so that payloads must have none.

    `headers` opens a payload; `format_of` is what follows from them, worked out once, since nearly all are the same.
    """

    def __init__(self, labels: NDArray[Any] | None, dtype: str | None) -> None:
        self._labels, self._dtype = labels, dtype
        self._formats: dict[PayloadHeaders, ExampleFormat] = {}

    def headers(self, path: str, content: bytes | None) -> tuple[int, PayloadHeaders]:
        """The number of examples of a payload, and what it says. Whatever is wrong with it is a CorpusError."""
        try:
            return self._read(path, content)
        except CorpusError:
            raise
        except Exception as error:  # the payload was written by anybody
            problem = f"'{path}' cannot be read ({type(error).__name__})"
            raise CorpusError("corpus.payload-unreadable", problem, SAVEZ_REMEDY) from None

    def format_of(self, headers: PayloadHeaders) -> ExampleFormat:
        """What a model is given. CorpusError if it cannot be given that."""
        if (known := self._formats.get(headers)) is not None:
            return known
        y = headers.y if self._labels is None else (self._labels.shape[1:], self._labels.dtype)
        x, labels = self._model_array("x", *headers.x), None if y is None else self._model_array("y", *y)
        return self._formats.setdefault(headers, ExampleFormat(x=x, y=labels, header=headers.header))

    def _model_array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], str]:
        check_numeric_dtype(name, np.empty(0, dtype))
        return shape, model_dtype(torch_dtype(dtype).name, label=name == "y", asked=self._dtype)

    def _read(self, path: str, content: bytes | None) -> tuple[int, PayloadHeaders]:
        if is_csv(path):
            header, table = read_matrix(path, content)
            return 1, PayloadHeaders((table.shape, table.dtype), header=header)
        found = payload_headers(path, content)
        if "x" not in found:
            raise CorpusError("corpus.array-missing", f"'{path}' has no array 'x'", SAVEZ_REMEDY)
        count, x = _rows_and_shape(path, "x", found["x"])
        if "y" not in found:
            return count, PayloadHeaders(x)
        labels, y = _rows_and_shape(path, "y", found["y"])
        if labels != count:
            problem = f"'{path}' has {count} examples in x and y of shape {found['y'].shape}"
            raise CorpusError("corpus.lengths-differ", problem, "give one label per example")
        if self._labels is not None:
            problem = f"'{path}' has y, and so has contributions.csv"
            raise CorpusError("corpus.column-given-twice", problem, "keep the labels in one of the two places")
        return count, PayloadHeaders(x, y)


def _rows_and_shape(path: str, name: str, header: ArrayHeader) -> tuple[int, tuple[tuple[int, ...], np.dtype[Any]]]:
    """How many rows an array has, and what each is."""
    if header.dtype.hasobject:
        raise array_of_objects(path, name)
    if not header.shape:
        problem = f"array {name!r} of '{path}' is a single number"
        raise CorpusError("corpus.array-without-examples-axis", problem, "its first axis counts examples")
    if not header.shape[0]:
        problem = f"array {name!r} of '{path}' has no examples"
        raise CorpusError("corpus.no-examples", problem, "leave the contribution out")
    if 0 in header.shape:
        problem = f"an example in {name!r} of '{path}' has no numbers"
        raise CorpusError("corpus.example-empty", problem, "leave the contribution out")
    return header.shape[0], (header.shape[1:], header.dtype)


MIN_PAYLOADS_PER_PROCESS = 512  # payloads for which a process is worth starting


def _array_to_json(array: tuple[tuple[int, ...], np.dtype[Any]]) -> list[Any]:
    return [array[0], array[1].str]


def _array_from_json(array: list[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return tuple(array[0]), np.dtype(array[1])


class InspectedPayloads(NamedTuple):
    """`sizes[i]` examples in the i-th payload, which has `headers[which[i]]`; -1: it has none, `wrong[i]` says why."""

    sizes: NDArray[np.int64]
    which: NDArray[np.int64]
    headers: list[PayloadHeaders]
    wrong: dict[int, str]

    def to_bytes(self) -> bytes:
        """What a worker sends: two columns of equal length, then JSON."""
        headers = [[_array_to_json(each.x), each.y and _array_to_json(each.y), each.header] for each in self.headers]
        text = json.dumps([headers, list(self.wrong.items())])
        return len(self.sizes).to_bytes(8, "little") + self.sizes.tobytes() + self.which.tobytes() + text.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> InspectedPayloads:
        count = int.from_bytes(data[:8], "little")
        sizes, which = np.frombuffer(data, np.int64, 2 * count, offset=8).reshape(2, count)
        headers, wrong = json.loads(data[8 + 16 * count :])
        made = [
            PayloadHeaders(_array_from_json(x), y and _array_from_json(y), None if header is None else tuple(header))
            for x, y, header in headers
        ]
        return cls(sizes, which, made, dict(wrong))


def inspect_payloads(payloads: Payloads, inspector: PayloadInspector, processes: int = 1) -> InspectedPayloads:
    """All of them, in their order; what is found does not depend on the number of processes."""
    count = len(payloads)
    shares = max(1, min(processes, count // MIN_PAYLOADS_PER_PROCESS))
    ends = [count * share // shares for share in range(shares + 1)]
    first, *rest = (range(*each) for each in pairwise(ends))
    with contextlib.ExitStack() as stack:
        workers: list[WorkerProcess] = []
        for part in rest:
            workers.append(WorkerProcess(partial(_send_inspection, payloads, inspector, part), workers))
            stack.callback(workers[-1].stop)
        mine = _inspect_rows(payloads, inspector, first)
        return _join_inspections([mine, *(InspectedPayloads.from_bytes(each.receive()) for each in workers)])


def _send_inspection(payloads: Payloads, inspector: PayloadInspector, rows: range, line: Connection[Any, Any]) -> None:
    line.send_bytes(_inspect_rows(payloads, inspector, rows).to_bytes())


def _inspect_rows(payloads: Payloads, inspector: PayloadInspector, rows: range) -> InspectedPayloads:
    """No torch: it runs in processes that were forked."""
    found = InspectedPayloads(np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64), [], {})
    places: dict[PayloadHeaders, int] = {}
    for i, row in enumerate(rows):
        try:
            found.sizes[i], headers = inspector.headers(payloads.path(row), payloads.peek(row))
        except CorpusError as error:
            found.wrong[i] = error.problem
            continue
        if (place := places.setdefault(headers, len(places))) == len(found.headers):
            found.headers.append(headers)
        found.which[i] = place
    return found


def _join_inspections(parts: list[InspectedPayloads]) -> InspectedPayloads:
    headers: dict[PayloadHeaders, int] = {}
    wrong: dict[int, str] = {}
    which, before = [], 0
    for part in parts:
        places = np.array([headers.setdefault(each, len(headers)) for each in part.headers] + [-1], dtype=np.int64)
        which.append(places[part.which])  # -1 is the last
        wrong |= {before + i: why for i, why in part.wrong.items()}
        before += len(part.which)
    sizes = np.concatenate([part.sizes for part in parts])
    return InspectedPayloads(sizes, np.concatenate(which), list(headers), wrong)


SHAPE_REMEDY = "cut or pad every example to one public shape, and label all or none"
COLUMNS_REMEDY = "give every table the same columns in the same order"


@dataclass(frozen=True, kw_only=True)
class PayloadSurvey:
    """`sizes[row]` examples of one form."""

    format: ExampleFormat
    sizes: NDArray[np.int64]


def survey_or_raise(payloads: Payloads, inspector: PayloadInspector) -> PayloadSurvey:
    """All of them, or a refusal that names the first that does not fit."""
    sizes = np.empty(len(payloads), dtype=np.int64)
    forms: dict[bool, tuple[str, ExampleFormat]] = {}  # the first of all, and the first with named columns
    for row, name in enumerate(payloads.ids):
        sizes[row], headers = inspector.headers(payloads.path(row), payloads.peek(row))
        found = inspector.format_of(headers)
        for named in (False, *((True,) if found.header else ())):
            _check_same_format(name, found, *forms.setdefault(named, (name, found)))
    return PayloadSurvey(format=forms[False][1], sizes=sizes)


def survey_and_refuse(
    payloads: Payloads, inspector: PayloadInspector, refuse: Callable[[int, str], None], processes: int = 1
) -> tuple[PayloadSurvey | None, NDArray[np.int64]]:
    """Those that fit, and their rows; of the others `refuse` hears row and reason.

    The form is that of nearly all. It may not hang on a single contribution, or adding one person would exclude
    others: where one fewer or one more would change it, nothing is surveyed and the refusal names both forms.
    """
    sizes, which, headers, wrong = inspect_payloads(payloads, inspector, processes)
    for row, why in wrong.items():
        refuse(row, why)
    forms = [_format_or_reason(inspector, each) for each in headers]
    which = _refuse_formats(which, [form if isinstance(form, str) else None for form in forms], refuse)
    for kind, remedy in (("shape", SHAPE_REMEDY), ("columns", COLUMNS_REMEDY)):
        told = [None if isinstance(form, str) else _format_text(form, kind) for form in forms]
        counts: Counter[str] = Counter()
        for place, count in enumerate(np.bincount(which[which >= 0], minlength=len(forms)).tolist()):
            if (text := told[place]) is not None and count:
                counts[text] += count
        if len(counts) < 2:
            continue
        (common, most), (other, second), *_ = counts.most_common()
        if most - second < 2:
            problem = f"{most} contributions have {common}, and {second} have {other}: neither is the common format"
            raise CorpusError("corpus.formats-tied", problem, remedy)
        strange = [None if text in (None, common) else f"it has {text}; the others have {common}" for text in told]
        which = _refuse_formats(which, strange, refuse)
    rows = np.flatnonzero(which >= 0)
    if not len(rows):
        return None, rows
    form = forms[which[rows[0]]]
    assert isinstance(form, ExampleFormat)
    return PayloadSurvey(format=form, sizes=sizes[rows]), rows


def _format_or_reason(inspector: PayloadInspector, headers: PayloadHeaders) -> ExampleFormat | str:
    """Or why a model cannot be given that."""
    try:
        return inspector.format_of(headers)
    except CorpusError as error:
        return error.problem


def _refuse_formats(
    which: NDArray[np.int64], why: list[str | None], refuse: Callable[[int, str], None]
) -> NDArray[np.int64]:
    """Refuse the rows of those forms for which there is a reason: -1 then."""
    wrong = np.array([text is not None for text in why] + [False], dtype=np.bool_)[which]
    for row in np.flatnonzero(wrong).tolist():
        refuse(row, str(why[which[row]]))
    return np.where(wrong, -1, which)


def _format_text(form: ExampleFormat, kind: str) -> str | None:
    if kind == "shape":
        return form.text()
    return None if form.header is None else f"columns {', '.join(form.header)}"


def _check_same_format(name: str, found: ExampleFormat, first_name: str, first: ExampleFormat) -> None:
    if found is first:
        return
    if found.text() != first.text():
        problem = f"contribution {name!r} has {found.text()}; {first_name!r} has {first.text()}"
        raise CorpusError("corpus.formats-differ", problem, SHAPE_REMEDY)
    if found.header and first.header and found.header != first.header:
        found_columns, columns = ", ".join(found.header), ", ".join(first.header)
        problem = f"contribution {name!r} has columns {found_columns}; {first_name!r} has {columns}"
        raise CorpusError("corpus.formats-differ", problem, COLUMNS_REMEDY)
