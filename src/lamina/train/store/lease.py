"""One process per run: a lock that the system gives back when its holder dies, however it dies.

The lock is `flock` on a file of the run's folder. No clock is read and nothing expires: a killed holder frees it at
once, a stopped one keeps it, and a file that is left over is no obstacle. The file's content, process and host, is
only there for the message to whoever comes second. The lock binds processes of one machine, and of several where
the file system carries `flock` across (NFS does, with a lock service); where it does not, it says so or, on some
cluster file systems, stays silent: there, give every run to one machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lamina import cbor
from lamina.errors import EncodingError, RunInUse, StorageError
from lamina.train.store.durable import storage_error, write_all

NAME = "lease"


class Lease:
    """The right to work on a run; made by `take`, given back by `release` or by the end of the process.

    A forked child inherits neither the right nor the lock: its copy of the descriptor is closed at the fork, so
    that a data loader's worker that outlives its parent does not keep the run.
    """

    def __init__(self, folder: Path, file: int) -> None:
        self.folder = folder
        self._file: int | None = file
        self._pid = os.getpid()
        _held.add(self)

    @classmethod
    def take(cls, folder: Path) -> Lease:
        """Take the lease of a run's folder, or say who has it (RunInUse)."""
        folder = Path(folder)
        path = folder / NAME
        while True:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise storage_error(error, f"cannot open the lease {path}", "nothing was changed") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _same(file, path):  # removed between open and lock: the next one would not see ours
                    os.close(file)
                    continue
                os.ftruncate(file, 0)
                write_all(file, cbor.encode({"pid": os.getpid(), "host": os.uname().nodename}))
            except BaseException as error:
                refusal = _refusal(path, file, error)
                os.close(file)
                raise refusal from None
            return cls(folder, file)

    def check(self) -> None:
        """RunInUse if this lease holds nothing any more: released, or its file was removed or replaced."""
        path = self.folder / NAME
        if self._file is None or self._pid != os.getpid() or not _same(self._file, path):
            raise RunInUse(
                "train.lease-no-longer",
                f"the lease {path} is no longer held by this process",
                "take it again before going on",
            )

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lease in list(_held):
        lease.release()


os.register_at_fork(after_in_child=_drop_in_child)


def _same(file: int, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _refusal(path: Path, file: int, error: BaseException) -> BaseException:
    if isinstance(error, BlockingIOError):
        return RunInUse(
            "train.run-use",
            f"the run in {path.parent} is in use by {_holder(file)}",
            "wait until it ends, or stop it; two processes on one run would spend its budget twice",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return StorageError(
            "train.file-system-no",
            f"the file system of {path.parent} has no locks: {error.strerror}",
            "put the run on a local disk; two processes on one run could not be told apart",
        )
    if isinstance(error, OSError):
        return storage_error(error, f"cannot take the lease {path}", "nothing was changed")
    return error


def _holder(file: int) -> str:
    """Who wrote the file last, as far as it can be read."""
    try:
        content = cbor.decode(os.pread(file, 4096, 0))
        pid, host = content["pid"], content["host"]
    except (OSError, EncodingError, KeyError, TypeError):
        return "another process"
    whose = " (this process)" if pid == os.getpid() and host == os.uname().nodename else ""
    return f"process {pid} on {host}{whose}"
