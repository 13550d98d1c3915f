"""Records of a run's journal, their CBOR, and the order in which they may come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError, RunError
from lamina.spend.charge import Charge

# What a journal holds: one small record per event of a run, and its CBOR.
#
# A record is public knowledge of the run's *shape* (which steps, which plan, which charge). The seed of an
# `AttemptOpened` is the exception: it decides coins and noise, so it is no part of the body, is not printed, and is
# erased.

SEED_BYTES = 32
DIGEST_BYTES = 32
NONCE_BYTES = 16
BODY_LIMIT = 1 << 20  # bytes; an Open of a hundred classes takes some 10 kB


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """The run begins: its name (32 hex digits), the salt of its keyed digests, the inode of its journal."""

    run: str
    salt: bytes
    place: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if len(self.run) != 32 or set(self.run) - set("0123456789abcdef"):
            raise RunError(
                "train.run-hexadecimal-digits",
                f"run is {self.run!r}, must be 32 hexadecimal digits",
                "use secrets.token_hex(16)",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOpened:
    """Steps [first, last) are charged and may be drawn from `seed`.

    A replay is allowed only if plan, settings, membership, checkpoint, data, ranks, threads and code are still what
    they were. `eligibility` is the number of leaves of the ledger when its members were frozen, `after` the generation
    of the segment whose weights it goes on from, `variance` S² per layer at its first step where the plan's rules move
    it, `scales` those of the signed bounds that are charged. `seed` is b"" once it was erased.
    """

    segment: int
    generation: int
    nonce: bytes
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
        object.__setattr__(self, "scales", dict(self.scales))
        _check_fields(self)
        for charge in self.charges:
            _check_fields(charge)
        if not self.first <= self.last:
            raise RunError(
                "train.segment-covers-steps", f"segment covers steps [{self.first}, {self.last})", "give first <= last"
            )
        if len(self.seed) not in (0, SEED_BYTES):
            raise RunError(
                "train.seed-bytes", f"seed has {len(self.seed)} bytes, must have {SEED_BYTES}", "use os.urandom(32)"
            )

    @property
    def key(self) -> tuple[int, int, bytes]:
        """What names this attempt at these steps."""
        return (self.segment, self.generation, self.nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AttemptEnd:
    """How an attempt ended: it is named as in its Open."""

    segment: int
    generation: int
    nonce: bytes

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def key(self) -> tuple[int, int, bytes]:
        return (self.segment, self.generation, self.nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptClosed(_AttemptEnd):
    """The segment is done: its checkpoint, with this digest, is durable. Its seed is erased after this."""

    checkpoint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptAbandoned(_AttemptEnd):
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

JOURNAL_KINDS: dict[int, type[JournalRecord]] = {
    1: RunStarted,
    2: AttemptOpened,
    3: AttemptClosed,
    4: JournalMoved,
    5: RunEnded,
    6: AttemptAbandoned,
}
_KIND_NUMBERS = {kind: number for number, kind in JOURNAL_KINDS.items()}
_FIELD_BYTES = {
    "salt": DIGEST_BYTES,
    "nonce": NONCE_BYTES,
    "plan": DIGEST_BYTES,
    "settings": DIGEST_BYTES,
    "membership": DIGEST_BYTES,
    "checkpoint": DIGEST_BYTES,
    "data": DIGEST_BYTES,
}
_FIELD_TYPES: dict[str, type] = {"int": int, "bytes": bytes, "str": str, "float": float, "bool": bool}


def to_body(record: JournalRecord) -> tuple[int, bytes]:
    """The number of the record's kind and its CBOR, the seed left out."""
    if type(record) not in _KIND_NUMBERS:
        raise RunError(
            "train.no-record-journal",
            f"{type(record).__name__} is no record of a journal",
            "append one of records.KINDS",
        )
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "seed"}
    if isinstance(record, AttemptOpened):
        fields["charges"] = [dataclasses.asdict(charge) for charge in record.charges]
        fields["variance"] = list(record.variance)
    try:
        return _KIND_NUMBERS[type(record)], cbor.encode(fields, floats=True, max_size=BODY_LIMIT)
    except EncodingError as error:
        raise RunError(
            "train.record-not-written",
            f"a {type(record).__name__} record cannot be written: {error.problem}",
            error.remedy,
        ) from error


def from_body(number: int, body: bytes) -> JournalRecord:
    """The record that `to_body` wrote; an Open comes without its seed. EncodingError or RunError otherwise."""
    if number not in JOURNAL_KINDS:
        raise EncodingError(
            "train.record-kind-not", f"record kind {number} is not known", "read it with the version that wrote it"
        )
    kind = JOURNAL_KINDS[number]
    fields = _with_exact_fields(cbor.decode(body, floats=True, max_size=BODY_LIMIT), kind)
    if kind is AttemptOpened:
        rows = fields["charges"]
        if not isinstance(rows, list):
            raise EncodingError(
                "train.charges-open-no", "charges of an Open is no list", "read it with the version that wrote it"
            )
        fields["charges"] = tuple(_charge_from_map(row) for row in rows)
        scales = fields["scales"]
        if not isinstance(scales, dict) or not all(type(each) is float for each in scales.values()):
            raise EncodingError(
                "train.scales-open-no", "scales of an Open are no floats", "read it with the version that wrote it"
            )
        if not isinstance(fields["variance"], list) or not all(type(v) is float for v in fields["variance"]):
            raise EncodingError(
                "train.variance-open-no",
                "variance of an Open is no list of floats",
                "read it with the version that wrote it",
            )
        fields["seed"] = b""
    return kind(**fields)


