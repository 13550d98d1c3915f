"""Arrays of an .npz file whose writer nobody vouches for: looked at in little memory before anything is believed."""

from __future__ import annotations

import ast
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import IO, Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lamina.admit.directory import Entry, Near, listed

MAX_HEADER = 10_000  # bytes, as numpy has it
_USUAL_HEADER = 512  # bytes: what longer ones say is not remembered
MAX_ARRAY = 1 << 30  # bytes of one array
MAX_AXES = 32
MAX_DIRECTORY = 1 << 20  # bytes: the names of some ten thousand arrays

_LENGTHS = {  # how each version of the format begins, and writes the length of its header
    b"\x93NUMPY\x01\x00": struct.Struct("<8xH"),
    b"\x93NUMPY\x02\x00": struct.Struct("<8xI"),
}
_PREFIX = max(kind.size for kind in _LENGTHS.values()) + MAX_HEADER
_FIELDS = {"descr", "fortran_order", "shape"}
_SCRAMBLED = 0x1 | 0x20 | 0x40  # flags: encrypted, patched, strongly encrypted
_LOCAL = struct.Struct("<4s22xHH")  # what stands before an entry: signature, lengths of name and extra
_CHUNK = 1 << 18


class BadArray(ValueError):
    """An array that cannot be what it says. The text may be shown: sizes, and nothing else that the file holds."""


class Header(NamedTuple):
    """What an array says of itself; its numbers begin at the byte `start` of its entry."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def headers(raw: BinaryIO, names: Sequence[str]) -> dict[str, Header]:
    """The headers of these arrays, as far as they are there, once they agree with what the archive holds.

    What passes can be read as long as the bytes stay as they are. A compressed array is unpacked for that, piece by
    piece; of any other the archive's directory says enough. Raises BadArray, and whatever zipfile, zlib and numpy do.
    """
    near = Near(raw)
    if (known := listed(near)) is not None:
        usual = {name: known[full] for name in names if (full := f"{name}.npy".encode()) in known}
        if all(info.compress_type == zipfile.ZIP_STORED for info in usual.values()):
            return {name: _plain(near, info, name) for name, info in usual.items()}
    with _archive(raw) as archive:
        return {name: _checked(raw, near, archive, info, name) for name, info in _entries(archive, names)}


def arrays(raw: BinaryIO, names: Sequence[str], *, crc: bool = True) -> dict[str, NDArray[Any]]:
    """These arrays, as far as they are there. `crc` is for bytes that nothing else vouches for."""
    found = {}
    with _archive(raw) as archive:
        for name, info in _entries(archive, names):
            _check_size(info, name)
            data = b"".join(_pieces(raw, archive, info))
            header = _header(data[:_PREFIX], name)
            if len(data) != info.file_size or len(data) != header.start + header.nbytes:
                raise BadArray(f"array {name!r} is cut off")
            if crc and zlib.crc32(data) != info.CRC:
                raise BadArray(f"array {name!r} is damaged")
            flat = np.frombuffer(data, header.dtype, offset=header.start)
            found[name] = flat.reshape(header.shape, order="F" if header.fortran else "C")
    return found


# ------------------------------------------------------------------------------------------ the archive


class _Sparing:
    """A file of which little is read at a time: zipfile reads a directory in one go, however long."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.seek, self.tell, self.seekable = raw.seek, raw.tell, raw.seekable

    def read(self, size: int = -1) -> bytes:
        found = b"" if size > MAX_DIRECTORY else self._raw.read(size if size >= 0 else MAX_DIRECTORY + 1)
        if max(size, len(found)) > MAX_DIRECTORY:
            raise BadArray(f"the directory has more than {MAX_DIRECTORY} bytes")
        return found


def _archive(raw: BinaryIO) -> zipfile.ZipFile:
    return zipfile.ZipFile(cast(IO[bytes], _Sparing(raw)))


def _entries(archive: zipfile.ZipFile, names: Sequence[str]) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    known = set(archive.namelist())
    return ((name, archive.getinfo(f"{name}.npy")) for name in names if f"{name}.npy" in known)


