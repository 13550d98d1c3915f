"""The receipt as text (C2SP tlog-proof): index, path, and the checkpoint with all its signatures.

    c2sp.org/tlog-proof@v1
    extra YWJj                                         ← may be missing; nobody signed it
    index 73894
    gSKyXoYZUgZ6jduWYrkDOARinOMGJveXjgMkBTcdPlQ=       ← the inclusion proof, one hash a line, from the leaf up
                                                       ← an empty line
    example.org/ledger                                 ← the checkpoint as it was signed
    …

It says what a COSE receipt says, and carries the cosignatures of witnesses as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lamina.errors import EncodingError
from lamina.ledger import checkpoint
from lamina.ledger.checkpoint import Checkpoint
from lamina.ledger.errors import LedgerError, NotVerified
from lamina.ledger.hashing import MAX_SIZE, is_hash, is_size, leaf_hash
from lamina.ledger.note import NoteKey
from lamina.ledger.proof import verify_inclusion
from lamina.ledger.text import MAX_TEXT, decimal, decode64, encode64
from lamina.ledger.witness import WitnessPolicy

FIRST = "c2sp.org/tlog-proof@v1"
MAX_PATH = 63


@dataclass(frozen=True, slots=True)
class ProofText:
    """A proof that travels with its checkpoint. It says something only if `verify` does not raise."""

    index: int
    path: tuple[bytes, ...]
    checkpoint: str
    extra: bytes = b""

    def __post_init__(self) -> None:
        if not is_size(self.index) or len(self.path) > MAX_PATH or not all(map(is_hash, self.path)):
            raise LedgerError(
                "ledger.proof-leaf-hashes",
                f"the proof of leaf {self.index!r} must have {MAX_PATH} hashes of 32 bytes at most",
                "make it with Ledger.prove",
            )

    def encode(self) -> str:
        """The text, to be kept in a file that ends with .tlog-proof."""
        extra = [f"extra {encode64(self.extra)}"] if self.extra else []
        lines = [FIRST, *extra, f"index {self.index}", *map(encode64, self.path)]
        return "\n".join(lines) + "\n\n" + self.checkpoint

    @classmethod
    def parse(cls, data: str | bytes) -> ProofText:
        """Read the text strictly; EncodingError for anything that is none. Nothing is verified yet."""
        if len(data) > 2 * MAX_TEXT:
            raise _malformed(f"it has {len(data)} bytes, at most {2 * MAX_TEXT} are read")
        try:
            text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        except UnicodeDecodeError:
            raise _malformed("it is not valid UTF-8") from None
        head, gap, signed = text.partition("\n\n")
        first, *lines = head.split("\n")
        if not gap or first != FIRST or not lines:
            raise _malformed(f"it does not begin with {FIRST}, or has no checkpoint after an empty line")
        extra = b""
        if lines[0].startswith("extra "):
            extra = decode64(lines.pop(0).removeprefix("extra "), "the extra data")
            if not extra:
                raise _malformed("the extra data is empty: then its line is left out")
        if not lines or not lines[0].startswith("index ") or len(lines) > MAX_PATH + 1:
            raise _malformed(f"it has no index, or a path of more than {MAX_PATH} hashes")
        index = decimal(lines[0].removeprefix("index "), "the index", MAX_SIZE)
        path = tuple(decode64(line, "a hash of the path") for line in lines[1:])
        checkpoint.parse(signed)
        try:
            return cls(index, path, signed, extra)
        except LedgerError as error:
            raise _malformed(error.problem) from None

    def verify(
        self,
        leaf: bytes,
        keys: Iterable[NoteKey],
        *,
        origin: str | None = None,
        policy: WitnessPolicy | None = None,
        now: int | None = None,
    ) -> Checkpoint:
        """The checkpoint whose tree has the leaf (the leaf itself, not its hash) at `index`; NotVerified otherwise."""
        head = checkpoint.verify(self.checkpoint, keys, origin=origin, policy=policy, now=now)
        if not verify_inclusion(leaf_hash(leaf), self.index, head.size, self.path, head.root):
            raise NotVerified(
                "ledger.leaf-not-shown",
                f"the leaf is not shown to be leaf {self.index} of {head.size} in {head.origin!r}",
                "give the leaf and the proof that belong together",
            )
        return head


def _malformed(problem: str) -> EncodingError:
    return EncodingError(
        "ledger.malformed-proof", f"malformed proof: {problem}", "ask the ledger for the proof again"
    )
