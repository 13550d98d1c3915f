"""`Batch`: the examples of one step, and which contribution each of them belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lamina.errors import EngineError


@dataclass(frozen=True, eq=False)
class Batch:
    """One sampled batch.

    `x`, `y`   tensors (or tuples and dicts of tensors) whose first axis counts examples
    `unit[n]`  the contribution (0 … P-1) of example n; default: every example is its own
    `cls[u]`   the index of contribution u's class in the plan; default: class 0
    `weight[n]` the weight of example n inside its contribution; 0 marks padding
    `scale[u]` in (0, 1]: thresholds of contribution u are its class's times this; default: 1
    `ceiling[u]` > 0: the largest norm that contribution u's clipped gradient may have; default: no limit of its own

    A contribution's gradient is the weighted mean over its examples, clipped once. `len` counts
    contributions, and may be 0. `first` and `last` tell the engine where a step begins and ends.
    `classified` is False where no class was given: a plan of several classes refuses such a batch.
    """

    x: Any
    y: Any = None
    unit: Tensor | None = None
    cls: Tensor | None = None
    weight: Tensor | None = None
    scale: Tensor | None = None
    ceiling: Tensor | None = None
    first: bool = True
    last: bool = True
    classified: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        n = self.examples
        unit = _integers("unit", self.unit, n, default=lambda: torch.arange(n))
        units = len(torch.unique(unit))
        if n and units != int(unit.max()) + 1:
            raise EngineError(
                "engine.unit-numbers-contributions",
                f"unit numbers {units} contributions up to {int(unit.max())}: it has gaps",
                "number them 0 … P-1: torch.unique(ids, return_inverse=True)[1]",
            )
        if self.cls is not None and len(self.cls) != units:
            raise EngineError(
                "engine.cls-describes-contributions",
                f"cls describes {len(self.cls)} contributions, unit numbers {units}",
                "give one class per contribution, not per example",
            )
        object.__setattr__(self, "classified", self.cls is not None or units == 0)
        cls = _integers("cls", self.cls, units, default=lambda: torch.zeros(units, dtype=torch.long))
        weight = torch.ones(n) if self.weight is None else torch.as_tensor(self.weight, dtype=torch.float32)
        if weight.shape != (n,) or not bool(torch.isfinite(weight).all() and (weight >= 0).all()):
            raise EngineError(
                "engine.weight-shape-examples",
                f"weight has shape {tuple(weight.shape)} for {n} examples, or a value that is negative or not finite",
                "give one weight >= 0 per example; 0 marks padding",
            )
        if self.scale is not None:
            object.__setattr__(self, "scale", _limits("scale", self.scale, units, most=1.0))
        if self.ceiling is not None:
            object.__setattr__(self, "ceiling", _limits("ceiling", self.ceiling, units, most=math.inf))
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "cls", cls)
        object.__setattr__(self, "weight", weight)

    @property
    def examples(self) -> int:
        """The number of examples, padding included: the first axis of every tensor in x and y."""
        sizes = {
            t.shape[0] if t.dim() else -1
            for t in pytree.tree_leaves((self.x, self.y))
            if isinstance(t, Tensor)
        }
        if not sizes:
            raise EngineError(
                "engine.without-tensors",
                f"x is a {type(self.x).__name__} without tensors",
                "give tensors: torch.from_numpy(x) or torch.tensor(x)",
            )
        if len(sizes) != 1 or -1 in sizes:
            raise EngineError(
                "engine.tensors-first-axes",
                f"the tensors of x and y have first axes {sorted(sizes)}",
                "give every tensor of a batch the same first axis: examples",
            )
        return sizes.pop()

    def __len__(self) -> int:
        assert self.cls is not None
        return len(self.cls)

    def split(self, parts: int) -> Iterator[Batch]:
        """Cut into at most `parts` microbatches. A contribution is never cut in two.

        How a batch is cut changes neither the clipped sum nor the noise: nothing is released before the
        part whose `last` is true, and by then all of it is there.
        """
        if parts < 1:
            raise EngineError("engine.split", f"split({parts})", "ask for one part or more")
        assert self.unit is not None and self.cls is not None and self.weight is not None
        parts = max(1, min(parts, len(self)))
        bounds = [len(self) * i // parts for i in range(parts + 1)]
        for i, (low, high) in enumerate(pairwise(bounds)):
            rows = ((self.unit >= low) & (self.unit < high)).nonzero().flatten()
            yield Batch(
                _take(self.x, rows),
                _take(self.y, rows),
                unit=self.unit[rows] - low,
                cls=self.cls[low:high] if self.classified else None,
                weight=self.weight[rows],
                scale=None if self.scale is None else self.scale[low:high],
                ceiling=None if self.ceiling is None else self.ceiling[low:high],
                first=self.first and i == 0,
                last=self.last and i == parts - 1,
            )


def _limits(name: str, value: Any, size: int, *, most: float) -> Tensor:
    given = torch.as_tensor(value, dtype=torch.float64)
    if given.shape != (size,) or not bool(((given > 0) & (given <= most)).all()):
        raise EngineError(
            "engine.shape-contributions-value",
            f"{name} has shape {tuple(given.shape)} for {size} contributions, or a value outside (0, {most:g}]",
            "give one per contribution; a stricter contribution has smaller thresholds, never none",
        )
    return given


def _take(tree: Any, rows: Tensor) -> Any:
    return pytree.tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


def _integers(name: str, value: Any, size: int, default: Callable[[], Tensor]) -> Tensor:
    if value is None:
        return default()
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError):
        raise EngineError(
            "engine.not-made-integers",
            f"{name} is not made of integers",
            "class names become indices by plan.index('name')",
        ) from None
    if value.dtype.is_floating_point or value.dtype == torch.bool or value.shape != (size,):
        raise EngineError(
            "engine.dtype-shape-expected",
            f"{name} has dtype {value.dtype} and shape {tuple(value.shape)}, expected {size} integers",
            f"give {name} as a one-dimensional integer tensor",
        )
    numbers: Tensor = value.long()
    if size and int(numbers.min()) < 0:
        raise EngineError("engine.contains", f"{name} contains {int(numbers.min())}", f"{name} counts from 0")
    return numbers
