"""Signed notes and cosignatures of witnesses (C2SP signed-note, tlog-cosignature)."""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Self

from lamina import validate
from lamina.errors import BadKey, EncodingError, LedgerError, NotVerified
from lamina.sign.keys import CLOCK_SKEW, PrivateKey, PublicKey

MAX_NOTE_BYTES = 256 * 1024  # bytes; room for a note with 16 signatures of 5 kB and more, as C2SP asks
MAX_KEY_NAME = 256


def decode64(text: str, what: str) -> bytes:
    """Bytes in standard base64 with padding, in the one way to write them."""
    try:
        raw = base64.b64decode(text)
    except ValueError:
        raw = b""
    if encode64(raw) != text:  # whatever else a decoder lets pass
        raise EncodingError("ledger.base64-invalid", f"{what} is not standard base64 (RFC 4648 §4)", "copy it again")
    return raw


def parse_decimal(text: str, what: str, largest: int) -> int:
    """A number of digits without leading zeroes."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20) or (text[0] == "0" and text != "0"):
        problem = f"{what} {text[:24]!r} is not a decimal number without leading zeros"
        raise EncodingError("ledger.number-invalid", problem, "copy it again")
    if int(text) > largest:
        raise EncodingError("ledger.number-invalid", f"{what} is {text}, must be at most {largest}", "copy it again")
    return int(text)


def encode64(raw: bytes) -> str:
    """Bytes in standard base64."""
    return base64.b64encode(raw).decode("ascii")


def check_note_text(text: str) -> None:
    """Refuse what no signed note may hold: control characters but newlines, lone surrogates, too much."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        problem = "the text holds a lone surrogate, which UTF-8 cannot carry"
        raise LedgerError("ledger.note-text-invalid", problem) from None
    if size > MAX_NOTE_BYTES:
        problem = f"the text has {size} bytes, must have at most {MAX_NOTE_BYTES}"
        raise LedgerError("ledger.note-text-invalid", problem, "sign its hash")
    if control := next((char for char in text if char < " " and char != "\n"), None):
        raise LedgerError("ledger.note-text-invalid", f"the text holds the control character {control!r}")


def check_key_name(name: str) -> None:
    """Refuse what cannot name a key: nothing, blanks of any kind, or a plus sign."""
    check_note_text(name)
    if not 1 <= len(name.encode("utf-8")) <= MAX_KEY_NAME or "+" in name or any(map(str.isspace, name)):
        problem = f"the key name {name[:40]!r} must have 1 to {MAX_KEY_NAME} bytes, no space and no +"
        raise LedgerError("ledger.key-name-invalid", problem, "name it like example.org/ledger")


# Signed notes (C2SP signed-note): a text, and signatures over it that anybody can add to.
#
#     text, ends with a newline
#                                                        ← an empty line, the last one of the note
#     — name base64(key id, 4 bytes ‖ signature)         ← one line for each signature
#
#     key id = SHA-256(name ‖ 0x0A ‖ kind ‖ public key)[:4]
#     verifier key = name+hex(key id)+base64(kind ‖ public key)
#
# A key id is a hint, no digest: what counts is the key that the reader holds. Kind 0x01 is Ed25519 over the text; 0x04,
# the cosignature of a witness, is below.

MAX_SIGNATURES = 64

_SIGNATURE_PREFIX = "— "


@dataclass(frozen=True, slots=True)
class NoteSignature:
    """A signature line of a note: name, key id and signature, not yet verified."""

    name: str
    key_id: bytes
    value: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if len(self.key_id) != 4 or not self.value:
            problem = f"the signature of {self.name!r} is empty or has no key id of 4 bytes"
            raise LedgerError("ledger.signature-malformed", problem, "sign again")

    @property
    def line(self) -> str:
        """Return the line as the note contains it."""
        return f"{_SIGNATURE_PREFIX}{self.name} {encode64(self.key_id + self.value)}\n"


@dataclass(frozen=True, slots=True)
class Note:
    """A text and its signature lines. The text is trusted only after `verify`."""

    text: str
    signatures: tuple[NoteSignature, ...]

    def __post_init__(self) -> None:
        check_note_text(self.text)
        if not self.text.endswith("\n"):
            raise LedgerError("ledger.note-text-invalid", "the text of a note must end with a newline")
        if not 1 <= len(self.signatures) <= MAX_SIGNATURES:
            problem = f"the note has {len(self.signatures)} signatures, must have 1 to {MAX_SIGNATURES}"
            raise LedgerError("ledger.signature-count", problem)

    def encode(self) -> str:
        """Return the note as text."""
        return self.text + "\n" + "".join(signature.line for signature in self.signatures)

    def with_signatures(self, *signatures: NoteSignature) -> Note:
        """Return the note with more signatures; each replaces an earlier signature by the same key."""
        names = {(new.name, new.key_id) for new in signatures}
        kept = tuple(old for old in self.signatures if (old.name, old.key_id) not in names)
        return Note(self.text, kept + signatures)

    @classmethod
    def parse(cls, data: str | bytes) -> Note:
        """Parse a note strictly. Raise EncodingError for every other text."""
        whole = _decode_note(data)
        body, gap, lines = whole.rpartition("\n\n")
        if not gap or not lines.endswith("\n"):
            raise _malformed_note("it has no signature lines after an empty line")
        found = lines[:-1].split("\n")
        if len(found) > MAX_SIGNATURES:
            raise _malformed_note(f"it has {len(found)} signatures, at most {MAX_SIGNATURES} are read")
        try:
            return cls(body + "\n", tuple(_parse_signature_line(line) for line in found))
        except LedgerError as error:
            raise _malformed_note(error.problem) from None


