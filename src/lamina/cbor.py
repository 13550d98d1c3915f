"""Strict deterministic CBOR: one value has one encoding, and nothing else is accepted.

RFC 8949 §4.2.1 core deterministic encoding: shortest lengths and integers, definite lengths only, map keys in
bytewise order of their encodings, no duplicates. The value space is small on purpose:

    int in [-2^64, 2^64 - 1] · bytes · str · bool · list or tuple · dict with int or str keys
    None with `null=True` · float with `floats=True` (never NaN) · Tag with its number in `tags`

The invariant that signatures rest on:  decode(b) succeeds  ⇒  encode(decode(b)) == b, with the same options.
Arbitrary bytes give a value or an EncodingError that names the offset; never another exception.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lamina.errors import EncodingError

MAX_DEPTH = 16
MAX_SIZE = 64 * 1024

_DEEPEST = 128  # beyond this, recursion in Python could meet its own limit before ours
_FALSE, _TRUE, _NULL, _UNDEFINED = 20, 21, 22, 23
_FLOAT_FORMATS = {25: ">e", 26: ">f", 27: ">d"}  # RFC 8949 §3.3: additional information → IEEE 754 width


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A tagged value (RFC 8949 §3.4). Only numbers that the caller names in `tags` are written or read."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class _Rules:
    """What one call allows."""

    floats: bool
    null: bool
    tags: frozenset[int]
    max_depth: int
    max_size: int


def encode(
    value: Any,
    *,
    floats: bool = False,
    null: bool = False,
    tags: Collection[int] = (),
    max_depth: int = MAX_DEPTH,
    max_size: int = MAX_SIZE,
) -> bytes:
    """The deterministic encoding of `value`.

    >>> encode({"b": 1, 10: b"x", "a": [True, -1]}).hex()
    'a30a4178616182f520616201'
    """
    out = bytearray()
    _write(out, value, _rules(floats, null, tags, max_depth, max_size), 0, "value")
    return bytes(out)


def decode(
    data: bytes | bytearray | memoryview,
    *,
    floats: bool = False,
    null: bool = False,
    tags: Collection[int] = (),
    max_depth: int = MAX_DEPTH,
    max_size: int = MAX_SIZE,
) -> Any:
    """The value whose deterministic encoding is exactly `data`; arrays come back as lists.

    >>> decode(bytes.fromhex("a10102"))
    {1: 2}
    """
    rules = _rules(floats, null, tags, max_depth, max_size)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise EncodingError(f"CBOR input is {type(data).__name__}, must be bytes", "pass the received bytes")
    raw = bytes(data)
    if len(raw) > max_size:
        raise EncodingError(
            f"CBOR input has {len(raw)} bytes, at most {max_size} are allowed", "raise max_size"
        )
    reader = _Reader(raw, rules)
    value = reader.item(0)
    if reader.at != len(raw):
        raise reader.refuse(reader.at, f"{len(raw) - reader.at} trailing bytes after the value")
    return value


def _rules(floats: bool, null: bool, tags: Collection[int], max_depth: int, max_size: int) -> _Rules:
    if not 0 <= max_depth <= _DEEPEST:
        raise EncodingError(f"max_depth is {max_depth}, must lie in [0, {_DEEPEST}]", "flatten the schema")
    if max_size < 0:
        raise EncodingError(f"max_size is {max_size}, must be >= 0", "give the size in bytes")
    return _Rules(floats, null, frozenset(tags), max_depth, max_size)


# ---------------------------------------------------------------------------------------------------- writing


def _write(out: bytearray, value: Any, rules: _Rules, depth: int, where: str) -> None:
    if isinstance(value, bool):
        out.append(0xE0 | (_TRUE if value else _FALSE))
    elif isinstance(value, int):
        _write_int(out, value, where)
    elif isinstance(value, float):
        _write_float(out, value, rules, where)
    elif isinstance(value, bytes):
        _write_head(out, 2, len(value))
        out += value
    elif isinstance(value, str):
        text = _utf8(value, where)
        _write_head(out, 3, len(text))
        out += text
    elif value is None:
        if not rules.null:
            raise EncodingError(f"{where} is None, which this schema forbids", "leave the key out")
        out.append(0xE0 | _NULL)
    elif isinstance(value, list | tuple | dict | Tag):
        if depth >= rules.max_depth:
            raise EncodingError(f"{where} is nested deeper than max_depth={rules.max_depth}", "flatten it")
        _write_container(out, value, rules, depth + 1, where)
    else:
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise EncodingError(f"{where} is of type {kind}, which has no encoding", "convert it to a plain type")
    if len(out) > rules.max_size:
        raise EncodingError(f"{where} makes more than max_size={rules.max_size} bytes", "raise max_size")


def _write_container(
    out: bytearray,
    value: list[Any] | tuple[Any, ...] | dict[Any, Any] | Tag,
    rules: _Rules,
    depth: int,
    where: str,
) -> None:
    if isinstance(value, Tag):
        if isinstance(value.number, bool) or value.number not in rules.tags or not 0 <= value.number < 2**64:
            raise EncodingError(
                f"{where} has tag {value.number!r}, allowed are {sorted(rules.tags)}", "name it in tags"
            )
        _write_head(out, 6, value.number)
        _write(out, value.value, rules, depth, f"{where}.value")
    elif isinstance(value, dict):
        keys: dict[bytes, Any] = {}
        for key in value:
            encoded = bytearray()
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise EncodingError(f"{where} has key {key!r}, keys must be int or str", "rename the key")
            _write(encoded, key, rules, depth, f"key {key!r} of {where}")
            if bytes(encoded) in keys:
                raise EncodingError(f"{where} has two keys that encode alike: {key!r}", "keep one of them")
            keys[bytes(encoded)] = key
        _write_head(out, 5, len(keys))
        for encoded_key in sorted(keys):
            out += encoded_key
            _write(out, value[keys[encoded_key]], rules, depth, f"{where}[{keys[encoded_key]!r}]")
    else:
        _write_head(out, 4, len(value))
        for index, item in enumerate(value):
            _write(out, item, rules, depth, f"{where}[{index}]")


def _write_head(out: bytearray, major: int, number: int) -> None:
    if number < 24:
        out.append(major << 5 | number)
    elif number < 2**8:
        out += bytes((major << 5 | 24, number))
    elif number < 2**16:
        out += struct.pack(">BH", major << 5 | 25, number)
    elif number < 2**32:
        out += struct.pack(">BI", major << 5 | 26, number)
    else:
        out += struct.pack(">BQ", major << 5 | 27, number)


def _write_int(out: bytearray, value: int, where: str) -> None:
    if not -(2**64) <= value < 2**64:
        raise EncodingError(f"{where} is an integer outside [-2^64, 2^64-1]", "store it as bytes")
    _write_head(out, 0 if value >= 0 else 1, value if value >= 0 else -1 - value)


def _write_float(out: bytearray, value: float, rules: _Rules, where: str) -> None:
    if not rules.floats:
        raise EncodingError(
            f"{where} is the float {value!r}, which this schema forbids", "scale it to an integer"
        )
    if math.isnan(value):
        raise EncodingError(f"{where} is NaN, which has no deterministic encoding", "leave the key out")
    info, packed = _shortest_float(value)
    out.append(0xE0 | info)
    out += packed


def _shortest_float(value: float) -> tuple[int, bytes]:
    """The narrowest IEEE 754 width that holds `value` exactly, sign of zero included (RFC 8949 §4.2.2)."""
    for info, form in _FLOAT_FORMATS.items():
        try:
            packed = struct.pack(form, value)
        except OverflowError:
            continue
        if struct.unpack(form, packed)[0] == value:
            return info, packed
    raise AssertionError("a double holds every float that is not NaN")


def _utf8(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise EncodingError(
            f"{where} holds a lone surrogate, which UTF-8 cannot carry", "fix the text"
        ) from None


# ---------------------------------------------------------------------------------------------------- reading


class _Reader:
    """Reads one item after the other; `at` is the offset of the next unread byte."""

    def __init__(self, data: bytes, rules: _Rules) -> None:
        self.data = data
        self.rules = rules
        self.at = 0

    def refuse(self, offset: int, reason: str) -> EncodingError:
        return EncodingError(
            f"CBOR at byte {offset}: {reason}", "encode it deterministically (RFC 8949 §4.2.1)"
        )

    def take(self, count: int, what: str) -> bytes:
        if count > len(self.data) - self.at:
            left = len(self.data) - self.at
            raise self.refuse(self.at, f"{what} needs {count} bytes, {left} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def head(self) -> tuple[int, int, int]:
        """Major type, additional information, argument; refuses an argument that is not in shortest form."""
        start = self.at
        initial = self.take(1, "an item")[0]
        major, info = initial >> 5, initial & 0x1F
        if info < 24:
            return major, info, info
        if info == 31:
            raise self.refuse(start, "indefinite length")
        if info > 27:
            raise self.refuse(start, f"reserved additional information {info}")
        argument = int.from_bytes(self.take(1 << (info - 24), "an argument"), "big")
        smallest = 24 if info == 24 else 1 << (8 << (info - 25))
        if major != 7 and argument < smallest:
            raise self.refuse(start, f"{argument} is not in its shortest form")
        return major, info, argument

    def item(self, depth: int) -> Any:
        start = self.at
        major, info, argument = self.head()
        if major == 0:
            return argument
        if major == 1:
            return -1 - argument
        if major == 2:
            return self.take(argument, "a byte string")
        if major == 3:
            return self.text(start, argument)
        if major == 7:
            return self.simple(start, info, argument)
        if depth >= self.rules.max_depth:
            raise self.refuse(start, f"nested deeper than max_depth={self.rules.max_depth}")
        if major == 6:
            if argument not in self.rules.tags:
                raise self.refuse(start, f"tag {argument} is not allowed")
            return Tag(number=argument, value=self.item(depth + 1))
        # Each element takes a byte at least, so a length is bounded before anything is allocated for it.
        least = argument if major == 4 else 2 * argument
        if least > len(self.data) - self.at:
            raise self.refuse(start, f"{argument} elements cannot fit into {len(self.data) - self.at} bytes")
        if major == 4:
            return [self.item(depth + 1) for _ in range(argument)]
        return self.map(argument, depth + 1)

    def text(self, start: int, length: int) -> str:
        try:
            return self.take(length, "a text string").decode("utf-8")
        except UnicodeDecodeError:
            raise self.refuse(start, "text that is not valid UTF-8") from None

    def map(self, length: int, depth: int) -> dict[int | str, Any]:
        result: dict[int | str, Any] = {}
        previous = b""
        for _ in range(length):
            start = self.at
            if start < len(self.data) and self.data[start] >> 5 not in (0, 1, 3):
                raise self.refuse(start, "a map key that is neither an integer nor text")
            key = self.item(depth)
            encoded = self.data[start : self.at]
            if encoded == previous:
                raise self.refuse(start, f"duplicate map key {key!r}")
            if encoded < previous:
                raise self.refuse(start, f"map key {key!r} is out of order")
            previous = encoded
            result[key] = self.item(depth)
        return result

    def simple(self, start: int, info: int, argument: int) -> bool | float | None:
        if info in (_FALSE, _TRUE):
            return info == _TRUE
        if info == _NULL:
            if not self.rules.null:
                raise self.refuse(start, "null is not allowed here")
            return None
        if info not in _FLOAT_FORMATS:
            name = "undefined" if info == _UNDEFINED else f"simple value {argument}"
            raise self.refuse(start, f"{name} is not allowed")
        if not self.rules.floats:
            raise self.refuse(start, "a float is not allowed here")
        value = float(struct.unpack(_FLOAT_FORMATS[info], self.data[start + 1 : self.at])[0])
        if math.isnan(value):
            raise self.refuse(start, "NaN is not allowed")
        if _shortest_float(value)[0] != info:
            raise self.refuse(start, f"{value!r} is not in its shortest form")
        return value
