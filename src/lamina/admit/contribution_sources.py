"""Where contributions come from: folders on disk, and strict readers of the .npz payloads in them."""

from __future__ import annotations

import ast
import errno
import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lamina.admit.attestation import MAX_ATTESTATION, MAX_DESCRIPTOR
from lamina.admit.verdicts import ContributionRefused, PackedTexts, Reason, SignedBytes
from lamina.errors import AdmissionError
from lamina.plan.table import printable
from lamina.validate import open_regular

DESCRIPTOR_FILE, ATTESTATION_FILE, PAYLOAD_STEM = "descriptor.cbor", "attestation.cose", "payload"
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


_BYTES = (bytes, type(None))
_FIELD_TYPES = (("id", str), ("descriptor", _BYTES), ("attestation", _BYTES), ("payload", (Path, *_BYTES)))


@dataclass(frozen=True, slots=True)
class Contribution:
    """What somebody offers. Nothing about it is checked yet.

    A payload is its bytes, or the path of a file. `read_error` says why the source could not read it.
    """

    id: str
    descriptor: bytes | None = field(default=None, repr=False)
    attestation: bytes | None = field(default=None, repr=False)
    payload: bytes | Path | None = field(default=None, repr=False)
    read_error: tuple[Reason, str] | None = None

    def __post_init__(self) -> None:
        for name, wanted in _FIELD_TYPES:
            if not isinstance(value := getattr(self, name), wanted):
                problem = f"{name} of contribution {printable(str(self.id))!r} is a {type(value).__name__}"
                raise AdmissionError("admit.contribution-field-type", problem, "give text as id, and bytes")


@runtime_checkable
class ContributionSource(Protocol):
    """Contributions that are listed first and read later, by any process and as often as needed."""

    def names(self) -> PackedTexts:
        """All ids, in their order."""
        ...

    def get(self, id: str) -> Contribution:
        """One of them. One that cannot be read has a `read_error`."""
        ...


