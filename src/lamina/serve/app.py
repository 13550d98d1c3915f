"""The service as an ASGI application: its routes, what guards them, and problems (RFC 9457) for whatever is refused.

    POST /v1/decide, /v1/infer          may this query draw on the model; and the answer
    POST /v1/withdrawals                a request that the contributor signed
    GET  /v1/ledger/…, /v1/release/…    the evidence, with proofs
    GET  /v1/openapi.json, /healthz, /metrics

The dashboard's pages come from `pages.pages(service)`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from lamina import __version__
from lamina.errors import EncodingError, LaminaError, LedgerDamaged, NotVerified, StoreBusy, StoreError
from lamina.ledger.governance_records import MAX_REQUEST_BYTES
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.reader import LedgerReader
from lamina.ledger.receipt import TlogProof
from lamina.ledger.records import decode_leaf
from lamina.ledger.schema import pluralize
from lamina.ledger.show import leaf_to_dict
from lamina.ledger.signed_checkpoint import parse_checkpoint
from lamina.ledger.store.rows import StoredLeaf
from lamina.ledger.withdrawal import check_withdrawal, drop_withdrawal, withdrawal_state
from lamina.release.decision_log import DecisionLog
from lamina.release.gate import LEDGER_DENIALS, Decision, DenialReason, ReleaseGate
from lamina.release.manifest import MANIFEST, read_file
from lamina.release.query import Query
from lamina.serve.limits import ApiKeys, Limits, Metrics, RequestRefused, TokenBuckets
from lamina.serve.openapi import openapi
from lamina.sign.keys import format_utc
from lamina.sign.signed_json import parse_json

if TYPE_CHECKING:
    from lamina.serve.inference import Inference

Scope = MutableMapping[str, Any]
Receive = Callable[[], Any]
Send = Callable[[MutableMapping[str, Any]], Any]
Answer = dict[str, Any] | Response

_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_PORT = re.compile(r":[0-9]*$")
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}
_OPEN_PATHS = {"/healthz"}  # without a key
_ONCE = {b"authorization", b"host", b"content-type", b"content-length", b"origin", b"sec-fetch-site"}
_UNKNOWN = {"ledger.leaf-unknown", "ledger.size-not-reached", "ledger.not-covered", "ledger.tree-too-small"}
_UNAVAILABLE = {"release.log-not-written", "ledger.withdrawals-waiting", "admit.file-not-written"}
_TOGETHER, _MOST_TOGETHER = 0.004, 16  # seconds and number of requests that are computed together
_MOST_QUERIES, _MOST_QUERY_CHARACTERS = 256, 4096  # that are remembered
_JSON, _COSE, _TEXT = "application/json", "application/cose", "text/plain; charset=utf-8"


@dataclass(kw_only=True)
class Service:
    """What is served, and under which limits. Pages are made from it, too.

    folder       a release, or a run
    gate         of the release; None for a run
    ledger       its own reader, not the one that the gate follows
    inference    the model; without it the gate alone answers
    withdrawals  the folder that `lamina ledger withdraw --folder` watches
    keys         API keys; None if whoever reaches the service may ask it
    recent       what the gate decided last: when, whether it allowed, the codes of its reasons
    local        whether it is open to this machine alone: then only requests to its own name count
    """

    folder: Path
    gate: ReleaseGate | None = None
    ledger: LedgerReader | None = None
    inference: Inference | None = None
    withdrawals: Path | None = None
    log: DecisionLog | None = None
    keys: ApiKeys | None = None
    local: bool = True
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    recent: deque[tuple[str, bool, list[str]]] = field(default_factory=lambda: deque(maxlen=100))

    def ask_gate(self, query: Query) -> Decision:
        """Return the decision of the gate, without details that only the operator may see."""
        if self.gate is None:
            raise RequestRefused(404, "serve.no-release", "a run is served here, which has no gate", "serve a release")
        decision = self.gate.decide(query)
        if any(each.code in LEDGER_DENIALS for each in decision.reasons):
            decision = dataclasses.replace(decision, reasons=tuple(map(_public_reason, decision.reasons)))
        return decision

    def decide(self, query: Query, *, answering: bool) -> Decision:
        """Return the decision of the gate; if the model is to answer, for all layers it uses. Counts and logs it."""
        decision = self.ask_gate(query)
        if answering and self.inference is not None:
            decision = self.inference.judge(query, decision)
        if self.log is not None:
            self.log.record(query, decision)
        codes = sorted({each.code for each in decision.reasons})
        self.metrics.decision(decision.allowed, codes)
        self.recent.append((format_utc(int(time.time())), decision.allowed, codes))
        return decision

    def follow_file(self) -> None:
        """Open the ledger again if its file was replaced. If there is no file, reading it is refused (503)."""
        if self.ledger is not None and self.ledger.store.replaced():
            with suppress(LaminaError):
                self.ledger.reopen()

    def papers(self) -> dict[str, bytes]:
        """Manifest and certificate of the release, as they were verified."""
        if self.gate is None:
            return {}
        manifest = self.gate.manifest
        last = manifest.predicate.certificates[-1].file
        found = {"manifest": read_file(self.folder, MANIFEST), "certificate": read_file(self.folder, last)}
        digests = {"manifest": manifest.digest, "certificate": manifest.subjects[last]}
        for name, data in found.items():
            if hashlib.sha256(data).hexdigest() != digests[name]:
                raise NotVerified("release.file-changed", f"the {name} was changed after the check", "fetch it again")
        return found

    def close(self) -> None:
        """Write what is left of the log."""
        if self.log is not None:
            self.log.close()


def _public_reason(reason: DenialReason) -> DenialReason:
    """Return the reason for clients. The text of the gate itself may name files of the ledger."""
    return dataclasses.replace(reason, text=LEDGER_DENIALS.get(reason.code, reason.text))


def make_app(service: Service, pages: Sequence[BaseRoute] = ()) -> Guard:
    """The application; `pages` are further routes, such as the dashboard's."""
    api = _Api(service)
    routes: list[BaseRoute] = [
        Route("/v1/infer", api.infer, methods=["POST"]),
        Route("/v1/decide", api.decide, methods=["POST"]),
        Route("/v1/withdrawals", api.withdraw, methods=["POST"]),
        Route("/v1/withdrawals/{name}", api.withdrawal),
        Route("/v1/ledger/head", api.ledger(_head)),
        Route("/v1/ledger/checkpoint", api.ledger(_checkpoint)),
        Route("/v1/ledger/leaves", api.ledger(_leaves)),
        Route("/v1/ledger/leaves/{seq}", api.ledger(_leaf)),
        Route("/v1/ledger/proof/{seq}", api.ledger(_proof)),
        Route("/v1/ledger/consistency", api.ledger(_consistency)),
        Route("/v1/ledger/receipt/{seq}", api.ledger(_receipt)),
        Route("/v1/release/{name}", api.paper),
        Route("/v1/openapi.json", api.openapi),
        Route("/healthz", api.health),
        Route("/metrics", api.metrics),
        *pages,
    ]
    return Guard(service, Router(routes, redirect_slashes=False))


