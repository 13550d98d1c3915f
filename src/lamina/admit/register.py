"""`Register`: what was admitted before, by this gate or by another. A ledger is one; here is one in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """What must not be admitted twice: (kid, cti), descriptor, subject. And the class, which has so many places."""

    kid: bytes
    cti: bytes
    descriptor: bytes
    tag: bytes | None
    cls: str


class Register(Protocol):
    """Asked about everybody who passed, and told of everybody who is admitted."""

    def replayed(self, entries: Sequence[Entry]) -> Sequence[bool]:
        """Whose (kid, cti) or descriptor is there already."""
        ...

    def represented(self, entries: Sequence[Entry]) -> Sequence[bool]:
        """Whose subject is there already."""
        ...

    def members(self, cls: str) -> int:
        """How many contributions of a class were admitted before."""
        ...

    def enter(self, entries: Sequence[Entry]) -> Sequence[bool]:
        """Note them, each at once or not at all; False for who was admitted by somebody else meanwhile."""
        ...


class MemoryRegister:
    """A register that lives as long as its process, 400 bytes an entry."""

    def __init__(self) -> None:
        self._tokens: set[bytes] = set()
        self._descriptors: set[bytes] = set()
        self._tags: set[bytes] = set()
        self._members: Counter[str] = Counter()

    def replayed(self, entries: Sequence[Entry]) -> Sequence[bool]:
        return [e.kid + e.cti in self._tokens or e.descriptor in self._descriptors for e in entries]

    def represented(self, entries: Sequence[Entry]) -> Sequence[bool]:
        return [e.tag is not None and e.tag in self._tags for e in entries]

    def members(self, cls: str) -> int:
        return self._members[cls]

    def enter(self, entries: Sequence[Entry]) -> Sequence[bool]:
        return [self._enter(entry) for entry in entries]

    def _enter(self, entry: Entry) -> bool:
        if self.replayed([entry])[0] or self.represented([entry])[0]:
            return False
        self._tokens.add(entry.kid + entry.cti)
        self._descriptors.add(entry.descriptor)
        if entry.tag is not None:
            self._tags.add(entry.tag)
        self._members[entry.cls] += 1
        return True
