"""Where examples come from: arrays, tensors, torch Datasets and payloads, fetched by row and hashed under a key.

x and y are an array, or a tuple or dict of arrays. The arrays are the *leaves*; their names (`x`, `x[0]`, `x['ids']`)
appear in messages and digests.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from lamina.engine.noise.random_stream import StreamPurpose, step_key
from lamina.engine.probe import preserve_global_generators, seed_global_generators, seed_torch
from lamina.errors import CorpusError
from lamina.run.column_checks import (
    LABELS_REMEDY,
    ZERO,
    check_finite,
    check_numeric_dtype,
    frame_columns,
    is_frame,
    stack_columns,
)
from lamina.run.payloads import PayloadChanged, PayloadInspector, Payloads, PayloadSurvey, is_csv, survey_or_raise
from lamina.run.table_files import (
    CHUNK_BYTES,
    Hasher,
    hash_parts,
    model_dtype,
    payload_arrays,
    read_matrix,
    torch_dtype,
)

DIGEST_BYTES = 32


def keyed_hasher(key: bytes, purpose: str) -> Hasher:
    """BLAKE2b-256 under `key`, with a purpose of at most 16 letters: other purposes, other functions."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=purpose.encode())


Rows = NDArray[np.int64]


def map_leaves(function: Callable[[str, Any], Any], tree: Any, name: str) -> Any:
    """The same tuples and dicts with `function(name, leaf)` in place of each leaf."""
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, part, f"{name}[{i}]") for i, part in enumerate(tree))
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str):
                raise CorpusError("corpus.key-not-text", f"{name} has the key {key!r}", "name inputs by text")
        return {key: map_leaves(function, part, f"{name}[{key!r}]") for key, part in tree.items()}
    return function(name, tree)


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda where, leaf: found.append((where, leaf)), tree, name)
    return iter(found)


