"""`KeyEvent`: a key begins to count, takes over from another, or stops counting."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lamina.admit.key import PublicKey
from lamina.errors import BadKey
from lamina.ledger.errors import LedgerError
from lamina.ledger.records.fields import KEY_ID, ORIGIN, TIME, Octets, OneOf, Part, check, define


class Role(enum.Enum):
    """What a key may sign. One key has one role."""

    LEDGER = 1  # checkpoints
    CONTRIBUTOR = 2  # attestations
    AUDITOR = 3  # aggregates, and looser policies
    WITNESS = 4  # cosignatures of checkpoints
    RELEASE = 5  # manifests and certificates


class Change(enum.Enum):
    """What happens to a key."""

    ADD = 1
    ROTATE = 2
    REVOKE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the ledger: the 32 bytes of an Ed25519 point, under a name, in one role, for a time.

    Of a signed note the name is part of the key's identity; for a contributor it may be any short pseudonym.
    """

    name: str
    x: bytes
    role: Role
    valid_from: int = 0
    valid_until: int | None = None

    def __post_init__(self) -> None:
        check(self)
        try:
            PublicKey(self.x)
        except BadKey as error:
            raise LedgerError(
                "ledger.key", f"x of Key {self.name!r}: {error.problem}", error.remedy
            ) from None
        if self.valid_until is not None and self.valid_until <= self.valid_from:
            raise LedgerError(
                "ledger.key-valid-until",
                f"Key {self.name!r} is valid from {self.valid_from} until {self.valid_until}",
                "swap them",
            )

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.x)

    @property
    def id(self) -> bytes:
        """Its COSE thumbprint."""
        return self.public.id

    def valid(self, time: int) -> bool:
        """Whether it counts at that time, as far as it says itself."""
        return self.valid_from <= time and (self.valid_until is None or time < self.valid_until)


define(
    Key,
    {
        1: ("name", ORIGIN),
        2: ("x", Octets(32)),
        3: ("role", OneOf(Role)),
        4: ("valid_from", TIME),
        5: ("valid_until", TIME),
    },
    optional=[5],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEvent:
    """What happens to a key, from `effective` on.

    ADD     `key` begins to count
    ROTATE  `key` takes over from the key with id `target`; what that one signed before stays good
    REVOKE  nothing that `target` signs counts any more, whatever date it carries

    A rotation of the ledger's own key counts once a checkpoint that the old key signed covers this leaf.
    """

    change: Change
    key: Key | None = None
    target: bytes | None = None
    effective: int

    def __post_init__(self) -> None:
        check(self)
        if (self.key is None) != (self.change is Change.REVOKE):
            raise LedgerError(
                "ledger.keyevent-key-not",
                f"KeyEvent {self.change.name} and its key do not fit",
                "a new key for ADD and ROTATE only",
            )
        if (self.target is None) != (self.change is Change.ADD):
            raise LedgerError(
                "ledger.keyevent-target-not",
                f"KeyEvent {self.change.name} and its target do not fit",
                "an old key unless it is ADD",
            )


define(
    KeyEvent,
    {
        1: ("change", OneOf(Change)),
        2: ("key", Part(Key)),
        3: ("target", KEY_ID),
        4: ("effective", TIME),
    },
    optional=[2, 3],
)