def _check_size(info: Entry | zipfile.ZipInfo, name: str) -> None:
    if info.flag_bits & _SCRAMBLED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadArray(f"array {name!r} is packed in a way that numpy never uses")
    if info.file_size > MAX_ARRAY:
        raise BadArray(f"array {name!r} has {info.file_size} bytes, the most is {MAX_ARRAY}")
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        raise BadArray(f"array {name!r} has two sizes")


def _checked(raw: BinaryIO, near: Near, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Header:
    if info.compress_type == zipfile.ZIP_STORED:
        return _plain(near, info, name)
    _check_size(info, name)
    pieces = _pieces(raw, archive, info)
    first = next(pieces, b"")
    header = _header(first[:_PREFIX], name)
    if not _is_pickle(header, info, name) and len(first) + sum(map(len, pieces)) < info.file_size:
        raise BadArray(f"array {name!r} is cut off")
    return header


def _plain(near: Near, info: Entry | zipfile.ZipInfo, name: str) -> Header:
    """Of an entry that is not compressed: the directory says the rest."""
    _check_size(info, name)
    begin = _begin(near.read(info.header_offset, _LOCAL.size), info)
    header = _header(near.read(begin, min(info.file_size, _PREFIX)), name)
    if not _is_pickle(header, info, name) and near.end - begin < info.file_size:
        raise BadArray(f"array {name!r} is cut off")
    return header


def _is_pickle(header: Header, info: Entry | zipfile.ZipInfo, name: str) -> bool:
    """Which may be of any length, and is never read. Anything else is as long as it says."""
    if header.dtype.hasobject:
        return True
    if info.file_size != header.start + header.nbytes:
        raise BadArray(f"array {name!r} holds more or fewer numbers than its header says")
    return False


def _begin(local: bytes, info: Entry | zipfile.ZipInfo) -> int:
    """Where the bytes of an entry begin, by what stands before it."""
    signature, name, extra = _LOCAL.unpack(local)
    if signature != b"PK\x03\x04":
        raise BadArray("the directory points to nothing")
    return info.header_offset + _LOCAL.size + int(name + extra)


def _pieces(raw: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """The bytes of an entry, and never many at a time. The checksum of a plain one is not looked at."""
    if info.compress_type == zipfile.ZIP_STORED:
        raw.seek(info.header_offset)
        raw.seek(_begin(raw.read(_LOCAL.size), info))
        left = info.file_size
        while left and (piece := raw.read(min(left, _CHUNK))):
            left -= len(piece)
            yield piece
    else:
        with archive.open(info) as file:
            while piece := file.read(_CHUNK):
                yield piece


# ------------------------------------------------------------------------------------------ a header


def _header(begin: bytes, name: str) -> Header:
    """From the first bytes of an entry."""
    kind = _LENGTHS.get(begin[:8])
    if kind is None:
        raise BadArray(f"array {name!r} is not of the .npy format 1.0 or 2.0")
    (length,) = kind.unpack_from(begin)
    if length > MAX_HEADER:
        raise BadArray(f"array {name!r} has a header of {length} bytes, the most is {MAX_HEADER}")
    start = kind.size + length
    said = _said if length <= _USUAL_HEADER else _said.__wrapped__
    return said(begin[kind.size : start], name, start)


@lru_cache(maxsize=256)  # in a corpus nearly all say the same
def _said(text: bytes, name: str, start: int) -> Header:
    """Shape, kind of number, and whether columns come first."""
    said = ast.literal_eval(text.decode("latin1").strip())
    if not isinstance(said, dict) or said.keys() != _FIELDS or type(said["fortran_order"]) is not bool:
        raise BadArray(f"array {name!r} has a header of other fields")
    shape, dtype = said["shape"], np.lib.format.descr_to_dtype(said["descr"])
    if type(shape) is not tuple or any(type(axis) is not int or axis < 0 for axis in shape):
        raise BadArray(f"array {name!r} has a shape that is none")
    if len(shape) > MAX_AXES:
        raise BadArray(f"array {name!r} has {len(shape)} axes, the most is {MAX_AXES}")
    if dtype.subdtype is not None:
        raise BadArray(f"array {name!r} has arrays for elements")
    return Header(shape, dtype, said["fortran_order"], start)
