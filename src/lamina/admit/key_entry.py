"""`KeyEntry`: a key, whose it is, what for, and from when to when."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lamina.admit.key import ALGORITHMS, PublicKey
from lamina.admit.times import LAST
from lamina.errors import BadKey

ROLES = ("contributor", "ledger", "release")


class Standing(enum.Enum):
    """What a key is worth at an instant."""

    USABLE = "usable"
    NOT_YET = "not yet valid"
    RETIRED = "retired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A key of the ring. Times are instants from which something holds.

    revoked_from   at or after it nothing that the key signed counts, whenever it claims to have been signed: a
                   thief can write any date
    retired_from   what claims to have been signed at or after it does not count; earlier signatures stay good
    replaced_by    the id of the key that took over
    algorithms     COSE algorithms under which it may sign: both names of Ed25519, or one of them
    """

    key: PublicKey
    label: str
    role: str
    valid_from: int
    revoked_from: int | None = None
    replaced_by: bytes | None = None
    retired_from: int | None = None
    algorithms: tuple[int, ...] = ALGORITHMS

    def __post_init__(self) -> None:
        if not isinstance(self.key, PublicKey):
            raise BadKey(
                "key.key-publickey",
                f"the key is a {type(self.key).__name__}, must be a PublicKey",
                "give key.public",
            )
        if not isinstance(self.label, str) or not 0 < len(self.label) <= 128 or not self.label.isprintable():
            raise BadKey(
                "key.label-key-printable",
                f"the label {self.label!r} of key {self.key.name[:16]} must be 1 to 128 printable characters",
                "name whose key it is",
            )
        if self.role not in ROLES:
            raise BadKey(
                "key.key-role",
                f"key {self.label!r} has role {self.role!r}",
                f"roles are {', '.join(ROLES)}: one key for each",
            )
        for name in ("valid_from", "revoked_from", "retired_from"):
            value = getattr(self, name)
            if value is None and name != "valid_from":
                continue
            if type(value) is not int or not 0 <= value <= LAST:
                raise BadKey(
                    "key.key-seconds-since",
                    f"{name} of key {self.label!r} is {value!r}, must be seconds since 1970",
                    "give an instant",
                )
        if self.replaced_by is not None and (
            type(self.replaced_by) is not bytes or len(self.replaced_by) != 32
        ):
            raise BadKey(
                "key.replaced-key-no",
                f"replaced_by of key {self.label!r} is no key id",
                "give the 32 bytes of one",
            )
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise BadKey(
                "key.key-algorithms",
                f"key {self.label!r} is for algorithms {list(self.algorithms)}",
                f"known are {list(ALGORITHMS)}",
            )

    @property
    def id(self) -> bytes:
        """The thumbprint of the key."""
        return self.key.id

    def standing(self, at: int, issued_at: int | None = None) -> Standing:
        """What the key is worth at `at` for something that claims to be signed at `issued_at` (default: at `at`)."""
        issued = at if issued_at is None else issued_at
        if self.revoked_from is not None and at >= self.revoked_from:
            return Standing.REVOKED
        if at < self.valid_from or issued < self.valid_from:
            return Standing.NOT_YET
        if self.retired_from is not None and issued >= self.retired_from:
            return Standing.RETIRED
        return Standing.USABLE

    def accepts(self, alg: int) -> bool:
        """Whether the key is registered for this COSE algorithm."""
        return alg in self.algorithms
