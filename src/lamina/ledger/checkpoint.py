"""Checkpoints (C2SP tlog-checkpoint): a signed note that says how large a tree is and what its root is.

    example.org/ledger                                 ← origin: which ledger
    20852163                                           ← size: leaves in the tree
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=       ← root, in base64

    — example.org/ledger …                             ← signed by the ledger under its origin
    — witness.example.org …                            ← cosigned by who saw it

Nothing else is said in a checkpoint: what was spent stands in leaves, where an auditor can prove it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamina.admit.key import PrivateKey
from lamina.errors import EncodingError
from lamina.ledger import note, witness
from lamina.ledger.errors import LedgerError, NotVerified
from lamina.ledger.hashing import EMPTY, HASH, MAX_SIZE, is_hash, is_size
from lamina.ledger.note import Note, NoteKey, Signature
from lamina.ledger.proof import verify_consistency
from lamina.ledger.text import check_name, check_text, decimal, decode64, encode64
from lamina.ledger.witness import WitnessPolicy


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The head of a tree. `extensions` are lines of other ledgers that are read and kept; ours have none."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_size(self.size) or not is_hash(self.root):
            raise LedgerError(
                "ledger.checkpoint-size-root",
                f"the checkpoint has size {self.size!r} and root {self.root!r}, must be in [0, 2^63) and {HASH} bytes",
                "take both from the tree",
            )
        if self.size == 0 and self.root != EMPTY:
            raise LedgerError(
                "ledger.root-empty-tree",
                "the root of an empty tree is not SHA-256 of nothing",
                "take it from the tree",
            )
        for line in (self.origin, *self.extensions):
            check_text(line)
            if not line or "\n" in line:
                raise LedgerError(
                    "ledger.line-checkpoint-line",
                    f"a line of the checkpoint is {line[:40]!r}, must be one line",
                    "leave it out",
                )

    def text(self) -> str:
        """What is signed."""
        return "\n".join([self.origin, str(self.size), encode64(self.root), *self.extensions, ""])

    def signed(self, key: PrivateKey, name: str | None = None) -> str:
        """The checkpoint as a signed note. Sign only what is committed, and nothing that forks what was signed."""
        check_name(self.origin)
        return note.sign(self.text(), self.origin if name is None else name, key).encode()

    @classmethod
    def of_text(cls, text: str) -> Checkpoint:
        """Read the text of a note that is a checkpoint; EncodingError for any other."""
        lines = text.split("\n")
        if len(lines) < 4 or lines.pop():
            raise _malformed("it must be three lines or more, with a newline at the end")
        origin, size, root, *extensions = lines
        try:
            return cls(
                origin, decimal(size, "the size", MAX_SIZE), decode64(root, "the root"), tuple(extensions)
            )
        except LedgerError as error:
            raise _malformed(error.problem) from None

    def extends(self, old: Checkpoint, proof: Sequence[bytes]) -> bool:
        """Whether `proof` shows that this tree begins with all of the old one, of the same ledger."""
        return self.origin == old.origin and verify_consistency(
            old.size, self.size, proof, old.root, self.root
        )

    def forks(self, other: Checkpoint) -> bool:
        """Whether both cannot be of one ledger: as many leaves under another root."""
        return self.origin == other.origin and self.size == other.size and self.root != other.root


def parse(data: str | bytes) -> tuple[Checkpoint, Note]:
    """Read a signed checkpoint strictly; EncodingError for anything that is none. Nothing is verified yet."""
    found = Note.parse(data)
    return Checkpoint.of_text(found.text), found


def verify(
    data: str | bytes,
    keys: Iterable[NoteKey],
    *,
    origin: str | None = None,
    policy: WitnessPolicy | None = None,
    now: int | None = None,
) -> Checkpoint:
    """The checkpoint, if one of the ledger's `keys` signed it and the witnesses' quorum cosigned it.

    Otherwise NotVerified, or EncodingError for what is no checkpoint. `origin` is which ledger it must be of; None
    takes the names of the keys, which are origins.
    """
    checkpoint, found = parse(data)
    keys = tuple(keys)
    expected = {key.name for key in keys} if origin is None else {origin}
    if checkpoint.origin not in expected:
        raise NotVerified(
            "ledger.checkpoint-expected",
            f"the checkpoint is of {checkpoint.origin!r}, expected was {', '.join(sorted(expected)) or 'none'}",
            "give the checkpoint of this ledger, or the keys of that one",
        )
    note.verify(found, keys)
    if policy is not None:
        if {key.key.x for key in keys} & {witness.key.x for witness in policy.witnesses}:
            raise NotVerified(
                "ledger.witness-ledger-own",
                "a witness has the ledger's own key",
                "a witness must be somebody else",
            )
        policy.check(found, now=now)
    return checkpoint


def cosign(checkpoint: str | bytes, key: PrivateKey, time: int, name: str) -> str:
    """The signed checkpoint with a cosignature by witness `name` added. Look at the tree first, as `Observer` does."""
    _, found = parse(checkpoint)
    return found.adding(witness.cosign(found.text, name, key, time)).encode()


def joined(*copies: str | bytes) -> str:
    """One copy of a checkpoint with the signatures of all copies: cosignatures that came back one by one."""
    first, *others = (parse(copy)[1] for copy in copies)
    seen: dict[Signature, None] = {}
    for found in (first, *others):
        if found.text != first.text:
            raise LedgerError(
                "ledger.copies-different-checkpoints",
                "these are copies of different checkpoints",
                "join copies of one checkpoint",
            )
        seen.update(dict.fromkeys(found.signatures))
    return Note(first.text, tuple(seen)).encode()


def _malformed(problem: str) -> EncodingError:
    return EncodingError(
        "ledger.malformed-checkpoint",
        f"malformed checkpoint: {problem}",
        "get the checkpoint again from the ledger",
    )
