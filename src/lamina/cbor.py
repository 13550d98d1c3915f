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
from functools import lru_cache
from typing import Any

from lamina import validate
from lamina.errors import EncodingError

MAX_DEPTH = 16
MAX_SIZE = 64 * 1024

_DEEPEST = 128  # beyond this, recursion in Python could meet its own limit before ours
_KEY_MAJORS = (0, 1, 3)
_SMALLEST = {24: 24, 25: 1 << 8, 26: 1 << 16, 27: 1 << 32}  # that needs so long an argument
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
    value: Any, *, floats: bool = False, null: bool = False, tags: Collection[int] = (),
    max_depth: int = MAX_DEPTH, max_size: int = MAX_SIZE,
) -> bytes:  # fmt: skip
    """The deterministic encoding of `value`.

    >>> encode({"b": 1, 10: b"x", "a": [True, -1]}).hex()
    'a30a4178616182f520616201'
    """
    out = bytearray()
    _write(out, value, _rules(floats, null, frozenset(tags), max_depth, max_size), 0, "value")
    return bytes(out)


def decode(
    data: bytes | bytearray | memoryview, *, floats: bool = False, null: bool = False, tags: Collection[int] = (),
    max_depth: int = MAX_DEPTH, max_size: int = MAX_SIZE,
) -> Any:  # fmt: skip
    """The value whose deterministic encoding is exactly `data`; arrays come back as lists.

    >>> decode(bytes.fromhex("a10102"))
    {1: 2}
    """
    rules = _rules(floats, null, frozenset(tags), max_depth, max_size)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise EncodingError("cbor.not-bytes", f"CBOR input is {type(data).__name__}, must be bytes")
    raw = bytes(data)
    if len(raw) > max_size:
        raise EncodingError("cbor.too-long", f"CBOR input has {len(raw)} bytes, at most {max_size} are allowed")
    value, end = _item(raw, 0, rules, 0)
    if end != len(raw):
        raise _refuse(end, f"{len(raw) - end} trailing bytes after the value")
    return value


@lru_cache(maxsize=64)
def _rules(floats: bool, null: bool, tags: frozenset[int], max_depth: int, max_size: int) -> _Rules:
    validate.whole(EncodingError, "cbor.max-depth", least=0, most=_DEEPEST, max_depth=max_depth)
    validate.whole(EncodingError, "cbor.max-size", least=0, max_size=max_size)
    return _Rules(floats, null, tags, max_depth, max_size)


def _write(out: bytearray, value: Any, rules: _Rules, depth: int, where: str) -> None:
    if isinstance(value, bool):
        out.append(0xE0 | (_TRUE if value else _FALSE))
    elif isinstance(value, int):
        if not -(2**64) <= value < 2**64:
            problem = f"{where} is an integer outside [-2^64, 2^64-1]"
            raise EncodingError("cbor.integer-out-of-range", problem, "store it as bytes")
        _write_head(out, 0 if value >= 0 else 1, value if value >= 0 else -1 - value)
    elif isinstance(value, float):
        _write_float(out, value, rules, where)
    elif isinstance(value, bytes):
        _write_head(out, 2, len(value))
        out += value
    elif isinstance(value, str):
        try:
            text = value.encode("utf-8")
        except UnicodeEncodeError:
            problem = f"{where} holds a lone surrogate, which UTF-8 cannot carry"
            raise EncodingError("cbor.lone-surrogate", problem) from None
        _write_head(out, 3, len(text))
        out += text
    elif value is None:
        if not rules.null:
            raise EncodingError(
                "cbor.none-forbidden", f"{where} is None, which this schema forbids", "leave the key out"
            )
        out.append(0xE0 | _NULL)
    elif isinstance(value, list | tuple | dict | Tag):
        if depth >= rules.max_depth:
            raise EncodingError(
                "cbor.too-deep", f"{where} is nested deeper than max_depth={rules.max_depth}", "flatten it"
            )
        _write_container(out, value, rules, depth + 1, where)
    else:
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise EncodingError(
            "cbor.type-not-encodable", f"{where} is a {kind}, which has no encoding", "convert it to a plain type"
        )
    if len(out) > rules.max_size:
        raise EncodingError("cbor.too-long", f"{where} makes more than max_size={rules.max_size} bytes")


def _write_container(
    out: bytearray, value: list[Any] | tuple[Any, ...] | dict[Any, Any] | Tag, rules: _Rules, depth: int, where: str
) -> None:
    if isinstance(value, Tag):
        if isinstance(value.number, bool) or value.number not in rules.tags or not 0 <= value.number < 2**64:
            raise EncodingError(
                "cbor.tag-forbidden", f"{where} has tag {value.number!r}, allowed are {sorted(rules.tags)}"
            )
        _write_head(out, 6, value.number)
        _write(out, value.value, rules, depth, f"{where}.value")
    elif isinstance(value, dict):
        keys: dict[bytes, Any] = {}
        for key in value:
            encoded = bytearray()
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise EncodingError("cbor.key-type", f"{where} has key {key!r}, keys must be int or str")
            _write(encoded, key, rules, depth, f"key {key!r} of {where}")
            if bytes(encoded) in keys:
                raise EncodingError("cbor.key-twice", f"{where} has two keys that encode alike: {key!r}")
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


