"""Ledgers that somebody changed who shares no code with the writer: what is gone, beside the leaves, or too much."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from build import HOUR, YEAR, build
from hand_ledger import AGGREGATE, CONTRIBUTION, EPOCH, HandLedger
from making import GOVERNING, LEDGER, ORIGIN, START, admitted, create, digest, reopen
from open_charges import DELETE_HEAD, TABLES, insert_row
from refusals import raises_code

from lamina.errors import LedgerError
from lamina.ledger.verify.tree_checks import Finding, Trust
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.sign.notes import NoteKey

MINE = Trust(notes=(NoteKey(ORIGIN, LEDGER.public),), plain=(GOVERNING.public,))
SEED = digest("key", "ledger")
RELEASE = 8
OLD = range(4, 41)  # contributions that expired long before the last leaf


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of 55 leaves, of which nothing is pruned."""
    path = tmp_path_factory.mktemp("honest") / "ledger.db"
    build(str(path), prune=False).ledger.close()
    return path


@pytest.fixture
def path(honest: Path, tmp_path: Path) -> str:
    return str(shutil.copy(honest, tmp_path / "ledger.db"))


def changed(path: str, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


def problem(path: str, **options: Any) -> Finding:
    found = verify(path, trust=MINE, **options)
    assert not found.trusted
    assert found.verdict == "not verified"
    assert found.problem is not None
    return found.problem


def totals(ledger: HandLedger, first: int, stop: int) -> list[tuple[str, int, int, int]]:
    """By class: contributions, of them withdrawn (leaf 9 is), and the most that any lost."""
    counts = Counter(ledger.kept(seq)[8] for seq in range(first, stop) if ledger.kept(seq)[1] == CONTRIBUTION)
    epochs = [seq for seq in range(len(ledger.rows)) if ledger.kept(seq)[1] == EPOCH]
    spent = Counter[str]()
    for account in (account for seq in epochs for account in ledger.body(seq)[5]):
        spent[account[1]] = max(spent[account[1]], account[6])
    return [(cls, n, int(first <= 9 < stop and cls == "clinical"), spent[cls]) for cls, n in sorted(counts.items())]


def test_what_is_only_written_again_verifies(path: str) -> None:
    """The oracle of what follows: an encoder, a tree and signatures of its own give the ledger that ours wrote."""
    HandLedger(path).write(SEED)
    assert verify(path, trust=MINE).verdict == "trusted"


# ------------------------------------------------------------------------------ bodies that are gone


def test_a_pruning_that_no_auditor_saw_is_self_consistent_and_not_trusted(path: str) -> None:
    ledger = HandLedger(path)
    ledger.append(AGGREGATE, ledger.aggregate(4, 41, START + HOUR, totals(ledger, 4, 41)))
    ledger.prune(*OLD)
    ledger.write(SEED)
    found = verify(path, trust=MINE)
    assert (found.problem, found.verified, found.trusted) == (None, True, False)
    assert found.verdict == found.to_dict()["verdict"] == "self-consistent"
    assert any("countersigned by nobody" in note for note in found.to_dict()["notes"])


def test_an_aggregate_does_not_hide_epochs(path: str) -> None:
    """Its span goes on over the epochs behind the contributions, whose bodies are gone: ε would be smaller."""
    ledger = HandLedger(path)
    classes = [("clinical", 34, 1, 0), ("open", 6, 0, 0)]
    ledger.append(AGGREGATE, ledger.aggregate(4, 44, START + HOUR, classes))
    ledger.prune(*OLD)
    ledger.write(SEED)
    assert problem(path).code == "verify.aggregate-count-differs"  # it counts epochs as contributions
    ledger.prune(41, 43)
    ledger.write(SEED)
    assert (problem(path).index, problem(path).code) == (41, "verify.body-missing")


@pytest.mark.parametrize("seq", [0, 1, 41, 42, 43, 44, 46, 53])
def test_no_other_record_lacks_a_body(path: str, seq: int) -> None:
    ledger = HandLedger(path)
    ledger.prune(seq)
    ledger.write(SEED)
    assert (problem(path).index, problem(path).code) == (seq, "verify.body-missing")


@pytest.mark.parametrize(
    ("span", "horizon", "code"),
    [
        (None, 0, "verify.body-missing"),  # no aggregate
        ((4, 20), START + HOUR, "verify.body-missing"),  # not of all that are gone
        ((4, 41), START, "verify.pruned-beyond-horizon"),
        ((4, 41), START + 3 * YEAR, "verify.pruned-before-retention"),
        ((47, 52), START + YEAR, "verify.pruned-before-expiry"),
    ],
)
def test_contributions_are_pruned_when_they_are_old_and_expired(
    path: str, span: tuple[int, int] | None, horizon: int, code: str
) -> None:
    ledger = HandLedger(path)
    if span is not None:
        ledger.append(AGGREGATE, ledger.aggregate(*span, horizon, totals(ledger, *span)))
    ledger.prune(*(OLD if span is None or span[0] == 4 else range(*span)))
    ledger.write(SEED)
    assert problem(path).code == code


def test_totals_are_counted_again_when_bodies_are_gone(path: str) -> None:
    ledger = HandLedger(path)
    clinical, free = totals(ledger, 4, 41)
    moved = [(clinical[0], clinical[1] + 1, *clinical[2:]), (free[0], free[1] - 1, *free[2:])]
    ledger.append(AGGREGATE, ledger.aggregate(4, 41, START + HOUR, moved))
    ledger.prune(*OLD)
    ledger.write(SEED)
    assert problem(path).code == "verify.aggregate-count-differs"


# ------------------------------------------------------------------------------ times


def test_a_leaf_is_not_of_the_verifiers_future(path: str) -> None:
    ledger = HandLedger(path)
    time = ledger.kept(len(ledger.rows) - 1)[3] + YEAR
    seq = ledger.append(RELEASE, {1: digest("manifest"), 2: []}, time)
    ledger.write(SEED)
    found = problem(path, now=time - 1000)
    assert (found.index, found.kind, found.code) == (seq, "release", "verify.time-in-future")
    assert verify(path, trust=MINE, now=time - 60).verdict == "trusted"  # clocks may differ a little
    assert problem(path, now=START - 1000).index == 0


# ------------------------------------------------------------------------------ tables of somebody else


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE more (x)"],
        ["CREATE INDEX more ON leaf (body)"],
        ["CREATE TABLE known (key BLOB PRIMARY KEY)"],
        ["CREATE VIEW more AS SELECT 1"],
        ["CREATE TRIGGER more AFTER INSERT ON leaf BEGIN DELETE FROM attempt; END"],
        ["ALTER TABLE run ADD COLUMN more INTEGER GENERATED ALWAYS AS (1)"],
        ["ALTER TABLE run ADD COLUMN more INTEGER"],
        [
            "DROP TABLE token",
            "CREATE VIEW token AS WITH RECURSIVE n (key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM n) SELECT key FROM n",
        ],
        ["DROP TABLE terms"],
        ["CREATE VIRTUAL TABLE more USING fts5 (x)"],
    ],
)  # fmt: skip
def test_a_file_with_other_tables_is_refused(path: str, statements: list[str]) -> None:
    changed(path, *statements)
    found = problem(path)
    assert (found.index, found.kind, found.code) == (None, "store", "verify.store-unreadable")
    for opened in (Ledger.open, Ledger.read_only):
        with raises_code("store.tables-differ"):
            opened(path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE more (x integer)",
        "CREATE INDEX more ON leaf (body)",
        "CREATE VIEW more AS SELECT 1 AS x",
        "ALTER TABLE run ADD COLUMN more INTEGER",
    ],
)
def test_a_store_with_other_tables_is_refused(where: str, statement: str) -> None:
    with create(where) as ledger:
        ledger.append([admitted(1)])
        with ledger.store.write() as rows:
            rows._db.rows(statement)  # type: ignore[attr-defined]
    with raises_code("store.tables-differ"):
        reopen(where)
    assert not verify(where).verified


