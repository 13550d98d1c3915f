"""What goes over a line between the gate and its processes: parts of the work, and verdicts on them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from lamina.admit.examine import Verdict
from lamina.admit.parts import Part
from lamina.admit.reason import CODES, REASONS
from lamina.admit.rows import PACK
from lamina.admit.source import Contribution

_SIZE, _PLACES = struct.Struct("<Q"), struct.Struct("<QQ")
_NONE = (1 << 64) - 1
_PASSED = 0xFF
_NAMED, _WHOLE = b"n", b"c"  # how a part begins


def write_part(part: Part) -> bytes:
    """As bytes."""
    if isinstance(part, range):
        return _NAMED + _PLACES.pack(part.start, part.stop)
    out = bytearray(_WHOLE)
    for each in part:
        _put(out, _text(each.id))
        _put(out, each.descriptor)
        _put(out, each.attestation)
        if isinstance(each.payload, Path):
            _put(out, b"p")
            _put(out, str(each.payload).encode("utf-8", "surrogateescape"))
        else:
            _put(out, b"b")
            _put(out, each.payload)
        reason, detail = each.trouble if each.trouble is not None else (None, "")
        _put(out, None if reason is None else bytes([CODES[reason]]) + _text(detail))
    return bytes(out)


def read_part(data: bytes) -> Part:
    """What was written."""
    if data.startswith(_NAMED):
        return range(*_PLACES.unpack_from(data, len(_NAMED)))
    fields = _fields(data, len(_WHOLE))
    given: list[Contribution] = []
    for id in fields:
        descriptor, attestation, form, payload, trouble = islice(fields, 5)
        assert id is not None
        at = None if payload is None or form == b"b" else Path(payload.decode("utf-8", "surrogateescape"))
        why = None if trouble is None else (REASONS[trouble[0]], trouble[1:].decode("utf-8", "surrogatepass"))
        given.append(
            Contribution(
                id.decode("utf-8", "surrogatepass"),
                descriptor,
                attestation,
                payload if at is None else at,
                why,
            )
        )
    return given


def write_verdicts(verdicts: list[Verdict]) -> bytes:
    """As bytes."""
    out = bytearray()
    for verdict in verdicts:
        if isinstance(verdict, bytes):
            out.append(_PASSED)
            out += verdict
        else:
            out.append(CODES[verdict[0]])
            _put(out, _text(verdict[1]))
    return bytes(out)


def read_verdicts(data: bytes, count: int) -> list[Verdict]:
    """What was written, of so many."""
    verdicts: list[Verdict] = []
    at = 0
    for _ in range(count):
        code = data[at]
        at += 1
        if code == _PASSED:
            verdicts.append(data[at : at + PACK.size])
            at += PACK.size
        else:
            (size,) = _SIZE.unpack_from(data, at)
            verdicts.append((REASONS[code], data[at + 8 : at + 8 + size].decode("utf-8", "surrogatepass")))
            at += 8 + size
    assert at == len(data)
    return verdicts


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _put(out: bytearray, item: bytes | None) -> None:
    out += _SIZE.pack(_NONE if item is None else len(item))
    out += item or b""


def _fields(data: bytes, at: int) -> Iterator[bytes | None]:
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += 8
        if size == _NONE:
            yield None
            continue
        yield data[at : at + size]
        at += size
