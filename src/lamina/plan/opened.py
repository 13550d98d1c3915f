"""How many numbers of each layer any class reaches: what gets noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

from lamina.plan.slices import Slice, joined

if TYPE_CHECKING:
    from lamina.plan.step import StepPlan

Shapes = Mapping[str, Sequence[int]]


class _Layer(Protocol):
    @property
    def parameters(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int: ...


def opened_sizes(
    layers: Iterable[_Layer], reach: Mapping[str, Sequence[bool]], slices: Iterable[Slice], shapes: Shapes
) -> tuple[int, ...]:
    """d_l of each layer, without the places that the slices of all classes leave out.

    reach   by class, which layers it reaches; a layer that none reaches counts whole
    shapes  of tensors, by name; only those with slices are looked up
    """
    parts = {(part.tensor, part.cls): part for part in slices}
    cut = {tensor for tensor, _ in parts}
    sizes = []
    for i, layer in enumerate(layers):
        who = [cls for cls, row in reach.items() if row[i]]
        size = layer.size
        for tensor in layer.parameters if who else ():
            found = [parts[tensor, cls] for cls in who if (tensor, cls) in parts] if tensor in cut else []
            if found and len(found) == len(who):
                length = found[0].length
                places = joined(places for part in found for places in part.ranges)
                size -= (
                    prod(shapes[tensor]) // length * (length - sum(stop - first for first, stop in places))
                )
        sizes.append(size)
    return tuple(sizes)


def planned_sizes(plan: StepPlan, shapes: Shapes) -> tuple[int, ...]:
    """The same of a plan; `shapes` from the model or from `LayerStack.shapes`."""
    reach = {entry.name: [c > 0 for c in row] for entry, row in zip(plan.classes, plan.clip, strict=True)}
    return opened_sizes(plan.layers, reach, plan.slices, shapes)
