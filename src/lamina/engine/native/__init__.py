"""Native kernels: C functions on the memory of tensors, loaded if they were built. Without them the torch rules run.

`LAMINA_NATIVE=0` leaves them out. Built by `pip install` where a C compiler is there; in a source tree by
`python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lamina.engine.native.sources import source_digest

_PROCESSORS = ("portable", "avx2", "avx512")
_most = len(_PROCESSORS) - 1
_allowed = os.environ.get("LAMINA_NATIVE", "1") != "0"


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        return None, "the native kernels were not built: pip install with a C compiler builds them"
    again = "build them again: python setup.py build_ext --inplace"
    try:
        library = ctypes.CDLL(str(found[0]))
        library.lamina_sources.restype = ctypes.c_char_p
        if library.lamina_sources().decode() != source_digest():
            return None, f"the native kernels were built from other sources: {again}"
        for name in ("lamina_product", "lamina_product_memory", "lamina_dense"):
            getattr(library, name).restype = ctypes.c_int64
        library.lamina_dense.argtypes = [ctypes.c_void_p]
        library.lamina_norms.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.lamina_outers.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        for name in ("lamina_product", "lamina_product_memory"):
            getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}): {again}"
    library.lamina_use_threads.argtypes = [ctypes.c_void_p]
    threads = getattr(ctypes.CDLL(None), "GOMP_parallel", None)  # of the OpenMP runtime that torch uses
    library.lamina_use_threads(ctypes.cast(threads, ctypes.c_void_p) if threads is not None else None)
    return library, ""


def library() -> ctypes.CDLL | None:
    """The native kernels, or None where they are not built or not wanted."""
    return _load()[0] if _allowed else None


def library_digest() -> bytes | None:
    """Return the SHA-256 of the file of the native kernels; None if the torch rules are used."""
    found = library()
    return None if found is None else hashlib.sha256(Path(found._name).read_bytes()).digest()


def missing() -> str | None:
    """Why the torch rules run, or None."""
    return (_load()[1] or None) if _allowed else "the native kernels are switched off by LAMINA_NATIVE=0"


def processor() -> int:
    """The instructions that kernels use: an index of `_PROCESSORS`. Every smaller one runs here, too."""
    found = _load()[0]
    return 0 if found is None else min(int(found.lamina_processor()), _most)


def kind() -> str:
    """What forms gradients here: 'torch', or 'native' with the instructions that are used.

    Two kinds differ by roundings: a step that was begun with one cannot be repeated with the other.
    """
    found = library()
    return "torch" if found is None else f"native-{found.lamina_sources().decode()}-{_PROCESSORS[processor()]}"


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Native kernels on (if they are built) or off, within."""
    global _allowed
    before, _allowed = _allowed, on
    try:
        yield
    finally:
        _allowed = before


def pointer(t: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where the numbers of a dense tensor are, once it is certain that they are what the kernel will read."""
    if t.dtype is not dtype or t.shape != shape or not t.is_contiguous() or not t.is_cpu:
        raise AssertionError(f"a kernel got {t.dtype} {tuple(t.shape)} of strides {t.stride()}, not {dtype} {shape}")
    return t.data_ptr()
