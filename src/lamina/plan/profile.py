"""How deep a class may reach: a depth profile, resolved against the layers of a model."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lamina.errors import PlanError
from lamina.plan.naming import layers_named
from lamina.plan.stack import Layer, LayerStack


class Kind(enum.Enum):
    """What a profile counts in."""

    ALL = "all"
    TOP = "top"
    BAND = "band"
    BLOCKS = "blocks"
    LAYERS = "layers"


_KINDS = {kind.value for kind in Kind}
_EXAMPLES = (
    "{all = true}, {top = 0.25}, {band = [0.5, 1.0]}, {blocks = [4, 7]} or {layers = ['decoder.*', -1]}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthProfile:
    """The part of a model that a class's gradient may enter; elsewhere its row of C is 0.

      all             every layer
      top(p)          the last p of the depth: the band [1-p, 1]
      band(a, b)      the part of the depth between the fractions a and b
      blocks(i, j)    blocks i to j, both included, counted from 0; -1 is the last
      layers(names)   layers by name, pattern or index

    Depth is counted in blocks: block b of n takes up [b/n, (b+1)/n]. A layer belongs to a band only if all
    of its uses lie inside: one that straddles the edge is out, and so is a tied tensor with a use outside.
    Fractions are compared exactly, so that the top 0.1 of ten blocks is one block.
    """

    kind: Kind
    bounds: tuple[float, ...] = ()
    names: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is Kind.LAYERS:
            if not self.names or not all(_is_name(name) for name in self.names):
                raise PlanError(
                    f"profile layers is {list(self.names)!r}, must hold names, patterns or indices",
                    "write {layers = ['decoder.*', -1]}",
                )
        elif self.kind is Kind.BLOCKS:
            if len(self.bounds) != 2 or not all(_is_index(bound) for bound in self.bounds):
                raise PlanError(
                    f"profile blocks is {list(self.bounds)!r}, must be the first and the last block",
                    "write {blocks = [4, 7]}; -1 is the last block",
                )
        elif self.kind is not Kind.ALL:
            self._check_fractions()

    def _check_fractions(self) -> None:
        if len(self.bounds) != 2 or not all(_is_number(bound) for bound in self.bounds):
            raise PlanError(
                f"profile {self.kind.value} is {list(self.bounds)!r}, must be fractions of the depth",
                f"write one of {_EXAMPLES}",
            )
        low, high = self.bounds
        if not 0 <= low < high <= 1:
            shown = f"top is {1 - low:g}" if self.kind is Kind.TOP else f"band is [{low:g}, {high:g}]"
            bound = "in (0, 1]" if self.kind is Kind.TOP else "0 <= a < b <= 1"
            raise PlanError(
                f"profile {shown}, must be {bound}",
                "give fractions of the depth (0.25: a quarter) or {blocks = [first, last]} for block numbers",
            )

    @classmethod
    def all(cls) -> DepthProfile:
        """Every layer."""
        return cls(kind=Kind.ALL)

    @classmethod
    def top(cls, share: float) -> DepthProfile:
        """The last `share` of the depth, in (0, 1]."""
        if not _is_number(share):
            raise PlanError(f"profile top is {share!r}, must be a number in (0, 1]", "write {top = 0.25}")
        return cls(kind=Kind.TOP, bounds=(float(1 - _exact(share)), 1.0))

    @classmethod
    def band(cls, low: float, high: float) -> DepthProfile:
        """The depth between two fractions."""
        return cls(kind=Kind.BAND, bounds=(low, high))

    @classmethod
    def blocks(cls, first: int, last: int) -> DepthProfile:
        """Blocks `first` to `last`, both included."""
        return cls(kind=Kind.BLOCKS, bounds=(first, last))

    @classmethod
    def layers(cls, names: Sequence[str | int]) -> DepthProfile:
        """Layers by name, `fnmatch` pattern, name of a module above them, or index."""
        return cls(kind=Kind.LAYERS, names=(names,) if isinstance(names, str) else tuple(names))

    @classmethod
    def parse(cls, value: Mapping[str, Any] | str) -> DepthProfile:
        """From the form of policy.toml: a table with one key, or the word "all"."""
        if value == "all":
            return cls.all()
        if not isinstance(value, Mapping) or len(value) != 1 or not set(value) <= _KINDS:
            shown = dict(value) if isinstance(value, Mapping) else value
            raise PlanError(f"profile is {shown!r}, which is not a known kind", f"write one of {_EXAMPLES}")
        ((key, given),) = value.items()
        kind = Kind(key)
        if kind is Kind.TOP:
            return cls.top(given)
        if kind is Kind.ALL:
            if given is not True:
                raise PlanError(
                    f"profile all is {given!r}, must be true", "leave the profile out, or restrict it"
                )
            return cls.all()
        if not isinstance(given, list | tuple):
            raise PlanError(f"profile {key} is {given!r}, must be a list", f"write one of {_EXAMPLES}")
        if kind is Kind.LAYERS:
            return cls.layers(given)
        return cls(kind=kind, bounds=tuple(given))

    def to_dict(self) -> dict[str, Any]:
        """The form of policy.toml; `parse` reads it back."""
        if self.kind is Kind.ALL:
            return {"all": True}
        if self.kind is Kind.TOP:
            return {"top": float(1 - _exact(self.bounds[0]))}
        return {self.kind.value: list(self.names if self.kind is Kind.LAYERS else self.bounds)}

    def __str__(self) -> str:
        if self.kind is Kind.ALL:
            return "all layers"
        if self.kind is Kind.TOP:
            return f"top {float(100 * (1 - _exact(self.bounds[0]))):g} %"
        if self.kind is Kind.LAYERS:
            return f"layers {', '.join(map(str, self.names))}"
        return f"{self.kind.value} {self.bounds[0]:g} to {self.bounds[1]:g}"

    def resolve(self, stack: LayerStack, *, allow_empty: bool = False) -> tuple[bool, ...]:
        """Which layers of `stack` are reached, in order."""
        if self.kind is Kind.ALL:
            return (True,) * len(stack)
        if self.kind is Kind.LAYERS:
            return layers_named(self.names, stack)
        low, high = self._edges(len(stack.blocks))
        reached = tuple(_inside(layer, low, high) for layer in stack)
        if not any(reached) and not allow_empty:
            raise PlanError(
                f"profile {str(self)!r} reaches no trainable layer of {len(stack.blocks)} blocks "
                f"(it spans blocks {float(low):g} to {float(high):g})",
                "widen it: only layers that lie wholly inside are reached",
            )
        return reached

    def _edges(self, blocks: int) -> tuple[Fraction, Fraction]:
        """The band in units of blocks."""
        first, last = self.bounds
        if self.kind is not Kind.BLOCKS:
            return _exact(first) * blocks, _exact(last) * blocks
        low, high = (int(b) + blocks if b < 0 else int(b) for b in (first, last))
        if not 0 <= low <= high < blocks:
            raise PlanError(
                f"profile {str(self)!r} is out of range: the model has blocks 0 to {blocks - 1}",
                "give the first and the last block; -1 is the last",
            )
        return Fraction(low), Fraction(high + 1)


def _inside(layer: Layer, low: Fraction, high: Fraction) -> bool:
    return all(low <= first and stop <= high for first, stop in layer.spans)


def _exact(share: float) -> Fraction:
    """The fraction that was meant: 0.1 is 1/10, 0.3333333333 is 1/3."""
    return Fraction(share).limit_denominator(1_000_000)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return _is_index(value) or (isinstance(value, str) and value != "")
