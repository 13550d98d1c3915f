"""Records of contributions and epochs, and the leaf that encodes a record of any kind at its place and time."""

from __future__ import annotations

import enum
import hashlib
import re
import struct
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from lamina import cbor
from lamina.account.charges import Account
from lamina.account.schedule import Event
from lamina.admit.attestation import BYTES_32, NUMBER, compile_pattern, read_number
from lamina.codec import (
    READ_REMEDY,
    check_fields,
    described,
    enum_member,
    exact_float_in,
    integer,
    ledger_record,
    nested,
    schema_of,
    stored,
    tuple_of,
)
from lamina.errors import EncodingError, LedgerError
from lamina.ledger.governance_records import (
    Aggregate,
    Header,
    KeyEvents,
    PolicyChange,
    Release,
    TermsChange,
    Withdrawal,
)
from lamina.ledger.run_records import RunBegin, RunEnd, RunRecord
from lamina.ledger.schema import CLASS, COUNT, DATA_CLASS, DIGEST, KEY_ID, MICRO, NONCE, PROFILE, RUN, SEQ, SPEND, TIME
from lamina.ledger.store.rows import StoredLeaf
from lamina.sign.keys import LAST_SECOND


@ledger_record(kw_only=False)
class ContributionTerms:
    """What many contributions have in common: their class and bound.

    cls               admissibility class
    data_class        what the data is
    clip_norm         c, signed, in 1e-6
    noise_multiplier  z, signed, over the whole participation, in 1e-6
    profile           how deep it may reach, by its class; absent: the whole stack
    """

    cls: str = stored(1, CLASS)
    data_class: str = stored(2, DATA_CLASS)
    clip_norm: int = stored(3, MICRO)
    noise_multiplier: int = stored(4, MICRO)
    profile: str | None = stored(5, PROFILE, default=None)
    in_leaf: bytes = field(init=False, repr=False, compare=False)  # in CBOR, made once for many contributions
    in_body: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        kept = {8: self.cls, 9: self.clip_norm, 10: self.noise_multiplier}
        body = {4: self.data_class} if self.profile is None else {4: self.data_class, 5: self.profile}
        object.__setattr__(self, "in_leaf", cbor.encode(kept)[1:])  # the items of a map, without its head
        object.__setattr__(self, "in_body", cbor.encode(body)[1:])
        _check_bound(self.clip_norm, self.noise_multiplier)

    @property
    def bound(self) -> Account:
        """What names its account in an epoch."""
        return Account(self.cls, self.clip_norm, self.noise_multiplier)


def _check_bound(clip_norm: int, noise_multiplier: int) -> None:
    if (clip_norm == 0) != (noise_multiplier == 0):
        problem = f"clip_norm is {clip_norm} and noise_multiplier is {noise_multiplier}"
        raise LedgerError("ledger.bound-incomplete", problem, "set both to 0 in a public class, neither elsewhere")


@ledger_record()
class ContributionRecord:
    """One contribution, by digests: nothing here leads to its content, or to its contributor without a key ring.

    Its leaf holds what `KeptContribution` does, for ever; the rest is its body, which goes when it is pruned.

    descriptor   SHA-256 of the descriptor: its identity. A nonce that is not published keeps it from being guessed
    attestation  SHA-256 of the attestation, whose bytes the store keeps until they are pruned
    key          id of the key that signed
    not_before, expires   its time, as signed
    anchor       its digest in a content-anchoring system, if it has one
    subject      keyed tag of who it is about, if it has one: in a ledger once, for good
    """

    descriptor: bytes = stored(1, DIGEST)
    attestation: bytes = stored(2, DIGEST)
    key: bytes = stored(3, KEY_ID)
    not_before: int = stored(4, TIME)
    expires: int = stored(5, TIME)
    terms: ContributionTerms = stored(6, nested(ContributionTerms))
    anchor: bytes | None = stored(7, DIGEST, default=None)
    subject: bytes | None = stored(8, DIGEST, default=None)

    def __post_init__(self) -> None:
        d, a, k, start, end = self.descriptor, self.attestation, self.key, self.not_before, self.expires
        if not (
            type(d) is type(a) is type(k) is bytes
            and len(d) == len(a) == len(k) == 32
            and type(start) is type(end) is int
            and 0 <= start < end <= LAST_SECOND
            and type(self.terms) is ContributionTerms
            and (self.anchor is None or (type(self.anchor) is bytes and len(self.anchor) == 32))
            and (self.subject is None or (type(self.subject) is bytes and len(self.subject) == 32))
        ):
            _raise_invalid(self)

    @property
    def bound(self) -> Account:
        """What names its account in an epoch."""
        return self.terms.bound


