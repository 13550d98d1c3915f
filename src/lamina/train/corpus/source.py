"""Where examples come from, and what cannot be such a place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lamina.errors import CorpusError
from lamina.train.corpus.arrays import ArraySource
from lamina.train.corpus.dataset import DatasetSource
from lamina.train.corpus.leaves import Rows


@runtime_checkable
class Source(Protocol):
    """Examples by row number.

    `fetch(rows)` gives (x, y): tensors, or tuples and dicts of tensors, with first axis len(rows), which may be 0;
    y is None where there are no labels. `digest(key)` is 32 bytes over all that a run could see of the examples.
    """

    def __len__(self) -> int: ...

    def fetch(self, rows: Rows) -> tuple[Any, Any]: ...

    def digest(self, key: bytes) -> bytes: ...


def source_of(x: Any, y: Any = None, *, dtype: torch.dtype | None = None) -> Source:
    """A source for what the user has."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise CorpusError("corpus.dtype", f"dtype is {dtype!r}", "give a torch dtype, such as torch.float64")
    _refuse_loaders(x)
    if isinstance(x, Source):
        if y is not None or dtype is not None:
            raise CorpusError(
                "corpus.dtype-given-beside",
                "y or dtype is given beside a Source",
                "let its fetch return both x and y",
            )
        return x
    if _is_arrays(x):
        return ArraySource(x, y, dtype=dtype)
    if isinstance(x, str | bytes | os.PathLike):
        raise CorpusError(
            "corpus.not-data",
            f"x is a {type(x).__name__}, not data",
            "read a file with Corpus.of_csv, Corpus.of_npz or Corpus.of_folder",
        )
    if y is not None:
        raise CorpusError(
            "corpus.given-beside",
            f"y is given beside a {type(x).__name__}",
            "let its items be (x, y), or give arrays for both",
        )
    if type(x) is TensorDataset and len(x.tensors) <= 2:
        return ArraySource(*x.tensors, dtype=dtype)
    if hasattr(x, "__getitem__") and hasattr(x, "__len__"):
        return DatasetSource(x, dtype=dtype)
    raise CorpusError(
        "corpus.examples-not-taken",
        f"x is a {type(x).__name__}: examples cannot be taken from it by number",
        "give arrays, tensors, a torch Dataset with __len__ and __getitem__, or a Source",
    )


def _is_arrays(x: Any) -> bool:
    return isinstance(x, torch.Tensor | np.ndarray | list | tuple | Mapping) or hasattr(x, "to_numpy")


def _refuse_loaders(x: Any) -> None:
    if isinstance(x, DataLoader):
        raise CorpusError(
            "corpus.dataloader-shuffles-cuts",
            "x is a DataLoader, which shuffles and cuts fixed batches: that is not Poisson sampling, and its ε is not "
            "the plan's",
            "pass the dataset itself: Corpus(loader.dataset); the corpus draws the batches",
        )
    if isinstance(x, IterableDataset) or (hasattr(x, "__next__") and hasattr(x, "__iter__")):
        raise CorpusError(
            "corpus.read-order-poisson",
            f"x is a {type(x).__name__}, which is read in order: Poisson sampling takes any example at any step",
            "use a map-style Dataset (__len__ and __getitem__), or arrays: np.load(…, mmap_mode='r') needs no memory",
        )
