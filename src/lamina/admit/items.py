"""How many examples a payload holds, without reading it."""

from __future__ import annotations

from pathlib import Path

from lamina.admit.npz import BadArray, headers
from lamina.errors import AdmissionError

_REMEDY = "write it with np.savez(path, x=x, y=y)"


def count_items(payload: Path) -> int:
    """.npz: the first axis of its array `x`. Anything else is one example: a table, an image, a text."""
    if payload.suffix.lower() != ".npz":
        return 1
    try:
        with payload.open("rb") as file:
            found = headers(file, ["x"])
    except Exception as error:  # whatever zipfile, zlib and numpy make of it
        why = str(error) if isinstance(error, BadArray) else type(error).__name__
        raise AdmissionError(
            "admit.not-read-npz", f"'{payload}' cannot be read as .npz ({why})", _REMEDY
        ) from None
    if "x" not in found:
        raise AdmissionError("admit.no-array", f"'{payload}' has no array 'x'", _REMEDY)
    shape = found["x"].shape
    if not shape or shape[0] < 1:
        raise AdmissionError(
            "admit.array-no-examples",
            f"array 'x' of '{payload}' has no examples",
            "its first axis counts examples",
        )
    return shape[0]
