"""Tests of the book share ledgers and plans (keeping.py), and with the ledger's own tests a PostgreSQL server."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:  # last: other folders have files of the same names
    sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[2] / "ledger")])

import postgres
from keeping import passing_book

from lamina.train.book import Book

_names = itertools.count()


@pytest.fixture
def book() -> Iterator[Book]:
    with passing_book() as made:
        yield made


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    """One server for all tests; each ledger has a schema of its own."""
    bin = postgres.binaries()
    if bin is None:
        pytest.skip(postgres.MISSING)
    made = postgres.Server(bin)
    try:
        made.start()
        yield made
        made.stop("immediate")
    finally:
        made.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a ledger that does not exist yet, in each kind of store."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    found: postgres.Server = request.getfixturevalue("server")
    return found.url(f"book_{os.getpid()}_{next(_names)}")
