"""The thread that computes: every request has its own answer, whoever is computed with it, and slow ones keep nobody waiting."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from served_net import Client, Net

from lamina.serve import app
from lamina.serve.app import Task, _ModelThread


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers were given together, each time."""
    sizes: list[int] = []
    give = app._give

    def noted(outcomes: Any) -> None:
        sizes.append(len(outcomes))
        give(outcomes)

    monkeypatch.setattr(app, "_give", noted)
    return sizes


def test_everybody_has_the_own_answer(given: list[int]) -> None:
    begun, all_wait = [], threading.Event()

    def task(body: bytes) -> Task:
        all_wait.wait(60)
        begun.append(body)
        yield
        if int(body) % 5 == 0:
            raise ValueError(body)
        yield
        return body * 2

    async def ask() -> list[Any]:
        thread = _ModelThread()
        asked = [asyncio.create_task(thread.run(task, b"%d" % i)) for i in range(200)]
        await asyncio.sleep(0)
        all_wait.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    for i, found in enumerate(asyncio.run(ask())):
        own = b"%d" % i
        assert (str(found) == str(own) and isinstance(found, ValueError)) if i % 5 == 0 else found == 2 * own
    assert begun == [b"%d" % i for i in range(200)]  # in their order
    assert sum(given) == 200 and max(given) <= app._MOST_TOGETHER and len(given) < 200


def test_slow_ones_are_answered_one_by_one(given: list[int]) -> None:
    def task(body: bytes) -> Task:
        time.sleep(app._TOGETHER)
        yield
        return body

    async def ask() -> None:
        thread = _ModelThread()
        await asyncio.gather(*(thread.run(task, b"") for _ in range(9)))

    asyncio.run(ask())
    assert given == [1] * 9


def test_what_nobody_waits_for_is_not_begun() -> None:
    begun, go = [], threading.Event()

    def task(body: bytes) -> Task:
        begun.append(body)
        go.wait(60)
        yield
        return body

    async def ask() -> None:
        thread = _ModelThread()
        first = asyncio.create_task(thread.run(task, b"first"))
        while not begun:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(thread.run(task, b"late"))
        last = asyncio.create_task(thread.run(task, b"last"))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.sleep(0)
        go.set()
        assert (await first, await last) == (b"first", b"last")

    asyncio.run(ask())
    assert begun == [b"first", b"last"]


def test_queries_are_remembered_by_value(client: Client, query: dict[str, Any]) -> None:
    """Equal in Python is not equal in JSON: true and 1 stay apart; and a query that nests too deep is refused, not lost."""
    asked = client(model=Net)
    good = {"query": query, "inputs": [[0.5] * 4]}
    for _ in range(3):
        assert asked.post("/v1/infer", json=good).status_code == 200
        odd = json.loads(json.dumps(good))
        odd["query"]["rights"]["accept_withdrawn"] = 0
        assert asked.post("/v1/infer", json=odd).status_code in (400, 422)
    for depth in (*range(300, 1000, 33), 5000):
        nested = '{"query": ' + "[" * depth + "]" * depth + ', "inputs": [[0.5, 0.5, 0.5, 0.5]]}'
        answer = asked.post("/v1/infer", content=nested, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, depth
