"""`Presence`: who is in a ledger already, by descriptor, token and subject; how many of a class stand; whose keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.admit.register import Entry, Known
from lamina.ledger.ledger import Ledger
from lamina.ledger.lookup import descriptor_key, subject_key
from lamina.ledger.members import Members
from lamina.ledger.ring import LedgerKeys
from lamina.ledger.store.base import Reader
from lamina.ledger.view import head_of

_TOKEN = 16  # bytes
_SPARSE = 4  # leaves that are read for one that is wanted, before each is asked for by itself


def token(entry: Entry) -> bytes:
    """What stands for (kid, cti) in the store: an attestation that was admitted, also after its leaf is pruned."""
    return hashlib.sha256(entry.kid + entry.cti).digest()[:_TOKEN]


class Presence:
    """Answers inside a transaction, by the leaves that it sees. What it remembers is only how far it has read."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._members, self._keys = Members(), LedgerKeys(ledger.header)
        self._withdrawn: tuple[int, NDArray[np.int64]] = 0, np.empty(0, dtype=np.int64)

    def look(self, rows: Reader, entries: Sequence[Entry]) -> list[Known]:
        """What is known of each."""
        head_of(rows)  # begins the view of PostgreSQL, so that `seqs` is a part of it
        names = [descriptor_key(entry.descriptor) for entry in entries]
        subjects = [None if entry.tag is None else subject_key(entry.tag) for entry in entries]
        there = dict(self._ledger.seqs([*names, *(one for one in subjects if one is not None)]))
        tokens = rows.tokens([token(entry) for entry in entries])
        leaves = _leaves(rows, sorted({there[name] for name in names if name in there}))
        gone = set(self._gone(rows).tolist()) if leaves else set()
        return [
            _known(entry, there.get(name), leaves, gone, token(entry) in tokens, subject in there)
            for entry, name, subject in zip(entries, names, subjects, strict=True)
        ]

    def standing(self, rows: Reader, cls: str, now: int) -> int:
        """How many of a class are neither withdrawn nor expired."""
        self._members.follow(rows, head_of(rows).size)
        return self._members.standing(cls, now, self._gone(rows))

    def room(self, rows: Reader, cls: str, places: int, wanted: int, now: int) -> int:
        """How many of those who want one find a place. Counted exactly only where that can matter."""
        self._members.follow(rows, head_of(rows).size)
        if self._members.ever[cls] + wanted <= places:
            return wanted
        return max(0, places - self._members.standing(cls, now, self._gone(rows)))

    def keys(self, rows: Reader) -> LedgerKeys:
        """The keys of contributors and others."""
        self._keys.follow(rows, head_of(rows).size)
        return self._keys

    def _gone(self, rows: Reader) -> NDArray[np.int64]:
        """Leaves of contributions that were withdrawn."""
        size = head_of(rows).size
        if self._withdrawn[0] != size:
            found = np.fromiter((target for target, _ in rows.withdrawals()), dtype=np.int64)
            self._withdrawn = size, found
        return self._withdrawn[1]


def _known(
    entry: Entry, seq: int | None, leaves: dict[int, bytes], gone: set[int], token: bool, subject: bool
) -> Known:
    data = None if seq is None else leaves.get(seq)
    if data is None or entry.descriptor not in data:  # keys are parts of digests
        if token or seq is not None:
            return Known.REPLAYED
        return Known.REPRESENTED if subject else Known.NEW
    if seq in gone:
        return Known.WITHDRAWN
    return Known.SAME if entry.attestation in data else Known.REPLAYED


def _leaves(rows: Reader, seqs: Sequence[int]) -> dict[int, bytes]:
    """Leaves by their index; in one sweep where they lie close together, as after an admission."""
    if not seqs:
        return {}
    if seqs[-1] - seqs[0] < _SPARSE * len(seqs):
        wanted = set(seqs)
        return {seq: data for seq, data in rows.leaves(seqs[0], seqs[-1] + 1) if seq in wanted}
    found = ((seq, rows.leaf(seq)) for seq in seqs)
    return {seq: data for seq, data in found if data is not None}
