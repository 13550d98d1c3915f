"""Rows of a ledger that have no leaf yet (open charges, reservations, budgets, runs), and the signed head over them.

No checkpoint covers these rows. Instead the ledger key signs a head (a counter, the tree and a digest of all rows) in
the same transaction as every change. If a row is deleted, changed or added, the digest differs. If rows and head are
replaced by older ones, either an epoch comes after the tree of the head, or the counter is smaller than the one that is
kept beside the key (newest_state.py).

    digest   = SHA-256 over the rows that have no leaf or keep a body, each field with its length before it
    signed   = "lamina/open/1" LF origin LF counter LF size LF, root, digest
    stored   = counter (8) ‖ size (8) ‖ root (32) ‖ key id (32) ‖ signature (64), under the name "open" in `meta`

A new ledger gets its first head with its header. A writer without the key cannot sign, so it removes the head. The rows
stay unsigned until the holder of the key accepts them; a missing head is never passed over in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lamina.errors import LedgerDamaged
from lamina.ledger.governance_records import Role
from lamina.ledger.key_state import KeyState
from lamina.ledger.records import decode_kept
from lamina.ledger.store.rows import RunHold, StoredLeaf, StoreReader, StoreWriter
from lamina.sign.keys import PrivateKey

_NAME = "open"
_STORED_BYTES = 144
_RESTORE = "restore the ledger from a copy; to accept the rows as they are, run lamina ledger checkpoint LEDGER --key KEY --accept"


def open_digest(rows: StoreReader) -> bytes:
    """Return the digest of all rows that a ledger holds beside its leaves."""
    state = hashlib.sha256()
    try:
        for part in _parts(rows):
            state.update(len(part).to_bytes(8, "big") + part)
    except (AttributeError, TypeError, OverflowError) as error:
        problem = f"an open charge of the ledger holds a wrong type: {error}"
        raise LedgerDamaged("store.row-wrong-type", problem, "restore the ledger from a copy") from None
    return state.digest()


def held_digests(rows: StoreReader) -> dict[bytes, bytes]:
    """By run, the digest of its open charges and reservations."""
    found: dict[bytes, Any] = {}
    for hold in rows.holds():
        state = found.setdefault(hold.run, hashlib.sha256())
        for part in _hold_parts(hold):
            state.update(len(part).to_bytes(8, "big") + part)
    return {run: state.digest() for run, state in found.items()}


def _hold_parts(hold: RunHold) -> Iterator[bytes]:
    yield hold.run
    yield hold.segment.to_bytes(8, "big", signed=True) + hold.generation.to_bytes(8, "big", signed=True)
    yield hold.nonce + bytes([hold.leaf is not None])
    yield hold.body


def _parts(rows: StoreReader) -> Iterator[bytes]:
    holds, terms, runs = rows.signed_holds(), sorted(rows.terms().items()), rows.runs()
    for table, count in (("held", len(holds)), ("terms", len(terms)), ("run", len(runs))):
        yield f"{table} {count}".encode()
    for hold in holds:
        yield from _hold_parts(hold)
    for account, body in terms:
        yield account.encode()
        yield body
    for run in runs:
        yield run.id
        yield run.label.encode()
        yield run.day.to_bytes(8, "big", signed=True) + bytes([run.finished])


class OpenHead(NamedTuple):
    """The signed head over the open rows, as the store keeps it."""

    counter: int
    size: int
    root: bytes
    kid: bytes
    signature: bytes

    @classmethod
    def sign(cls, origin: str, counter: int, size: int, root: bytes, digest: bytes, key: PrivateKey) -> OpenHead:
        return cls(counter, size, root, key.public.id, key.sign(_text(origin, counter, size, root, digest)))

    @classmethod
    def read(cls, rows: StoreReader, keys: KeyState) -> OpenHead | None:
        """Return the head; None if there is none, or if its key was revoked since."""
        if (found := rows.meta(_NAME)) is None:
            return None
        head = cls.decode(found)
        known = keys.history(head.kid)
        return head if known is None or known.revoked is None else None

    @classmethod
    def decode(cls, data: bytes) -> OpenHead:
        if len(data) != _STORED_BYTES:
            raise LedgerDamaged("ledger.open-rows-differ", "the head over the open charges cannot be read", _RESTORE)
        counter, size = (int.from_bytes(data[at : at + 8], "big") for at in (0, 8))
        return cls(counter, size, data[16:48], data[48:80], data[80:])

    def encode(self) -> bytes:
        return self.counter.to_bytes(8, "big") + self.size.to_bytes(8, "big") + self.root + self.kid + self.signature

    def write(self, rows: StoreWriter) -> None:
        rows.put_meta(_NAME, self.encode())

    @staticmethod
    def remove(rows: StoreWriter) -> None:
        """Remove the head, so that the rows are unsigned."""
        rows.drop_meta(_NAME)

    def holds(self, keys: KeyState, digest: bytes) -> bool:
        """Return whether a ledger key signed this head for rows of this digest."""
        known = keys.history(self.kid)
        if known is None or known.key.role is not Role.LEDGER:
            return False
        return known.public.verify(_text(keys.origin, self.counter, self.size, self.root, digest), self.signature)

    @classmethod
    def check(
        cls, rows: StoreReader, keys: KeyState, newest: int, extends: Callable[[int, bytes], bool],
        leaf: Callable[[int], StoredLeaf],
    ) -> OpenHead | None:  # fmt: skip
        """Return the head; None if the rows are unsigned. Raise LedgerDamaged if the head signs other rows.

        Args:
            keys: of the ledger, after all leaves.
            newest: the last leaf that records an epoch or the start of a run.
            extends: whether so many first leaves have this root.
            leaf: the checked leaf of a number.
        """
        if (head := cls.read(rows, keys)) is None:
            return None
        why = None
        if not head.holds(keys, open_digest(rows)):
            why = "one was deleted, changed or added"
        elif newest >= head.size or not extends(head.size, head.root):
            why = f"they were signed after {head.size} leaves, and leaf {newest} records an epoch or the start of a run"
        elif (
            (signer := keys.history(head.kid)) is not None
            and signer.replaced is not None
            and signer.replaced_in < head.size
            and signer.replaced <= decode_kept(leaf(head.size - 1).leaf).time
        ):
            why = f"a key signed them after {head.size} leaves, and leaf {signer.replaced_in} had replaced that key"
        if why is None:
            return head
        problem = f"the open charges and reservations of {keys.origin!r} differ from those that its key signed: {why}"
        raise LedgerDamaged("ledger.open-rows-differ", problem, _RESTORE)


def _text(origin: str, counter: int, size: int, root: bytes, digest: bytes) -> bytes:
    return f"lamina/open/1\n{origin}\n{counter}\n{size}\n".encode() + root + digest
