"""Allocations as people write them: `ladp`, `ladp:mode=budget,least=0.2`, or a table of a RUN.toml."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from lamina.allocate import ALLOCATIONS, allocation
from lamina.allocate.problem import Policy
from lamina.errors import PlanError
from lamina.plan import DepthProfile
from lamina.plan.naming import suggestion

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def allocation_of(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """The allocation of that name with these options: fields of its dataclass, anything else is refused.

    >>> allocation_of("ladp", {"mode": "budget"}).name
    'ladp-budget'
    """
    allocation(name)
    policy: Any = ALLOCATIONS[name]
    if not options:
        return ALLOCATIONS[name]
    takes = options_of(name)
    for key in options:
        if key not in takes:
            listed = ", ".join(f"{k} = {v}" for k, v in takes.items())
            raise PlanError(
                "cli.allocation-no-option",
                f"allocation '{name}' has no option '{key}'{suggestion(key, list(takes))}",
                f"it takes {listed}" if listed else f"it takes none: write '{name}' alone",
            )
    kinds = typing.get_type_hints(type(policy))
    made = {key: _fitting(name, key, kinds[key], value) for key, value in options.items()}
    changed: Policy = dataclasses.replace(policy, **made)
    return changed


def options_of(name: str) -> dict[str, str]:
    """The options of an allocation, each with its default in words."""
    policy: Any = ALLOCATIONS[name]
    return {field.name: _shown(getattr(policy, field.name)) for field in dataclasses.fields(policy)}


def parse(text: str) -> Policy:
    """`NAME`, or `NAME:key=value,key=value`. Values are read as TOML; a word needs no quotes, a list may hold words.

    >>> parse("ladp:sensitive=[head,encoder.*],thresholds=[1,4]").thresholds
    (1.0, 4.0)
    """
    name, colon, rest = text.strip().partition(":")
    if not colon:
        return allocation_of(name)
    allocation(name)
    options: dict[str, Any] = {}
    for part in _split(rest):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            takes = ", ".join(options_of(name)) or "none"
            raise PlanError(
                "cli.not-option",
                f"'{part}' in '{text}' is not an option",
                f"write {name}:key=value,key=value; it takes {takes}",
            )
        if key in options:
            raise PlanError("cli.option-twice", f"option '{key}' is in '{text}' twice", "give it once")
        options[key] = _value(value)
    return allocation_of(name, options)


def parse_several(text: str) -> tuple[str, ...]:
    """Allocations separated by commas, each with its options; none of them is checked here.

    >>> parse_several("flat,ladp:mode=budget,least=0.2,uniform")
    ('flat', 'ladp:mode=budget,least=0.2', 'uniform')
    """
    found: list[str] = []
    for part in _split(text):
        head, equals, _ = part.partition("=")
        if equals and ":" not in head and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(found)


def _fitting(name: str, key: str, kind: Any, value: Any) -> Any:
    """The value as the policy takes it; what a policy itself checks (bounds, words) is left to it."""
    plain = {inner for inner in (kind, *typing.get_args(kind)) if inner in _WORDS}
    if key == "sensitive":
        return _layers(value)
    if key == "candidates" and isinstance(value, Mapping):
        return tuple((each, tuple(row) if isinstance(row, Sequence) else row) for each, row in value.items())
    if isinstance(value, list):
        return tuple(value)
    if plain and not any(_is(value, each) for each in plain):
        word = " or ".join(_WORDS[each] for each in plain)
        raise PlanError(
            "cli.write", f"{key} of '{name}' is {value!r}, must be {word}", f"write {key}={_EXAMPLE[word]}"
        )
    return value


_EXAMPLE = {"true or false": "true", "a whole number": "10", "a number": "0.5", "a word": "word"}


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _layers(value: Any) -> Any:
    """Which layers: names, patterns or indices, or a depth profile as in a policy.toml."""
    if isinstance(value, Mapping):
        return DepthProfile.parse(value)
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    word = getattr(value, "value", value)
    return (
        str(list(word)) if isinstance(word, tuple) else f"{word:g}" if isinstance(word, float) else str(word)
    )


def _value(text: str) -> Any:
    """A value as TOML has it; a list of words without quotes; or else the text itself."""
    if "\n" not in text:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            pass
    if text.startswith("[") and text.endswith("]"):
        return [_value(part) for part in _split(text[1:-1])]
    return text


def _split(text: str) -> list[str]:
    """At commas that are in no bracket and in no quotes."""
    parts, closing, quote = [""], [], ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _PAIRS:
            closing.append(_PAIRS[sign])
        elif closing and sign == closing[-1]:
            closing.pop()
        elif sign == "," and not closing:
            parts.append("")
            continue
        parts[-1] += sign
    return [part.strip() for part in parts]
