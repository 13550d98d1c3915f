"""What was admitted before: the protocol between the gate and a register, such as a ledger."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lamina.admit import reasons
from lamina.admit.reasons import ContributionRefused, Reason
from lamina.admit.rows import Admitted
from lamina.sign.key_ring import KeyRing

RefusedRows = dict[int, tuple[Reason, str]]  # row → why it may not enter
ADMITTED_MEANWHILE = "admitted by another process meanwhile"


class RegisterStatus(enum.Enum):
    """What a register says of an entry."""

    NEW = "new"
    SAME = "same"  # admitted before by this very attestation: it stays, and takes no new place
    REPLAYED = "replayed"  # its descriptor or token was admitted before, by another attestation
    REPRESENTED = "represented"  # its subject is there, under another descriptor
    WITHDRAWN = "withdrawn"
    REVOKED = "revoked"  # its key is revoked in the register, whatever a ring says


REASON_OF_STATUS = {
    RegisterStatus.REVOKED: reasons.REVOKED_KEY,
    RegisterStatus.REPLAYED: reasons.REPLAYED,
    RegisterStatus.REPRESENTED: reasons.DUPLICATE_SUBJECT,
    RegisterStatus.WITHDRAWN: reasons.WITHDRAWN,
}


@dataclass(frozen=True, slots=True)
class EntryContext:
    """What a register may need about those who enter: their bytes, the keys that signed, the population of each class."""

    read: Callable[[int], tuple[bytes, bytes]]  # by row; ContributionRefused if its source does not have it any more
    keys: KeyRing
    places: Mapping[str, int | None]

    def evidence(self, entry: Admitted) -> tuple[bytes, bytes]:
        """Read descriptor and attestation again; ContributionRefused if they have changed since they were examined."""
        found = self.read(entry.row)
        given = tuple(hashlib.sha256(data).digest() for data in found)
        if given != (entry.descriptor, entry.attestation):
            raise ContributionRefused(reasons.CHANGED, "it changed after it was examined")
        return found


class Register(Protocol):
    """Knows what was admitted before, and notes who is admitted now."""

    def look(self, entries: Sequence[Admitted]) -> Sequence[RegisterStatus]:
        """What is known of each."""
        ...

    def members(self, cls: str) -> int:
        """How many contributions of a class stand: admitted, neither withdrawn nor expired."""
        ...

    def enter(self, entries: Iterable[Admitted], beside: EntryContext) -> RefusedRows:
        """Note those who are new; returns who may not enter after all, because others entered since `look`.

        A class never exceeds its population, however many enter at the same time. Repeating a call changes nothing.
        """
        ...


def class_full(cls: str, places: int | None) -> tuple[Reason, str]:
    """Return the refusal beyond the population of a class."""
    return reasons.CLASS_FULL, f"class {cls!r} has a population of {places}"
