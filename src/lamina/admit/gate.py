"""The admission gate: examines contributions in one or several processes, and admits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lamina import validate
from lamina.admit import reasons
from lamina.admit.admission import Admission, CrossChecks, Progress, revalidate_rows
from lamina.admit.contribution_sources import Contribution, ContributionSource, FolderContributions
from lamina.admit.examiner import MAX_PAYLOAD, Examiner, Verdict
from lamina.admit.reasons import REASONS
from lamina.admit.register import Register
from lamina.admit.rows import ROW_STRUCT, AdmittedRows, PackedTexts, Refusal, Refusals
from lamina.admit.terms import PolicyTerms
from lamina.admit.workers import worker_pool
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


CHUNK_SIZE = 128  # contributions in a chunk
CHUNK_BYTES = 1 << 22  # bytes of payloads in memory at the same time, unless a single one has more
MAX_CHUNKS_AHEAD = 64  # ranges of names on their way: so many may be finished before one that takes longer

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
            return Contribution(id, read_error=(reasons.CHECK_FAILED, type(error).__name__))
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
    """Yield (id, verdict) of each. A `ContributionSource` is read where it is examined; others are read here and sent."""
    chunks = ContributionChunks(contributions)
    if processes == 1:
        for chunk in chunks:
            yield from zip(chunks.ids(chunk), _examine_chunk(chunks, chunk, examiner, now), strict=True)
        return

    def serve(line: Connection[Any, Any]) -> None:
        """Examine chunks until the line is closed. No torch, no randomness, nothing written."""
        while True:
            line.send_bytes(verdicts_to_bytes(_examine_chunk(chunks, line.recv(), examiner, now)))

    with worker_pool(serve, processes) as answers:
        for chunk, answer in answers(chunks, MAX_CHUNKS_AHEAD if chunks.by_name else processes):
            yield from zip(chunks.ids(chunk), verdicts_from_bytes(answer, len(chunk)), strict=True)


def _examine_chunk(chunks: ContributionChunks, chunk: Chunk, examiner: Examiner, now: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for offered in split_into_chunks(chunks.contributions(chunk)):
        verdicts += examiner.examine_all(offered, now)
    return verdicts


_PASSED = 0xFF  # before a row; before a refusal stands the number of its reason


def verdicts_to_bytes(verdicts: list[Verdict]) -> bytes:
    out = bytearray()
    for verdict in verdicts:
        if isinstance(verdict, bytes):
            out.append(_PASSED)
            out += verdict
        else:
            detail = verdict[1].encode("utf-8", "surrogatepass")
            out.append(verdict[0].code)
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
        self.terms = PolicyTerms(policy)
        self.clock = Clock(clock)
        self.register = register
        self.processes = processes
        self._max_payload = max_payload
        self._examiner = self.examiner()

    def examiner(self) -> Examiner:
        """What looks at single contributions, by the keys as they are now."""
        return Examiner(self.terms, self.keys, self._max_payload)

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
        CrossChecks(rows, refusals, examiner.kids, self.terms).apply(lapsed, self.register)
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
        """Return why this contribution may not be used now; None if it may, as far as it alone is concerned.

        Whether it was admitted before, is about the same person as another, or takes the last place of its class, is for
        `review` to say.
        """
        if self._examiner.version != self.keys.version:
            self._examiner = self.examiner()
        verdict = self._examiner.examine(contribution, self.clock.now())
        if isinstance(verdict, bytes):
            return None
        return Refusal(printable(contribution.id), verdict[0], printable(verdict[1]))
