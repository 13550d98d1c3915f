"""Raw sockets against the service: bounds on bytes, time and places that hold for every client."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lamina.serve.app import Service, make_app
from lamina.serve.limits import ApiKeys, BoundedHttp, Limits

SECONDS = 1.5  # for a request, where a test waits for it


executed: list[str] = []


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with the number of bytes that it was sent."""
    executed.append(scope["path"])
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"<%d>" % size})


@contextmanager
def serving(application: Any, http: type[BoundedHttp] = BoundedHttp) -> Iterator[int]:
    config = uvicorn.Config(application, port=0, log_level="critical", lifespan="off", http=http, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def port() -> Iterator[int]:
    executed.clear()
    with serving(app) as found:
        yield found


@pytest.fixture
def hasty() -> Iterator[int]:
    """The same, with a short deadline."""
    with serving(app, BoundedHttp.within(SECONDS)) as found:
        yield found


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """A service with two API keys, four places, and two of them for each key."""
    keys = ApiKeys({name: hashlib.sha256(name.encode()).digest() for name in ("alice", "bob")})
    limits = Limits(timeout=SECONDS, concurrent=4, per_key=2)
    service = Service(folder=tmp_path, keys=keys, limits=limits)
    with serving(make_app(service), BoundedHttp.within(SECONDS)) as found:
        yield found


def connected(opened: ExitStack, port: int, *parts: bytes) -> socket.socket:
    connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
    for part in parts:
        connection.sendall(part)
    return connection


def seconds_open(connection: socket.socket, trickle: bytes = b"") -> tuple[float, bytes]:
    """Return how long the server keeps a slow connection open, and its answer."""
    began, found = time.monotonic(), b""
    connection.settimeout(0.1)
    while time.monotonic() - began < 8 * SECONDS:
        try:
            if trickle:
                connection.sendall(trickle)
            data = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            break
        if not data:
            break
        found += data
    return time.monotonic() - began, found


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


@pytest.mark.parametrize("size", [66_000, 130_000, 200_000, 262_144, 400_000])
def test_a_body_in_one_write_is_not_taken_for_a_head(port: int, size: int) -> None:
    head = b"POST /%d HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (size, size)
    with ExitStack() as opened:
        connection = connected(opened, port, head + b"x" * size)
        found = connection.recv(1 << 16)
        while b">" not in found and (data := connection.recv(1 << 16)):
            found += data
        assert found.startswith(b"HTTP/1.1 200 OK") and b"<%d>" % size in found
        connection.sendall(POST + CLOSE)  # the connection goes on
        assert b"200 OK" in connection.recv(1 << 16)
    assert executed == [f"/{size}", "/"]


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        b"content-length: +3\r\n\r\nabc",
        b"content-length: 3, 3\r\n\r\nabc",
    ],
)
def test_two_lengths_of_one_body_are_refused_before_anything_is_executed(port: int, head: bytes) -> None:
    found = answer(port, POST + head)
    assert found.startswith(b"HTTP/1.1 400") and b"200 OK" not in found
    assert executed == []


def test_trailers_are_refused(port: int) -> None:
    """The parser would keep any number of trailers, after the headers were checked."""
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    assert b"<3>" in answer(port, chunked + b"\r\n", POST + CLOSE)
    found = answer(port, chunked + b"authorization: Bearer alice\r\n\r\n")
    assert b"400 Bad Request" in found and b"200 OK" not in found


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nx: ", b"\r\n"], ids=["nothing", "half", "empty lines"])
@pytest.mark.parametrize("trickle", [b"", b"\r\n"], ids=["silent", "slow"])
def test_a_head_that_is_not_complete_in_time_is_ended(hasty: int, sent: bytes, trickle: bytes) -> None:
    slow = b"a" if trickle and sent.startswith(b"POST") else trickle
    began = time.monotonic()
    with ExitStack() as opened:
        first = connected(opened, hasty, sent)
        others = [connected(opened, hasty, sent) for _ in range(40)]
        open_for, found = seconds_open(first, slow)
        assert time.monotonic() - began > 0.5 * SECONDS and open_for < 4 * SECONDS
        assert found == b"" or found.startswith(b"HTTP/1.1 408")
        time.sleep(0.5 * SECONDS)
        assert all(seconds_open(each)[0] < SECONDS for each in others)
    assert b"200 OK" in answer(hasty, POST + CLOSE)


