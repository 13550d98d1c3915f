"""Checkpoints: the state of a run after a number of closed segments.

    checkpoint/000007.safetensors    after 7 closed segments, in the format of archive.py

The digest of a checkpoint is its identity: an Open names the one that it starts from, a Close the one that it
leaves. A file that is damaged, cut, of another format or under another one's name is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lamina.errors import RunError, StorageError
from lamina.train.store.archive import Archive, Damaged, OtherFormat, read
from lamina.train.store.durable import make_folder, replacing, storage_error, sweep, sync_folder, write_all

_NAME = re.compile(r"[0-9]{6,18}\.safetensors")
_SPARE = 1.1  # free space asked for, in units of the checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a checkpoint holds: named tensors, and a state of plain values (state.flatten makes it plain)."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. For the holder of its lease: making it clears what a killed writer left."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        make_folder(self.folder)
        sweep(self.folder)

    def path(self, index: int) -> Path:
        """Where a checkpoint lies."""
        return self.folder / f"{index:06d}.safetensors"

    def indices(self) -> list[int]:
        """The checkpoints that are there, oldest first."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise storage_error(error, f"cannot read the folder {self.folder}", "nothing changed") from error
        found = {int(name.partition(".")[0]) for name in names if _NAME.fullmatch(name)}
        return sorted(index for index in found if self.path(index).name in names)

    def save(self, index: int, snapshot: Snapshot) -> bytes:
        """Write a checkpoint, durably, and return its digest; on StorageError what was there is untouched.

        The tensors are read while it writes: nothing may step the model meanwhile.
        """
        if index < 0:
            raise RunError("train.index", f"index is {index}, must be >= 0", "count closed segments")
        archive = Archive.of(index, snapshot.tensors, snapshot.state)
        digest = archive.digest()
        with replacing(self.path(index)) as file:
            write_all(file, archive.header(digest))
            for part in archive.data():
                write_all(file, part)
        return digest

    def load(self, index: int) -> tuple[Snapshot, bytes]:
        """A checkpoint and its digest, every byte of it verified; tensors come to the CPU, contiguous."""
        path = self.path(index)
        try:
            found, tensors, state, digest = read(path)
        except FileNotFoundError as error:
            have = ", ".join(map(str, self.indices())) or "none"
            raise StorageError(
                "train.no-checkpoint", f"there is no checkpoint {path}", f"use one of those there: {have}"
            ) from error
        except OSError as error:
            raise storage_error(error, f"cannot read the checkpoint {path}", "it is as it was") from error
        except OtherFormat as error:
            raise StorageError(
                "train.checkpoint", f"the checkpoint {path} {error}", "resume with the version that wrote it"
            ) from error
        except Damaged as error:
            raise StorageError(
                "train.checkpoint-damaged",
                f"the checkpoint {path} is damaged: {error}",
                "restore the file from a backup; without one, remove it, and the run resumes from the one "
                "before: what has to be done again is charged again",
            ) from error
        if found != index:
            raise StorageError(
                "train.file-holds-checkpoint",
                f"the file {path} holds checkpoint {found}, its name says {index}",
                "give the files of this folder their own names back",
            )
        return Snapshot(tensors=tensors, state=state), digest

    def prune(self, keep: int = 2) -> None:
        """Remove all but the newest `keep` checkpoints."""
        if keep < 1:
            raise RunError(
                "train.keep", f"keep is {keep}, must be >= 1", "a run resumes from its newest checkpoint"
            )
        self._remove(self.indices()[:-keep])

    def drop(self, index: int) -> None:
        """Remove one of them."""
        self._remove([index])

    def _remove(self, indices: Sequence[int]) -> None:
        try:
            for index in indices:
                os.unlink(self.path(index))
        except OSError as error:
            kept = "the others are untouched"
            raise storage_error(error, f"cannot remove a checkpoint in {self.folder}", kept) from error
        if indices:
            sync_folder(self.folder)

    def room(self, snapshot: Snapshot) -> None:
        """StorageError if the disk has no room for such a checkpoint: asked before anything is spent."""
        needed = int(Archive.of(0, snapshot.tensors, snapshot.state).size() * _SPARE) + 1
        try:
            facts = os.statvfs(self.folder)
        except OSError as error:
            what = f"cannot ask for the room in {self.folder}"
            raise storage_error(error, what, "nothing was spent") from error
        free = facts.f_bavail * facts.f_frsize
        if free < needed:
            raise StorageError(
                "train.mb-free-checkpoint",
                f"{self.folder} has {free / 1e6:.1f} MB free, a checkpoint needs {needed / 1e6:.1f} MB; "
                "nothing was spent",
                "free space on this disk, or give another folder",
            )
