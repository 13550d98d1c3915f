"""Checkpoints: every one is of the tree that the leaves make, and signed by a key that was the ledger's.

A key of the ledger counts if the header names it, or if a checkpoint that such a key signed covers the leaf that names
it: otherwise whoever can write could make a key the ledger's own. The same of a key that was replaced or revoked and is
named again. A key that was replaced signs up to the checkpoint that covers its replacement, and none after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.admit.key import PublicKey
from lamina.errors import EncodingError
from lamina.ledger import checkpoint as notes
from lamina.ledger.check.keys import Keys
from lamina.ledger.check.problem import CHECKPOINT, bad
from lamina.ledger.checkpoint import Checkpoint
from lamina.ledger.clock import SKEW
from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import Leaf
from lamina.ledger.note import Note, NoteKey, Verifier
from lamina.ledger.receipt import Seal
from lamina.ledger.records import Change, Header, KeyEvent, Role
from lamina.ledger.store.base import Signed
from lamina.ledger.witness import WitnessKey, WitnessPolicy


@dataclass(slots=True)
class _Signer:
    """A key of the ledger, from the leaf that names it to the leaf that replaces or revokes it."""

    public: PublicKey
    named: int
    replaced: int | None = None
    revoked: bool = False
    counts: bool = False  # whether a key that counted has vouched for it

    @property
    def stays(self) -> bool:
        """Whether it needs nobody to vouch for it when it is named again: what had ended begins anew."""
        return self.counts and self.replaced is None and not self.revoked


class Checkpoints:
    """All checkpoints of a store, checked one after the other as the tree reaches them."""

    def __init__(self, header: Header, stored: Sequence[Signed], trusted: Sequence[PublicKey] | None) -> None:
        self._header, self._origin = header, header.origin
        self._stored = sorted(stored, key=lambda each: each.size)
        self._next = 0
        self.good = 0  # size up to which everything is vouched for
        self.digests: dict[bytes, int] = {}  # of the checkpoints that were reached → size
        mine = {key.id: key.public for key in header.keys if key.role is Role.LEDGER}
        self._signers = {kid: _Signer(public, 0, counts=True) for kid, public in mine.items()}
        self._trusted: dict[bytes, PublicKey] | None = (
            None if trusted is None else {key.id: key for key in trusted}
        )
        self.trusted = 0  # size up to which a trusted key vouches
        self.count = 0

    def sizes(self) -> list[int]:
        """Where the tree is to be looked at."""
        return [each.size for each in self._stored]

    def see(self, leaf: Leaf) -> None:
        """A key event may name, replace or revoke a key of the ledger."""
        event = leaf.record
        assert isinstance(event, KeyEvent)
        if event.key is not None and event.key.role is Role.LEDGER:
            known = self._signers.get(event.key.id)
            self._signers[event.key.id] = _Signer(
                event.key.public, leaf.seq, counts=known is not None and known.stays
            )
        if event.target in self._signers:
            signer = self._signers[event.target]
            if event.change is Change.REVOKE:
                signer.revoked = True
            elif signer.replaced is None:
                signer.replaced = leaf.seq

    def reached(self, tree_size: int, root: bytes, time: int, keys: Keys) -> None:
        """The tree has so many leaves: check the checkpoints of that size. `time` is that of the last leaf."""
        while self._next < len(self._stored) and self._stored[self._next].size == tree_size:
            stored = self._stored[self._next]
            self._check(stored, root, time, keys)
            self._next += 1

    def _check(self, stored: Signed, root: bytes, time: int, keys: Keys) -> None:
        try:
            head, note = notes.parse(stored.text)
        except EncodingError as error:
            bad(
                self.good,
                CHECKPOINT,
                "verify.checkpoint-leaves-not",
                f"the checkpoint of {stored.size} leaves cannot be read: {error.problem}",
            )
        if head.origin != self._origin:
            bad(
                self.good,
                CHECKPOINT,
                "verify.checkpoint-leaves-another",
                f"the checkpoint of {stored.size} leaves is of another ledger, {head.origin!r}",
            )
        if head.size != stored.size or head.extensions:
            bad(
                self.good,
                CHECKPOINT,
                "verify.checkpoint-kept-leaves",
                f"the checkpoint that is kept for {stored.size} leaves is of {head.size}",
            )
        if head.root != root:
            bad(
                self.good,
                CHECKPOINT,
                "verify.tree-leaves-another",
                f"the tree of {head.size} leaves has another root than was signed: one of the leaves "
                f"[{self.good}, {head.size}) is not what it was",
            )
        self._seal(head, stored.seal, self._signature(head, note, time, keys))
        self._witnesses(head, note, time, keys)
        for other in self._signers.values():
            other.counts = other.counts or other.named < head.size
        self._trust(head, note)
        self.good, self.count = head.size, self.count + 1
        self.digests[hashlib.sha256(note.text.encode()).digest()] = head.size

    def _signature(self, head: Checkpoint, note: Note, time: int, keys: Keys) -> set[bytes]:
        """A key signed it that was the ledger's then; all that did."""
        states, why = keys.of_ledger(), "by no key of the ledger"
        found: set[bytes] = set()
        for kid, signer in self._signers.items():
            signed = signature(note, NoteKey(self._origin, signer.public))
            if signed is False:
                bad(
                    self.good,
                    CHECKPOINT,
                    "verify.signature-checkpoint-leaves",
                    f"the signature of the checkpoint of {head.size} leaves by key "
                    f"{kid.hex()[:16]} is not one of its text",
                )
            if not signed:
                continue
            # What was replaced still signs the checkpoint that covers its replacement.
            last = signer.replaced is not None and self.good <= signer.replaced
            wrong = states[kid].wrong(Role.LEDGER, time, states[kid].key.valid_from if last else time)
            if not signer.counts:
                why = f"by key {kid.hex()[:16]}, which no checkpoint of an earlier key vouches for"
            elif wrong is not None:
                why = f"by key {kid.hex()[:16]}, which {wrong}"
            else:
                found.add(kid)
        if not found:
            bad(
                self.good,
                CHECKPOINT,
                "verify.checkpoint-leaves-signed",
                f"the checkpoint of {head.size} leaves is signed {why}",
            )
        return found

    def _seal(self, head: Checkpoint, seal: bytes, signers: set[bytes]) -> None:
        """The second signature, from which receipts are made: by one of those who signed the first."""
        made = Seal(head.origin, head.size, head.root, seal[:32], seal[32:])
        if seal[:32] not in signers or not made.holds(self._signers[seal[:32]].public):
            bad(
                self.good,
                CHECKPOINT,
                "verify.seal-checkpoint-leaves",
                f"the seal of the checkpoint of {head.size} leaves is not by a key of the ledger",
            )

    def _witnesses(self, head: Checkpoint, note: Note, time: int, keys: Keys) -> None:
        """Cosignatures that are there must hold, and be of a time when its leaves were written."""
        known = [WitnessKey(key.name, key.public) for key in keys.witnesses()]
        try:
            times = WitnessPolicy(0, tuple(known)).cosigned(note)
        except LedgerError as error:
            bad(
                self.good,
                CHECKPOINT,
                "verify.checkpoint-leaves",
                f"checkpoint of {head.size} leaves: {error.problem}",
            )
        early = [name for name, at in times.items() if at + SKEW < time]
        if early:
            bad(
                self.good,
                CHECKPOINT,
                "verify.witness-saw-checkpoint",
                f"witness {early[0]!r} saw the checkpoint of {head.size} leaves before its last leaf by its own time "
                "was written",
            )
        if head.size == self._stored[-1].size and len(times) < self._header.witnesses:
            bad(
                self.good,
                CHECKPOINT,
                "verify.witnesses-cosigned-checkpoint",
                f"{len(times)} witnesses cosigned the checkpoint of {head.size} leaves, the header asks for "
                f"{self._header.witnesses}",
            )

    def _trust(self, head: Checkpoint, note: Note) -> None:
        if self._trusted is None:
            return
        if any(signature(note, NoteKey(self._origin, key)) for key in self._trusted.values()):
            self.trusted = head.size
            for kid, other in self._signers.items():  # whom a trusted key vouches for
                if other.named and other.named < head.size:
                    self._trusted.setdefault(kid, other.public)

    # ----------------------------------------------------------------------------------- at the end

    def finish(self, size: int) -> None:
        """All leaves were read: a checkpoint that was not reached is of a longer ledger."""
        if self._next < len(self._stored):
            beyond = self._stored[self._next].size
            bad(
                size,
                CHECKPOINT,
                "verify.checkpoint-leaves-signed-rest",
                f"a checkpoint of {beyond} leaves was signed, {size} are there: the rest was cut off",
            )

    def accepted(self) -> Mapping[bytes, PublicKey]:
        """The keys under which a checkpoint that was seen elsewhere counts: all that counted.

        With trusted keys only these, unless one of them signed the tree: then it vouches for all that is in it, and the
        keys before it are.
        """
        if self._trusted is not None and not self.trusted:
            return self._trusted
        found = {kid: signer.public for kid, signer in self._signers.items() if signer.counts}
        return {**found, **(self._trusted or {})}


def signature(note: Note, key: Verifier) -> bool | None:
    """Whether a key signed the note; None if it says nothing, False if what it says is wrong."""
    lines = [each.value for each in note.signatures if (each.name, each.key_id) == (key.name, key.id)]
    return all(key.holds(note.text, value) for value in lines) if lines else None
