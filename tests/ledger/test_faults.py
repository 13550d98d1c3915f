"""A write, sync or statement that fails is an error, and never a wrong ledger. A power cut takes nothing back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuts
import disks
import postgres as servers
import pytest
from making import LEDGER, START, Clock, admitted, attestation, create, epoch
from refusals import raises_code

from lamina.errors import LedgerDamaged, LedgerError, StoreError, StoreLost
from lamina.ledger import retention, signed_checkpoint
from lamina.ledger.retention import Retention
from lamina.ledger.signed_checkpoint import LedgerCheckpoint
from lamina.ledger.store.sqlite import SqliteStore
from lamina.ledger.writer import Ledger

LATER = START + 5000
_faulty: list[disks.Faults] = []  # a VFS is registered once in a process
_power: list[disks.PowerCut] = []


@pytest.fixture
def disk() -> Iterator[disks.Faults]:
    if not _faulty:
        _faulty.append(disks.Faults("lamina-faults"))
    yield _faulty[0]
    _faulty[0].disarm()


@pytest.fixture
def power() -> Iterator[disks.PowerCut]:
    if not _power:
        _power.append(disks.PowerCut("lamina-power"))
    yield _power[0]
    _power[0].begin(0, {})


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_LEAVES_PER_TRANSACTION", 30)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A ledger of 71 leaves, 70 of them old, to begin every trial with."""
    path = tmp_path / "base.db"
    with create(str(path)) as ledger:
        ledger.append([admitted(n) for n in range(1, 35)])
        ledger.checkpoint()
        ledger.append([epoch(0), *(admitted(n) for n in range(36, 71))], [attestation(36)])
    return path


def append(ledger: Ledger) -> None:
    ledger.append([admitted(n, expires=LATER + 9) for n in range(71, 140)], [attestation(99)])


def sign(ledger: Ledger) -> None:
    ledger.checkpoint()


def prune(ledger: Ledger) -> None:
    aggregate = Retention(ledger).propose()
    assert aggregate is not None
    Retention(ledger).prune(aggregate)


def compact(ledger: Ledger) -> None:
    ledger.store.compact()


DEEDS: list[Callable[[Ledger], None]] = [append, sign, prune, compact]


def opened(path: Path, vfs: str | None = None) -> Ledger:
    return Ledger(SqliteStore(path, vfs=vfs), LEDGER, clock=Clock(LATER))


@pytest.mark.parametrize(
    ("stays", "kind", "stride"),
    [
        (False, "io", 4),
        *(pytest.param(stays, kind, 1, marks=pytest.mark.slow) for stays in (False, True) for kind in ("io", "full")),
    ],
)
@pytest.mark.parametrize("deed", DEEDS)
def test_every_write_and_sync_may_fail(
    base: Path, tmp_path: Path, disk: disks.Faults, deed: Callable[[Ledger], None], stays: bool, kind: str, stride: int
) -> None:
    trial, silent = tmp_path / "trial.db", tmp_path / "acknowledged"
    silent.touch()
    before = 71
    for at in range(1, 500, stride):
        for each in tmp_path.glob("trial.db*"):
            each.unlink()
        shutil.copy(base, trial)
        ledger = opened(trial, disk.name)
        disk.arm(at, stays=stays, kind=kind)
        try:
            deed(ledger)
            done = True
        except (StoreError, LedgerDamaged) as error:
            assert error.remedy
            done = False
        whole = disk.count < at
        if not stays:
            assert before <= ledger.size  # the same object is still good for reading, and for another attempt
        disk.disarm()
        ledger.close()
        with opened(trial) as again:
            cuts.check(again, silent)
            assert not done or _is_done(again, deed)
            if deed is prune:
                Retention(again).resume()
            if not (done and deed is prune):
                again.append([admitted(1000, expires=LATER + 9)])
            again.checkpoint()
        if whole:
            assert done
            assert at > 3, "there was hardly anything that could fail"
            return
    pytest.fail("the deed never ended")


def _is_done(ledger: Ledger, deed: Callable[[Ledger], None]) -> bool:
    if deed is append:
        return ledger.size == 140 and ledger.find(admitted(139).descriptor) == [139]
    if deed is sign:
        return signed_checkpoint.parse_checkpoint(ledger.latest() or "")[0].size == 71
    if deed is prune:
        return sum(data.body is not None for _, data in ledger.raw_leaves()) == 3
    return ledger.size == 71


