"""What the fields of a record may hold, and how each is written: the schema of a leaf, field by field.

A record is a CBOR map with small integers as keys. Every key is known, a field that may be absent is left out when it
is None, and a value has one form. `Schema` checks a record when it is made, so that none exists that could not be
written, and checks bytes when they are read, so that none is read that could not have been made.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from lamina.admit.times import LAST
from lamina.errors import EncodingError
from lamina.ledger.amounts import UNBOUNDED, exact_float, exact_text
from lamina.ledger.errors import LedgerError


class Shape(Protocol):
    """The values that a field may have; `plain` and `value` are inverse to each other."""

    def wrong(self, value: Any) -> str | None:
        """What the value must be, if it is not."""

    def plain(self, value: Any) -> Any:
        """As CBOR carries it."""

    def value(self, plain: Any) -> Any:
        """From what CBOR carried; EncodingError if that is nothing of this shape."""


class _Same:
    """A shape that CBOR carries as it is."""

    def plain(self, value: Any) -> Any:
        return value

    def value(self, plain: Any) -> Any:
        return plain


@dataclass(frozen=True, slots=True)
class Whole(_Same):
    """An integer in [low, high]."""

    low: int
    high: int

    def wrong(self, value: Any) -> str | None:
        fits = type(value) is int and self.low <= value <= self.high
        return None if fits else f"an integer in [{self.low}, {self.high}]"


@dataclass(frozen=True, slots=True)
class Octets(_Same):
    """Exactly so many bytes."""

    size: int

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is bytes and len(value) == self.size else f"{self.size} bytes"


@dataclass(frozen=True, slots=True)
class Text(_Same):
    """Text that a pattern describes, at most so many bytes of it. The pattern keeps lone surrogates out."""

    pattern: re.Pattern[str]
    most: int

    def wrong(self, value: Any) -> str | None:
        fits = (
            type(value) is str and self.pattern.fullmatch(value) and len(value.encode("utf-8")) <= self.most
        )
        return None if fits else f"text like {self.pattern.pattern}, at most {self.most} bytes"


@dataclass(frozen=True, slots=True)
class Printable(_Same):
    """Text without controls or line breaks, at most so many bytes of it."""

    most: int

    def wrong(self, value: Any) -> str | None:
        fits = type(value) is str and value.isprintable() and 0 < len(value.encode("utf-8")) <= self.most
        return None if fits else f"1 to {self.most} bytes of printable text"


@dataclass(frozen=True, slots=True)
class Flag(_Same):
    """True or False."""

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is bool else "True or False"


@dataclass(frozen=True, slots=True)
class Exact:
    """A float in [low, high], carried as the one decimal text that reads back exactly."""

    low: float
    high: float

    def wrong(self, value: Any) -> str | None:
        fits = type(value) is float and self.low <= value <= self.high and repr(value) != "-0.0"
        return None if fits else f"a float in [{self.low:g}, {self.high:g}]"

    def plain(self, value: Any) -> Any:
        return exact_text(value)

    def value(self, plain: Any) -> Any:
        found = exact_float(plain)
        if found is None:
            raise EncodingError(
                "ledger.not-exact-text",
                f"{plain!r} is not the exact text of a float",
                "write it with exact_text",
            )
        return found


@dataclass(frozen=True, slots=True)
class OneOf:
    """A member of an enumeration, carried as its number."""

    kind: type[enum.Enum]

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is self.kind else f"a {self.kind.__name__}"

    def plain(self, value: Any) -> Any:
        return value.value

    def value(self, plain: Any) -> Any:
        if type(plain) is int and plain in self.kind._value2member_map_:
            return self.kind(plain)
        raise EncodingError(
            "ledger.no", f"{plain!r} is no {self.kind.__name__}", "read it with a version that knows it"
        )


@dataclass(frozen=True, slots=True)
class Many:
    """A tuple of so many values of one shape."""

    each: Shape
    least: int
    most: int

    def wrong(self, value: Any) -> str | None:
        if type(value) is not tuple or not self.least <= len(value) <= self.most:
            return f"{self.least} to {self.most} values"
        return next((f"a tuple of: {told}" for told in map(self.each.wrong, value) if told), None)

    def plain(self, value: Any) -> Any:
        return [self.each.plain(one) for one in value]

    def value(self, plain: Any) -> Any:
        if type(plain) is not list:
            raise EncodingError(
                "ledger.no-list", f"{_brief(plain)} is no list", "read it with a version that knows it"
            )
        return tuple(self.each.value(one) for one in plain)


@dataclass(frozen=True, slots=True)
class Part:
    """A part with a schema of its own, carried as a map."""

    kind: type[Any]

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is self.kind else f"a {self.kind.__name__}"

    def plain(self, value: Any) -> Any:
        return schema(self.kind).plain(value)

    def value(self, plain: Any) -> Any:
        return schema(self.kind).value(plain)


@dataclass(frozen=True, slots=True)
class Field:
    """Key of the map, name of the attribute, and what it may hold; an optional one may be None and is left out."""

    key: int
    name: str
    shape: Shape
    optional: bool = False


class Schema:
    """The fields of one kind of record or part."""

    def __init__(self, kind: type[Any], given: Iterable[Field]) -> None:
        self.kind = kind
        self.fields = tuple(sorted(given, key=lambda each: each.key))
        self._by_key = {each.key: each for each in self.fields}
        self._required = {each.key for each in self.fields if not each.optional}
        assert len(self._by_key) == len(self.fields)
        assert [each.name for each in self.fields] == [each.name for each in fields(kind) if each.init]

    def check(self, record: Any) -> None:
        """LedgerError if a field holds what it may not. Lists become tuples."""
        for each in self.fields:
            value = getattr(record, each.name)
            if value is None and each.optional:
                continue
            if type(value) is list and isinstance(each.shape, Many):
                object.__setattr__(record, each.name, value := tuple(value))
            if (must := each.shape.wrong(value)) is not None:
                raise LedgerError(
                    "ledger.correct",
                    f"{each.name} of {self.kind.__name__} is {_brief(value)}, must be {must}",
                    "correct it",
                )

    def plain(self, record: Any) -> dict[int, Any]:
        """The map that CBOR carries."""
        values = ((each, getattr(record, each.name)) for each in self.fields)
        return {each.key: each.shape.plain(value) for each, value in values if value is not None}

    def value(self, plain: Any) -> Any:
        """The record that such a map is; EncodingError if it is none."""
        if type(plain) is not dict:
            raise self._refused(f"is {_brief(plain)}, must be a map")
        if not self._required <= plain.keys() or not plain.keys() <= self._by_key.keys():
            raise self._refused(f"has keys {_brief(sorted(map(str, plain)))}, must have {self._told()}")
        values: dict[str, Any] = {}
        for key, one in plain.items():
            each = self._by_key[key]
            try:
                values[each.name] = each.shape.value(one)
            except EncodingError as error:
                raise self._refused(f"has {each.name}: {error.problem}") from None
        try:
            return self.kind(**values)
        except LedgerError as error:
            raise EncodingError(
                "ledger.read-version-wrote-read", error.problem, "read it with the version that wrote it"
            ) from None

    def _told(self) -> str:
        return ", ".join(f"{each.key}{'?' if each.optional else ''}" for each in self.fields)

    def _refused(self, problem: str) -> EncodingError:
        return EncodingError(
            "ledger.read-version-wrote",
            f"a {self.kind.__name__} {problem}",
            "read it with the version that wrote it",
        )


_schemas: dict[type[Any], Schema] = {}


def define(kind: type[Any], given: Mapping[int, tuple[str, Shape]], optional: Iterable[int] = ()) -> None:
    """Give a kind its schema: key → (attribute, shape), in the order of the attributes."""
    may_lack = set(optional)
    made = (Field(key, name, shape, key in may_lack) for key, (name, shape) in given.items())
    _schemas[kind] = Schema(kind, made)


def schema(kind: type[Any]) -> Schema:
    """The schema of a kind."""
    return _schemas[kind]


def check(record: Any) -> None:
    """For `__post_init__`: every field holds what it may."""
    _schemas[type(record)].check(record)


DIGEST = Octets(32)
KEY_ID = Octets(32)
RUN = Octets(16)
NONCE = Octets(16)
SIGNATURE = Octets(64)
SEQ = Whole(0, 2**63 - 1)
COUNT = Whole(0, 2**53)
TIME = Whole(0, LAST)
MICRO = Whole(0, 10**15)
SPEND = Whole(0, UNBOUNDED)
CLASS = Text(re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"), 64)
DATA_CLASS = Text(re.compile(r"[a-z0-9-]{1,64}"), 64)
ORIGIN = Text(re.compile(r"[!-*,-~]+"), 255)  # names a signed note: no space, no plus
ACCOUNTANT = Text(re.compile(r"[a-z0-9@.+-]{1,64}"), 64)
VERSION = Text(re.compile(r"[A-Za-z0-9 .,;:+_/@-]{1,128}"), 128)
PROFILE = Printable(1024)


def _brief(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
