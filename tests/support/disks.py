"""Disks that fail, for SQLite: a layer between it and the system, in which every write and sync can go wrong."""

from __future__ import annotations

import random
from pathlib import Path

import apsw


class Faults(apsw.VFS):  # type: ignore[misc]
    """Fails at one of its calls that change something: number `at` from now, and after it all others if `stays`.

    A write that fails may have written a part. `count` says how many such calls there were.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.at, self.count, self.stays, self.kind = 0, 0, False, "io"
        super().__init__(name, "")

    def arm(self, at: int, *, stays: bool, kind: str) -> None:
        self.at, self.count, self.stays, self.kind = at, 0, stays, kind

    def disarm(self) -> None:
        self.at = 0

    def hit(self) -> bool:
        self.count += 1
        return self.at > 0 and (self.count >= self.at if self.stays else self.count == self.at)

    def fail(self) -> None:
        raise (apsw.FullError if self.kind == "full" else apsw.IOError)("made to fail")

    def xOpen(self, name: object, flags: list[int]) -> _FaultyFile:
        return _FaultyFile(self, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:
        if self.hit():
            self.fail()
        super().xDelete(name, syncdir)


class _FaultyFile(apsw.VFSFile):  # type: ignore[misc]
    def __init__(self, disk: Faults, name: object, flags: list[int]) -> None:
        self._disk = disk
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._disk.hit():
            super().xWrite(bytes(data)[: len(data) // 2], offset)
            self._disk.fail()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        if self._disk.hit():
            self._disk.fail()
        super().xSync(flags)

    def xTruncate(self, size: int) -> None:
        if self._disk.hit():
            self._disk.fail()
        super().xTruncate(size)


class PowerCut(apsw.VFS):  # type: ignore[misc]
    """Keeps apart what reached the disk and what only the system knows; the power fails at call number `at`.

    What was written to a file before its last sync is on the disk. Of what came after, a power cut may leave any part
    in any order: `left(coin)` is one such outcome.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.at, self.count = 0, 0
        self._safe: dict[str, bytearray] = {}
        self._pending: dict[str, list[tuple[int, bytes | None]]] = {}
        super().__init__(name, "")

    def begin(self, at: int, files: dict[str, bytes]) -> None:
        """The disk holds these files; the power fails at call number `at`."""
        self.at, self.count = at, 0
        self._safe = {path: bytearray(data) for path, data in files.items()}
        self._pending = {}

    def step(self) -> None:
        self.count += 1
        if self.at and self.count >= self.at:
            raise apsw.IOError("the power is gone")

    def note(self, path: str, offset: int, data: bytes | None) -> None:
        self._pending.setdefault(path, []).append((offset, data))

    def settle(self, path: str) -> None:
        file = self._safe.setdefault(path, bytearray())
        for change in self._pending.pop(path, []):
            _apply(file, *change)

    def left(self, coin: random.Random) -> dict[str, bytes]:
        """What is on the disk when the power comes back: of each file as much as is certain, and perhaps more."""
        found = {path: bytearray(data) for path, data in self._safe.items()}
        for path, changes in self._pending.items():
            chosen = [change for change in changes if coin.random() < coin.choice([0.0, 0.5, 1.0])]
            coin.shuffle(chosen)
            file = found.setdefault(path, bytearray())
            for offset, data in chosen:
                _apply(file, offset, data if data is None else data[: coin.choice([len(data), len(data), 512])])
        return {path: bytes(data) for path, data in found.items()}

    def xOpen(self, name: object, flags: list[int]) -> _TrackedFile:
        return _TrackedFile(self, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:
        self.step()
        super().xDelete(name, syncdir)


class _TrackedFile(apsw.VFSFile):  # type: ignore[misc]
    def __init__(self, disk: PowerCut, name: object, flags: list[int]) -> None:
        self._disk = disk
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.note(self._path, offset, bytes(data))
        self._disk.step()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._disk.step()
        super().xSync(flags)
        self._disk.settle(self._path)

    def xTruncate(self, size: int) -> None:
        self._disk.note(self._path, size, None)
        self._disk.step()
        super().xTruncate(size)


def _apply(file: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:  # cut to a length
        file.extend(bytes(max(0, offset - len(file))))
        del file[offset:]
        return
    file.extend(bytes(max(0, offset + len(data) - len(file))))
    file[offset : offset + len(data)] = data


def files_of(path: Path) -> dict[str, bytes]:
    """The database and its WAL."""
    names = (str(path), f"{path}-wal")
    return {name: Path(name).read_bytes() for name in names if Path(name).exists()}


def put(files: dict[str, bytes], old: Path, new: Path) -> None:
    """The same files under another name, without shared memory."""
    for name in (str(new), f"{new}-wal", f"{new}-shm"):
        Path(name).unlink(missing_ok=True)
    for name, data in files.items():
        Path(name.replace(str(old), str(new))).write_bytes(data)
