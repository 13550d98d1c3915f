"""The service does not grow: half a million requests of every kind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from served_net import Client

from lamina.serve.limits import Limits

REQUESTS, WARM = 500_000, 60_000


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_half_a_million_requests(client: Client, query: dict[str, Any]) -> None:
    app: Any = client(limits=Limits(rate=1e9, timeout=60.0)).app
    rng, statuses = random.Random(0), set()

    def request() -> tuple[str, str, bytes]:
        kind = rng.random()
        if kind < 0.1:
            return (
                "GET",
                rng.choice(["/v1/ledger/head", f"/none/{rng.random()}", "/v1/ledger/proof/3", "/metrics"]),
                b"",
            )
        asked = {**query, "scope": str(rng.random())} if kind < 0.4 else query  # every one of them another
        if kind > 0.9:
            return "POST", "/v1/infer", json.dumps({"query": asked, "inputs": [[0.0] * rng.randrange(9)]}).encode()
        return "POST", "/v1/infer", json.dumps({"query": asked, "inputs": [[0.5] * 4] * rng.choice([1, 3])}).encode()

    async def ask() -> None:
        method, path, body = request()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers, "client": (str(rng.random()), 1), "root_path": ""}  # fmt: skip

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            statuses.add(message.get("status", 200))

        await app(scope, receive, send)

    async def go(count: int) -> None:
        for _ in range(count):
            await ask()

    asyncio.run(go(WARM))
    before = resident()
    asyncio.run(go(REQUESTS - WARM))
    grown = resident() / before - 1
    assert statuses == {200, 404, 422}, statuses
    assert grown < 0.05, f"resident memory grew by {grown:.1%}"
