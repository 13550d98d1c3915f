"""Which tensors go together: by module, by block, or by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lamina.errors import PlanError
from lamina.plan.blocks import Blocks, owner
from lamina.plan.naming import above, matches, suggestion
from lamina.plan.tensors import Tensors

Keys = Mapping[str, tuple[str, ...]]
"""Tensor name -> names of the layers it would join; more than one where it is shared."""


def keys_by_place(group: str, tensors: Tensors, blocks: Blocks) -> Keys:
    """Each tensor by the module that owns it, or by that module's block."""
    if group not in ("module", "block"):
        raise PlanError(
            "plan.group-module-block",
            f"group is {group!r}, must be 'module', 'block' or a mapping",
            "use group={'layer name': ['patterns of tensor or module names']} to group by hand",
        )

    def key(use: str) -> str:
        path = owner(use)
        return path if group == "module" else blocks.names[blocks.uses[path][0]]

    return {name: tuple(key(use) for use in tensors.uses[name]) for name in tensors.trainable}


def keys_by_hand(groups: Mapping[str, Sequence[str]], tensors: Tensors) -> Keys:
    """Tensors that match a pattern by that group's name, the rest by module."""
    assigned: dict[str, str] = {}
    for group, patterns in groups.items():
        if not group or isinstance(patterns, str) or not patterns:
            raise PlanError(
                "plan.group-patterns-list",
                f"group {group!r} has patterns {patterns!r}, must be a list of one or more",
                "write group={'head': ['decoder.*', 'out']}",
            )
        for pattern in patterns:
            found = [name for name in tensors.trainable if _matches(pattern, tensors.uses[name])]
            if not found:
                raise PlanError(
                    "plan.correct-pattern-leave",
                    _nothing(group, pattern, tensors),
                    "correct the pattern or leave it out",
                )
            for name in found:
                if assigned.setdefault(name, group) != group:
                    raise PlanError(
                        "plan.tensor-matches-groups",
                        f"tensor {name!r} matches groups {assigned[name]!r} and {group!r}, must be in one",
                        "make the patterns disjoint",
                    )
    keys = {
        name: (assigned[name],) if name in assigned else tuple(owner(use) for use in tensors.uses[name])
        for name in tensors.trainable
    }
    for name, found_keys in keys.items():
        if name not in assigned and (clash := set(found_keys) & set(groups)):
            raise PlanError(
                "plan.group-name-module",
                f"group {sorted(clash)[0]!r} has the name of the module of {name!r}, which it leaves out",
                "rename the group, or add the tensor to its patterns",
            )
    return keys


def _matches(pattern: str, uses: Sequence[str]) -> bool:
    return any(matches(pattern, use) for use in uses)


def _nothing(group: str, pattern: str, tensors: Tensors) -> str:
    frozen = [name for name in tensors.frozen if _matches(pattern, tensors.uses[name])]
    if frozen:
        return f"pattern {pattern!r} of group {group!r} matches only frozen tensors ({', '.join(frozen[:3])})"
    known = sorted({part for name in tensors.trainable for part in above(name)})
    return f"pattern {pattern!r} of group {group!r} matches no trainable tensor{suggestion(pattern, known)}"
