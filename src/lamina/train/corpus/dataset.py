"""Examples that a torch Dataset makes, one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lamina.errors import CorpusError
from lamina.train.corpus.keyed import keyed, put
from lamina.train.corpus.leaves import NUMBER_LABELS, Rows, feed, leaves, map_leaves, settle
from lamina.train.randomness import borrowed_generators


class DatasetSource:
    """A map-style Dataset whose items are x or (x, y), stacked by torch's default_collate.

    A Dataset that augments at random draws from the global generators, which a trainer seeds anew for every
    step. What goes wrong while a batch is fetched is told without saying at which example: that would say who
    was sampled. `digest` walks through all examples and may name one.
    """

    def __init__(self, dataset: Any, *, dtype: torch.dtype | None = None) -> None:
        self._dataset = dataset
        self._dtype = dtype
        self._size = len(dataset)
        if self._size:
            with borrowed_generators():
                self._template = self._stack([dataset[0]])
            self._shapes = self._shapes_of(self._template)

    def __len__(self) -> int:
        return self._size

    def fetch(self, rows: Rows) -> tuple[Any, Any]:
        """(x, y) of these examples; no rows give the shapes of the first example with a first axis of 0."""
        if not len(rows):
            x, y = self._template
            return _none_of(x), None if y is None else _none_of(y)
        try:
            many = getattr(self._dataset, "__getitems__", None)
            items = many(rows.tolist()) if callable(many) else [self._dataset[i] for i in rows.tolist()]
            return self._stack(items)
        except Exception as error:
            raise CorpusError(
                "corpus.dataset-failed-example",
                f"the Dataset failed with {type(error).__name__} (at which example stays secret: it was sampled)",
                "find it outside of training: for i in range(len(dataset)): dataset[i]; items need one shape",
            ) from None

    def digest(self, key: bytes) -> bytes:
        """Over every example, made with the same global seeds each time; random augmentation is thereby fixed."""
        hasher = keyed(key, "lamina/dataset")
        put(hasher, [str(self._dtype), self._size])
        with borrowed_generators():
            _fixed_generators()
            for row in range(self._size):
                stacked = self._stack([self._dataset[row]])
                shapes = self._shapes_of(stacked)
                if shapes != self._shapes:
                    raise CorpusError(
                        "corpus.example-dataset-example",
                        f"example {row} of the Dataset has {_told(shapes)}, example 0 has {_told(self._shapes)}",
                        "cut or pad every example to one public shape",
                    )
                for name, leaf in _named(stacked):
                    feed(hasher, name, leaf)
        return hasher.digest()

    def _stack(self, items: list[Any]) -> tuple[Any, Any]:
        pairs = [_pair(item) for item in items]
        x = self._settled(_collated([x for x, _ in pairs]), "x")
        labelled = pairs[0][1] is not _NO_LABEL
        return x, self._settled(_collated([y for _, y in pairs]), "y") if labelled else None

    def _settled(self, tree: Any, name: str) -> Any:
        def one(where: str, leaf: Any) -> Tensor:
            if not isinstance(leaf, Tensor):
                raise CorpusError(
                    "corpus.dataset-made-not",
                    f"{where} of the Dataset is made of {type(leaf).__name__}, not of numbers",
                    NUMBER_LABELS if name == "y" else "let the Dataset give tensors",
                )
            return settle(leaf, label=name == "y", dtype=self._dtype)

        return map_leaves(one, tree, name)

    @staticmethod
    def _shapes_of(stacked: tuple[Any, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in _named(stacked)}

    def __repr__(self) -> str:
        return f"DatasetSource({type(self._dataset).__name__})"


_NO_LABEL = object()


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list):
        return item, _NO_LABEL
    if len(item) == 1:
        return item[0], _NO_LABEL
    if len(item) == 2:
        return item[0], item[1]
    raise CorpusError(
        "corpus.item-dataset-parts",
        f"an item of the Dataset has {len(item)} parts, expected x or (x, y)",
        "let it return (x, y), with several inputs as a tuple or dict: ((a, b), y)",
    )


def _collated(values: list[Any]) -> Any:
    try:
        return _tuples(default_collate(values))
    except (TypeError, RuntimeError) as error:
        raise CorpusError(
            "corpus.items-dataset-not",
            f"items of the Dataset cannot be stacked ({type(error).__name__})",
            "let every item be tensors of one shape, numbers, or tuples and dicts of these",
        ) from None


def _tuples(tree: Any) -> Any:
    """default_collate makes lists of tuples; a list of text stays what it is and is refused later."""
    if isinstance(tree, dict):
        return {key: _tuples(part) for key, part in tree.items()}
    if isinstance(tree, tuple | list) and not any(isinstance(part, str | bytes) for part in tree):
        return tuple(_tuples(part) for part in tree)
    return tree


def _none_of(tree: Any) -> Any:
    return map_leaves(lambda _, leaf: leaf[:0], tree, "")


def _named(stacked: tuple[Any, Any]) -> list[tuple[str, Tensor]]:
    x, y = stacked
    return [*leaves(x, "x"), *(leaves(y, "y") if y is not None else ())]


def _told(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in shapes.items())


def _fixed_generators() -> None:
    torch.default_generator.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # Datasets draw from the global generator
    random.seed(0)
