"""An attacker with write access to a ledger's store, but no key, hides rows before an honest run and restores them after it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import cbor2
import hospital
import open_charges
import postgres
import problem
import psycopg
import pytest
from keyless import EPOCH, WITHDRAWAL, deleted, edit, put_back, replaced, rows_of, tables_of
from making import GOVERNING
from refusals import raises_code
from stopping import LOOSE, During, Killed, complete, die, lose_ledger

from lamina.cli.app import app
from lamina.cli.open_ledger import open_ledger, read_spend
from lamina.errors import BudgetExceeded, LaminaError
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.verify.verifier import verify
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.run.admitted import AdmittedCorpus
from lamina.run.completion import complete_ledger
from lamina.sign.keys import PrivateKey

NAMED = ("ledger.leaf-not-allowed", "ledger.leaf-missing")  # a leaf that was replaced, or deleted


Hide = Callable[[str, int], str]


@contextmanager
def changed(where: str, *statements: str) -> Iterator[None]:
    """Change the store with SQL, and restore the changed rows afterwards unless they were written meanwhile."""
    before = tables_of(where, "attempt", *open_charges.TABLES, "token")
    leaves = rows_of(where, "SELECT data, body, seq FROM leaf")
    edit(where, *statements)
    yield
    now = {seq: row for *row, seq in rows_of(where, "SELECT data, body, seq FROM leaf")}
    for *row, seq in leaves:
        if seq not in now:
            rows_of(where, "INSERT INTO leaf (data, body, seq) VALUES (?, ?, ?)", *row, seq)
        elif now[seq] != row:
            rows_of(where, "UPDATE leaf SET data = ?, body = ? WHERE seq = ?", *row, seq)
    put_back(where, before)


def options_of(where: str, folder: Path) -> dict[str, Any]:
    """Options of trainers with a ledger, whose key is in a file."""
    (folder / "keys").mkdir()
    PrivateKey.generate().save(folder / "keys" / "ledger.pem", None)
    key = PrivateKey.load(folder / "keys" / "ledger.pem", None)
    return {"ledger": where, "ledger_key": key, "governing_key": GOVERNING}


@pytest.fixture
def options(where: str, tmp_path: Path) -> dict[str, Any]:
    """In each kind of store."""
    return options_of(where, tmp_path)


# ---------------------------------------------------------------------------------------- a withdrawal that is hidden


@pytest.fixture
def ward(tmp_path: Path) -> hospital.Hospital:
    return hospital.usual(tmp_path / "h", real=True)


def opened(ward: hospital.Hospital, options: dict[str, Any]) -> Ledger:
    return open_or_create(
        options["ledger"], CorpusTerms.of_policy(ward.policy), options["ledger_key"], governing=options["governing_key"]
    )


def admit(ward: hospital.Hospital, options: dict[str, Any]) -> AdmittedCorpus:
    with opened(ward, options) as ledger:
        return ward.admit(ledger=ledger)


def train(ward: hospital.Hospital, name: str, corpus: AdmittedCorpus, **options: Any) -> AdmittedCorpus:
    """Run to the end; the corpus, without those who were left out."""
    ward.trainer(name, corpus=corpus, bounds=None, **options).fit()
    return corpus


def withdrawn_one(ward: hospital.Hospital, options: dict[str, Any]) -> int:
    """Withdraw one of 57 contributions; the leaf of the withdrawal."""
    return leave(ward, options, admit(ward, options).digests[20])


def leave(ward: hospital.Hospital, options: dict[str, Any], name: str) -> int:
    """Withdraw a contribution, under a checkpoint; the leaf."""
    with opened(ward, options) as ledger:
        (done,) = withdraw(ledger, name, WithdrawalReason.CONSENT)
        return done.leaf.seq


@pytest.mark.parametrize("hide", [replaced, deleted])
def test_a_hidden_withdrawal_is_named(ward: hospital.Hospital, options: dict[str, Any], hide: Hide) -> None:
    seq, where = withdrawn_one(ward, options), options["ledger"]
    leave(ward, options, admit(ward, options).digests[30])
    corpus = admit(ward, options)
    assert len(corpus) == 55
    outside = ward.admit()  # by their signatures alone: the ledger decides when the run begins
    assert len(outside) == 57
    with changed(where, hide(where, WITHDRAWAL) + f" AND seq = {seq}"):
        asked: list[Callable[[], Any]] = [
            lambda: admit(ward, options),
            lambda: train(ward, "a", outside, **options),
            lambda: train(ward, "b", corpus, **options),
        ]
        for ask in asked:
            with pytest.raises(LaminaError) as refused:
                ask()
            assert refused.value.code in NAMED
            assert f"leaf {seq} " in refused.value.problem
    assert len(train(ward, "c", ward.admit(), **options)) == 55
    assert verify(where).problem is None


def test_a_withdrawal_that_is_hidden_during_a_run_is_found(ward: hospital.Hospital, options: dict[str, Any]) -> None:
    corpus = admit(ward, options)
    name = corpus.digests[20]

    def hide() -> None:
        leave(ward, options, name)
        edit(options["ledger"], replaced(options["ledger"], WITHDRAWAL))

    with raises_code(*NAMED):
        train(ward, "a", corpus, progress=During({5: hide}), **options)


def test_a_resumed_run_finds_a_hidden_withdrawal(ward: hospital.Hospital, options: dict[str, Any]) -> None:
    withdrawn_one(ward, options)
    corpus = admit(ward, options)
    with pytest.raises(Killed):
        train(ward, "a", corpus, progress=During({5: die}), **options)
    hide = replaced(options["ledger"], WITHDRAWAL)
    with changed(options["ledger"], hide), raises_code(*NAMED):
        train(ward, "a", corpus, **options)
    train(ward, "a", admit(ward, options), **options)


# ---------------------------------------------------------------------------------------- charges that are hidden


@pytest.mark.parametrize("what", ["all", "replaced", "deleted", "attempt"])
def test_hidden_epochs_are_named(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    where = options["ledger"]
    hide = {
        "all": (replaced(where, EPOCH), "DELETE FROM attempt", open_charges.DELETE_ALL),
        "replaced": (replaced(where, EPOCH),), "deleted": (deleted(where, EPOCH),), "attempt": ("DELETE FROM attempt",),
    }[what]  # fmt: skip
    problem.trainer(tmp_path / "a", **options).fit()
    with pytest.raises(BudgetExceeded):
        problem.trainer(tmp_path / "b", **options).fit()
    codes = [*NAMED]
    if what == "attempt":  # the run is refused for what the leaves say
        codes = ["ledger.attempt-index-differs", "spend.budget-exceeded"]
    with changed(where, *hide):
        for ask in (lambda: problem.trainer(tmp_path / "b", **options).fit(), lambda: total(where)):
            with raises_code(*codes):
                ask()
    assert not list(tmp_path.glob("b/checkpoint/*"))
    with pytest.raises(BudgetExceeded):
        problem.trainer(tmp_path / "b", **options).fit()
    assert verify(where, signatures=False).problem is None


def total(where: str) -> float:
    with read_spend(where) as book:
        book.recorded("0" * 32, 0, 0)
        return book.total("clinical", delta=1e-5).spent


def change_head(where: str) -> None:
    head = open_charges.read_head(where)
    assert head is not None
    open_charges.write_head(where, head[:143] + b"\0")


def shorten_head(where: str) -> None:
    open_charges.write_head(where, b"\0")


OPEN_ROWS: dict[str, tuple[str | Callable[[str], None], ...]] = {
    "attempts": (open_charges.DELETE_ATTEMPTS,),
    "reservations": (open_charges.DELETE_RESERVATIONS,),
    "recorded": (open_charges.CLOSE_ALL,),
    "limits": (open_charges.DELETE_LIMITS,),
    "runs": (open_charges.FINISH_RUNS,),
    "added": (open_charges.COPY_ALL,),
    "text": (open_charges.change_charged_steps,),
    "head": (change_head,),
    "short": (shorten_head,),
    "no head": (open_charges.DELETE_ALL, open_charges.DELETE_HEAD),
}


@pytest.mark.parametrize("what", OPEN_ROWS)
def test_open_rows_that_were_changed_are_refused(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    where = options["ledger"]
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({8: die}), **options).fit()
    with changed(where):
        for change in OPEN_ROWS[what]:
            edit(where, change) if isinstance(change, str) else change(where)
        for name in ("a", "b"):
            with raises_code("ledger.open-rows-differ", "ledger.open-rows-replayed"):
                problem.trainer(tmp_path / name, **options).fit()
        if what != "no head":  # nobody without the file beside the key can know that there was one
            with raises_code("ledger.open-rows-differ"):
                total(where)
            found = verify(where, signatures=False).problem
            assert found is not None and found.code == "verify.open-rows-differ"
    problem.trainer(tmp_path / "a", **options).fit()
    assert verify(where, signatures=False).problem is None


def test_open_rows_of_another_type_are_refused(tmp_path: Path) -> None:
    """SQLite keeps numbers and texts in columns of bytes."""
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({8: die})).fit()
    where = str(tmp_path / "tests.ledger.db")
    with changed(where, open_charges.BODY_AS_TEXT):
        with raises_code("store.row-wrong-type"):
            total(where)
        found = verify(where, signatures=False).problem
        assert found is not None and found.code == "verify.row-wrong-type"


def test_open_rows_of_an_earlier_moment_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """Rows are restored together with their signed head. Where no epoch or start of a run follows, only the file beside
    the key reveals it."""
    where, kept = options["ledger"], dict[str, Any]()

    def accept() -> None:
        with Ledger.open(where, options["ledger_key"]) as ledger:
            ledger.accept()

    save = During({3: lambda: kept.update(tables_of(where, *open_charges.TABLES)), 4: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=save, bounds=LOOSE, **options).fit()
    with Ledger.open(where, options["ledger_key"]) as ledger:
        SpendLedger(ledger).finish(next(iter(SpendLedger(ledger).labels())))
    put_back(where, kept)
    with raises_code("ledger.open-rows-replayed"):
        problem.trainer(tmp_path / "b", bounds=LOOSE, **options).fit()
    accept()
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "b", progress=During({4: die}), bounds=LOOSE, **options).fit()
    put_back(where, kept)
    next(tmp_path.glob("keys/*.seen")).unlink()
    with raises_code("ledger.open-rows-differ"):  # the start of the other run follows
        problem.trainer(tmp_path / "b", bounds=LOOSE, **options).fit()
    accept()


def test_a_head_from_before_an_epoch_is_refused_without_the_file(tmp_path: Path, options: dict[str, Any]) -> None:
    where, kept = options["ledger"], dict[str, Any]()
    save = During({3: lambda: kept.update(tables_of(where, *open_charges.TABLES)), 8: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=save, **options).fit()
    put_back(where, kept)
    next(tmp_path.glob("keys/*.seen")).unlink()
    with raises_code("ledger.open-rows-differ"):
        problem.trainer(tmp_path / "b", **options).fit()
    found = verify(where, signatures=False).problem
    assert found is not None and found.code == "verify.open-rows-differ" and "leaf 2 records an epoch" in found.reason
    with Ledger.open(where, options["ledger_key"]) as ledger:
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
    with raises_code("ledger.older-than-kept"):
        complete(path, tmp_path / "a")
    assert complete(path, tmp_path / "b") == 3  # start, epoch, end
    problem.trainer(tmp_path / "b", plan=plan, bounds=LOOSE).fit()
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


def test_a_lost_withdrawal_is_not_what_a_run_restores(ward: hospital.Hospital, tmp_path: Path) -> None:
    path, saved = tmp_path / "l.db", tmp_path / "saved"
    options = options_of(str(path), tmp_path)
    corpus = admit(ward, options)
    name = corpus.digests[20]
    act = During({4: lambda: copy(path, saved), 7: lambda: leave(ward, options, name), 11: die})
    with pytest.raises(Killed):
        train(ward, "a", corpus, progress=act, **options)
    put(path, saved)
    with raises_code("ledger.older-than-kept"):
        train(ward, "a", ward.admit(), **options)


def test_receipts_of_a_run_restore_its_epochs(tmp_path: Path) -> None:
    path, saved = tmp_path / "tests.ledger.db", tmp_path / "saved"
    act = During({7: lambda: copy(path, saved), 18: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=act, bounds=LOOSE).fit()
    put(path, saved)
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "b", bounds=LOOSE).fit()
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    complete(path, tmp_path / "a")
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    assert outcome.total == outcome.epsilon
    assert verify(path, signatures=False).problem is None
    problem.trainer(tmp_path / "b", bounds=LOOSE).fit()  # nothing is missing any more


def frames(path: Path) -> list[dict[Any, Any]]:
    """Return the receipts of a run, read without the code that writes them."""
    data, found = path.read_bytes(), []
    while data:
        end = 36 + int.from_bytes(data[:4], "big")
        found.append(cbor2.loads(data[36:end]))
        data = data[end:]
    return found


def write_frames(path: Path, entries: list[dict[Any, Any]]) -> None:
    bodies = [cbor2.dumps(each, canonical=True) for each in entries]
    path.write_bytes(b"".join(len(b).to_bytes(4, "big") + hashlib.sha256(b).digest() + b for b in bodies))


@pytest.mark.parametrize(
    "how", ["cheaper", "another attempt", "unsigned", "of another run", "another start", "signed by another"]
)
def test_forged_receipts_are_not_entered(tmp_path: Path, how: str) -> None:
    """Who may write the files of a run and of its ledger, but has no key, puts both back and edits the receipts."""
    path, saved = tmp_path / "tests.ledger.db", tmp_path / "saved"
    act = During({7: lambda: copy(path, saved), 18: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "b", progress=During({11: die}), bounds=LOOSE).fit()
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=act, bounds=LOOSE).fit()
    put(path, saved)
    receipts = tmp_path / "a" / "receipts"
    honest = receipts.read_bytes()
    entries = frames(receipts)
    at = max(i for i, each in enumerate(entries) if "attempt" in each)
    last = entries[at]["attempt"]
    match how:
        case "cheaper":
            assert last["charges"]
            last["charges"] = []
        case "another attempt":
            last["nonce"] = bytes(range(16))
        case "unsigned":
            del entries[at]["key"], entries[at]["signature"]
        case "of another run":
            entries[at] = next(each for each in frames(tmp_path / "b" / "receipts") if "attempt" in each)
        case "another start":
            (begin,) = (each for each in entries if "begin" in each)
            other = next(each for each in frames(tmp_path / "b" / "receipts") if "begin" in each)
            begin["begin"] = other["begin"]
        case "signed by another":
            stranger = PrivateKey.generate()
            record = cbor2.dumps({"attempt": last}, canonical=True)
            run = cbor2.loads((tmp_path / "a" / "run.cbor").read_bytes())["run"]
            text = f"lamina/run-receipt/1\ntests\n{run}\n".encode() + record
            entries[at] |= {"key": stranger.public.id, "signature": stranger.sign(text)}
    write_frames(receipts, entries)
    size = len(rows_of(str(path), "SELECT seq FROM leaf"))
    with raises_code("train.receipt-not-signed"):
        complete(path, tmp_path / "a")
    assert len(rows_of(str(path), "SELECT seq FROM leaf")) == size
    receipts.write_bytes(honest)
    write_frames(receipts, frames(receipts))
    assert receipts.read_bytes() == honest  # the frames of this test are those of the program
    complete(path, tmp_path / "a")
    problem.trainer(tmp_path / "a", bounds=LOOSE).fit()
    assert verify(path, signatures=False).problem is None


def test_a_record_of_another_run_is_not_entered_into_a_new_ledger(tmp_path: Path) -> None:
    """Nothing vouches for receipts of a ledger that was lost with its key; they may be about their own run alone."""
    for name in ("a", "b"):
        problem.trainer(tmp_path / name, bounds=LOOSE).fit()
    lose_ledger(tmp_path)
    with raises_code("train.ledger-differs"):
        problem.trainer(tmp_path / "a", bounds=LOOSE, ledger=tmp_path / "tests.ledger.db").fit()
    receipts, other = tmp_path / "a" / "receipts", frames(tmp_path / "b" / "receipts")
    honest = frames(receipts)
    write_frames(receipts, [*honest, *(each for each in other if "end" in each)])
    with raises_code("train.receipt-of-other-run"):
        complete(tmp_path / "tests.ledger.db", tmp_path / "a")
    write_frames(receipts, honest)
    complete(tmp_path / "tests.ledger.db", tmp_path / "a")
    assert len(frames(receipts)) == 2 * len(honest)  # signed by the key of the new ledger, too
    problem.trainer(tmp_path / "a", bounds=LOOSE).fit()


# ---------------------------------------------------------------------------------------- a second admission


def test_receipts_that_restore_epochs_do_not_hide_what_another_one_holds(tmp_path: Path) -> None:
    """The older copy lacks epochs of one run, which its receipts have, and an open charge of another, which it has not."""
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
        complete(path, tmp_path / "a")
    put(path, newer)
    problem.trainer(tmp_path / "a", bounds=loose).fit()
    assert len(verify(path, signatures=False).held) == 1


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


@pytest.fixture
def at_server(server: postgres.Server, tmp_path: Path) -> dict[str, Any]:
    """In a database of its own."""
    return options_of(f"{server.database(f'hidden_{os.getpid()}')}#ward", tmp_path) | {"bounds": LOOSE}


def accept(options: dict[str, Any]) -> None:
    with Ledger.open(options["ledger"], options["ledger_key"]) as ledger:
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
    problem.trainer(tmp_path / "b", plan=plan, **at_server).fit()  # it has the seed of what was open
    assert verify(at_server["ledger"], signatures=False).counts["epoch"] == 2
    copied(backup, name)
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "c", plan=plan, **at_server).fit()
    with raises_code("ledger.older-than-kept"):
        problem.trainer(tmp_path / "b", plan=plan, **at_server).fit()
    with Ledger.open(at_server["ledger"], at_server["ledger_key"]) as ledger:
        assert complete_ledger(ledger, [tmp_path / "b"]) == 3  # start, epoch and end
    problem.trainer(tmp_path / "b", plan=plan, **at_server).fit()
    problem.trainer(tmp_path / "c", plan=plan, **at_server).fit()
    assert verify(at_server["ledger"], signatures=False).counts["epoch"] == 3
    copied(backup, name)
    for folder in ("b", "c", "d"):  # none of them has all that is missing
        with raises_code("ledger.older-than-kept"):
            problem.trainer(tmp_path / folder, plan=plan, **at_server).fit()
    accept(at_server)
    problem.trainer(tmp_path / "d", plan=plan, **at_server).fit()
    assert verify(at_server["ledger"], signatures=False).problem is None
