"""Files on any system: flags of `open`, folders without links, locks. What a system lacks is asked here and nowhere else."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NONBLOCK, _NOFOLLOW, _DIRECTORY = (getattr(os, f"O_{name}", 0) for name in ("NONBLOCK", "NOFOLLOW", "DIRECTORY"))
_IN_FOLDERS = bool(_NOFOLLOW and _DIRECTORY) and os.open in os.supports_dir_fd
READ = os.O_RDONLY | _NONBLOCK | _COMMON
PIPE = os.O_RDONLY | _COMMON
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
CHANGE = os.O_RDWR | _COMMON
LOCK_FILE = os.O_RDWR | os.O_CREAT | _COMMON | _NOFOLLOW
LOG_FILE = LOCK_FILE | os.O_APPEND | _NONBLOCK
_PATIENCE = 30.0  # seconds for which a lock is waited for where it is a file

Folder = int | str  # an open folder; its path where the system cannot look names up in one


def open_folder(path: str | Path, inside: Folder | None = None, *, follow: bool = False) -> Folder:
    """Open a folder, perhaps inside an open one; OSError if it is none, or a link that is not to be followed."""
    if _IN_FOLDERS:
        flags = READ | _DIRECTORY | (0 if follow else _NOFOLLOW)
        return os.open(path, flags, dir_fd=None if inside is None else int(inside))
    found = _joined(path, inside)
    if not stat.S_ISDIR((os.stat if follow else os.lstat)(found).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), found)
    return found


def close_folder(folder: Folder) -> None:
    """Close what `open_folder` opened."""
    if isinstance(folder, int):
        os.close(folder)


def open_plain(path: str | Path, inside: Folder | None = None) -> int:
    """Open a file for reading, perhaps inside an open folder. A link is refused (ELOOP); a pipe does not block."""
    if _NOFOLLOW and (inside is None or _IN_FOLDERS):
        return os.open(path, READ | _NOFOLLOW, dir_fd=None if inside is None else int(inside))
    found = _joined(path, inside)
    before = os.lstat(found)
    if not stat.S_ISLNK(before.st_mode):
        file = os.open(found, READ)
        if os.path.samestat(before, os.fstat(file)):
            return file
        os.close(file)  # exchanged between the two calls, perhaps for a link
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), found)


def _joined(path: str | Path, inside: Folder | None) -> str:
    return os.fspath(path) if inside is None else os.path.join(str(inside), path)


def lock_file(file: int, *, wait: bool) -> None:
    """Lock an open file until it is closed. BlockingIOError if another process has it; OSError without `flock`."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no locks on open files")
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder or an existing file. With `flock` it ends with the process; otherwise it is a file."""
    if fcntl is not None:
        file = os.open(path, PIPE)
        try:
            lock_file(file, wait=True)
            yield
        finally:
            os.close(file)
        return
    name = path / ".lamina-lock" if path.is_dir() else path.with_name(f".{path.name}.lamina-lock")
    file, until = None, time.monotonic() + _PATIENCE
    while file is None:
        try:
            file = os.open(name, NEW, 0o600)
        except FileExistsError:
            if time.monotonic() > until:
                raise OSError(
                    errno.EAGAIN, f"'{name}' is there: remove it if no other process of Lamina runs"
                ) from None
            time.sleep(0.05)
    os.close(file)
    try:
        yield
    finally:
        os.unlink(name)


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut, where a folder can be synced."""
    if _DIRECTORY:
        file = os.open(folder, READ | _DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
