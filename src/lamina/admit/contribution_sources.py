"""Where contributions come from: folders on disk, and strict readers of the .npz payloads in them."""

from __future__ import annotations

import errno
import io
import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lamina.admit.attestation import MAX_ATTESTATION, MAX_DESCRIPTOR
from lamina.admit.verdicts import ContributionRefused, PackedTexts, Reason
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
                shown = (entry for entry in entries if not entry.name.startswith("."))
                return [entry.name for entry in shown if not entry.is_file(follow_symlinks=False)]
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
            descriptor = _read_small_file(DESCRIPTOR_FILE, folder, MAX_DESCRIPTOR)
            attestation = _read_small_file(ATTESTATION_FILE, folder, MAX_ATTESTATION)
            path = None if name is None else self.path.joinpath(id, name)
            return Contribution(id, descriptor, attestation, path)
        finally:
            os.close(folder)

    def __repr__(self) -> str:
        return f"FolderContributions({str(self.path)!r})"


def read_signed_bytes(source: Iterable[Contribution], id: str, position: int) -> tuple[bytes, bytes]:
    """Read descriptor and attestation of `id`, which was at `position`, once more. ContributionRefused if they are gone."""
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
    return found.descriptor, found.attestation


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
