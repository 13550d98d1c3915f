"""The newest state of a ledger that the holder of its key has verified, in a small file beside the key.

A store can be put back to an earlier state together with everything that it holds. Therefore a process with the ledger
key keeps the newest checkpoint and the newest head over the open rows in a file beside the key: KEY.HEADER.seen, mode
0600. A ledger that does not continue that checkpoint is refused. `lamina ledger complete` opens it if it lacks only epochs,
starts and ends of runs whose receipts enter them again. Nothing is kept for a key that was not read from a file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamina.errors import AdmissionError, LedgerDamaged, LedgerError
from lamina.ledger.checked_leaves import AttemptName, CheckedLeaves
from lamina.ledger.open_rows import OpenHead, held_digests
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.ledger.run_records import RunBegin, RunEnd, RunRecord
from lamina.ledger.store.rows import StoreReader
from lamina.sign.keys import path_lock, read_small, replace_file

_MOST_TREES = 256  # checkpoints kept, so that an older copy of the ledger is told from a fork
_MAX_FILE = 1 << 24


@dataclass(frozen=True, slots=True)
class NewestState:
    """The verified state of a ledger.

    trees     size of a tree → its root
    others    number of leaves in the newest tree that are neither epochs nor the start or end of a run
    attempts  run → number of its attempts in the newest tree
    records   run → number of its starts and ends in the newest tree
    held      run → digest of its open rows
    open      the newest head over the open rows
    accepted  a line for each time that another state was accepted instead of the one that was kept
    """

    trees: Mapping[int, bytes] = field(default_factory=dict)
    others: int = 0
    attempts: Mapping[bytes, int] = field(default_factory=dict)
    records: Mapping[bytes, int] = field(default_factory=dict)
    open: OpenHead | None = None
    held: Mapping[bytes, bytes] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return max(self.trees, default=0)

    @classmethod
    def of(cls, rows: StoreReader, leaves: CheckedLeaves, size: int, root: bytes) -> NewestState:
        """Return the state of a tree whose leaves were checked."""
        return cls({size: root}, *_counts(rows, leaves, size))

    def joined(self, newer: NewestState) -> NewestState:
        """Return both states joined: for trees and for open rows, the newer one counts."""
        found = self
        if newer.size >= self.size:
            trees = dict(sorted({**self.trees, **newer.trees}.items())[-_MOST_TREES:])
            found = replace(newer, trees=trees, open=self.open, held=self.held, accepted=self.accepted)
        if newer.open is not None and (self.open is None or newer.open.counter >= self.open.counter):
            found = replace(found, open=newer.open, held=newer.held)
        return found

    def check(
        self, name: str, path: Path, rows: StoreReader, leaves: CheckedLeaves, restoring: frozenset[AttemptName]
    ) -> bool:
        """Return True if the ledger continues this state, False if receipts of runs enter what it lacks again; raise otherwise."""
        if not self.size or leaves.extends(rows, self.size, self.trees[self.size]):
            return True
        common = max((s for s, root in self.trees.items() if leaves.extends(rows, s, root)), default=0)
        others, attempts, records = _counts(rows, leaves, common) if common else (0, {}, {})
        known, held = leaves.attempts(rows), held_digests(rows)
        runs = {run for run, _, _ in restoring}  # they enter their start and end again, too
        lost = {run: count - attempts.get(run, 0) for run, count in self.attempts.items()}
        mine = Counter(each[0] for each in restoring if known.get(each, common) >= common)
        if common and others == self.others and all(
            not count or (run in runs and count <= mine[run]) for run, count in lost.items()
        ) and all(
            records.get(run) == count for run, count in self.records.items() if run not in runs
        ) and all(
            held.get(run) == digest for run, digest in self.held.items() if run not in runs
        ):  # fmt: skip
            return False
        how = f"has {leaves.size} leaves" if leaves.size < self.size else f"is forked after {common} common leaves"
        problem = f"the ledger {name} {how}, but a checkpoint of {self.size} leaves is kept in '{path}'"
        remedy = (
            "restore the newest copy of the ledger; if it lacks only records of runs, enter them again: lamina ledger complete "
            "LEDGER RUN…; to continue with this one and forget what it lacks, run lamina ledger checkpoint LEDGER --key KEY --accept"
        )
        raise LedgerError("ledger.older-than-kept", problem, remedy)

    def check_open(self, name: str, path: Path, head: OpenHead | None) -> None:
        """Raise LedgerDamaged if the open rows are older than the newest head."""
        mine = self.open
        newer = mine is not None and head is not None and head.counter > mine.counter and head.size >= mine.size
        if mine is None or head == mine or newer:
            return
        stands = "unsigned" if head is None else f"signed under number {head.counter} after {head.size} leaves"
        problem = f"the open charges of the ledger {name} are {stands}, but '{path}' keeps number {mine.counter} "
        problem += f"after {mine.size} leaves"
        remedy = (
            "restore the newest copy of the ledger; if they were written without its key, review them with lamina "
            "spend, and sign them: lamina ledger checkpoint LEDGER --key KEY --accept"
        )
        raise LedgerDamaged("ledger.open-rows-replayed", problem, remedy)


def _counts(rows: StoreReader, leaves: CheckedLeaves, size: int) -> tuple[int, dict[bytes, int], dict[bytes, int]]:
    """Return how many leaves before `size` are not about a run, and each run's attempts, and starts and ends, before it."""
    runs = Counter(run for (run, _, _), seq in leaves.attempts(rows).items() if seq < size)
    about = (leaf.record for kind in (RunBegin, RunEnd) for leaf in leaves.records(rows, kind, 0, size))
    ends = Counter(record.run for record in about if isinstance(record, RunRecord))
    return size - leaves.count(Epoch, size) - ends.total(), dict(runs), dict(ends)


