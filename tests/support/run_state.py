"""What a ledger says of a run, the moments at which a run can be killed, and seeds of its segments that tests know.

All of it is read or placed where others can see it: leaves and rows of the ledger (docs/ledger.md), metrics.json, and
calls to the system and to SQLite. How a run keeps its own state is no concern of the tests that use this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest
from open_charges import open_charges

from lamina.engine.engine import Engine
from lamina.engine.noise import random_stream
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import Epoch
from lamina.run.trainer import Trainer


@dataclass(frozen=True)
class RunAttempt:
    """A charged attempt at the steps [first, last). `state` is "open", "closed" or "abandoned"."""

    segment: int
    generation: int
    nonce: bytes
    first: int
    last: int
    state: str
    events: dict[str, int]  # charged steps of each account
    factors: dict[str, float]  # of the accounts that were exhausted

    @property
    def key(self) -> tuple[int, int]:
        return self.segment, self.generation


def attempts_in(ledger: LedgerReader, run: str) -> list[RunAttempt]:
    """Return the attempts of a run: those in leaves, as they ended, then those that are open."""
    id, found = bytes.fromhex(run), []
    for leaf in ledger.of_kind(Epoch):
        if isinstance(epoch := leaf.record, Epoch) and epoch.run == id:
            events = {str(each.bound): sum(c.steps for c in each.charges) for each in epoch.accounts}
            factors = {str(each.bound): each.exhausted for each in epoch.accounts if each.exhausted is not None}
            for each in epoch.segments:
                place = each.index, each.generation, each.nonce, each.first, each.last
                found.append(RunAttempt(*place, each.outcome.name.lower(), events, factors))
    for each in open_charges(ledger, run):
        if each.kind == "attempt":
            assert each.span is not None
            place = each.segment, each.generation, each.nonce, *each.span
            found.append(RunAttempt(*place, "open", each.steps, each.factors))
    return found


def run_in(ledger: LedgerReader, folder: Path, *, without: Set[str] = frozenset()) -> str:
    """Return the id of the run in a folder, by metrics.json or the name under which the ledger has it; or ""."""
    if (path := folder / "metrics.json").exists():
        found: str = json.loads(path.read_text())["run"]
        return found
    with ledger.store.read() as rows:
        named = [each.id.hex() for each in rows.runs() if each.label == folder.name]
    named = [each for each in named if each not in without]
    assert len(named) < 2, f"several runs are called {folder.name!r}"
    return named[0] if named else ""


def run_id(folder: Path) -> str:
    """Return the id of the run in a folder that has begun."""
    with LedgerReader.read_only(folder / "ledger.db") as ledger:
        return run_in(ledger, folder)


def attempts(folder: Path) -> list[RunAttempt]:
    """Return the attempts of the run in a folder, its copies included."""
    with LedgerReader.read_only(folder / "ledger.db") as ledger:
        return attempts_in(ledger, run_in(ledger, folder))


def open_attempt(folder: Path) -> RunAttempt | None:
    """Return the attempt that neither was closed nor abandoned."""
    found = [each for each in attempts(folder) if each.state == "open"]
    assert len(found) < 2, found
    return found[0] if found else None


# ---------------------------------------------------------------------------------------- moments

OS_CALLS = ("fsync", "write", "rename", "replace", "link", "unlink", "ftruncate", "open")


@contextmanager
def moments(act: Callable[[], None], only: str = "", trace: list[str] | None = None) -> Iterator[None]:
    """Call `act` before everything that outlives the process, and before every backward pass.

    Between two moments nothing changes but memory. `only` is text in the name and arguments of the calls that count; their
    names and first arguments are added to `trace`.
    """
    undo: list[tuple[Any, str, Any]] = []
    watching = True

    def pass_by(*call: Any) -> None:
        if watching and only in (text := " ".join(map(str, call))):
            if trace is not None:
                trace.append(text[:400])
            act()

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                pass_by(name, *args)
            return real(*args, **kwargs)

        undo.append((owner, name, real))
        setattr(owner, name, watched)

    def connected(connection: apsw.Connection) -> None:
        connection.set_commit_hook(lambda: bool(pass_by("commit")))

    for name in OS_CALLS:
        watch(os, name)
    watch(Engine, "backward")
    if "psycopg" in sys.modules:
        watch(sys.modules["psycopg"].Connection, "commit")
    apsw.connection_hooks.append(connected)
    try:
        yield
    finally:
        watching = False
        apsw.connection_hooks.remove(connected)
        for owner, name, real in reversed(undo):
            setattr(owner, name, real)


# ---------------------------------------------------------------------------------------- seeds


def set_seeds(patch: pytest.MonkeyPatch, seed: Callable[[], bytes]) -> None:
    """Take the seeds of segments, which the system draws, from a function."""
    patch.setattr(random_stream, "os", SimpleNamespace(urandom=lambda size: seed()[:size]))


def number_seeds(patch: pytest.MonkeyPatch) -> None:
    """Make each seed a function of how many attempts of its run the ledger has: two runs can be compared.

    A replay that drew a new seed instead of using the one it had would get another one.
    """
    fit, fitting = Trainer.fit, []

    def fitted(self: Trainer) -> Any:
        fitting.append(self)
        try:
            return fit(self)
        finally:
            fitting.pop()

    def numbered() -> bytes:
        if not fitting:
            return os.urandom(32)
        with LedgerReader.read_only(fitting[-1].ledger.name) as ledger:
            found = attempts_in(ledger, run_in(ledger, fitting[-1].folder))
        return hashlib.sha256(b"%d" % len(found)).digest()

    patch.setattr(Trainer, "fit", fitted)
    set_seeds(patch, numbered)
