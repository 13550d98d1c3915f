"""`Reach`: what a depth profile comes to on a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lamina.errors import PlanError
from lamina.plan.masked import Masked
from lamina.plan.naming import layers_named, matches, suggestion
from lamina.plan.parts import Part
from lamina.plan.profile import DepthProfile, Kind, exact
from lamina.plan.slices import Range, Slice

if TYPE_CHECKING:
    from lamina.plan.adapters import Adapter
    from lamina.plan.stack import Layer, LayerStack


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """Of one tensor of a layer that is reached, the places that are: along `axis`, which has `length` of them."""

    tensor: str
    axis: int
    length: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """By layer, whether a class reaches anything of it, and the factor on its threshold there; by tensor, which part.

    A tensor of a reached layer that is in no opening is reached wholly. `words` tell it, with the adapter's identity.
    """

    layers: tuple[bool, ...]
    factors: tuple[float, ...]
    openings: tuple[Opening, ...]
    words: str

    def slices(self, cls: str) -> tuple[Slice, ...]:
        """The openings as slices of a plan, for this class."""
        return tuple(
            Slice(cls=cls, tensor=part.tensor, axis=part.axis, length=part.length, ranges=part.ranges)
            for part in self.openings
        )


def reach(profile: DepthProfile, stack: LayerStack, *, allow_empty: bool = False) -> Reach:
    """Apply place, masks and weights to the layers of a model."""
    adapter = _adapter(profile, stack) if profile.kind is Kind.ADAPTER else None
    inside = _place(profile, stack, adapter)
    masked = Masked(profile, stack, inside) if profile.masked else None
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    for part in stack.parts:
        parts[part.tensor].append(part)
    layers: list[bool] = []
    openings: list[Opening] = []
    for layer, within in zip(stack, inside, strict=True):
        found = list(_openings(layer, adapter, masked, parts)) if within and (adapter or masked) else []
        reached = within and (not found or len(found) < len(layer.parameters) or any(o.ranges for o in found))
        layers.append(reached)
        openings += found if reached else []
    factors = _factors(profile, stack, layers)
    layers = [reached and factor > 0 for reached, factor in zip(layers, factors, strict=True)]
    if not any(layers) and not allow_empty:
        raise PlanError(
            "plan.profile-reaches-no-trainable",
            f"profile {str(profile)!r} reaches no trainable layer of {len(stack.blocks)} blocks{_span(profile, stack)}",
            "widen it: only layers that lie wholly inside are reached",
        )
    names = {name for layer, kept in zip(stack, layers, strict=True) if kept for name in layer.parameters}
    return Reach(
        layers=tuple(layers),
        factors=tuple(factor if kept else 1.0 for factor, kept in zip(factors, layers, strict=True)),
        openings=tuple(o for o in openings if o.tensor in names),
        words=profile.words(adapter.config if adapter is not None else None),
    )


# --------------------------------------------------------------------------------------------------- place


def _place(profile: DepthProfile, stack: LayerStack, adapter: Adapter | None) -> tuple[bool, ...]:
    """The layers of which the place holds anything."""
    if adapter is not None:
        own = set(adapter.tensors)
        return tuple(not own.isdisjoint(layer.parameters) for layer in stack)
    if profile.kind is Kind.ALL:
        return (True,) * len(stack)
    if profile.kind is Kind.LAYERS:
        return layers_named(profile.names, stack)
    low, high = _edges(profile, len(stack.blocks))
    return tuple(all(low <= first and stop <= high for first, stop in layer.spans) for layer in stack)


def _edges(profile: DepthProfile, blocks: int) -> tuple[Fraction, Fraction]:
    """The band in units of blocks."""
    first, last = profile.bounds
    if profile.kind is not Kind.BLOCKS:
        return exact(first) * blocks, exact(last) * blocks
    low, high = (int(b) + blocks if b < 0 else int(b) for b in (first, last))
    if not 0 <= low <= high < blocks:
        raise PlanError(
            "plan.profile-out-range",
            f"profile {str(profile)!r} is out of range: the model has blocks 0 to {blocks - 1}",
            "give the first and the last block; -1 is the last",
        )
    return Fraction(low), Fraction(high + 1)


def _span(profile: DepthProfile, stack: LayerStack) -> str:
    if profile.kind not in (Kind.TOP, Kind.BAND, Kind.BLOCKS):
        return ""
    low, high = _edges(profile, len(stack.blocks))
    return f" (it spans blocks {float(low):g} to {float(high):g})"


def _adapter(profile: DepthProfile, stack: LayerStack) -> Adapter:
    """The adapter that the profile names, if the model has it, trains it, and it is the one that was meant."""
    named = [adapter for adapter in stack.adapters if adapter.name == profile.name]
    if not named:
        known = ", ".join(repr(adapter.name) for adapter in stack.adapters)
        raise PlanError(
            "plan.profile-names-adapter",
            f"profile names adapter {profile.name!r}, which the model does not have",
            f"its adapters are {known}"
            if known
            else "put one on it with PEFT first, or name the tensors with {layers = […]}",
        )
    if len(named) > 1:
        raise PlanError(
            "plan.model-adapters-called",
            f"the model has {len(named)} adapters called {profile.name!r}, with other configurations",
            "give each a name of its own",
        )
    found = named[0]
    if not found.config:
        raise PlanError(
            "plan.configuration-adapter-no",
            f"the configuration of adapter {found.name!r} has no text that is the same in every run",
            "use numbers, words, lists and tables in it",
        )
    if profile.config is not None and profile.config != found.config:
        raise PlanError(
            "plan.profile-pins-adapter",
            f"profile pins adapter {found.name!r} to the configuration {profile.config[:12]}…, the model's is "
            f"{found.config[:12]}…",
            "train the adapter that the policy names, or have the policy changed",
        )
    if not found.tensors:
        raise PlanError(
            "plan.no-tensor-adapter",
            f"no tensor of adapter {found.name!r} is trainable",
            f"activate it, model.set_adapter({found.name!r}), before the stack is made",
        )
    return found


def _openings(
    layer: Layer, adapter: Adapter | None, masked: Masked | None, parts: Mapping[str, list[Part]]
) -> list[Opening]:
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
            made.append(Opening(tensor=tensor, axis=axis, length=length, ranges=ranges))
    return made


# ------------------------------------------------------------------------------------------------- weights


def _factors(profile: DepthProfile, stack: LayerStack, reached: list[bool]) -> list[float]:
    """The factor of every layer, by any of its names; two patterns that give one layer other factors are refused."""
    factors: list[float | None] = [None] * len(stack)
    for pattern, factor in profile.weights:
        meant = [any(matches(pattern, name) for name in (layer.name, *layer.aliases)) for layer in stack]
        if not any(m and r for m, r in zip(meant, reached, strict=True)):
            raise PlanError(
                "plan.profile-weights-name",
                f"profile weights name {pattern!r}, of which the profile reaches nothing"
                f"{suggestion(pattern, [layer.name for layer in stack])}",
                "correct it or leave it out",
            )
        for i, layer in enumerate(stack):
            if meant[i]:
                if factors[i] not in (None, factor):
                    raise PlanError(
                        "plan.profile-weights-give",
                        f"profile weights give layer {layer.name!r} the factors {factors[i]:g} and {factor:g}",
                        "let every layer be meant by one pattern",
                    )
                factors[i] = factor
    return [1.0 if factor is None else factor for factor in factors]