def check_numeric_array(name: str, value: Any) -> Any:
    """A dense tensor or an array of numbers with an axis of examples; anything else is refused."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            problem = f"{name} is a sparse or quantised tensor"
            raise CorpusError("corpus.tensor-not-dense", problem, f"give {name}.to_dense()")
        array: Any = value.detach()
    else:
        array = _as_numpy(name, value)
        check_numeric_dtype(name, array)
    if array.ndim == 0:
        problem = f"{name} is a single number"
        raise CorpusError("corpus.array-without-examples-axis", problem, f"the first axis of {name} counts examples")
    return array


def _as_numpy(name: str, value: Any) -> NDArray[Any]:
    if is_frame(value):
        return stack_columns(frame_columns(value), name)
    if hasattr(value, "to_numpy"):  # a column of pandas, polars
        value = value.to_numpy()
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        problem = f"{name} is a list of tensors"
        raise CorpusError("corpus.list-of-tensors", problem, f"stack them: torch.stack({name})")
    try:
        return np.asarray(value)
    except ValueError:
        problem = f"{name} is a {type(value).__name__} of rows that differ in length"
        remedy = "cut or pad every example to one public length, and mask the padding in the model"
        raise CorpusError("corpus.rows-differ-in-length", problem, remedy) from None


def take_rows(leaf: Any, rows: Rows) -> Tensor:
    """A copy of some rows, as a tensor."""
    if isinstance(leaf, Tensor):
        return leaf[torch.from_numpy(rows).to(leaf.device)]
    array = np.asarray(leaf)[rows]  # indexing by rows copies, also from a memmap
    return torch.from_numpy(np.ascontiguousarray(array, dtype=torch_dtype(array.dtype)))


def to_model_dtype(tensor: Tensor, *, label: bool, dtype: torch.dtype | None) -> Tensor:
    """The tensor in the dtype that a model expects (`model_dtype`)."""
    name = model_dtype(dtype_name(tensor.dtype), label=label, asked=None if dtype is None else dtype_name(dtype))
    return tensor.to(getattr(torch, name))


def fill_missing(tensor: Tensor) -> Tensor:
    """The tensor with 0 in place of NaN and infinity."""
    return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def hash_leaf(hasher: Hasher, name: str, leaf: Any) -> None:
    """Name, dtype, shape and every byte in row order. A tensor and an array of the same values feed the same."""
    dtype = str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else leaf.dtype.name
    hash_parts(hasher, [name, dtype, ",".join(map(str, leaf.shape))])
    count = len(leaf)
    if not count or 0 in leaf.shape:
        return
    row = leaf.nbytes // count
    step = max(1, CHUNK_BYTES // max(1, row))
    for start in range(0, count, step):
        hasher.update(_little_endian_bytes(leaf[start : start + step]))


def _little_endian_bytes(part: Any) -> memoryview:
    if isinstance(part, Tensor):
        part = part.cpu().contiguous().view(torch.uint8).numpy()  # bfloat16 has no numpy type, bytes have
    little = part.dtype.newbyteorder("<")
    return np.ascontiguousarray(part, dtype=little).reshape(-1).view(np.uint8).data


def seed_step(seed: bytes, *, step: int, purpose: StreamPurpose, rank: int = 0) -> None:
    """Put torch's, numpy's and Python's global generators at the start of one step's stream.

    Models and datasets draw from these generators. Their randomness carries no guarantee (the coins and the noise
    have streams of their own), it only has to be the same in a replay.
    """
    key = step_key(seed, step=step, rank=rank, purpose=purpose)
    seed_torch(int.from_bytes(key[:8], "big") >> 1)
    np.random.seed(np.frombuffer(key, dtype=np.uint32))  # noqa: NPY002  # datasets draw from the global generator
    random.seed(key)


class ArraySource:
    """Rows of arrays. Nothing is copied until it is fetched, so a memmap larger than memory works.

    With `filled`, missing and infinite values of x are 0.
    """

    def __init__(self, x: Any, y: Any = None, *, dtype: torch.dtype | None = None, filled: bool = False) -> None:
        frames = [(name, leaf) for name, leaf in named_leaves(x, "x") if is_frame(leaf)]
        self._names = {name: [str(column) for column in leaf.columns] for name, leaf in frames}
        self._x = map_leaves(check_numeric_array, x, "x")
        self._filled = filled
        self._y = None if y is None else map_leaves(check_numeric_array, y, "y")
        self._dtype = dtype
        self._size = self._common_length()

    def _common_length(self) -> int:
        sizes = {name: len(leaf) for name, leaf in self._leaves()}
        if not any(name.startswith("x") for name in sizes):
            raise CorpusError("corpus.no-inputs", "x has no arrays", "give an array, or a tuple or dict of arrays")
        (first, size), *others = sizes.items()
        for name, other in others:
            if other != size:
                remedy = "the first axis of every array counts examples: give as many labels as examples"
                raise CorpusError("corpus.lengths-differ", f"{first} has {size} examples, {name} has {other}", remedy)
        return size

    def _leaves(self) -> list[tuple[str, Any]]:
        return [*named_leaves(self._x, "x"), *(named_leaves(self._y, "y") if self._y is not None else ())]

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns of x by name: of a DataFrame, and of a dict of flat arrays."""
        leaves = [(name, np.asarray(leaf)) for name, leaf in named_leaves(self._x, "x") if not isinstance(leaf, Tensor)]
        found = {
            name.removeprefix("x['").removesuffix("']"): leaf for name, leaf in leaves if leaf.ndim == 1 and name != "x"
        }
        for name, leaf in leaves:
            found |= dict(zip(self._names.get(name, ()), leaf.T, strict=False))
        return found

    def check_values(self, most: int | None) -> None:
        """Refuse NaN and infinity in x of the first examples, or of all of them; targets are checked beside the loss."""
        rows = len(self) if most is None else min(most, len(self))
        for name, leaf in named_leaves(self._x, "x") if not self._filled else ():
            step = max(1, CHUNK_BYTES * len(leaf) // max(1, leaf.nbytes))
            for start in range(0, rows, step):
                check_finite([(name, leaf[start : min(rows, start + step)])], start, self._names)

    @property
    def y(self) -> Any:
        """The labels as they were given, where they are one array; None otherwise."""
        return None if isinstance(self._y, tuple | dict) else self._y

    def __len__(self) -> int:
        return self._size

    def fetch(self, rows: Rows) -> tuple[Any, Any]:
        """(x, y) of these examples; y is None where there are no labels."""

        def rows_of(name: str, leaf: Any) -> Any:
            found = to_model_dtype(take_rows(leaf, rows), label=name.startswith("y"), dtype=self._dtype)
            return fill_missing(found) if self._filled and name.startswith("x") else found

        x = map_leaves(rows_of, self._x, "x")
        return x, None if self._y is None else map_leaves(rows_of, self._y, "y")

    def digest(self, key: bytes) -> bytes:
        """Over names, dtypes, shapes and all bytes, and over the dtype that they are converted to."""
        hasher = keyed_hasher(key, "lamina/arrays")
        self.feed(hasher)
        return hasher.digest()

    def feed(self, hasher: Hasher) -> None:
        """All of it into a digest."""
        every = self._leaves()
        hash_parts(hasher, [str(self._dtype), len(every), *([ZERO] if self._filled else [])])
        for name, leaf in every:
            hash_leaf(hasher, name, leaf)

    def __repr__(self) -> str:
        return f"ArraySource({', '.join(name for name, _ in self._leaves())})"


class DatasetSource:
    """A map-style Dataset whose items are x or (x, y), stacked by torch's default_collate.

    A Dataset that augments at random draws from the global generators, which a trainer seeds anew for every
    step. What goes wrong while a batch is fetched is told without saying at which example: that would say who
    was sampled. `digest` walks through all examples and may name one.
    """

    def __init__(self, dataset: Any, *, dtype: torch.dtype | None = None, filled: bool = False) -> None:
        self._dataset = dataset
        self._dtype, self._filled = dtype, filled
        self._size = len(dataset)
        if self._size:
            with preserve_global_generators():
                self._template = self._stack([dataset[0]])
            self._shapes = self._shapes_of(self._template)

    def __len__(self) -> int:
        return self._size

    def fetch(self, rows: Rows) -> tuple[Any, Any]:
        """(x, y) of these examples; no rows give the shapes of the first example with a first axis of 0."""
        if not len(rows):
            x, y = self._template
            return _empty_tree(x), None if y is None else _empty_tree(y)
        try:
            many = getattr(self._dataset, "__getitems__", None)
            items = many(rows.tolist()) if callable(many) else [self._dataset[i] for i in rows.tolist()]
            return self._stack(items)
        except Exception as error:
            problem = f"the Dataset failed with {type(error).__name__} (at which example stays secret: it was sampled)"
            remedy = "find it outside of training: for i in range(len(dataset)): dataset[i]; items need one shape"
            raise CorpusError("corpus.dataset-failed", problem, remedy) from None

    def digest(self, key: bytes) -> bytes:
        """Over every example, made with the same global seeds each time; random augmentation is thereby fixed."""
        hasher = keyed_hasher(key, "lamina/dataset")
        hash_parts(hasher, [str(self._dtype), self._size, *([ZERO] if self._filled else [])])
        with preserve_global_generators():
            seed_global_generators(0)
            for row in range(self._size):
                stacked = self._stack([self._dataset[row]])
                shapes = self._shapes_of(stacked)
                if shapes != self._shapes:
                    found, first = _shapes_text(shapes), _shapes_text(self._shapes)
                    problem = f"example {row} of the Dataset has {found}, example 0 has {first}"
                    remedy = "cut or pad every example to one public shape"
                    raise CorpusError("corpus.dataset-shapes-differ", problem, remedy)
                check_finite(named_leaves(stacked[0], "x"), row, {})
                for name, leaf in _leaves_of_pair(stacked):
                    hash_leaf(hasher, name, leaf)
        return hasher.digest()

    def _stack(self, items: list[Any]) -> tuple[Any, Any]:
        pairs = [_split_item(item) for item in items]
        x = self._as_tensors(_collate([x for x, _ in pairs]), "x")
        labelled = pairs[0][1] is not _NO_LABEL
        return x, self._as_tensors(_collate([y for _, y in pairs]), "y") if labelled else None

    def _as_tensors(self, tree: Any, name: str) -> Any:
        def one(where: str, leaf: Any) -> Tensor:
            if not isinstance(leaf, Tensor):
                problem = f"{where} of the Dataset is made of {type(leaf).__name__}, not of numbers"
                remedy = LABELS_REMEDY if name == "y" else "let the Dataset give tensors"
                raise CorpusError("corpus.dataset-not-numeric", problem, remedy)
            found = to_model_dtype(leaf, label=name == "y", dtype=self._dtype)
            return fill_missing(found) if self._filled and name == "x" else found

        return map_leaves(one, tree, name)

    @staticmethod
    def _shapes_of(stacked: tuple[Any, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in _leaves_of_pair(stacked)}

    def __repr__(self) -> str:
        return f"DatasetSource({type(self._dataset).__name__})"


_NO_LABEL = object()


def _split_item(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list):
        return item, _NO_LABEL
    if len(item) == 1:
        return item[0], _NO_LABEL
    if len(item) == 2:
        return item[0], item[1]
    problem = f"an item of the Dataset has {len(item)} parts, expected x or (x, y)"
    remedy = "let it return (x, y), with several inputs as a tuple or dict: ((a, b), y)"
    raise CorpusError("corpus.dataset-item-not-a-pair", problem, remedy)


def _collate(values: list[Any]) -> Any:
    try:
        return _lists_to_tuples(default_collate(values))
    except (TypeError, RuntimeError) as error:
        problem = f"items of the Dataset cannot be stacked ({type(error).__name__})"
        remedy = "let every item be tensors of one shape, numbers, or tuples and dicts of these"
        raise CorpusError("corpus.dataset-shapes-differ", problem, remedy) from None


def _lists_to_tuples(tree: Any) -> Any:
    """default_collate makes lists of tuples; a list of text stays what it is and is refused later."""
    if isinstance(tree, dict):
        return {key: _lists_to_tuples(part) for key, part in tree.items()}
    if isinstance(tree, tuple | list) and not any(isinstance(part, str | bytes) for part in tree):
        return tuple(_lists_to_tuples(part) for part in tree)
    return tree


def _empty_tree(tree: Any) -> Any:
    return map_leaves(lambda _, leaf: leaf[:0], tree, "")


def _leaves_of_pair(stacked: tuple[Any, Any]) -> list[tuple[str, Tensor]]:
    x, y = stacked
    return [*named_leaves(x, "x"), *(named_leaves(y, "y") if y is not None else ())]


def _shapes_text(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in shapes.items())


@runtime_checkable
class ExampleSource(Protocol):
    """Examples by row number.

    `fetch(rows)` gives (x, y): tensors, or tuples and dicts of tensors, with first axis len(rows), which may be 0;
    y is None where there are no labels. `digest(key)` is 32 bytes over all that a run could see of the examples.
    """

    def __len__(self) -> int: ...

    def fetch(self, rows: Rows) -> tuple[Any, Any]: ...

    def digest(self, key: bytes) -> bytes: ...


def make_source(x: Any, y: Any = None, *, dtype: torch.dtype | None = None, filled: bool = False) -> ExampleSource:
    """A source for what the user has."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise CorpusError("corpus.dtype-not-torch", f"dtype is {dtype!r}", "give a torch dtype, such as torch.float64")
    refuse_stream(x)
    if isinstance(x, ExampleSource):
        if y is not None or dtype is not None or filled:
            problem = "y, dtype or nan is given beside a Source"
            raise CorpusError(
                "corpus.options-beside-source", problem, "let its fetch return both x and y, as they should be"
            )
        return x
    if isinstance(x, torch.Tensor | np.ndarray | list | tuple | Mapping) or hasattr(x, "to_numpy"):
        return ArraySource(x, y, dtype=dtype, filled=filled)
    if isinstance(x, str | bytes | os.PathLike):
        remedy = "read a file with Corpus.of_csv, Corpus.of_npz or Corpus.of_folder"
        raise CorpusError("corpus.inputs-are-a-path", f"x is a {type(x).__name__}, not data", remedy)
    if y is not None:
        problem = f"y is given beside a {type(x).__name__}"
        raise CorpusError("corpus.options-beside-source", problem, "let its items be (x, y), or give arrays for both")
    if type(x) is TensorDataset and len(x.tensors) <= 2:
        return ArraySource(*x.tensors, dtype=dtype, filled=filled)
    if "input_ids" in (getattr(x, "column_names", None) or ()):
        remedy = "lamina.integrations.tokens.token_corpus(x, length=…, pad=…) cuts or pads them to one public length"
        raise CorpusError("corpus.dataset-of-tokens", f"x is a {type(x).__name__} of tokenised texts", remedy)
    if hasattr(x, "__getitem__") and hasattr(x, "__len__"):
        return DatasetSource(x, dtype=dtype, filled=filled)
    problem = f"x is a {type(x).__name__}: examples cannot be taken from it by number"
    remedy = "give arrays, tensors, a torch Dataset with __len__ and __getitem__, or a Source"
    raise CorpusError("corpus.inputs-not-indexable", problem, remedy)


LOADER_NOTE = "the data came as a DataLoader: its Dataset is used, and each batch is a Poisson sample of it, as the ε of the plan needs"


def dataset_of(data: Any) -> Any:
    """Return the Dataset of a DataLoader; other data as they are. A loader that chooses or joins examples itself is refused."""
    if not isinstance(data, DataLoader):
        return data
    own = {
        "sampler": type(data.sampler) not in (RandomSampler, SequentialSampler),
        "batch_sampler": data.batch_sampler is not None and type(data.batch_sampler) is not BatchSampler,
        "collate_fn": data.collate_fn not in (default_collate, default_convert),
    }
    if found := [name for name, given in own.items() if given]:
        problem = f"the DataLoader has its own {found[0]}, which Poisson sampling cannot follow"
        remedy = "give lamina.Corpus(loader.dataset), with items of one shape; batches are drawn for you"
        raise CorpusError("corpus.dataloader-not-poisson", problem, remedy)
    return data.dataset


def refuse_stream(x: Any) -> None:
    """Refuse data that can only be read in order."""
    if isinstance(x, IterableDataset) or (hasattr(x, "__next__") and hasattr(x, "__iter__")):
        problem = f"x is a {type(x).__name__}, which is read in order; Poisson sampling takes any example at any step"
        remedy = "use a Dataset with __len__ and __getitem__, or arrays: np.load(…, mmap_mode='r') needs no memory"
        raise CorpusError("corpus.inputs-not-indexable", problem, remedy)


CACHE_BYTES = 64 << 20  # bytes


class PayloadSource:
    """The examples of all contributions, id after id.

    An .npz payload holds `x` with one example per row and perhaps `y`; a .csv payload is one example, the table
    rows × columns. Every payload is looked at once, before, so that a wrong one is named before anything is spent;
    while a batch is fetched no id is ever named. Payloads under a commitment are kept once they were read, as far as
    CACHE_BYTES go.
    """

    def __init__(
        self,
        payloads: Payloads,
        labels: NDArray[Any] | None,
        *,
        dtype: torch.dtype | None = None,
        survey: PayloadSurvey | None = None,
    ) -> None:
        asked = None if dtype is None else dtype_name(dtype)
        survey = survey_or_raise(payloads, PayloadInspector(labels, asked)) if survey is None else survey
        self._payloads, self._labels, self._dtype = payloads, labels, dtype
        self._format, self.sizes = survey.format, survey.sizes
        self._ends = np.cumsum(survey.sizes)
        self._kept: dict[int, tuple[Any, Any]] = {}
        self.forget()

    def forget(self) -> None:
        """Read every payload again, and compare it with its commitment again, when it is next wanted."""
        self._kept.clear()
        self._cache_room = CACHE_BYTES if self._payloads.frozen else 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, rows: Rows) -> tuple[Any, Any]:
        """(x, y) of these examples. A payload is opened once, however many of its examples are wanted."""
        owner = np.searchsorted(self._ends, rows, side="right")
        x = _empty_tensor(len(rows), self._format.x)
        y = None if self._format.y is None else _empty_tensor(len(rows), self._format.y)
        for one in np.unique(owner).tolist():
            at = np.flatnonzero(owner == one)
            inside = rows[at] - (self._ends[one] - self.sizes[one])
            try:
                own_x, own_y = self._kept[one] if one in self._kept else self._read(one)
                if len(own_x) != self.sizes[one]:
                    raise ValueError("another number of examples")
                x[at] = to_model_dtype(take_rows(own_x, inside), label=False, dtype=self._dtype)
                if y is not None:
                    y[at] = to_model_dtype(take_rows(own_y, inside), label=True, dtype=self._dtype)
            except PayloadChanged:
                raise
            except (CorpusError, OSError, IndexError, RuntimeError, ValueError):
                problem = f"a payload {self._payloads.where} is not what it was when the corpus was opened"
                remedy = "leave the folder as it is during a run; opening the corpus again names the wrong payload"
                raise PayloadChanged("corpus.payload-changed", problem, remedy) from None
        return x, y

    def _read(self, row: int) -> tuple[Any, Any]:
        path, content = self._payloads.path(row), self._payloads.read(row)
        wants_y = self._format.y is not None and self._labels is None
        if is_csv(path):
            x, y = read_matrix(path, content)[1][None], None
        else:
            found = payload_arrays(path, ["x", "y"] if wants_y else ["x"], content)
            x, y = found["x"], found.get("y")
        y = y if self._labels is None else np.repeat(self._labels[row : row + 1], len(x), axis=0)
        if (size := x.nbytes + (0 if y is None else y.nbytes)) <= self._cache_room:
            self._cache_room -= size
            self._kept[row] = x, y
        return x, y

    def digest(self, key: bytes) -> bytes:
        """Over ids, labels and every byte of every payload, or what vouches for them."""
        hasher = keyed_hasher(key, "lamina/folder")
        hash_parts(hasher, [str(self._dtype), len(self._payloads)])
        hash_leaf(hasher, "labels", np.empty(0) if self._labels is None else self._labels)
        self._payloads.feed(hasher)
        return hasher.digest()

    def __repr__(self) -> str:
        return f"FolderSource({self._payloads!r})"


def _empty_tensor(rows: int, kind: tuple[tuple[int, ...], str]) -> Tensor:
    return torch.empty((rows, *kind[0]), dtype=getattr(torch, kind[1]))