def _write_float(out: bytearray, value: float, rules: _Rules, where: str) -> None:
    if not rules.floats:
        raise EncodingError(
            "cbor.float-forbidden",
            f"{where} is the float {value!r}, which this schema forbids",
            "scale it to an integer",
        )
    if math.isnan(value):
        raise EncodingError(
            "cbor.nan-not-encodable", f"{where} is NaN, which has no deterministic encoding", "leave the key out"
        )
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


# Each reader takes the offset of the next unread byte and gives it back after the value: admission decodes three
# items for every contribution, and this form takes a quarter less time than a reader object.


def _refuse(offset: int, reason: str) -> EncodingError:
    return EncodingError(
        "cbor.not-deterministic", f"CBOR at byte {offset}: {reason}", "encode it deterministically (RFC 8949 §4.2.1)"
    )


def _short(data: bytes, at: int, count: int, what: str) -> EncodingError:
    return _refuse(at, f"{what} needs {count} bytes, {len(data) - at} are left")


def _item(data: bytes, at: int, rules: _Rules, depth: int) -> tuple[Any, int]:
    start, size = at, len(data)
    if at >= size:
        raise _short(data, at, 1, "an item")
    initial = data[at]
    at += 1
    if initial < 24:
        return initial, at
    major, argument = initial >> 5, initial & 0x1F
    if argument == 24 and at < size and data[at] >= 24:  # the most frequent, without a call
        argument = data[at]
        at += 1
    elif argument >= 24:
        argument, at = _argument(data, at, major, argument)
    if major == 2 or major == 3:
        end = at + argument
        if end > size:
            raise _short(data, at, argument, "a byte string" if major == 2 else "a text string")
        return (data[at:end] if major == 2 else _text(data, start, at, end)), end
    if major == 0:
        return argument, at
    if major == 1:
        return -1 - argument, at
    if major == 7:
        return _simple(data, start, at, rules), at
    if depth >= rules.max_depth:
        raise _refuse(start, f"nested deeper than max_depth={rules.max_depth}")
    if major == 6:
        if argument not in rules.tags:
            raise _refuse(start, f"tag {argument} is not allowed")
        value, at = _item(data, at, rules, depth + 1)
        return Tag(number=argument, value=value), at
    # Each element takes a byte at least, so a length is bounded before anything is allocated for it.
    if (argument if major == 4 else 2 * argument) > size - at:
        raise _refuse(start, f"{argument} elements cannot fit into {size - at} bytes")
    return (_array if major == 4 else _map)(data, at, rules, depth + 1, argument)


def _argument(data: bytes, at: int, major: int, info: int) -> tuple[int, int]:
    """The argument that follows the initial byte; refuses one that is not in shortest form."""
    if info > 27:
        raise _refuse(at - 1, "indefinite length" if info == 31 else f"reserved additional information {info}")
    end = at + (1 << (info - 24))
    if end > len(data):
        raise _short(data, at, end - at, "an argument")
    argument = int.from_bytes(data[at:end], "big")
    if argument < _SMALLEST[info] and major != 7:
        raise _refuse(at - 1, f"{argument} is not in its shortest form")
    return argument, end


def _text(data: bytes, start: int, at: int, end: int) -> str:
    try:
        return data[at:end].decode("utf-8")
    except UnicodeDecodeError:
        raise _refuse(start, "text that is not valid UTF-8") from None


def _array(data: bytes, at: int, rules: _Rules, depth: int, length: int) -> tuple[list[Any], int]:
    result = []
    for _ in range(length):
        value, at = _item(data, at, rules, depth)
        result.append(value)
    return result, at


def _map(data: bytes, at: int, rules: _Rules, depth: int, length: int) -> tuple[dict[int | str, Any], int]:
    result: dict[int | str, Any] = {}
    previous = b""
    for _ in range(length):
        start = at
        if at < len(data) and data[at] < 24:
            key: Any = data[at]
            at += 1
        elif at < len(data) and data[at] >> 5 not in _KEY_MAJORS:
            raise _refuse(at, "a map key that is neither an integer nor text")
        else:
            key, at = _item(data, at, rules, depth)
        encoded = data[start:at]
        if encoded <= previous:
            fault = "duplicate map key {!r}" if encoded == previous else "map key {!r} is out of order"
            raise _refuse(start, fault.format(key))
        previous = encoded
        result[key], at = _item(data, at, rules, depth)
    return result, at


def _simple(data: bytes, start: int, end: int, rules: _Rules) -> bool | float | None:
    info = data[start] & 0x1F
    if info in (_FALSE, _TRUE):
        return info == _TRUE
    if info == _NULL:
        if not rules.null:
            raise _refuse(start, "null is not allowed here")
        return None
    if info not in _FLOAT_FORMATS:
        number = info if info < 24 else data[start + 1]
        raise _refuse(start, f"{'undefined' if info == _UNDEFINED else f'simple value {number}'} is not allowed")
    if not rules.floats:
        raise _refuse(start, "a float is not allowed here")
    value = float(struct.unpack(_FLOAT_FORMATS[info], data[start + 1 : end])[0])
    if math.isnan(value):
        raise _refuse(start, "NaN is not allowed")
    if _shortest_float(value)[0] != info:
        raise _refuse(start, f"{value!r} is not in its shortest form")
    return value