class Guard:
    """Admits requests to the router or refuses them; turns every refusal into a problem; counts."""

    def __init__(self, service: Service, router: Router) -> None:
        self.service, self._router = service, router
        self._buckets = TokenBuckets(service.limits.rate)
        self._going: Counter[str] = Counter()  # requests that are being answered, by key or address
        self._routes = {id(route.endpoint): route.path for route in router.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        metrics, status, began, who = self.service.metrics, 0, time.perf_counter(), ""
        first_byte = scope.get("lamina.began", asyncio.get_running_loop().time())

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        scope["app"] = self  # so that the router raises what it refuses
        metrics.in_flight += 1
        try:
            try:
                who = self._admit(scope)
                self.service.follow_file()
                async with asyncio.timeout_at(first_byte + self.service.limits.timeout):
                    await self._router(scope, receive, send_with_headers)
            except ClientDisconnect:
                return
            except Exception as error:
                if status == 0:
                    await _problem(error, scope)(scope, receive, send_with_headers)
        finally:
            metrics.in_flight -= 1
            if who:
                self._going[who] -= 1
                if not self._going[who]:
                    del self._going[who]
            route = self._routes.get(id(scope.get("endpoint")), "other")
            metrics.request(route, status, time.perf_counter() - began)

    def _admit(self, scope: Scope) -> str:
        """Count the request for its key or address and return that; raise RequestRefused if it may not be answered."""
        service, headers = self.service, dict(scope["headers"])
        single = [name for name, _ in scope["headers"] if name in _ONCE]
        if len(single) > len(set(single)):
            name = Counter(single).most_common(1)[0][0].decode()
            problem = f"the request has the header {name} more than once"
            raise RequestRefused(400, "serve.header-repeated", problem, "send it once")
        if scope["path"] in _OPEN_PATHS:
            return ""
        who = f"address {(scope.get('client') or ('',))[0]}"
        if service.keys is not None:
            named = service.keys.name_of(headers.get(b"authorization"))
            if named is None:
                ask = {"WWW-Authenticate": 'Bearer realm="lamina", Basic realm="lamina"'}
                problem = "the request has no API key, or one that is not known"
                raise RequestRefused(401, "serve.key-missing", problem, "send Authorization: Bearer KEY", headers=ask)
            who = f"key {named}"
        elif service.local:
            host = headers.get(b"host", b"").decode("latin-1")
            if _PORT.sub("", host) not in _LOOPBACK_NAMES:
                problem = "the request is for another name than this machine's own"
                raise RequestRefused(421, "serve.host-unknown", problem, "ask http://localhost, or serve with --keys")
        if scope["method"] == "POST" and not _same_site(headers):
            problem = "a page elsewhere sent this through a browser"
            raise RequestRefused(403, "serve.cross-site", problem, "use the pages of this service")
        if wait := self._buckets.wait(who, time.monotonic()):
            later = {"Retry-After": str(int(wait) + 1)}
            problem = f"more than {service.limits.rate:g} requests a second"
            raise RequestRefused(429, "serve.too-many-requests", problem, "ask less often", headers=later)
        if service.metrics.in_flight > service.limits.concurrent:
            problem = f"{service.limits.concurrent} requests are being answered"
            raise RequestRefused(503, "serve.busy", problem, "try again", headers={"Retry-After": "1"})
        shared = service.keys is None and service.local  # all requests come from this machine
        if not shared and self._going[who] >= service.limits.per_key:
            problem = f"{service.limits.per_key} requests of this key or address are being answered already"
            remedy = "wait for answers"
            raise RequestRefused(429, "serve.too-many-at-once", problem, remedy, headers={"Retry-After": "1"})
        self._going[who] += 1
        return who


def _same_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request is of no browser, or of a page of this service."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site in (b"same-origin", b"none")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host")


