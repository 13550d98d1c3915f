"""Signed notes (C2SP signed-note): a text, and signatures over it that anybody can add to.

    text, ends with a newline
                                                       ← an empty line, the last one of the note
    — name base64(key id, 4 bytes ‖ signature)         ← one line for each signature

    key id = SHA-256(name ‖ 0x0A ‖ kind ‖ public key)[:4]
    verifier key = name+hex(key id)+base64(kind ‖ public key)

A key id is a hint, no digest: what counts is the key that the reader holds. Kind 0x01 is Ed25519 over the text; 0x04,
the cosignature of a witness, is in witness.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

from lamina.admit.key import PrivateKey, PublicKey
from lamina.errors import BadKey, EncodingError
from lamina.ledger.errors import LedgerError, NotVerified
from lamina.ledger.text import MAX_TEXT, check_name, check_text, decode64, encode64

MAX_SIGNATURES = 64

_DASH = "— "


@dataclass(frozen=True, slots=True)
class Signature:
    """One line under a note: whose it says it is, and what it holds."""

    name: str
    key_id: bytes
    value: bytes

    def __post_init__(self) -> None:
        check_name(self.name)
        if len(self.key_id) != 4 or not self.value:
            raise LedgerError(
                "ledger.signature-empty-no",
                f"the signature of {self.name!r} is empty or has no key id of 4 bytes",
                "sign again",
            )

    @property
    def line(self) -> str:
        """The line as it stands in the note."""
        return f"{_DASH}{self.name} {encode64(self.key_id + self.value)}\n"


@dataclass(frozen=True, slots=True)
class Note:
    """A text and the signatures that came with it. It says something only to whom `verify` vouches for it."""

    text: str
    signatures: tuple[Signature, ...]

    def __post_init__(self) -> None:
        check_text(self.text)
        if not self.text.endswith("\n"):
            raise LedgerError(
                "ledger.text-note-not", "the text of a note does not end with a newline", "add one"
            )
        if not 1 <= len(self.signatures) <= MAX_SIGNATURES:
            raise LedgerError(
                "ledger.note-signatures",
                f"a note has {len(self.signatures)} signatures, must have 1 to {MAX_SIGNATURES}",
                "leave some out",
            )

    def encode(self) -> str:
        """The note as it is written."""
        return self.text + "\n" + "".join(signature.line for signature in self.signatures)

    def adding(self, *signatures: Signature) -> Note:
        """The note with more signatures, each in place of an earlier one by the same key."""
        names = {(new.name, new.key_id) for new in signatures}
        kept = tuple(old for old in self.signatures if (old.name, old.key_id) not in names)
        return Note(self.text, kept + signatures)

    @classmethod
    def parse(cls, data: str | bytes) -> Note:
        """Read a note strictly; EncodingError for anything that is none."""
        whole = _decoded(data)
        body, gap, lines = whole.rpartition("\n\n")
        if not gap or not lines.endswith("\n"):
            raise _malformed("it has no signature lines after an empty line")
        found = lines[:-1].split("\n")
        if len(found) > MAX_SIGNATURES:
            raise _malformed(f"it has {len(found)} signatures, at most {MAX_SIGNATURES} are read")
        try:
            return cls(body + "\n", tuple(_parse_line(line) for line in found))
        except LedgerError as error:
            raise _malformed(error.problem) from None


class Verifier(Protocol):
    """A key that a reader trusts, under the name that it goes by."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def id(self) -> bytes:
        """Its key id, 4 bytes."""

    def holds(self, text: str, value: bytes) -> bool:
        """Whether `value` is this key's signature of the text."""


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A public key under a name, for one kind of signature."""

    KIND: ClassVar[int]

    name: str
    key: PublicKey
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        blob = self.name.encode("utf-8") + b"\n" + bytes((self.KIND,)) + self.key.x
        object.__setattr__(self, "id", hashlib.sha256(blob).digest()[:4])

    @property
    def text(self) -> str:
        """The verifier key in one line, as other implementations take it."""
        return f"{self.name}+{self.id.hex()}+{encode64(bytes((self.KIND,)) + self.key.x)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a verifier key of this kind."""
        name, _, rest = text.partition("+")
        digits, _, blob = rest.partition("+")
        raw = decode64(blob, "the verifier key")
        if len(raw) != 33 or raw[0] != cls.KIND:
            raise EncodingError(
                "ledger.verifier-key-not",
                f"the verifier key of {name!r} is not of kind 0x{cls.KIND:02x} with 32 bytes",
                "give an Ed25519 key made for this purpose",
            )
        try:
            found = cls(name, PublicKey(raw[1:]))
        except (LedgerError, BadKey) as error:
            raise EncodingError(
                "ledger.verifier-key-refused",
                f"the verifier key {text[:80]!r} is refused: {error.problem}",
                error.remedy,
            ) from None
        if found.text != text:
            raise EncodingError(
                "ledger.verifier-key-key",
                f"the verifier key of {name!r} has key id {digits[:16]!r}, its own is {found.id.hex()}",
                "copy it again from who published it",
            )
        return found