@ledger_record()
class KeptContribution:
    """What the leaf of a contribution itself says: all that is left of it when its body is pruned.

    It tells which bound it had and until when, and stops the same contribution or subject from being admitted again.
    """

    descriptor: bytes = stored(6, DIGEST)
    expires: int = stored(7, TIME)
    cls: str = stored(8, CLASS)
    clip_norm: int = stored(9, MICRO)
    noise_multiplier: int = stored(10, MICRO)
    subject: bytes | None = stored(11, DIGEST, default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_bound(self.clip_norm, self.noise_multiplier)

    @property
    def bound(self) -> Account:
        """What names its account in an epoch."""
        return Account(self.cls, self.clip_norm, self.noise_multiplier)


@ledger_record()
class ContributionBody:
    """The rest of a contribution, which is beside its leaf until it is pruned."""

    attestation: bytes = stored(1, DIGEST)
    key: bytes = stored(2, KEY_ID)
    not_before: int = stored(3, TIME)
    data_class: str = stored(4, DATA_CLASS)
    profile: str | None = stored(5, PROFILE, default=None)
    anchor: bytes | None = stored(6, DIGEST, default=None)

    def joined(self, kept: KeptContribution) -> ContributionRecord:
        """The contribution that both describe."""
        return ContributionRecord(
            descriptor=kept.descriptor, attestation=self.attestation, key=self.key, not_before=self.not_before,
            expires=kept.expires, anchor=self.anchor, subject=kept.subject,
            terms=ContributionTerms(kept.cls, self.data_class, kept.clip_norm, kept.noise_multiplier, self.profile),
        )  # fmt: skip


def _raise_invalid(record: ContributionRecord) -> None:
    check_fields(record)
    problem = f"the contribution is valid from {record.not_before} until {record.expires}"
    raise LedgerError("ledger.validity-empty", problem, "swap them")


# `Epoch`: one or more segments of a run have ended, what was applied, and what everybody has lost so far.
#
# What it does *not* hold is as deliberate: who was sampled, batch sizes, seeds, drawn or measured noise, norms, losses,
# durations. The sampling is secret for good; with it, the amplified ε would fall (docs/theory.md, "Secrecy").

MAX_SEGMENTS = 1024
MAX_LAYERS = 16_384
MAX_ACCOUNTS = 1024
MAX_NOISE_VALUES = 8192  # of the changes of an epoch: a run ends a segment before there are more
_MAX_FLOAT = 1.7e308


class SegmentOutcome(enum.Enum):
    """How a segment ended. Charged it is in both cases."""

    CLOSED = 1  # its steps are in the model
    ABANDONED = 2  # they are not: withdrawn, crashed or redone


@ledger_record()
class Segment:
    """An attempt at the steps [first, last) of a run.

    (run, index, generation) names it; `nonce` tells it from an attempt that a copy of the run made under the same name.
    `after` is the generation of the segment before it that its weights come from; None for the first, 0.
    `eligibility` is the number of leaves that were read when its membership was frozen: contributions admitted, and not
    withdrawn, in the leaves before that. Who of them was sampled is nowhere. `unrecorded` counts earlier generations of
    which no leaf told then: a copy of the run was still at work on them, or the ledger was put back from a copy.
    """

    index: int = stored(1, COUNT)
    generation: int = stored(2, COUNT)
    nonce: bytes = stored(3, NONCE)
    first: int = stored(4, COUNT)
    last: int = stored(5, COUNT)
    eligibility: int = stored(6, SEQ)
    outcome: SegmentOutcome = stored(7, enum_member(SegmentOutcome))
    after: int | None = stored(8, integer(1, 2**53), default=None)
    unrecorded: int | None = stored(9, integer(1, 2**53), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.first < self.last:
            problem = f"segment {self.index} covers steps [{self.first}, {self.last})"
            raise LedgerError("ledger.segment-empty", problem, "give first < last")


_SIGMA, _RATE, _ORDER = exact_float_in(5e-324, _MAX_FLOAT), exact_float_in(0.0, 1.0), exact_float_in(1.02, 1e6)
EVENT = described(Event, sigma=(1, _SIGMA), q=(2, _RATE), steps=(3, COUNT), order=(4, _ORDER))


@ledger_record()
class EpochAccount:
    """What contributions with one signed bound were charged in this epoch, and have lost since the first leaf.

    The bound is (clip_norm, noise_multiplier) in 1e-6, 0 and 0 where a class has members without one. Their thresholds
    are the plan's times `scale`. `spend` is ε in 1e-9, rounded up, over all runs and generations of the ledger, for a
    contribution that was eligible all the time: at the header's δ, by its accountant. `exhausted` is there if earlier
    charges had used up the bound (`Spending.exhausted`): the factor that its thresholds had beside the scale; 0: left out.
    """

    cls: str = stored(1, CLASS)
    clip_norm: int = stored(2, MICRO, default=0)
    noise_multiplier: int = stored(3, MICRO, default=0)
    scale: float = stored(4, exact_float_in(5e-324, 1.0), default=1.0)
    charges: tuple[Event, ...] = stored(5, tuple_of(EVENT, 0, 1024))
    spend: int = stored(6, SPEND)
    exhausted: float | None = stored(7, exact_float_in(0.0, 0.5), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_bound(self.clip_norm, self.noise_multiplier)

    @property
    def factor(self) -> float:
        """That of an exhausted bound; 1 for every other one."""
        return 1.0 if self.exhausted is None else self.exhausted

    @property
    def scaled(self) -> float:
        """What the thresholds of its contributions were multiplied by in all; 0: they were left out."""
        return self.scale * self.factor

    @property
    def next_factor(self) -> float:
        """The next larger factor of the list; 1 for who was left out, since the list may be 1 and 0 alone."""
        return min(1.0, 2 * self.factor or 1.0)

    @property
    def bound(self) -> Account:
        """What names the account in a ledger."""
        return Account(self.cls, self.clip_norm, self.noise_multiplier)


_VARIANCE = tuple_of(exact_float_in(0.0, _MAX_FLOAT), 1, MAX_LAYERS)


@ledger_record()
class NoiseChange:
    """From `step` on, S² per layer is `variance`: a rule of the plan moved it."""

    step: int = stored(1, COUNT)
    variance: tuple[float, ...] = stored(2, _VARIANCE)


@ledger_record()
class Epoch:
    """Segments of one run under one plan, closed together.

    run       16 bytes that name it
    plan      digest of the StepPlan, whose bytes are a blob of the store
    variance  S² per layer as the plan applied it, in its order of layers; never measured from what was drawn
    changes   every S² after that, where a rule of the plan moved it; then the epoch has one segment
    state     digest of the public state of the accountant after it
    previous  digest of the checkpoint before it, which the ledger fills in; absent before the first
    """

    run: bytes = stored(1, RUN)
    segments: tuple[Segment, ...] = stored(2, tuple_of(nested(Segment), 1, MAX_SEGMENTS))
    plan: bytes = stored(3, DIGEST)
    variance: tuple[float, ...] = stored(4, _VARIANCE)
    accounts: tuple[EpochAccount, ...] = stored(5, tuple_of(nested(EpochAccount), 0, MAX_ACCOUNTS))
    state: bytes = stored(6, DIGEST)
    previous: bytes | None = stored(7, DIGEST, default=None)
    changes: tuple[NoiseChange, ...] | None = stored(
        8, tuple_of(nested(NoiseChange), 1, MAX_NOISE_VALUES), default=None
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.changes:
            steps = [each.step for each in self.changes]
            edges = [self.segments[0].first, *steps, self.segments[0].last]
            if len(self.segments) > 1 or edges != sorted(set(edges)):
                problem = "the noise of the epoch changes outside its one segment, or out of order"
                raise LedgerError("ledger.epoch-changes-misplaced", problem, "give each change its own step, in order")
        attempts = [(each.index, each.generation) for each in self.segments]
        if attempts != sorted(set(attempts)):
            problem = "the epoch names a segment twice or out of order"
            raise LedgerError("ledger.epoch-segments-not-sorted", problem, "sort by segment and generation")
        bounds = [each.bound for each in self.accounts]
        if bounds != sorted(set(bounds)):
            problem = "the epoch names a bound twice or out of order"
            raise LedgerError("ledger.epoch-accounts-not-sorted", problem, "sort the accounts by bound")

    @property
    def attempts(self) -> tuple[tuple[bytes, int, int], ...]:
        """(run, segment, generation) of each: what may be in a ledger once."""
        return tuple((self.run, each.index, each.generation) for each in self.segments)

    @property
    def applied(self) -> list[tuple[int, tuple[float, ...]]]:
        """How many steps had which S² per layer."""
        if not self.changes:
            return [(sum(each.last - each.first for each in self.segments), self.variance)]
        starts = [self.segments[0].first, *(each.step for each in self.changes)]
        noise = [self.variance, *(each.variance for each in self.changes)]
        return [(b - a, v) for a, b, v in zip(starts, [*starts[1:], self.segments[0].last], noise, strict=True)]


Record = (
    Header | ContributionRecord | Epoch | Withdrawal | KeyEvents | Aggregate | PolicyChange | Release | TermsChange
    | RunRecord
)  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False)
class RecordKind:
    """One kind of record: all that the ledger asks of it. `register_kind` makes it known.

    type      a `ledger_record`: its fields state how it is encoded, decoded and checked by itself
    number    in a leaf, 1 to 23
    name      for people and for `lamina ledger show --kind`
    check     the append rule: raises LedgerError if a record may not stand at a place (`append_rules.Place`). It is
              applied when a record is appended, when another process reads its leaf, and when the ledger is verified
    show      one line for people
    classes, runs   that a record names: `lamina ledger show` finds it by them
    digests   of the bytes that the store keeps beside its leaf
    claims    what a batch may say once
    """

    type: type[Any]
    number: int
    name: str
    check: Callable[[Any, Any], None] | None = None
    show: Callable[[Any], str] = repr
    classes: Callable[[Any], Iterable[str]] = lambda record: ()
    runs: Callable[[Any], Iterable[bytes]] = lambda record: ()
    digests: Callable[[Any], tuple[bytes, ...]] = lambda record: ()
    claims: Callable[[Any], Iterable[Hashable]] = lambda record: ()


KINDS: dict[type[Record], RecordKind] = {}
RECORD_KINDS: dict[int, type[Record]] = {}
KIND_NUMBERS: dict[type[Record], int] = {}
KIND_NAMES: dict[type[Record], str] = {}
KINDS_BY_NAME: dict[str, type[Record]] = {}
LEAF_STARTS: dict[
    type[Record], tuple[bytes, ...]
] = {}  # the first three bytes of every leaf of a kind, and of no other


def register_kind(kind: RecordKind) -> RecordKind:
    """Make a kind of record known to this process; raise LedgerError if its number or name is taken."""
    if not 0 < kind.number < 24 or kind.number in RECORD_KINDS or kind.name in KINDS_BY_NAME:
        problem = f"kind {kind.name!r} with number {kind.number} is not free, or the number is not in [1, 23]"
        raise LedgerError("ledger.kind-taken", problem, "choose a number and a name that no kind has")
    KINDS[kind.type], RECORD_KINDS[kind.number], KINDS_BY_NAME[kind.name] = kind, kind.type, kind.type
    KIND_NUMBERS[kind.type], KIND_NAMES[kind.type] = kind.number, kind.name
    LEAF_STARTS[kind.type] = (bytes((0xA5, 1, kind.number)),)
    return kind


def _named_presets(record: Header | PolicyChange) -> set[str]:
    return {each.cls for each in record.presets}


for _kind in (
    RecordKind(type=Header, number=1, name="header", classes=_named_presets),
    RecordKind(
        type=ContributionRecord, number=2, name="contribution", classes=lambda r: (r.bound.cls,),
        digests=lambda r: (r.attestation,),
    ),
    RecordKind(
        type=Epoch, number=3, name="epoch", classes=lambda r: {each.cls for each in r.accounts}, runs=lambda r: (r.run,),
        digests=lambda r: (r.plan,), claims=lambda r: r.attempts,
    ),
    RecordKind(
        type=Withdrawal, number=4, name="withdrawal", runs=lambda r: () if r.run is None else (r.run,),
        digests=lambda r: () if r.request is None else (r.request,), claims=lambda r: (r.target,),
    ),
    RecordKind(type=KeyEvents, number=5, name="key"),
    RecordKind(type=Aggregate, number=6, name="aggregate", classes=lambda r: {each.cls for each in r.classes}),
    RecordKind(type=PolicyChange, number=7, name="policy", classes=_named_presets),
    RecordKind(type=Release, number=8, name="release", runs=lambda r: r.runs, digests=lambda r: (r.manifest,)),
    RecordKind(type=TermsChange, number=9, name="terms"),
    RecordKind(type=RunBegin, number=10, name="run-begin", runs=lambda r: (r.run,), claims=lambda r: (r.run,)),
    RecordKind(
        type=RunEnd, number=11, name="run-end", classes=lambda r: {each.cls for each in r.caps},
        runs=lambda r: (r.run,), claims=lambda r: (r.run,),
    ),
):  # fmt: skip
    register_kind(_kind)


# A leaf: what is kept of a record at its place in the ledger, for ever. Its body stands beside it.
#
#     {1: kind, 2: seq, 3: time, 4: epoch, 5: SHA-256 of the body}         deterministic CBOR; hash = SHA-256(0x00 ‖ leaf)
#     {…, 6: descriptor, 7: expires, 8: class, 9: clip norm, 10: noise multiplier, 11: subject}        of a contribution
#
# seq is the index in the tree, time is in seconds and never falls, epoch counts the epochs that were closed before. The
# body is the CBOR of the record, of a contribution without what its leaf says. Only bodies of contributions are ever
# pruned: whatever is gone, the leaf says what it was.

MAX_LEAF_BYTES = 512
MAX_BODY_BYTES = 1 << 20  # bytes; an epoch of a thousand layers and a hundred bounds takes some 40 kB
LAST_SEQ = 2**63 - 1
_POSITION = (rb"\x02", NUMBER, rb"\x03", NUMBER, rb"\x04", NUMBER, rb"\x05")
_MATCH_LEAF_START = compile_pattern(rb"[\xa5\xaa\xab]\x01", NUMBER, *_POSITION).match


class Leaf(NamedTuple):
    """A record, where it stands, and since when. Of a contribution whose body is pruned: what its leaf says."""

    kind: type[Record]
    seq: int
    time: int
    epoch: int
    record: Record | KeptContribution


class KeptLeaf(NamedTuple):
    """What a leaf says without its body."""

    kind: type[Record]
    seq: int
    time: int
    epoch: int
    body_hash: bytes
    contribution: KeptContribution | None


# A record in CBOR: the beginning of its leaf up to the seq, the end from the hash of the body on, and the body
EncodedRecord = tuple[bytes, bytes, bytes]


def encode_record(record: Record) -> EncodedRecord:
    """The CBOR of a record by itself: the same wherever it will stand."""
    if type(record) is ContributionRecord:
        return _encode_contribution(record)
    body = encode_body(record)
    return bytes((0xA5, 1, KIND_NUMBERS[type(record)], 2)), _BODY_HASH + hashlib.sha256(body).digest(), body


def encode_body(record: Record) -> bytes:
    """The body of a record that is no contribution."""
    if type(record) not in KIND_NUMBERS:
        problem = f"{type(record).__name__} is not a ledger record"
        raise LedgerError("ledger.not-a-record", problem, "append records of lamina.ledger.records")
    try:
        return cbor.encode(schema_of(type(record)).to_cbor(record), max_size=MAX_BODY_BYTES)
    except EncodingError as error:
        problem = f"cannot write this {type(record).__name__}: {error.problem}"
        raise LedgerError("ledger.record-too-large", problem, "split it") from None


def encode_leaf(record: Record, seq: int, time: int, epoch: int) -> StoredLeaf:
    """The leaf of a record, and its body."""
    head, tail, body = encode_record(record)
    if (problem := _position_problem(seq, time, epoch)) is not None:
        raise LedgerError("ledger.leaf-malformed", problem)
    return StoredLeaf(head + cbor_uint(seq) + encode_time_epoch(time, epoch) + tail, body)


def encode_time_epoch(time: int, epoch: int) -> bytes:
    """What stands in a leaf between its seq and the hash of its body."""
    return b"".join((b"\x03", cbor_uint(time), b"\x04", cbor_uint(epoch)))


def cbor_uint(value: int) -> bytes:
    """A number >= 0 as CBOR writes it."""
    if value < 24:
        return bytes((value,))
    if value < 0x100:
        return bytes((24, value))
    if value < 0x10000:
        return b"\x19" + value.to_bytes(2, "big")
    if value < 0x100000000:
        return b"\x1a" + value.to_bytes(4, "big")
    return b"\x1b" + value.to_bytes(8, "big")


def cbor_uints(first: int, count: int) -> list[bytes]:
    """So many numbers from `first` on, as CBOR writes them."""
    for start, least, most in ((b"\x19", 0x100, 0x10000), (b"\x1a", 0x10000, 0x100000000)):
        if least <= first and first + count <= most:
            width = 2 if most == 0x10000 else 4
            return [start + value.to_bytes(width, "big") for value in range(first, first + count)]
    return list(map(cbor_uint, range(first, first + count)))


def decode_leaf(data: StoredLeaf) -> Leaf:
    """The leaf and its record; EncodingError for anything that `encode_leaf` would not have written.

    A body may be missing where the leaf is a contribution's, and only there.
    """
    if (found := _read_contribution(data)) is not None:
        return found
    kept = decode_kept(data.leaf)
    if data.body is None:
        if kept.contribution is None:
            problem = f"the body of this {KIND_NAMES[kept.kind]} is missing, and only contributions are pruned"
            raise EncodingError("ledger.body-missing", problem, "restore the ledger from a copy")
        return Leaf(*kept[:4], kept.contribution)
    if hashlib.sha256(data.body).digest() != kept.body_hash:
        problem = "its body does not have the hash that the leaf states"
        raise EncodingError("ledger.body-differs", problem, "restore the ledger from a copy")
    plain = cbor.decode(data.body, max_size=MAX_BODY_BYTES)
    if kept.contribution is None:
        return Leaf(*kept[:4], schema_of(kept.kind).from_cbor(plain))
    body: ContributionBody = schema_of(ContributionBody).from_cbor(plain)
    try:
        return Leaf(*kept[:4], body.joined(kept.contribution))
    except LedgerError as error:
        raise EncodingError("ledger.record-invalid", error.problem, READ_REMEDY) from None


def decode_kept(data: bytes) -> KeptLeaf:
    """What a leaf says without its body; EncodingError for anything that `encode_leaf` would not have written."""
    plain = cbor.decode(data, max_size=MAX_LEAF_BYTES)
    if type(plain) is not dict or not plain.keys() >= {1, 2, 3, 4, 5}:
        raise EncodingError("ledger.leaf-malformed", "a leaf must be a map with the keys 1 to 5", READ_REMEDY)
    number, seq, time, epoch, body_hash = (plain.pop(key) for key in (1, 2, 3, 4, 5))
    if type(number) is not int or number not in RECORD_KINDS:
        problem = f"a leaf has the unknown kind {number!r}"
        raise EncodingError("ledger.leaf-kind-unknown", problem, "read it with a newer version of lamina")
    wrong = _position_problem(seq, time, epoch)
    if wrong is None and not DIGEST.fits(body_hash):
        wrong = "a leaf has no hash of 32 bytes for its body"
    kind = RECORD_KINDS[number]
    if wrong is None and kind is not ContributionRecord and plain:
        wrong = f"a leaf of kind {KIND_NAMES[kind]} must be a map with the keys 1 to 5"
    if wrong is not None:
        raise EncodingError("ledger.leaf-malformed", wrong, READ_REMEDY)
    kept = schema_of(KeptContribution).from_cbor(plain) if kind is ContributionRecord else None
    return KeptLeaf(kind, seq, time, epoch, body_hash, kept)


def kind_name(leaf: bytes) -> str | None:
    """What people call the kind of a leaf; None if it cannot be read."""
    try:
        return KIND_NAMES[decode_kept(leaf).kind]
    except EncodingError:
        return None


def _position_problem(seq: object, time: object, epoch: object) -> str | None:
    for name, value, most in (("seq", seq, LAST_SEQ), ("time", time, LAST_SECOND), ("epoch", epoch, LAST_SEQ)):
        if type(value) is not int or not 0 <= value <= most:
            return f"{name} of a leaf is {value!r}, must be an integer in [0, {most}]"
    return None


def leaf_tail(data: bytes) -> bytes | None:
    """The end of a leaf from the hash of its body on (`EncodedRecord`); None if it does not begin like a leaf."""
    found = _MATCH_LEAF_START(data)
    return None if found is None else data[found.end() - 1 :]


# A writer and a reader of their own for contributions: there are many of them, and few of everything else.
#
# They write and read the same bytes as the general ones, several times faster, and are tested against them. Whatever
# the reader does not know it leaves to the strict one, which decides.

_CONTRIBUTION_KIND = KIND_NUMBERS[ContributionRecord]
_CONTRIBUTION_HEADS = {items: bytes((0xA0 | items, 1, _CONTRIBUTION_KIND, 2)) for items in (10, 11)}
CONTRIBUTION_STARTS = {head[:3] for head in _CONTRIBUTION_HEADS.values()}  # of every leaf of one, and of no other leaf
LEAF_STARTS[ContributionRecord] = tuple(sorted(CONTRIBUTION_STARTS))
_BODY_HASH, _DESCRIPTOR, _SUBJECT = (bytes((key, 0x58, 32)) for key in (5, 6, 11))
_BODY_STARTS = {items: bytes((0xA0 | items, 1, 0x58, 32)) for items in (4, 5, 6)}
_KEY, _ANCHOR = (bytes((key, 0x58, 32)) for key in (2, 6))
# What comes after these patterns is the terms, and a subject or an anchor of 35 bytes.
CONTRIBUTION_LEAF = compile_pattern(
    rb"[\xaa\xab]\x01", re.escape(bytes((_CONTRIBUTION_KIND,))), *_POSITION, BYTES_32, rb"\x06", BYTES_32, rb"\x07", NUMBER
)  # fmt: skip
CONTRIBUTION_BODY = compile_pattern(rb"[\xa4-\xa6]\x01", BYTES_32, rb"\x02", BYTES_32, rb"\x03", NUMBER)
_match_leaf, _match_body = CONTRIBUTION_LEAF.match, CONTRIBUTION_BODY.match
_PACK_BODY = struct.Struct(">4s32s3s32sBBI").pack
_PACK = struct.Struct(">3s32s3s32sBBI").pack  # two byte strings and a number of 32 bits, each with its key
_SHA256 = hashlib.sha256()
_set, _new = object.__setattr__, object.__new__


def _encode_contribution(record: ContributionRecord) -> EncodedRecord:
    terms, start, end, anchor, subject = record.terms, record.not_before, record.expires, record.anchor, record.subject
    items = (4 if terms.profile is None else 5) + (anchor is not None)
    usual = start > 0xFFFF and end <= 0xFFFFFFFF  # times of 32 bits
    if usual:
        body = _PACK_BODY(_BODY_STARTS[items], record.attestation, _KEY, record.key, 3, 0x1A, start) + terms.in_body
    else:
        since = b"\x03" + cbor_uint(start)
        body = b"".join((_BODY_STARTS[items], record.attestation, _KEY, record.key, since, terms.in_body))
    if anchor is not None:
        body += _ANCHOR + anchor
    state = _SHA256.copy()
    state.update(body)
    if usual:
        tail = _PACK(_BODY_HASH, state.digest(), _DESCRIPTOR, record.descriptor, 7, 0x1A, end) + terms.in_leaf
    else:
        until = b"\x07" + cbor_uint(end)
        tail = b"".join((_BODY_HASH, state.digest(), _DESCRIPTOR, record.descriptor, until, terms.in_leaf))
    if subject is not None:
        return _CONTRIBUTION_HEADS[11], tail + _SUBJECT + subject, body
    return _CONTRIBUTION_HEADS[10], tail, body


def _read_contribution(data: StoredLeaf) -> Leaf | None:
    """The leaf of a contribution with its body; None: let the strict reader decide."""
    leaf, body = data
    if body is None or (kept := _match_leaf(leaf)) is None or (rest := _match_body(body)) is None:
        return None
    seq, time, epoch, body_hash, descriptor, expires = kept.groups()
    attestation, key, not_before = rest.groups()
    seq, time, epoch = read_number(seq), read_number(time), read_number(epoch)
    start, stop = read_number(not_before), read_number(expires)
    if not (seq <= LAST_SEQ and epoch <= LAST_SEQ and time <= LAST_SECOND and start < stop <= LAST_SECOND):
        return None
    anchor = subject = None
    leaf_end, body_end, items = len(leaf), len(body), body[0] - 0xA3
    if leaf[0] == 0xAB:
        if leaf[leaf_end - 35 : leaf_end - 32] != _SUBJECT:
            return None
        subject, leaf_end = leaf[leaf_end - 32 :], leaf_end - 35
    if items > 1 and body[body_end - 35 : body_end - 32] == _ANCHOR:
        anchor, body_end, items = body[body_end - 32 :], body_end - 35, items - 1
    terms = _decode_terms(leaf[kept.end() : leaf_end], items, body[rest.end() : body_end])
    if terms is None or hashlib.sha256(body).digest() != body_hash:
        return None
    record = _new(ContributionRecord)  # what __post_init__ checks was checked here
    _set(record, "descriptor", descriptor)
    _set(record, "attestation", attestation)
    _set(record, "key", key)
    _set(record, "not_before", start)
    _set(record, "expires", stop)
    _set(record, "terms", terms)
    _set(record, "anchor", anchor)
    _set(record, "subject", subject)
    return Leaf(ContributionRecord, seq, time, epoch, record)


@lru_cache(maxsize=4096)
def _decode_terms(in_leaf: bytes, items: int, in_body: bytes) -> ContributionTerms | None:
    """The terms of which these are the items in a leaf (three) and in its body (one or two)."""
    try:
        kept, body = cbor.decode(b"\xa3" + in_leaf), cbor.decode(bytes((0xA0 | items,)) + in_body)
        if kept.keys() != {8, 9, 10} or not {4} <= body.keys() <= {4, 5}:
            return None
        return ContributionTerms(kept[8], body[4], kept[9], kept[10], body.get(5))
    except (EncodingError, LedgerError):
        return None