@pytest.mark.parametrize(
    ("seed", "stride"), [(0, 5), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in range(1, 11))]
)
def test_a_power_cut_takes_back_nothing_that_was_acknowledged_or_signed(
    base: Path, tmp_path: Path, power: disks.PowerCut, seed: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power fails at every write and sync in turn; of what was not synced, a random part is left."""
    coin = random.Random(seed)
    signed: list[LedgerCheckpoint] = []
    through = LedgerCheckpoint.signed

    def remembered(tree: LedgerCheckpoint, key: Any, name: str | None = None) -> str:
        signed.append(tree)
        return through(tree, key, name)

    monkeypatch.setattr(LedgerCheckpoint, "signed", remembered)
    trial, rest, silent = tmp_path / "trial.db", tmp_path / "rest.db", tmp_path / "acknowledged"
    silent.touch()
    start = disks.files_of(base)
    for at in range(1, 2000, stride):
        disks.put(start, base, trial)
        power.begin(at, {name.replace(str(base), str(trial)): data for name, data in start.items()})
        signed.clear()
        size, step = 71, ""
        ledger = None
        try:
            ledger = opened(trial, power.name)
            for step in ("append", "sign", "prune", "append again"):
                if step.startswith("append"):
                    size = (
                        ledger.append([admitted(n, expires=LATER + 9) for n in range(ledger.size, ledger.size + 33)])[
                            -1
                        ]
                        + 1
                    )
                else:
                    (sign if step == "sign" else prune)(ledger)
            step = "done"
        except (StoreError, LedgerDamaged):
            pass
        ended = step == "done"
        left = power.left(coin)
        power.begin(10**9, {})
        if ledger is not None:
            ledger.close()
        disks.put(left, trial, rest)
        with opened(rest) as again:
            assert again.size >= size
            for tree in signed:
                assert again.size >= tree.size, f"signed {tree.size} leaves, {again.size} are left"
                assert again.root_at(tree.size) == tree.root
            cuts.check(again, silent)
            again.append([admitted(5000, expires=LATER + 9)])
            again.checkpoint()
        if ended:
            assert at > 10
            return
    pytest.fail("the work never ended")


def test_what_a_killed_writer_left_in_memory_is_made_durable_before_it_is_signed(
    base: Path, tmp_path: Path, disk: disks.Faults, power: disks.PowerCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that were written, not synced, when their writer died look committed to the next process."""
    safe = disks.files_of(base)
    writer = opened(base, disk.name)
    found: list[dict[str, bytes]] = []
    through = disks._FaultyFile.xSync

    def at_sync(file: Any, flags: int) -> None:
        found.append(disks.files_of(base))  # as a kill would leave it: all frames, none of them synced
        through(file, flags)

    monkeypatch.setattr(disks._FaultyFile, "xSync", at_sync)
    append(writer)
    writer.close()
    trial, rest = tmp_path / "trial.db", tmp_path / "rest.db"
    names = {str(base): str(trial), f"{base}-wal": f"{trial}-wal"}
    signed: list[LedgerCheckpoint] = []
    sealing = LedgerCheckpoint.signed
    monkeypatch.setattr(LedgerCheckpoint, "signed", lambda tree, key: signed.append(tree) or sealing(tree, key))
    seen = 0
    for left in found:
        for at in range(1, 100):
            disks.put(left, base, trial)
            power.begin(at, {names[name]: data for name, data in safe.items()})
            for name, data in left.items():
                power.note(names[name], 0, data)
            signed.clear()
            ledger = None
            try:
                ledger = opened(trial, power.name)
                sign(ledger)
            except (StoreError, LedgerDamaged):
                pass
            ended = power.count < at
            disks.put(power.left(random.Random(at)), trial, rest)
            power.begin(10**9, {})
            if ledger is not None:
                ledger.close()
            with opened(rest) as again:
                for tree in signed:
                    assert again.size >= tree.size
                    assert again.root_at(tree.size) == tree.root
                    seen += tree.size == 140
            if ended:
                break
    assert seen, "the killed writer's leaves were never signed: the test shows nothing"


# ----------------------------------------------------------------------------------- PostgreSQL


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deed", [append, sign, prune])
def test_every_statement_and_commit_may_lose_its_connection(
    server: servers.Server, tmp_path: Path, deed: Callable[[Ledger], None], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before each statement, before each commit, and after it, when only the answer is lost."""
    import psycopg

    from lamina.ledger.store.postgres import PostgresConnection

    silent = tmp_path / "acknowledged"
    silent.touch()
    where = server.url(f"cut_{deed.__name__}_{stride}")
    create(where).close()
    count, at = 0, 0
    commit = psycopg.Connection.commit

    def hit() -> bool:
        nonlocal count
        count += 1
        return count == at

    def cut(db: Any) -> None:
        db.pgconn.finish()

    def cutting(through: Any) -> Any:
        def asked(self: Any, *given: Any) -> Any:
            if hit():
                cut(self._db)
            return through(self, *given)

        return asked

    def commits(self: Any) -> None:
        if hit():
            cut(self)
        commit(self)
        if hit():
            cut(self)
            raise psycopg.OperationalError("the answer is lost")

    for name in ("rows", "insert", "many", "find"):
        monkeypatch.setattr(PostgresConnection, name, cutting(getattr(PostgresConnection, name)))
    monkeypatch.setattr(psycopg.Connection, "commit", commits)
    for trial in range(stride, 400, stride):
        clock = Clock(START + 10_000 * trial)
        with Ledger.open(where, LEDGER, clock=clock, patience=30) as ledger:
            expires = int(clock.now) + 10
            size = ledger.size
            ledger.append([admitted(10**6 * trial + n, expires=expires) for n in range(5)], ())
            clock.now += 5000
            batch = [admitted(10**6 * trial + 100 + n, expires=expires + 10**6) for n in range(50)]
            # The first connection that a thing needs is made before; what follows may be cut anywhere.
            count, at = 0, trial
            try:
                if deed is append:
                    assert ledger.append(batch) == list(range(size + 5, size + 55))
                else:
                    deed(ledger)
            except StoreLost:
                assert deed is prune  # which also reads, and reads are not repeated
            whole, at = count < trial, 0
            cuts.check(ledger, silent)
            if deed is append:
                assert ledger.size == size + 55
        if whole:
            assert trial > 5
            return
    pytest.fail("the deed never ended")


def test_a_commit_that_was_never_answered_is_asked_about_once(
    server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without patience the caller learns that it is not known; asking again does not append again."""
    import psycopg

    where = server.url("unanswered")
    with create(where) as ledger:
        ledger._patience = 0.0
        commit = psycopg.Connection.commit

        def commits(self: Any) -> None:
            commit(self)
            self.pgconn.finish()
            raise psycopg.OperationalError("the answer is lost")

        with monkeypatch.context() as patch:
            patch.setattr(psycopg.Connection, "commit", commits)
            with pytest.raises(StoreLost):
                ledger.append([admitted(1), admitted(2)])
        assert ledger.append([admitted(1), admitted(2)]) == [1, 2]
        assert ledger.size == 3


def test_what_somebody_else_appended_before_the_second_attempt_is_found(
    server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt is cut before its commit; meanwhile another writer appends the same, and more."""
    import psycopg

    where = server.url("overtaken")
    with create(where) as ledger, Ledger.open(where, LEDGER, clock=Clock()) as other:
        commit, done = psycopg.Connection.commit, []

        def commits(self: Any) -> None:
            if not done:
                done.append(True)
                self.pgconn.finish()
                other.append([admitted(9), admitted(2), admitted(1)])
            commit(self)

        monkeypatch.setattr(psycopg.Connection, "commit", commits)
        assert ledger.append([admitted(1), admitted(2)]) == [3, 2]
        for each in (ledger, other):
            assert [each.find(admitted(n).descriptor) for n in (9, 2, 1)] == [[1], [2], [3]]
            assert each.size == 4


def test_a_full_disk_says_so(base: Path, disk: disks.Faults) -> None:
    ledger = opened(base, disk.name)
    disk.arm(1, stays=True, kind="full")
    with raises_code("store.disk-full"):
        append(ledger)
    disk.disarm()
    append(ledger)
    assert ledger.size == 140
    ledger.close()


def test_a_damaged_page_is_noticed(base: Path) -> None:
    data = bytearray(base.read_bytes())
    at = data.index(admitted(5).descriptor) - 60
    data[at - 3000 : at] = bytes(3000)
    base.write_bytes(data)
    with pytest.raises(LedgerError), opened(base) as ledger:
        for _ in ledger.leaves():
            pass
