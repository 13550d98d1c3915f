"""The journal of a run: append-only, durable before anything acts on it, and keeper of one secret seed.

**Durable.** `append` returns only after its frame and the frame's mark are on the disk (frame.py). Ignoring a frame
without a mark is safe: an Open that was not acknowledged has drawn nothing, because the trainer draws no coin and
no noise before `append` returns; a Close that was not acknowledged is written again, because its checkpoint is
there. Such a frame is cut off by the next `append`. A frame with a mark that cannot be read stops everything,
because it may hold a charge.

**Secret.** The seed of a segment decides who is sampled and what the noise is. It lives in the journal only while
its Open is the last one and has no Close; otherwise `append` or `load` overwrites it in place with zeros, fsynced.
That is best effort: flash translation layers, copy-on-write file systems, snapshots and backups may keep the old
block. Where that matters, put the run's folder on an encrypted disk. The file has mode 0600.

**In one place.** `copied` tells that the file is not the one that was written (another inode): a copy of a run
goes on as a new generation, which is charged. It guards against mistakes, not against an adversary, and a deleted
file's inode may come back; the ledger's nonces see what it misses.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lamina.errors import RunError, StorageError
from lamina.train.store.durable import replacing, storage_error, sweep, write_all
from lamina.train.store.frame import EMPTY_SLOT, GENESIS, MARK, Frame, Unreadable, read, write
from lamina.train.store.history import History
from lamina.train.store.records import SEED_BYTES, Open, Record, Start

_LARGEST = 1 << 28  # bytes; some 400 000 segments of one class


class Journal(History):
    """The history of a run on a disk. Made by `create` or `load`, by the holder of the run's lease."""

    def __init__(self, path: Path, place: int, size: int) -> None:
        super().__init__()
        self.path = path
        self.place = place  # the inode of the file: what a Moved record says
        self._size = size  # of the file, a torn tail included
        self._end = 0  # of the last acknowledged frame
        self._chain = GENESIS
        self._slots: dict[int, int] = {}  # index of an Open → offset of its seed slot, unless that is wiped
        self._broken = False

    @property
    def copied(self) -> bool:
        """Whether this file is another one than the one that the run was writing."""
        return self._last_place() != self.place

    # ------------------------------------------------------------------------------------ making and reading

    @classmethod
    def create(cls, path: Path, *, run: str, salt: bytes) -> Journal:
        """A new journal with its Start; there, whole and durable, or not there at all."""
        path = Path(path)
        sweep(path.parent)
        with replacing(path, fresh=True) as file:
            place = os.fstat(file).st_ino
            data, frame = write(Start(run=run, salt=salt, place=place), 0, GENESIS)
            write_all(file, data[: -len(MARK)] + MARK)  # all of it is durable before it gets its name
        made = cls(path, place, frame.end)
        made._take(frame)
        return made

    @classmethod
    def load(cls, path: Path) -> Journal:
        """Read a journal, and erase the seeds that a crash kept from being erased."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_mode & 0o077:
                    os.fchmod(file.fileno(), 0o600)  # a copy made under an ordinary umask
                data = file.read(_LARGEST + 1)
        except OSError as error:
            raise storage_error(error, f"cannot read the journal {path}", "it is as it was") from error
        journal = cls(path, facts.st_ino, len(data))
        journal._parse(data)
        journal._erase()
        return journal

    def _parse(self, data: bytes) -> None:
        if len(data) > _LARGEST:
            raise self._damage(_LARGEST, f"it is larger than {_LARGEST} bytes")
        garbled = -1
        while self._end < len(data):
            try:
                frame = read(data, self._end, self._chain)
                self._check(frame.record)
            except Unreadable as problem:
                if problem.torn:
                    break
                raise self._damage(problem.offset, problem.reason) from problem
            except RunError as problem:
                raise self._damage(self._end, problem.problem) from problem
            self._take(frame)
            if isinstance(frame.record, Open):
                garbled = frame.slot if frame.garbled else -1
        if not self._records:
            raise self._damage(0, "it holds no whole Start record")
        if self.pending is not None and garbled >= 0:
            raise self._damage(garbled, "the seed of the open segment does not have its check value")

    def _damage(self, offset: int, reason: str) -> StorageError:
        return StorageError(
            "train.journal-damaged-byte",
            f"the journal {self.path} is damaged at byte {offset}: {reason}",
            "restore the file from a backup; without one, start a new run in another folder: what this run "
            "charged stays charged in the ledger",
        )

    # ------------------------------------------------------------------------------------ writing

    def append(self, record: Record) -> None:
        """Make a record durable. On StorageError nobody may act on it: nothing may be drawn, nothing published.

        After a Close, and after an Open that takes the place of another, the seed that has become useless is
        erased.
        """
        if self._broken:
            raise StorageError(
                "train.journal-unknown-state",
                f"the journal {self.path} is in an unknown state after a failed write",
                "start the run again: it reads the journal afresh",
            )
        self._check(record)
        if isinstance(record, Open) and len(record.seed) != SEED_BYTES:
            raise RunError(
                "train.open-without-seed",
                "an Open without a seed cannot be written",
                "draw one with os.urandom(32)",
            )
        data, frame = write(record, self._end, self._chain)
        try:
            self._write(data, frame)
        except OSError as error:
            fate = (
                "whether this one is will show when it is read again" if self._broken else "this one is not"
            )
            kept = f"all earlier records are in it, {fate}"
            raise storage_error(error, f"cannot write to the journal {self.path}", kept) from error
        self._take(frame)
        self._erase()

    def _write(self, data: bytes, frame: Frame) -> None:
        file = self._open()
        try:
            self._size = frame.start
            os.ftruncate(file, frame.start)  # a torn tail, if there is one
            _overwrite(file, frame.start, data)
            os.fsync(file)
            _overwrite(file, frame.end - len(MARK), MARK)
            os.fsync(file)
            self._size = frame.end
        except BaseException:
            self._broken = True
            with suppress(OSError):
                os.ftruncate(file, frame.start)
                os.fsync(file)
                self._broken = False
            raise
        finally:
            os.close(file)

    def _erase(self) -> None:
        """Overwrite every seed but that of the pending Open."""
        pending = self.pending
        stale = {index: slot for index, slot in self._slots.items() if self._records[index] is not pending}
        if not stale:
            return
        try:
            file = self._open()
            try:
                for slot in stale.values():
                    _overwrite(file, slot, EMPTY_SLOT)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            kept = "every record is in it, but a seed that should be gone is still there"
            raise storage_error(error, f"cannot erase a seed in the journal {self.path}", kept) from error
        for index in stale:
            self._forget_seed(index)
            del self._slots[index]

    def _open(self) -> int:
        """A descriptor of the very file that was read: what somebody else wrote to it must not be cut."""
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        facts = os.fstat(file)
        if (facts.st_ino, facts.st_size) != (self.place, self._size):
            os.close(file)
            raise StorageError(
                "train.journal-replaced-written",
                f"the journal {self.path} was replaced or written by somebody else during the run",
                "stop whatever else writes to this folder, then start the run again",
            )
        return file

    def _take(self, frame: Frame) -> None:
        if not frame.wiped:
            self._slots[len(self._records)] = frame.slot
        self._add(frame.record)
        self._end, self._chain = frame.end, frame.checksum


def _overwrite(file: int, at: int, data: bytes) -> None:
    os.lseek(file, at, os.SEEK_SET)
    write_all(file, data)
