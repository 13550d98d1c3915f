"""Files of a run: replaced atomically and durably, and locked by one process at a time.

**Atomic.** A file is replaced by writing a temporary file in the same folder, fsync, rename, fsync of the folder.
Rename is atomic on POSIX; the first fsync keeps the new name from ever pointing at unwritten data, the second makes the
name itself survive a power cut. What fails on the way removes the temporary file and leaves the old one alone.

**Locked.** The lock is `flock` on a file of the run's folder, which the system frees when its holder dies. No clock is
read and nothing expires: a killed holder frees it at once, a stopped one keeps it, and a file that is left over is no
obstacle. Its content, process and host, is only for the message to whoever comes second. The lock binds processes of
one machine, and of several where the file system carries `flock` across (NFS does, with a lock service); some cluster
file systems silently do not: there, give every run to one machine.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lamina import cbor, files
from lamina.errors import EncodingError, RunInUse, StorageError
from lamina.files import LOCK_FILE, NEW, lock_file

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.lamina-tmp")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_KEPT_AS_IT_WAS = "what was there before is untouched"


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Make `path` hold exactly `data`, durably, or leave it as it was and raise StorageError."""
    with replacing(path, mode=mode) as file:
        write_all(file, data)


@contextmanager
def replacing(path: Path, *, mode: int = 0o600, fresh: bool = False) -> Iterator[int]:
    """A descriptor of a new file that gets the name `path` when the block ends without an error.

    With `fresh` it takes nobody's place: a file that is there already is an error, and stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.lamina-tmp")
    try:
        file = os.open(temporary, NEW, mode)
    except OSError as error:
        raise storage_error(error, f"cannot write {path}", _KEPT_AS_IT_WAS) from None
    try:
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        (_rename_if_free if fresh else os.replace)(temporary, path)
    except OSError as error:
        raise storage_error(error, f"cannot write {path}", _KEPT_AS_IT_WAS) from None
    finally:
        with suppress(OSError):  # gone, if it has its name
            os.unlink(temporary)
    sync_folder(path.parent)


def _rename_if_free(temporary: Path, path: Path) -> None:
    """Rename, unless the name is taken: `link` is the rename that refuses."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():  # without links there is a gap here, which the lease of the run closes
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)


def remove_temporary_files(folder: Path) -> None:
    """Remove what a killed writer left: files that carry our own temporary names, and no others.

    Only for the holder of the folder's lease; a writer at work would lose its file.
    """
    try:
        stale = [name for name in os.listdir(folder) if _TEMPORARY.fullmatch(name)]
        for name in stale:
            os.unlink(folder / name)
    except OSError as error:
        raise storage_error(error, f"cannot clear {folder}", "nothing else was touched") from None


def make_folder(path: Path) -> None:
    """Make a folder and its parents (mode 0700), durably; one that is there already is left as it is."""
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    except OSError as error:
        raise storage_error(error, f"cannot make the folder {path}", "nothing was written") from None


def write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    """os.write until everything is written: a nearly full disk takes a part and reports it only then."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    try:
        files.sync_folder(folder)
    except OSError as error:
        kept = "what was written is in place, but might not survive a power cut"
        raise storage_error(error, f"cannot make names in {folder} durable", kept) from None


def storage_error(error: OSError, what: str, kept: str) -> StorageError:
    """A refusal of the operating system as a StorageError: what failed, what is still there, what to do."""
    if error.errno in _DISK_FULL:
        remedy = "free space on this disk (or raise the quota or file size limit), then start the run again"
    elif error.errno in _NOT_WRITABLE:
        remedy = "make the folder writable for this user, or give another one, then start the run again"
    elif error.errno == errno.EEXIST:
        remedy = "go on with what is there, or give another folder"
    elif error.errno == errno.EIO:
        remedy = "the disk fails: copy the folder to another disk before anything else"
    else:
        remedy = "correct what the system reports, then start the run again"
    reason = error.strerror or type(error).__name__
    return StorageError("train.storage-failed", f"{what}: {reason}; {kept}", remedy)


LEASE_NAME = "lease"


class Lease:
    """The right to work on a run; made by `take`, given back by `release` or by the end of the process.

    A forked child inherits neither the right nor the lock: its copy of the descriptor is closed at the fork, so
    that a data loader's worker that outlives its parent does not keep the run.
    """

    def __init__(self, file: int) -> None:
        self._file: int | None = file
        self._pid = os.getpid()
        _open_leases.add(self)

    @classmethod
    def take(cls, folder: Path) -> Lease:
        """Take the lease of a run's folder, or say who has it (RunInUse)."""
        path = folder / LEASE_NAME
        while True:
            try:
                file = os.open(path, LOCK_FILE, 0o600)
            except OSError as error:
                raise storage_error(error, f"cannot open the lease {path}", "nothing was changed") from None
            try:
                lock_file(file, wait=False)
                if not _names_open_file(file, path):  # removed between open and lock: the next one would not see ours
                    os.close(file)
                    continue
                os.ftruncate(file, 0)
                write_all(file, cbor.encode({"pid": os.getpid(), "host": os.uname().nodename}))
            except BaseException as error:
                refusal = _lease_error(path, file, error)
                os.close(file)
                raise refusal from None
            return cls(file)

    def release(self) -> None:
        """Give it back; harmless if that was done, and in a forked child."""
        if self._file is not None:
            file, self._file = self._file, None
            if self._pid == os.getpid():
                with suppress(OSError):
                    os.ftruncate(file, 0)
            # Closing frees the lock when the last copy of the descriptor goes. LOCK_UN would free it at once,
            # also from a child that only inherited it.
            os.close(file)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_open_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _release_in_child() -> None:
    for lease in list(_open_leases):
        lease.release()


os.register_at_fork(after_in_child=_release_in_child)


def _names_open_file(file: int, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _lease_error(path: Path, file: int, error: BaseException) -> BaseException:
    if isinstance(error, BlockingIOError):
        remedy = "wait until it ends, or stop it: two processes on one run would spend its budget twice"
        return RunInUse("train.run-in-use", f"{_holder_text(file)} works on the run in {path.parent}", remedy)
    if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        problem = f"the file system of {path.parent} does not support locks: {error.strerror}"
        remedy = "put the run on a local disk: without locks two processes could work on one run"
        return StorageError("train.no-file-locks", problem, remedy)
    if isinstance(error, OSError):
        return storage_error(error, f"cannot take the lease {path}", "nothing was changed")
    return error


def _holder_text(file: int) -> str:
    """Who wrote the file last, as far as it can be read."""
    try:
        content = cbor.decode(os.pread(file, 4096, 0))
        pid, host = content["pid"], content["host"]
    except (OSError, EncodingError, KeyError, TypeError):
        return "another process"
    whose = " (this process)" if pid == os.getpid() and host == os.uname().nodename else ""
    return f"process {pid} on {host}{whose}"