def _problem(error: Exception, scope: Scope) -> Response:
    """A problem (RFC 9457) for whatever happened. Of an unexpected error only its type is told, and only to the log."""
    status, headers, more = 500, {}, {}
    match error:
        case RequestRefused():
            status, headers, more = error.status, error.headers, error.more
        case LaminaError(code=code) if code in _UNAVAILABLE or isinstance(
            error, StoreError | StoreBusy | LedgerDamaged
        ):
            status, headers = 503, {"Retry-After": "1"}
            _note(code, scope)  # its text names files
            error = RequestRefused(503, "serve.unavailable", "ledger, log or folder cannot be used now", "try again")
        case EncodingError():
            status = 400
        case LaminaError(code=code):
            status = 404 if code in _UNKNOWN else 403 if isinstance(error, NotVerified) else 422
        case HTTPException():
            status, headers = error.status_code, dict(error.headers or {})
            word = {404: "serve.not-found", 405: "serve.method"}.get(status, "serve.not-understood")
            error = RequestRefused(status, word, HTTPStatus(status).phrase, "see /v1/openapi.json")
        case TimeoutError() if scope.get("lamina.reading"):
            status, problem = 408, "the request did not arrive in time"
            error = RequestRefused(status, "serve.body-too-slow", problem, "send it faster")
        case TimeoutError():
            status, headers = 503, {"Retry-After": "1"}
            error = RequestRefused(status, "serve.timeout", "the answer took too long", "send fewer inputs")
    if not isinstance(error, LaminaError):
        _note(type(error).__name__, scope)
        error = RequestRefused(500, "serve.unexpected", "something went wrong here", "tell whoever runs this service")
    told = {"type": f"urn:lamina:error:{error.code}", "title": HTTPStatus(status).phrase, "status": status}
    told |= {"detail": error.problem, "code": error.code, "family": error.family, "remedy": error.remedy, **more}
    return Response(_encode(told), status, headers, "application/problem+json")


