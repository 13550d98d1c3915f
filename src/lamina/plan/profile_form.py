"""The two written forms of a depth profile: the table of policy.toml, and the canonical text that is signed.

The text has one item for each thing that is said, in a fixed order and separated by semicolons:

    all  top=0.25  band=0.25,0.75  blocks=4,7  layers=decoder.*,-1  adapter=default;config=<sha256>;scope=ward-7/ecg
    heads=0,1      heads=*.3.*:0,1|*.4.*:2        experts likewise        others        weights=decoder.*:0.5|head:0.25

A name that is not made of plain signs, or looks like a number, is a JSON string. Numbers are in Python's shortest form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lamina.errors import PlanError
from lamina.plan.mask import Mask
from lamina.plan.naming import suggestion
from lamina.plan.profile import EXAMPLES, DepthProfile, Kind, exact

_PLACES = [kind.value for kind in Kind]
_WITHIN = ["heads", "experts", "others", "weights"]
_ADAPTER = ["name", "config", "scope"]
_BARE = re.compile(r"[A-Za-z0-9_.*?\[\]!/@+()-]+")
_WHOLE = re.compile(r"[+-]?[0-9]+")


def parse(value: Mapping[str, Any] | str) -> DepthProfile:
    """From the form of policy.toml."""
    if value == "all":
        return DepthProfile.all()
    if not isinstance(value, Mapping) or not value:
        shown = dict(value) if isinstance(value, Mapping) else value
        raise PlanError(
            "plan.profile-not-known",
            f"profile is {shown!r}, which is not a known kind",
            f"write one of {EXAMPLES}",
        )
    for key in value:
        if key not in _PLACES and key not in _WITHIN:
            raise PlanError(
                "plan.profile-not-known-kind-write",
                f"profile has {key!r}, which is not a known kind{suggestion(str(key), [*_PLACES, *_WITHIN])}",
                f"write one of {EXAMPLES}; within it heads, experts, others and weights",
            )
    places = [key for key in value if key in _PLACES]
    if len(places) > 1:
        raise PlanError(
            "plan.profile-not-known-kind",
            f"profile has {' and '.join(places)}: it is not a known kind, a profile has one place",
            f"write one of {EXAMPLES}",
        )
    place = _place(places[0], value[places[0]]) if places else DepthProfile.all()
    masks = {what: Mask.parse(value[what], what).plain() for what in ("heads", "experts") if what in value}
    if masks or "others" in value:
        place = place.only(**masks, others=value.get("others", False))
    if "weights" in value:
        weights = value["weights"]
        if not isinstance(weights, Mapping) or not weights:
            raise PlanError(
                "plan.profile-weights-table",
                f"profile weights is {weights!r}, must be a table",
                'write weights = { "decoder.*" = 0.5 }',
            )
        place = place.weighted(weights)
    return place


def _place(key: str, given: Any) -> DepthProfile:
    kind = Kind(key)
    if kind is Kind.TOP:
        return DepthProfile.top(given)
    if kind is Kind.ALL:
        if given is not True:
            raise PlanError(
                "plan.profile-true",
                f"profile all is {given!r}, must be true",
                "leave the profile out, or restrict it",
            )
        return DepthProfile.all()
    if kind is Kind.ADAPTER:
        table = given if isinstance(given, Mapping) else {"name": given}
        for each in table:
            if each not in _ADAPTER:
                raise PlanError(
                    "plan.profile-adapter-not",
                    f"profile adapter has {each!r}, which is not known{suggestion(str(each), _ADAPTER)}",
                    "it takes name, config and scope",
                )
        name, config, scope = (table.get(each) for each in _ADAPTER)
        return DepthProfile(kind=kind, name=name, config=config, scope=scope)
    if not isinstance(given, list | tuple):
        raise PlanError(
            "plan.profile-list", f"profile {key} is {given!r}, must be a list", f"write one of {EXAMPLES}"
        )
    if kind is Kind.LAYERS:
        return DepthProfile.layers(given)
    return DepthProfile(kind=kind, bounds=tuple(given))


def to_dict(profile: DepthProfile) -> dict[str, Any]:
    """The form of policy.toml."""
    made: dict[str, Any] = {}
    if profile.kind is Kind.TOP:
        made["top"] = _share(profile)
    elif profile.kind is Kind.LAYERS:
        made["layers"] = list(profile.names)
    elif profile.kind is Kind.ADAPTER:
        table = {"name": profile.name, "config": profile.config, "scope": profile.scope}
        given = {key: text for key, text in table.items() if text is not None}
        made["adapter"] = profile.name if len(given) == 1 else given
    elif profile.kind is not Kind.ALL:
        made[profile.kind.value] = list(profile.bounds)
    elif profile.whole:
        made["all"] = True
    for what, mask in (("heads", profile.heads), ("experts", profile.experts)):
        if mask is not None:
            made[what] = mask.plain()
    if profile.others:
        made["others"] = True
    if profile.weights:
        made["weights"] = dict(profile.weights)
    return made


def to_text(profile: DepthProfile) -> str:
    """The canonical text."""
    if profile.kind is Kind.ALL:
        items = ["all"]
    elif profile.kind is Kind.TOP:
        items = [f"top={_share(profile)!r}"]
    elif profile.kind is Kind.LAYERS:
        items = ["layers=" + ",".join(_token(name) for name in profile.names)]
    elif profile.kind is Kind.ADAPTER:
        items = [f"adapter={_token(profile.name or '')}"]
        items += [
            f"{key}={_token(t)}" for key, t in (("config", profile.config), ("scope", profile.scope)) if t
        ]
    else:
        items = [f"{profile.kind.value}=" + ",".join(map(repr, profile.bounds))]
    for what, mask in (("heads", profile.heads), ("experts", profile.experts)):
        if mask is not None:
            items.append(f"{what}={_mask(mask)}")
    if profile.others:
        items.append("others")
    if profile.weights:
        items.append("weights=" + "|".join(f"{_token(p)}:{factor!r}" for p, factor in profile.weights))
    return ";".join(items)


def from_text(text: str) -> DepthProfile:
    """From the canonical text; another text of the same meaning is refused too."""
    remedy = "give what DepthProfile.text() wrote, for example 'top=0.25;heads=0,1'"
    if not isinstance(text, str):
        raise PlanError("plan.profile-text", f"a profile's text is a {type(text).__name__}", remedy)
    table: dict[str, Any] = {}
    try:
        for item in _split(text, ";"):
            key, equals, value = item.partition("=")
            if key in table:
                raise ValueError("said twice")
            table[key] = _read(key, value) if equals else True
        if ("config" in table or "scope" in table) and "adapter" in table:
            table["adapter"] = {
                "name": table.pop("adapter"),
                **{key: table.pop(key) for key in ("config", "scope") if key in table},
            }
        made = parse(table)
    except (ValueError, PlanError) as error:
        raise PlanError("plan.no-profile", f"{_brief(text)} is no profile: {error}", remedy) from None
    if made.text() != text:
        raise PlanError(
            "plan.not-canonical-text",
            f"{_brief(text)} is not the canonical text of a profile, {_brief(made.text())} is",
            remedy,
        )
    return made


def _read(key: str, value: str) -> Any:
    if key == "top":
        return float(value)
    if key == "band":
        return [float(part) for part in value.split(",")]
    if key == "blocks":
        return [int(part) for part in value.split(",")]
    if key == "layers":
        return [_untoken(part) for part in _split(value, ",")]
    if key in ("heads", "experts"):
        rows = [_split(row, ":") for row in _split(value, "|")]
        if rows == [[value]]:
            return [int(part) for part in value.split(",")]
        return _rows(rows, lambda numbers: [int(part) for part in numbers.split(",")])
    if key == "weights":
        return _rows([_split(row, ":") for row in _split(value, "|")], float)
    return _untoken(value)


def _rows(rows: list[list[str]], read: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for row in rows:
        if len(row) != 2 or (pattern := _untoken(row[0])) in made or not isinstance(pattern, str):
            raise ValueError("a row is not pattern:value, or there twice")
        made[pattern] = read(row[1])
    return made


def _share(profile: DepthProfile) -> float:
    return float(1 - exact(profile.bounds[0]))


def _mask(mask: Mask) -> str:
    if mask.everywhere is not None:
        return ",".join(map(str, mask.everywhere))
    return "|".join(f"{_token(pattern)}:{','.join(map(str, numbers))}" for pattern, numbers in mask.rows)


def _token(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    plain = _BARE.fullmatch(value) and not _WHOLE.fullmatch(value)
    return value if plain else json.dumps(value)


def _untoken(text: str) -> str | int:
    if text.startswith('"'):
        return str(json.loads(text))
    return int(text) if _WHOLE.fullmatch(text) else text


def _split(text: str, sign: str) -> list[str]:
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


def _brief(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")
