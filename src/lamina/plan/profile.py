"""Depth profiles: which part of a model a class may reach."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from lamina.errors import PlanError
from lamina.plan.mask import Mask

if TYPE_CHECKING:
    from lamina.plan.reach import Reach
    from lamina.plan.stack import LayerStack

PROFILE_SCHEMA = 1
"""The version of what a profile may say and of what it means; ledgers record it."""


class Kind(enum.Enum):
    """What a profile counts in: its place."""

    ALL = "all"
    TOP = "top"
    BAND = "band"
    BLOCKS = "blocks"
    LAYERS = "layers"
    ADAPTER = "adapter"


EXAMPLES = (
    "{all = true}, {top = 0.25}, {band = [0.5, 1.0]}, {blocks = [4, 7]}, {layers = ['decoder.*', -1]} or "
    "{adapter = 'default'}"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHORT = re.compile(r" \(([0-9a-f]{12})[,)]")


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthProfile:
    """The part of a model that a class's gradient may enter; elsewhere it is zero before it is measured.

    One place:
      all             every layer
      top(p)          the last p of the depth: the band [1-p, 1]
      band(a, b)      the part of the depth between the fractions a and b
      blocks(i, j)    blocks i to j, both included, counted from 0; -1 is the last
      layers(names)   layers by name, pattern or index
      adapter(name)   the adapter's own tensors and nothing else; `config` pins its configuration by SHA-256, `scope`
                      says where it may be deployed
    and within it:
      heads, experts  only these, by number (`Mask`); what others share with them is out
      others          with heads or experts: also what has no such parts, like an MLP or a norm
      weights         factors in (0, 1] on the class's thresholds, by pattern of layers; 0 takes a layer out

    Depth is counted in blocks: block b of n takes up [b/n, (b+1)/n]. A layer belongs to a band only if all
    of its uses lie inside: one that straddles the edge is out, and so is a tied tensor with a use outside.
    Fractions are compared exactly, so that the top 0.1 of ten blocks is one block.
    """

    kind: Kind = Kind.ALL
    bounds: tuple[float, ...] = ()
    names: tuple[str | int, ...] = ()
    name: str | None = None
    config: str | None = None
    scope: str | None = None
    heads: Mask | None = None
    experts: Mask | None = None
    others: bool = False
    weights: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind is Kind.LAYERS:
            self._check_names()
        elif self.kind is Kind.BLOCKS:
            if len(self.bounds) != 2 or not all(_is_index(bound) for bound in self.bounds):
                raise PlanError(
                    "plan.profile-blocks-first",
                    f"profile blocks is {list(self.bounds)!r}, must be the first and the last block",
                    "write {blocks = [4, 7]}; -1 is the last block",
                )
        elif self.kind is Kind.ADAPTER:
            self._check_adapter()
        elif self.kind is not Kind.ALL:
            self._check_fractions()
        if self.kind is not Kind.ADAPTER and (self.name, self.config, self.scope) != (None, None, None):
            raise PlanError(
                "plan.profile-name-config",
                "profile has the name, config or scope of an adapter, and no adapter",
                "use an adapter",
            )
        if self.others not in (True, False) or (self.others and not self.masked):
            raise PlanError(
                "plan.profile-others",
                f"profile others is {self.others!r}{'' if self.masked else ' without heads or experts'}",
                "others = true is for profiles with heads or experts; without them nothing is left out",
            )
        object.__setattr__(self, "weights", _weights(self.weights))

    def _check_names(self) -> None:
        if not self.names or not all(_is_name(name) for name in self.names):
            raise PlanError(
                "plan.profile-layers-hold",
                f"profile layers is {list(self.names)!r}, must hold names, patterns or indices",
                "write {layers = ['decoder.*', -1]}",
            )
        ordered = sorted(set(self.names), key=lambda name: (isinstance(name, int), name))
        object.__setattr__(self, "names", tuple(ordered))

    def _check_adapter(self) -> None:
        for what, text in (("name", self.name), ("scope", self.scope)):
            if (text is None and what == "name") or (text is not None and not _is_text(text)):
                raise PlanError(
                    "plan.profile-adapter-text",
                    f"profile adapter has the {what} {text!r}, must be text",
                    'write {adapter = "default"} or {adapter = {name = "default", config = "…", scope = "ward-7/ecg"}}',
                )
        if self.config is not None and not (isinstance(self.config, str) and _DIGEST.fullmatch(self.config)):
            raise PlanError(
                "plan.profile-adapter-config",
                f"profile adapter has the config {self.config!r}, must be a SHA-256 in 64 hex digits",
                "LayerStack.from_model(model).adapters shows it",
            )

    def _check_fractions(self) -> None:
        if len(self.bounds) != 2 or not all(_is_number(bound) for bound in self.bounds):
            raise PlanError(
                "plan.profile-fractions-depth",
                f"profile {self.kind.value} is {list(self.bounds)!r}, must be fractions of the depth",
                f"write one of {EXAMPLES}",
            )
        low, high = self.bounds
        if not 0 <= low < high <= 1:
            shown = f"top is {1 - low:g}" if self.kind is Kind.TOP else f"band is [{low:g}, {high:g}]"
            bound = "in (0, 1]" if self.kind is Kind.TOP else "0 <= a < b <= 1"
            raise PlanError(
                "plan.profile",
                f"profile {shown}, must be {bound}",
                "give fractions of the depth (0.25: a quarter) or {blocks = [first, last]} for block numbers",
            )
        object.__setattr__(self, "bounds", (float(low), float(high)))

    # --------------------------------------------------------------------------------------- how it is made

    @classmethod
    def all(cls) -> DepthProfile:
        """Every layer."""
        return cls()

    @classmethod
    def top(cls, share: float) -> DepthProfile:
        """The last `share` of the depth, in (0, 1]."""
        if not _is_number(share):
            raise PlanError(
                "plan.profile-top-number",
                f"profile top is {share!r}, must be a number in (0, 1]",
                "write {top = 0.25}",
            )
        return cls(kind=Kind.TOP, bounds=(float(1 - exact(share)), 1.0))

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
    def adapter(cls, name: str, *, config: str | None = None, scope: str | None = None) -> DepthProfile:
        """The tensors of an adapter; refused on a model whose adapter has another configuration than `config`."""
        return cls(kind=Kind.ADAPTER, name=name, config=config, scope=scope)

    def only(
        self,
        *,
        heads: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        experts: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        others: bool = False,
    ) -> DepthProfile:
        """The same place, of it only these heads and experts; with `others`, also what has none.

        >>> str(DepthProfile.top(0.25).only(heads=[0, 1]))
        'top 25 %, heads 0, 1'
        """
        made = {
            what: None if given is None else Mask.parse(given, what)
            for what, given in (("heads", heads), ("experts", experts))
        }
        return replace(self, heads=made["heads"], experts=made["experts"], others=others)

    def weighted(self, weights: Mapping[str, float]) -> DepthProfile:
        """The same reach, with the class's thresholds times these factors, by pattern of layers."""
        return replace(self, weights=tuple(weights.items()))

    @classmethod
    def parse(cls, value: Mapping[str, Any] | str) -> DepthProfile:
        """From the form of policy.toml: a table, or the word "all"."""
        from lamina.plan.profile_form import parse

        return parse(value)

    @classmethod
    def from_text(cls, text: str) -> DepthProfile:
        """From the canonical text; anything else is refused."""
        from lamina.plan.profile_form import from_text

        return from_text(text)

    # -------------------------------------------------------------------------------------- how it is told

    @property
    def masked(self) -> bool:
        """Whether it names heads or experts."""
        return self.heads is not None or self.experts is not None

    @property
    def whole(self) -> bool:
        """Whether it reaches everything, at full weight."""
        return self.kind is Kind.ALL and not self.masked and not self.weights

    def to_dict(self) -> dict[str, Any]:
        """The form of policy.toml; `parse` reads it back."""
        from lamina.plan.profile_form import to_dict

        return to_dict(self)

    def text(self) -> str:
        """The canonical text: equal profiles, equal texts. This is what a contributor signs.

        >>> DepthProfile.top(0.25).only(heads=[1, 0]).text()
        'top=0.25;heads=0,1'
        """
        from lamina.plan.profile_form import to_text

        return to_text(self)

    def __str__(self) -> str:
        return self.words()

    def words(self, config: str | None = None) -> str:
        """For people; `config`: of the adapter, as the model has it."""
        told = [self._place(config or self.config)]
        if self.heads is not None:
            told.append(f"heads {self.heads}")
        if self.experts is not None:
            told.append(f"experts {self.experts}")
        if self.others:
            told.append("and what has none")
        if self.weights:
            told.append(
                "weights " + ", ".join(f"{factor:g} of {pattern}" for pattern, factor in self.weights)
            )
        return ", ".join(told)

    def told_by(self, words: str) -> bool:
        """Whether these are the words of this profile on some model: an adapter's identity is not in the policy."""
        found = _SHORT.search(words) if self.kind is Kind.ADAPTER and self.config is None else None
        return words == self.words(found[1] if found is not None else None)

    def _place(self, config: str | None) -> str:
        if self.kind is Kind.ALL:
            return "all layers"
        if self.kind is Kind.TOP:
            return f"top {float(100 * (1 - exact(self.bounds[0]))):g} %"
        if self.kind is Kind.LAYERS:
            return f"layers {', '.join(map(str, self.names))}"
        if self.kind is Kind.ADAPTER:
            known = [config[:12]] if config else []
            known += [f"for {self.scope}"] if self.scope else []
            return f"adapter {self.name}" + (f" ({', '.join(known)})" if known else "")
        return f"{self.kind.value} {self.bounds[0]:g} to {self.bounds[1]:g}"

    # ------------------------------------------------------------------------------------ what it comes to

    def within(self, other: DepthProfile) -> bool:
        """Whether this profile reaches nothing that `other` does not, on any model.

        Decided without a model, on the safe side: False where it depends on the model, or is too hard to tell.
        """
        from lamina.plan.within import within

        return within(self, other)

    def reach(self, stack: LayerStack, *, allow_empty: bool = False) -> Reach:
        """What it comes to on a model: layers, parts of tensors, factors."""
        from lamina.plan.reach import reach

        return reach(self, stack, allow_empty=allow_empty)

    def resolve(self, stack: LayerStack, *, allow_empty: bool = False) -> tuple[bool, ...]:
        """Which layers of `stack` are reached, wholly or in part, in order."""
        return self.reach(stack, allow_empty=allow_empty).layers


def exact(share: float) -> Fraction:
    """The fraction that was meant: 0.1 is 1/10, 0.3333333333 is 1/3."""
    return Fraction(share).limit_denominator(1_000_000)


def _weights(given: Any) -> tuple[tuple[str, float], ...]:
    example = 'write weights = { "decoder.*" = 0.5 }: factors on thresholds, 1 where nothing is said'
    made: dict[str, float] = {}
    for pattern, factor in given:
        if not _is_text(pattern):
            raise PlanError(
                "plan.profile-weights-pattern",
                f"profile weights has the pattern {pattern!r}, must be text",
                example,
            )
        if not _is_number(factor) or not 0 <= factor <= 1:
            raise PlanError(
                "plan.profile-weights",
                f"profile weights has {factor!r} for {pattern!r}, must be in [0, 1]",
                example,
            )
        if pattern in made:
            raise PlanError("plan.profile-weights-twice", f"profile weights has {pattern!r} twice", example)
        made[pattern] = float(factor) + 0.0
    return tuple(sorted(made.items()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_name(value: object) -> bool:
    return _is_index(value) or _is_text(value)
