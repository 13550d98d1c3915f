"""`examined`: verdicts on many contributions, in this process or by several, always in the order of the source."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import struct
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from lamina.admit.examine import Examiner, Verdict
from lamina.admit.reason import CODES, REASONS, Reason
from lamina.admit.rows import PACK
from lamina.admit.source import Contribution, Source
from lamina.errors import AdmissionError

AT_ONCE = 128  # contributions in a part
AT_MOST = 1 << 22  # bytes in a part, if one contribution does not have more already
AHEAD = 64  # parts that may be finished before one that takes longer

_SIZE = struct.Struct("<Q")
_NONE = (1 << 64) - 1
_PASSED = 0xFF

Part = list[str] | list[Contribution]


def examined(
    contributions: Iterable[Contribution] | Source, examiner: Examiner, now: int, processes: int
) -> Iterator[tuple[str, Verdict]]:
    """(id, verdict) of each. A `Source` is read where it is examined; others are read here and sent."""
    if processes > 1:
        yield from _Pool(contributions, examiner, now, processes).verdicts()
        return
    for part in _parts(contributions):
        yield from zip(_ids(part), _judged(part, contributions, examiner, now), strict=True)


def _parts(contributions: Iterable[Contribution] | Source) -> Iterator[Part]:
    if isinstance(contributions, Source):
        names = contributions.names()
        for start in range(0, len(names), AT_ONCE):
            rows = range(start, min(start + AT_ONCE, len(names)))
            yield [names[row].decode("utf-8", "surrogateescape") for row in rows]
        return
    part: list[Contribution] = []
    size = 0
    for given in contributions:
        if not isinstance(given, Contribution):
            raise AdmissionError(
                f"number {len(part)} of a part is a {type(given).__name__}", "give lamina.admit Contributions"
            )
        part.append(given)
        size += len(given.payload) if isinstance(given.payload, bytes) else 0
        if len(part) >= AT_ONCE or size >= AT_MOST:
            yield part
            part, size = [], 0
    if part:
        yield part


def _ids(part: Part) -> list[str]:
    return [each if isinstance(each, str) else each.id for each in part]


def _judged(part: Part, source: Any, examiner: Examiner, now: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for each in part:
        try:
            given = source.get(each) if isinstance(each, str) else each
        except Exception as error:
            verdicts.append((Reason.CHECK_FAILED, type(error).__name__))
            continue
        verdicts.append(examiner.examine(given, now))
    return verdicts


# ------------------------------------------------------------------------------------------------ several processes


class _Worker:
    """One process and our end of its line."""

    def __init__(self, serve: Any, others: list[Connection[Any, Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.line, theirs = context.Pipe()
        self.process: ForkProcess = context.Process(
            target=serve, args=(theirs, [*others, self.line]), daemon=True
        )
        with warnings.catch_warnings():  # it runs no threads and takes no locks that ours may hold
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            self.process.start()
        theirs.close()
        self.part: tuple[int, Part] | None = None

    def failed(self) -> AdmissionError:
        self.process.join(5)
        code = self.process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        return AdmissionError(
            f"a process of the gate (id {self.process.pid}) was ended {how}; nothing was admitted",
            "admit again; with processes=1 if memory is short",
        )

    def stop(self) -> None:
        self.line.close()  # which ends a process that is waiting for work
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class _Pool:
    """Processes that examine. Each has one part at a time, so neither side ever waits for the other to read."""

    def __init__(
        self, contributions: Iterable[Contribution] | Source, examiner: Examiner, now: int, processes: int
    ) -> None:
        self._contributions = contributions
        self._examiner = examiner
        self._now = now
        self._workers: list[_Worker] = []
        self._processes = processes
        self._sent = 0

    def verdicts(self) -> Iterator[tuple[str, Verdict]]:
        try:
            for _ in range(self._processes):
                self._workers.append(_Worker(self._serve, [each.line for each in self._workers]))
            yield from self._run()
        finally:
            for worker in self._workers:
                worker.stop()

    def _run(self) -> Iterator[tuple[str, Verdict]]:
        parts = enumerate(_parts(self._contributions))
        finished: dict[int, tuple[Part, list[Verdict]]] = {}
        wanted = 0
        for worker in self._workers:
            self._send(worker, parts, wanted)
        while busy := [worker for worker in self._workers if worker.part is not None]:
            for line in wait([worker.line for worker in busy]):
                worker = next(each for each in busy if each.line is line)
                assert worker.part is not None
                number, part = worker.part
                try:
                    answer = worker.line.recv_bytes()
                except (EOFError, OSError):
                    raise worker.failed() from None
                self._send(worker, parts, wanted)  # first, so that it is not idle while we read
                finished[number] = part, _read_verdicts(answer, len(part))
            while wanted in finished:
                done, verdicts = finished.pop(wanted)
                wanted += 1
                yield from zip(_ids(done), verdicts, strict=True)
            for worker in self._workers:
                if worker.part is None:
                    self._send(worker, parts, wanted)

    def _send(self, worker: _Worker, parts: Iterator[tuple[int, Part]], wanted: int) -> None:
        worker.part = None
        if self._sent - wanted > AHEAD:
            return
        for number, part in islice(parts, 1):
            worker.part = number, part
            self._sent = number + 1
            try:
                worker.line.send_bytes(_write_part(part))
            except OSError:
                raise worker.failed() from None

    def _serve(self, line: Connection[Any, Any], others: list[Connection[Any, Any]]) -> None:
        """What a worker does until its line is closed. No torch, no randomness, nothing written."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
        for other in others:
            other.close()  # or we would keep the lines of other workers open
        with contextlib.suppress(EOFError, OSError):
            while True:
                part = _read_part(line.recv_bytes())
                verdicts = _judged(part, self._contributions, self._examiner, self._now)
                line.send_bytes(_write_verdicts(verdicts))


