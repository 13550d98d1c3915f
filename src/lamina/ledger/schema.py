"""What the fields of a record may hold and how each is encoded.

Amounts without floats, and the time of a ledger.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Protocol

from lamina.admit.keys import LAST_SECOND, format_utc
from lamina.errors import EncodingError, LedgerError

NANO = 1_000_000_000
UNBOUNDED = 2**64 - 1  # a spend for which no finite figure is known
_MAX_FLOAT_TEXT = 32  # characters; the longest text of a double has 24


def nano_epsilon(epsilon: float) -> int:
    """ε in billionths, rounded up: what a ledger says is never less than what was spent.

    >>> nano_epsilon(0.5), nano_epsilon(0.1), nano_epsilon(float("inf")) == UNBOUNDED
    (500000000, 100000001, True)
    """
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not epsilon >= 0:
        raise LedgerError("ledger.spend-makes-no", f"a spend of {epsilon!r} makes no sense", "give an ε >= 0")
    if math.isinf(epsilon):
        return UNBOUNDED
    return min(math.ceil(Fraction(epsilon) * NANO), UNBOUNDED)


def epsilon_of_nano(spend: int) -> float:
    """ε of a spend in billionths, never below it."""
    if spend == UNBOUNDED:
        return math.inf
    nearest = spend / NANO
    return nearest if Fraction(nearest) * NANO >= spend else math.nextafter(nearest, math.inf)


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


CLOCK_SKEW = 120  # seconds by which clocks of several machines may differ


def next_leaf_time(last: int, now: float) -> int:
    """The time of the next leaf: that of the clock, or of the last leaf where the clock is a little behind.

    A clock that is further behind is refused: one of two machines is wrong, and what it would write could never be
    told from something back-dated.
    """
    if not 0 <= now <= LAST_SECOND:
        raise LedgerError("ledger.clock-says", f"the clock says {now!r}", "set the clock of this machine")
    if now < last - CLOCK_SKEW:
        raise LedgerError(
            "ledger.clock-says-last",
            f"the clock says {format_utc(int(now))}, the last leaf is of {format_utc(last)}: more than {CLOCK_SKEW} s later",
            "set the clock of this machine; if the ledger is what is wrong, whoever answers for it must say so",
        )
    return max(last, int(now))


def rounded_epoch_time(last: int, now: int, step: int) -> int:
    """The time of an epoch: rounded down to the header's `epoch_clock`, but never before the last leaf.

    >>> rounded_epoch_time(7000, 10_000, 3600), rounded_epoch_time(9000, 10_000, 3600)
    (7200, 9000)
    """
    return max(last, now - now % step)


# What the fields of a record may hold, and how each is written: the schema of a leaf, field by field.
#
# A record is a CBOR map with small integers as keys. Every key is known, a field that may be absent is left out when
# it is None, and a value has one form. `RecordSchema` checks a record when it is made, so that none exists that could
# not be written, and checks bytes when they are read, so that none is read that could not have been made.


class FieldType(Protocol):
    """The values that a field may have; `plain` and `value` are inverse to each other."""

    def wrong(self, value: Any) -> str | None:
        """What the value must be, if it is not."""

    def plain(self, value: Any) -> Any:
        """As CBOR carries it."""

    def value(self, plain: Any) -> Any:
        """From what CBOR carried; EncodingError if that is nothing of this shape."""


class _StoredAsIs:
    """A shape that CBOR carries as it is."""

    def plain(self, value: Any) -> Any:
        return value

    def value(self, plain: Any) -> Any:
        return plain


@dataclass(frozen=True, slots=True)
class Integer(_StoredAsIs):
    """An integer in [low, high]."""

    low: int
    high: int

    def wrong(self, value: Any) -> str | None:
        fits = type(value) is int and self.low <= value <= self.high
        return None if fits else f"an integer in [{self.low}, {self.high}]"


@dataclass(frozen=True, slots=True)
class FixedBytes(_StoredAsIs):
    """Exactly so many bytes."""

    size: int

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is bytes and len(value) == self.size else f"{self.size} bytes"


@dataclass(frozen=True, slots=True)
class PatternText(_StoredAsIs):
    """Text that a pattern describes, at most so many bytes of it. The pattern keeps lone surrogates out."""

    pattern: re.Pattern[str]
    most: int

    def wrong(self, value: Any) -> str | None:
        fits = type(value) is str and self.pattern.fullmatch(value) and len(value.encode("utf-8")) <= self.most
        return None if fits else f"text like {self.pattern.pattern}, at most {self.most} bytes"


@dataclass(frozen=True, slots=True)
class PrintableText(_StoredAsIs):
    """Text without controls or line breaks, at most so many bytes of it."""

    most: int

    def wrong(self, value: Any) -> str | None:
        fits = type(value) is str and value.isprintable() and 0 < len(value.encode("utf-8")) <= self.most
        return None if fits else f"1 to {self.most} bytes of printable text"


@dataclass(frozen=True, slots=True)
class Boolean(_StoredAsIs):
    """True or False."""

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is bool else "True or False"


@dataclass(frozen=True, slots=True)
class ExactFloat:
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
                "ledger.not-exact-text", f"{plain!r} is not the exact text of a float", "write it with exact_text"
            )
        return found


@dataclass(frozen=True, slots=True)
class EnumMember:
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
class TupleOf:
    """A tuple of so many values of one shape."""

    each: FieldType
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
                "ledger.no-list", f"{_shorten(plain)} is no list", "read it with a version that knows it"
            )
        return tuple(self.each.value(one) for one in plain)


@dataclass(frozen=True, slots=True)
class Nested:
    """A part with a schema of its own, carried as a map."""

    kind: type[Any]

    def wrong(self, value: Any) -> str | None:
        return None if type(value) is self.kind else f"a {self.kind.__name__}"

    def plain(self, value: Any) -> Any:
        return schema_of(self.kind).plain(value)

    def value(self, plain: Any) -> Any:
        return schema_of(self.kind).value(plain)


@dataclass(frozen=True, slots=True)
class SchemaField:
    """Key of the map, name of the attribute, and what it may hold; an optional one may be None and is left out."""

    key: int
    name: str
    shape: FieldType
    optional: bool = False


class RecordSchema:
    """The fields of one kind of record or part."""

    def __init__(self, kind: type[Any], given: Iterable[SchemaField]) -> None:
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
            if type(value) is list and isinstance(each.shape, TupleOf):
                object.__setattr__(record, each.name, value := tuple(value))
            if (must := each.shape.wrong(value)) is not None:
                raise LedgerError(
                    "ledger.correct",
                    f"{each.name} of {self.kind.__name__} is {_shorten(value)}, must be {must}",
                    "correct it",
                )

    def plain(self, record: Any) -> dict[int, Any]:
        """The map that CBOR carries."""
        values = ((each, getattr(record, each.name)) for each in self.fields)
        return {each.key: each.shape.plain(value) for each, value in values if value is not None}

    def value(self, plain: Any) -> Any:
        """The record that such a map is; EncodingError if it is none."""
        if type(plain) is not dict:
            raise self._refused(f"is {_shorten(plain)}, must be a map")
        if not self._required <= plain.keys() or not plain.keys() <= self._by_key.keys():
            raise self._refused(f"has keys {_shorten(sorted(map(str, plain)))}, must have {self._told()}")
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
            "ledger.read-version-wrote", f"a {self.kind.__name__} {problem}", "read it with the version that wrote it"
        )


_schemas: dict[type[Any], RecordSchema] = {}


def define_schema(kind: type[Any], given: Mapping[int, tuple[str, FieldType]], optional: Iterable[int] = ()) -> None:
    """Give a kind its schema: key → (attribute, shape), in the order of the attributes."""
    may_lack = set(optional)
    made = (SchemaField(key, name, shape, key in may_lack) for key, (name, shape) in given.items())
    _schemas[kind] = RecordSchema(kind, made)


def schema_of(kind: type[Any]) -> RecordSchema:
    """The schema of a kind."""
    return _schemas[kind]


def check_fields(record: Any) -> None:
    """For `__post_init__`: every field holds what it may."""
    _schemas[type(record)].check(record)


DIGEST = FixedBytes(32)
KEY_ID = FixedBytes(32)
RUN = FixedBytes(16)
NONCE = FixedBytes(16)
SIGNATURE = FixedBytes(64)
SEQ = Integer(0, 2**63 - 1)
COUNT = Integer(0, 2**53)
TIME = Integer(0, LAST_SECOND)
MICRO = Integer(0, 10**15)
SPEND = Integer(0, UNBOUNDED)
CLASS = PatternText(re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"), 64)
DATA_CLASS = PatternText(re.compile(r"[a-z0-9-]{1,64}"), 64)
ORIGIN = PatternText(re.compile(r"[!-*,-~]+"), 255)  # names a signed note: no space, no plus
ACCOUNTANT = PatternText(re.compile(r"[a-z0-9@.+-]{1,64}"), 64)
VERSION = PatternText(re.compile(r"[A-Za-z0-9 .,;:+_/@-]{1,128}"), 128)
PROFILE = PrintableText(1024)


def _shorten(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
