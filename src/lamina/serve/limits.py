"""Who may ask, how often and how much: API keys, a token bucket for each, limits; and what is counted of it.

Neither logs nor metrics hold a key, an address, or anything of a query but its verdict.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from asyncio import AbstractEventLoop, TimerHandle, Transport
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lamina.errors import BadKey, LaminaError
from lamina.sign.keys import read_small

_KEY_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})\s+([0-9a-f]{64})")
_NO_KEY = hashlib.sha256(b"").hexdigest()  # what a script writes that had no key to hash: everybody would have it
_MAX_BUCKETS = 10_000
_MAX_HEAD = 1 << 16  # bytes
_PART = 1 << 14  # bytes parsed at a time; the counted size of a head may be too small by this number
_LINGER = 5.0  # seconds for a client to receive the rest of its answer after the server closed the connection
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestRefused(LaminaError):
    """A request that is answered with a problem (RFC 9457) of this status. `more` are further fields of it."""

    def __init__(
        self, status: int, code: str, problem: str, remedy: str = "", *, headers: Mapping[str, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(code, problem, remedy)
        self.status, self.headers, self.more = status, dict(headers or {}), dict(more or {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of the service.

    body        bytes of a request
    rate        requests of one key per second; bursts of twice as many are accepted
    timeout     seconds from the first byte of a request to its answer
    concurrent  requests that are answered at the same time
    per_key     the same for one key; without keys, for one address of another machine
    leaves      leaves of the ledger in one answer
    """

    body: int = 1 << 20
    rate: float = 500.0
    timeout: float = 10.0
    concurrent: int = 64
    per_key: int = 16
    leaves: int = 1000


class ApiKeys:
    """API keys by the SHA-256 of each. A key itself is nowhere stored."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """A file with a name and the SHA-256 of a key (64 hex digits) on each line; # begins a comment."""
        found: dict[str, bytes] = {}
        text = read_small(path, "the API keys", most=1 << 20).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            if not (line := line.partition("#")[0].strip()):
                continue
            match = _KEY_LINE.fullmatch(line)
            if match is None or match[1] in found or match[2] == _NO_KEY:
                problem = (
                    f"line {number} of '{path}' is no name with the SHA-256 of a key, has a name again, or an empty key"
                )
                raise BadKey("serve.keys-file", problem, "write NAME and 64 hex digits, as docs/service.md shows")
            found[match[1]] = bytes.fromhex(match[2])
        if not found:
            raise BadKey("serve.keys-file", f"'{path}' has no API key", "write NAME and 64 hex digits on a line")
        return cls(found)

    def name_of(self, authorization: bytes | None) -> str | None:
        """Whose key a header has: `Bearer KEY`, or `Basic` with the key as password; None if it is nobody's."""
        kind, _, value = (authorization or b"").partition(b" ")
        if kind.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != b"bearer":
            return None
        digest, found = hashlib.sha256(value.strip()).digest(), None
        for name, known in self._digests.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, known):
                found = name
        return found


class TokenBuckets:
    """A token bucket for each who asks: `rate` tokens a second, twice as many at most."""

    def __init__(self, rate: float) -> None:
        self._rate, self._most = rate, max(1.0, 2 * rate)
        self._state: dict[str, tuple[float, float]] = {}

    def wait(self, who: str, now: float) -> float:
        """Take a token; 0 if there is one, otherwise the seconds until there is."""
        tokens, since = self._state.get(who, (self._most, now))
        tokens = min(self._most, tokens + (now - since) * self._rate)
        if len(self._state) >= _MAX_BUCKETS and who not in self._state:
            self._state = {name: each for name, each in self._state.items() if now - each[1] < 2.0}
            if len(self._state) >= _MAX_BUCKETS:
                return 1.0
        enough = tokens >= 1.0
        self._state[who] = (tokens - enough, now)
        return 0.0 if enough else (1.0 - tokens) / self._rate


class BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 with bounds that hold for every client, before a request reaches the application.

    First line and headers have at most 64 KiB; trailers are refused. A request arrives completely within `seconds` of
    its first byte, and a connection sends one within `seconds` of its beginning. An answer that the client does not
    take within `seconds` is dropped with its connection.
    """

    seconds: ClassVar[float] = 10.0

    _head: int | None = 0  # bytes of a head that is not complete; None while a body arrives
    _part = 0  # bytes of the part that is being parsed

    @classmethod
    def within(cls, seconds: float) -> type[BoundedHttp]:
        """Return the same protocol with other deadlines."""
        return cast(type[BoundedHttp], type(cls.__name__, (cls,), {"seconds": seconds}))

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arrival = _Deadline(self.loop, self._arrived_too_slowly)
        self._departure = _Deadline(self.loop, transport.abort)
        self._arrival.start(self.seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrival.stop()
        self._departure.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _PART):
            if self.transport.is_closing():
                return
            part = data[at : at + _PART]
            if self._head is not None and not self._arrival.going:
                self._arrival.start(self.seconds)
            self._part = len(part)
            super().data_received(part)
            if self._head is not None:
                self._head += len(part)
                if self._head > _MAX_HEAD and not self.transport.is_closing():
                    self.send_400_response(f"First line and headers have more than {_MAX_HEAD} bytes.")
                    self._drop_later()

    # ----------------------------------------------------------------------------------- the parser's events

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["lamina.began"] = self.loop.time()  # type: ignore[typeddict-unknown-key]
        self._arrival.start(self.seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # a trailer after the body; the parser would keep any number of them
            raise ValueError("trailer")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head = -self._part  # the rest of this part begins the next head, and is not counted
        self._arrival.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._drop_later()

    # ----------------------------------------------------------------------------------- deadlines

    def _arrived_too_slowly(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._arrival.start(1.0)  # the answer in progress has its own deadline
            return
        if self._head is not None:
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()
        self._drop_later()

    def _drop_later(self) -> None:
        """Drop a closing connection, even if the client does not receive the rest of its answer."""
        self.loop.call_later(_LINGER, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._departure.start(self.seconds)

    def resume_writing(self) -> None:
        self._departure.stop()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._drop_later()


class _Deadline:
    """A timer that calls `action` some seconds after the last `start`, unless it is stopped."""

    def __init__(self, loop: AbstractEventLoop, action: Callable[[], None]) -> None:
        self._loop, self._action = loop, action
        self._timer: TimerHandle | None = None

    @property
    def going(self) -> bool:
        return self._timer is not None

    def start(self, seconds: float) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, self._end)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._action()


class Metrics:
    """What Prometheus reads: requests by route and status, their time, and decisions by reason."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._decisions: Counter[str] = Counter()
        self._denied: Counter[str] = Counter()
        self._times, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests[route, status] += 1
        self._times[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def decision(self, allowed: bool, reasons: Iterable[str]) -> None:
        self._decisions["allowed" if allowed else "denied"] += 1
        self._denied.update(set(reasons))

    def text(self, ledger_size: int | None) -> str:
        """In Prometheus' text format, version 0.0.4."""
        lines = ["# TYPE lamina_requests_total counter"]
        lines += [
            f'lamina_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self._requests.items())
        ]
        lines.append("# TYPE lamina_decisions_total counter")
        lines += [f'lamina_decisions_total{{verdict="{v}"}} {self._decisions[v]}' for v in ("allowed", "denied")]
        lines.append("# TYPE lamina_denied_total counter")
        lines += [f'lamina_denied_total{{reason="{code}"}} {count}' for code, count in sorted(self._denied.items())]
        lines.append("# TYPE lamina_request_seconds histogram")
        total = 0
        for limit, count in zip((*map(str, _SECONDS), "+Inf"), self._times, strict=True):
            total += count
            lines.append(f'lamina_request_seconds_bucket{{le="{limit}"}} {total}')
        lines += [f"lamina_request_seconds_sum {self._sum:.6f}", f"lamina_request_seconds_count {total}"]
        lines += ["# TYPE lamina_requests_in_flight gauge", f"lamina_requests_in_flight {self.in_flight}"]
        if ledger_size is not None:
            lines += ["# TYPE lamina_ledger_leaves gauge", f"lamina_ledger_leaves {ledger_size}"]
        return "\n".join(lines) + "\n"