# ------------------------------------------------------------------------------ too many bytes


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("INSERT INTO blob VALUES (zeroblob(32), zeroblob(70000000))", "table blob"),
        ("UPDATE leaf SET data = zeroblob(600) WHERE seq = 9", "row 9 of table leaf"),
        ("UPDATE leaf SET body = zeroblob(2000000) WHERE seq = 9", "row 9 of table leaf"),
        ("UPDATE evidence SET data = zeroblob(2000000) WHERE seq = 9", "row 9 of table evidence"),
        ("UPDATE tile SET data = zeroblob(8193)", "table tile"),
        ("UPDATE checkpoint SET text = printf('%*c', 300000, 'x') WHERE size = 44", "row 44 of table checkpoint"),
        ("UPDATE checkpoint SET seal = zeroblob(97) WHERE size = 44", "row 44 of table checkpoint"),
        ("UPDATE head SET frontier = zeroblob(5000)", "table head"),
        ("INSERT INTO meta VALUES ('x', zeroblob(5000))", "table meta"),
        (insert_row(body="zeroblob(20000000)"), f"table {TABLES[0]}"),
        ("INSERT INTO token VALUES (zeroblob(17))", "table token"),
    ],
)
def test_what_is_too_long_is_named_and_not_read(path: str, statement: str, named: str) -> None:
    changed(path, statement)
    found = problem(path)
    assert (found.kind, found.code) == ("store", "verify.row-too-long")
    assert named in found.reason


