"""Ledgers in one PostgreSQL database are neighbours, as files in one folder are."""

from __future__ import annotations

import os
from pathlib import Path

import postgres
import psycopg
import pytest
from build import STRICT, USUAL, begin, contribution, segment
from refusals import raises_code

from lamina.run.run import _refuse_undeclared, neighbours_of_run
from lamina.spend.neighbours import neighbour_ledgers


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


def test_a_schema_with_tables_of_its_own_is_no_neighbour_and_stops_nothing(database: str) -> None:
    spent(f"{database}#ward")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE SCHEMA other")
        for table in ("leaf", "head", "tile", "checkpoint"):
            db.execute(f"CREATE TABLE other.{table} (a int)")
    assert [each.name.rpartition("#")[2] for each in neighbour_ledgers(f"{database}#mine")] == ["ward"]
