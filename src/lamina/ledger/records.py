"""Records of contributions and epochs, and the leaf that encodes a record of any kind at its place and time."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import field
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from lamina import cbor
from lamina.admit.attestation import NUMBER, compile_pattern, read_number
from lamina.admit.keys import LAST_SECOND
from lamina.errors import EncodingError, LedgerError
from lamina.ledger.governance_records import Aggregate, Header, KeyEvent, PolicyChange, Release, Withdrawal
from lamina.ledger.schema import (
    CLASS,
    COUNT,
    DATA_CLASS,
    DIGEST,
    KEY_ID,
    MICRO,
    NONCE,
    PROFILE,
    READ_REMEDY,
    RUN,
    SEQ,
    SPEND,
    TIME,
    check_fields,
    enum_member,
    exact_float_in,
    integer,
    ledger_record,
    nested,
    schema_of,
    stored,
    tuple_of,
)


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
    encoded: bytes = field(init=False, repr=False, compare=False)  # in CBOR, made once for many contributions

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "encoded", cbor.encode(schema_of(ContributionTerms).to_cbor(self)))
        if (self.clip_norm == 0) != (self.noise_multiplier == 0):
            problem = f"clip_norm is {self.clip_norm} and noise_multiplier is {self.noise_multiplier}"
            raise LedgerError("ledger.bound-incomplete", problem, "set both to 0 in a public class, neither elsewhere")

    @property
    def bound(self) -> tuple[str, int, int]:
        """What names its account in an epoch."""
        return (self.cls, self.clip_norm, self.noise_multiplier)


@ledger_record()
class ContributionRecord:
    """One contribution, by digests: nothing here leads to its content, or to its contributor without a key ring.

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
    def bound(self) -> tuple[str, int, int]:
        """What names its account in an epoch."""
        return self.terms.bound


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
    withdrawn, in the leaves before that. Who of them was sampled is nowhere.
    """

    index: int = stored(1, COUNT)
    generation: int = stored(2, COUNT)
    nonce: bytes = stored(3, NONCE)
    first: int = stored(4, COUNT)
    last: int = stored(5, COUNT)
    eligibility: int = stored(6, SEQ)
    outcome: SegmentOutcome = stored(7, enum_member(SegmentOutcome))
    after: int | None = stored(8, integer(1, 2**53), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.first < self.last:
            problem = f"segment {self.index} covers steps [{self.first}, {self.last})"
            raise LedgerError("ledger.segment-empty", problem, "give first < last")


@ledger_record()
class EpochCharge:
    """`steps` Poisson-subsampled Gaussian events with multiplier `sigma` and rate `rate`.

    `order` is the Rényi order of noise that followed its budget, under a filter at that order; absent otherwise.
    """

    sigma: float = stored(1, exact_float_in(5e-324, _MAX_FLOAT))
    rate: float = stored(2, exact_float_in(0.0, 1.0))
    steps: int = stored(3, COUNT)
    order: float | None = stored(4, exact_float_in(1.02, 1e6), default=None)


@ledger_record()
class EpochAccount:
    """What contributions with one signed bound were charged in this epoch, and have lost since the first leaf.

    The bound is (clip_norm, noise_multiplier) in 1e-6, 0 and 0 where a class has members without one. Their thresholds
    are the plan's times `scale`. `spend` is ε in 1e-9, rounded up, over all runs and generations of the ledger, for a
    contribution that was eligible all the time: at the header's δ, by its accountant.
    """

    cls: str = stored(1, CLASS)
    clip_norm: int = stored(2, MICRO, default=0)
    noise_multiplier: int = stored(3, MICRO, default=0)
    scale: float = stored(4, exact_float_in(5e-324, 1.0), default=1.0)
    charges: tuple[EpochCharge, ...] = stored(5, tuple_of(nested(EpochCharge), 0, 1024))
    spend: int = stored(6, SPEND)

    @property
    def bound(self) -> tuple[str, int, int]:
        """What names the account in a ledger."""
        return (self.cls, self.clip_norm, self.noise_multiplier)

    @property
    def name(self) -> str:
        """The same in words."""
        return f"{self.cls}/{self.clip_norm}/{self.noise_multiplier}"


@ledger_record()
class Epoch:
    """Segments of one run under one plan, closed together.

    run       16 bytes that name it
    plan      digest of the StepPlan, whose bytes are a blob of the store
    variance  S² per layer as the plan applied it, in its order of layers; never measured from what was drawn
    state     digest of the public state of the accountant after it
    previous  digest of the checkpoint before it, which the ledger fills in; absent before the first
    """

    run: bytes = stored(1, RUN)
    segments: tuple[Segment, ...] = stored(2, tuple_of(nested(Segment), 1, MAX_SEGMENTS))
    plan: bytes = stored(3, DIGEST)
    variance: tuple[float, ...] = stored(4, tuple_of(exact_float_in(0.0, _MAX_FLOAT), 1, MAX_LAYERS))
    accounts: tuple[EpochAccount, ...] = stored(5, tuple_of(nested(EpochAccount), 0, MAX_ACCOUNTS))
    state: bytes = stored(6, DIGEST)
    previous: bytes | None = stored(7, DIGEST, default=None)

    def __post_init__(self) -> None:
        check_fields(self)
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


Record = Header | ContributionRecord | Epoch | Withdrawal | KeyEvent | Aggregate | PolicyChange | Release

RECORD_KINDS: dict[int, type[Record]] = {
    1: Header, 2: ContributionRecord, 3: Epoch, 4: Withdrawal, 5: KeyEvent, 6: Aggregate, 7: PolicyChange, 8: Release,
}  # fmt: skip
KIND_NUMBERS: dict[type[Record], int] = {kind: number for number, kind in RECORD_KINDS.items()}
KIND_NAMES: dict[type[Record], str] = {  # what people read
    Header: "header", ContributionRecord: "contribution", Epoch: "epoch", Withdrawal: "withdrawal", KeyEvent: "key",
    Aggregate: "aggregate", PolicyChange: "policy", Release: "release",
}  # fmt: skip


# A writer and a reader of their own for contributions: there are many of them, and few of everything else.
#
# They write and read the same bytes as the general ones, several times faster, and are tested against them. The reader
# knows one layout, the usual one, with every constant byte of it; whatever is not exactly that it leaves to the strict
# reader, which decides.

# What stands before the fields of a body: a map of 6 to 8, and 32 bytes under the keys 1, 2, 3, 7, 8.
_BODY_START = {count: bytes((0xA0 | count, 1, 0x58, 32)) for count in (6, 7, 8)}
_FIRST_DIGEST = _BODY_START[6][1:]
_ATTESTATION_HEAD, _KEY_HEAD, _ANCHOR_HEAD, _SUBJECT_HEAD = (bytes((key, 0x58, 32)) for key in (2, 3, 7, 8))
_PACK_VALIDITY = struct.Struct(">BBIBBIB").pack  # 4: not_before, 5: expires, both of 32 bits, and the key 6
_LEAF_START = b"\xa5\x01\x02\x02"  # a map of 5; kind: 2, and the key of seq
_CONSTANT_BYTES = (
    _LEAF_START, b"\x03\x1a", b"\x04", b"\x05", _ATTESTATION_HEAD, _KEY_HEAD, b"\x04\x1a", b"\x05\x1a", b"\x06"
)  # fmt: skip
_UINT_WIDTHS = {24: 1, 25: 2, 26: 4}  # by the first byte of a number of more than one: how many follow
_UINT_LEAST = {24: 24, 25: 1 << 8, 26: 1 << 16}  # a smaller number has a shorter form
_UINT_FORMATS = {0: "B", 24: "xB", 25: "xH", 26: "xI"}
_LAYOUTS: dict[tuple[int, int], tuple[Callable[[bytes], tuple[Any, ...]], int]] = {}  # by the forms of seq and epoch
for _seq, _epoch in product(_UINT_FORMATS, _UINT_FORMATS):
    _form = struct.Struct(f">4s{_UINT_FORMATS[_seq]}2sIs{_UINT_FORMATS[_epoch]}s4s32s3s32s3s32s2sI2sIs")
    _LAYOUTS[_seq, _epoch] = (_form.unpack_from, _form.size)
_set, _new = object.__setattr__, object.__new__


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


def encode_contribution_body(record: ContributionRecord) -> bytes:
    """The body of a contribution."""
    start, end, terms = record.not_before, record.expires, record.terms.encoded
    if start > 0xFFFF and end <= 0xFFFFFFFF:
        window = _PACK_VALIDITY(4, 0x1A, start, 5, 0x1A, end, 6)
    else:
        window = b"".join((b"\x04", cbor_uint(start), b"\x05", cbor_uint(end), b"\x06"))
    count = 6
    if record.anchor is not None:
        terms, count = terms + _ANCHOR_HEAD + record.anchor, 7
    if record.subject is not None:
        terms, count = terms + _SUBJECT_HEAD + record.subject, count + 1
    return b"".join((
        _BODY_START[count], record.descriptor, _ATTESTATION_HEAD, record.attestation, _KEY_HEAD, record.key, window, terms
    ))  # fmt: skip


def decode_contribution_leaf(data: bytes) -> tuple[int, int, int, ContributionRecord] | None:
    """seq, time, epoch and record of a leaf in the usual layout; None: let the strict reader decide."""
    try:
        one = data[4] if data[4] > 23 else 0
        two = data[12 + _UINT_WIDTHS.get(one, 0)]
        two = two if two > 23 else 0
        unpack, begin = _LAYOUTS[one, two]
        c0, seq, c1, time, c2, epoch, c3, head, d, c4, a, c5, k, c6, start, c7, stop, c8 = unpack(data)
    except (IndexError, KeyError, struct.error):
        return None
    if (
        (c0, c1, c2, c3, c4, c5, c6, c7, c8) != _CONSTANT_BYTES
        or seq < _UINT_LEAST.get(one, 0)
        or epoch < _UINT_LEAST.get(two, 0)
    ):
        return None
    more, end = head[0] - 0xA6, len(data)
    if not 0 <= more <= 2 or head[1:] != _FIRST_DIGEST or time < 0x10000 or not 0x10000 <= start < stop:
        return None
    anchor = subject = None
    if more and data[end - 35 : end - 32] == _SUBJECT_HEAD:
        subject, end, more = data[end - 32 :], end - 35, more - 1
    if more and data[end - 35 : end - 32] == _ANCHOR_HEAD:
        anchor, end, more = data[end - 32 : end], end - 35, more - 1
    terms = _decode_terms(data[begin:end])
    if more or terms is None:
        return None
    record = _new(ContributionRecord)  # what __post_init__ checks was checked here
    _set(record, "descriptor", d)
    _set(record, "attestation", a)
    _set(record, "key", k)
    _set(record, "not_before", start)
    _set(record, "expires", stop)
    _set(record, "terms", terms)
    _set(record, "anchor", anchor)
    _set(record, "subject", subject)
    return seq, time, epoch, record


@lru_cache(maxsize=4096)
def _decode_terms(data: bytes) -> ContributionTerms | None:
    try:
        found = schema_of(ContributionTerms).from_cbor(cbor.decode(data))
    except EncodingError:
        return None
    assert type(found) is ContributionTerms
    return found


# A leaf: a record at its place in the ledger.
#
#     {1: kind, 2: seq, 3: time, 4: epoch, 5: body}         deterministic CBOR; hash = SHA-256(0x00 ‖ leaf)
#
# seq is the index in the tree, time is in seconds and never falls, epoch counts the epochs that were closed before.

MAX_LEAF_BYTES = 1 << 20  # bytes; an epoch of a thousand layers and a hundred bounds takes some 40 kB
_MAX_SEQ = 2**63 - 1
_MATCH_LEAF_HEAD = compile_pattern(
    rb"\xa5\x01", NUMBER, rb"\x02", NUMBER, rb"\x03", NUMBER, rb"\x04", NUMBER, rb"\x05"
).match


class Leaf(NamedTuple):
    """A record, where it stands, and since when."""

    kind: type[Record]
    seq: int
    time: int
    epoch: int
    record: Record


def encode_body(record: Record) -> bytes:
    """The CBOR of a record by itself: the same wherever it will stand."""
    if type(record) is ContributionRecord:
        return encode_contribution_body(record)
    if type(record) not in KIND_NUMBERS:
        problem = f"{type(record).__name__} is not a ledger record"
        raise LedgerError("ledger.not-a-record", problem, "append records of lamina.ledger.records")
    try:
        return cbor.encode(schema_of(type(record)).to_cbor(record), max_size=MAX_LEAF_BYTES - 64)
    except EncodingError as error:
        raise LedgerError(
            "ledger.record-too-large", f"cannot write this {type(record).__name__}: {error.problem}", "split it"
        ) from error


def encode_leaf(record: Record, seq: int, time: int, epoch: int) -> bytes:
    """The leaf of a record."""
    body = encode_body(record)
    if (problem := _position_problem(seq, time, epoch)) is not None:
        raise LedgerError("ledger.leaf-malformed", problem)
    position = (cbor_uint(KIND_NUMBERS[type(record)]), cbor_uint(seq), cbor_uint(time), cbor_uint(epoch))
    parts = enumerate((*position, body), start=1)
    return b"\xa5" + b"".join(bytes((key,)) + part for key, part in parts)


def decode_leaf(data: bytes) -> Leaf:
    """The leaf that these bytes are; EncodingError for anything that `encode_leaf` would not have written."""
    if (found := decode_contribution_leaf(data)) is not None:
        return Leaf(ContributionRecord, *found)
    stored = cbor.decode(data, max_size=MAX_LEAF_BYTES)
    if type(stored) is not dict or stored.keys() != {1, 2, 3, 4, 5}:
        raise EncodingError("ledger.leaf-malformed", "a leaf must be a map with the keys 1 to 5", READ_REMEDY)
    number, seq, time, epoch, body = (stored[key] for key in (1, 2, 3, 4, 5))
    if type(number) is not int or number not in RECORD_KINDS:
        problem = f"a leaf has the unknown kind {number!r}"
        raise EncodingError("ledger.leaf-kind-unknown", problem, "read it with a newer version of lamina")
    if (wrong := _position_problem(seq, time, epoch)) is not None:
        raise EncodingError("ledger.leaf-malformed", wrong, READ_REMEDY)
    kind = RECORD_KINDS[number]
    return Leaf(kind, seq, time, epoch, schema_of(kind).from_cbor(body))


def _position_problem(seq: object, time: object, epoch: object) -> str | None:
    for name, value, most in (("seq", seq, _MAX_SEQ), ("time", time, LAST_SECOND), ("epoch", epoch, _MAX_SEQ)):
        if type(value) is not int or not 0 <= value <= most:
            return f"{name} of a leaf is {value!r}, must be an integer in [0, {most}]"
    return None


def split_leaf(data: bytes) -> tuple[int, int, int, int, int] | None:
    """Kind, seq, time and epoch of a leaf and where its body begins; None if it does not begin like one."""
    found = _MATCH_LEAF_HEAD(data)
    if found is None:
        return None
    kind, seq, time, epoch = map(read_number, found.groups())
    return kind, seq, time, epoch, found.end()
