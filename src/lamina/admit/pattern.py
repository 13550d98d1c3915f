"""Patterns for canonical CBOR: what everybody signs in the same form is read in a fifth of the time of a decoder.

A pattern takes nothing that `lamina.cbor` would refuse, and reads the same; what it does not take is for `lamina.cbor`
to read, or to refuse in words. A text ends where its length says, not where a pattern would like it to, and no pattern
has two ways to match: the time is that of one pass.
"""

from __future__ import annotations

import re
from typing import Any

from lamina import cbor

BYTES_32, BYTES_16 = rb"\x58\x20(.{32})", rb"\x50(.{16})"
NUMBER = rb"([\x00-\x17]|\x18[\x18-\xff]|\x19(?!\x00).{2}|\x1a(?!\x00{2}).{4}|\x1b(?!\x00{4}).{8})"
LENGTH = (
    rb"([\x61-\x77]|\x78[\x18-\xff]|\x79(?!\x00).{2})"  # of a text that is not empty; both in shortest form
)


def pattern(*parts: bytes) -> re.Pattern[bytes]:
    """One pattern of several parts."""
    return re.compile(b"".join(parts), re.DOTALL)


def exactly(value: Any) -> bytes:
    """The pattern of one value."""
    return re.escape(cbor.encode(value))


def number(raw: bytes) -> int:
    """What `NUMBER` found."""
    return raw[0] if len(raw) == 1 else int.from_bytes(raw[1:], "big")


def length(raw: bytes) -> int:
    """What `LENGTH` found, in bytes."""
    return raw[0] - 0x60 if len(raw) == 1 else int.from_bytes(raw[1:], "big")
