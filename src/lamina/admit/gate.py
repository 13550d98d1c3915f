"""The admission gate: examines contributions in one or several processes, caches what it verified, and admits."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import struct
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

from lamina.admit.admission import Admission, CrossChecks, KeyStatusColumns, Progress
from lamina.admit.checks import MAX_PAYLOAD, Examiner, PolicyChecks, Verdict, check_id
from lamina.admit.contribution_sources import Contribution, ContributionSource, FolderContributions
from lamina.admit.key_ring import KeyRing
from lamina.admit.keys import LAST_SECOND, format_utc
from lamina.admit.verdicts import (
    REASON_CODES,
    REASONS,
    ROW_STRUCT,
    AdmittedRows,
    ContributionRefused,
    PackedBytes,
    Reason,
    Refusal,
    Refusals,
    Register,
    printable,
    unpack_row,
)
from lamina.errors import AdmissionError
from lamina.plan.policy import Policy


class Clock:
    """A clock that is believed only as long as it goes forward.

    Set back, it would let in again what had expired or was signed with a key revoked since.
    """

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._latest = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        """The current second. AdmissionError: it is before one that was seen."""
        return self.see(self._source())

    def see(self, seconds: float) -> int:
        """Take `seconds` for the current time."""
        if not isinstance(seconds, int | float) or not 0 <= seconds <= LAST_SECOND:
            raise AdmissionError("admit.clock-out-of-range", f"the clock says {seconds!r}", "give seconds since 1970")
        current = math.floor(seconds)
        with self._lock:
            if current < self._latest:
                raise AdmissionError(
                    "admit.clock-went-back",
                    f"the clock went back from {format_utc(self._latest)} to {format_utc(current)}; nothing is admitted by it",
                    "set the clock right",
                )
            self._latest = current
        return current


CACHE_LIMIT = 1 << 16  # entries, of a kilobyte each


class VerifiedAttestation(NamedTuple):
    """What is left to check of a contribution whose attestation was verified: its payload. And when it ends."""

    until: int
    descriptor: bytes
    nonce: bytes
    commitment: bytes


class VerificationCache:
    """Contributions whose attestation was verified, by its bytes.

    An entry dies with its epoch, with its window, when its key is revoked, and all die with any change of the key
    ring. Refusals are not remembered: whoever sends rubbish fills nothing. When it is full the oldest entry goes.
    """

    def __init__(self, limit: int = CACHE_LIMIT) -> None:
        self._limit = limit
        self._kept: dict[bytes, VerifiedAttestation] = {}
        self._version = b""

    def __len__(self) -> int:
        return len(self._kept)

    def get(
        self, attestation: bytes | None, descriptor: bytes | None, now: int, version: bytes
    ) -> VerifiedAttestation | None:
        """What was verified of these very bytes under this key ring, if it still counts."""
        kept = self._kept.get(attestation) if attestation is not None else None
        if kept is None or version != self._version or kept.until <= now or kept.descriptor != descriptor:
            return None
        return kept

    def put(self, attestation: bytes, kept: VerifiedAttestation, version: bytes) -> None:
        """Remember what was verified just now."""
        if version != self._version:
            self._kept.clear()
            self._version = version
        self._kept.pop(attestation, None)
        if len(self._kept) >= self._limit:
            del self._kept[next(iter(self._kept))]
        self._kept[attestation] = kept


CHUNK_SIZE = 128  # contributions in a part
CHUNK_BYTES = 1 << 22  # bytes of payloads that are held at the same time, if one does not have more already

Chunk = range | list[Contribution]  # places among the names of a source, or what was read here


class ContributionChunks:
    """The contributions in parts. A `Source` is asked for its names here, and for the rest where it is examined."""

    def __init__(self, contributions: Iterable[Contribution] | ContributionSource) -> None:
        self._given = contributions
        self._source = contributions if isinstance(contributions, ContributionSource) else None
        self._names = PackedBytes() if self._source is None else self._source.names()

    @property
    def named(self) -> bool:
        """Whether a part takes a few bytes only, because whoever examines it reads it."""
        return self._source is not None

    def __iter__(self) -> Iterator[Chunk]:
        if self._source is None:
            return split_into_chunks(self._given)  # type: ignore[arg-type]
        count = len(self._names)
        return (range(start, min(start + CHUNK_SIZE, count)) for start in range(0, count, CHUNK_SIZE))

    def ids(self, part: Chunk) -> list[str]:
        """Of all contributions of a part."""
        return [self._name(each) if isinstance(each, int) else each.id for each in part]

    def held(self, part: Chunk) -> Iterator[Contribution]:
        """The contributions of a part, read if they are not. What its source fails to give says so."""
        return (self._read(self._name(each)) if isinstance(each, int) else each for each in part)

    def _name(self, place: int) -> str:
        return self._names[place].decode("utf-8", "surrogateescape")

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
    """In lists that are bounded in number and in bytes."""
    part: list[Contribution] = []
    size = 0
    for given in contributions:
        if not isinstance(given, Contribution):
            raise AdmissionError(
                "admit.not-a-contribution",
                f"number {len(part)} of a part is a {type(given).__name__}",
                "give lamina.admit Contributions",
            )
        part.append(given)
        size += len(given.payload) if isinstance(given.payload, bytes) else 0
        if len(part) >= CHUNK_SIZE or size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


_LENGTH, _RANGE = struct.Struct("<Q"), struct.Struct("<QQ")
_ABSENT = (1 << 64) - 1
_PASSED = 0xFF
_BY_RANGE, _BY_VALUE = b"n", b"c"  # how a part begins


def encode_chunk(part: Chunk) -> bytes:
    """As bytes."""
    if isinstance(part, range):
        return _BY_RANGE + _RANGE.pack(part.start, part.stop)
    out = bytearray(_BY_VALUE)
    for each in part:
        _append_field(out, _encode_text(each.id))
        _append_field(out, each.descriptor)
        _append_field(out, each.attestation)
        if isinstance(each.payload, Path):
            _append_field(out, b"p")
            _append_field(out, str(each.payload).encode("utf-8", "surrogateescape"))
        else:
            _append_field(out, b"b")
            _append_field(out, each.payload)
        reason, detail = each.read_error if each.read_error is not None else (None, "")
        _append_field(out, None if reason is None else bytes([REASON_CODES[reason]]) + _encode_text(detail))
    return bytes(out)


def decode_chunk(data: bytes) -> Chunk:
    """What was written."""
    if data.startswith(_BY_RANGE):
        return range(*_RANGE.unpack_from(data, len(_BY_RANGE)))
    fields = _read_fields(data, len(_BY_VALUE))
    given: list[Contribution] = []
    for id in fields:
        descriptor, attestation, form, payload, trouble = islice(fields, 5)
        assert id is not None
        at = None if payload is None or form == b"b" else Path(payload.decode("utf-8", "surrogateescape"))
        why = None if trouble is None else (REASONS[trouble[0]], trouble[1:].decode("utf-8", "surrogatepass"))
        given.append(
            Contribution(
                id.decode("utf-8", "surrogatepass"), descriptor, attestation, payload if at is None else at, why
            )
        )
    return given


def encode_verdicts(verdicts: list[Verdict]) -> bytes:
    """As bytes."""
    out = bytearray()
    for verdict in verdicts:
        if isinstance(verdict, bytes):
            out.append(_PASSED)
            out += verdict
        else:
            out.append(REASON_CODES[verdict[0]])
            _append_field(out, _encode_text(verdict[1]))
    return bytes(out)


def decode_verdicts(data: bytes, count: int) -> list[Verdict]:
    """What was written, of so many."""
    verdicts: list[Verdict] = []
    at = 0
    for _ in range(count):
        code = data[at]
        at += 1
        if code == _PASSED:
            verdicts.append(data[at : at + ROW_STRUCT.size])
            at += ROW_STRUCT.size
        else:
            (size,) = _LENGTH.unpack_from(data, at)
            verdicts.append((REASONS[code], data[at + 8 : at + 8 + size].decode("utf-8", "surrogatepass")))
            at += 8 + size
    assert at == len(data)
    return verdicts


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _append_field(out: bytearray, item: bytes | None) -> None:
    out += _LENGTH.pack(_ABSENT if item is None else len(item))
    out += item or b""


def _read_fields(data: bytes, at: int) -> Iterator[bytes | None]:
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += 8
        if size == _ABSENT:
            yield None
            continue
        yield data[at : at + size]
        at += size


MAX_CHUNKS_AHEAD = 64  # parts that may be finished before one that takes longer


def examine_contributions(
    contributions: Iterable[Contribution] | ContributionSource, examiner: Examiner, now: int, processes: int
) -> Iterator[tuple[str, Verdict]]:
    """(id, verdict) of each. A `Source` is read where it is examined; others are read here and sent."""
    parts = ContributionChunks(contributions)
    if processes > 1:
        yield from _WorkerPool(parts, examiner, now, processes).verdicts()
        return
    for part in parts:
        yield from zip(parts.ids(part), _examine_chunk(parts, part, examiner, now), strict=True)


def _examine_chunk(parts: ContributionChunks, part: Chunk, examiner: Examiner, now: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for offered in split_into_chunks(parts.held(part)):
        verdicts += examiner.examine_all(offered, now)
    return verdicts


# ------------------------------------------------------------------------------------------------ several processes


class _Worker:
    """One process and our end of its line."""

    def __init__(self, serve: Any, others: list[Connection[Any, Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.line, theirs = context.Pipe()
        self.process: ForkProcess = context.Process(target=serve, args=(theirs, [*others, self.line]), daemon=True)
        with warnings.catch_warnings():  # it runs no threads and takes no locks that ours may hold
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            self.process.start()
        theirs.close()
        self.parts: deque[tuple[int, Chunk]] = deque()

    def failed(self) -> AdmissionError:
        self.process.join(5)
        code = self.process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        return AdmissionError(
            "admit.worker-ended",
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


class _WorkerPool:
    """Processes that examine.

    Neither side ever waits for the other to read: a process has one part at a time, or two of a few bytes each, so
    that it has something to do while we are busy.
    """

    def __init__(self, parts: ContributionChunks, examiner: Examiner, now: int, processes: int) -> None:
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
        finished: dict[int, tuple[Chunk, list[Verdict]]] = {}
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
                finished[number] = part, decode_verdicts(answer, len(part))
            while wanted in finished:
                done, verdicts = finished.pop(wanted)
                wanted += 1
                yield from zip(self._parts.ids(done), verdicts, strict=True)
            for worker in self._workers:
                self._send(worker, parts, wanted)

    def _send(self, worker: _Worker, parts: Iterator[tuple[int, Chunk]], wanted: int) -> None:
        """One part more, if it may have one and there is one."""
        if len(worker.parts) >= (2 if self._parts.named else 1) or self._sent - wanted > MAX_CHUNKS_AHEAD:
            return
        for number, part in islice(parts, 1):
            worker.parts.append((number, part))
            self._sent = number + 1
            try:
                worker.line.send_bytes(encode_chunk(part))
            except OSError:
                raise worker.failed() from None

    def _serve(self, line: Connection[Any, Any], others: list[Connection[Any, Any]]) -> None:
        """What a worker does until its line is closed. No torch, no randomness, nothing written."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
        for other in others:
            other.close()  # or we would keep the lines of other workers open
        with contextlib.suppress(EOFError, OSError):
            while True:
                part = decode_chunk(line.recv_bytes())
                line.send_bytes(encode_verdicts(_examine_chunk(self._parts, part, self._examiner, self._now)))


