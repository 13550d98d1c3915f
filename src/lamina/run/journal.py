"""The journal of a run: its records, the order in which they may come, and the append-only file that keeps them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.account.charges import Charge, stored_charge
from lamina.errors import AccountingError, EncodingError, LaminaError, RunError, StorageError
from lamina.files import CHANGE
from lamina.ledger.attempts import NoiseByStep
from lamina.run.run_files import remove_temporary_files, replacing, storage_error, write_all

# A record is public knowledge of the run's *shape* (which steps, which plan, which charge). The seed of an
# `AttemptOpened` is the exception: it decides coins and noise, so it is no part of the body, is not printed, and is
# erased.

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
        kind, width = _FIELD_TYPES.get(str(entry.type)), _FIELD_BYTES.get(entry.name)
        value = getattr(record, entry.name)
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
class _Record:
    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(_Record):
    """The run begins: its name (32 hex digits), the salt of its keyed digests, the inode of its journal."""

    run: str
    salt: bytes
    place: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if len(self.run) != 32 or set(self.run) - set("0123456789abcdef"):
            raise _invalid(f"run is {self.run!r}, must be 32 hexadecimal digits")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt(_Record):
    """One attempt at a segment, named by segment, generation and nonce."""

    segment: int
    generation: int
    nonce: bytes

    @property
    def key(self) -> tuple[int, int, bytes]:
        return (self.segment, self.generation, self.nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentInputs:
    """All that the outcome of a segment depends on, apart from its seed. `AttemptOpened` has the same fields."""

    plan: bytes
    settings: bytes
    membership: bytes
    checkpoint: bytes
    data: bytes
    world_size: int
    threads: int
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOpened(_Attempt):
    """Steps [first, last) are charged and may be drawn from `seed`.

    A replay is allowed only if plan, settings, membership, checkpoint, data, ranks, threads and code are still what
    they were. `eligibility` is the number of leaves of the ledger when its members were frozen, `after` the generation
    of the segment whose weights it goes on from, `variance` S² per layer at its first step where the plan's rules move
    it, `scales` those of the signed bounds that are charged, `factors` of those that are exhausted. `seed` is b"" once it was erased.
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
    factors: dict[str, float] = field(default_factory=dict)
    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for record in (self, *self.charges):
            _check_fields(record)
        if not self.first <= self.last:
            raise _invalid(f"the segment covers steps [{self.first}, {self.last})")
        if len(self.seed) not in (0, SEED_BYTES):
            raise _invalid(f"seed has {len(self.seed)} bytes, must have {SEED_BYTES}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseApplied(_Attempt):
    """All steps of the open attempt are done: from each of these on, S² per layer was the variance beside it."""

    steps: tuple[int, ...]
    variance: tuple[tuple[float, ...], ...]


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
class JournalMoved(_Record):
    """The journal now lies at this inode: a copy was found, charged anew, and goes on from here.

    Or it lies where it lay, and is an older state of itself: `lost` attempts are in the ledger that it does not know.
    """

    place: int
    lost: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(_Record):
    """The run ends after this many steps, and why."""

    steps: int
    reason: str


JournalRecord = RunStarted | AttemptOpened | AttemptClosed | JournalMoved | RunEnded | AttemptAbandoned | NoiseApplied

JOURNAL_KINDS: dict[int, type[JournalRecord]] = dict(
    enumerate((RunStarted, AttemptOpened, AttemptClosed, JournalMoved, RunEnded, AttemptAbandoned, NoiseApplied), 1)
)
_ENDS = (NoiseApplied, AttemptClosed, AttemptAbandoned)  # what is written of an open attempt
_KIND_NUMBERS = {kind: number for number, kind in JOURNAL_KINDS.items()}


def to_body(record: JournalRecord) -> tuple[int, bytes]:
    """The number of the record's kind and its CBOR, the seed left out."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "seed"}
    if not fields.get("factors"):
        fields.pop("factors", None)
    if isinstance(record, AttemptOpened):
        fields["charges"] = [charge.row() for charge in record.charges]
        fields["variance"] = list(record.variance)
    if isinstance(record, NoiseApplied):
        fields |= {"steps": list(record.steps), "variance": list(map(list, record.variance))}
    try:
        return _KIND_NUMBERS[type(record)], cbor.encode(fields, floats=True, max_size=BODY_LIMIT)
    except EncodingError as error:
        raise _invalid(f"a record {type(record).__name__} cannot be written: {error.problem}") from None


def from_body(number: int, body: bytes) -> JournalRecord:
    """The record that `to_body` wrote, an AttemptOpened without its seed. EncodingError or RunError otherwise."""
    fields = cbor.decode(body, floats=True, max_size=BODY_LIMIT)
    try:
        kind = JOURNAL_KINDS[number]
        if kind is AttemptOpened:
            charges = tuple(stored_charge(**row) for row in fields["charges"])
            fields |= {"charges": charges, "variance": tuple(fields["variance"]), "seed": b""}
        if kind is NoiseApplied:
            fields |= {"steps": tuple(fields["steps"]), "variance": tuple(map(tuple, fields["variance"]))}
        record = kind(**fields)
        if to_body(record) != (number, body):
            raise ValueError("another encoding")
    except (TypeError, KeyError, ValueError, AttributeError, AccountingError) as error:
        problem = f"a record of kind {number} is not what this version writes ({error})"
        remedy = "read it with the version that wrote it"
        raise EncodingError("train.journal-record-unknown", problem, remedy) from None
    return record


class RunHistory:
    """The records of a run, in the order in which they may come.

    One RunStarted, first; an AttemptOpened only with a higher generation than all earlier ones of that segment (a lost
    checkpoint makes a run go back to earlier segments); a NoiseApplied, AttemptClosed or AttemptAbandoned only for the
    last AttemptOpened while it is open, with its nonce. So at most one attempt is pending, and every other seed is of no
    use to anybody but an attacker.
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

    def noise_applied(self, record: AttemptOpened) -> NoiseByStep:
        """From which step on this very attempt had which S² per layer; empty where no rule of its plan moved it."""
        mine = (each for each in reversed(self._records) if isinstance(each, NoiseApplied) and each.key == record.key)
        found = next(mine, None)
        return () if found is None else tuple(zip(found.steps, found.variance, strict=True))

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
        elif isinstance(record, _ENDS) and record.key != getattr(self.pending, "key", None):
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


# On disk a record is a frame, which is acknowledged by a mark once it is durable.
#
#     frame    = "LMJ1" | kind (1) | length of body (4) | checksum (32) | body | padding | slot (40, AttemptOpened) |
#                mark (16)
#     checksum = SHA-256("lamina/journal/1" | checksum of the frame before | kind | length | body)
#     slot     = seed (32) | SHA-256("lamina/journal/seed/1" | checksum | seed)[:8];  40 zeros once it was erased
#
# The checksum chains the frames, so none can be lost, doubled or moved unseen; it leaves the slot out, so that erasing
# a seed leaves the frame valid. A frame is first written with a mark of zeros and made durable; then the mark is written
# over the zeros and made durable; then, and only then, its writer is told that it succeeded. So
#
#     a frame without its mark was never acknowledged: nobody acted on it, and it may be ignored,
#     a frame with its mark was complete on the disk: whatever is wrong with it now is damage.
#
# A crash may leave a frame in any state, but never with its mark before all of it is durable. The padding (zeros)
# aligns the mark to its own size, so that it never lies across two sectors and is there or not.
#
# **Durable.** Ignoring a frame without a mark is safe: the trainer draws no coin and no noise before `append` returns,
# and an AttemptClosed is written again, because its checkpoint is there. The next `append` cuts such a frame off. A
# frame with a mark that cannot be read stops everything, because it may hold a charge.
#
# **Secret.** The seed of a segment decides who is sampled and what the noise is. It lives in the journal only while its
# attempt is the last one and open; otherwise `append` or `load` overwrites it in place with zeros, fsynced. That is best
# effort: flash translation layers, copy-on-write file systems, snapshots and backups may keep the old block. Where that
# matters, put the run's folder on an encrypted disk. The file has mode 0600.
#
# **In one place.** `copied` tells that the file is not the one that was written (another inode): a copy of a run goes on
# as a new generation, which is charged. It guards against mistakes, not against an adversary, and a deleted file's inode
# may come back; the ledger's nonces see what it misses.

_MAGIC, _VERSION = b"LMJ", b"1"
_HEAD = struct.Struct(">3ssBI32s")
_SLOT_BYTES = SEED_BYTES + 8
# Not UTF-8, so no text in a body holds it; the rest of a body is digests, which hit it with probability 2^-128.
DURABLE_MARK = bytes.fromhex("ffac6bd795e9fdb4cbf7a3dbb6edd9ff")
_OPENED_KIND = next(number for number, kind in JOURNAL_KINDS.items() if kind is AttemptOpened)
EMPTY_SLOT = bytes(_SLOT_BYTES)
GENESIS = bytes(32)  # what the first frame chains to


class UnreadableFrame(Exception):
    """No acknowledged frame lies here. `torn`: none ever did; otherwise one did, and it is damaged."""

    def __init__(self, offset: int, reason: str, *, torn: bool) -> None:
        self.offset = offset
        self.reason = reason
        self.torn = torn
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalFrame:
    """A frame and where it lies. `slot` is where the seed slot of an attempt begins; `wiped` if it holds no seed."""

    record: JournalRecord
    start: int
    end: int
    checksum: bytes
    slot: int = -1
    wiped: bool = True

    @property
    def garbled(self) -> bool:
        """Whether the slot holds neither a seed nor zeros."""
        return isinstance(self.record, AttemptOpened) and not self.record.seed and not self.wiped


def encode_frame(record: JournalRecord, start: int, previous: bytes) -> tuple[bytes, JournalFrame]:
    """The bytes of a frame that will begin at `start`, its mark still zeros, and the frame as if read back."""
    kind, body = to_body(record)
    padding, slot, end = _frame_layout(start, kind, len(body))
    checksum = _frame_checksum(previous, kind, body)
    data = _HEAD.pack(_MAGIC, _VERSION, kind, len(body), checksum) + body + bytes(padding)
    if isinstance(record, AttemptOpened):
        data += record.seed + _seed_check(checksum, record.seed)
    frame = JournalFrame(record=record, start=start, end=end, checksum=checksum, slot=slot, wiped=slot < 0)
    return data + bytes(len(DURABLE_MARK)), frame


def decode_frame(data: bytes, start: int, previous: bytes) -> JournalFrame:
    """The acknowledged frame that begins at `start`, or UnreadableFrame."""
    acknowledged = data.find(DURABLE_MARK, start) >= 0  # this frame or a later one: then nothing here is merely torn
    if len(data) - start < _HEAD.size:
        raise UnreadableFrame(start, f"{len(data) - start} bytes are left, too few for a record", torn=not acknowledged)
    family, version, kind, length, checksum = _HEAD.unpack_from(data, start)
    if family == _MAGIC and version > _VERSION and acknowledged:
        raise UnreadableFrame(start, f"the record has format {version!r}, this version reads {_VERSION!r}", torn=False)
    padding, slot, end = _frame_layout(start, kind, length)
    if end > len(data):
        raise UnreadableFrame(start, "a record that goes on past the end of the file", torn=not acknowledged)
    body_at, filler_at = start + _HEAD.size, start + _HEAD.size + length
    body, filler = data[body_at:filler_at], data[filler_at : filler_at + padding]
    if (family, version) != (_MAGIC, _VERSION) or checksum != _frame_checksum(previous, kind, body) or any(filler):
        raise UnreadableFrame(start, "a record whose checksum does not match", torn=not acknowledged)
    mark = data[end - len(DURABLE_MARK) : end]
    if mark != DURABLE_MARK:
        torn = not acknowledged and not any(mark)
        raise UnreadableFrame(end - len(DURABLE_MARK), "a record whose mark is wrong", torn=torn)
    try:
        record = from_body(kind, body)
    except LaminaError as error:
        raise UnreadableFrame(start, error.problem, torn=False) from None
    frame = JournalFrame(record=record, start=start, end=end, checksum=checksum)
    return frame if slot < 0 else _with_slot(frame, slot, data[slot : slot + _SLOT_BYTES])


def _with_slot(frame: JournalFrame, at: int, slot: bytes) -> JournalFrame:
    assert isinstance(frame.record, AttemptOpened)
    seed = slot[:SEED_BYTES]
    if slot[SEED_BYTES:] != _seed_check(frame.checksum, seed):
        seed = b""
    return replace(frame, record=replace(frame.record, seed=seed), slot=at, wiped=slot == EMPTY_SLOT)


def _frame_layout(start: int, kind: int, length: int) -> tuple[int, int, int]:
    """Size of the padding, start of the slot (-1 without one), end of the frame."""
    slot_bytes = _SLOT_BYTES if kind == _OPENED_KIND else 0
    padding = -(start + _HEAD.size + length + slot_bytes) % len(DURABLE_MARK)
    slot = start + _HEAD.size + length + padding
    return padding, slot if slot_bytes else -1, slot + slot_bytes + len(DURABLE_MARK)


def _frame_checksum(previous: bytes, kind: int, body: bytes) -> bytes:
    return hashlib.sha256(b"lamina/journal/1" + previous + struct.pack(">BI", kind, len(body)) + body).digest()


def _seed_check(checksum: bytes, seed: bytes) -> bytes:
    return hashlib.sha256(b"lamina/journal/seed/1" + checksum + seed).digest()[: _SLOT_BYTES - SEED_BYTES]


_MOST_BYTES = 1 << 28  # bytes; some 400 000 segments of one class


class Journal(RunHistory):
    """The history of a run on a disk. Made by `create` or `load`, by the holder of the run's lease."""

    def __init__(self, path: Path, place: int, size: int) -> None:
        super().__init__()
        self.path = path
        self.place = place  # the inode of the file: what JournalMoved says
        self._size = size  # of the file, a torn tail included
        self._end = 0  # of the last acknowledged frame
        self._chain = GENESIS
        self._slots: dict[int, int] = {}  # index of an AttemptOpened → offset of its seed slot, unless that is wiped
        self._broken = False

    @property
    def copied(self) -> bool:
        """Whether this file is another one than the one that the run was writing."""
        return self._last_place().place != self.place

    # ------------------------------------------------------------------------------------ making and reading

    @classmethod
    def create(cls, path: Path, *, run: str, salt: bytes) -> Journal:
        """A new journal with its RunStarted; there, whole and durable, or not there at all."""
        remove_temporary_files(path.parent)
        with replacing(path, fresh=True) as file:
            place = os.fstat(file).st_ino
            data, frame = encode_frame(RunStarted(run=run, salt=salt, place=place), 0, GENESIS)
            write_all(file, data[: -len(DURABLE_MARK)] + DURABLE_MARK)  # all of it is durable before it gets its name
        made = cls(path, place, frame.end)
        made._take(frame)
        return made

    @classmethod
    def load(cls, path: Path) -> Journal:
        """Read a journal, and erase the seeds that a crash kept from being erased."""
        journal = cls.read(path)
        journal._erase()
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a journal without changing it."""
        try:
            with open(path, "rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_mode & 0o077:
                    os.fchmod(file.fileno(), 0o600)  # a copy made under an ordinary umask
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise storage_error(error, f"cannot read the journal {path}", "it is as it was") from None
        journal = cls(path, facts.st_ino, len(data))
        journal._parse(data)
        return journal

    def _parse(self, data: bytes) -> None:
        if len(data) > _MOST_BYTES:
            raise self._damage(_MOST_BYTES, f"it is larger than {_MOST_BYTES} bytes")
        garbled = -1
        while self._end < len(data):
            try:
                frame = decode_frame(data, self._end, self._chain)
                self._check(frame.record)
            except UnreadableFrame as problem:
                if problem.torn:
                    break
                raise self._damage(problem.offset, problem.reason) from None
            except RunError as problem:
                raise self._damage(self._end, problem.problem) from None
            self._take(frame)
            if isinstance(frame.record, AttemptOpened):
                garbled = frame.slot if frame.garbled else -1
        if not self._records:
            raise self._damage(0, "it holds no whole first record")
        if self.pending is not None and garbled >= 0:
            raise self._damage(garbled, "the seed of the open segment does not have its check value")

    def _damage(self, offset: int, reason: str) -> StorageError:
        problem = f"the journal {self.path} is damaged at byte {offset}: {reason}"
        remedy = "restore it from a backup, or begin in another folder: what this run charged stays in the ledger"
        return StorageError("train.journal-damaged", problem, remedy)

    # ------------------------------------------------------------------------------------ writing

    def append(self, record: JournalRecord) -> None:
        """Make a record durable. On StorageError nobody may act on it: nothing may be drawn, nothing published.

        Once an attempt was closed, abandoned or replaced by another, its seed is erased.
        """
        if self._broken:
            problem = f"the journal {self.path} is in an unknown state after a failed write"
            remedy = "start the run again: it reads the journal afresh"
            raise StorageError("train.journal-state-unknown", problem, remedy)
        self._check(record)
        if isinstance(record, AttemptOpened) and not record.seed:
            raise _invalid("an attempt is written without its seed")
        data, frame = encode_frame(record, self._end, self._chain)
        try:
            self._write(data, frame)
        except OSError as error:
            fate = "the last one may be" if self._broken else "the last one is not"
            kept = f"all earlier records are in it, {fate}"
            raise storage_error(error, f"cannot write to the journal {self.path}", kept) from None
        self._take(frame)
        self._erase()

    def _write(self, data: bytes, frame: JournalFrame) -> None:
        file = self._open()
        try:
            self._size = frame.start
            os.ftruncate(file, frame.start)  # a torn tail, if there is one
            _write_at(file, frame.start, data)
            os.fsync(file)
            _write_at(file, frame.end - len(DURABLE_MARK), DURABLE_MARK)
            os.fsync(file)
            self._size = frame.end
        except BaseException:
            self._broken = True
            with suppress(OSError):
                os.ftruncate(file, frame.start)
                os.fsync(file)
                self._broken = False
            raise
        finally:
            os.close(file)

    def _erase(self) -> None:
        """Overwrite every seed but that of the pending attempt."""
        pending = self.pending
        stale = {index: slot for index, slot in self._slots.items() if self._records[index] is not pending}
        if not stale:
            return
        try:
            file = self._open()
            try:
                for slot in stale.values():
                    _write_at(file, slot, EMPTY_SLOT)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            kept = "every record is in it, but a seed that should be gone is still there"
            raise storage_error(error, f"cannot erase a seed in the journal {self.path}", kept) from None
        for index in stale:
            self._forget_seed(index)
            del self._slots[index]

    def _open(self) -> int:
        """A descriptor of the very file that was read: what somebody else wrote to it must not be cut."""
        file = os.open(self.path, CHANGE)
        facts = os.fstat(file)
        if (facts.st_ino, facts.st_size) != (self.place, self._size):
            os.close(file)
            problem = f"another program replaced or wrote the journal {self.path} during the run"
            remedy = "stop whatever else writes to this folder, then start the run again"
            raise StorageError("train.journal-changed", problem, remedy)
        return file

    def _take(self, frame: JournalFrame) -> None:
        if not frame.wiped:
            self._slots[len(self._records)] = frame.slot
        self._add(frame.record)
        self._end, self._chain = frame.end, frame.checksum


def _write_at(file: int, at: int, data: bytes) -> None:
    os.lseek(file, at, os.SEEK_SET)
    write_all(file, data)
