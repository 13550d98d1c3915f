"""`examined`: verdicts on many contributions, in this process or by several, always in the order of the source."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from lamina.admit.examine import Examiner, Verdict
from lamina.admit.parts import Part, Parts, gathered
from lamina.admit.source import Contribution, Source
from lamina.admit.wire import read_part, read_verdicts, write_part, write_verdicts
from lamina.errors import AdmissionError

AHEAD = 64  # parts that may be finished before one that takes longer


def examined(
    contributions: Iterable[Contribution] | Source, examiner: Examiner, now: int, processes: int
) -> Iterator[tuple[str, Verdict]]:
    """(id, verdict) of each. A `Source` is read where it is examined; others are read here and sent."""
    parts = Parts(contributions)
    if processes > 1:
        yield from _Pool(parts, examiner, now, processes).verdicts()
        return
    for part in parts:
        yield from zip(parts.ids(part), _judged(parts, part, examiner, now), strict=True)


def _judged(parts: Parts, part: Part, examiner: Examiner, now: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for offered in gathered(parts.held(part)):
        verdicts += examiner.examine_all(offered, now)
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
        self.parts: deque[tuple[int, Part]] = deque()

    def failed(self) -> AdmissionError:
        self.process.join(5)
        code = self.process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        return AdmissionError(
            "admit.process-gate-id",
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
    """Processes that examine.

    Neither side ever waits for the other to read: a process has one part at a time, or two of a few bytes each, so
    that it has something to do while we are busy.
    """

    def __init__(self, parts: Parts, examiner: Examiner, now: int, processes: int) -> None:
        self._parts = parts
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
        parts = enumerate(self._parts)
        finished: dict[int, tuple[Part, list[Verdict]]] = {}
        wanted = 0
        for worker in self._workers * 2:  # nobody has two parts before each has one
            self._send(worker, parts, wanted)
        while busy := [worker for worker in self._workers if worker.parts]:
            for line in wait([worker.line for worker in busy]):
                worker = next(each for each in busy if each.line is line)
                number, part = worker.parts.popleft()
                try:
                    answer = worker.line.recv_bytes()
                except (EOFError, OSError):
                    raise worker.failed() from None
                self._send(worker, parts, wanted)  # first, so that it is not idle while we read
                finished[number] = part, read_verdicts(answer, len(part))
            while wanted in finished:
                done, verdicts = finished.pop(wanted)
                wanted += 1
                yield from zip(self._parts.ids(done), verdicts, strict=True)
            for worker in self._workers:
                self._send(worker, parts, wanted)

    def _send(self, worker: _Worker, parts: Iterator[tuple[int, Part]], wanted: int) -> None:
        """One part more, if it may have one and there is one."""
        if len(worker.parts) >= (2 if self._parts.named else 1) or self._sent - wanted > AHEAD:
            return
        for number, part in islice(parts, 1):
            worker.parts.append((number, part))
            self._sent = number + 1
            try:
                worker.line.send_bytes(write_part(part))
            except OSError:
                raise worker.failed() from None

    def _serve(self, line: Connection[Any, Any], others: list[Connection[Any, Any]]) -> None:
        """What a worker does until its line is closed. No torch, no randomness, nothing written."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
        for other in others:
            other.close()  # or we would keep the lines of other workers open
        with contextlib.suppress(EOFError, OSError):
            while True:
                part = read_part(line.recv_bytes())
                line.send_bytes(write_verdicts(_judged(self._parts, part, self._examiner, self._now)))
