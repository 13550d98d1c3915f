"""A first look at payloads: what each holds, and that all are of one form. Their values are not looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.admit.npz import Header
from lamina.errors import CorpusError
from lamina.train.corpus.leaves import plain, settle, take
from lamina.train.corpus.payloads import Payloads
from lamina.train.corpus.read import payload_headers
from lamina.train.corpus.table import read_matrix

SHAPES = "cut or pad every example to one public shape, and label all or none"
COLUMNS = "give every table the same columns in the same order"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all payloads have in common: shape and dtype of one example and of one label, columns of a CSV."""

    x: Tensor  # no rows
    y: Tensor | None
    header: tuple[str, ...] | None

    def told(self) -> str:
        label = "no y" if self.y is None else f"y {tuple(self.y.shape[1:])} {self.y.dtype}"
        return f"x {tuple(self.x.shape[1:])} {self.x.dtype}, {label}"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """`sizes[row]` examples of one form."""

    form: Form
    sizes: NDArray[np.int64]


class Look:
    """Looks at one payload after the other. `labels` come from elsewhere, so that payloads must have none."""

    def __init__(self, labels: NDArray[Any] | None, dtype: torch.dtype | None) -> None:
        self._labels, self._dtype = labels, dtype

    def __call__(self, path: Path, held: bytes | None) -> tuple[int, Form]:
        """The number of examples of a payload, and its form. Whatever is wrong with it is a CorpusError."""
        try:
            return self._looked(path, held)
        except CorpusError:
            raise
        except Exception as error:  # the payload was written by anybody
            raise CorpusError(
                f"'{path}' cannot be read ({type(error).__name__})", "write it with np.savez(path, x=x, y=y)"
            ) from None

    def _looked(self, path: Path, held: bytes | None) -> tuple[int, Form]:
        header, y = None, None
        if path.suffix == ".csv":
            header, table = read_matrix(path, held)
            count, x = 1, _none_of(table.shape, table.dtype)
        else:
            found = payload_headers(path, held)
            if "x" not in found:
                raise CorpusError(f"'{path}' has no array 'x'", "write it with np.savez(path, x=x, y=y)")
            count, x = _column(path, "x", found["x"])
            if "y" in found:
                labels, y = _column(path, "y", found["y"])
                if labels != count:
                    raise CorpusError(
                        f"'{path}' has {count} examples in x and y of shape {found['y'].shape}",
                        "give one label per example",
                    )
                y = settle(y, label=True, dtype=self._dtype)
        if self._labels is not None:
            if y is not None:
                raise CorpusError(
                    f"'{path}' has y, and so has contributions.csv",
                    "keep the labels in one of the two places",
                )
            y = settle(take(self._labels[:0], np.empty(0, np.int64)), label=True, dtype=self._dtype)
        return count, Form(x=settle(x, label=False, dtype=self._dtype), y=y, header=header)


def strict(payloads: Payloads, look: Look) -> Survey:
    """All of them, or a refusal that names the first that does not fit."""
    sizes = np.empty(len(payloads), dtype=np.int64)
    forms: dict[bool, tuple[str, Form]] = {}  # the first of all, and the first with named columns
    for row, name in enumerate(payloads.ids):
        sizes[row], found = look(payloads.path(row), payloads.look(row))
        for named in (False, *((True,) if found.header else ())):
            _check_form(name, found, *forms.setdefault(named, (name, found)))
    return Survey(form=forms[False][1], sizes=sizes)


def tolerant(
    payloads: Payloads, look: Look, refuse: Callable[[int, str], None]
) -> tuple[Survey | None, NDArray[np.int64]]:
    """Those that fit, and their rows; of the others `refuse` hears row and reason.

    The form is that of nearly all. It may not hang on a single contribution, or adding one person would exclude
    others: where one fewer or one more would change it, nothing is surveyed and the refusal names both forms.
    """
    sizes = np.zeros(len(payloads), dtype=np.int64)
    forms: dict[int, Form] = {}
    for row in range(len(payloads)):
        try:
            sizes[row], forms[row] = look(payloads.path(row), payloads.look(row))
        except CorpusError as error:
            refuse(row, error.problem)
    for kind, remedy in (("shape", SHAPES), ("columns", COLUMNS)):
        told = {row: text for row, form in forms.items() if (text := _told(form, kind)) is not None}
        if len(counts := Counter(told.values()).most_common()) < 2:
            continue
        (common, most), (other, second), *_ = counts
        if most - second < 2:
            raise CorpusError(f"contributions have {common}, and as many have {other}", remedy)
        for row, text in told.items():
            if text != common:
                refuse(row, f"it has {text}; the others have {common}")
                del forms[row]
    rows = np.array(sorted(forms), dtype=np.int64)
    return (Survey(form=forms[int(rows[0])], sizes=sizes[rows]) if len(rows) else None), rows


def _told(form: Form, kind: str) -> str | None:
    if kind == "shape":
        return form.told()
    return None if form.header is None else f"columns {', '.join(form.header)}"


def _none_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    return take(plain("x", np.empty((0, *shape), dtype=dtype)), np.empty(0, np.int64))


def _column(path: Path, name: str, header: Header) -> tuple[int, Tensor]:
    """How many rows an array has, and one of its kind without any."""
    if header.dtype.hasobject:
        raise CorpusError(
            f"array {name!r} of '{path}' holds Python objects, which only pickle can read, and a pickle can run code",
            "save numbers of one shape: np.stack(list_of_arrays)",
        )
    if not header.shape:
        raise CorpusError(f"array {name!r} of '{path}' is a single number", "its first axis counts examples")
    if not header.shape[0]:
        raise CorpusError(f"array {name!r} of '{path}' has no examples", "leave the contribution out")
    if 0 in header.shape:
        raise CorpusError(f"an example in {name!r} of '{path}' has no numbers", "leave the contribution out")
    return header.shape[0], _none_of(header.shape[1:], header.dtype)


def _check_form(name: str, found: Form, first_name: str, first: Form) -> None:
    if found.told() != first.told():
        raise CorpusError(
            f"contribution {name!r} has {found.told()}; {first_name!r} has {first.told()}", SHAPES
        )
    if found.header and first.header and found.header != first.header:
        raise CorpusError(
            f"contribution {name!r} has columns {', '.join(found.header)}; {first_name!r} has "
            f"{', '.join(first.header)}",
            COLUMNS,
        )