@dataclass(frozen=True, slots=True)
class NamedKey(ABC):
    """A public key under a name, for one kind of signature."""

    KIND: ClassVar[int]

    name: str
    key: PublicKey
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        check_key_name(self.name)
        blob = self.name.encode("utf-8") + b"\n" + bytes((self.KIND,)) + self.key.x
        object.__setattr__(self, "id", hashlib.sha256(blob).digest()[:4])

    @abstractmethod
    def holds(self, text: str, value: bytes) -> bool:
        """Return whether `value` is a signature of the text by this key."""

    @property
    def text(self) -> str:
        """Return the verifier key in one line, as other implementations read it."""
        return f"{self.name}+{self.id.hex()}+{encode64(bytes((self.KIND,)) + self.key.x)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a verifier key of this kind."""
        name, _, rest = text.partition("+")
        digits, _, blob = rest.partition("+")
        raw = decode64(blob, "the verifier key")
        if len(raw) != 33 or raw[0] != cls.KIND:
            problem = f"the verifier key of {name!r} is not of kind 0x{cls.KIND:02x} with 32 bytes"
            raise EncodingError("ledger.verifier-key-invalid", problem, "give an Ed25519 key made for this purpose")
        try:
            found = cls(name, PublicKey(raw[1:]))
        except (LedgerError, BadKey) as error:
            problem = f"the verifier key {text[:80]!r} is invalid: {error.problem}"
            raise EncodingError("ledger.verifier-key-invalid", problem, error.remedy) from None
        if found.text != text:
            problem = f"the verifier key of {name!r} has key id {digits[:16]!r}, must be {found.id.hex()}"
            raise EncodingError("ledger.verifier-key-invalid", problem, "copy it again")
        return found


@dataclass(frozen=True, slots=True)
class NoteKey(NamedKey):
    """An Ed25519 key that signs the text as it is."""

    KIND: ClassVar[int] = 0x01

    def holds(self, text: str, value: bytes) -> bool:
        return self.key.verify(text.encode("utf-8"), value)


def sign_note(text: str, name: str, key: PrivateKey) -> Note:
    """A note with one signature."""
    check_note_text(text)
    signer = NoteKey(name, key.public)
    return Note(text, (NoteSignature(name, signer.id, key.sign(text.encode("utf-8"))),))


def verify_note(note: Note, keys: Iterable[NamedKey]) -> tuple[NoteSignature, ...]:
    """Return the signatures by `keys`, one per key. Raise NotVerified if there is none or if one is wrong.

    Signatures by others are passed over, as the specification asks: they may be of witnesses, or of the next key.
    """
    known: dict[tuple[str, bytes], NamedKey] = {}
    for key in keys:
        if known.setdefault((key.name, key.id), key) is not key:
            problem = f"two keys have the name {key.name!r} and the id {key.id.hex()}"
            raise LedgerError("ledger.verifier-keys-collide", problem, "rename one of them")
    good: dict[tuple[str, bytes], NoteSignature] = {}
    for signature in note.signatures:
        place = (signature.name, signature.key_id)
        if place not in known:
            continue
        if not known[place].holds(note.text, signature.value):
            problem = f"the signature by {signature.name!r} (key {signature.key_id.hex()}) is not over this text"
            remedy = "text or signature was changed: get the note again from its author"
            raise NotVerified("ledger.signature-invalid", problem, remedy)
        good.setdefault(place, signature)
    if not good:
        names = ", ".join(sorted({name for name, _ in known})) or "nobody"
        problem = f"the note is not signed by {names}"
        raise NotVerified("ledger.not-signed", problem, "give the keys of those who should have signed it")
    return tuple(good.values())


def _decode_note(data: str | bytes) -> str:
    if len(data) > MAX_NOTE_BYTES:
        raise _malformed_note(f"it has {len(data)} bytes, at most {MAX_NOTE_BYTES} are read")
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        check_note_text(text)
    except UnicodeDecodeError:
        raise _malformed_note("it is not valid UTF-8") from None
    except LedgerError as error:
        raise _malformed_note(error.problem) from None
    return text


