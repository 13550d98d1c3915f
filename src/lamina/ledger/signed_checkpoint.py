"""Signed checkpoints of a tree (C2SP tlog-checkpoint), and the signature under its receipts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lamina import cbor
from lamina.errors import EncodingError, LedgerError, NotVerified
from lamina.ledger.merkle import EMPTY_ROOT, MAX_TREE_SIZE, is_hash, is_tree_size
from lamina.sign.keys import EDDSA, PrivateKey, PublicKey
from lamina.sign.notes import (
    Note,
    NoteKey,
    NoteSignature,
    WitnessQuorum,
    check_key_name,
    check_note_text,
    decode64,
    encode64,
    make_cosignature,
    parse_decimal,
    sign_note,
    verify_note,
)
from lamina.sign.signed_json import sig_structure

# Checkpoints (C2SP tlog-checkpoint): a signed note that says how large a tree is and what its root is.
#
#     example.org/ledger                                 ← origin: which ledger
#     20852163                                           ← size: leaves in the tree
#     CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=       ← root, in base64
#
#     — example.org/ledger …                             ← signed by the ledger under its origin
#     — witness.example.org …                            ← cosigned by who saw it
#
# Nothing else is said in a checkpoint: what was spent stands in leaves, where an auditor can prove it.


@dataclass(frozen=True, slots=True)
class LedgerCheckpoint:
    """The head of a tree. `extensions` are lines of other ledgers that are read and kept; ours have none."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_tree_size(self.size) or not is_hash(self.root):
            problem = f"the checkpoint has size {self.size!r} and root {self.root!r}, must be in [0, 2^63) and 32 bytes"
            raise LedgerError("ledger.checkpoint-invalid", problem)
        if self.size == 0 and self.root != EMPTY_ROOT:
            raise LedgerError("ledger.checkpoint-invalid", "the root of an empty tree must be SHA-256 of nothing")
        for line in (self.origin, *self.extensions):
            check_note_text(line)
            if not line or "\n" in line:
                problem = f"a line of the checkpoint is {line[:40]!r}, must be one line"
                raise LedgerError("ledger.checkpoint-invalid", problem)

    def text(self) -> str:
        """What is signed."""
        return "\n".join([self.origin, str(self.size), encode64(self.root), *self.extensions, ""])

    def signed(self, key: PrivateKey, name: str | None = None) -> str:
        """The checkpoint as a signed note. Sign only what is committed, and nothing that forks what was signed."""
        check_key_name(self.origin)
        return sign_note(self.text(), self.origin if name is None else name, key).encode()

    @classmethod
    def of_text(cls, text: str) -> LedgerCheckpoint:
        """Read the text of a note that is a checkpoint; EncodingError for any other."""
        lines = text.split("\n")
        if len(lines) < 4 or lines.pop():
            raise _malformed_checkpoint("it must be three lines or more, with a newline at the end")
        origin, size, root, *extensions = lines
        try:
            return cls(
                origin, parse_decimal(size, "the size", MAX_TREE_SIZE), decode64(root, "the root"), tuple(extensions)
            )
        except LedgerError as error:
            raise _malformed_checkpoint(error.problem) from None


def parse_checkpoint(data: str | bytes) -> tuple[LedgerCheckpoint, Note]:
    """Read a signed checkpoint strictly; EncodingError for anything that is none. Nothing is verified yet."""
    found = Note.parse(data)
    return LedgerCheckpoint.of_text(found.text), found


def verify_checkpoint(
    data: str | bytes,
    keys: Iterable[NoteKey],
    *,
    origin: str | None = None,
    policy: WitnessQuorum | None = None,
    now: int | None = None,
) -> LedgerCheckpoint:
    """The checkpoint, if one of the ledger's `keys` signed it and the witnesses' quorum cosigned it.

    Otherwise NotVerified, or EncodingError for what is no checkpoint. `origin` is which ledger it must be of; None
    takes the names of the keys, which are origins.
    """
    checkpoint, found = parse_checkpoint(data)
    keys = tuple(keys)
    expected = {key.name for key in keys} if origin is None else {origin}
    if checkpoint.origin not in expected:
        problem = f"the checkpoint is of {checkpoint.origin!r}, expected {', '.join(sorted(expected)) or 'none'}"
        remedy = "give the checkpoint of this ledger, or the keys of that one"
        raise NotVerified("ledger.checkpoint-wrong-origin", problem, remedy)
    verify_note(found, keys)
    if policy is not None:
        if {key.key.x for key in keys} & {witness.key.x for witness in policy.witnesses}:
            raise NotVerified("ledger.witness-is-ledger", "a witness has the ledger's own key", "name another witness")
        policy.check(found, now=now)
    return checkpoint


def add_cosignature(checkpoint: str | bytes, key: PrivateKey, time: int, name: str) -> str:
    """The signed checkpoint with a cosignature by witness `name` added. Look at the tree first."""
    _, found = parse_checkpoint(checkpoint)
    return found.with_signatures(make_cosignature(found.text, name, key, time)).encode()


def merge_signatures(*copies: str | bytes) -> str:
    """One copy of a checkpoint with the signatures of all copies: cosignatures that came back one by one."""
    first, *others = (parse_checkpoint(copy)[1] for copy in copies)
    seen: dict[NoteSignature, None] = {}
    for found in (first, *others):
        if found.text != first.text:
            problem = "these are copies of different checkpoints"
            raise LedgerError("ledger.checkpoints-differ", problem, "join copies of one checkpoint")
        seen.update(dict.fromkeys(found.signatures))
    return Note(first.text, tuple(seen)).encode()


def _malformed_checkpoint(problem: str) -> EncodingError:
    problem = f"malformed checkpoint: {problem}"
    return EncodingError("ledger.checkpoint-malformed", problem, "get the checkpoint again from the ledger")


# A second signature of the same tree, from which receipts of all its leaves are made without the key (receipt.py).
#
#     protected   {1: alg, 4: kid, 15: {1: origin, 2: "tree:size"}, 16: typ, 395: 1}    395: RFC9162_SHA256
#     signed      ["Signature1", protected, h'', root]                                  RFC 9052 §4.4

RECEIPT_TYPE = "application/lamina-receipt+cose"


def protected_header(alg: int, kid: bytes, origin: str, size: int) -> bytes:
    """The protected header of every receipt from one tree."""
    return cbor.encode({1: alg, 4: kid, 15: {1: origin, 2: f"tree:{size}"}, 16: RECEIPT_TYPE, 395: 1})


@dataclass(frozen=True, slots=True)
class TreeSignature:
    """The signature of a ledger under a tree of its: what all receipts from that tree have in common."""

    origin: str
    size: int
    root: bytes
    kid: bytes
    signature: bytes

    @classmethod
    def sign(cls, checkpoint: LedgerCheckpoint, key: PrivateKey) -> TreeSignature:
        """Sign the tree of a checkpoint for receipts."""
        unsigned = cls(checkpoint.origin, checkpoint.size, checkpoint.root, key.public.id, b"")
        return replace(unsigned, signature=key.sign(sig_structure(unsigned.protected(), unsigned.root)))

    def protected(self) -> bytes:
        return protected_header(EDDSA, self.kid, self.origin, self.size)

    def holds(self, key: PublicKey) -> bool:
        """Whether `key` made this signature."""
        return self.kid == key.id and key.verify(sig_structure(self.protected(), self.root), self.signature)
