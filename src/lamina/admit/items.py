"""How many examples a payload holds, without reading it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from numpy.lib import format as npy

from lamina.errors import AdmissionError


def count_items(payload: Path) -> int:
    """.npz: the first axis of its array `x`. Anything else is one example: a table, an image, a text."""
    if payload.suffix.lower() != ".npz":
        return 1
    try:
        with zipfile.ZipFile(payload) as archive, archive.open("x.npy") as file:
            version = npy.read_magic(file)
            header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape = header(file)[0]
    except KeyError:
        raise AdmissionError(
            f"'{payload}' has no array 'x'", "write it with np.savez(path, x=x, y=y)"
        ) from None
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise AdmissionError(
            f"'{payload}' cannot be read as .npz ({type(error).__name__})",
            "write it with np.savez(path, x=x, y=y)",
        ) from None
    if not shape or shape[0] < 1:
        raise AdmissionError(f"array 'x' of '{payload}' has no examples", "its first axis counts examples")
    return int(shape[0])
