"""Arrays as users have them: made plain, converted for a model, hashed.

x and y are an array, or a tuple or dict of arrays. The arrays are the *leaves*; their names (`x`, `x[0]`,
`x['ids']`) appear in messages and digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.errors import CorpusError
from lamina.train.corpus.keyed import Hasher, put

CHUNK_BYTES = 1 << 24  # hashed at a time: a memmap is never held in memory as a whole
Rows = NDArray[np.int64]


def map_leaves(function: Callable[[str, Any], Any], tree: Any, name: str) -> Any:
    """The same tuples and dicts with `function(name, leaf)` in place of each leaf."""
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, part, f"{name}[{i}]") for i, part in enumerate(tree))
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str):
                raise CorpusError(
                    "corpus.key", f"{name} has the key {key!r}", "keys are the names of inputs: use text"
                )
        return {key: map_leaves(function, part, f"{name}[{key!r}]") for key, part in tree.items()}
    return function(name, tree)


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda where, leaf: found.append((where, leaf)), tree, name)
    return iter(found)


# ------------------------------------------------------------------------------------------ from users


def plain(name: str, value: Any) -> Any:
    """A dense tensor or an array of numbers with an axis of examples; anything else is refused."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise CorpusError(
                "corpus.sparse-quantised-tensor",
                f"{name} is a sparse or quantised tensor",
                f"give {name}.to_dense()",
            )
        array: Any = value.detach()
    else:
        array = _as_numpy(name, value)
        _check_kind(name, array)
    if array.ndim == 0:
        raise CorpusError(
            "corpus.single-number", f"{name} is a single number", f"the first axis of {name} counts examples"
        )
    return array


def _as_numpy(name: str, value: Any) -> NDArray[Any]:
    if hasattr(value, "to_numpy"):  # pandas, polars
        value = value.to_numpy()
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        raise CorpusError(
            "corpus.list-tensors-stack", f"{name} is a list of tensors", f"stack them: torch.stack({name})"
        )
    try:
        return np.asarray(value)
    except ValueError:
        raise CorpusError(
            "corpus.rows-differ-length",
            f"{name} is a {type(value).__name__} of rows that differ in length",
            "cut or pad every example to one public length, and mask the padding in the model",
        ) from None


def _check_kind(name: str, array: NDArray[Any]) -> None:
    kind = array.dtype.kind
    if kind in "biufc":
        return
    text = kind in "US" or (kind == "O" and array.size > 0 and isinstance(array.flat[0], str))
    if text and name.startswith("y"):
        raise CorpusError(
            "corpus.holds-text-loss", f"{name} holds text, and a loss needs numbers", NUMBER_LABELS
        )
    if text:
        raise CorpusError(
            "corpus.holds-text-model",
            f"{name} holds text, and a model needs numbers",
            "encode it with a public table (a fixed vocabulary, a code list), not with one made from the data",
        )
    if kind in "Mm":
        raise CorpusError(
            "corpus.holds-dates", f"{name} holds dates", f"turn them into numbers: {name}.astype('int64')"
        )
    raise CorpusError(
        "corpus.dtype-python-objects",
        f"{name} has dtype {array.dtype}: Python objects or records, not numbers",
        "give arrays of one shape and a numeric dtype: np.stack(list_of_arrays)",
    )


NUMBER_LABELS = (
    "number the labels from a public list of them, or: labels, y = numpy.unique(y, return_inverse=True)"
)


# ------------------------------------------------------------------------------------------ for models


def take(leaf: Any, rows: Rows) -> Tensor:
    """A copy of some rows, as a tensor."""
    if isinstance(leaf, Tensor):
        return leaf[torch.from_numpy(rows).to(leaf.device)]
    array = np.asarray(leaf)[rows]  # indexing by rows copies, also from a memmap
    return torch.from_numpy(np.ascontiguousarray(array, dtype=_torch_can(array.dtype)))


def _torch_can(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind == "f" and dtype.itemsize > 8:
        return np.dtype(np.float64)
    if dtype.kind == "c" and dtype.itemsize > 16:
        return np.dtype(np.complex128)
    return dtype.newbyteorder("=")


def settle(tensor: Tensor, *, label: bool, dtype: torch.dtype | None) -> Tensor:
    """The dtype that a model expects.

    x: floating point becomes float32; small integers (bytes of images, counts, token ids) stay as they are;
    `dtype` overrides both. y: integers become int64, floating point float32 or a floating `dtype`.
    """
    asked = None if label and dtype is not None and not dtype.is_floating_point else dtype
    if tensor.is_floating_point():
        return tensor.to(asked or torch.float32)
    if label:
        return tensor if tensor.is_complex() else tensor.to(torch.int64)
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch can do next to nothing with these
        return tensor.to(asked or torch.int64)
    return tensor.to(asked or tensor.dtype)


# ------------------------------------------------------------------------------------------ for digests


def feed(hasher: Hasher, name: str, leaf: Any) -> None:
    """Name, dtype, shape and every byte in row order. A tensor and an array of the same values feed the same."""
    dtype = str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else leaf.dtype.name
    put(hasher, [name, dtype, ",".join(map(str, leaf.shape))])
    count = len(leaf)
    if not count or 0 in leaf.shape:
        return
    row = leaf.nbytes // count
    step = max(1, CHUNK_BYTES // max(1, row))
    for start in range(0, count, step):
        hasher.update(_bytes(leaf[start : start + step]))


def _bytes(part: Any) -> memoryview:
    if isinstance(part, Tensor):
        part = part.cpu().contiguous().view(torch.uint8).numpy()  # bfloat16 has no numpy type, bytes have
    little = part.dtype.newbyteorder("<")
    return np.ascontiguousarray(part, dtype=little).reshape(-1).view(np.uint8).data