class FolderContributions:
    """ID/descriptor.cbor, ID/attestation.cose, ID/payload.* for each contribution, in the order of the ids.

    Links are not followed, devices and pipes not opened. Files beside the folders and hidden names are ignored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._prefix = os.path.join(self.path, "")  # text: to make a Path takes longer than to open it
        try:
            os.scandir(self.path).close()
        except OSError as error:
            raise self._listing_error(error) from None

    def names(self) -> PackedTexts:
        """The ids that are there now."""
        return PackedTexts(sorted(self._list_ids()))

    def _list_ids(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and not entry.is_file(follow_symlinks=False)
                ]
        except OSError as error:
            raise self._listing_error(error) from None

    def _listing_error(self, error: OSError) -> AdmissionError:
        problem = f"cannot list the contributions in '{self.path}': {error.strerror}"
        return AdmissionError("admit.folder-unreadable", problem, "give the folder with one folder per contribution")

    def __len__(self) -> int:
        return len(self._list_ids())

    def __iter__(self) -> Iterator[Contribution]:
        return map(self.get, self.names())

    def get(self, id: str) -> Contribution:
        """What the folder `id` holds."""
        return self._get(id, payload=True)

    def without_payload(self, id: str) -> Contribution:
        """Descriptor and attestation alone; neither if the folder is gone."""
        return self._get(id, payload=False)

    def _get(self, id: str, *, payload: bool) -> Contribution:
        try:
            return self._read(id, payload=payload)
        except FileNotFoundError as error:
            return Contribution(id, read_error=(Reason.UNREADABLE, _error_text(error)) if payload else None)
        except ContributionRefused as refused:
            return Contribution(id, read_error=(refused.reason, refused.detail))

    def _read(self, id: str, *, payload: bool) -> Contribution:
        """Listed and opened in one open folder, which nobody can exchange for another, or for a link, meanwhile."""
        if id in ("", ".", "..") or "/" in id or "\0" in id:
            raise ContributionRefused(Reason.BAD_ID, "not the name of a folder")
        folder = _open_folder(self._prefix + id)
        try:
            name = _find_payload(folder) if payload else None
            return Contribution(
                id,
                _read_small_file(DESCRIPTOR_FILE, folder, MAX_DESCRIPTOR),
                _read_small_file(ATTESTATION_FILE, folder, MAX_ATTESTATION),
                None if name is None else self.path.joinpath(id, name),
            )
        finally:
            os.close(folder)

    def __repr__(self) -> str:
        return f"FolderContributions({str(self.path)!r})"


def read_signed_bytes(source: Iterable[Contribution], id: str, position: int) -> SignedBytes:
    """Read the contribution `id`, which was at `position`, once more. ContributionRefused if it is not there any more."""
    try:
        if isinstance(source, FolderContributions):
            found = source.without_payload(id)
        elif isinstance(source, ContributionSource):
            found = source.get(id)
        elif isinstance(source, Sequence):
            found = source[position]
        else:
            problem = "the contributions can only be read in order, but the ledger needs them again one by one"
            raise AdmissionError("admit.source-read-once", problem, "give a list of them, or their folder")
    except LookupError:
        raise ContributionRefused(Reason.GONE) from None
    if found.read_error is not None:
        raise ContributionRefused(*found.read_error)
    if found.id != id or found.descriptor is None or found.attestation is None:
        raise ContributionRefused(Reason.GONE)
    return SignedBytes(found.descriptor, found.attestation)


def _open_folder(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        other = isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.ELOOP)
        raise ContributionRefused(Reason.UNREADABLE, "it is not a folder" if other else _error_text(error)) from None


def _find_payload(folder: int) -> str | None:
    try:
        found = [name for name in os.listdir(folder) if name.partition(".")[0] == PAYLOAD_STEM]
    except OSError as error:
        raise ContributionRefused(Reason.UNREADABLE, _error_text(error)) from None
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise ContributionRefused(Reason.UNREADABLE, f"several payloads: {first}, {second}")
    return found[0] if found else None


def _read_small_file(name: str, folder: int, most: int) -> bytes | None:
    """The bytes of a small file, one more than `most` if it is larger; None if it is not there."""
    try:
        file, _ = open_with_size(name, folder)
    except FileNotFoundError:
        return None
    try:
        return os.read(file, most + 1)
    except OSError as error:
        raise ContributionRefused(Reason.UNREADABLE, f"{name}: {_error_text(error)}") from None
    finally:
        os.close(file)


def open_with_size(path: str | Path, folder: int | None = None) -> tuple[int, int]:
    """Open a regular file for reading, and nothing else: no link, no device, no pipe that never ends.

    Returns the file and its size at that moment. A name is looked up in an open `folder`.
    """
    try:
        file = os.open(path, _OPEN_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        problem = _error_text(error)
        raise ContributionRefused(Reason.UNREADABLE, f"{printable(os.path.basename(path))}: {problem}") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise ContributionRefused(Reason.UNREADABLE, f"{printable(os.path.basename(path))}: not a regular file")
    return file, found.st_size


def _error_text(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return "a link" if error.errno == errno.ELOOP else error.strerror or type(error).__name__
    return "its name is not valid"


TAIL_BYTES = 1 << 12  # bytes: most payloads have fewer, and most directories

_ZIP_ENTRY = struct.Struct("<4s2xBxHH8xLLHHHH6xL")
_ZIP_END = struct.Struct("<4sHHHHLLH")
_ZIP64_LOCATOR = b"PK\x06\x07"
_ZIP64_LOCATOR_BYTES = 20
_MAX_ZIP_VERSION = 45  # of the format, which numpy writes; zipfile knows some later ones


class FileTail:
    """A file whose last bytes are in memory: for a small file, all of them."""

    __slots__ = ("_base", "_raw", "end", "tail")

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._base = raw.seek(max(0, raw.seek(0, 2) - TAIL_BYTES))
        self.tail = raw.read(TAIL_BYTES)
        self.end = self._base + len(self.tail)

    def read(self, at: int, size: int) -> bytes:
        """`size` bytes from `at`, fewer where the file ends."""
        if at >= self._base:
            at -= self._base
            return self.tail[at : at + size]
        self._raw.seek(at)
        return self._raw.read(size)


class ZipEntry(NamedTuple):
    """As in `zipfile.ZipInfo`."""

    flag_bits: int
    compress_type: int
    compress_size: int
    file_size: int
    header_offset: int


def read_zip_directory(near: FileTail) -> dict[bytes, ZipEntry] | None:
    """The entries by name, as zipfile would find them; None where only zipfile can tell.

    That is anything but one short directory at the end of the file, of entries without flags, comments and extra
    fields: those may change what the others mean.
    """
    tail = near.tail
    end = len(tail) - _ZIP_END.size
    if end < 0:
        return None
    signature, disk, first_disk, _, _, size, offset, comment = _ZIP_END.unpack_from(tail, end)
    if signature != b"PK\x05\x06" or disk or first_disk or comment:
        return None
    at = end - size
    if at < 0 or offset + size != near.end - _ZIP_END.size:
        return None
    if tail.startswith(_ZIP64_LOCATOR, max(0, end - _ZIP64_LOCATOR_BYTES)):  # huge archives have another directory
        return None
    found = {}
    while at < end:
        if end - at < _ZIP_ENTRY.size:
            return None
        fields = _ZIP_ENTRY.unpack_from(tail, at)
        signature, version, flags, method, packed, unpacked, name_size, extra, comment, disk, offset = fields
        if signature != b"PK\x01\x02" or version > _MAX_ZIP_VERSION or flags or extra or comment or disk:
            return None
        at += _ZIP_ENTRY.size
        name = tail[at : at + name_size]
        at += name_size
        if b"\0" in name:  # where zipfile cuts a name off
            return None
        found[name] = ZipEntry(flags, method, packed, unpacked, offset)
    return found if at == end else None


MAX_HEADER = 10_000  # bytes, as numpy has it
_MAX_CACHED_HEADER = 512  # bytes: longer ones are not cached
MAX_ARRAY = 1 << 30  # bytes of one array
MAX_AXES = 32
MAX_DIRECTORY = 1 << 20  # bytes: the names of some ten thousand arrays

_HEADER_LENGTHS = {  # how each version of the format begins, and writes the length of its header
    b"\x93NUMPY\x01\x00": struct.Struct("<8xH"),
    b"\x93NUMPY\x02\x00": struct.Struct("<8xI"),
}
_MAX_PREFIX = max(kind.size for kind in _HEADER_LENGTHS.values()) + MAX_HEADER
_HEADER_FIELDS = {"descr", "fortran_order", "shape"}
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
    """The headers of those of these arrays that exist, checked against the size of each array.

    A compressed array is unpacked for that, piece by piece; for others the archive's directory is enough. Raises
    BadArray, and whatever zipfile, zlib and numpy raise.
    """
    near = FileTail(raw)
    if (known := read_zip_directory(near)) is not None:
        usual = {name: known[full] for name in names if (full := f"{name}.npy".encode()) in known}
        if all(info.compress_type == zipfile.ZIP_STORED for info in usual.values()):
            return {name: _stored_header(near, info, name) for name, info in usual.items()}
    with _open_archive(raw) as archive:
        return {
            name: _checked_header(raw, near, archive, info, name) for name, info in _archive_entries(archive, names)
        }


def read_arrays(raw: BinaryIO, names: Sequence[str], *, crc: bool = True) -> dict[str, NDArray[Any]]:
    """Those of these arrays that exist. `crc` is for bytes that no other digest covers."""
    found = {}
    with _open_archive(raw) as archive:
        for name, info in _archive_entries(archive, names):
            _check_size(info, name)
            data = b"".join(_read_pieces(raw, archive, info))
            header = _parse_header(data[:_MAX_PREFIX], name)
            if len(data) != info.file_size or len(data) != header.start + header.nbytes:
                raise BadArray(f"array {name!r} is cut off")
            if crc and zlib.crc32(data) != info.CRC:
                raise BadArray(f"array {name!r} is damaged")
            flat = np.frombuffer(data, header.dtype, offset=header.start)
            found[name] = flat.reshape(header.shape, order="F" if header.fortran else "C")
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


def _open_archive(raw: BinaryIO) -> zipfile.ZipFile:
    return zipfile.ZipFile(cast(IO[bytes], _LimitedReads(raw)))


def _archive_entries(archive: zipfile.ZipFile, names: Sequence[str]) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    known = set(archive.namelist())
    return ((name, archive.getinfo(f"{name}.npy")) for name in names if f"{name}.npy" in known)


def _check_size(info: ZipEntry | zipfile.ZipInfo, name: str) -> None:
    if info.flag_bits & _REFUSED_FLAGS or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadArray(f"array {name!r} is packed in a way that numpy does not use")
    if info.file_size > MAX_ARRAY:
        raise BadArray(f"array {name!r} has {info.file_size} bytes, the most is {MAX_ARRAY}")
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        raise BadArray(f"array {name!r} has two different sizes")


def _checked_header(
    raw: BinaryIO, near: FileTail, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> ArrayHeader:
    if info.compress_type == zipfile.ZIP_STORED:
        return _stored_header(near, info, name)
    _check_size(info, name)
    pieces = _read_pieces(raw, archive, info)
    first = next(pieces, b"")
    header = _parse_header(first[:_MAX_PREFIX], name)
    if not _is_pickle(header, info, name):
        if len(first) + sum(map(len, pieces)) < info.file_size:
            raise BadArray(f"array {name!r} is cut off")
        _refuse_nan_alone(header, first, _read_pieces(raw, archive, info), name)
    return header


def _stored_header(near: FileTail, info: ZipEntry | zipfile.ZipInfo, name: str) -> ArrayHeader:
    """Of an entry that is not compressed: the directory says the rest."""
    _check_size(info, name)
    begin = _data_offset(near.read(info.header_offset, _LOCAL_HEADER.size), info)
    first = near.read(begin, min(info.file_size, _MAX_PREFIX))
    header = _parse_header(first, name)
    if not _is_pickle(header, info, name):
        if near.end - begin < info.file_size:
            raise BadArray(f"array {name!r} is cut off")
        places = range(begin, begin + info.file_size, _PIECE_BYTES)
        pieces = (near.read(at, min(_PIECE_BYTES, begin + info.file_size - at)) for at in places)
        _refuse_nan_alone(header, first, pieces, name)
    return header


def _refuse_nan_alone(header: ArrayHeader, first: bytes, pieces: Iterator[bytes], name: str) -> None:
    """Refuse an x without a number in it: nothing can be learned from it. Read no further than to the first number.

    `first` is how the array begins, and `pieces` are all of it.
    """
    if name != "x" or header.dtype.kind != "f" or not header.nbytes:
        return
    begun = first[header.start : header.start + header.dtype.itemsize]
    if len(begun) == header.dtype.itemsize and not np.isnan(np.frombuffer(begun, header.dtype)[0]):
        return
    skip, rest = header.start, b""
    for piece in pieces:
        data = rest + piece[skip:]
        skip, count = max(0, skip - len(piece)), len(data) // header.dtype.itemsize
        if not np.isnan(np.frombuffer(data, header.dtype, count)).all():
            return
        rest = data[count * header.dtype.itemsize :]
    raise BadArray(f"every value of array {name!r} is NaN")


def _is_pickle(header: ArrayHeader, info: ZipEntry | zipfile.ZipInfo, name: str) -> bool:
    """Whether it holds Python objects: of any length, and never read. Any other array must have the right size."""
    if header.dtype.hasobject:
        return True
    if info.file_size != header.start + header.nbytes:
        raise BadArray(f"array {name!r} holds more or fewer numbers than its header says")
    return False


def _data_offset(local: bytes, info: ZipEntry | zipfile.ZipInfo) -> int:
    """Where the bytes of an entry begin, by what stands before it."""
    signature, name, extra = _LOCAL_HEADER.unpack(local)
    if signature != b"PK\x03\x04":
        raise BadArray("the directory of the archive is damaged")
    return info.header_offset + _LOCAL_HEADER.size + int(name + extra)


def _read_pieces(raw: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """The bytes of an entry, a piece at a time. The checksum of an uncompressed one is not checked."""
    if info.compress_type == zipfile.ZIP_STORED:
        raw.seek(info.header_offset)
        raw.seek(_data_offset(raw.read(_LOCAL_HEADER.size), info))
        left = info.file_size
        while left and (piece := raw.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece
    else:
        with archive.open(info) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece


def _parse_header(begin: bytes, name: str) -> ArrayHeader:
    """From the first bytes of an entry."""
    kind = _HEADER_LENGTHS.get(begin[:8])
    if kind is None:
        raise BadArray(f"array {name!r} is not in .npy format 1.0 or 2.0")
    (length,) = kind.unpack_from(begin)
    if length > MAX_HEADER:
        raise BadArray(f"array {name!r} has a header of {length} bytes, the most is {MAX_HEADER}")
    start = kind.size + length
    parse = _parse_header_text if length <= _MAX_CACHED_HEADER else _parse_header_text.__wrapped__
    return parse(begin[kind.size : start], name, start)


@lru_cache(maxsize=256)  # in a corpus nearly all say the same
def _parse_header_text(text: bytes, name: str, start: int) -> ArrayHeader:
    """Shape, kind of number, and whether columns come first."""
    header = ast.literal_eval(text.decode("latin1").strip())
    if not isinstance(header, dict) or header.keys() != _HEADER_FIELDS or type(header["fortran_order"]) is not bool:
        raise BadArray(f"array {name!r} has a header with wrong fields")
    shape, dtype = header["shape"], np.lib.format.descr_to_dtype(header["descr"])
    if type(shape) is not tuple or any(type(axis) is not int or axis < 0 for axis in shape):
        raise BadArray(f"array {name!r} has an invalid shape")
    if len(shape) > MAX_AXES:
        raise BadArray(f"array {name!r} has {len(shape)} axes, the most is {MAX_AXES}")
    if dtype.subdtype is not None:
        raise BadArray(f"array {name!r} has arrays as elements")
    return ArrayHeader(shape, dtype, header["fortran_order"], start)


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
