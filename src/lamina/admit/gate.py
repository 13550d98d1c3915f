"""The admission gate: examines contributions in one or several processes, caches what it verified, and admits."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from lamina import validate
from lamina.admit.admission import Admission, CrossChecks, Progress, revalidate_rows
from lamina.admit.checks import MAX_PAYLOAD, Examiner, PolicyChecks, Verdict, check_id
from lamina.admit.contribution_sources import Contribution, ContributionSource, FolderContributions
from lamina.admit.verdicts import (
    REASON_CODES,
    REASONS,
    ROW_STRUCT,
    AdmittedRows,
    ContributionRefused,
    PackedTexts,
    Reason,
    Refusal,
    Refusals,
    Register,
    unpack_row,
)
from lamina.errors import AdmissionError
from lamina.plan.policy import Policy
from lamina.plan.table import printable
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import LAST_SECOND, format_utc


class Clock:
    """A clock that must not go back: it would let in again what had expired, or what a key signed that is revoked."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._latest = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        """The current second. AdmissionError: it is before one that was seen."""
        return self.advance_to(self._source())

    def advance_to(self, seconds: float) -> int:
        """Take `seconds` for the current time."""
        if not isinstance(seconds, int | float) or not 0 <= seconds <= LAST_SECOND:
            problem = f"the clock shows {seconds!r}, must be seconds since 1970"
            raise AdmissionError("admit.clock-out-of-range", problem, "set the clock right")
        current = math.floor(seconds)
        with self._lock:
            if current < self._latest:
                problem = f"the clock went back from {format_utc(self._latest)} to {format_utc(current)}"
                raise AdmissionError("admit.clock-went-back", f"{problem}; nothing was admitted", "set the clock right")
            self._latest = current
        return current


CACHE_LIMIT = 1 << 16  # entries, of a kilobyte each


class VerificationCache:
    """Contributions whose attestation was verified, by the bytes of attestation and descriptor.

    Of each it keeps what is left to check, nonce and commitment of the payload, and when that ends.

    An entry dies with its epoch, with its window, when its key is revoked, and all die with any change of the key
    ring. Refusals are not remembered: whoever sends rubbish fills nothing. When it is full the oldest entry goes.
    """

    def __init__(self, limit: int = CACHE_LIMIT) -> None:
        self._limit = limit
        self._kept: dict[tuple[bytes | None, bytes | None], tuple[int, bytes, bytes]] = {}
        self._version = b""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, given: Contribution, now: int, version: bytes) -> tuple[bytes, bytes] | None:
        """Return nonce and commitment if these very bytes were verified under this key ring, and still count."""
        until, nonce, commitment = self._kept.get((given.attestation, given.descriptor), (now, b"", b""))
        return (nonce, commitment) if version == self._version and until > now else None

    def put(self, given: Contribution, until: int, nonce: bytes, commitment: bytes, version: bytes) -> None:
        """Remember what was verified just now."""
        if version != self._version:
            self._kept.clear()
            self._version = version
        name = given.attestation, given.descriptor
        self._kept.pop(name, None)
        if len(self._kept) >= self._limit:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = until, nonce, commitment


CHUNK_SIZE = 128  # contributions in a chunk
CHUNK_BYTES = 1 << 22  # bytes of payloads in memory at the same time, unless a single one has more
MAX_CHUNKS_AHEAD = 64  # chunks that may be finished before one that takes longer

Chunk = range | list[Contribution]  # positions among the names of a source, or what was read here


class ContributionChunks:
    """The contributions in chunks. Of a `ContributionSource` only the names are read here; the examiner reads the rest."""

    def __init__(self, contributions: Iterable[Contribution] | ContributionSource) -> None:
        self._given = contributions
        self._source = contributions if isinstance(contributions, ContributionSource) else None
        self._names = PackedTexts() if self._source is None else self._source.names()

    @property
    def by_name(self) -> bool:
        """Whether a chunk is a range of names, which whoever examines it reads."""
        return self._source is not None

    def __iter__(self) -> Iterator[Chunk]:
        if self._source is None:
            return split_into_chunks(self._given)  # type: ignore[arg-type]
        count = len(self._names)
        return (range(start, min(start + CHUNK_SIZE, count)) for start in range(0, count, CHUNK_SIZE))

    def ids(self, chunk: Chunk) -> list[str]:
        """The id of each contribution of a chunk."""
        return [self._names[each] if isinstance(each, int) else each.id for each in chunk]

    def contributions(self, chunk: Chunk) -> Iterator[Contribution]:
        """The contributions of a chunk, read if need be. One that its source fails to give has a `read_error`."""
        return (self._read(self._names[each]) if isinstance(each, int) else each for each in chunk)

    def _read(self, id: str) -> Contribution:
        assert self._source is not None
        try:
            found = self._source.get(id)
            if not isinstance(found, Contribution):
                raise TypeError(f"{type(found).__name__} instead of a contribution")
        except Exception as error:
            return Contribution(id, read_error=(Reason.CHECK_FAILED, type(error).__name__))
        return found


def split_into_chunks(contributions: Iterable[Contribution]) -> Iterator[list[Contribution]]:
    """Lists that are bounded in number and in bytes."""
    chunk: list[Contribution] = []
    size = 0
    for given in contributions:
        if not isinstance(given, Contribution):
            problem = f"number {len(chunk)} of a chunk is a {type(given).__name__}, must be a Contribution"
            raise AdmissionError("admit.not-a-contribution", problem, "give lamina.admit.Contribution objects")
        chunk.append(given)
        size += len(given.payload) if isinstance(given.payload, bytes) else 0
        if len(chunk) >= CHUNK_SIZE or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def examine_contributions(
    contributions: Iterable[Contribution] | ContributionSource, examiner: Examiner, now: int, processes: int
) -> Iterator[tuple[str, Verdict]]:
    """(id, verdict) of each. A `ContributionSource` is read where it is examined; others are read here and sent."""
    chunks = ContributionChunks(contributions)
    if processes > 1:
        yield from _WorkerPool(chunks, examiner, now, processes).verdicts()
        return
    for chunk in chunks:
        yield from zip(chunks.ids(chunk), _examine_chunk(chunks, chunk, examiner, now), strict=True)


def _examine_chunk(chunks: ContributionChunks, chunk: Chunk, examiner: Examiner, now: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for offered in split_into_chunks(chunks.contributions(chunk)):
        verdicts += examiner.examine_all(offered, now)
    return verdicts


class WorkerProcess:
    """A forked process that runs `serve(line)`, and our end of the line. It ends when we do."""

    def __init__(self, serve: Callable[[Connection[Any, Any]], None], others: Iterable[WorkerProcess]) -> None:
        context = multiprocessing.get_context("fork")
        self.line, theirs = context.Pipe()
        ours = [self.line, *(other.line for other in others)]
        self._process: ForkProcess = context.Process(target=_serve, args=(serve, theirs, ours), daemon=True)
        with warnings.catch_warnings():  # it runs no threads and takes no locks that ours may hold
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """AdmissionError: the process has ended."""
        try:
            self.line.send(message)
        except OSError:
            raise self._ended() from None

    def receive(self) -> bytes:
        """Bytes, and never a pickle: whoever reads what strangers sent must not be able to run code here.

        AdmissionError: the process has ended.
        """
        try:
            return self.line.recv_bytes()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> AdmissionError:
        self._process.join(5)
        code = self._process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        problem = f"worker process {self._process.pid} was ended {how}; nothing was admitted"
        return AdmissionError("admit.worker-ended", problem, "admit again; with processes=1 if memory is short")

    def stop(self) -> None:
        self.line.close()  # which ends a process that is waiting for work
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    serve: Callable[[Connection[Any, Any]], None], line: Connection[Any, Any], others: list[Connection[Any, Any]]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    for other in others:
        other.close()  # or we would keep the lines of other workers open, and wait for a parent that is gone
    with contextlib.suppress(EOFError, OSError):
        serve(line)


_PASSED = 0xFF  # before a row; before a refusal stands the number of its reason


def verdicts_to_bytes(verdicts: list[Verdict]) -> bytes:
    out = bytearray()
    for verdict in verdicts:
        if isinstance(verdict, bytes):
            out.append(_PASSED)
            out += verdict
        else:
            detail = verdict[1].encode("utf-8", "surrogatepass")
            out.append(REASON_CODES[verdict[0]])
            out += len(detail).to_bytes(8, "little") + detail
    return bytes(out)


def verdicts_from_bytes(data: bytes, count: int) -> list[Verdict]:
    """Return the verdicts on `count` contributions that a worker sent; raise AdmissionError if its message is malformed."""
    verdicts: list[Verdict] = []
    at = 0
    try:
        for _ in range(count):
            code, at = data[at], at + 1
            if code == _PASSED:
                end = at + ROW_STRUCT.size
                verdicts.append(data[at:end])
            else:
                end = at + 8 + int.from_bytes(data[at : at + 8], "little")
                verdicts.append((REASONS[code], data[at + 8 : end].decode("utf-8", "surrogatepass")))
            at = end
    except (IndexError, KeyError, UnicodeDecodeError):
        at = -1
    if at != len(data):
        problem = "a worker process sent a malformed message; nothing was admitted"
        raise AdmissionError("admit.worker-malformed", problem, "admit again with processes=1")
    return verdicts


class _WorkerPool:
    """Processes that examine chunks; verdicts come in the order of the source.

    Neither side ever waits for the other to read: a process has one chunk at a time, or two ranges of names, so that
    it has something to do while we are busy.
    """

    def __init__(self, chunks: ContributionChunks, examiner: Examiner, now: int, processes: int) -> None:
        self._chunks, self._examiner, self._now, self._processes = chunks, examiner, now, processes
        self._pending: dict[WorkerProcess, deque[tuple[int, Chunk]]] = {}
        self._sent = 0

    def verdicts(self) -> Iterator[tuple[str, Verdict]]:
        try:
            for _ in range(self._processes):
                self._pending[WorkerProcess(self._examine, self._pending)] = deque()
            yield from self._run()
        finally:
            for worker in self._pending:
                worker.stop()

    def _run(self) -> Iterator[tuple[str, Verdict]]:
        chunks = enumerate(self._chunks)
        finished: dict[int, tuple[Chunk, list[Verdict]]] = {}
        wanted = 0
        for worker in [*self._pending, *self._pending]:  # nobody has two chunks before each has one
            self._send(worker, chunks, wanted)
        while busy := {worker.line: worker for worker, pending in self._pending.items() if pending}:
            for line in wait(list(busy)):
                worker = busy[line]  # type: ignore[index]
                number, chunk = self._pending[worker].popleft()
                finished[number] = chunk, verdicts_from_bytes(worker.receive(), len(chunk))
                self._send(worker, chunks, wanted)
            while wanted in finished:
                done, verdicts = finished.pop(wanted)
                wanted += 1
                yield from zip(self._chunks.ids(done), verdicts, strict=True)
            for worker in self._pending:
                self._send(worker, chunks, wanted)

    def _send(self, worker: WorkerProcess, chunks: Iterator[tuple[int, Chunk]], wanted: int) -> None:
        """One chunk more, if the worker may have one and there is one."""
        pending = self._pending[worker]
        if len(pending) >= (2 if self._chunks.by_name else 1) or self._sent - wanted > MAX_CHUNKS_AHEAD:
            return
        for number, chunk in islice(chunks, 1):
            pending.append((number, chunk))
            self._sent = number + 1
            worker.send(chunk)

    def _examine(self, line: Connection[Any, Any]) -> None:
        """What a worker does until its line is closed. No torch, no randomness, nothing written."""
        while True:
            line.send_bytes(verdicts_to_bytes(_examine_chunk(self._chunks, line.recv(), self._examiner, self._now)))


class AdmissionGate:
    """Admits contributions under a policy, by the keys of a ring.

    clock        seconds since 1970; must not go back
    register     what was admitted before; without it only replays within one review are found
    processes    how many examine at the same time; the result does not depend on it
    max_payload  a larger payload is refused

    A contribution is admitted if every check of `Examiner` and of `CrossChecks` passes. Each refusal has a `Reason`
    (docs/admission.md), and one bad contribution stops no other.
    """

    def __init__(
        self,
        policy: Policy,
        keys: KeyRing,
        *,
        clock: Callable[[], float] = time.time,
        register: Register | None = None,
        processes: int = 1,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        validate.whole(AdmissionError, "admit.processes-out-of-range", most=256, processes=processes)
        self.policy = policy
        self.keys = keys
        self.policy_checks = PolicyChecks(policy)
        self.clock = Clock(clock)
        self.register = register
        self.processes = processes
        self._max_payload = max_payload
        self._cache = VerificationCache()
        self._examiner = self.examiner()

    def examiner(self) -> Examiner:
        """What looks at single contributions, by the keys as they are now."""
        return Examiner(self.policy_checks, self.keys, self._max_payload)

    def review(
        self,
        contributions: Iterable[Contribution] | str | Path,
        *,
        progress: Progress | None = None,
        enter: bool = True,
    ) -> Admission:
        """Examine all of them, in their order. A path is a folder of contributions.

        Without `enter` the register is read, and written only by `Admission.enter`.
        """
        if isinstance(contributions, str | Path):
            contributions = FolderContributions(contributions)
        examiner, now = self.examiner(), self.clock.now()
        rows, refusals = AdmittedRows(), Refusals()
        for position, (id, verdict) in enumerate(self.verdicts(contributions, examiner, now, progress)):
            if isinstance(verdict, bytes):
                rows.add(position, id, verdict)
            else:
                refusals.add(position, id, *verdict)
        lapsed = revalidate_rows(rows.table, self.keys, examiner.kids, self.clock.now())
        CrossChecks(rows, refusals, examiner.kids, self.policy_checks).apply(lapsed, self.register)
        admission = Admission(self, contributions, rows, refusals, examiner.kids, now)
        if enter:
            admission.enter()
        return admission

    def verdicts(
        self, contributions: Iterable[Contribution], examiner: Examiner, now: int, progress: Progress | None = None
    ) -> Iterator[tuple[str, Verdict]]:
        """(id, verdict) of each contribution by itself."""
        found = examine_contributions(contributions, examiner, now, self.processes)
        if progress is None:
            yield from found
            return
        total = len(contributions) if isinstance(contributions, Sized) else None
        for done, each in enumerate(found, start=1):
            yield each
            if done % CHUNK_SIZE == 0 or done == total:
                progress(done, total)

    def check(self, contribution: Contribution) -> Refusal | None:
        """Why this contribution may not be used now; None if it may, as far as it alone is concerned.

        An attestation that was verified in this epoch is not verified again; the payload is read again. Whether
        somebody was admitted before, about the same person or in the last place of its class, is for `review` to say.
        """
        now, version = self.clock.now(), self.keys.version
        kept = self._cache.get(contribution, now, version)
        try:
            if kept is not None:
                check_id(contribution.id)
                self._examiner.check_payload(contribution.payload, *kept)
                return None
        except ContributionRefused as refused:
            return Refusal(printable(contribution.id), refused.reason, printable(refused.detail))
        if self._examiner.version != version:
            self._examiner = self.examiner()
        verdict = self._examiner.examine(contribution, now)
        if not isinstance(verdict, bytes):
            return Refusal(printable(contribution.id), verdict[0], printable(verdict[1]))
        self._remember(contribution, verdict, now)
        return None

    def _remember(self, given: Contribution, verdict: bytes, now: int) -> None:
        row = unpack_row(verdict)
        entry = self.keys.get(self._examiner.kids[int(row["key"])])
        ends = [now + self.policy.corpus.epoch, int(row["expires"])]
        if entry is not None and entry.revoked_from is not None:
            ends.append(entry.revoked_from)
        nonce, commitment = row["nonce"].tobytes(), row["commitment"].tobytes()
        self._cache.put(given, min(ends), nonce, commitment, self._examiner.version)
