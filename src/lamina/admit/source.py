"""Where contributions come from: any iterable of `Contribution`, or a folder with one folder for each."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

from lamina.admit.attestation import MAX_ATTESTATION
from lamina.admit.descriptor import MAX_DESCRIPTOR
from lamina.admit.packed import Packed
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refused, plain
from lamina.admit.register import Evidence
from lamina.errors import AdmissionError

DESCRIPTOR, ATTESTATION, PAYLOAD = "descriptor.cbor", "attestation.cose", "payload"
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Contribution:
    """What somebody offers. Nothing about it is believed yet.

    A payload is its bytes, or the path of a file. `trouble` is what kept the source from reading it.
    """

    id: str
    descriptor: bytes | None = field(default=None, repr=False)
    attestation: bytes | None = field(default=None, repr=False)
    payload: bytes | Path | None = field(default=None, repr=False)
    trouble: tuple[Reason, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise AdmissionError(
                "admit.id-contribution",
                f"the id of a contribution is a {type(self.id).__name__}",
                "give text",
            )
        for name, kinds in _KINDS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise AdmissionError(
                    "admit.contribution",
                    f"the {name} of contribution {plain(self.id)!r} is a {type(value).__name__}",
                    "give bytes",
                )


_KINDS = (("descriptor", bytes), ("attestation", bytes), ("payload", (bytes, Path)))


@runtime_checkable
class Source(Protocol):
    """Contributions that can be named first and fetched later, by any process and as often as asked."""

    def names(self) -> Packed:
        """All ids, in their order; UTF-8, with surrogates for what is none."""
        ...

    def get(self, id: str) -> Contribution:
        """One of them. What cannot be read is told in `trouble`."""
        ...


class FolderContributions:
    """ID/descriptor.cbor, ID/attestation.cose, ID/payload.* for each contribution, in the order of the ids.

    Links are not followed, devices and pipes not opened. Plain files beside the folders and hidden names are nobody's.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._prefix = os.path.join(self.path, "")  # text: to make a Path takes longer than to open it
        try:
            os.scandir(self.path).close()
        except OSError as error:
            raise self._unlisted(error) from None

    def names(self) -> Packed:
        """The ids that are there now."""
        return Packed(name.encode("utf-8", "surrogateescape") for name in sorted(self._listed()))

    def _listed(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and not entry.is_file(follow_symlinks=False)
                ]
        except OSError as error:
            raise self._unlisted(error) from None

    def _unlisted(self, error: OSError) -> AdmissionError:
        return AdmissionError(
            "admit.contributions-not-listed",
            f"the contributions in '{self.path}' cannot be listed: {error.strerror}",
            "give the folder that holds one folder for each contribution",
        )

    def __len__(self) -> int:
        return len(self._listed())

    def __iter__(self) -> Iterator[Contribution]:
        names = self.names()
        return (self.get(names[row].decode("utf-8", "surrogateescape")) for row in range(len(names)))

    def get(self, id: str) -> Contribution:
        """What the folder `id` holds."""
        try:
            return self._held(id, payload=True)
        except FileNotFoundError as error:
            return Contribution(id, trouble=(Reason.UNREADABLE, _why(error)))
        except Refused as refused:
            return Contribution(id, trouble=(refused.reason, refused.detail))

    def signed(self, id: str) -> Contribution:
        """The same without the payload; nothing at all if the folder is gone."""
        try:
            return self._held(id, payload=False)
        except FileNotFoundError:
            return Contribution(id)
        except Refused as refused:
            return Contribution(id, trouble=(refused.reason, refused.detail))

    def _held(self, id: str, *, payload: bool) -> Contribution:
        """Listed and opened in one open folder, which nobody can exchange for another, or for a link, meanwhile."""
        if id in ("", ".", "..") or "/" in id or "\0" in id:
            raise Refused(Reason.BAD_ID, "not the name of a folder")
        folder = _open_folder(self._prefix + id)
        try:
            name = _payload_in(folder) if payload else None
            return Contribution(
                id,
                _small(DESCRIPTOR, folder, MAX_DESCRIPTOR),
                _small(ATTESTATION, folder, MAX_ATTESTATION),
                None if name is None else self.path.joinpath(id, name),
            )
        finally:
            os.close(folder)

    def __repr__(self) -> str:
        return f"FolderContributions({str(self.path)!r})"


class Reader:
    """Descriptors and attestations of a source once more, without payloads."""

    def __init__(self, source: Iterable[Contribution]) -> None:
        self._source = source
        self._next = 0  # place of a source that can only be passed over, and what follows there
        self._rest: Iterator[Contribution] = iter(())
        self._given: Callable[[str, int], Contribution] = self._passed
        if isinstance(source, FolderContributions):
            folder = source
            self._given = lambda id, place: folder.signed(id)
        elif isinstance(source, Source):
            named = source
            self._given = lambda id, place: named.get(id)
        elif isinstance(source, Sequence):
            listed: Sequence[Contribution] = source
            self._given = lambda id, place: listed[place]

    def read(self, id: str, place: int) -> Evidence:
        """Of the contribution `id`, which was at `place`. Refused if it is not there any more."""
        try:
            found = self._given(id, place)
        except (LookupError, StopIteration):
            raise Refused(Reason.GONE) from None
        if found.trouble is not None:
            raise Refused(*found.trouble)
        if found.id != id or found.descriptor is None or found.attestation is None:
            raise Refused(Reason.GONE)
        return Evidence(found.descriptor, found.attestation)

    def _passed(self, id: str, place: int) -> Contribution:
        if isinstance(self._source, Iterator):
            raise AdmissionError(
                "admit.contributions-read-once",
                "the contributions can be read once only, and the ledger keeps what was signed",
                "give a list of them, or their folder",
            )
        if self._next == 0 or self._next > place:
            self._next, self._rest = 0, iter(self._source)
        found = next(islice(self._rest, place - self._next, None))
        self._next = place + 1
        return found


def _open_folder(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        other = isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.ELOOP)
        raise Refused(Reason.UNREADABLE, "not a folder of its own" if other else _why(error)) from None


def _payload_in(folder: int) -> str | None:
    try:
        found = [name for name in os.listdir(folder) if name.partition(".")[0] == PAYLOAD]
    except OSError as error:
        raise Refused(Reason.UNREADABLE, _why(error)) from None
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise Refused(Reason.UNREADABLE, f"several payloads: {first}, {second}")
    return found[0] if found else None


def _small(name: str, folder: int, most: int) -> bytes | None:
    """The bytes of a small file, one more than `most` if it is larger; None if it is not there."""
    try:
        file, _ = opened(name, folder)
    except FileNotFoundError:
        return None
    try:
        return os.read(file, most + 1)
    except OSError as error:
        raise Refused(Reason.UNREADABLE, f"{name}: {_why(error)}") from None
    finally:
        os.close(file)


def open_plain(path: Path) -> int:
    """Open a plain file for reading, and nothing else: not what a link points to, not a pipe that never ends."""
    return opened(path)[0]


def opened(path: str | Path, folder: int | None = None) -> tuple[int, int]:
    """The same, and the size that it has then. A name is looked up in an open `folder`."""
    try:
        file = os.open(path, _PLAIN, dir_fd=folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Refused(Reason.UNREADABLE, f"{_name(path)}: {_why(error)}") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise Refused(Reason.UNREADABLE, f"{_name(path)}: not a plain file")
    return file, found.st_size


def _name(path: str | Path) -> str:
    return plain(os.path.basename(path))


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return "a link" if error.errno == errno.ELOOP else error.strerror or type(error).__name__
    return "its name cannot be opened"
