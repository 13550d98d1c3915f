"""An attacker with write access to the ledger file, but no key, hides rows before an honest run and restores them after it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import hospital
import postgres
import problem
import psycopg
import pytest
from making import GOVERNING
from refusals import raises_code
from stopping import LOOSE, During, Killed, die

from lamina.cli.app import app
from lamina.cli.open_ledger import open_ledger, read_spend
from lamina.errors import BudgetExceeded, LaminaError
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.sign.keys import PrivateKey
from lamina.spend.spend_ledger import SpendLedger

HIDE_WITHDRAWAL = ("DELETE FROM withdrawn", "UPDATE leaf SET kind = 2 WHERE kind = 4")
HIDE_SPEND = ("UPDATE leaf SET kind = 2 WHERE kind = 3", "DELETE FROM attempt", "DELETE FROM held")


def sql(path: Path, *statements: str) -> None:
    db = apsw.Connection(str(path))
    try:
        for each in statements:
            db.execute(each)
    finally:
        db.close()


@contextmanager
def changed(path: Path, *statements: str) -> Iterator[None]:
    """Change the file with SQL, and restore the changed rows afterwards unless they were written meanwhile."""
    db, names = apsw.Connection(str(path)), ("withdrawn", "attempt", "held", "terms", "run", "meta", "known", "token")
    try:
        before = {name: list(db.execute(f"SELECT * FROM {name}")) for name in names}
        leaves = list(db.execute("SELECT kind, data, body, seq FROM leaf"))
        for each in statements:
            db.execute(each)
        yield
        with db:
            db.executemany("UPDATE leaf SET kind = ?, data = ?, body = ? WHERE seq = ?", leaves)
            for name, rows in before.items():
                db.execute(f"DELETE FROM {name}")
                for row in rows:
                    db.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
    finally:
        db.close()


# ---------------------------------------------------------------------------------------- a withdrawal that is hidden


@pytest.fixture
def ward(tmp_path: Path) -> hospital.Hospital:
    return hospital.usual(tmp_path / "h", real=True)


def withdrawn_one(ward: hospital.Hospital) -> tuple[Path, int]:
    """Return a ledger in which one of 57 contributions is withdrawn, and the leaf of the withdrawal."""
    path = ward.root / "l.db"
    return path, leave(ward, ward.admit(ledger=path).digests[20])


def leave(ward: hospital.Hospital, name: str) -> int:
    """Withdraw a contribution, under a checkpoint; the leaf."""
    with open_or_create(ward.root / "l.db", CorpusTerms.of_policy(ward.policy)) as ledger:
        (done,) = withdraw(ledger, name, WithdrawalReason.CONSENT)
        return done.leaf.seq


@pytest.mark.parametrize(
    "hide", [HIDE_WITHDRAWAL, HIDE_WITHDRAWAL[:1], HIDE_WITHDRAWAL[1:]], ids=["both", "table", "kind"]
)
def test_a_hidden_withdrawal_is_named(ward: hospital.Hospital, hide: tuple[str, ...]) -> None:
    path, seq = withdrawn_one(ward)
    corpus = ward.admit(ledger=path)
    assert len(corpus) == 56
    outside = ward.admit()  # by their signatures alone: the ledger decides when the run begins
    assert len(outside) == 57
    with changed(path, *hide):
        asked: list[Callable[[], Any]] = [
            lambda: ward.admit(ledger=path),
            lambda: ward.trainer(corpus=outside, ledger=path, bounds=None).fit(),
            lambda: ward.trainer("b", corpus=corpus, ledger=path, bounds=None).fit(),
        ]
        for ask in asked:
            with pytest.raises(LaminaError) as refused:
                ask()
            assert refused.value.code in ("ledger.kind-index-differs", "ledger.withdrawal-index-differs")
            assert f"leaf {seq} " in refused.value.problem
    trainer = ward.trainer("c", corpus=ward.admit(), ledger=path, bounds=None)
    trainer.fit()
    assert len(trainer.corpus) == 56
    assert verify(path).problem is None


def test_a_withdrawal_that_is_hidden_during_a_run_is_found(ward: hospital.Hospital) -> None:
    path = ward.root / "l.db"
    corpus = ward.admit(ledger=path)
    name = corpus.digests[20]

    def hide() -> None:
        leave(ward, name)
        sql(path, *HIDE_WITHDRAWAL)

    trainer = ward.trainer(corpus=corpus, ledger=path, bounds=None, progress=During({5: hide}))
    trainer.fit()
    assert len(trainer.corpus) == 56


def test_a_resumed_run_finds_a_hidden_withdrawal(ward: hospital.Hospital) -> None:
    path, _ = withdrawn_one(ward)
    corpus = ward.admit(ledger=path)
    with pytest.raises(Killed):
        ward.trainer(corpus=corpus, ledger=path, bounds=None, progress=During({5: die})).fit()
    with changed(path, *HIDE_WITHDRAWAL), raises_code("ledger.kind-index-differs"):
        ward.trainer(corpus=corpus, ledger=path, bounds=None).fit()
    ward.trainer(corpus=ward.admit(ledger=path), ledger=path, bounds=None).fit()


def test_a_withdrawal_whose_leaf_was_replaced_is_named(ward: hospital.Hospital) -> None:
    path, seq = withdrawn_one(ward)
    leave(ward, ward.admit(ledger=path).digests[30])
    swap = f"UPDATE leaf SET data = (SELECT data FROM leaf WHERE seq = 5), kind = 2 WHERE seq = {seq}"
    with changed(path, "DELETE FROM withdrawn", swap):
        with pytest.raises(LaminaError) as refused:
            ward.admit(ledger=path)
        assert refused.value.code == "ledger.leaf-not-allowed" and f"leaf {seq} " in refused.value.problem


# ---------------------------------------------------------------------------------------- charges that are hidden


def spent_one(folder: Path) -> Path:
    problem.trainer(folder / "a").fit()
    return folder / "tests.ledger.db"


@pytest.mark.parametrize(
    "hide",
    [
        HIDE_SPEND,
        HIDE_SPEND[:2],
        HIDE_SPEND[:1],
        HIDE_SPEND[1:2],
        ("UPDATE leaf SET kind = 3 WHERE kind = 1",),
        ("UPDATE leaf SET kind = 9 WHERE kind = 3",),
    ],
    ids=["all", "attack", "kind", "attempt", "header", "unknown"],
)
def test_hidden_epochs_are_named(tmp_path: Path, hide: tuple[str, ...]) -> None:
    path = spent_one(tmp_path)
    with pytest.raises(BudgetExceeded):
        problem.trainer(tmp_path / "b").fit()
    codes = ["ledger.kind-index-differs"]
    if hide == HIDE_SPEND[1:2]:  # the run is refused for what the leaves say
        codes = ["ledger.attempt-index-differs", "spend.budget-exceeded"]
    with changed(path, *hide):
        for ask in (lambda: problem.trainer(tmp_path / "b").fit(), lambda: total(path)):
            with raises_code(*codes):
                ask()
    assert not list(tmp_path.glob("b/checkpoint/*"))
    with pytest.raises(BudgetExceeded):
        problem.trainer(tmp_path / "b").fit()
    assert verify(path, signatures=False).problem is None


def total(path: Path) -> float:
    with read_spend(str(path)) as book:
        book.recorded("0" * 32, 0, 0)
        return book.total("clinical", delta=1e-5).spent


OPEN_ROWS = {
    "attempts": ("DELETE FROM held WHERE segment >= 0",),
    "reservations": ("DELETE FROM held WHERE segment < 0",),
    "recorded": ("UPDATE held SET leaf = 1",),
    "text": ("UPDATE held SET body = replace(body, x'05', x'01') WHERE segment >= 0",),
    "terms": ("DELETE FROM terms",),
    "runs": ("UPDATE run SET finished = 1",),
    "added": ("INSERT INTO held SELECT run, segment + 7, generation, nonce, leaf, body FROM held",),
    "head": ("UPDATE meta SET value = CAST(substr(value, 1, 143) || x'00' AS BLOB) WHERE name = 'open'",),
    "cheaper": ("UPDATE held SET body = CAST(replace(hex(body), '05', '01') AS BLOB)",),
    "short": ("UPDATE meta SET value = x'00' WHERE name = 'open'",),
    "no head": ("DELETE FROM held", "DELETE FROM meta WHERE name = 'open'"),
}


@pytest.mark.parametrize("what", OPEN_ROWS)
def test_open_rows_that_were_changed_are_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({8: die})).fit()
    path = tmp_path / "tests.ledger.db"
    with changed(path, *OPEN_ROWS[what]):
        for name in ("a", "b"):
            with raises_code("ledger.open-rows-differ", "ledger.open-rows-replayed", "store.row-wrong-type"):
                problem.trainer(tmp_path / name).fit()
        if what != "no head":  # nobody without the file beside the key can know that there was one
            with raises_code("ledger.open-rows-differ", "store.row-wrong-type"):
                total(path)
            found = verify(path, signatures=False).problem
            assert found is not None and found.code in ("verify.open-rows-differ", "verify.row-wrong-type")
    problem.trainer(tmp_path / "a").fit()
    assert verify(path, signatures=False).problem is None


def test_open_rows_of_an_earlier_moment_are_refused(tmp_path: Path) -> None:
    """Rows are restored together with their signed head. Where no epoch or start of a run follows, only the file beside
    the key reveals it."""
    path, kept = tmp_path / "tests.ledger.db", []

    def save() -> None:
        db = apsw.Connection(str(path))
        kept.extend(list(db.execute(f"SELECT * FROM {name}")) for name in ("held", "terms", "run", "meta"))
        db.close()

    def put_back() -> None:
        db = apsw.Connection(str(path))
        for name, rows in zip(("held", "terms", "run", "meta"), kept, strict=True):
            db.execute(f"DELETE FROM {name}")
            for row in rows:
                db.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
        db.close()

    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({3: save, 4: die}), bounds=LOOSE).fit()
    with Ledger.open(path, key := PrivateKey.load(tmp_path / "tests.ledger.pem", None)) as ledger:
        SpendLedger(ledger).finish(next(iter(SpendLedger(ledger).labels())))
    put_back()
    with raises_code("ledger.open-rows-replayed"):
        problem.trainer(tmp_path / "b", bounds=LOOSE).fit()
    with Ledger.open(path, key) as ledger:
        ledger.accept()
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "b", progress=During({4: die}), bounds=LOOSE).fit()
    put_back()
    for each in tmp_path.glob("*.seen"):
        each.unlink()
    with raises_code("ledger.open-rows-differ"):  # the start of the other run follows
        problem.trainer(tmp_path / "b", bounds=LOOSE).fit()
    with Ledger.open(path, key) as ledger:
        ledger.accept()


def test_a_head_from_before_an_epoch_is_refused_without_the_file(tmp_path: Path) -> None:
    path, kept = tmp_path / "tests.ledger.db", []

    def save() -> None:
        db = apsw.Connection(str(path))
        kept.extend(list(db.execute(f"SELECT * FROM {name}")) for name in ("held", "terms", "run", "meta"))
        db.close()

    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({3: save, 8: die})).fit()
    db = apsw.Connection(str(path))
    for name, rows in zip(("held", "terms", "run", "meta"), kept, strict=True):
        db.execute(f"DELETE FROM {name}")
        for row in rows:
            db.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
    db.close()
    for each in tmp_path.glob("*.seen"):
        each.unlink()
    with raises_code("ledger.open-rows-differ"):
        problem.trainer(tmp_path / "b").fit()
    found = verify(path, signatures=False).problem
    assert found is not None and found.code == "verify.open-rows-differ" and "leaf 2 records an epoch" in found.reason
    with Ledger.open(path, PrivateKey.load(tmp_path / "tests.ledger.pem", None)) as ledger:
        ledger.accept()  # the holder of the key reviews the rows and signs them


# ---------------------------------------------------------------------------------------- an older or another ledger


def copy(path: Path, to: Path) -> None:
    db = apsw.Connection(str(path))
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    shutil.copy(path, to)


def put(path: Path, saved: Path) -> None:
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    shutil.copy(saved, path)


def test_an_older_copy_is_refused_between_two_runs(tmp_path: Path) -> None:
    path, saved = tmp_path / "tests.ledger.db", tmp_path / "saved"
    plan = problem.plan(problem.net(), 4)
    problem.trainer(tmp_path / "a", plan=plan, bounds=LOOSE).fit()
    copy(path, saved)
    problem.trainer(tmp_path / "b", plan=plan, bounds=LOOSE).fit()
    newer = tmp_path / "newer"
    copy(path, newer)
    put(path, saved)
    with pytest.raises(LaminaError) as refused:
        problem.trainer(tmp_path / "c", plan=plan, bounds=LOOSE).fit()
    assert refused.value.code == "ledger.older-than-kept"
    assert "4 leaves" in refused.value.problem and "7 leaves" in refused.value.problem  # start, epoch and end of each
    for opening in (read_spend, open_ledger):  # of `lamina spend` and of `lamina ledger withdraw`, without the key
        with raises_code("ledger.older-than-kept"), opening(str(path)):
            pass
    with pytest.raises(LaminaError) as refused:
        app(["certify", str(tmp_path / "a")], standalone_mode=False)
    assert refused.value.code == "ledger.older-than-kept" and not (tmp_path / "a" / "certificate.json").exists()
    with raises_code("ledger.older-than-kept"):  # the run whose epoch it has does not restore the other's
        problem.trainer(tmp_path / "a", plan=plan, bounds=LOOSE).fit()
    problem.trainer(tmp_path / "b", plan=plan, bounds=LOOSE).fit()  # its journal says what is missing
    found = verify(path, signatures=False)
    assert found.problem is None and [found.counts[kind] for kind in ("epoch", "run-begin", "run-end")] == [2, 2, 2]
    put(path, newer)
    with raises_code("ledger.older-than-kept", "ledger.open-rows-replayed"):  # which is now the other branch
        problem.trainer(tmp_path / "c", plan=plan, bounds=LOOSE).fit()


def test_a_fork_of_the_same_size_is_refused_until_its_keeper_accepts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, saved = tmp_path / "tests.ledger.db", tmp_path / "saved"
    plan = problem.plan(problem.net(), 4)
    problem.trainer(tmp_path / "a", plan=plan, bounds=LOOSE).fit()
    copy(path, saved)
    (beside,) = tmp_path.glob("*.seen")
    early = beside.read_bytes()
    problem.trainer(tmp_path / "b", plan=plan, bounds=LOOSE).fit()
    late = beside.read_bytes()
    put(path, saved)
    beside.write_bytes(early)
    problem.trainer(tmp_path / "c", plan=plan, bounds=LOOSE).fit()  # as on another machine, which never saw b
    beside.write_bytes(late)
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "d", plan=plan, bounds=LOOSE).fit()
    app(
        ["ledger", "checkpoint", str(path), "--key", str(tmp_path / "tests.ledger.pem"), "--accept"],
        standalone_mode=False,
    )
    (line,) = json.loads(beside.read_text())["accepted"]
    assert line in capsys.readouterr().err and "7 signed leaves instead of 7" in line
    problem.trainer(tmp_path / "d", plan=plan, bounds=LOOSE).fit()
    assert json.loads(beside.read_text())["accepted"] == [line]  # it stays
    assert beside.stat().st_mode & 0o777 == 0o600
    assert verify(path, signatures=False).counts["epoch"] == 3


def test_a_lost_withdrawal_is_not_what_a_run_restores(ward: hospital.Hospital) -> None:
    path, saved = ward.root / "l.db", ward.root / "saved"
    corpus = ward.admit(ledger=path)
    name = corpus.digests[20]
    act = During({4: lambda: copy(path, saved), 7: lambda: leave(ward, name), 11: die})
    with pytest.raises(Killed):
        ward.trainer(corpus=corpus, ledger=path, bounds=None, progress=act).fit()
    put(path, saved)
    with raises_code("ledger.older-than-kept"):
        ward.trainer(corpus=ward.admit(), ledger=path, bounds=None).fit()


def test_a_run_restores_its_own_epochs(tmp_path: Path) -> None:
    path, saved = tmp_path / "tests.ledger.db", tmp_path / "saved"
    act = During({7: lambda: copy(path, saved), 18: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=act, bounds=LOOSE).fit()
    put(path, saved)
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "b", bounds=LOOSE).fit()
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    assert outcome.total == outcome.epsilon
    assert verify(path, signatures=False).problem is None
    problem.trainer(tmp_path / "b", bounds=LOOSE).fit()  # nothing is missing any more


# ---------------------------------------------------------------------------------------- a second admission


def test_a_run_that_restores_its_epochs_does_not_hide_what_another_one_holds(tmp_path: Path) -> None:
    """The older copy lacks epochs of one run, which its journal has, and an open charge of another, which it has not."""
    path, saved = tmp_path / "tests.ledger.db", tmp_path / "saved"
    loose = {name: 2 * most for name, most in LOOSE.items()}
    for name in ("a", "b"):
        with pytest.raises(Killed):
            problem.trainer(tmp_path / name, progress=During(segments={5: die}), bounds=loose).fit()
    copy(path, saved)
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During(segments={10: die}), bounds=loose).fit()
    with pytest.raises(Killed):  # charged for a segment, whose steps were taken and are in no leaf
        problem.trainer(tmp_path / "b", progress=During({8: die}), bounds=loose).fit()
    newer = tmp_path / "newer"
    copy(path, newer)
    put(path, saved)
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "a", bounds=loose).fit()
    put(path, newer)
    problem.trainer(tmp_path / "a", bounds=loose).fit()
    assert len(verify(path, signatures=False).held) == 1


def test_nobody_is_admitted_twice_by_deleting_index_rows(ward: hospital.Hospital) -> None:
    """As in a large ledger, whose leaves are in the index of the store."""
    path = ward.root / "l.db"
    ward.admit(ledger=path)
    db = apsw.Connection(str(path))
    db.execute("UPDATE head SET indexed = size")  # and `known` is left empty
    db.close()
    with Ledger.open(path) as ledger:
        before = ledger.size
        ward.admit(ledger=path)
        assert ledger.size == before


# ---------------------------------------------------------------------------------------- honest writers beside each other


def test_a_view_from_before_another_writer_is_not_taken_for_a_rollback(tmp_path: Path) -> None:
    """A view is opened, another process charges and keeps that beside the key, then the view is compared with it."""
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({3: die}), bounds=LOOSE).fit()
    path, key = tmp_path / "tests.ledger.db", PrivateKey.load(tmp_path / "tests.ledger.pem", None)
    with Ledger.open(path, key) as slow, slow.store.read() as rows:
        assert rows.head() is not None  # the view begins here
        problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
        head = slow.check_open(rows)
        assert head is not None and head.size < verify(path, signatures=False).size


# ---------------------------------------------------------------------------------------- the same in PostgreSQL


ROWS = ("held", "terms", "run", "meta", "attempt")


@pytest.fixture
def at_server(server: postgres.Server, tmp_path: Path) -> dict[str, Any]:
    """Options of trainers whose ledger is in a database of its own, with a key from a file."""
    PrivateKey.generate().save(tmp_path / "ledger.pem", None)
    where = f"{server.database(f'hidden_{os.getpid()}')}#ward"
    return {
        "ledger": where,
        "key": PrivateKey.load(tmp_path / "ledger.pem", None),
        "governing": GOVERNING,
        "bounds": LOOSE,
    }


def in_ward(options: dict[str, Any]) -> psycopg.Connection:
    db = psycopg.connect(options["ledger"].partition("#")[0], autocommit=True)
    db.execute("SET search_path TO ward")
    return db


@pytest.mark.parametrize(
    "hide",
    [
        "DELETE FROM held WHERE segment >= 0",
        "DELETE FROM held WHERE segment < 0",
        "UPDATE held SET leaf = 1",
        "DELETE FROM terms",
        "UPDATE run SET finished = 1",
        "DELETE FROM meta WHERE name = 'open'",
        "UPDATE leaf SET kind = 2 WHERE kind = 3",
        "DELETE FROM attempt",
    ],
)
def test_rows_that_were_changed_on_a_server_are_refused(tmp_path: Path, at_server: dict[str, Any], hide: str) -> None:
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({8: die}), **at_server).fit()
    with in_ward(at_server) as db:
        before = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in ROWS if f" {name}" in hide}
        kinds = db.execute("SELECT kind, seq FROM leaf").fetchall()
        assert db.execute(hide).rowcount
        for name in ("a", "b"):
            with raises_code(
                "ledger.open-rows-differ", "ledger.open-rows-replayed", "ledger.kind-index-differs",
                "ledger.attempt-index-differs",
            ):  # fmt: skip
                problem.trainer(tmp_path / name, **at_server).fit()
        for name, rows in before.items():
            db.execute(f"DELETE FROM {name}")
            for row in rows:
                db.execute(f"INSERT INTO {name} VALUES ({', '.join(['%s'] * len(row))})", row)
        db.cursor().executemany("UPDATE leaf SET kind = %s WHERE seq = %s", kinds)
    problem.trainer(tmp_path / "a", **at_server).fit()
    assert verify(at_server["ledger"], signatures=False).problem is None


def accept(options: dict[str, Any]) -> None:
    with Ledger.open(options["ledger"], options["key"]) as ledger:
        ledger.accept()


def test_an_older_copy_of_a_database_is_refused(
    tmp_path: Path, at_server: dict[str, Any], server: postgres.Server
) -> None:
    """A whole database is restored from its backup while an attempt of another run is open, and between two runs."""
    name, backup, plan = f"hidden_{os.getpid()}", f"backup_{os.getpid()}", problem.plan(problem.net(), 4)

    def copied(source: str, to: str) -> None:
        with psycopg.connect(server.url(), autocommit=True) as db:
            db.execute(f"DROP DATABASE IF EXISTS {to} WITH (FORCE)")
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [source])
            db.execute(f"CREATE DATABASE {to} TEMPLATE {source}")

    problem.trainer(tmp_path / "a", plan=plan, **at_server).fit()
    copied(name, backup)
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "b", plan=plan, progress=During({2: die}), **at_server).fit()
    copied(backup, name)
    with raises_code("ledger.open-rows-replayed", "ledger.older-than-kept"):
        problem.trainer(tmp_path / "c", plan=plan, **at_server).fit()
    with raises_code("ledger.open-rows-replayed"):  # no signed leaf is missing, only open charges: its keeper decides
        problem.trainer(tmp_path / "b", plan=plan, **at_server).fit()
    accept(at_server)
    problem.trainer(tmp_path / "b", plan=plan, **at_server).fit()  # its journal says what is missing
    assert verify(at_server["ledger"], signatures=False).counts["epoch"] == 2
    copied(backup, name)
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "c", plan=plan, **at_server).fit()
    problem.trainer(tmp_path / "b", plan=plan, **at_server).fit()  # enters its start, epoch and end again
    problem.trainer(tmp_path / "c", plan=plan, **at_server).fit()
    assert verify(at_server["ledger"], signatures=False).counts["epoch"] == 3
    copied(backup, name)
    for folder in ("b", "c", "d"):  # none of them has all that is missing
        with raises_code("ledger.older-than-kept"):
            problem.trainer(tmp_path / folder, plan=plan, **at_server).fit()
    accept(at_server)
    problem.trainer(tmp_path / "d", plan=plan, **at_server).fit()
    assert verify(at_server["ledger"], signatures=False).problem is None
