"""What a depth profile reaches on a model (layers, slices, factors), and whether one profile lies within another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from lamina.errors import PlanError
from lamina.plan.depth_profile import DepthProfile, ProfileKind, exact_fraction
from lamina.plan.selection import (
    EVERYWHERE,
    ROOT,
    PartKind,
    PartMask,
    Range,
    Slice,
    TensorPart,
    did_you_mean,
    intersect_ranges,
    match_layers,
    matches_pattern,
)

if TYPE_CHECKING:
    from lamina.plan.adapters import Adapter
    from lamina.plan.layer_stack import Layer, LayerStack


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """By layer, whether a class reaches anything of it, and the factor on its threshold there; by tensor, which part.

    A tensor of a reached layer that is in no opening is reached wholly; openings are slices of no class yet. `words`
    tell the profile, with the adapter's identity.
    """

    layers: tuple[bool, ...]
    factors: tuple[float, ...]
    openings: tuple[Slice, ...]
    words: str

    def slices(self, cls: str) -> tuple[Slice, ...]:
        """The openings as slices of a plan, for this class."""
        return tuple(replace(part, cls=cls) for part in self.openings)


def resolve_reach(profile: DepthProfile, stack: LayerStack, *, allow_empty: bool = False) -> Reach:
    """Apply place, masks and weights to the layers of a model."""
    adapter = _find_profile_adapter(profile, stack) if profile.kind is ProfileKind.ADAPTER else None
    inside = _layers_in_place(profile, stack, adapter)
    masked = ResolvedMasks(profile, stack, inside) if profile.masked else None
    parts: defaultdict[str, list[TensorPart]] = defaultdict(list)
    for part in stack.parts:
        parts[part.tensor].append(part)
    layers: list[bool] = []
    openings: list[Slice] = []
    for layer, within in zip(stack, inside, strict=True):
        found = list(_partly_reached_tensors(layer, adapter, masked, parts)) if within and (adapter or masked) else []
        reached = within and (not found or len(found) < len(layer.parameters) or any(o.ranges for o in found))
        layers.append(reached)
        openings += found if reached else []
    factors = _layer_factors(profile, stack, layers)
    layers = [reached and factor > 0 for reached, factor in zip(layers, factors, strict=True)]
    if not any(layers) and not allow_empty:
        problem = f"profile {str(profile)!r} reaches no trainable layer{_span_text(profile, stack)}"
        remedy = "widen it: only layers that lie wholly inside are reached"
        raise PlanError("plan.profile-reaches-nothing", problem, remedy)
    names = {name for layer, kept in zip(stack, layers, strict=True) if kept for name in layer.parameters}
    return Reach(
        layers=tuple(layers),
        factors=tuple(factor if kept else 1.0 for factor, kept in zip(factors, layers, strict=True)),
        openings=tuple(o for o in openings if o.tensor in names),
        words=profile.words(adapter.config if adapter is not None else None),
    )


def _layers_in_place(profile: DepthProfile, stack: LayerStack, adapter: Adapter | None) -> tuple[bool, ...]:
    """The layers of which the place holds anything."""
    if adapter is not None:
        own = set(adapter.tensors)
        return tuple(not own.isdisjoint(layer.parameters) for layer in stack)
    if profile.kind is ProfileKind.ALL:
        return (True,) * len(stack)
    if profile.kind is ProfileKind.LAYERS:
        return match_layers(profile.names, stack)
    counted = [name for names in stack.blocks for name in names.split(", ")]
    if profile.kind is ProfileKind.BLOCKS and len(set(counted)) < len(counted):
        problem = f"profile {str(profile)!r} counts blocks, and the towers of the model have different numbers of them"
        raise PlanError("plan.profile-blocks-of-towers", problem, "use fractions: {top = 0.25} or {band = [0.5, 1.0]}")
    return spans_in_band(profile, [layer.spans for layer in stack], len(stack.blocks))


def spans_in_band(profile: DepthProfile, spans: Sequence[Sequence[Range]], blocks: int) -> tuple[bool, ...]:
    """Which layers lie wholly in the band of a profile, by their spans; one without spans does not."""
    low, high = _band_in_blocks(profile, blocks)
    return tuple(bool(runs) and all(low <= first and stop <= high for first, stop in runs) for runs in spans)


def _band_in_blocks(profile: DepthProfile, blocks: int) -> tuple[Fraction, Fraction]:
    """The band in units of blocks."""
    first, last = profile.bounds
    if profile.kind is not ProfileKind.BLOCKS:
        return exact_fraction(first) * blocks, exact_fraction(last) * blocks
    low, high = (int(b) + blocks if b < 0 else int(b) for b in (first, last))
    if not 0 <= low <= high < blocks:
        problem = f"profile {str(profile)!r} is out of range: the model has blocks 0 to {blocks - 1}"
        raise PlanError("plan.profile-blocks-out-of-range", problem, "-1 is the last block")
    return Fraction(low), Fraction(high + 1)


def _span_text(profile: DepthProfile, stack: LayerStack) -> str:
    if profile.kind not in (ProfileKind.TOP, ProfileKind.BAND, ProfileKind.BLOCKS):
        return ""
    low, high = _band_in_blocks(profile, len(stack.blocks))
    return f" (it spans blocks {float(low):g} to {float(high):g})"


def _find_profile_adapter(profile: DepthProfile, stack: LayerStack) -> Adapter:
    """The adapter that the profile names, if the model has it, trains it, and it is the one that was meant."""
    named = [adapter for adapter in stack.adapters if adapter.name == profile.name]
    if not named:
        known = ", ".join(repr(adapter.name) for adapter in stack.adapters)
        raise PlanError(
            "plan.adapter-missing",
            f"the model has no adapter {profile.name!r}",
            f"its adapters are {known}"
            if known
            else "add one with PEFT first, or name the tensors with {layers = […]}",
        )
    if len(named) > 1:
        problem = f"the model has {len(named)} adapters called {profile.name!r}"
        raise PlanError("plan.adapter-ambiguous", problem, "give each a name of its own")
    found = named[0]
    if not found.config:
        problem = f"the configuration of adapter {found.name!r} cannot be written the same way in every run"
        raise PlanError("plan.adapter-config-not-canonical", problem, "use only numbers, texts, lists and tables in it")
    if profile.config is not None and profile.config != found.config:
        problem = f"adapter {found.name!r} has configuration {found.config[:12]}…, the profile asks for {profile.config[:12]}…"
        remedy = "train the adapter that the policy names, or change the policy"
        raise PlanError("plan.adapter-config-differs", problem, remedy)
    if not found.tensors:
        remedy = f"call model.set_adapter({found.name!r}) before the stack is made"
        raise PlanError("plan.adapter-frozen", f"no tensor of adapter {found.name!r} is trainable", remedy)
    return found


def _partly_reached_tensors(
    layer: Layer, adapter: Adapter | None, masked: ResolvedMasks | None, parts: Mapping[str, list[TensorPart]]
) -> list[Slice]:
    """The tensors of a layer that are not reached wholly."""
    made = []
    for tensor, shape in zip(layer.parameters, layer.shapes, strict=True):
        mine = parts.get(tensor, [])
        ranges: tuple[Range, ...] | None = None
        if adapter is not None and tensor not in adapter.tensors:
            ranges = ()
        elif masked is not None:
            ranges = masked.ranges(tensor, mine)
        if ranges is not None:
            axis, length = (mine[0].axis, mine[0].length) if mine else (0, shape[0] if shape else 1)
            made.append(Slice(cls="", tensor=tensor, axis=axis, length=length, ranges=ranges))
    return made


def _layer_factors(profile: DepthProfile, stack: LayerStack, reached: list[bool]) -> list[float]:
    """The factor of every layer, by any of its names; two patterns that give one layer other factors are refused."""
    factors: list[float | None] = [None] * len(stack)
    for pattern, factor in profile.weights:
        meant = [any(matches_pattern(pattern, name) for name in (layer.name, *layer.aliases)) for layer in stack]
        if not any(m and r for m, r in zip(meant, reached, strict=True)):
            hint = did_you_mean(pattern, [layer.name for layer in stack])
            problem = f"profile weights name {pattern!r}, of which the profile reaches nothing{hint}"
            raise PlanError("plan.profile-weights-unreached", problem, "correct it or leave it out")
        for i, layer in enumerate(stack):
            if meant[i]:
                if factors[i] not in (None, factor):
                    problem = f"profile weights give layer {layer.name!r} two factors, {factors[i]:g} and {factor:g}"
                    raise PlanError("plan.profile-weights-conflict", problem, "let one pattern match each layer")
                factors[i] = factor
    return [1.0 if factor is None else factor for factor in factors]


class ResolvedMasks:
    """The masks of a profile on a model: for every attention, or list of experts, the numbers that are chosen."""

    def __init__(self, profile: DepthProfile, stack: LayerStack, inside: tuple[bool, ...]) -> None:
        self.others = profile.others
        self.chosen: dict[PartKind, Mapping[str, frozenset[int]]] = {}
        names = {name for layer, kept in zip(stack, inside, strict=True) if kept for name in layer.parameters}
        for kind, mask in ((PartKind.HEADS, profile.heads), (PartKind.EXPERTS, profile.experts)):
            if mask is not None:
                self.chosen[kind] = _chosen_numbers(mask, kind, profile, stack, names)
        mine = [part for part in stack.parts if part.kind in self.chosen]
        self.modules = {
            part.tensor.rpartition(".")[0] for part in mine
        }  # what has parts: nothing of it counts as other
        self.attentions = {part.group: part.count for part in mine if part.kind is PartKind.HEADS}
        self.shaped = {  # modules with a tensor that has an axis for something, by its length
            (name.rpartition(".")[0], length) for name, shape in stack.shapes.items() for length in shape
        }
        for entry in stack.unread if self.others else ():
            if entry.kind in self.chosen and any(_is_inside_module(entry.module, name) for name in names):
                problem = f"Cannot tell which tensors of {entry.module!r} belong to {entry.kind.value}: {entry.why}"
                remedy = f"declare it: LayerStack.from_model(model, {entry.kind.value}={{{entry.module!r}: …}}), 0 if none; or leave it out"
                raise PlanError("plan.parts-unknown", problem, remedy)

    def _beside(self, tensor: str) -> bool:
        """Whether a tensor without parts may still serve single heads, or experts: then it counts as no other.

        Tensors of a module that has parts; all that lies below an attention (tables of positions, sinks, norms of
        queries and keys). Where a whole block is what attends, its MLP and norms lie below it too: there, what the
        block itself holds, and every module with an axis as long as there are heads.
        """
        owner = tensor.rpartition(".")[0]
        if owner in self.modules:
            return True
        return any(
            _is_inside_module(group, tensor)
            and ("att" in group.rpartition(".")[2].lower() or owner == group or (owner, count) in self.shaped)
            for group, count in self.attentions.items()
        )

    def ranges(self, tensor: str, parts: list[TensorPart]) -> tuple[Range, ...] | None:
        """The places of a tensor that are reached; None if all of them are."""
        mine = [part for part in parts if part.kind in self.chosen]
        if not mine:
            return None if self.others and not self._beside(tensor) else ()
        found: tuple[Range, ...] = ((0, mine[0].length),)
        for part in mine:
            chosen = self.chosen[part.kind].get(part.group, frozenset())
            found = intersect_ranges(found, part.ranges_serving_only(chosen))
        return None if found == ((0, mine[0].length),) else found


def _is_inside_module(module: str, tensor: str) -> bool:
    return module == ROOT or tensor.startswith(f"{module}.")


def _chosen_numbers(
    mask: PartMask, kind: PartKind, profile: DepthProfile, stack: LayerStack, names: set[str]
) -> dict[str, frozenset[int]]:
    """For every group of the kind with a tensor in the place, the chosen numbers; refused where there are none."""
    what = kind.value
    counts = {part.group: part.count for part in stack.parts if part.kind is kind}
    here = {part.group for part in stack.parts if part.kind is kind and part.tensor in names}
    known = _known_parts_text(kind, stack, counts)
    if not here:
        problem = f"profile {str(profile)!r} asks for {what}, but the model trains no known ones there"
        raise PlanError("plan.parts-missing", problem, known)
    for pattern, _ in mask.rows:
        if not any(matches_pattern(pattern, group) for group in counts):
            hint = did_you_mean(pattern, sorted(counts))
            problem = f"profile {what}: pattern {pattern!r} matches no module with {what}{hint}"
            raise PlanError("plan.parts-pattern-unmatched", problem, known)
    chosen = {group: mask.of(group, what) for group in counts}
    for group in (group for group in counts if group in here):
        if chosen[group] and max(chosen[group]) >= counts[group]:
            problem = f"profile {what} names number {max(chosen[group])} of {group!r}, which has {counts[group]}"
            remedy = "count from 0; give numbers by pattern where modules differ"
            raise PlanError("plan.parts-out-of-range", problem, remedy)
    if not any(chosen[group] for group in here):
        problem = f"profile {str(profile)!r} chooses no {what} among the layers that it reaches"
        raise PlanError("plan.parts-none-chosen", problem, known)
    return chosen


def _known_parts_text(kind: PartKind, stack: LayerStack, counts: Mapping[str, int]) -> str:
    known = [f"{group} ({count})" for group, count in list(counts.items())[:4]]
    if len(counts) > 4:
        known.append(f"and {len(counts) - 4} more")
    unread = [f"{entry.module} ({entry.why})" for entry in stack.unread if entry.kind is kind][:2]
    return (
        f"known {kind.value}: {', '.join(known) or 'none'}"
        + (f"; not understood: {', '.join(unread)}" if unread else "")
        + f"; declare others with LayerStack.from_model(model, {kind.value}={{'pattern': count}})"
    )


# Whether one depth profile reaches nothing that another does not, on any model.
#
# A contributor signs how deep its data may go; a policy that goes deeper must be refused, without a model at hand. So
# the answer is on the safe side: True only where it follows from the two profiles alone.


def profile_within(one: DepthProfile, other: DepthProfile) -> bool:
    """Whether `one` reaches a part of what `other` reaches, at thresholds no larger."""
    return one == other or (_place_within(one, other) and _masks_within(one, other) and _weights_within(one, other))


def _place_within(one: DepthProfile, other: DepthProfile) -> bool:
    if other.kind is ProfileKind.ALL:
        return True
    fractions = (ProfileKind.TOP, ProfileKind.BAND)
    if one.kind in fractions and other.kind in fractions:
        (a, b), (low, high) = map(exact_fraction, one.bounds), map(exact_fraction, other.bounds)
        return low <= a and b <= high
    if one.kind is ProfileKind.BLOCKS and other.kind is ProfileKind.BLOCKS:
        return _block_not_after(other.bounds[0], one.bounds[0]) and _block_not_after(one.bounds[1], other.bounds[1])
    if one.kind is ProfileKind.LAYERS and other.kind is ProfileKind.LAYERS:
        return set(one.names) <= set(other.names)
    if one.kind is ProfileKind.ADAPTER and other.kind is ProfileKind.ADAPTER:
        pinned = other.config is None or one.config == other.config
        return one.name == other.name and pinned and (other.scope is None or one.scope == other.scope)
    return False


def _block_not_after(one: float, other: float) -> bool:
    """Whether block `one` is at most block `other` in a model of any number of blocks that has both."""
    if (one < 0) == (other < 0):
        return one <= other
    return one == 0 or other == -1


def _masks_within(one: DepthProfile, other: DepthProfile) -> bool:
    if not other.masked:
        return True
    if not one.masked or (one.others and not other.others):
        return False
    for mine, theirs in ((one.heads, other.heads), (one.experts, other.experts)):
        if theirs is not None:
            if mine is None or not _numbers_within(mine, theirs):
                return False
        elif mine is not None and not other.others:
            return False
    return True


def _numbers_within(one: PartMask, other: PartMask) -> bool:
    """Whether every row of `one` is inside a row of `other` that means the same modules, or all."""
    rows = dict(other.rows)
    return all(set(numbers) <= set(rows.get(pattern, rows.get(EVERYWHERE, ()))) for pattern, numbers in one.rows)


def _weights_within(one: DepthProfile, other: DepthProfile) -> bool:
    mine = dict(one.weights)
    return all(pattern in mine and mine[pattern] <= factor for pattern, factor in other.weights)