class NewestStateFile:
    """The file of one ledger beside its key."""

    def __init__(self, key: Path | None, header_hash: bytes) -> None:
        self._key = key
        self.path = None if key is None else key.with_name(f"{key.name}.{header_hash.hex()[:16]}.seen")
        self._stamp: tuple[int, ...] = ()  # of the file that the ledger was compared with

    def changed(self) -> bool:
        """Return whether another process wrote the file since `compared`."""
        return self._file_stamp() != self._stamp

    def compared(self) -> None:
        """Record that the ledger was compared with the present file."""
        self._stamp = self._file_stamp()

    def _file_stamp(self) -> tuple[int, ...]:
        try:
            found = None if self.path is None else os.stat(self.path)
        except OSError:
            found = None
        return () if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)

    def load(self) -> NewestState:
        """Return the state that was kept; an empty one if there is no file."""
        if self.path is None or not self.path.exists():
            return NewestState()
        try:
            return _from_json(json.loads(read_small(self.path, "the newest state of a ledger", most=_MAX_FILE)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, LedgerDamaged):
            problem = f"'{self.path}', which keeps the newest state of a ledger, cannot be read"
            remedy = "restore it from a copy of the key's folder"
            raise LedgerError("ledger.kept-state-unreadable", problem, remedy) from None

    def keep(self, state: NewestState, *, anew: bool = False) -> str | None:
        """Merge the state into the kept one, or replace it if `anew`; return the reason of a failure, otherwise None.

        The key file is locked meanwhile, so that no process replaces a newer state by an older one.
        """
        if self.path is None or self._key is None:
            return None
        try:
            with path_lock(self._key):
                changed, joined = self.changed(), state if anew else self.load().joined(state)
                replace_file(self.path, json.dumps(_to_json(joined)).encode(), "the newest state", mode=0o600)
                if anew or not changed:
                    self.compared()
        except AdmissionError as error:
            return error.problem
        return None


def refuse_rolled_back(ledger: LedgerReader, key: Path) -> None:
    """Raise LedgerError if a ledger that is open without its key does not continue the state kept beside that key."""
    kept = NewestStateFile(key, ledger.header_hash)
    if kept.path is not None and os.access(kept.path, os.R_OK):
        newest = kept.load()  # before the view below begins, which is then not older than the file
        with ledger.store.read() as rows:
            newest.check(ledger.name, kept.path, rows, ledger.checked(rows), frozenset())


def _to_json(state: NewestState) -> dict[str, Any]:
    return {
        "trees": [[size, root.hex()] for size, root in sorted(state.trees.items())],
        "others": state.others,
        "attempts": {run.hex(): count for run, count in sorted(state.attempts.items())},
        "records": {run.hex(): count for run, count in sorted(state.records.items())},
        "open": None if state.open is None else state.open.encode().hex(),
        "held": {run.hex(): digest.hex() for run, digest in sorted(state.held.items())},
        "accepted": list(state.accepted),
    }


def _from_json(plain: Any) -> NewestState:
    trees = {int(size): bytes.fromhex(root) for size, root in plain["trees"]}
    counts = (plain[name].items() for name in ("attempts", "records"))
    attempts, records = ({bytes.fromhex(run): int(count) for run, count in each} for each in counts)
    held = {bytes.fromhex(run): bytes.fromhex(digest) for run, digest in plain["held"].items()}
    head = None if plain["open"] is None else OpenHead.decode(bytes.fromhex(plain["open"]))
    accepted = tuple(map(str, plain.get("accepted", ())))
    return NewestState(trees, int(plain["others"]), attempts, records, head, held, accepted)