def _parse_signature_line(line: str) -> NoteSignature:
    name, _, blob = line.removeprefix(_SIGNATURE_PREFIX).partition(" ")
    if not line.startswith(_SIGNATURE_PREFIX):
        raise _malformed_note(f"the line {line[:40]!r} is no signature")
    raw = decode64(blob, f"the signature of {name[:40]!r}")
    return NoteSignature(name, raw[:4], raw[4:])


def _malformed_note(problem: str) -> EncodingError:
    return EncodingError("ledger.note-malformed", f"malformed note: {problem}", "get the note again from its author")


# Witnesses: others who saw the same tree, and say so under its checkpoint (C2SP tlog-cosignature, v1, Ed25519).
#
#     signature value = time, 8 bytes ‖ Ed25519 signature, 64 bytes, over
#
#         cosignature/v1
#         time 1679315147
#         <the text of the checkpoint>
#
# Whoever cosigns says: as of this time, the largest tree that I saw of this origin has this root, and it is consistent
# with every earlier one. A ledger that shows two faces needs two sets of witnesses.

MAX_COSIGNATURE_TIME = 2**63 - 1

_TIME_BYTES = 8


@dataclass(frozen=True, slots=True)
class WitnessKey(NamedKey):
    """An Ed25519 key that only cosigns checkpoints."""

    KIND: ClassVar[int] = 0x04

    def holds(self, text: str, value: bytes) -> bool:
        time = int.from_bytes(value[:_TIME_BYTES], "big")
        return (
            len(value) == _TIME_BYTES + 64
            and time <= MAX_COSIGNATURE_TIME
            and self.key.verify(_cosigned_message(text, time), value[_TIME_BYTES:])
        )


def make_cosignature(text: str, name: str, key: PrivateKey, time: int) -> NoteSignature:
    """Return the cosignature of a checkpoint's text at `time` (seconds since 1970). The caller has checked the tree."""
    validate.whole(LedgerError, "ledger.cosignature-time", least=0, most=MAX_COSIGNATURE_TIME, time=time)
    value = time.to_bytes(_TIME_BYTES, "big") + key.sign(_cosigned_message(text, time))
    return NoteSignature(name, WitnessKey(name, key.public).id, value)


def cosignature_time(signature: NoteSignature) -> int:
    """Return the time of a cosignature."""
    return int.from_bytes(signature.value[:_TIME_BYTES], "big")


@dataclass(frozen=True, slots=True)
class WitnessQuorum:
    """At least `quorum` of these witnesses must have cosigned. A quorum of 0 asks for none.

    One public key is one witness, whatever names it goes by.
    """

    quorum: int = 0
    witnesses: tuple[WitnessKey, ...] = ()

    def __post_init__(self) -> None:
        validate.whole(LedgerError, "ledger.quorum-invalid", least=0, most=len(self.witnesses), quorum=self.quorum)
        if len({witness.key.x for witness in self.witnesses}) < len(self.witnesses):
            problem = "two witnesses have the same public key"
            raise LedgerError("ledger.witness-twice", problem, "name each witness once")

    def cosigned(self, note: Note, *, now: int | None = None, since: int = 0) -> dict[str, int]:
        """Return the witnesses that cosigned the note, each with its latest time.

        NotVerified if a cosignature of one of them is wrong, or later than `now` or earlier than `since`, the time of
        the last leaf, by more than clocks differ.
        """
        known = {(witness.name, witness.id): witness for witness in self.witnesses}
        times: dict[str, int] = {}
        for signature in note.signatures:
            witness = known.get((signature.name, signature.key_id))
            if witness is None:
                continue
            if not witness.holds(note.text, signature.value):
                problem = f"the cosignature by {signature.name!r} is not over this checkpoint"
                raise NotVerified("ledger.cosignature-invalid", problem, "get the checkpoint again, or ask the witness")
            time = cosignature_time(signature)
            if now is not None and time > now + CLOCK_SKEW:
                problem = f"the cosignature by {signature.name!r} is {time - now} s in the future"
                raise NotVerified("ledger.cosignature-from-future", problem, "set the clocks")
            times[witness.name] = max(time, times.get(witness.name, 0))
        if early := [name for name, time in times.items() if time + CLOCK_SKEW < since]:
            problem = f"witness {early[0]!r} cosigned the checkpoint before its last leaf"
            remedy = "ask the witness to look at it, and to cosign again"
            raise NotVerified("ledger.cosignature-too-old", problem, remedy)
        return times

    def check(self, note: Note, *, now: int | None = None) -> dict[str, int]:
        """Return `cosigned`. Raise NotVerified if fewer witnesses than the quorum cosigned."""
        times = self.cosigned(note, now=now)
        if len(times) < self.quorum:
            problem = f"{len(times)} of {len(self.witnesses)} witnesses cosigned the checkpoint, {self.quorum} must"
            remedy = "ask the witnesses, or get a copy with their cosignatures"
            raise NotVerified("ledger.quorum-not-reached", problem, remedy)
        return times


def _cosigned_message(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()
