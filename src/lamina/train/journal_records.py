"""Records of a run's journal, their CBOR, and the order in which they may come.

A record is public knowledge of the run's *shape* (which steps, which plan, which charge). The seed of an
`AttemptOpened` is the exception: it decides coins and noise, so it is no part of the body, is not printed, and is
erased.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError, RunError
from lamina.spend.charge import Charge

SEED_BYTES = 32
DIGEST_BYTES = 32
NONCE_BYTES = 16
BODY_LIMIT = 1 << 20  # bytes; an AttemptOpened of a hundred classes takes some 10 kB

_FIELD_BYTES = {"nonce": NONCE_BYTES}
_FIELD_BYTES |= dict.fromkeys(("salt", "plan", "settings", "membership", "checkpoint", "data"), DIGEST_BYTES)
_FIELD_TYPES: dict[str, type] = {"int": int, "bytes": bytes, "str": str, "float": float, "bool": bool}


def _check_fields(record: Any) -> None:
    """Types, widths and signs of the plain fields; the meaning is the trainer's."""
    for entry in dataclasses.fields(record):
        kind, value, width = (
            _FIELD_TYPES.get(str(entry.type)),
            getattr(record, entry.name),
            _FIELD_BYTES.get(entry.name),
        )
        problem = ""
        if kind is not None and type(value) is not kind:
            problem = f"is of type {type(value).__name__}, must be {kind.__name__}"
        elif kind is int and not 0 <= value < 1 << 64:
            problem = f"is {value}, must be in [0, 2^64)"
        elif width is not None and len(value) != width:
            problem = f"has {len(value)} bytes, must have {width}"
        if problem:
            raise _invalid(f"{entry.name} of {type(record).__name__} {problem}")


