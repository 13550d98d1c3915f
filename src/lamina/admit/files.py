"""Small files that are written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lamina.errors import AdmissionError

MAX_FILE = 64 * 1024 * 1024  # a key ring of 100,000 entries has some 30 MB


def read_small(path: Path, what: str, *, most: int = MAX_FILE) -> bytes:
    """All bytes of a file that has no reason to be large."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise AdmissionError(
            "admit.not-read",
            f"{what} '{path}' cannot be read: {error.strerror}",
            "give the path of a readable file",
        ) from None
    if len(data) > most:
        raise AdmissionError(
            "admit.bytes", f"{what} '{path}' has more than {most} bytes", "give the file that is meant"
        )
    return data


def write_new(path: Path, data: bytes, what: str, *, mode: int) -> None:
    """Write a file that is not there yet, whole or not at all; one that is stays as it is."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.lamina-tmp")
    try:
        if os.path.lexists(path):
            raise FileExistsError
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)  # refuses what is there, and is all or nothing
        os.unlink(temporary)
        _sync(path.parent)
    except FileExistsError:
        with suppress(OSError):
            os.unlink(temporary)
        raise AdmissionError(
            "admit.exists-not-overwritten",
            f"{what} '{path}' exists and is not overwritten",
            "give another path, or move it away",
        ) from None
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise _cannot(what, path, error) from None


def replace(path: Path, data: bytes, what: str, *, mode: int, durable: bool = True) -> None:
    """Make `path` hold exactly `data`, or leave it as it was."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.lamina-tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(temporary, path)
            if durable:
                _sync(path.parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise _cannot(what, path, error) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else who asks so writes into this folder meanwhile; the lock ends with the process."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AdmissionError(
            "admit.folder-not-opened",
            f"the folder '{folder}' cannot be opened: {error.strerror}",
            "make it, or give another path",
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    """Make names in a folder survive a power cut: a revocation must not be forgotten."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _cannot(what: str, path: Path, error: OSError) -> AdmissionError:
    reason = error.strerror or type(error).__name__
    return AdmissionError(
        "admit.not-written", f"{what} '{path}' cannot be written: {reason}", "make its folder writable"
    )