@dataclass(frozen=True, slots=True)
class NoteKey(NamedKey):
    """An Ed25519 key that signs the text as it is."""

    KIND: ClassVar[int] = 0x01

    def holds(self, text: str, value: bytes) -> bool:
        """Whether `value` is this key's signature of the text."""
        return self.key.verify(text.encode("utf-8"), value)


def sign(text: str, name: str, key: PrivateKey) -> Note:
    """A note with one signature."""
    check_text(text)
    signer = NoteKey(name, key.public)
    return Note(text, (Signature(name, signer.id, key.sign(text.encode("utf-8"))),))


def verify(note: Note, keys: Iterable[Verifier]) -> tuple[Signature, ...]:
    """The signatures by `keys`, one for each key that signed; NotVerified if there is none, or if one is wrong.

    Signatures by others are passed over, as the specification asks: they may be of witnesses, or of the next key.
    """
    known: dict[tuple[str, bytes], Verifier] = {}
    for key in keys:
        if known.setdefault((key.name, key.id), key) is not key:
            raise LedgerError(
                "ledger.two-keys-name",
                f"two keys have the name {key.name!r} and the id {key.id.hex()}",
                "rename one of them",
            )
    good: dict[tuple[str, bytes], Signature] = {}
    for signature in note.signatures:
        place = (signature.name, signature.key_id)
        if place not in known:
            continue
        if not known[place].holds(note.text, signature.value):
            raise NotVerified(
                "ledger.signature-key-not",
                f"the signature by {signature.name!r} (key {signature.key_id.hex()}) is not one of this text",
                "the text or the signature was changed: get the note again from its author",
            )
        good.setdefault(place, signature)
    if not good:
        names = ", ".join(sorted({name for name, _ in known})) or "nobody"
        raise NotVerified(
            "ledger.note-not-signed",
            f"the note is not signed by {names}",
            "give the keys of who should have signed it",
        )
    return tuple(good.values())


def _decoded(data: str | bytes) -> str:
    if len(data) > MAX_TEXT:
        raise _malformed(f"it has {len(data)} bytes, at most {MAX_TEXT} are read")
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        check_text(text)
    except UnicodeDecodeError:
        raise _malformed("it is not valid UTF-8") from None
    except LedgerError as error:
        raise _malformed(error.problem) from None
    return text


def _parse_line(line: str) -> Signature:
    name, _, blob = line.removeprefix(_DASH).partition(" ")
    if not line.startswith(_DASH):
        raise _malformed(f"the line {line[:40]!r} is no signature")
    raw = decode64(blob, f"the signature of {name[:40]!r}")
    return Signature(name, raw[:4], raw[4:])


def _malformed(problem: str) -> EncodingError:
    return EncodingError(
        "ledger.malformed-note", f"malformed note: {problem}", "get the note again from its author"
    )