def _invalid(problem: str) -> RunError:
    return RunError("train.journal-record-invalid", problem, "report this: the trainer writes its own records")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """The run begins: its name (32 hex digits), the salt of its keyed digests, the inode of its journal."""

    run: str
    salt: bytes
    place: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if len(self.run) != 32 or set(self.run) - set("0123456789abcdef"):
            raise _invalid(f"run is {self.run!r}, must be 32 hexadecimal digits")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """One attempt at a segment, named by segment, generation and nonce."""

    segment: int
    generation: int
    nonce: bytes

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def key(self) -> tuple[int, int, bytes]:
        return (self.segment, self.generation, self.nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOpened(_Attempt):
    """Steps [first, last) are charged and may be drawn from `seed`.

    A replay is allowed only if plan, settings, membership, checkpoint, data, ranks, threads and code are still what
    they were. `eligibility` is the number of leaves of the ledger when its members were frozen, `after` the generation
    of the segment whose weights it goes on from, `variance` S² per layer at its first step where the plan's rules move
    it, `scales` those of the signed bounds that are charged. `seed` is b"" once it was erased.
    """

    first: int
    last: int
    plan: bytes
    settings: bytes
    membership: bytes
    checkpoint: bytes
    data: bytes
    world_size: int
    threads: int
    code: str
    charges: tuple[Charge, ...]
    eligibility: int
    after: int = 0
    variance: tuple[float, ...] = ()
    scales: dict[str, float] = field(default_factory=dict)
    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "charges", tuple(self.charges))
        object.__setattr__(self, "variance", tuple(map(float, self.variance)))
        object.__setattr__(self, "scales", {str(name): float(scale) for name, scale in self.scales.items()})
        for record in (self, *self.charges):
            _check_fields(record)
        if not self.first <= self.last:
            raise _invalid(f"the segment covers steps [{self.first}, {self.last})")
        if len(self.seed) not in (0, SEED_BYTES):
            raise _invalid(f"seed has {len(self.seed)} bytes, must have {SEED_BYTES}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptClosed(_Attempt):
    """The segment is done: its checkpoint, with this digest, is durable. Its seed is erased after this."""

    checkpoint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptAbandoned(_Attempt):
    """The attempt will never be finished or replayed: its seed is erased after this.

    `charged` is False if the ledger refused it, so that nothing was drawn.
    """

    charged: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalMoved:
    """The journal now lies at this inode: a copy was found, charged anew, and goes on from here.

    Or it lies where it lay, and is an older state of itself: `lost` attempts are in the ledger that it does not know.
    """

    place: int
    lost: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """The run ends after this many steps, and why."""

    steps: int
    reason: str

    def __post_init__(self) -> None:
        _check_fields(self)


JournalRecord = RunStarted | AttemptOpened | AttemptClosed | JournalMoved | RunEnded | AttemptAbandoned

JOURNAL_KINDS: dict[int, type[JournalRecord]] = dict(
    enumerate((RunStarted, AttemptOpened, AttemptClosed, JournalMoved, RunEnded, AttemptAbandoned), 1)
)
_KIND_NUMBERS = {kind: number for number, kind in JOURNAL_KINDS.items()}


def to_body(record: JournalRecord) -> tuple[int, bytes]:
    """The number of the record's kind and its CBOR, the seed left out."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "seed"}
    if isinstance(record, AttemptOpened):
        fields["charges"] = [dataclasses.asdict(charge) for charge in record.charges]
        fields["variance"] = list(record.variance)
    try:
        return _KIND_NUMBERS[type(record)], cbor.encode(fields, floats=True, max_size=BODY_LIMIT)
    except EncodingError as error:
        raise _invalid(f"a record {type(record).__name__} cannot be written: {error.problem}") from error


def from_body(number: int, body: bytes) -> JournalRecord:
    """The record that `to_body` wrote, an AttemptOpened without its seed. EncodingError or RunError otherwise."""
    remedy = "read it with the version that wrote it"
    if number not in JOURNAL_KINDS:
        raise EncodingError("train.journal-record-unknown", f"record kind {number} is not known", remedy)
    kind = JOURNAL_KINDS[number]
    fields = cbor.decode(body, floats=True, max_size=BODY_LIMIT)
    try:
        if kind is AttemptOpened:
            fields |= {"charges": tuple(Charge(**row) for row in fields["charges"]), "seed": b""}
        record = kind(**fields)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"a record {kind.__name__} has other fields than this version writes ({error})"
        raise EncodingError("train.journal-record-unknown", problem, remedy) from error
    if to_body(record) != (number, body):
        problem = f"a record {kind.__name__} is not encoded as this version writes it"
        raise EncodingError("train.journal-record-unknown", problem, remedy)
    return record


class RunHistory:
    """The records of a run, in the order in which they may come.

    One RunStarted, first; an AttemptOpened only with a higher generation than all earlier ones of that segment (a lost
    checkpoint makes a run go back to earlier segments); an AttemptClosed or AttemptAbandoned only for the last
    AttemptOpened, once, with its nonce. So at most one attempt is pending, and every other seed is of no use to
    anybody but an attacker.
    """

    def __init__(self) -> None:
        self._records: list[JournalRecord] = []
        self._closed: set[tuple[int, int, bytes]] = set()
        self._abandoned: dict[tuple[int, int, bytes], bool] = {}  # attempt → whether it was charged
        self._generations: dict[int, int] = {}  # segment → its highest generation

    @property
    def start(self) -> RunStarted:
        """The first record: the run's name and salt."""
        first = self._records[0]
        assert isinstance(first, RunStarted)
        return first

    @property
    def records(self) -> tuple[JournalRecord, ...]:
        return tuple(self._records)

    @property
    def opens(self) -> tuple[AttemptOpened, ...]:
        return tuple(record for record in self._records if isinstance(record, AttemptOpened))

    def closed(self, record: AttemptOpened) -> bool:
        """Whether this very attempt (segment, generation, nonce) was closed."""
        return record.key in self._closed

    def uncharged(self, record: AttemptOpened) -> bool:
        """Whether the attempt was abandoned before it was charged: nothing was drawn."""
        return self._abandoned.get(record.key) is False

    @property
    def pending(self) -> AttemptOpened | None:
        """The last attempt if it was neither closed nor abandoned; its seed is b"" if it was erased."""
        last = self._last(AttemptOpened)
        if not isinstance(last, AttemptOpened) or last.key in self._closed or last.key in self._abandoned:
            return None
        return last

    @property
    def done(self) -> RunEnded | None:
        """The end of the run, unless it was opened again after it."""
        last = self._last(AttemptOpened, RunEnded)
        return last if isinstance(last, RunEnded) else None

    def _last(self, *kinds: type[JournalRecord]) -> JournalRecord | None:
        return next((record for record in reversed(self._records) if isinstance(record, kinds)), None)

    @property
    def lost(self) -> int:
        """Attempts that the ledger has and the journal has not, as far as it knows."""
        last = self._last(JournalMoved)
        return last.lost if isinstance(last, JournalMoved) else 0

    def attempts_by_copy(self) -> Iterator[tuple[AttemptOpened, str]]:
        """Every charged attempt, with the copy of the run that made it: another copy begins with each move."""
        copy = _copy_id(self.start)
        for record in self._records:
            if isinstance(record, JournalMoved):
                copy = _copy_id(record)
            elif isinstance(record, AttemptOpened) and not self.uncharged(record):
                yield record, copy

    @property
    def copy_id(self) -> str:
        """Which copy of the run this is."""
        return _copy_id(self._last_place())

    def _last_place(self) -> RunStarted | JournalMoved:
        last = self._last(RunStarted, JournalMoved)
        assert isinstance(last, RunStarted | JournalMoved)
        return last

    def _check(self, record: JournalRecord) -> None:
        """RunError if the record may not come now."""
        problem = ""
        if isinstance(record, RunStarted) != (not self._records):
            problem = "RunStarted is the first record of a journal, and only the first"
        elif isinstance(record, AttemptOpened) and record.generation <= self._generations.get(record.segment, -1):
            before = self._generations[record.segment]
            problem = f"segment {record.segment} is opened as generation {record.generation} after generation {before}"
        elif isinstance(record, AttemptClosed | AttemptAbandoned) and record.key != getattr(self.pending, "key", None):
            attempt = f"segment {record.segment}, generation {record.generation}"
            problem = f"{type(record).__name__} names {attempt}, which is not the open attempt"
        if problem:
            raise RunError("train.journal-order", problem, "restore the journal from a backup, or begin a new run")

    def _add(self, record: JournalRecord) -> None:
        self._records.append(record)
        if isinstance(record, AttemptOpened):
            self._generations[record.segment] = record.generation
        if isinstance(record, AttemptClosed):
            self._closed.add(record.key)
        if isinstance(record, AttemptAbandoned):
            self._abandoned[record.key] = record.charged

    def _forget_seed(self, index: int) -> None:
        record = self._records[index]
        assert isinstance(record, AttemptOpened)
        self._records[index] = replace(record, seed=b"")


def _copy_id(begun: RunStarted | JournalMoved) -> str:
    """A copy lies at another inode; a state that was put back has forgotten more than any before it."""
    return f"{begun.place} {begun.lost if isinstance(begun, JournalMoved) else 0}"
