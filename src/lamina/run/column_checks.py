"""Checks of input columns before a run: ids, missing values, and columns with the same value in every row."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.errors import CorpusError

_WHOSE = "patient|subject|person|participant|customer|client|user|member|individual|case|mrn"
_ID_NAME = re.compile(rf"((u|p)?id|uuid)|({_WHOSE})s?(id|no|nr|num|number|key|code)?")
LABELS_REMEDY = "number the labels from a public list of them, or: labels, y = numpy.unique(y, return_inverse=True)"
_FEW_VALUES = 2  # a column `case` of 0 and 1 is a label
FILL_REMEDY = "fill it with a public constant (never with a mean of the data), leave the row out, or give nan='zero'"
LABEL_MISSING_REMEDY = "leave these rows out: a label cannot be filled in"
ZERO = "zero"


class ConstantColumn(UserWarning):
    """A column of the inputs has one value in all rows."""


def is_id_name(name: str) -> bool:
    """Return whether a column of this name usually says whose a row is.

    >>> [is_id_name(each) for each in ("patient", "PatientID", "subject_no", "id", "patient_age", "paid")]
    [True, True, True, True, False, False]
    """
    words = [each.lower() for each in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return any(_ID_NAME.fullmatch("".join(words[-count:])) for count in (1, 2) if words)


def unit_remedy(name: str) -> str:
    """Return what to do about a column that says whose each row is."""
    named = f"if it names the person of each row: unit={name!r}, which also removes it from x"
    return f"{named}; if each row is another person: unit='each', without this column in x"


def looks_like_id(name: str, values: NDArray[Any]) -> bool:
    """Return whether a column of numbers seems to say whose a row is: by its name, and by whole numbers that vary."""
    if not is_id_name(name) or values.dtype.kind not in "iuf":
        return False
    whole = values.dtype.kind in "iu" or bool((np.isfinite(values) & (values == np.floor(values))).all())
    return whole and len(np.unique(values)) > _FEW_VALUES


def check_columns(columns: Mapping[str, NDArray[Any]], *, unit_given: bool) -> None:
    """Refuse a column of ids where no unit is given; warn of columns that are the same in every row."""
    found = [] if unit_given else [name for name, values in columns.items() if looks_like_id(name, values)]
    if found:
        problem = f"column {found[0]!r} of x looks like an id, and no unit is given: ε would protect single rows"
        raise CorpusError("corpus.id-among-inputs", problem, unit_remedy(found[0]))
    constant = [name for name, values in columns.items() if len(values) > 1 and bool((values == values[0]).all())]
    if constant:
        text = f"{', '.join(map(repr, constant))}: the same in every row, so a model learns nothing from it; leave it out of x"
        warnings.warn(text, ConstantColumn, stacklevel=4)


def frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a DataFrame of pandas or polars by name."""
    return {str(name): np.asarray(frame[name].to_numpy()) for name in frame.columns}


def is_frame(value: Any) -> bool:
    """Return whether a value is a table with named columns."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy") and hasattr(value, "__getitem__")


def stack_columns(columns: Mapping[str, NDArray[Any]], what: str = "x") -> NDArray[Any]:
    """Return columns of numbers as one array, rows × columns; a column of text is named."""
    for name, values in columns.items():
        text = values.dtype.kind in "US" or (values.dtype.kind == "O" and any(isinstance(v, str) for v in values))
        if not text:
            check_numeric_dtype(f"column {name!r} of {what}", values)
        elif what == "y":
            raise CorpusError(
                "corpus.labels-are-text", f"column {name!r} holds text, and a loss needs numbers", LABELS_REMEDY
            )
        else:
            problem = f"column {name!r} holds text, and a model needs numbers"
            raise CorpusError("corpus.inputs-are-text", problem, text_remedy(name))
    return np.column_stack(list(columns.values()))


def text_remedy(name: str) -> str:
    """Return what to do about a column of text among the inputs."""
    encode = "leave it out by naming the feature columns (x=[…]), or encode it with a public table"
    return unit_remedy(name) if is_id_name(name) else f"{encode}; if it says whose each row is: unit={name!r}"


def check_numeric_dtype(name: str, array: NDArray[Any]) -> None:
    """Numbers, and nothing else: a model cannot be given text, dates or objects."""
    kind = array.dtype.kind
    if kind in "biufc":
        return
    text = kind in "US" or (kind == "O" and array.size > 0 and isinstance(array.flat[0], str))
    if text and name.startswith("y"):
        raise CorpusError("corpus.labels-are-text", f"{name} holds text, and a loss needs numbers", LABELS_REMEDY)
    if text:
        remedy = "encode it with a public table (a fixed vocabulary, a code list), not with one made from the data"
        raise CorpusError("corpus.inputs-are-text", f"{name} holds text, and a model needs numbers", remedy)
    if kind in "Mm":
        problem = f"{name} holds dates"
        raise CorpusError("corpus.inputs-are-dates", problem, f"turn them into numbers: {name}.astype('int64')")
    problem = f"{name} has dtype {array.dtype}: Python objects or records, not numbers"
    remedy = "give arrays of one shape and a numeric dtype: np.stack(list_of_arrays)"
    raise CorpusError("corpus.dtype-not-numeric", problem, remedy)


def check_finite(leaves: Iterable[tuple[str, Any]], first: int, names: Mapping[str, Sequence[str]]) -> None:
    """Refuse NaN and infinity in arrays of inputs, whose first row is row `first` of x; `names` of their columns."""
    for name, part in leaves:
        good = part.isfinite().cpu().numpy() if hasattr(part, "isfinite") else _finite(np.asarray(part))
        if good.all():
            continue
        at = tuple(int(i) for i in np.argwhere(~good)[0])
        what = "no number (NaN)" if bool(part[at] != part[at]) else "infinite"
        column = f", column {names[name][at[1]]!r}" if name in names and len(at) > 1 else ""
        place = "".join(f"[{i}]" for i in (at[0] + first, *at[1:]))
        raise CorpusError("corpus.value-missing", f"{name}{place}{column} is {what}", FILL_REMEDY)


def _finite(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers are finite; whole numbers are."""
    found: NDArray[np.bool_] = np.isfinite(array) if array.dtype.kind in "fc" else np.ones((), np.bool_)
    return found
