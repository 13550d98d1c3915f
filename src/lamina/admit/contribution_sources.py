"""Where contributions come from: offered bytes, and folders on disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

from lamina.admit import reasons
from lamina.admit.attestation import MAX_ATTESTATION, MAX_DESCRIPTOR
from lamina.admit.reasons import ContributionRefused, Reason
from lamina.admit.rows import PackedTexts
from lamina.errors import AdmissionError
from lamina.files import Folder, close_folder, open_folder, open_plain
from lamina.plan.table import printable

DESCRIPTOR_FILE, ATTESTATION_FILE, PAYLOAD_STEM = "descriptor.cbor", "attestation.cose", "payload"


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

    Several folders are one source, whose ids are distinct. Links are not followed, devices and pipes not opened.
    Files beside the folders and hidden names are ignored.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(map(Path, paths))
        # text: to make a Path takes longer than to open it
        self._prefixes = [str(path / "_")[:-1] for path in self.paths]
        self._homes: dict[str, str] = {}  # of several folders: the one in which each id lay when they were listed
        for prefix in self._prefixes:
            for id in _list_ids(prefix, most=1 if len(paths) == 1 else None):
                if id in self._homes:
                    problem = f"'{prefix}{id}' and '{self._homes[id]}{id}' have the same id"
                    raise AdmissionError("admit.id-in-two-folders", problem, "give one of the two folders another name")
                self._homes[id] = prefix

    def names(self) -> PackedTexts:
        """The ids that are there now."""
        return PackedTexts(sorted(self._list_ids()))

    def _list_ids(self) -> list[str]:
        return _list_ids(self._prefixes[0]) if len(self.paths) == 1 else list(self._homes)

    def folder(self, id: str) -> str:
        """The folder of a contribution."""
        return self._homes.get(id, self._prefixes[0]) + id

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
            return Contribution(id, read_error=(reasons.UNREADABLE, _error_text(error)) if payload else None)
        except ContributionRefused as refused:
            return Contribution(id, read_error=(refused.reason, refused.detail))

    def _read(self, id: str, *, payload: bool) -> Contribution:
        """Listed and opened in one open folder, which nobody can exchange for another, or for a link, meanwhile."""
        if id in ("", ".", "..") or "/" in id or "\0" in id:
            raise ContributionRefused(reasons.BAD_ID, "not the name of a folder")
        folder = _open_folder(self.folder(id))
        try:
            name = _find_payload(folder) if payload else None
            descriptor = _read_small_file(DESCRIPTOR_FILE, folder, MAX_DESCRIPTOR)
            attestation = _read_small_file(ATTESTATION_FILE, folder, MAX_ATTESTATION)
            path = None if name is None else Path(self.folder(id), name)
            return Contribution(id, descriptor, attestation, path)
        finally:
            close_folder(folder)

    def __repr__(self) -> str:
        return f"FolderContributions({', '.join(repr(str(path)) for path in self.paths)})"


def _list_ids(folder: str, most: int | None = None) -> list[str]:
    """The names of the contributions in a folder, or of the first of them."""
    try:
        with os.scandir(folder or ".") as entries:
            shown = (entry for entry in entries if not entry.name.startswith("."))
            return [entry.name for entry in islice(shown, most) if not entry.is_file(follow_symlinks=False)]
    except OSError as error:
        problem = f"cannot list the contributions in '{Path(folder)}': {error.strerror}"
        remedy = "give the folder with one folder per contribution"
        raise AdmissionError("admit.folder-unreadable", problem, remedy) from None


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
        raise ContributionRefused(reasons.GONE) from None
    if found.read_error is not None:
        raise ContributionRefused(*found.read_error)
    if found.id != id or found.descriptor is None or found.attestation is None:
        raise ContributionRefused(reasons.GONE)
    return found.descriptor, found.attestation


def _open_folder(path: str) -> Folder:
    try:
        return open_folder(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        other = isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.ELOOP)
        raise ContributionRefused(reasons.UNREADABLE, "it is not a folder" if other else _error_text(error)) from None


def _find_payload(folder: Folder) -> str | None:
    try:
        found = [name for name in os.listdir(folder) if name.partition(".")[0] == PAYLOAD_STEM]
    except OSError as error:
        raise ContributionRefused(reasons.UNREADABLE, _error_text(error)) from None
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise ContributionRefused(reasons.UNREADABLE, f"several payloads: {first}, {second}")
    return found[0] if found else None


def _read_small_file(name: str, folder: Folder, most: int) -> bytes | None:
    """The bytes of a small file, one more than `most` if it is larger; None if it is not there."""
    try:
        file, _ = open_with_size(name, folder)
    except FileNotFoundError:
        return None
    try:
        return os.read(file, most + 1)
    except OSError as error:
        raise ContributionRefused(reasons.UNREADABLE, f"{name}: {_error_text(error)}") from None
    finally:
        os.close(file)


def open_with_size(path: str | Path, folder: Folder | None = None) -> tuple[int, int]:
    """Open a regular file for reading, and nothing else: no link, no device, no pipe that never ends.

    Returns the file and its size at that moment. A name is looked up in an open `folder`.
    """
    try:
        file = open_plain(path, folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        problem = _error_text(error)
        raise ContributionRefused(reasons.UNREADABLE, f"{printable(os.path.basename(path))}: {problem}") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise ContributionRefused(reasons.UNREADABLE, f"{printable(os.path.basename(path))}: not a regular file")
    return file, found.st_size


def _error_text(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return "a link" if error.errno == errno.ELOOP else error.strerror or type(error).__name__
    return "its name is not valid"
