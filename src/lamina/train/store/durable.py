"""Files that are either the old one or the new one, whatever happens in between.

A file is replaced by writing a temporary file in the same folder, fsync, rename, fsync of the folder. Rename is
atomic on POSIX; the first fsync keeps the new name from ever pointing at unwritten data, the second makes the
name itself survive a power cut. What fails on the way removes the temporary file and leaves the old one alone.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lamina.errors import StorageError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.lamina-tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_UNTOUCHED = "what was there before is untouched"


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Make `path` hold exactly `data`, durably, or leave it as it was and raise StorageError."""
    with replacing(path, mode=mode) as file:
        write_all(file, data)


@contextmanager
def replacing(path: Path, *, mode: int = 0o600, fresh: bool = False) -> Iterator[int]:
    """A descriptor of a new file that gets the name `path` when the block ends without an error.

    With `fresh` it takes nobody's place: a file that is there already is an error, and stays.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.lamina-tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        raise storage_error(error, f"cannot write {path}", _UNTOUCHED) from error
    try:
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        (_give_free_name if fresh else os.replace)(temporary, path)
    except OSError as error:
        raise storage_error(error, f"cannot write {path}", _UNTOUCHED) from error
    finally:
        with suppress(OSError):  # gone, if it has its name
            os.unlink(temporary)
    sync_folder(path.parent)


def _give_free_name(temporary: Path, path: Path) -> None:
    """Rename, unless the name is taken: `link` is the rename that refuses."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():  # without links there is a gap here, which the lease of the run closes
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)


def sweep(folder: Path) -> None:
    """Remove what a killed writer left: files that carry our own temporary names, and no others.

    Only for the holder of the folder's lease; a writer at work would lose its file.
    """
    try:
        stale = [name for name in os.listdir(folder) if _TEMPORARY.fullmatch(name)]
        for name in stale:
            os.unlink(folder / name)
    except OSError as error:
        raise storage_error(error, f"cannot clear {folder}", "nothing else was touched") from error


def make_folder(path: Path) -> None:
    """Make a folder and its parents (mode 0700), durably; one that is there already is left as it is."""
    path = Path(path)
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    except OSError as error:
        raise storage_error(error, f"cannot make the folder {path}", "nothing was written") from error


def write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    """os.write until everything is written: a nearly full disk takes a part and reports it only then."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        kept = "what was written is in place, but might not survive a power cut"
        raise storage_error(error, f"cannot make names in {folder} durable", kept) from error


def storage_error(error: OSError, what: str, kept: str) -> StorageError:
    """An operating system's refusal in our words: what failed, what is still there, what to do."""
    if error.errno in _FULL:
        remedy = "free space on this disk (or raise the quota or file size limit), then start the run again"
    elif error.errno in _FORBIDDEN:
        remedy = "make the folder writable for this user, or give another one, then start the run again"
    elif error.errno == errno.EEXIST:
        remedy = "go on with what is there, or give another folder"
    elif error.errno == errno.EIO:
        remedy = "the disk itself fails: copy the folder to another disk before anything else"
    else:
        remedy = "repair what the system reports, then start the run again"
    reason = error.strerror or type(error).__name__
    return StorageError("train.storage-error", f"{what}: {reason}; {kept}", remedy)