# ------------------------------------------------------------------------------------------------ what goes over a line


def _write_part(part: Part) -> bytes:
    out = bytearray()
    for each in part:
        if isinstance(each, str):
            _put(out, b"n")
            _put(out, each.encode("utf-8", "surrogateescape"))
            continue
        _put(out, b"c")
        _put(out, _text(each.id))
        _put(out, each.descriptor)
        _put(out, each.attestation)
        if isinstance(each.payload, Path):
            _put(out, b"p")
            _put(out, str(each.payload).encode("utf-8", "surrogateescape"))
        else:
            _put(out, b"b")
            _put(out, each.payload)
        reason, detail = each.trouble if each.trouble is not None else (None, "")
        _put(out, None if reason is None else bytes([CODES[reason]]) + _text(detail))
    return bytes(out)


def _read_part(data: bytes) -> Part:
    fields = _fields(data)
    names: list[str] = []
    given: list[Contribution] = []
    for kind in fields:
        if kind == b"n":
            names.append((next(fields) or b"").decode("utf-8", "surrogateescape"))
            continue
        id, descriptor, attestation, form, payload, trouble = islice(fields, 6)
        assert id is not None
        at = None if payload is None or form == b"b" else Path(payload.decode("utf-8", "surrogateescape"))
        why = None if trouble is None else (REASONS[trouble[0]], trouble[1:].decode("utf-8", "surrogatepass"))
        given.append(
            Contribution(
                id.decode("utf-8", "surrogatepass"),
                descriptor,
                attestation,
                payload if at is None else at,
                why,
            )
        )
    return names or given


def _write_verdicts(verdicts: list[Verdict]) -> bytes:
    out = bytearray()
    for verdict in verdicts:
        if isinstance(verdict, bytes):
            out.append(_PASSED)
            out += verdict
        else:
            out.append(CODES[verdict[0]])
            _put(out, _text(verdict[1]))
    return bytes(out)


def _read_verdicts(data: bytes, count: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    at = 0
    for _ in range(count):
        code = data[at]
        at += 1
        if code == _PASSED:
            verdicts.append(data[at : at + PACK.size])
            at += PACK.size
        else:
            (size,) = _SIZE.unpack_from(data, at)
            verdicts.append((REASONS[code], data[at + 8 : at + 8 + size].decode("utf-8", "surrogatepass")))
            at += 8 + size
    assert at == len(data)
    return verdicts


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _put(out: bytearray, item: bytes | None) -> None:
    out += _SIZE.pack(_NONE if item is None else len(item))
    out += item or b""


def _fields(data: bytes) -> Iterator[bytes | None]:
    at = 0
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += 8
        if size == _NONE:
            yield None
            continue
        yield data[at : at + size]
        at += size
