"""The attention heads of a model: every attention that can be read, and those that cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lamina.errors import PlanError
from lamina.plan.attention import Heads as Heads
from lamina.plan.attention import Unlike, attention_parts
from lamina.plan.naming import ROOT
from lamina.plan.parts import Part, PartKind, Unread
from lamina.plan.stated import Declarations, related, whole

DECLARED = "lamina_heads"
"""The attribute by which an attention module says itself what heads it has: a number, or `Heads`; 0: none."""


def find_heads(model: nn.Module, given: Mapping[str, int | Heads]) -> tuple[list[Part], list[Unread]]:
    """The heads of every attention. `given`: by pattern of module names, how many, or `Heads`; 0: it has none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = Declarations(given, DECLARED, "heads")
    parts: list[Part] = []
    strange: dict[str, str] = {}
    read: set[str] = set()
    for path, module in modules.items():
        said = declared.of(path, module)
        if said == 0 and not isinstance(said, bool):
            read.add(path)
            continue
        wanted = _heads(path, said)
        try:
            found = list(attention_parts(path, module, modules, wanted))
        except Unlike as problem:
            if wanted is not None:
                raise PlanError(
                    "plan.attention-declared",
                    f"attention {path or ROOT!r} is declared as {wanted}, but {problem}",
                    "correct the declaration",
                ) from None
            strange[path] = str(problem)
            continue
        if found:
            parts += found
            read.add(path)
    declared.check()
    for path, module in modules.items():
        name, maps = type(module).__name__, any(tensor.ndim >= 2 for tensor in module.parameters())
        if "attention" in name.lower() and maps and not related(path, read | strange.keys()):
            strange[path] = f"the projections of this {name} are not known"
    return parts, [Unread(module=path or ROOT, kind=PartKind.HEADS, why=why) for path, why in strange.items()]


def _heads(path: str, value: Any) -> Heads | None:
    if value is None or isinstance(value, Heads):
        return value
    if not whole(value):
        raise PlanError(
            "plan.heads-declared",
            f"heads of {path or ROOT!r} are declared as {value!r}",
            "give how many there are, 0 if none, or lamina.plan.Heads(count=…, …)",
        )
    return Heads(count=value)
