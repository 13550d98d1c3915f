"""Nested state, such as `optimizer.state_dict()`, as flat tensors and a tree that CBOR can carry. Bit for bit.

In the tree a scalar stands for itself, and everything else is a list that begins with its kind:

    ["d", key, value, …] a dict, in order      ["l", …] a list      ["t", …] a tuple      ["z", …] a torch.Size
    ["o", key, value, …] an OrderedDict        ["c", key, value, …] a Counter
    ["x", name] a tensor      ["f", 8 bytes] a NaN with its payload      ["i", hex] an integer beyond 64 bits
    ["n", dtype, bytes] a numpy scalar

`unflatten(prefix, *flatten(prefix, tree))` equals the tree: types, order of keys, the sign of zero, NaN payloads,
and which leaves are one and the same tensor. What is not kept is what is no part of a value: gradients, devices
and strides (tensors come back contiguous). Anything else (a function, an array, an object) is refused by its path.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.errors import RunError, StorageError

MAX_DEPTH = 64
_MAPS: dict[str, type[Any]] = {"d": dict, "o": OrderedDict, "c": Counter}
_LISTS: dict[str, type[Any]] = {"l": list, "t": tuple, "z": torch.Size}
_KIND = {kind: code for code, kind in (_MAPS | _LISTS).items()}
_SCALAR = re.compile("[<>|][biufc][0-9]{1,2}")  # numpy types whose bytes are their whole value


def flatten(prefix: str, tree: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of `tree`, named by their path under `prefix`, and the rest of it. Tensors are not copied."""
    if not prefix or "/" in prefix:
        raise RunError(
            "train.prefix-word-without",
            f"prefix is {prefix!r}, must be a word without '/'",
            "use the name of the part",
        )
    writer = _Writer()
    plain = writer.node(tree, prefix, 0)
    return writer.tensors, plain


def unflatten(prefix: str, tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """The tree that `flatten` was given. Tensors are not copied."""
    return _Reader(tensors).node(plain, prefix, 0)


class _Writer:
    """One walk over a tree: a node becomes its plain form, and its tensors are collected."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # by id: the tree keeps its tensors alive during the walk

    def node(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise RunError(
                "train.nested-deeper",
                f"{path} is nested deeper than {MAX_DEPTH}",
                "a state that holds itself cannot be saved",
            )
        if isinstance(value, Tensor):
            return ["x", self._name(value, path)]
        code = _KIND.get(type(value))
        if code in _MAPS:
            items: list[Any] = [code]
            for key, entry in value.items():
                items += [_scalar(key, f"a key of {path}"), self.node(entry, f"{path}/{key}", depth + 1)]
            return items
        if code is not None:
            return [code, *(self.node(entry, f"{path}/{i}", depth + 1) for i, entry in enumerate(value))]
        return _scalar(value, path)

    def _name(self, tensor: Tensor, path: str) -> str:
        """A tensor's own name; the same tensor at two places of the tree is one tensor in the file."""
        if id(tensor) not in self._names:
            name, again = path, 0
            while name in self.tensors:  # the keys 0 and "0" make the same path
                again += 1
                name = f"{path}~{again}"
            self.tensors[name] = tensor.detach()
            self._names[id(tensor)] = name
        return self._names[id(tensor)]


def _scalar(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, bytes):
        return value
    if kind is int:
        return value if -(1 << 64) <= value < 1 << 64 else ["i", f"{value:x}"]
    if kind is float:
        return ["f", struct.pack(">d", value)] if math.isnan(value) else value
    if isinstance(value, np.generic) and _SCALAR.fullmatch(value.dtype.str):
        return ["n", value.dtype.str, value.tobytes()]
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise RunError(
        "train.type-checkpoint-not",
        f"{path} is of type {name}, which a checkpoint cannot hold",
        "keep numbers, text, tensors, lists, tuples and dicts of them in the state "
        "(an array: torch.from_numpy; a function: make it again when the run resumes)",
    )


class _Reader:
    """One walk over the plain form, which came from a file: nothing about it is taken for granted."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def node(self, plain: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _malformed(path, f"nested deeper than {MAX_DEPTH}")
        if not isinstance(plain, list):
            if isinstance(plain, dict):
                raise _malformed(path, "a bare map")
            return plain
        if not plain or not isinstance(plain[0], str):
            raise _malformed(path, "a list without its kind")
        code, *rest = plain
        if code in _MAPS:
            return _MAPS[code](self._pairs(rest, path, depth))
        if code in _LISTS:
            entries = [self.node(entry, f"{path}/{i}", depth + 1) for i, entry in enumerate(rest)]
            if code == "z" and not all(type(entry) is int for entry in entries):
                raise _malformed(path, "a size that is no list of integers")
            return _LISTS[code](entries)
        if code == "x":
            return self._tensor(rest, path)
        return _special(code, rest, path)

    def _pairs(self, rest: list[Any], path: str, depth: int) -> dict[Any, Any]:
        if len(rest) % 2:
            raise _malformed(path, "a key without a value")
        made: dict[Any, Any] = {}
        for key, entry in zip(rest[::2], rest[1::2], strict=True):
            if isinstance(key, dict) or (
                isinstance(key, list) and (not key or key[0] not in ("f", "i", "n"))
            ):
                raise _malformed(path, "a key that is no scalar")
            name = self.node(key, f"a key of {path}", depth + 1)
            made[name] = self.node(entry, f"{path}/{name}", depth + 1)
        return made

    def _tensor(self, rest: list[Any], path: str) -> Tensor:
        if len(rest) != 1 or not isinstance(rest[0], str) or rest[0] not in self._tensors:
            raise _malformed(path, f"a tensor {rest!r} that is not in the file")
        return self._tensors[rest[0]]


def _special(code: str, rest: list[Any], path: str) -> Any:
    try:
        if code == "f":
            (packed,) = rest
            return struct.unpack(">d", packed)[0]
        if code == "i":
            (text,) = rest
            return int(text, 16)
        if code == "n":
            name, packed = rest
            if not _SCALAR.fullmatch(name):
                raise ValueError(f"dtype {name!r}")
            (value,) = np.frombuffer(packed, dtype=np.dtype(name))
            return value
    except (ValueError, TypeError, struct.error) as error:
        raise _malformed(path, f"a node of kind {code!r} that does not read: {error}") from error
    raise _malformed(path, f"a node of kind {code!r}, which is not known")


def _malformed(path: str, what: str) -> StorageError:
    return StorageError(
        "train.state-checkpoint-holds",
        f"the state of a checkpoint holds {what} at {path}",
        "read it with the version that wrote it",
    )
