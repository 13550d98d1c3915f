"""Pages about a large ledger: what they read does not grow with it, and they wait for nobody who reads for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import making
import pytest
from starlette.testclient import TestClient

from lamina.ledger.reader import LedgerReader
from lamina.ledger.store import sqlite
from lamina.serve import pages as dashboard
from lamina.serve.app import Service, make_app
from lamina.serve.limits import Limits

SMALL, LARGE = 600, 6000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each query of SQLite brought."""
    counted: list[int] = []
    rows, find = sqlite._SqliteConnection.rows, sqlite._SqliteConnection.find

    def count(work: Any) -> Any:
        def counting(*given: Any) -> list[tuple[Any, ...]]:
            found: list[tuple[Any, ...]] = work(*given)
            counted.append(len(found))
            return found

        return counting

    monkeypatch.setattr(sqlite._SqliteConnection, "rows", count(rows))
    monkeypatch.setattr(sqlite._SqliteConnection, "find", count(find))
    return counted


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two ledgers, ten times as large the one as the other."""
    folder = tmp_path_factory.mktemp("ledgers")
    made = {size: folder / f"{size}.db" for size in (SMALL, LARGE)}
    for size, path in made.items():
        with making.create(str(path)) as ledger:
            for batch in making.batches(0, size, 500):
                ledger.append(batch)
            ledger.checkpoint()
    return made


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[LedgerReader] = []

    def make(path: Path, *, verifies: bool = False) -> TestClient:
        if not verifies:
            monkeypatch.setattr(dashboard.BackgroundVerification, "start", lambda self: None)
        opened.append(ledger := LedgerReader.read_only(path))
        service = Service(folder=path.parent, ledger=ledger, limits=Limits(timeout=5.0))
        routes: Any = dashboard.pages(service)
        assert routes[0].endpoint.__self__.counted.wait(60)
        return TestClient(make_app(service, routes), base_url="http://localhost")

    yield make
    for each in opened:
        each.close()


def test_pages_read_no_more_of_a_larger_ledger(ledgers: dict[int, Path], client: Any, read: list[int]) -> None:
    cost: dict[str, list[tuple[int, int]]] = {}
    for size, path in ledgers.items():
        asked, digest = client(path), making.digest("descriptor", size // 2).hex()
        paths = {
            "overview": "/", "budget": "/budget", "first": "/contributions", "deep": f"/contributions?from={size // 2}",
            "last": f"/contributions?from={size - 30}", "digest": f"/contributions?find={digest}",
            "digits": f"/contributions?find={digest[:9]}", "unknown": f"/contributions?find={'0' * 64}",
            "unknown digits": "/contributions?find=000000000", "withdrawals": "/withdrawals",
        }  # fmt: skip
        for name, path_ in paths.items():
            assert asked.get(path_).status_code == 200, path_  # what is new in the ledger is read once
            read.clear()
            text = asked.get(path_).text
            assert ("not found" in text) == name.startswith("unknown"), name
            cost.setdefault(name, []).append((len(read), sum(read)))
    for name, (small, large) in cost.items():
        assert large[0] <= small[0] + 5 and large[1] <= small[1] + 20, (name, small, large)
        assert large[1] <= 1000, (name, large)


def test_a_page_does_not_wait_for_a_verification(
    ledgers: dict[int, Path], client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, enough = threading.Event(), threading.Event()

    def held(store: Any, **options: Any) -> None:
        with store.read():
            begun.set()
            enough.wait(60)

    monkeypatch.setattr(dashboard, "verify", held)
    try:
        asked = client(ledgers[SMALL], verifies=True)
        assert begun.wait(60)
        for path in ("/", "/contributions", "/v1/ledger/head", "/v1/ledger/leaves/3"):
            assert asked.get(path).status_code == 200, path
        assert asked.get("/verification/state").json()["running"]
    finally:
        enough.set()
