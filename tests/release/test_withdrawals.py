"""A gate that follows the ledger of its release: fresh withdrawals, and ledgers that are not what was signed."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from keyless import WITHDRAWAL, deleted, rows_of
from refusals import raises_code
from trained_run import Trained

from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.governance_records import WithdrawalReason
from lamina.ledger.reader import LedgerReader
from lamina.ledger.withdrawal import withdraw
from lamina.ledger.writer import Ledger
from lamina.release.decision_log import DecisionLog, read_log
from lamina.release.gate import REFRESH_SECONDS, ReleaseGate
from lamina.release.maker import make_release
from lamina.release.posture import WithdrawalCounter
from lamina.release.query import GatePolicy, Query, Rights
from lamina.sign.keys import PrivateKey, format_utc

CLASSES = ("open", "clinical", "sensitive")


def rights(**changes: bool) -> Query:
    return Query(
        rights=Rights(classes=frozenset(CLASSES), max_epsilon=9.0, min_noise_multiplier=0.0, purpose="care", **changes)
    )


def take_back(ward: Trained, cls: str) -> None:
    with ward.open() as ledger:
        withdraw(ledger, str(ward.someone(cls)), WithdrawalReason.REQUEST)


def test_a_fresh_withdrawal_is_heeded_within_a_second(ward: Trained, served: Path, key: PrivateKey) -> None:
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader)
        assert gate.decide(rights()).allowed
        take_back(ward, "sensitive")
        assert REFRESH_SECONDS <= 0.25
        until = time.monotonic() + 10.0  # on a busy machine; an idle one needs REFRESH_SECONDS
        while (found := gate.decide(rights())).allowed and time.monotonic() < until:
            time.sleep(0.02)
        assert [(each.code, each.cls) for each in found.reasons] == [("withdrawn", "sensitive")]
        assert gate.decide(rights(accept_withdrawn=True)).allowed
        assert gate.decide(Query(rights=rights().rights, layers=("0",))).allowed  # which the class did not reach


def test_without_the_ledger_only_the_manifest_counts(ward: Trained, served: Path, key: PrivateKey) -> None:
    take_back(ward, "clinical")
    assert ReleaseGate(served, key.public).decide(rights()).allowed


def test_a_release_after_a_withdrawal_states_it(ward: Trained, key: PrivateKey, tmp_path: Path) -> None:
    take_back(ward, "clinical")
    with ward.open() as ledger:
        make_release(tmp_path / "later", [ward.folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
    gate = ReleaseGate(tmp_path / "later", key.public)
    assert gate.manifest.posture.withdrawn == {"open": 0, "clinical": 1, "sensitive": 0}
    assert {each.code for each in gate.decide(rights()).reasons} == {"withdrawn"}


def test_a_withdrawal_that_somebody_hides_in_the_store_denies(ward: Trained, served: Path, key: PrivateKey) -> None:
    """The leaf is changed into another kind, or its hash: then nothing is allowed at all."""
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=Watch())
        take_back(ward, "clinical")
        take_back(ward, "sensitive")
        with closing(sqlite3.connect(ward.ledger)) as db:
            seq, data = db.execute("SELECT seq, data FROM leaf ORDER BY seq DESC LIMIT 1 OFFSET 1").fetchone()
            db.execute("UPDATE leaf SET data = ? WHERE seq = ?", (data[:-1] + bytes([data[-1] ^ 1]), seq))
            db.commit()
        assert {each.code for each in gate.decide(rights()).reasons} == {"ledger-not-verified"}
        with raises_code("release.not-verified"):  # nor is it served by a gate that starts now
            ReleaseGate(served, key.public, ledger=reader)


def test_a_withdrawn_contribution_that_somebody_changes_in_the_store_denies(
    ward: Trained, served: Path, key: PrivateKey
) -> None:
    """The class of a withdrawal stands in the leaf of the contribution, which lies before the release."""
    sql = "UPDATE leaf SET (data, body) = (SELECT data, body FROM leaf WHERE seq = 0) WHERE seq = ?"
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=Watch())
        take_back(ward, "clinical")
        with closing(sqlite3.connect(ward.ledger)) as db:
            db.execute(sql, (ward.someone("clinical"),))
            db.commit()
        assert {each.code for each in gate.decide(rights()).reasons} == {"ledger-forked"}


def test_a_clock_that_is_set_back_hides_no_withdrawal(ward: Trained, served: Path, key: PrivateKey) -> None:
    now = [time.time()]
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=lambda: now[0])
        assert gate.decide(rights()).allowed
        take_back(ward, "sensitive")
        now[0] -= 3600  # before the last leaf: nobody can tell how old the ledger is
        assert {each.code for each in gate.decide(rights()).reasons} == {"withdrawn", "stale"}


def test_a_withdrawal_that_was_seen_is_not_forgotten(ward: Trained, served: Path, key: PrivateKey) -> None:
    """It is in the ledger, not signed yet; then somebody puts the ledger of before back."""
    before, now = ward.ledger.read_bytes(), [time.time()]
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=lambda: now[0])
        with Ledger.open(ward.ledger) as ledger:  # without its key
            withdraw(ledger, str(ward.someone("sensitive")), WithdrawalReason.REQUEST)
        now[0] += 1
        assert {each.code for each in gate.decide(rights()).reasons} == {"withdrawn"}
        now[0] += 1
        ward.ledger.write_bytes(before)
        for end in ("-wal", "-shm"):
            Path(f"{ward.ledger}{end}").unlink(missing_ok=True)
        assert {each.code for each in gate.decide(rights()).reasons} == {"withdrawn"}  # no signed leaf is missing


def test_a_ledger_of_another_corpus_is_refused(served: Path, trained: Trained, key: PrivateKey) -> None:
    with LedgerReader.read_only(trained.ledger) as other, raises_code("release.not-verified"):
        ReleaseGate(served, key.public, ledger=other)


def test_a_ledger_from_before_the_release_is_refused(ward: Trained, served: Path, key: PrivateKey) -> None:
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=Watch())
        with closing(sqlite3.connect(ward.ledger)) as db:
            db.execute("DELETE FROM checkpoint WHERE size > 60")
            db.commit()
        assert {each.code for each in gate.decide(rights()).reasons} == {"ledger-shorter"}


# ------------------------------------------------------------------------------ a ledger that is not what it was


def codes(gate: ReleaseGate, **changes: bool) -> set[str]:
    return {each.code for each in gate.decide(rights(**changes)).reasons}


class Watch:
    """A clock that a test sets. The gate looks at the ledger again after a second."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


