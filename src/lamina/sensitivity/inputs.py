"""Proxy inputs: made up, public or simulated, in batches, every patient clipped to a public radius."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lamina.errors import PlanError
from lamina.sensitivity.example import arguments, count, first, mapped
from lamina.sensitivity.graph import Graph
from lamina.sensitivity.kinds import Kind
from lamina.sensitivity.program import Program

Batches = Iterator[Any]


def clipped(example: Any, radius: float) -> Any:
    """The batch with every patient (first axis) scaled to norm ≤ radius, over all its floating-point tensors."""
    args, kwargs = arguments(example)
    floats = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    if not floats:
        return example
    squares = [
        t.detach().double().flatten(1).square().sum(1) if t.ndim > 1 else t.double() ** 2 for t in floats
    ]
    norms = torch.stack(squares).sum(0).sqrt()
    if not norms.isfinite().all():
        raise PlanError(
            "measure.input-proxy-not",
            "an input of the proxy is not finite",
            "remove NaN and infinite entries from the public or simulated inputs",
        )
    scale = (radius / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)

    def put(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return (value.double() * scale.reshape(-1, *([1] * (value.ndim - 1)))).to(value.dtype)

    return mapped(example, put)


def gaussian(
    example: Any, program: Program, graph: Graph, passes: int, batch: int, generator: torch.Generator
) -> Batches:
    """Standard Gaussian tensors of the example's shape, and token ids drawn evenly from the table they are read from.

    Whole numbers that no table is read by (a mask) stay as the example has them.
    """
    rows = dict(zip(program.inputs, program.flat(example), strict=True))
    sizes = {id(value): _vocabulary(name, graph) for name, value in rows.items()}
    for start in range(0, passes, batch):
        n = min(batch, passes - start)

        def draw(value: Any, n: int = n) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = (n, *value.shape[1:])
            if value.is_floating_point():
                made = torch.randn(shape, generator=generator, dtype=torch.float32)
            elif sizes.get(id(value)):
                made = torch.randint(sizes[id(value)], shape, generator=generator)
            else:
                return value[:1].expand(shape).clone()
            return made.to(device=value.device, dtype=value.dtype)

        yield mapped(example, draw)


def given(inputs: Any, passes: int, batch: int) -> Batches:
    """At most `passes` patients: the rows of tensors, `batch` at a time, or batches as an iterable gives them."""
    left = passes
    for part in _batches(inputs, batch):
        n = count(part)
        if n == 0:
            continue
        yield first(part, min(n, left))
        left -= min(n, left)
        if left == 0:
            return


def peek(batches: Iterable[Any]) -> tuple[Any, Batches]:
    """The first batch, and all of them."""
    stream = iter(batches)
    try:
        head = next(stream)
    except StopIteration:
        raise PlanError(
            "measure.inputs-hold-no", "inputs hold no patient", "give at least one public or simulated input"
        ) from None
    return head, itertools.chain([head], stream)


def _batches(inputs: Any, batch: int) -> Iterator[Any]:
    if not isinstance(inputs, Tensor | tuple | Mapping):
        if not isinstance(inputs, Iterable):
            raise PlanError(
                "measure.inputs",
                f"inputs is a {type(inputs).__name__}",
                "give a tensor whose first axis counts patients, a tuple or dict of such, or an iterable of batches",
            )
        yield from inputs
        return
    n = count(inputs)
    for start in range(0, n, batch):
        yield mapped(inputs, partial(_cut, slice(start, start + batch)))


def _vocabulary(name: str, graph: Graph) -> int:
    """The rows of the smallest table that this input is looked up in; 0 if there is none."""
    reached, sizes = {name}, []
    for node in graph:
        if reached.intersection(node.inputs):
            if node.kind is Kind.EMBEDDING:
                sizes.append(int(node.arguments["weight"].shape[0]))
            elif node.kind is Kind.RESHAPE:
                reached.add(node.name)
    return min(sizes, default=0)


def _cut(rows: slice, value: Any) -> Any:
    return value[rows] if isinstance(value, Tensor) else value