def test_a_huge_blob_takes_no_memory(path: str) -> None:
    changed(path, "UPDATE blob SET data = zeroblob(900000000)")
    program = (
        "import resource, sys\n"
        "from lamina.ledger.verify.verifier import verify\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert verify(sys.argv[1]).problem.code == 'verify.row-too-long'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 100 * 1024


# ------------------------------------------------------------------------------ what is derived, and what is not


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("DELETE FROM attempt", "verify.attempt-index-differs"),
        ("INSERT INTO attempt VALUES (zeroblob(16), 0, 0, 41)", "verify.attempt-index-differs"),
        ("DELETE FROM token WHERE key = (SELECT min(key) FROM token)", "verify.token-index-differs"),
        ("INSERT INTO token VALUES (zeroblob(16))", "verify.token-index-differs"),
    ],
)
def test_what_the_store_derives_is_compared_with_the_leaves(path: str, statement: str, code: str) -> None:
    changed(path, statement)
    found = problem(path)
    assert (found.kind, found.code) == ("store", code)


def test_what_only_the_store_states_is_signed_or_changes_no_verdict(path: str) -> None:
    before = verify(path, trust=MINE)
    changed(
        path,
        "INSERT INTO run VALUES (zeroblob(16), 'somebody', 1, 0)",
        insert_row(),
        "INSERT INTO terms VALUES ('clinical/0/0', x'ff')",
        "INSERT INTO writer VALUES (zeroblob(16), zeroblob(16), x'ff', 1)",
    )
    unsigned = problem(path)
    assert (unsigned.kind, unsigned.code) == ("store", "verify.open-rows-differ")
    changed(path, DELETE_HEAD)  # as a writer without the key leaves it
    found = verify(path, trust=MINE)
    assert before.verdict == found.verdict == "trusted"
    assert any(note.startswith("not checked: open charges") for note in found.notes)
    assert (found.root, found.spends, found.counts) == (before.root, before.spends, before.counts)
    assert any("as the store states" in note for note in found.notes)


def test_opening_refuses_rows_that_no_ledger_writes(path: str) -> None:
    changed(path, "UPDATE leaf SET body = zeroblob(200000000) WHERE seq = 0")
    with pytest.raises(LedgerError):
        Ledger.open(path)
