"""`Register`: what was admitted before, by this gate or by another. A ledger is one; here is one in memory."""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamina.admit.keyring import KeyRing
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refused

Lost = dict[int, tuple[Reason, str]]  # row → why it may not enter


class Entry(NamedTuple):
    """What must not be admitted twice: (kid, cti), descriptor, subject. And the class, which has so many places."""

    row: int  # of the admission that asks
    kid: bytes
    cti: bytes
    descriptor: bytes
    attestation: bytes
    tag: bytes | None
    cls: str
    issued: int
    expires: int


class Known(enum.Enum):
    """What a register says of an entry."""

    NEW = "new"
    SAME = "same"  # it was admitted before by this very attestation: it stands, and takes no new place
    REPLAYED = "replayed"  # its descriptor or token was admitted before, by another attestation
    REPRESENTED = "represented"  # its subject is there, under another descriptor
    WITHDRAWN = "withdrawn"


REFUSED = {
    Known.REPLAYED: Reason.REPLAYED,
    Known.REPRESENTED: Reason.DUPLICATE_SUBJECT,
    Known.WITHDRAWN: Reason.WITHDRAWN,
}


class Evidence(NamedTuple):
    """The bytes of what was examined."""

    descriptor: bytes
    attestation: bytes


@dataclass(frozen=True, slots=True)
class Beside:
    """What a register may want of those who enter: their bytes, the keys that signed, the places of each class."""

    read: Callable[[int], Evidence]  # by row; Refused if its source does not have it any more
    keys: KeyRing
    places: Mapping[str, int | None]

    def evidence(self, entry: Entry) -> Evidence:
        """What was examined, read again; Refused if it is something else by now."""
        found = self.read(entry.row)
        given = tuple(hashlib.sha256(data).digest() for data in found)
        if given != (entry.descriptor, entry.attestation):
            raise Refused(Reason.CHANGED, "it is another one than was examined a moment ago")
        return found


class Register(Protocol):
    """Asked about everybody who passed, and told of everybody who is admitted."""

    def look(self, entries: Sequence[Entry]) -> Sequence[Known]:
        """What is known of each."""
        ...

    def members(self, cls: str) -> int:
        """How many contributions of a class stand: admitted, neither withdrawn nor expired."""
        ...

    def enter(self, entries: Iterable[Entry], beside: Beside) -> Lost:
        """Note those who are new; who may not enter after all, since much may have happened since `look`.

        Never more of a class than it has places, however many enter at the same time. The same again changes nothing.
        """
        ...


class MemoryRegister:
    """A register that lives as long as its process, 500 bytes an entry. It knows of no withdrawals."""

    def __init__(self) -> None:
        self._tokens: set[bytes] = set()
        self._descriptors: dict[bytes, bytes] = {}  # → attestation
        self._tags: set[bytes] = set()
        self._members: Counter[str] = Counter()

    def look(self, entries: Sequence[Entry]) -> Sequence[Known]:
        return [self._known(entry) for entry in entries]

    def members(self, cls: str) -> int:
        return self._members[cls]

    def enter(self, entries: Iterable[Entry], beside: Beside) -> Lost:
        lost: Lost = {}
        for entry in entries:
            known = self._known(entry)
            if known in REFUSED:
                lost[entry.row] = REFUSED[known], MEANWHILE
            elif known is Known.NEW and self._members[entry.cls] >= (beside.places[entry.cls] or FREE):
                lost[entry.row] = full(entry.cls, beside.places[entry.cls])
            elif known is Known.NEW:
                self._add(entry)
        return lost

    def _known(self, entry: Entry) -> Known:
        if (by := self._descriptors.get(entry.descriptor)) is not None:
            return Known.SAME if by == entry.attestation else Known.REPLAYED
        if entry.kid + entry.cti in self._tokens:
            return Known.REPLAYED
        return Known.REPRESENTED if entry.tag is not None and entry.tag in self._tags else Known.NEW

    def _add(self, entry: Entry) -> None:
        self._tokens.add(entry.kid + entry.cti)
        self._descriptors[entry.descriptor] = entry.attestation
        if entry.tag is not None:
            self._tags.add(entry.tag)
        self._members[entry.cls] += 1


FREE = 1 << 62  # places of a class that declares no population
MEANWHILE = "admitted elsewhere meanwhile"


def full(cls: str, places: int | None) -> tuple[Reason, str]:
    """The refusal of who finds no place."""
    return Reason.CLASS_FULL, f"class {cls!r} has {places} places"