def _note(what: str, scope: Scope) -> None:
    print(f"lamina serve: {what} in {scope.get('path', '')[:80]!r}", file=sys.stderr)


def _encode(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _json(value: object, status: int = 200) -> Response:
    return Response(value if isinstance(value, bytes) else _encode(value), status, media_type=_JSON)


Task = Generator[None, None, bytes]  # computes up to each yield, and then its answer
Outcome = tuple[asyncio.Future[bytes], bytes, BaseException | None]


class _ModelThread:
    """One thread for what computes. Of quick requests that wait it does several together, step by step: what each step needs
    of the processor's caches is then there, and thread and loop wake each other seldom. Each has an answer of its own."""

    def __init__(self) -> None:
        self._threads, self._lock, self._working = ThreadPoolExecutor(1, "model"), threading.Lock(), False
        self._waiting: deque[tuple[asyncio.Future[bytes], Callable[[bytes], Task], bytes]] = deque()
        self._seconds = _TOGETHER  # that one took of late

    async def run(self, task: Callable[[bytes], Task], body: bytes) -> bytes:
        """The answer of the task, or what it raised. A task that nobody waits for any more is not begun."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((future, task, body))
            begin, self._working = not self._working, True
        if begin:
            self._threads.submit(self._work)
        return await future

    def _work(self) -> None:
        while True:
            with self._lock:
                most = int(min(_MOST_TOGETHER, max(1.0, _TOGETHER / self._seconds)))
                taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
                self._working = bool(taken)
            if not taken:
                return
            began = time.perf_counter()
            done: list[Outcome] = []
            going = [(future, task(body)) for future, task, body in taken if not future.cancelled()]
            while going:
                going = [each for each in going if _goes_on(*each, done)]
            self._seconds = (time.perf_counter() - began) / len(taken)
            for loop in {future.get_loop() for future, _, _ in done}:
                with suppress(RuntimeError):  # a loop that is closed: nobody waits
                    loop.call_soon_threadsafe(_give, [each for each in done if each[0].get_loop() is loop])


def _goes_on(future: asyncio.Future[bytes], task: Task, done: list[Outcome]) -> bool:
    """Whether there is another step after the next one."""
    try:
        next(task)
    except StopIteration as end:
        done.append((future, end.value, None))
    except BaseException as error:
        done.append((future, b"", error))
    else:
        return True
    return False


def _give(outcomes: list[Outcome]) -> None:
    for future, found, error in outcomes:
        if future.done():  # its time was over meanwhile
            continue
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)


class _Api:
    """The endpoints. Whatever reads a disk or computes runs in a thread."""

    def __init__(self, service: Service) -> None:
        self._service, self._limits = service, service.limits
        self._model_thread = _ModelThread()
        self._ledger_threads = ThreadPoolExecutor(2, "ledger")
        self._papers = service.papers()
        self._queries: dict[str, Query] = {}
        self._openapi = _encode(openapi(__version__))

    async def _body(self, request: Request, kind: str, most: int | None = None) -> bytes:
        most = self._limits.body if most is None else most
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != kind:
            raise RequestRefused(415, "serve.content-type", f"the content type is {given[:80]!r}", f"send {kind}")
        found, request.scope["lamina.reading"] = bytearray(), True
        async for part in request.stream():
            found += part
            if len(found) > most:
                raise RequestRefused(413, "serve.body-too-large", f"more than {most} bytes were sent", "send less")
        request.scope["lamina.reading"] = False
        return bytes(found)

    async def _run(self, threads: ThreadPoolExecutor, task: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, task, *given)

    async def infer(self, request: Request) -> Response:
        body = await self._body(request, _JSON)
        return _json(await self._model_thread.run(self._infer, body))

    def _infer(self, body: bytes) -> Task:
        service = self._service
        if service.inference is None:
            raise RequestRefused(404, "serve.no-model", "no model is served here", "serve a release with --model")
        query, asked = self._read_query(body, {"query", "inputs"})
        inputs = service.inference.form.read(asked["inputs"])
        decision = service.decide(query, answering=True)
        if not decision.allowed:
            problem = f"the query is denied for {pluralize(len(decision.reasons), 'reason')}"
            remedy = "ask for what the release allows"
            raise RequestRefused(403, "serve.denied", problem, remedy, more=decision.to_dict())
        yield
        outputs = service.inference.answer(query, inputs)
        yield
        return _encode({"outputs": outputs, "decision": decision.to_dict()})

    async def decide(self, request: Request) -> Response:
        body = await self._body(request, _JSON)
        return _json(await self._model_thread.run(self._decide, body))

    def _decide(self, body: bytes) -> Task:
        query, _ = self._read_query(body, {"query"})
        decision = self._service.decide(query, answering=False)
        yield
        return _encode(decision.to_dict())

    def _read_query(self, body: bytes, fields: set[str]) -> tuple[Query, dict[str, Any]]:
        asked = parse_json(body, "the request")
        if type(asked) is not dict or asked.keys() != fields:
            problem = f"the request must have {' and '.join(sorted(fields))}"
            raise RequestRefused(400, "serve.fields", problem, "send these")
        try:
            text = repr(asked["query"])  # of JSON: equal texts are equal values
        except RecursionError:  # too deep for a query
            return Query.from_dict(asked["query"]), asked
        if (found := self._queries.get(text)) is None:
            found = Query.from_dict(asked["query"])
            if len(self._queries) >= _MOST_QUERIES:
                self._queries.clear()
            if len(text) <= _MOST_QUERY_CHARACTERS:
                self._queries[text] = found
        return found, asked

    async def withdraw(self, request: Request) -> Response:
        body = await self._body(request, _COSE, MAX_REQUEST_BYTES)
        told = await self._run(self._ledger_threads, self._withdraw, body)
        return _json(told, 202 if told["state"] == "pending" else 200)

    def _withdraw(self, body: bytes) -> dict[str, str]:
        ledger, folder = self._service.ledger, self._withdrawals()
        if ledger is None:
            raise _no_ledger()
        request = check_withdrawal(body, ledger)
        state = drop_withdrawal(folder, body, request)
        return {"name": request.name, "state": state, "request": request.digest.hex()}

    def _withdrawals(self) -> Path:
        if self._service.withdrawals is None:
            problem = "withdrawals are not taken here"
            raise RequestRefused(404, "serve.no-withdrawals", problem, "ask the keeper of the ledger")
        return self._service.withdrawals

    async def withdrawal(self, request: Request) -> Response:
        name, folder = request.path_params["name"], self._withdrawals()
        plain = len(name) == 32 and set(name) <= set("0123456789abcdef")
        state = await self._run(self._ledger_threads, withdrawal_state, folder, name) if plain else None
        if state is None:
            raise RequestRefused(404, "serve.withdrawal-unknown", "there is no such request", "check its name")
        return _json({"name": name, "state": state})

    def ledger(self, task: Callable[[LedgerReader, Request, Limits], Answer]) -> Callable[[Request], Any]:
        """An endpoint that reads the ledger."""

        async def endpoint(request: Request) -> Response:
            if (ledger := self._service.ledger) is None:
                raise _no_ledger()
            found: Answer = await self._run(self._ledger_threads, task, ledger, request, self._limits)
            return found if isinstance(found, Response) else _json(found)

        return endpoint

    async def paper(self, request: Request) -> Response:
        data = self._papers.get(request.path_params["name"])
        if data is None:
            problem = "there is no such paper here"
            raise RequestRefused(404, "serve.no-paper", problem, "ask for manifest or certificate")
        return _json(data)

    async def openapi(self, request: Request) -> Response:
        return _json(self._openapi)

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        ledger = self._service.ledger
        size = None if ledger is None else await self._run(self._ledger_threads, lambda: ledger.size)
        return Response(self._service.metrics.text(size), media_type="text/plain; version=0.0.4")


def _no_ledger() -> RequestRefused:
    return RequestRefused(404, "serve.no-ledger", "no ledger is served here", "serve with --ledger")


# ------------------------------------------------------------------------------------------ the ledger


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RequestRefused(400, "serve.parameter", f"{name} must be a whole number", "give it in digits")
    return int(text)


def _head(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    tree, text = ledger.tree(), ledger.latest()
    signed = None if text is None else parse_checkpoint(text)[0].size
    header = leaf_hash(ledger.raw(0).leaf).hex()
    return {"origin": tree.origin, "size": tree.size, "root": tree.root.hex(), "header": header, "signed": signed}


def _checkpoint(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    if (text := ledger.latest()) is None:
        raise RequestRefused(404, "serve.no-checkpoint", "the ledger has no signed checkpoint yet", "ask again later")
    return Response(text, media_type=_TEXT)


def _leaf_fields(seq: int, data: StoredLeaf) -> dict[str, Any]:
    return {
        "index": seq,
        "hash": leaf_hash(data.leaf).hex(),
        "leaf": data.leaf.hex(),
        "body": None if data.body is None else data.body.hex(),
        "record": leaf_to_dict(decode_leaf(data)),
    }


def _leaves(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    size = ledger.size
    first = _number(request.query_params, "from", 0)
    stop = min(size, _number(request.query_params, "to", size), first + limits.leaves)
    found = [_leaf_fields(seq, data) for seq, data in ledger.raw_leaves(first, stop)] if first < stop else []
    return {"from": first, "to": first + len(found), "size": size, "leaves": found}


def _leaf(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    seq = _number(request.path_params, "seq")
    return _leaf_fields(seq, ledger.raw(seq))


def _proof(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    seq = _number(request.path_params, "seq")
    text = ledger.proof_text(seq)
    found = TlogProof.parse(text)
    head, _ = parse_checkpoint(found.checkpoint)
    told = {
        "index": seq,
        "size": head.size,
        "root": head.root.hex(),
        "leaf_hash": leaf_hash(ledger.raw(seq).leaf).hex(),
    }
    path = [each.hex() for each in found.path]
    return Response(_encode({**told, "path": path, "text": text}), media_type=_JSON)


def _consistency(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    old, new = _number(request.query_params, "old"), _number(request.query_params, "new", ledger.size)
    if not 1 <= old <= new:
        raise RequestRefused(400, "serve.parameter", f"old is {old} and new {new}", "give 1 <= old <= new")
    path = [each.hex() for each in ledger.consistent(old, new)]
    roots = {"old_root": ledger.root_at(old).hex(), "new_root": ledger.root_at(new).hex()}
    return {"old": old, "new": new, "path": path, **roots}


def _receipt(ledger: LedgerReader, request: Request, limits: Limits) -> Answer:
    return Response(ledger.receipt(_number(request.path_params, "seq")), media_type=_COSE)
