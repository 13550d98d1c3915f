"""A disk that loses power: which contents of a file a crash may leave, given what was written and what was synced.

Until an fsync returns, each sector of each write may have reached the disk or not, in any order, and the file may
have its new length or its old one. Sectors themselves are written whole.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

SECTOR = 512
Event = tuple[str, int, bytes]


class Recorder:
    """The writes to one file. `events` are ("write", offset, data), ("cut", length, b""), ("sync", 0, b"")."""

    def __init__(self, path: Path) -> None:
        self.before = path.read_bytes()
        self.events: list[Event] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        write, sync, cut = os.write, os.fsync, os.ftruncate

        def recorded_write(file: int, data: bytes) -> int:
            at = os.lseek(file, 0, os.SEEK_CUR)
            count = write(file, data)
            self.events.append(("write", at, bytes(data)[:count]))
            return count

        def recorded_sync(file: int) -> None:
            sync(file)
            self.events.append(("sync", 0, b""))

        def recorded_cut(file: int, length: int) -> None:
            cut(file, length)
            self.events.append(("cut", length, b""))

        with (
            mock.patch("os.write", recorded_write),
            mock.patch("os.fsync", recorded_sync),
            mock.patch("os.ftruncate", recorded_cut),
        ):
            yield

    def after_crash(self, happened: int, rng: random.Random) -> bytes:
        """A content that a crash after the first `happened` events may leave."""
        synced = max((i + 1 for i, e in enumerate(self.events[:happened]) if e[0] == "sync"), default=0)
        image = bytearray(self.before)
        for event in self.events[:synced]:
            _apply(image, event, lambda: True)
        kept = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        for event in self.events[synced:happened]:
            _apply(image, event, lambda: rng.random() < kept)
        return bytes(image)


def _apply(image: bytearray, event: Event, reached: object) -> None:
    assert callable(reached)
    kind, at, data = event
    if kind == "cut" and reached():
        del image[at:]
        image.extend(bytes(at - len(image)))
    if kind == "write":
        if reached():  # the length is there, the data perhaps not
            image.extend(bytes(max(0, at + len(data) - len(image))))
        place = at
        while place < at + len(data):
            end = min((place // SECTOR + 1) * SECTOR, at + len(data))
            if reached():
                image.extend(bytes(max(0, end - len(image))))
                image[place:end] = data[place - at : end - at]
            place = end
