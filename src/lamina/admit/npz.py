"""Strict readers of .npz payloads: headers, arrays, and how many examples there are."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lamina.errors import AdmissionError
from lamina.validate import open_regular

MAX_HEADER = 10_000  # bytes, as numpy has it
MAX_ARRAY = 1 << 30  # bytes of one array
MAX_AXES = 32
MAX_DIRECTORY = 1 << 20  # bytes: the names of some ten thousand arrays

_LENGTH_BYTES = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}  # by how an array begins: before its header
_MAX_PREFIX = 12 + MAX_HEADER
_MAX_CACHED_PREFIX = 512  # bytes: longer ones are not cached
_REFUSED_FLAGS = 0x1 | 0x20 | 0x40  # flags: encrypted, patched, strongly encrypted
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # what stands before an entry: signature, lengths of name and extra
_PIECE_BYTES = 1 << 18


class BadArray(ValueError):
    """An array that contradicts its header. The text may be shown: it has sizes, and nothing else from the file."""


class ArrayHeader(NamedTuple):
    """The header of an array; its numbers begin at byte `start` of its entry."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(raw: BinaryIO, names: Sequence[str]) -> dict[str, ArrayHeader]:
    """The headers of those of these arrays that exist: `read_arrays` will read them and find what they say.

    A compressed array is unpacked for that, piece by piece; for others its place in the file is enough. An array of
    Python objects is not read here, and refused there. An x without a number in it is refused: nothing can be learned
    from it. Raises BadArray, and whatever zipfile and zlib raise.
    """
    found = {}
    for name, info, file in _open_arrays(raw, names, crc=False):
        header, first = _read_header(file, info, name)
        found[name] = header
        if header.dtype.hasobject:
            continue
        only_nan = name == "x" and header.dtype.kind == "f" and header.nbytes > 0
        left, data = info.file_size - len(first), first[header.start :]
        while True:
            if only_nan:
                values = np.frombuffer(data, header.dtype, len(data) // header.dtype.itemsize)
                only_nan, data = bool(np.isnan(values).all()), data[values.nbytes :]
            if not left or (info.compress_type == zipfile.ZIP_STORED and not only_nan):
                break
            if not (piece := file.read(min(left, _PIECE_BYTES))):
                raise BadArray(f"array {name!r} is cut off")
            left -= len(piece)
            data = data + piece if only_nan else b""
        if only_nan:
            raise BadArray(f"every value of array {name!r} is NaN")
    return found


def read_arrays(raw: BinaryIO, names: Sequence[str], *, crc: bool = True) -> dict[str, NDArray[Any]]:
    """Those of these arrays that exist. `crc` is for bytes that no other digest covers."""
    found = {}
    for name, info, file in _open_arrays(raw, names, crc=crc):
        start = file.tell()
        header, first = _read_header(file, info, name)
        if len(first) == info.file_size:  # numpy would parse its header again, which takes longer than all the rest
            flat = np.frombuffer(first, header.dtype, offset=header.start)
            found[name] = flat.reshape(header.shape, order="F" if header.fortran else "C")
            continue
        file.seek(start)
        found[name] = np.lib.format.read_array(file, allow_pickle=False, max_header_size=MAX_HEADER)
    return found


class _LimitedReads:
    """A file that refuses long reads: zipfile reads a directory at once, however long."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.seek, self.tell, self.seekable = raw.seek, raw.tell, raw.seekable

    def read(self, size: int = -1) -> bytes:
        found = b"" if size > MAX_DIRECTORY else self._raw.read(size if size >= 0 else MAX_DIRECTORY + 1)
        if max(size, len(found)) > MAX_DIRECTORY:
            raise BadArray(f"the directory has more than {MAX_DIRECTORY} bytes")
        return found


def _open_arrays(raw: BinaryIO, names: Sequence[str], *, crc: bool) -> Iterator[tuple[str, zipfile.ZipInfo, IO[bytes]]]:
    """Yield the name, directory entry and content of each.

    zipfile compares a checksum when the last byte is read. Without `crc` an array that is not compressed is read from
    the archive itself, and only as far as is asked for.
    """
    with zipfile.ZipFile(cast(IO[bytes], _LimitedReads(raw))) as archive:
        for name in names:
            if (info := archive.NameToInfo.get(f"{name}.npy")) is None:
                continue
            if info.flag_bits & _REFUSED_FLAGS or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise BadArray(f"array {name!r} is packed in a way that numpy does not use")
            if info.file_size > MAX_ARRAY:
                raise BadArray(f"array {name!r} has {info.file_size} bytes, the most is {MAX_ARRAY}")
            if crc or info.compress_type == zipfile.ZIP_DEFLATED:
                with archive.open(info) as file:
                    yield name, info, file
            else:
                _seek_stored(raw, info, name)
                yield name, info, raw


def _seek_stored(raw: BinaryIO, info: zipfile.ZipInfo, name: str) -> None:
    """Go to the first byte of an entry that is not compressed."""
    end = raw.seek(0, os.SEEK_END)
    raw.seek(info.header_offset)
    signature, name_size, extra_size = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04" or info.compress_size != info.file_size:
        raise BadArray("the directory of the archive is damaged")
    if end - raw.seek(name_size + extra_size, os.SEEK_CUR) < info.file_size:
        raise BadArray(f"array {name!r} is cut off")


def _read_header(file: IO[bytes], info: zipfile.ZipInfo, name: str) -> tuple[ArrayHeader, bytes]:
    """And the bytes that were read for it."""
    first = file.read(min(_MAX_PREFIX, info.file_size))
    if (length_bytes := _LENGTH_BYTES.get(first[:8])) is None:
        raise BadArray(f"array {name!r} is not in .npy format 1.0 or 2.0")
    begin = 8 + length_bytes
    length = int.from_bytes(first[8:begin], "little")
    if length > MAX_HEADER:
        raise BadArray(f"array {name!r} has a header of {length} bytes, the most is {MAX_HEADER}")
    parse = _parse_header if begin + length <= _MAX_CACHED_PREFIX else _parse_header.__wrapped__
    header = parse(first[: begin + length], name)
    if not header.dtype.hasobject and info.file_size != header.start + header.nbytes:
        raise BadArray(f"array {name!r} holds more or fewer numbers than its header says")
    return header, first


@lru_cache(maxsize=256)  # in a corpus nearly all say the same
def _parse_header(prefix: bytes, name: str) -> ArrayHeader:
    file = io.BytesIO(prefix)
    try:
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[np.lib.format.read_magic(file)[0]](file, max_header_size=MAX_HEADER)
    except Exception:  # whatever numpy and the parser of Python make of it
        raise BadArray(f"array {name!r} has a header that numpy refuses") from None
    if any(type(axis) is not int or axis < 0 for axis in shape):
        raise BadArray(f"array {name!r} has an invalid shape")
    if len(shape) > MAX_AXES:
        raise BadArray(f"array {name!r} has {len(shape)} axes, the most is {MAX_AXES}")
    if dtype.subdtype is not None:
        raise BadArray(f"array {name!r} has arrays as elements")
    return ArrayHeader(shape, dtype, fortran, len(prefix))


_NPZ_REMEDY = "write it with np.savez(path, x=x, y=y)"


def count_examples(payload: Path) -> int:
    """The length of the first axis of array `x` of an .npz. Any other file is one example: a table, an image, a text."""
    if payload.suffix.lower() != ".npz":
        return 1
    try:
        with open(open_regular(payload), "rb") as file:
            found = read_headers(file, ["x"])
    except Exception as error:  # whatever zipfile, zlib and numpy make of it
        why = str(error) if isinstance(error, BadArray) else type(error).__name__
        raise AdmissionError("admit.npz-unreadable", f"cannot read '{payload}' as .npz ({why})", _NPZ_REMEDY) from None
    if "x" not in found:
        raise AdmissionError("admit.payload-without-x", f"'{payload}' has no array 'x'", _NPZ_REMEDY)
    shape = found["x"].shape
    if not shape or shape[0] < 1:
        problem = f"array 'x' of '{payload}' has no examples"
        raise AdmissionError("admit.payload-without-examples", problem, "its first axis counts examples")
    return shape[0]