class AdmissionGate:
    """Admits contributions under a policy, by the keys of a ring.

    clock        seconds since 1970; must not go back
    register     what was admitted before; without it only replays within one review are seen
    processes    how many examine at the same time. What is admitted does not depend on it
    max_payload  bytes of a payload that are looked at

    A contribution enters if every check of `Examiner` and of `CrossChecks` passes; what cannot be checked does not.
    Each refusal has a `Reason` (docs/admission.md), and one bad contribution stops no other.
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
        if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 256:
            raise AdmissionError(
                "admit.processes-out-of-range", f"processes is {processes!r}, must be 1 to 256", "one per core is enough"
            )
        self.policy = policy
        self.keys = keys
        self.policy_checks = PolicyChecks(policy)
        self.clock = Clock(clock)
        self.register = register
        self._processes = processes
        self._max_payload = max_payload
        self._cache = VerificationCache()
        self._examiner = self.examiner()

    def examiner(self) -> Examiner:
        """What looks at single contributions, by the keys as they are now."""
        return Examiner(self.policy_checks, self.keys, self._max_payload)

    # ----------------------------------------------------------------------------------- many

    def review(
        self,
        contributions: Iterable[Contribution] | str | Path,
        *,
        progress: Progress | None = None,
        enter: bool = True,
    ) -> Admission:
        """Examine all of them, in their order. A path is a folder of contributions.

        Without `enter` the register is asked, but told nothing until `Admission.enter`.
        """
        if isinstance(contributions, str | Path):
            contributions = FolderContributions(contributions)
        examiner, now = self.examiner(), self.clock.now()
        rows, refusals = AdmittedRows(), Refusals()
        for place, (id, verdict) in enumerate(self.verdicts(contributions, examiner, now, progress)):
            if isinstance(verdict, bytes):
                rows.add(place, id, verdict)
            else:
                refusals.add(place, id, *verdict)
        lapsed = KeyStatusColumns(self.keys, examiner.kids).revalidate(rows.table, self.clock.now())
        CrossChecks(rows, refusals, examiner.kids, self.policy_checks).settle(lapsed, self.register)
        admission = Admission(self, contributions, rows, refusals, examiner.kids, now)
        if enter:
            admission.enter()
        return admission

    def verdicts(
        self, contributions: Iterable[Contribution], examiner: Examiner, now: int, progress: Progress | None = None
    ) -> Iterator[tuple[str, Verdict]]:
        """(id, verdict) of each contribution by itself."""
        found = examine_contributions(contributions, examiner, now, self._processes)
        if progress is None:
            yield from found
            return
        total = len(contributions) if isinstance(contributions, Sized) else None
        for done, each in enumerate(found, start=1):
            yield each
            if done % CHUNK_SIZE == 0 or done == total:
                progress(done, total)

    # ----------------------------------------------------------------------------------- one

    def check(self, contribution: Contribution) -> Refusal | None:
        """Why this contribution may not be used now; None if it may, as far as it alone is concerned.

        An attestation that was verified in this epoch is not verified again; the payload is read again. Whether
        somebody was admitted before, about the same person or in the last place of its class, is for `review` to say.
        """
        now, version = self.clock.now(), self.keys.version
        kept = self._cache.get(contribution.attestation, contribution.descriptor, now, version)
        try:
            if kept is not None:
                check_id(contribution.id)
                self._examiner.check_payload(contribution.payload, kept.nonce, kept.commitment)
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
        assert given.attestation is not None and given.descriptor is not None
        row = unpack_row(verdict)
        entry = self.keys.get(self._examiner.kids[int(row["key"])])
        ends = [now + self.policy.corpus.epoch, int(row["expires"])]
        if entry is not None and entry.revoked_from is not None:
            ends.append(entry.revoked_from)
        nonce, commitment = row["nonce"].tobytes(), row["commitment"].tobytes()
        kept = VerifiedAttestation(min(ends), given.descriptor, nonce, commitment)
        self._cache.put(given.attestation, kept, self._examiner.version)
