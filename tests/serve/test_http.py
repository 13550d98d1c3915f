"""What reaches the service before any of its own code: the head of a request is bounded, whoever sends it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from lamina.serve.limits import BoundedHttp


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with the number of bytes that it was sent."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"<%d>" % size})


@pytest.fixture
def port() -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", http=BoundedHttp))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def answer(port: int, *parts: bytes) -> bytes:
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(1 << 16):
                found += data
        except (ConnectionError, TimeoutError):  # closed while we still sent
            pass
    return found


CLOSE = b"connection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


def test_bodies_and_requests_in_a_row_are_served(port: int) -> None:
    body = b"x" * 1_000_000
    again = POST + b"content-length: 3\r\n\r\nabc"
    found = answer(port, POST + b"content-length: 1000000\r\n\r\n" + body, again, again, POST + CLOSE)
    assert found.count(b"200 OK") == 4 and b"<1000000>" in found and found.count(b"<3>") == 2
    assert b"200 OK" in answer(port, POST + b"x: " + b"a" * 30_000 + b"\r\n" + CLOSE)


@pytest.mark.parametrize("line", [b"a" * 1000, b"a: b\r\n" * 200], ids=["one header", "many headers"])
def test_a_head_that_does_not_end_is_refused(port: int, line: bytes) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(POST + b"x: ")
        try:
            while sent < 20_000_000:
                connection.sendall(line)
                sent += len(line)
        except ConnectionError:
            pass
    assert sent < 20_000_000
