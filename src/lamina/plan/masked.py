"""The masks of a profile on a model: which heads and experts are chosen, and what they open of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lamina.errors import PlanError
from lamina.plan.mask import Mask
from lamina.plan.naming import ROOT, matches, suggestion
from lamina.plan.parts import Part, PartKind, common
from lamina.plan.slices import Range

if TYPE_CHECKING:
    from lamina.plan.profile import DepthProfile
    from lamina.plan.stack import LayerStack


class Masked:
    """The masks of a profile on a model: for every attention, or list of experts, the numbers that are chosen."""

    def __init__(self, profile: DepthProfile, stack: LayerStack, inside: tuple[bool, ...]) -> None:
        self.others = profile.others
        self.chosen: dict[PartKind, Mapping[str, frozenset[int]]] = {}
        names = {name for layer, kept in zip(stack, inside, strict=True) if kept for name in layer.parameters}
        for kind, mask in ((PartKind.HEADS, profile.heads), (PartKind.EXPERTS, profile.experts)):
            if mask is not None:
                self.chosen[kind] = _numbers(mask, kind, profile, stack, names)
        self.modules = {
            part.tensor.rpartition(".")[0] for part in stack.parts if part.kind in self.chosen
        }  # what has parts: nothing of it counts as other
        self.attentions = (
            {part.group: part.count for part in stack.parts if part.kind is PartKind.HEADS}
            if PartKind.HEADS in self.chosen
            else {}
        )
        self.shaped = {  # modules with a tensor that has an axis for something, by its length
            (name.rpartition(".")[0], length) for name, shape in stack.shapes.items() for length in shape
        }
        for entry in stack.unread if self.others else ():
            if entry.kind in self.chosen and any(_inside(entry.module, name) for name in names):
                raise PlanError(
                    "plan.profile-reaches-no",
                    f"profile reaches what has no {entry.kind.value}, and of {entry.module!r} that is not known: "
                    f"{entry.why}",
                    f"declare it: LayerStack.from_model(model, {entry.kind.value}={{{entry.module!r}: …}}), 0 if it "
                    "has none; or leave it out of the place",
                )

    def _beside(self, tensor: str) -> bool:
        """Whether a tensor without parts may still serve single heads, or experts: then it counts as no other.

        Tensors of a module that has parts; all that lies below an attention (tables of positions, sinks, norms of
        queries and keys). Where a whole block is what attends, its MLP and norms lie below it too: there, what the
        block itself holds, and every module with an axis as long as there are heads.
        """
        owner = tensor.rpartition(".")[0]
        if owner in self.modules:
            return True
        for group, count in self.attentions.items():
            if _inside(group, tensor) and (
                "att" in group.rpartition(".")[2].lower() or owner == group or (owner, count) in self.shaped
            ):
                return True
        return False

    def ranges(self, tensor: str, parts: list[Part]) -> tuple[Range, ...] | None:
        """The places of a tensor that are reached; None if all of them are."""
        mine = [part for part in parts if part.kind in self.chosen]
        if not mine:
            return None if self.others and not self._beside(tensor) else ()
        found: tuple[Range, ...] = ((0, mine[0].length),)
        for part in mine:
            found = common(found, part.open_to(self.chosen[part.kind].get(part.group, frozenset())))
        return None if found == ((0, mine[0].length),) else found


def _inside(module: str, tensor: str) -> bool:
    return module == ROOT or tensor.startswith(f"{module}.")


def _numbers(
    mask: Mask, kind: PartKind, profile: DepthProfile, stack: LayerStack, names: set[str]
) -> dict[str, frozenset[int]]:
    """For every group of the kind with a tensor in the place, the chosen numbers; refused where there are none."""
    what = kind.value
    counts = {part.group: part.count for part in stack.parts if part.kind is kind}
    here = {part.group for part in stack.parts if part.kind is kind and part.tensor in names}
    if not here:
        raise PlanError(
            "plan.profile-asks-model",
            f"profile {str(profile)!r} asks for {what}, and the model trains none there that are known",
            _known(kind, stack, counts),
        )
    for pattern, _ in mask.rows:
        if not any(matches(pattern, group) for group in counts):
            raise PlanError(
                "plan.profile-pattern-means",
                f"profile {what} has the pattern {pattern!r}, which means no module that has any"
                f"{suggestion(pattern, sorted(counts))}",
                _known(kind, stack, counts),
            )
    chosen = {group: mask.of(group, what) for group in counts}
    for group in (group for group in counts if group in here):
        if chosen[group] and max(chosen[group]) >= counts[group]:
            raise PlanError(
                "plan.profile-names-number",
                f"profile {what} names number {max(chosen[group])} of {group!r}, which has {counts[group]}",
                "they are counted from 0; give numbers by pattern where modules differ",
            )
    if not any(chosen[group] for group in here):
        raise PlanError(
            "plan.profile-chooses-no",
            f"profile {str(profile)!r} chooses no {what} within its place",
            _known(kind, stack, counts),
        )
    return chosen


def _known(kind: PartKind, stack: LayerStack, counts: Mapping[str, int]) -> str:
    told = [f"{group} ({count})" for group, count in list(counts.items())[:4]]
    if len(counts) > 4:
        told.append(f"and {len(counts) - 4} more")
    unread = [f"{entry.module} ({entry.why})" for entry in stack.unread if entry.kind is kind][:2]
    return (
        f"known {kind.value}: {', '.join(told) or 'none'}"
        + (f"; not understood: {', '.join(unread)}" if unread else "")
        + f"; declare others with LayerStack.from_model(model, {kind.value}={{'pattern': count}})"
    )
