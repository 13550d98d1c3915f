"""One declarative codec: a record states key, type and bounds of each field once, and is checked, encoded and decoded by that.

A record is a CBOR map with small integers as keys. Every key is known, a field whose default is None is left out when
it is None, and a value has one form. A record is checked when it is made, so that none exists that could not be
written, and bytes are checked when they are read, so that none is read that could not have been made.

>>> @ledger_record()
... class Visit:
...     ward: str = stored(1, pattern_text("[a-z]{1,8}"))
...     beds: int | None = stored(2, integer(1, 99), default=None)
>>> schema_of(Visit).to_cbor(Visit(ward="icu")), schema_of(Visit).from_cbor({1: "er", 2: 7}).beds
({1: 'icu'}, 7)
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from lamina.errors import AccountingError, EncodingError, LedgerError

_MAX_FLOAT_TEXT = 32  # characters; the longest text of a double has 24


def exact_text(value: float) -> str:
    """The shortest decimal text that reads back as the very same float.

    >>> exact_text(1e-05), exact_text(0.1)
    ('1e-05', '0.1')
    """
    return repr(float(value))


def exact_float(text: object) -> float | None:
    """The float that `exact_text` wrote; None for anything else, also for another text of the same number.

    >>> exact_float("0.10"), exact_float("0.1"), exact_float("nan")
    (None, 0.1, None)
    """
    if type(text) is not str or len(text) > _MAX_FLOAT_TEXT:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and repr(value) == text else None


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, eq=False)
class FieldType:
    """The values that a field may have, and their form in CBOR; `from_cbor` raises EncodingError for another form."""

    expected: str
    fits: Callable[[Any], bool]
    to_cbor: Callable[[Any], Any] = _same
    from_cbor: Callable[[Any], Any] = _same


def integer(low: int, high: int) -> FieldType:
    return FieldType(f"an integer in [{low}, {high}]", lambda value: type(value) is int and low <= value <= high)


def one_of(*values: int) -> FieldType:
    return FieldType(f"one of {', '.join(map(str, values))}", lambda value: type(value) is int and value in values)


def fixed_bytes(size: int) -> FieldType:
    return FieldType(f"{size} bytes", lambda value: type(value) is bytes and len(value) == size)


def bytes_up_to(size: int) -> FieldType:
    return FieldType(f"1 to {size} bytes", lambda value: type(value) is bytes and 0 < len(value) <= size)


def pattern_text(pattern: str) -> FieldType:
    """ASCII text that a pattern describes."""
    match = re.compile(pattern, re.ASCII).fullmatch
    return FieldType(f"text like {pattern}", lambda value: type(value) is str and match(value) is not None)


def exact_float_in(low: float, high: float) -> FieldType:
    """A float, carried as the one decimal text that reads back exactly."""

    def read(stored: Any) -> float:
        if (found := exact_float(stored)) is None:
            raise EncodingError("ledger.float-not-exact", f"{stored!r} is not the exact text of a float", READ_REMEDY)
        return found

    def fits(value: Any) -> bool:
        return type(value) is float and low <= value <= high and repr(value) != "-0.0"

    return FieldType(f"a float in [{low:g}, {high:g}]", fits, exact_text, read)


def enum_member(kind: type[enum.Enum]) -> FieldType:
    """A member of an enumeration, carried as its number."""

    def read(stored: Any) -> enum.Enum:
        if type(stored) is int and stored in kind._value2member_map_:
            return kind(stored)
        raise EncodingError("ledger.enum-unknown", f"{stored!r} is not a {kind.__name__}", READ_REMEDY)

    return FieldType(f"a {kind.__name__}", lambda value: type(value) is kind, lambda value: value.value, read)


def tuple_of(each: FieldType, least: int, most: int) -> FieldType:
    def read(stored: Any) -> tuple[Any, ...]:
        if type(stored) is not list:
            raise EncodingError("ledger.list-expected", f"{_shorten(stored)} is not a list", READ_REMEDY)
        return tuple(map(each.from_cbor, stored))

    def fits(value: Any) -> bool:
        return type(value) is tuple and least <= len(value) <= most and all(map(each.fits, value))

    expected = f"{least} to {most} values, each {each.expected}"
    return FieldType(expected, fits, lambda value: list(map(each.to_cbor, value)), read)


def nested(kind: type[Any]) -> FieldType:
    """A part with a schema of its own, carried as a map."""
    schema = _schemas[kind]
    return FieldType(f"a {kind.__name__}", lambda value: type(value) is kind, schema.to_cbor, schema.from_cbor)


def described(kind: type[Any], **types: tuple[int, FieldType]) -> FieldType:
    """A part of another folder, carried as a map: key and type of each attribute. The record that holds it checks it."""
    schema = _schemas[kind] = RecordSchema(kind, types)

    def fits(value: Any) -> bool:
        return type(value) is kind and all(
            each.type.fits(one := getattr(value, each.name)) or (one is None and each.optional)
            for each in schema.fields
        )

    return FieldType(f"a {kind.__name__}", fits, schema.to_cbor, schema.from_cbor)


class SchemaField(NamedTuple):
    """Key of the map, name of the attribute, and what it may hold; an optional one may be None and is left out."""

    key: int
    name: str
    type: FieldType
    optional: bool


class RecordSchema:
    """The fields of one kind of record or part."""

    def __init__(self, kind: type[Any], types: Mapping[str, tuple[int, FieldType]] | None = None) -> None:
        self.kind = kind
        given = [((types or {}).get(each.name) or each.metadata["stored"], each) for each in fields(kind) if each.init]
        self.fields = tuple(SchemaField(key, each.name, type, each.default is None) for (key, type), each in given)
        assert [each.key for each in self.fields] == sorted({each.key for each in self.fields})
        self._by_key = {each.key: each for each in self.fields}
        self._required = {each.key for each in self.fields if not each.optional}

    def check(self, record: Any) -> None:
        """LedgerError if a field holds what it may not. Lists become tuples."""
        for each in self.fields:
            value = getattr(record, each.name)
            if value is None and each.optional:
                continue
            if type(value) is list:
                object.__setattr__(record, each.name, value := tuple(value))
            if not each.type.fits(value):
                problem = f"{each.name} of {self.kind.__name__} is {_shorten(value)}, must be {each.type.expected}"
                raise LedgerError("ledger.field-invalid", problem, "correct the value")

    def to_cbor(self, record: Any) -> dict[int, Any]:
        """The map that CBOR carries."""
        values = ((each, getattr(record, each.name)) for each in self.fields)
        return {each.key: each.type.to_cbor(value) for each, value in values if value is not None}

    def from_cbor(self, stored: Any) -> Any:
        """The record that such a map is; EncodingError if it is none."""
        if type(stored) is not dict:
            raise self._malformed(f"is {_shorten(stored)}, must be a map")
        if not self._required <= stored.keys() or not stored.keys() <= self._by_key.keys():
            known = ", ".join(f"{each.key}{'?' if each.optional else ''}" for each in self.fields)
            raise self._malformed(f"has keys {_shorten(sorted(map(str, stored)))}, must have {known}")
        values: dict[str, Any] = {}
        for key, one in stored.items():
            each = self._by_key[key]
            try:
                values[each.name] = each.type.from_cbor(one)
            except EncodingError as error:
                raise self._malformed(f"has {each.name}: {error.problem}") from None
        try:
            return self.kind(**values)
        except (LedgerError, AccountingError) as error:
            raise EncodingError("ledger.record-invalid", error.problem, READ_REMEDY) from None

    def _malformed(self, problem: str) -> EncodingError:
        return EncodingError("ledger.record-malformed", f"a {self.kind.__name__} {problem}", READ_REMEDY)


READ_REMEDY = "read it with the version of lamina that wrote it"
_schemas: dict[type[Any], RecordSchema] = {}
_Kind = TypeVar("_Kind")


def stored(key: int, type: FieldType, **default: Any) -> Any:
    """A field of a record under this key of the CBOR map. With `default=None` it may be left out."""
    return field(**default, metadata={"stored": (key, type)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(stored, field))
def ledger_record(*, kw_only: bool = True) -> Callable[[type[_Kind]], type[_Kind]]:
    """A frozen dataclass whose fields are `stored`. They are checked when it is made, or by its own `__post_init__`."""

    def define(kind: type[_Kind]) -> type[_Kind]:
        if "__post_init__" not in kind.__dict__:
            kind.__post_init__ = check_fields  # type: ignore[attr-defined]
        made = dataclass(frozen=True, slots=True, kw_only=kw_only)(kind)
        _schemas[made] = RecordSchema(made)
        return made

    return define


def schema_of(kind: type[Any]) -> RecordSchema:
    """The schema of a kind."""
    return _schemas[kind]


def check_fields(record: Any) -> None:
    """For `__post_init__`: every field holds what it may."""
    _schemas[type(record)].check(record)


def _shorten(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
