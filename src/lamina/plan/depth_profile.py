"""Depth profiles: which part of a model a class may reach, and the two forms in which that is written."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from lamina.errors import PlanError
from lamina.plan.selection import PartMask, did_you_mean
from lamina.validate import short_repr

if TYPE_CHECKING:
    from lamina.plan.layer_stack import LayerStack
    from lamina.plan.profile_reach import Reach


PROFILE_SCHEMA = 1
"""The version of what a profile may say and of what it means; ledgers record it."""


class ProfileKind(enum.Enum):
    """What a profile counts in: its place."""

    ALL = "all"
    TOP = "top"
    BAND = "band"
    BLOCKS = "blocks"
    LAYERS = "layers"
    ADAPTER = "adapter"


PROFILE_EXAMPLES = (
    "{all = true}, {top = 0.25}, {band = [0.5, 1.0]}, {blocks = [4, 7]}, {layers = ['decoder.*', -1]} or "
    "{adapter = 'default'}"
)
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_SHORT_DIGEST = re.compile(r" \(([0-9a-f]{12})[,)]")


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

    kind: ProfileKind = ProfileKind.ALL
    bounds: tuple[float, ...] = ()
    names: tuple[str | int, ...] = ()
    name: str | None = None
    config: str | None = None
    scope: str | None = None
    heads: PartMask | None = None
    experts: PartMask | None = None
    others: bool = False
    weights: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind is ProfileKind.LAYERS:
            self._check_names()
        elif self.kind is ProfileKind.BLOCKS:
            if len(self.bounds) != 2 or not all(_is_index(bound) for bound in self.bounds):
                remedy = "give first and last block: {blocks = [4, 7]}; -1 is the last"
                raise PlanError("plan.profile-blocks", f"profile blocks is {list(self.bounds)!r}", remedy)
        elif self.kind is ProfileKind.ADAPTER:
            self._check_adapter()
        elif self.kind is not ProfileKind.ALL:
            self._check_fractions()
        if self.kind is not ProfileKind.ADAPTER and (self.name, self.config, self.scope) != (None, None, None):
            problem = "profile has the name, config or scope of an adapter, but no adapter"
            raise PlanError("plan.profile-not-adapter", problem, "write {adapter = …}")
        if self.others not in (True, False) or (self.others and not self.masked):
            problem = f"profile others is {self.others!r}"
            raise PlanError("plan.profile-others", problem, "others = true is only for profiles with heads or experts")
        object.__setattr__(self, "weights", _check_weights(self.weights))

    def _check_names(self) -> None:
        if not self.names or not all(_is_name(name) for name in self.names):
            remedy = "give names, patterns or indices: {layers = ['decoder.*', -1]}"
            raise PlanError("plan.profile-layers", f"profile layers is {list(self.names)!r}", remedy)
        ordered = sorted(set(self.names), key=lambda name: (isinstance(name, int), name))
        object.__setattr__(self, "names", tuple(ordered))

    def _check_adapter(self) -> None:
        for what, text in (("name", self.name), ("scope", self.scope)):
            if (text is None and what == "name") or (text is not None and not _is_text(text)):
                problem = f"profile adapter has the {what} {text!r}, must be text"
                remedy = 'write {adapter = "default"} or {adapter = {name = "default", scope = "ward-7/ecg"}}'
                raise PlanError("plan.profile-adapter-name", problem, remedy)
        if self.config is not None and not (isinstance(self.config, str) and _SHA256_HEX.fullmatch(self.config)):
            problem = f"profile adapter config is {self.config!r}, must be a SHA-256 in hex"
            raise PlanError("plan.profile-adapter-config", problem, "LayerStack.from_model(model).adapters shows it")

    def _check_fractions(self) -> None:
        if len(self.bounds) != 2 or not all(_is_number(bound) for bound in self.bounds):
            problem = f"profile {self.kind.value} is {list(self.bounds)!r}, must be fractions of the depth"
            raise PlanError("plan.profile-fractions", problem, f"write one of {PROFILE_EXAMPLES}")
        low, high = self.bounds
        if not 0 <= low < high <= 1:
            shown = f"top is {1 - low:g}" if self.kind is ProfileKind.TOP else f"band is [{low:g}, {high:g}]"
            bound = "in (0, 1]" if self.kind is ProfileKind.TOP else "0 <= a < b <= 1"
            remedy = "give fractions of the depth (0.25: a quarter), or {blocks = [first, last]}"
            raise PlanError("plan.profile-fractions", f"profile {shown}, must be {bound}", remedy)
        object.__setattr__(self, "bounds", (float(low), float(high)))

    @classmethod
    def all(cls) -> DepthProfile:
        """Every layer."""
        return cls()

    @classmethod
    def top(cls, share: float) -> DepthProfile:
        """The last `share` of the depth, in (0, 1]."""
        if not _is_number(share):
            problem = f"profile top is {share!r}, must be a number in (0, 1]"
            raise PlanError("plan.profile-fractions", problem, "write {top = 0.25}")
        return cls(kind=ProfileKind.TOP, bounds=(float(1 - exact_fraction(share)), 1.0))

    @classmethod
    def band(cls, low: float, high: float) -> DepthProfile:
        """The depth between two fractions."""
        return cls(kind=ProfileKind.BAND, bounds=(low, high))

    @classmethod
    def blocks(cls, first: int, last: int) -> DepthProfile:
        """Blocks `first` to `last`, both included."""
        return cls(kind=ProfileKind.BLOCKS, bounds=(first, last))

    @classmethod
    def layers(cls, names: Sequence[str | int]) -> DepthProfile:
        """Layers by name, `fnmatch` pattern, name of a module above them, or index."""
        return cls(kind=ProfileKind.LAYERS, names=(names,) if isinstance(names, str) else tuple(names))

    @classmethod
    def adapter(cls, name: str, *, config: str | None = None, scope: str | None = None) -> DepthProfile:
        """The tensors of an adapter; refused on a model whose adapter has another configuration than `config`."""
        return cls(kind=ProfileKind.ADAPTER, name=name, config=config, scope=scope)

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
        masks = {"heads": heads, "experts": experts}
        made = {what: None if given is None else PartMask.parse(given, what) for what, given in masks.items()}
        return replace(self, **made, others=others)  # type: ignore[arg-type]

    def weighted(self, weights: Mapping[str, float]) -> DepthProfile:
        """The same reach, with the class's thresholds times these factors, by pattern of layers."""
        return replace(self, weights=tuple(weights.items()))

    @classmethod
    def parse(cls, value: Mapping[str, Any] | str) -> DepthProfile:
        """From the form of policy.toml: a table, or the word "all"."""
        if value == "all":
            return cls.all()
        if not isinstance(value, Mapping) or not value:
            shown = dict(value) if isinstance(value, Mapping) else value
            problem = f"profile {shown!r} is not known"
            raise PlanError("plan.profile-unknown", problem, f"write one of {PROFILE_EXAMPLES}")
        for key in value:
            if key not in _PROFILE_KEYS:
                problem = f"profile has the unknown key {key!r}{did_you_mean(str(key), _PROFILE_KEYS)}"
                remedy = f"write one of {PROFILE_EXAMPLES}; with it heads, experts, others and weights"
                raise PlanError("plan.profile-unknown", problem, remedy)
        places = [key for key in value if key in _PLACE_KEYS]
        if len(places) > 1:
            problem = f"profile has {' and '.join(places)}, must have one of them"
            raise PlanError("plan.profile-two-places", problem, f"write one of {PROFILE_EXAMPLES}")
        place = _parse_place(places[0], value[places[0]]) if places else cls.all()
        masks = {what: PartMask.parse(value[what], what).plain() for what in ("heads", "experts") if what in value}
        if masks or "others" in value:
            place = place.only(**masks, others=value.get("others", False))
        if "weights" in value:
            weights = value["weights"]
            if not isinstance(weights, Mapping) or not weights:
                problem = f"profile weights is {weights!r}, must be a table"
                raise PlanError("plan.profile-weights", problem, 'write weights = { "decoder.*" = 0.5 }')
            place = place.weighted(weights)
        return place

    @classmethod
    def from_text(cls, text: str) -> DepthProfile:
        """From the canonical text; another text of the same meaning is refused too."""
        remedy = "give what DepthProfile.text() wrote, for example 'top=0.25;heads=0,1'"
        if not isinstance(text, str):
            raise PlanError("plan.profile-text", f"the text of a profile is a {type(text).__name__}", remedy)
        table: dict[str, Any] = {}
        try:
            for item in _split_outside_quotes(text, ";"):
                key, equals, value = item.partition("=")
                if key in table:
                    raise ValueError("said twice")
                table[key] = _parse_item(key, value) if equals else True
            if "adapter" in table:
                table["adapter"] = {key: table.pop(key) for key in ("config", "scope") if key in table} | {
                    "name": table["adapter"]
                }
            made = cls.parse(table)
        except (ValueError, PlanError) as error:
            raise PlanError("plan.profile-text", f"{short_repr(text)} is not a profile: {error}", remedy) from None
        if made.text() != text:
            problem = f"{short_repr(text)} is not canonical, {short_repr(made.text())} is"
            raise PlanError("plan.profile-text-not-canonical", problem, remedy)
        return made

    @property
    def masked(self) -> bool:
        """Whether it names heads or experts."""
        return self.heads is not None or self.experts is not None

    @property
    def whole(self) -> bool:
        """Whether it reaches everything, at full weight."""
        return self.kind is ProfileKind.ALL and not self.masked and not self.weights

    def to_dict(self) -> dict[str, Any]:
        """The form of policy.toml; `parse` reads it back."""
        made: dict[str, Any] = {}
        if self.kind is ProfileKind.TOP:
            made["top"] = _top_share(self)
        elif self.kind is ProfileKind.LAYERS:
            made["layers"] = list(self.names)
        elif self.kind is ProfileKind.ADAPTER:
            given = {key: getattr(self, key) for key in _ADAPTER_KEYS if getattr(self, key) is not None}
            made["adapter"] = self.name if len(given) == 1 else given
        elif self.kind is not ProfileKind.ALL:
            made[self.kind.value] = list(self.bounds)
        elif self.whole:
            made["all"] = True
        for what, mask in (("heads", self.heads), ("experts", self.experts)):
            if mask is not None:
                made[what] = mask.plain()
        if self.others:
            made["others"] = True
        if self.weights:
            made["weights"] = dict(self.weights)
        return made

    def text(self) -> str:
        """The canonical text: equal profiles, equal texts. This is what a contributor signs.

        >>> DepthProfile.top(0.25).only(heads=[1, 0]).text()
        'top=0.25;heads=0,1'
        """
        if self.kind is ProfileKind.ALL:
            items = ["all"]
        elif self.kind is ProfileKind.TOP:
            items = [f"top={_top_share(self)!r}"]
        elif self.kind is ProfileKind.LAYERS:
            items = ["layers=" + ",".join(_name_to_text(name) for name in self.names)]
        elif self.kind is ProfileKind.ADAPTER:
            items = [f"adapter={_name_to_text(self.name or '')}"]
            items += [f"{key}={_name_to_text(t)}" for key, t in (("config", self.config), ("scope", self.scope)) if t]
        else:
            items = [f"{self.kind.value}=" + ",".join(map(repr, self.bounds))]
        for what, mask in (("heads", self.heads), ("experts", self.experts)):
            if mask is not None:
                items.append(f"{what}={_mask_text(mask)}")
        if self.others:
            items.append("others")
        if self.weights:
            items.append("weights=" + "|".join(f"{_name_to_text(p)}:{factor!r}" for p, factor in self.weights))
        return ";".join(items)

    def __str__(self) -> str:
        return self.words()

    def words(self, config: str | None = None) -> str:
        """For people; `config`: of the adapter, as the model has it."""
        text = [self._place_words(config or self.config)]
        text += [f"heads {self.heads}"] if self.heads is not None else []
        text += [f"experts {self.experts}"] if self.experts is not None else []
        text += ["and what has none"] if self.others else []
        if self.weights:
            text.append("weights " + ", ".join(f"{factor:g} of {pattern}" for pattern, factor in self.weights))
        return ", ".join(text)

    def described_by(self, words: str) -> bool:
        """Whether these are the words of this profile on some model: an adapter's identity is not in the policy."""
        found = _SHORT_DIGEST.search(words) if self.kind is ProfileKind.ADAPTER and self.config is None else None
        return words == self.words(found[1] if found is not None else None)

    def _place_words(self, config: str | None) -> str:
        if self.kind is ProfileKind.ALL:
            return "all layers"
        if self.kind is ProfileKind.TOP:
            return f"top {float(100 * (1 - exact_fraction(self.bounds[0]))):g} %"
        if self.kind is ProfileKind.LAYERS:
            return f"layers {', '.join(map(str, self.names))}"
        if self.kind is ProfileKind.ADAPTER:
            known = [config[:12]] if config else []
            known += [f"for {self.scope}"] if self.scope else []
            return f"adapter {self.name}" + (f" ({', '.join(known)})" if known else "")
        return f"{self.kind.value} {self.bounds[0]:g} to {self.bounds[1]:g}"

    def within(self, other: DepthProfile) -> bool:
        """Whether this profile reaches nothing that `other` does not, on any model.

        Decided without a model, on the safe side: False where it depends on the model, or is too hard to tell.
        """
        from lamina.plan.profile_reach import profile_within

        return profile_within(self, other)

    def reach(self, stack: LayerStack, *, allow_empty: bool = False) -> Reach:
        """What it comes to on a model: layers, parts of tensors, factors."""
        from lamina.plan.profile_reach import resolve_reach

        return resolve_reach(self, stack, allow_empty=allow_empty)

    def resolve(self, stack: LayerStack, *, allow_empty: bool = False) -> tuple[bool, ...]:
        """Which layers of `stack` are reached, wholly or in part, in order."""
        return self.reach(stack, allow_empty=allow_empty).layers


