"""What an auditor brings along: keys that are trusted, and checkpoints that were seen before."""

from __future__ import annotations

import os
import time as system
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lamina.admit.files import read_small
from lamina.admit.key import PublicKey
from lamina.admit.keyring import KeyRing, Standing
from lamina.errors import EncodingError, LaminaError
from lamina.ledger import checkpoint as notes
from lamina.ledger.checkpoint import Checkpoint
from lamina.ledger.errors import LedgerError
from lamina.ledger.note import Note, NoteKey

_MOST = 1 << 20
_ROLE = "ledger"


@dataclass(frozen=True, slots=True)
class Trust:
    """Keys that count whatever a ledger says: a ring, verifier keys of signed notes, or one public key.

    They come from somewhere else than the ledger: from whoever answers for it, by another way. A ring also knows
    contributors, for ledgers that do not name their keys.
    """

    ring: KeyRing | None = None
    notes: tuple[NoteKey, ...] = ()
    plain: tuple[PublicKey, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trust:
        """Read a key ring (JSON), a public key (PEM), or a text of verifier keys, `name+id+key`, one a line."""
        path = Path(path)
        data = read_small(path, "the trusted keys", most=_MOST * 64)
        if data.lstrip().startswith(b"{"):
            return cls(ring=KeyRing.load(path))
        if data.lstrip().startswith(b"-----BEGIN"):
            return cls(plain=(PublicKey.load(path),))
        try:
            text = data.decode("utf-8")
            lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
            keys = tuple(NoteKey.parse(line) for line in lines)
        except (UnicodeDecodeError, EncodingError) as error:
            told = error.problem if isinstance(error, LaminaError) else "it is no text"
            raise LedgerError(
                "ledger.holds-no-keys-trust",
                f"'{path}' holds no keys to trust: {told}",
                "give a key ring, or verifier keys of the ledger, one a line",
            ) from None
        if not keys:
            raise LedgerError(
                "ledger.holds-no-keys",
                f"'{path}' holds no keys",
                "give a key ring, or verifier keys, one a line",
            )
        return cls(notes=keys)

    def keys(self, origin: str, now: int | None = None) -> list[PublicKey]:
        """Those of the ledger with that origin."""
        at = int(system.time()) if now is None else now
        mine = [*self.plain, *(each.key for each in self.notes if each.name == origin)]
        if self.ring is not None:
            mine += [
                e.key
                for e in self.ring
                if e.role == _ROLE and e.standing(at, e.valid_from) is Standing.USABLE
            ]
        return mine


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint of the same ledger that was seen at another time, or by somebody else."""

    head: Checkpoint
    note: Note

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Seen:
        """Read a file with a signed checkpoint."""
        return cls.parse(read_small(Path(path), "the checkpoint", most=_MOST))

    @classmethod
    def parse(cls, data: str | bytes) -> Seen:
        """Read a signed checkpoint."""
        return cls(*notes.parse(data))


def all_seen(given: Iterable[str | bytes | Seen]) -> list[Seen]:
    """Checkpoints by size."""
    made = [each if isinstance(each, Seen) else Seen.parse(each) for each in given]
    return sorted(made, key=lambda each: each.head.size)