def test_a_withdrawal_that_somebody_deletes_under_a_running_gate_is_missed(
    ward: Trained, served: Path, key: PrivateKey
) -> None:
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=Watch())
        assert gate.decide(rights()).allowed
        take_back(ward, "sensitive")
        assert len(rows_of(str(ward.ledger), f"{deleted(str(ward.ledger), WITHDRAWAL)} RETURNING seq")) == 1
        assert not gate.decide(rights()).allowed


def test_a_release_that_hides_a_withdrawal_is_not_served(
    ward: Trained, key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest states that nobody withdrew, with the release key, and the leaves say otherwise."""
    take_back(ward, "sensitive")
    monkeypatch.setattr(WithdrawalCounter, "see", lambda self, leaf: None)
    with ward.open() as ledger:
        make_release(tmp_path / "blind", [ward.folder], ledger, key, gate=GatePolicy(unstated_purposes=True))
    monkeypatch.undo()
    with LedgerReader.read_only(ward.ledger) as reader, raises_code("release.not-verified"):
        ReleaseGate(tmp_path / "blind", key.public, ledger=reader)


def test_a_ledger_that_is_moved_or_restored_under_a_running_gate_is_noticed(
    ward: Trained, served: Path, key: PrivateKey, tmp_path: Path
) -> None:
    backup, newest = tmp_path / "backup.db", tmp_path / "newest.db"
    log_key = PrivateKey.generate()
    with LedgerReader.read_only(ward.ledger) as reader:
        reader.store.copy(backup)  # type: ignore[attr-defined]
        gate = ReleaseGate(served, key.public, ledger=reader, clock=Watch())
        log = DecisionLog(tmp_path / "log.jsonl", log_key, gate.manifest)
        assert gate.decide(rights()).allowed
        take_back(ward, "sensitive")
        reader.store.copy(newest)  # type: ignore[attr-defined]
        assert codes(gate) == {"withdrawn"}
        os.rename(ward.ledger, tmp_path / "away.db")  # the connection still reads this file
        assert codes(gate) == {"withdrawn", "ledger-unreachable"}
        assert codes(gate, accept_withdrawn=True) == {"ledger-unreachable"}
        for end in ("-wal", "-shm"):
            Path(f"{ward.ledger}{end}").unlink(missing_ok=True)
        os.rename(backup, ward.ledger)
        assert codes(gate, accept_withdrawn=True) == {"ledger-shorter"}
        os.replace(newest, ward.ledger)
        with ward.open() as ledger:
            withdraw(ledger, str(ward.someone("clinical")), WithdrawalReason.REQUEST)
            last = int(ledger.leaf(ledger.size - 1).time)
        found = gate.decide(rights())
        assert {(each.code, each.cls) for each in found.reasons} == {
            ("withdrawn", "sensitive"),
            ("withdrawn", "clinical"),
        }
        log.record(rights(), found)
        log.close()
    (stated,) = [each for _, each in read_log(tmp_path / "log.jsonl", log_key.public)]
    assert stated["predicate"]["lamina"]["withdrawals_as_of"] == format_utc(last)  # signed, and not the gate's clock


def test_a_ledger_that_nobody_renews_becomes_stale_and_a_heartbeat_makes_it_fresh(
    ward: Trained, served: Path, key: PrivateKey
) -> None:
    watch = Watch()
    begin, day = watch.now, 86_400
    with LedgerReader.read_only(ward.ledger) as reader:
        gate = ReleaseGate(served, key.public, ledger=reader, clock=watch)
        watch.now = begin + 6.9 * day
        assert gate.decide(rights()).allowed
        watch.now = begin + 7.1 * day
        assert codes(gate) == {"stale"}
        watch.now = begin + 300 * day
        assert codes(gate) == {"stale"}
        own = PrivateKey.load(ledger_key_path(ward.ledger), None)
        with Ledger.open(ward.ledger, own, clock=lambda: watch.now) as ledger:
            size, (_, signed) = ledger.size, ledger.heartbeat()
            assert ledger.size == size
        found = gate.decide(rights())
        assert found.allowed and found.as_of == signed
        watch.now = begin + 299 * day  # a clock that is behind the heartbeat
        assert codes(gate) == {"stale"}