def exact_fraction(share: float) -> Fraction:
    """The fraction that was meant: 0.1 is 1/10, 0.3333333333 is 1/3."""
    return Fraction(share).limit_denominator(1_000_000)


def _check_weights(given: Any) -> tuple[tuple[str, float], ...]:
    example = 'write weights = { "decoder.*" = 0.5 }: factors on thresholds, 1 where nothing is said'
    made: dict[str, float] = {}
    for pattern, factor in given:
        if not _is_text(pattern):
            problem = f"profile weights has the pattern {pattern!r}, must be text"
            raise PlanError("plan.profile-weights", problem, example)
        if not _is_number(factor) or not 0 <= factor <= 1:
            problem = f"profile weights has {factor!r} for {pattern!r}, must be in [0, 1]"
            raise PlanError("plan.profile-weights", problem, example)
        if pattern in made:
            raise PlanError("plan.profile-weights", f"profile weights has {pattern!r} twice", example)
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


# The two written forms of a depth profile: the table of policy.toml, and the canonical text that is signed.
#
# The text has one item for each thing that is said, in a fixed order and separated by semicolons:
#
#     all  top=0.25  band=0.25,0.75  blocks=4,7  layers=decoder.*,-1  adapter=default;config=<sha256>;scope=ward-7/ecg
#     heads=0,1      heads=*.3.*:0,1|*.4.*:2        experts likewise        others        weights=decoder.*:0.5|head:0.25
#
# A name that is not made of plain signs, or looks like a number, is a JSON string. Numbers are in Python's shortest
# form.

