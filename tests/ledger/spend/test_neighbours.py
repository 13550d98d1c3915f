"""Ledgers in one PostgreSQL database are neighbours, as files in one folder are; damaged ones are named, too."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import postgres
import psycopg
import pytest
from build import STRICT, USUAL, begin, contribution, segment
from keeping import open_book
from refusals import raises_code

from lamina.ledger.neighbours import neighbour_ledgers
from lamina.ledger.reader import LedgerReader
from lamina.run.run_ledger import _refuse_undeclared, default_ledger_path, neighbours_of_run, refuse_second_ledger


@pytest.fixture
def database(server: postgres.Server) -> str:
    return server.database(f"neighbours_{os.getpid()}")


def spent(where: str) -> None:
    story = begin(where)
    story.admit(contribution(n, terms=STRICT if n % 2 else USUAL) for n in range(6))
    story.epoch(b"a" * 16, [segment(0, read=story.ledger.size)])
    story.sign()
    story.ledger.close()


def test_ledgers_in_other_schemas_of_the_database_are_neighbours(database: str, tmp_path: Path) -> None:
    assert neighbour_ledgers(database) == []
    spent(f"{database}#ward")
    for own in (database, f"{database}#lamina", f"{database}#clinic"):  # there is no ledger yet under these
        (found,) = neighbour_ledgers(own)
        assert found.name.endswith("#ward") and found.runs == 1
        assert found.to_dict()["ledger"] == "#ward"  # without the server
        assert neighbours_of_run(own, tmp_path / "runs" / "a") == [found]
        with raises_code("train.origin-not-declared"):
            _refuse_undeclared(own, tmp_path / "runs" / "a")
    assert neighbour_ledgers(f"{database}#ward") == []
    spent(database)
    assert [each.name.rpartition("#")[2] for each in neighbour_ledgers(f"{database}#ward")] == ["lamina"]
    assert [each.name.rpartition("#")[2] for each in neighbour_ledgers(database)] == ["ward"]


DAMAGES = ("UPDATE head SET time = time + 1", "UPDATE leaf SET data = x'00'", "DROP TABLE token")


@pytest.mark.parametrize("change", DAMAGES)
@pytest.mark.parametrize("name", ["ward.ledger.db", "backup/ledger.db", "renamed", "deep/old.sqlite"])
def test_a_damaged_ledger_is_named_and_stops_another(tmp_path: Path, name: str, change: str) -> None:
    """Whatever its file is called: otherwise one changed cell would begin a ledger that knows of no charge."""
    (place := tmp_path / name).parent.mkdir(exist_ok=True)
    spent(str(place))
    own, folder = tmp_path / "new.ledger.db", tmp_path / "a"
    (found,) = neighbour_ledgers(own)
    assert (found.name, found.runs, found.unreadable) == (str(place), 1, None)
    with raises_code("train.origin-not-declared"):
        _refuse_undeclared(own, folder)
    db = apsw.Connection(str(place))
    db.execute(change)
    db.close()
    (found,) = neighbour_ledgers(own)
    assert found.name == str(place) and found.unreadable is not None and found.unreadable in str(found)
    assert str(tmp_path) not in str(found.to_dict())
    with raises_code("train.neighbour-unreadable") as refused:
        _refuse_undeclared(own, folder)
    assert str(place) in str(refused.value)


def test_a_damaged_ledger_of_the_origin_is_no_reason_to_begin_another(tmp_path: Path) -> None:
    place = default_ledger_path("o", tmp_path / "runs")
    place.parent.mkdir()
    open_book(place).ledger.close()
    db = apsw.Connection(str(place))
    db.execute(DAMAGES[0])
    db.close()
    with raises_code("train.second-ledger"):
        refuse_second_ledger(default_ledger_path("o", tmp_path / "other"), "o", tmp_path)


def test_the_search_drops_no_lock_of_an_open_ledger(tmp_path: Path) -> None:
    """A process loses its locks on a file when it closes the file: another process would then truncate the WAL index."""
    book = open_book(tmp_path / "own.ledger.db")

    def locks() -> set[str]:
        places = {str(path.stat().st_ino) for path in tmp_path.glob("own.ledger.db*")}
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return {" ".join(row[1:]) for row in rows if row[4] == str(os.getpid()) and row[5].rpartition(":")[2] in places}

    before = locks()
    assert len(before) > 1  # of the file and of its shared memory
    assert neighbour_ledgers(tmp_path / "other.ledger.db", tmp_path)
    with LedgerReader.read_only(tmp_path / "own.ledger.db"):
        pass
    assert locks() == before
    book.ledger.close()


def test_a_file_of_the_same_origin_may_be_a_copy(tmp_path: Path) -> None:
    spent(str(tmp_path / "old.ledger.db"))
    (found,) = neighbour_ledgers(tmp_path / "new.ledger.db")
    assert "a copy adds nothing" in found.note(found.origin) and "loses the sum" in found.note("other")


def test_files_that_are_no_ledgers_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.ledger.db").write_bytes(b"no ledger")
    db = apsw.Connection(str(tmp_path / "other.db"))
    db.execute("CREATE TABLE leaf (a)")
    db.close()
    os.mkfifo(tmp_path / "pipe")
    assert neighbour_ledgers(tmp_path / "new.ledger.db") == []


def test_a_damaged_ledger_in_the_database_is_named(database: str, tmp_path: Path) -> None:
    spent(f"{database}#ward")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("UPDATE ward.head SET time = time + 1")
    (found,) = neighbour_ledgers(f"{database}#clinic")
    assert found.name.endswith("#ward") and found.unreadable == "ledger.head-inconsistent"
    with raises_code("train.neighbour-unreadable"):
        _refuse_undeclared(f"{database}#clinic", tmp_path / "runs" / "a")


def test_a_schema_with_tables_of_its_own_is_no_neighbour_and_stops_nothing(database: str) -> None:
    spent(f"{database}#ward")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE SCHEMA other")
        for table in ("leaf", "head", "tile", "checkpoint"):
            db.execute(f"CREATE TABLE other.{table} (a int)")
    assert [each.name.rpartition("#")[2] for each in neighbour_ledgers(f"{database}#mine")] == ["ward"]
