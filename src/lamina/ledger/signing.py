"""Who signs the next checkpoint: a key of the ledger that a checkpoint before it vouched for."""

from __future__ import annotations

from lamina.admit.key import PrivateKey
from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import decode
from lamina.ledger.parties import Parties
from lamina.ledger.records import NUMBERS, Header, KeyEvent
from lamina.ledger.store.base import Reader


def standing(rows: Reader, header: Header, size: int) -> Parties:
    """The keys after so many leaves, with what the last checkpoint covers."""
    last, found = rows.checkpoint(), Parties(header)
    covered = 0 if last is None else last.size
    for seq, data in rows.of_kind(NUMBERS[KeyEvent], 0, size):
        if seq >= covered:
            break
        found.apply(_event(data))
    found.covered()
    for _, data in rows.of_kind(NUMBERS[KeyEvent], covered, size):
        found.apply(_event(data))
    return found


def check_signs(parties: Parties, key: PrivateKey, time: int) -> None:
    """LedgerError unless the key may sign the next checkpoint, if the last leaf is of that time."""
    if (wrong := parties.unsigning(key.public.id, time)) is not None:
        raise LedgerError(
            "ledger.key-no-key",
            f"key {key.public.name[:16]} is no key of the ledger {parties.origin!r} at this time: it {wrong}",
            "give the key that its header or a key event names; the one before it signs over that event first",
        )


def _event(data: bytes) -> KeyEvent:
    record = decode(data).record
    assert isinstance(record, KeyEvent)
    return record