_PLACE_KEYS = [kind.value for kind in ProfileKind]
_RESTRICTION_KEYS = ["heads", "experts", "others", "weights"]
_PROFILE_KEYS = [*_PLACE_KEYS, *_RESTRICTION_KEYS]
_ADAPTER_KEYS = ["name", "config", "scope"]
_UNQUOTED_NAME = re.compile(r"[A-Za-z0-9_.*?\[\]!/@+()-]+")
_INTEGER = re.compile(r"[+-]?[0-9]+")


def _parse_place(key: str, given: Any) -> DepthProfile:
    kind = ProfileKind(key)
    if kind is ProfileKind.TOP:
        return DepthProfile.top(given)
    if kind is ProfileKind.ALL:
        if given is not True:
            problem = f"profile all is {given!r}, must be true"
            raise PlanError("plan.profile-all", problem, "leave the profile out, or restrict it")
        return DepthProfile.all()
    if kind is ProfileKind.ADAPTER:
        table = given if isinstance(given, Mapping) else {"name": given}
        for each in table:
            if each not in _ADAPTER_KEYS:
                problem = f"profile adapter has the unknown key {each!r}{did_you_mean(str(each), _ADAPTER_KEYS)}"
                raise PlanError("plan.profile-adapter-key", problem, "it takes name, config and scope")
        name, config, scope = (table.get(each) for each in _ADAPTER_KEYS)
        return DepthProfile(kind=kind, name=name, config=config, scope=scope)
    if not isinstance(given, list | tuple):
        problem = f"profile {key} is {given!r}, must be a list"
        raise PlanError("plan.profile-not-list", problem, f"write one of {PROFILE_EXAMPLES}")
    if kind is ProfileKind.LAYERS:
        return DepthProfile.layers(given)
    return DepthProfile(kind=kind, bounds=tuple(given))


