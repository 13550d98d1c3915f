"""What a journal holds: one small record per event of a run, and its CBOR.

A record is public knowledge of the run's *shape* (which steps, which plan, which charge). The seed of an `Open`
is the exception: it decides coins and noise, so it is no part of the body, is not printed, and is erased.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError, RunError
from lamina.train.book.charge import Charge

SEED_BYTES = 32
DIGEST_BYTES = 32
NONCE_BYTES = 16
BODY_LIMIT = 1 << 20  # bytes; an Open of a hundred classes takes some 10 kB


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The run begins: its name (32 hex digits), the salt of its keyed digests, the inode of its journal."""

    run: str
    salt: bytes
    place: int

    def __post_init__(self) -> None:
        _check(self)
        if len(self.run) != 32 or set(self.run) - set("0123456789abcdef"):
            raise RunError(
                "train.run-hexadecimal-digits",
                f"run is {self.run!r}, must be 32 hexadecimal digits",
                "use secrets.token_hex(16)",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
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
        _check(self)
        for charge in self.charges:
            _check(charge)
        if not self.first <= self.last:
            raise RunError(
                "train.segment-covers-steps",
                f"segment covers steps [{self.first}, {self.last})",
                "give first <= last",
            )
        if len(self.seed) not in (0, SEED_BYTES):
            raise RunError(
                "train.seed-bytes",
                f"seed has {len(self.seed)} bytes, must have {SEED_BYTES}",
                "use os.urandom(32)",
            )

    @property
    def key(self) -> tuple[int, int, bytes]:
        """What names this attempt at these steps."""
        return (self.segment, self.generation, self.nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """How an attempt ended: it is named as in its Open."""

    segment: int
    generation: int
    nonce: bytes

    def __post_init__(self) -> None:
        _check(self)

    @property
    def key(self) -> tuple[int, int, bytes]:
        return (self.segment, self.generation, self.nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class Close(_End):
    """The segment is done: its checkpoint, with this digest, is durable. Its seed is erased after this."""

    checkpoint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp(_End):
    """The attempt will never be finished or replayed: its seed is erased after this.

    `charged` is False if the ledger refused it, so that nothing was drawn.
    """

    charged: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The journal now lies at this inode: a copy was found, charged anew, and goes on from here.

    Or it lies where it lay, and is an older state of itself: `lost` attempts are in the ledger that it does not know.
    """

    place: int
    lost: int = 0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The run ends after this many steps, and why."""

    steps: int
    reason: str

    def __post_init__(self) -> None:
        _check(self)


Record = Start | Open | Close | Moved | Done | GivenUp

KINDS: dict[int, type[Record]] = {1: Start, 2: Open, 3: Close, 4: Moved, 5: Done, 6: GivenUp}
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_WIDTHS = {
    "salt": DIGEST_BYTES,
    "nonce": NONCE_BYTES,
    "plan": DIGEST_BYTES,
    "settings": DIGEST_BYTES,
    "membership": DIGEST_BYTES,
    "checkpoint": DIGEST_BYTES,
    "data": DIGEST_BYTES,
}
_TYPES: dict[str, type] = {"int": int, "bytes": bytes, "str": str, "float": float, "bool": bool}


def to_body(record: Record) -> tuple[int, bytes]:
    """The number of the record's kind and its CBOR, the seed left out."""
    if type(record) not in _NUMBERS:
        raise RunError(
            "train.no-record-journal",
            f"{type(record).__name__} is no record of a journal",
            "append one of records.KINDS",
        )
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "seed"}
    if isinstance(record, Open):
        fields["charges"] = [dataclasses.asdict(charge) for charge in record.charges]
        fields["variance"] = list(record.variance)
    try:
        return _NUMBERS[type(record)], cbor.encode(fields, floats=True, max_size=BODY_LIMIT)
    except EncodingError as error:
        raise RunError(
            "train.record-not-written",
            f"a {type(record).__name__} record cannot be written: {error.problem}",
            error.remedy,
        ) from error


def from_body(number: int, body: bytes) -> Record:
    """The record that `to_body` wrote; an Open comes without its seed. EncodingError or RunError otherwise."""
    if number not in KINDS:
        raise EncodingError(
            "train.record-kind-not",
            f"record kind {number} is not known",
            "read it with the version that wrote it",
        )
    kind = KINDS[number]
    fields = _exactly(cbor.decode(body, floats=True, max_size=BODY_LIMIT), kind)
    if kind is Open:
        rows = fields["charges"]
        if not isinstance(rows, list):
            raise EncodingError(
                "train.charges-open-no",
                "charges of an Open is no list",
                "read it with the version that wrote it",
            )
        fields["charges"] = tuple(_charge(row) for row in rows)
        scales = fields["scales"]
        if not isinstance(scales, dict) or not all(type(each) is float for each in scales.values()):
            raise EncodingError(
                "train.scales-open-no",
                "scales of an Open are no floats",
                "read it with the version that wrote it",
            )
        if not isinstance(fields["variance"], list) or not all(type(v) is float for v in fields["variance"]):
            raise EncodingError(
                "train.variance-open-no",
                "variance of an Open is no list of floats",
                "read it with the version that wrote it",
            )
        fields["seed"] = b""
    return kind(**fields)


def _charge(row: Any) -> Charge:
    return Charge(**_exactly(row, Charge))


def _exactly(row: Any, kind: type[Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)} - {"seed"}
    if not isinstance(row, dict) or set(row) != names:
        found = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise EncodingError(
            "train.fields",
            f"a {kind.__name__} has fields {found}, must have {sorted(names)}",
            "read it with the version that wrote it",
        )
    return row


def _check(record: Any) -> None:
    """Types, widths and signs of the plain fields; the meaning is the trainer's."""
    for entry in dataclasses.fields(record):
        kind = _TYPES.get(str(entry.type))
        value = getattr(record, entry.name)
        where = f"{entry.name} of {type(record).__name__}"
        if kind is not None and type(value) is not kind:
            raise RunError(
                "train.type",
                f"{where} is of type {type(value).__name__}, must be {kind.__name__}",
                "convert it",
            )
        if kind is int and not 0 <= value < 1 << 64:
            raise RunError("train.count", f"{where} is {value}, must be in [0, 2^64)", "count from 0")
        width = _WIDTHS.get(entry.name)
        if width is not None and len(value) != width:
            raise RunError(
                "train.bytes-give",
                f"{where} has {len(value)} bytes, must have {width}",
                "give the whole digest",
            )
