"""Layers by name, pattern or index."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lamina.errors import PlanError
from lamina.plan.grouping import above, suggestion
from lamina.plan.stack import LayerStack


def layers_named(names: Sequence[str | int], stack: LayerStack) -> tuple[bool, ...]:
    """Which layers are meant; a name, pattern or index that means none is refused."""
    reached = [False] * len(stack)
    for name in names:
        for index in _index(name, stack) if isinstance(name, int) else _match(name, stack):
            reached[index] = True
    return tuple(reached)


def _index(index: int, stack: LayerStack) -> list[int]:
    if not -len(stack) <= index < len(stack):
        raise PlanError(
            f"profile names layer {index}, but the stack has layers 0 to {len(stack) - 1}",
            "give an index in that range; -1 is the last layer",
        )
    return [index % len(stack)]


def _match(pattern: str, stack: LayerStack) -> list[int]:
    known = [layer.name for layer in stack]
    found = [i for i, name in enumerate(known) if any(fnmatchcase(part, pattern) for part in above(name))]
    if found:
        return found
    for layer in stack:
        if any(fnmatchcase(part, pattern) for alias in layer.aliases for part in above(alias)):
            raise PlanError(
                f"profile names {pattern!r}, which shares a tensor with layer {layer.name!r}",
                f"name {layer.name!r} if the class may reach every use of it",
            )
    for tensor in stack.frozen:
        if any(fnmatchcase(part, pattern) for part in above(tensor)):
            raise PlanError(
                f"profile names {pattern!r}, which is frozen (tensor {tensor!r})",
                "leave it out, or make it trainable before the stack is made",
            )
    raise PlanError(
        f"profile names layer {pattern!r}, which the stack does not have{suggestion(pattern, known)}",
        "print the stack to see its layers",
    )
