"""The directory of an archive, where it is as numpy writes it. Whatever is unusual is for zipfile to judge."""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

NEAR = 1 << 12  # bytes: most payloads have fewer, and most directories

_ENTRY = struct.Struct("<4s2xBxHH8xLLHHHH6xL")
_END = struct.Struct("<4sHHHHLLH")
_LOCATOR = b"PK\x06\x07"
_LOCATOR_BYTES = 20
_MAX_VERSION = 45  # of the format, which numpy writes; zipfile knows some later ones


class Near:
    """A file whose end is at hand: of a small one, that is all of it."""

    __slots__ = ("_base", "_raw", "end", "tail")

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._base = raw.seek(max(0, raw.seek(0, 2) - NEAR))
        self.tail = raw.read(NEAR)
        self.end = self._base + len(self.tail)

    def read(self, at: int, size: int) -> bytes:
        """So many bytes from there, fewer where the file ends."""
        if at >= self._base:
            at -= self._base
            return self.tail[at : at + size]
        self._raw.seek(at)
        return self._raw.read(size)


class Entry(NamedTuple):
    """As in `zipfile.ZipInfo`."""

    flag_bits: int
    compress_type: int
    compress_size: int
    file_size: int
    header_offset: int


def listed(near: Near) -> dict[bytes, Entry] | None:
    """The entries by their names, as zipfile would find them; None if zipfile has to be asked.

    It has to for anything but one short directory that ends where the file does, of entries without flags, comments
    and extra fields: those may change what the others mean.
    """
    tail = near.tail
    end = len(tail) - _END.size
    if end < 0:
        return None
    signature, disk, first_disk, _, _, size, offset, comment = _END.unpack_from(tail, end)
    if signature != b"PK\x05\x06" or disk or first_disk or comment:
        return None
    at = end - size
    if at < 0 or offset + size != near.end - _END.size:
        return None
    if tail.startswith(_LOCATOR, max(0, end - _LOCATOR_BYTES)):  # of another directory, for huge archives
        return None
    found = {}
    while at < end:
        if end - at < _ENTRY.size:
            return None
        fields = _ENTRY.unpack_from(tail, at)
        signature, version, flags, how, packed, unpacked, name, extra, comment, disk, place = fields
        if signature != b"PK\x01\x02" or version > _MAX_VERSION or flags or extra or comment or disk:
            return None
        at += _ENTRY.size
        called = tail[at : at + name]
        at += name
        if b"\0" in called:  # where zipfile cuts a name off
            return None
        found[called] = Entry(flags, how, packed, unpacked, place)
    return found if at == end else None