def _parse_item(key: str, value: str) -> Any:
    if key == "top":
        return float(value)
    if key == "band":
        return [float(part) for part in value.split(",")]
    if key == "blocks":
        return [int(part) for part in value.split(",")]
    if key == "layers":
        return [_name_from_text(part) for part in _split_outside_quotes(value, ",")]
    if key in ("heads", "experts"):
        rows = [_split_outside_quotes(row, ":") for row in _split_outside_quotes(value, "|")]
        if rows == [[value]]:
            return [int(part) for part in value.split(",")]
        return _parse_rows(rows, lambda numbers: [int(part) for part in numbers.split(",")])
    if key == "weights":
        return _parse_rows([_split_outside_quotes(row, ":") for row in _split_outside_quotes(value, "|")], float)
    return _name_from_text(value)


def _parse_rows(rows: list[list[str]], read: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for row in rows:
        if len(row) != 2 or (pattern := _name_from_text(row[0])) in made or not isinstance(pattern, str):
            raise ValueError("a row is not pattern:value, or there twice")
        made[pattern] = read(row[1])
    return made


def _top_share(profile: DepthProfile) -> float:
    return float(1 - exact_fraction(profile.bounds[0]))


def _mask_text(mask: PartMask) -> str:
    if mask.everywhere is not None:
        return ",".join(map(str, mask.everywhere))
    return "|".join(f"{_name_to_text(pattern)}:{','.join(map(str, numbers))}" for pattern, numbers in mask.rows)


def _name_to_text(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    bare = _UNQUOTED_NAME.fullmatch(value) and not _INTEGER.fullmatch(value)
    return value if bare else json.dumps(value)


def _name_from_text(text: str) -> str | int:
    if text.startswith('"'):
        return str(json.loads(text))
    return int(text) if _INTEGER.fullmatch(text) else text


def _split_outside_quotes(text: str, sign: str) -> list[str]:
    """At signs that are in no JSON string."""
    parts, quoted, escaped = [""], False, False
    for each in text:
        if each == sign and not quoted:
            parts.append("")
            continue
        parts[-1] += each
        if quoted:
            quoted, escaped = each != '"' or escaped, each == "\\" and not escaped
        elif each == '"':
            quoted = True
    return parts
