"""Layers by name, pattern or index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from lamina.errors import PlanError

if TYPE_CHECKING:
    from lamina.plan.stack import Layer, LayerStack

ROOT = "(root)"
"""The name of the layer, or block, of tensors that the model itself owns."""


def above(name: str) -> Iterator[str]:
    """A dotted name and every prefix of it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means this name, or a module above it."""
    return any(fnmatchcase(part, pattern) for part in above(name))


def suggestion(name: str, known: Sequence[str]) -> str:
    """'; did you mean …?' for a name that is not among the known ones, or nothing."""
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def layers_named(names: Sequence[str | int], stack: LayerStack) -> tuple[bool, ...]:
    """Which layers are meant; a name, pattern or index that means none is refused.

    A layer with a tied tensor is meant by its own name or index, or by patterns that mean all of its uses: 'vision.*'
    does not mean a tensor that the language tower uses too.
    """
    patterns = [name for name in names if isinstance(name, str)]
    reached = [False] * len(stack)
    for index in (_index(name, stack) for name in names if isinstance(name, int)):
        reached[index] = True
    for i, layer in enumerate(stack):
        if any(pattern == layer.name for pattern in patterns):
            reached[i] = True
        elif any(matches(pattern, layer.name) for pattern in patterns):
            reached[i] |= all(any(matches(pattern, use) for pattern in patterns) for use in _elsewhere(layer))
    for pattern in patterns:
        _check_met(pattern, stack, reached)
    return tuple(reached)


def _elsewhere(layer: Layer) -> list[str]:
    """Tensors of a layer, or other names of them, that are not below the module that it is named after."""
    inside = f"{layer.name}."
    named_after = any(name.startswith(inside) for name in layer.parameters)
    others = [name for name in layer.parameters if not name.startswith(inside)] if named_after else []
    return [*others, *layer.aliases]


def _index(index: int, stack: LayerStack) -> int:
    if not -len(stack) <= index < len(stack):
        raise PlanError(
            "plan.profile-names-layer-stack",
            f"profile names layer {index}, but the stack has layers 0 to {len(stack) - 1}",
            "give an index in that range; -1 is the last layer",
        )
    return index % len(stack)


def _check_met(pattern: str, stack: LayerStack, reached: Sequence[bool]) -> None:
    """Refuse a pattern that means no layer, or only ones that are used elsewhere too."""
    known = [layer.name for layer in stack]
    if any(matches(pattern, name) for name in known):
        return
    shared = [i for i, layer in enumerate(stack) if any(matches(pattern, use) for use in _elsewhere(layer))]
    if any(reached[i] for i in shared):
        return
    if shared:
        raise PlanError(
            "plan.profile-names-shares",
            f"profile names {pattern!r}, which shares a tensor with layer {known[shared[0]]!r}",
            f"name {known[shared[0]]!r} if the class may reach every use of it",
        )
    for tensor in stack.frozen:
        if matches(pattern, tensor):
            raise PlanError(
                "plan.profile-names-frozen",
                f"profile names {pattern!r}, which is frozen (tensor {tensor!r})",
                "leave it out, or make it trainable before the stack is made",
            )
    raise PlanError(
        "plan.profile-names-layer",
        f"profile names layer {pattern!r}, which the stack does not have{suggestion(pattern, known)}",
        "print the stack to see its layers",
    )
