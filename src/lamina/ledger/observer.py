"""`Observer`: a witness at work. It remembers the last tree of each ledger and cosigns only what goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from lamina.admit.key import PrivateKey
from lamina.ledger import checkpoint, witness
from lamina.ledger.errors import NotVerified
from lamina.ledger.hashing import EMPTY
from lamina.ledger.note import NoteKey, Signature
from lamina.ledger.witness import WitnessKey


@dataclass(slots=True)
class Observer:
    """A witness under `name`. `ledgers` are the keys of each origin that it knows.

    `seen` holds the last checkpoint of each origin, as it was signed. Give a mapping that lasts: a witness that
    forgets can be shown another tree. One call at a time.
    """

    name: str
    key: PrivateKey
    ledgers: Mapping[str, Sequence[NoteKey]]
    seen: MutableMapping[str, str] = field(default_factory=dict)

    @property
    def verifier(self) -> WitnessKey:
        """The key by which others know its cosignatures."""
        return WitnessKey(self.name, self.key.public)

    def last(self, origin: str) -> checkpoint.Checkpoint:
        """The largest tree of that ledger that it cosigned; an empty one before the first."""
        if origin not in self.seen:
            return checkpoint.Checkpoint(origin, 0, EMPTY)
        return checkpoint.parse(self.seen[origin])[0]

    def observe(self, signed: str | bytes, proof: Sequence[bytes], time: int) -> Signature:
        """Cosign a checkpoint that goes on from the last one by `proof`; NotVerified for any other.

        What is refused here with a good signature is evidence against the ledger: keep it.
        """
        head, note = checkpoint.parse(signed)
        if head.origin not in self.ledgers:
            raise NotVerified(
                "ledger.no-ledger-witness",
                f"{head.origin!r} is no ledger that this witness knows",
                "register its key first",
            )
        checkpoint.verify(signed, self.ledgers[head.origin], origin=head.origin)
        last = self.last(head.origin)
        if head.size < last.size:
            raise NotVerified(
                "ledger.checkpoint-leaves-seen",
                f"the checkpoint has {head.size} leaves, {last.size} were seen: the ledger was rolled back",
                "ask for its present checkpoint; if there is none so large, leaves were taken away",
            )
        if not head.extends(last, proof):
            raise NotVerified(
                "ledger.tree-leaves-not",
                f"the tree of {head.size} leaves is not shown to go on from the one of {last.size} that was seen",
                f"prove consistency from {last.size}; if that cannot be done, the ledger was forked",
            )
        cosignature = witness.cosign(note.text, self.name, self.key, time)
        self.seen[head.origin] = note.encode()
        return cosignature