def _charge_from_map(row: Any) -> Charge:
    return Charge(**_with_exact_fields(row, Charge))


def _with_exact_fields(row: Any, kind: type[Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)} - {"seed"}
    if not isinstance(row, dict) or set(row) != names:
        found = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise EncodingError(
            "train.fields",
            f"a {kind.__name__} has fields {found}, must have {sorted(names)}",
            "read it with the version that wrote it",
        )
    return row


def _check_fields(record: Any) -> None:
    """Types, widths and signs of the plain fields; the meaning is the trainer's."""
    for entry in dataclasses.fields(record):
        kind = _FIELD_TYPES.get(str(entry.type))
        value = getattr(record, entry.name)
        where = f"{entry.name} of {type(record).__name__}"
        if kind is not None and type(value) is not kind:
            raise RunError(
                "train.type", f"{where} is of type {type(value).__name__}, must be {kind.__name__}", "convert it"
            )
        if kind is int and not 0 <= value < 1 << 64:
            raise RunError("train.count", f"{where} is {value}, must be in [0, 2^64)", "count from 0")
        width = _FIELD_BYTES.get(entry.name)
        if width is not None and len(value) != width:
            raise RunError(
                "train.bytes-give", f"{where} has {len(value)} bytes, must have {width}", "give the whole digest"
            )


class RunHistory:
    """Records in the order in which they may come:

    one Start, first; an Open of a segment only with a higher generation than all earlier ones of that segment (a
    lost checkpoint makes a run go back to earlier segments); a Close or a GivenUp only for the last Open, once, with
    its nonce.
    So at most one Open is pending, and every other seed is of no use to anybody but an attacker.
    """

    def __init__(self) -> None:
        self._records: list[JournalRecord] = []
        self._closed: set[tuple[int, int, bytes]] = set()
        self._given_up: dict[tuple[int, int, bytes], bool] = {}  # attempt → whether it was charged
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
        """Whether this very attempt (segment, generation, nonce) has its Close."""
        return record.key in self._closed

    def void(self, record: AttemptOpened) -> bool:
        """Whether the attempt was given up before it was charged: nothing was drawn."""
        return self._given_up.get(record.key) is False

    @property
    def pending(self) -> AttemptOpened | None:
        """The last Open if it was neither closed nor given up; its seed is b"" if it was erased."""
        last = self._last(AttemptOpened)
        if not isinstance(last, AttemptOpened) or last.key in self._closed or last.key in self._given_up:
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
        """Every attempt, with the life of the run that it was made in: another one begins with each move."""
        life = _journal_copy(self.start)
        for record in self._records:
            if isinstance(record, JournalMoved):
                life = _journal_copy(record)
            elif isinstance(record, AttemptOpened) and not self.void(record):
                yield record, life

    @property
    def life(self) -> str:
        """The one that it is in."""
        last = self._last(RunStarted, JournalMoved)
        assert isinstance(last, RunStarted | JournalMoved)
        return _journal_copy(last)

    def _last_place(self) -> int:
        last = self._last(RunStarted, JournalMoved)
        assert isinstance(last, RunStarted | JournalMoved)
        return last.place

    def _check(self, record: JournalRecord) -> None:
        """RunError if the record may not come now."""
        if isinstance(record, RunStarted) != (not self._records):
            raise RunError(
                "train.start-first-record",
                "a Start is the first record of a journal, and only the first",
                "start a new run",
            )
        if isinstance(record, AttemptOpened) and record.generation <= self._generations.get(record.segment, -1):
            raise RunError(
                "train.open-segment-generation",
                f"an Open of segment {record.segment} has generation {record.generation}, "
                f"generation {self._generations[record.segment]} was there before",
                "count the generation up for every new attempt",
            )
        pending = self.pending
        if isinstance(record, AttemptClosed | AttemptAbandoned) and (pending is None or record.key != pending.key):
            raise RunError(
                "train.segment-generation-no",
                f"a {type(record).__name__} of segment {record.segment}, generation {record.generation} has no such "
                "open segment",
                "close the last Open, once, with its nonce",
            )

    def _add(self, record: JournalRecord) -> None:
        self._records.append(record)
        if isinstance(record, AttemptOpened):
            self._generations[record.segment] = record.generation
        if isinstance(record, AttemptClosed):
            self._closed.add(record.key)
        if isinstance(record, AttemptAbandoned):
            self._given_up[record.key] = record.charged

    def _forget_seed(self, index: int) -> None:
        record = self._records[index]
        assert isinstance(record, AttemptOpened)
        self._records[index] = replace(record, seed=b"")


def _journal_copy(begun: RunStarted | JournalMoved) -> str:
    """A copy lies in another place; a state that was put back has forgotten more than any before it."""
    return f"{begun.place} {begun.lost if isinstance(begun, JournalMoved) else 0}"
