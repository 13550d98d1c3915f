"""How a record lies on disk: a frame that is acknowledged by a mark once it is durable.

    frame    = "LMJ1" | kind (1) | length of body (4) | checksum (32) | body | padding | slot (40, Open) | mark (16)
    checksum = SHA-256("lamina/journal/1" | checksum of the frame before | kind | length | body)
    slot     = seed (32) | SHA-256("lamina/journal/seed/1" | checksum | seed)[:8];  40 zeros once it was erased

The checksum chains the frames, so none can be lost, doubled or moved unseen; it leaves the slot out, so that
erasing a seed leaves the frame valid. A frame is first written with a mark of zeros and made durable; then the
mark is written over the zeros and made durable; then, and only then, its writer is told that it succeeded. So

    a frame without its mark was never acknowledged: nobody acted on it, and it may be ignored,
    a frame with its mark was complete on the disk: whatever is wrong with it now is damage.

A crash may leave a frame in any state: cut anywhere, its length there and its data zeros, some of its sectors
written and others not. None of these has the mark, which is not written before all of the frame is durable. The
padding (zeros) aligns the mark to its own size, so that it never lies across two sectors and is there or not.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

from lamina.errors import LaminaError
from lamina.train.store.records import KINDS, SEED_BYTES, Open, Record, from_body, to_body

_FAMILY, _VERSION = b"LMJ", b"1"
_HEAD = struct.Struct(">3ssBI32s")
_SLOT_BYTES = SEED_BYTES + 8
# Not UTF-8, so no text in a body holds it; the rest of a body is digests, which hit it with probability 2^-128.
MARK = bytes.fromhex("ffac6bd795e9fdb4cbf7a3dbb6edd9ff")
_OPEN = next(number for number, kind in KINDS.items() if kind is Open)
EMPTY_SLOT = bytes(_SLOT_BYTES)
GENESIS = bytes(32)  # what the first frame chains to


class Unreadable(Exception):
    """No acknowledged frame lies here. `torn`: none ever did; otherwise one did, and it is damaged."""

    def __init__(self, offset: int, reason: str, *, torn: bool) -> None:
        self.offset = offset
        self.reason = reason
        self.torn = torn
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A frame and where it lies. `slot` is where the seed slot of an Open begins; `wiped` if there is no seed in it."""

    record: Record
    start: int
    end: int
    checksum: bytes
    slot: int = -1
    wiped: bool = True

    @property
    def garbled(self) -> bool:
        """Whether the slot holds neither a seed nor zeros."""
        return isinstance(self.record, Open) and not self.record.seed and not self.wiped


def write(record: Record, start: int, previous: bytes) -> tuple[bytes, Frame]:
    """The bytes of a frame that will begin at `start`, its mark still zeros, and the frame as if read back."""
    kind, body = to_body(record)
    padding, slot, end = _places(start, kind, len(body))
    checksum = _checksum(previous, kind, body)
    data = _HEAD.pack(_FAMILY, _VERSION, kind, len(body), checksum) + body + bytes(padding)
    if isinstance(record, Open):
        data += record.seed + _seed_check(checksum, record.seed)
    frame = Frame(record=record, start=start, end=end, checksum=checksum, slot=slot, wiped=slot < 0)
    return data + bytes(len(MARK)), frame


def read(data: bytes, start: int, previous: bytes) -> Frame:
    """The acknowledged frame that begins at `start`, or Unreadable."""
    acknowledged = data.find(MARK, start) >= 0  # this frame or a later one: then nothing here is merely torn
    if len(data) - start < _HEAD.size:
        raise Unreadable(
            start, f"{len(data) - start} bytes are left, too few for a record", torn=not acknowledged
        )
    family, version, kind, length, checksum = _HEAD.unpack_from(data, start)
    if family == _FAMILY and version > _VERSION and acknowledged:
        raise Unreadable(
            start, f"the record has format {version!r}, this version reads {_VERSION!r}", torn=False
        )
    padding, slot, end = _places(start, kind, length)
    if end > len(data):
        raise Unreadable(start, "a record that goes on past the end of the file", torn=not acknowledged)
    body_at, filler_at = start + _HEAD.size, start + _HEAD.size + length
    body, filler = data[body_at:filler_at], data[filler_at : filler_at + padding]
    if (family, version) != (_FAMILY, _VERSION) or checksum != _checksum(previous, kind, body) or any(filler):
        raise Unreadable(start, "a record whose checksum does not match", torn=not acknowledged)
    mark = data[end - len(MARK) : end]
    if mark != MARK:
        raise Unreadable(
            end - len(MARK), "a record whose mark is wrong", torn=not acknowledged and not any(mark)
        )
    try:
        record = from_body(kind, body)
    except LaminaError as error:
        raise Unreadable(
            start, f"a record of another kind than this version writes: {error.problem}", torn=False
        ) from error
    frame = Frame(record=record, start=start, end=end, checksum=checksum)
    return frame if slot < 0 else _with_slot(frame, slot, data[slot : slot + _SLOT_BYTES])


def _with_slot(frame: Frame, at: int, slot: bytes) -> Frame:
    assert isinstance(frame.record, Open)
    seed = slot[:SEED_BYTES]
    if slot[SEED_BYTES:] != _seed_check(frame.checksum, seed):
        seed = b""
    return replace(frame, record=replace(frame.record, seed=seed), slot=at, wiped=slot == EMPTY_SLOT)


def _places(start: int, kind: int, length: int) -> tuple[int, int, int]:
    """Size of the padding, start of the slot (-1 without one), end of the frame."""
    slot_bytes = _SLOT_BYTES if kind == _OPEN else 0
    padding = -(start + _HEAD.size + length + slot_bytes) % len(MARK)
    slot = start + _HEAD.size + length + padding
    return padding, slot if slot_bytes else -1, slot + slot_bytes + len(MARK)


def _checksum(previous: bytes, kind: int, body: bytes) -> bytes:
    return hashlib.sha256(
        b"lamina/journal/1" + previous + struct.pack(">BI", kind, len(body)) + body
    ).digest()


def _seed_check(checksum: bytes, seed: bytes) -> bytes:
    return hashlib.sha256(b"lamina/journal/seed/1" + checksum + seed).digest()[: _SLOT_BYTES - SEED_BYTES]
