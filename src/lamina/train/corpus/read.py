"""A corpus from a file: which columns or arrays are examples, labels, contributions and classes."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.admit.npz import BadArray, Header, arrays, headers
from lamina.errors import CorpusError
from lamina.plan import Policy
from lamina.train.corpus.table import read_table

_WRITE = "write it with np.savez(path, x=x, y=y)"


def csv_parts(
    path: str | Path,
    *,
    x: Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    columns: dict[str, Any],
    policy: Policy | None,
    dtype: torch.dtype | None,
    delimiter: str,
) -> dict[str, Any]:
    """What a corpus is made of, from a flat table: one row an example.

    `columns` says in which columns `unit`, `cls`, `ids` and `subject` are; what is not text is passed through.
    """
    if isinstance(x, str):
        x = [x]
    named = {what: value for what, value in columns.items() if isinstance(value, str)}
    others = {what: value for what, value in columns.items() if not isinstance(value, str)}
    if _is_class(named.get("cls"), policy):
        others["cls"] = named.pop("cls")
    table = read_table(
        Path(path),
        x=x,
        y=y,
        names=list(dict.fromkeys(named.values())),
        delimiter=delimiter,
        dtype=np.float32 if dtype is None else np.float64,
    )
    return {"x": table.x, "y": table.y, **others, **{what: table.names[name] for what, name in named.items()}}


def npz_parts(
    path: str | Path, *, x: str, y: str | None, columns: dict[str, Any], policy: Policy | None
) -> dict[str, Any]:
    """What a corpus is made of, from the arrays of an .npz file."""
    wanted = {"x": x, "y": y, **columns}
    if _is_class(columns.get("cls"), policy):
        wanted.pop("cls")
    named = {what: name for what, name in wanted.items() if isinstance(name, str)}
    found = read_npz(Path(path), list(dict.fromkeys(named.values())))
    return {"x": x, "y": y, **columns, **{what: found[name] for what, name in named.items()}}


def _is_class(cls: Any, policy: Policy | None) -> bool:
    """Text names a column or array, unless the policy has a class of that name: then it is the class of all."""
    return isinstance(cls, str) and policy is not None and cls in policy.classes


def read_npz(path: Path, names: Sequence[str], held: bytes | None = None) -> dict[str, NDArray[Any]]:
    """Some arrays of an .npz file. Arrays of Python objects would have to be unpickled, so they are refused.

    `held` is what the file holds, where it was read already; `path` then only names it.
    """
    try:
        if not zipfile.is_zipfile(path if held is None else io.BytesIO(held)) and (held or path.exists()):
            raise CorpusError("corpus.not-npz-file", f"'{path}' is not an .npz file", _WRITE)
        with _binary(path, held) as raw, np.load(raw, allow_pickle=False) as file:
            for name in names:
                if name not in file.files:
                    raise CorpusError(
                        "corpus.no-array-name",
                        f"'{path}' has no array {name!r}; it has {', '.join(file.files)}",
                        "name the arrays: x='…', y='…', or y=None where there are no labels",
                    )
            return {name: _loaded(path, file, name) for name in names}
    except FileNotFoundError:
        raise CorpusError("corpus.not", f"'{path}' is not there", "give the path of an .npz file") from None
    except CorpusError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from None


def _binary(path: Path, held: bytes | None) -> BinaryIO:
    return path.open("rb") if held is None else io.BytesIO(held)


def _loaded(path: Path, file: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = file[name]
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise CorpusError(
            "corpus.array-holds-python",
            f"array {name!r} of '{path}' holds Python objects, which only pickle can read, and a pickle can run code",
            "save numbers of one shape: np.stack(list_of_arrays), and names as an array of text",
        ) from None
    return array


# ------------------------------------------------------------------------------------------ payloads


def payload_headers(path: str | Path, held: bytes | None = None) -> dict[str, Header]:
    """What the arrays x and y of a payload say of themselves, as far as they are there and can be read."""
    try:
        with open(path, "rb", buffering=0) if held is None else io.BytesIO(held) as raw:
            return headers(raw, ("x", "y"))
    except Exception as error:
        raise _unreadable(path, error) from None


def payload_arrays(path: Path, names: Sequence[str], held: bytes | None = None) -> dict[str, NDArray[Any]]:
    """These arrays of a payload. Bytes that are `held` were held against a commitment: no checksum adds to that."""
    try:
        with _binary(path, held) as raw:
            found = arrays(raw, names, crc=held is None)
    except Exception as error:
        raise _unreadable(path, error) from None
    if missing := next((name for name in names if name not in found), None):
        raise CorpusError("corpus.no-array-2", f"'{path}' has no array {missing!r}", _WRITE)
    return found


def _unreadable(path: str | Path, error: Exception) -> CorpusError:
    """Of what numpy, zipfile and zlib say only the kind is told: their words may quote the file."""
    why = str(error) if isinstance(error, BadArray) else type(error).__name__
    return CorpusError("corpus.not-read-npz", f"'{path}' cannot be read as .npz ({why})", _WRITE)