def test_a_second_head_on_a_connection_has_the_same_deadline(hasty: int) -> None:
    with ExitStack() as opened:
        connection = connected(opened, hasty, POST + b"content-length: 3\r\n\r\nabc" + POST)
        open_for, found = seconds_open(connection, b"x")
    assert open_for < 4 * SECONDS and b"<3>" in found


def asked(key: str, *lines: bytes, path: bytes = b"/v1/decide", length: int = 100) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path
    head += b"authorization: Bearer %s\r\n" % key.encode()
    return head + b"".join(lines) + b"content-length: %d\r\n\r\n" % length


def test_a_body_that_is_not_complete_in_time_is_ended(guarded: int) -> None:
    with ExitStack() as opened:
        open_for, found = seconds_open(connected(opened, guarded, asked("alice")), b"x")
    assert 0.5 * SECONDS < open_for < 5 * SECONDS
    assert found.startswith(b"HTTP/1.1 408") and b"serve.body-too-slow" in found


def test_a_body_goes_on_after_a_refusal_no_longer_than_any_other(guarded: int) -> None:
    """The answer is given at once, and the client sends what it announced at its leisure."""
    with ExitStack() as opened:
        open_for, found = seconds_open(connected(opened, guarded, asked("mallory", length=1000)), b"x")
    assert open_for < 4 * SECONDS and found.startswith(b"HTTP/1.1 401")


def test_head_and_body_share_one_deadline(guarded: int) -> None:
    head = asked("alice")
    began = time.monotonic()
    with ExitStack() as opened:
        connection = connected(opened, guarded, head[:20])
        time.sleep(0.3 * SECONDS)
        connection.sendall(head[20:])
        found = seconds_open(connection)[1]
    assert b"serve.body-too-slow" in found
    assert time.monotonic() - began < 3.5 * SECONDS


def test_one_key_with_slow_bodies_leaves_places_for_the_others(guarded: int) -> None:
    with ExitStack() as opened:
        slow = [connected(opened, guarded, asked("alice")) for _ in range(6)]
        time.sleep(0.2 * SECONDS)
        served = answer(guarded, asked("bob", b"connection: close\r\n", length=2) + b"{}")
        waiting = [seconds_open(each)[1] for each in slow]
    assert b"serve.fields" in served  # it was read and judged
    codes = sorted("too-many-at-once" if b"serve.too-many-at-once" in each else "too-slow" for each in waiting)
    assert codes == ["too-many-at-once"] * 4 + ["too-slow"] * 2
    assert b"serve.fields" in answer(guarded, asked("alice", b"connection: close\r\n", length=2) + b"{}")  # given back


@pytest.mark.parametrize(
    "twice",
    [
        b"authorization: Bearer alice",
        b"AUTHORIZATION: Bearer bob",
        b"host: localhost",
        b"content-type: application/cose",
    ],
)
def test_a_header_that_decides_is_there_once(guarded: int, twice: bytes) -> None:
    found = answer(guarded, asked("alice", twice + b"\r\n", b"connection: close\r\n", length=2) + b"{}")
    assert found.startswith(b"HTTP/1.1 400") and b"serve.header-repeated" in found


def test_a_client_that_takes_no_answer_loses_its_connection() -> None:
    """With two pipelined requests, the second answer waits for the first, which the client never reads, and keeps its place."""

    async def large(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (32 << 20)})
        ended.append(scope["path"])

    ended: list[str] = []
    with serving(large, BoundedHttp.within(SECONDS)) as port, ExitStack() as opened:
        connected(opened, port, b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % 1)
        connected(opened, port, b"".join(b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % n for n in (2, 3)))
        until = time.monotonic() + 30 * SECONDS
        while "/3" not in ended and time.monotonic() < until:
            time.sleep(0.05)
        assert sorted(ended) == ["/1", "/2", "/3"]
