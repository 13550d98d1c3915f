"""What a model is called with: a tensor, a tuple of arguments or a dict of keyword arguments; patients come first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lamina.errors import PlanError


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of arguments or a dict of keyword arguments, as (args, kwargs)."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple) else ((example,), {})


def first(example: Any, count: int) -> Any:
    """The first `count` patients of an example."""
    args, kwargs = arguments(example)
    leaves = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[0] < count or leaf.shape[0] != leaves[0].shape[0]:
            raise PlanError(
                "measure.tensor-example-shape",
                f"a tensor of the example has shape {tuple(leaf.shape)}",
                f"the first axis counts patients: at least {count}, and as many in every tensor",
            )
    if not leaves:
        raise PlanError(
            "measure.example-without-tensor",
            f"the example is a {type(example).__name__} without a tensor",
            "give what model(...) accepts",
        )

    return mapped(example, lambda value: value[:count] if isinstance(value, Tensor) else value)


def mapped(example: Any, put: Callable[[Any], Any]) -> Any:
    """The example with every argument replaced."""
    if isinstance(example, Mapping):
        return {key: put(value) for key, value in example.items()}
    return tuple(map(put, example)) if isinstance(example, tuple) else put(example)


def count(example: Any) -> int:
    """How many patients a batch holds."""
    first(example, 0)
    args, kwargs = arguments(example)
    return next(int(t.shape[0]) for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
