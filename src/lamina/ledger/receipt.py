"""Receipts that a leaf is in the tree: COSE (RFC 9942) and text (C2SP tlog-proof)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamina import cbor
from lamina.errors import EncodingError, LedgerError, NotVerified
from lamina.ledger import signed_checkpoint
from lamina.ledger.merkle import MAX_TREE_SIZE, is_hash, is_tree_size, leaf_hash, root_from_inclusion, verify_inclusion
from lamina.ledger.signed_checkpoint import RECEIPT_TYPE, LedgerCheckpoint, TreeSignature, protected_header
from lamina.sign.keys import ALGORITHMS, PublicKey
from lamina.sign.notes import MAX_NOTE_BYTES, NoteKey, WitnessQuorum, decode64, encode64, parse_decimal
from lamina.sign.signed_json import sig_structure

# The receipt that a contributor keeps: a signed proof that a leaf is in the tree (RFC 9942, COSE receipts).
#
#     18([ h'protected', {396: {-1: [ h'proof' ]}}, nil, h'signature' ])
#
#     proof = [tree size, leaf index, [hash, …]]; what is protected and signed: `signed_checkpoint.TreeSignature`
#
# The root is not in the receipt: whoever checks it computes the root from the leaf, and only the right leaf gives
# what was signed. A root does not tell the size of its tree, so the size is signed beside it; the index follows from
# size and path. Nothing that is signed is about one leaf: a ledger signs one `TreeSignature` for a tree, and receipts
# of all its leaves are made from it without the key.

MAX_RECEIPT_BYTES = 4096  # a path has 63 hashes at most

_COSE_SIGN1_TAG = 18
_ALG, _KID, _CLAIMS, _TYP, _VDS, _VDP = 1, 4, 15, 16, 395, 396
_ISS, _SUB = 1, 2
_INCLUSION = -1


def make_receipt(signed: TreeSignature, leaf: bytes, index: int, path: Sequence[bytes]) -> bytes:
    """The receipt of the leaf with hash `leaf` at `index`, with its inclusion proof in the signed tree."""
    if signed.size < 2:
        problem = f"the tree has {signed.size} leaf, a receipt needs a path (RFC 9942 §5.2)"
        raise LedgerError("ledger.tree-too-small", problem, "sign a checkpoint of two leaves or more")
    if not verify_inclusion(leaf, index, signed.size, path, signed.root):
        problem = f"the proof does not show leaf {index!r} in the tree of {signed.size} leaves"
        raise LedgerError("ledger.proof-wrong", problem, "make it at this size")
    proof = cbor.encode([signed.size, index, list(path)])
    message = [signed.protected(), {_VDP: {_INCLUSION: [proof]}}, None, signed.signature]
    return cbor.encode(cbor.Tag(number=_COSE_SIGN1_TAG, value=message), null=True, tags=(_COSE_SIGN1_TAG,))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt as it was received. It says something only if `proves` holds."""

    alg: int
    kid: bytes
    origin: str
    size: int
    index: int
    path: tuple[bytes, ...]
    protected: bytes
    signature: bytes

    @classmethod
    def decode(cls, data: bytes) -> Receipt:
        """Read received bytes strictly; EncodingError for anything that is no receipt. Nothing is verified yet."""
        outer = cbor.decode(data, null=True, tags=(_COSE_SIGN1_TAG,), max_depth=5, max_size=MAX_RECEIPT_BYTES)
        if type(outer) is not cbor.Tag or type(outer.value) is not list or len(outer.value) != 4:
            raise _malformed_receipt("it is no COSE_Sign1 message (tag 18 of four items)")
        protected, unprotected, payload, signature = outer.value
        if type(protected) is not bytes or type(signature) is not bytes or len(signature) != 64:
            raise _malformed_receipt("protected header and a signature of 64 bytes must be byte strings")
        if payload is not None:
            raise _malformed_receipt("the payload must be detached (nil): the root is computed, not told")
        alg, kid, origin, size = _read_protected(protected)
        index, path = _read_proof(unprotected, size)
        return cls(alg, kid, origin, size, index, path, protected, signature)

    def proves(self, leaf: bytes, key: PublicKey) -> bool:
        """Whether `key` signed a tree with this leaf (the leaf itself, not its hash) where the receipt says it is."""
        root = root_from_inclusion(leaf_hash(leaf), self.index, self.size, self.path)
        return (
            root is not None and self.kid == key.id and key.verify(sig_structure(self.protected, root), self.signature)
        )


def verify_receipt(data: bytes, leaf: bytes, key: PublicKey, origin: str) -> bool:
    """Whether `data` is a receipt of the ledger `origin`, signed by its `key`, for this leaf. Never raises."""
    try:
        receipt = Receipt.decode(data)
    except EncodingError:
        return False
    return receipt.origin == origin and isinstance(leaf, bytes) and receipt.proves(leaf, key)


def _read_protected(data: bytes) -> tuple[int, bytes, str, int]:
    header = cbor.decode(data, max_depth=2)
    if type(header) is not dict or header.keys() != {_ALG, _KID, _CLAIMS, _TYP, _VDS}:
        raise _malformed_receipt("the protected labels must be 1, 4, 15, 16 and 395")
    alg, kid, claims = header[_ALG], header[_KID], header[_CLAIMS]
    if type(alg) is not int or alg not in ALGORITHMS:
        raise _malformed_receipt(f"algorithm {alg!r} is not allowed, {' and '.join(map(str, ALGORITHMS))} are")
    if type(claims) is not dict or claims.keys() != {_ISS, _SUB} or type(claims[_ISS]) is not str:
        raise _malformed_receipt("the claims must be iss and sub")
    tree, _, digits = str(claims[_SUB]).partition(":")
    size = int(digits) if tree == "tree" and digits.isdecimal() and len(digits) < 20 else 0
    # Made anew from what was read, the header must be the same, byte for byte.
    if not is_hash(kid) or not is_tree_size(size) or data != protected_header(alg, kid, claims[_ISS], size):
        raise _malformed_receipt(f"kid must be 32 bytes, sub tree:SIZE, typ {RECEIPT_TYPE}, and 395 must be 1")
    return alg, kid, claims[_ISS], size


def _read_proof(unprotected: object, size: int) -> tuple[int, tuple[bytes, ...]]:
    match unprotected:
        case {396: {-1: [bytes(blob)], **other}, **more} if not other and not more:
            proof = cbor.decode(blob, max_depth=2)
        case _:
            raise _malformed_receipt("the unprotected header must be one inclusion proof, {396: {-1: [proof]}}")
    match proof:
        case [int(claimed), int(index), [_, *_] as path] if claimed == size and all(map(is_hash, path)):
            if type(claimed) is int and is_tree_size(index):
                return index, tuple(path)
    form = f"[{size}, index, path]"
    raise _malformed_receipt(f"the proof must be {form}, with the size that is signed and a path of hashes")


def _malformed_receipt(problem: str) -> EncodingError:
    problem = f"malformed receipt: {problem}"
    return EncodingError("ledger.receipt-malformed", problem, "ask the ledger for the receipt again")


# The receipt as text (C2SP tlog-proof): index, path, and the checkpoint with all its signatures.
#
#     c2sp.org/tlog-proof@v1
#     extra YWJj                                         ← may be missing; nobody signed it
#     index 73894
#     gSKyXoYZUgZ6jduWYrkDOARinOMGJveXjgMkBTcdPlQ=       ← the inclusion proof, one hash a line, from the leaf up
#                                                        ← an empty line
#     example.org/ledger                                 ← the checkpoint as it was signed
#     …
#
# It says what a COSE receipt says, and carries the cosignatures of witnesses as well.

TLOG_PROOF_HEADER = "c2sp.org/tlog-proof@v1"
MAX_PROOF_HASHES = 63


@dataclass(frozen=True, slots=True)
class TlogProof:
    """A proof that travels with its checkpoint. It says something only if `verify` does not raise."""

    index: int
    path: tuple[bytes, ...]
    checkpoint: str
    extra: bytes = b""

    def __post_init__(self) -> None:
        if not is_tree_size(self.index) or len(self.path) > MAX_PROOF_HASHES or not all(map(is_hash, self.path)):
            problem = f"the proof of leaf {self.index!r} must have at most {MAX_PROOF_HASHES} hashes of 32 bytes"
            raise LedgerError("ledger.proof-invalid", problem, "use Ledger.prove")

    def encode(self) -> str:
        """The text, to be kept in a file that ends with .tlog-proof."""
        extra = [f"extra {encode64(self.extra)}"] if self.extra else []
        lines = [TLOG_PROOF_HEADER, *extra, f"index {self.index}", *map(encode64, self.path)]
        return "\n".join(lines) + "\n\n" + self.checkpoint

    @classmethod
    def parse(cls, data: str | bytes) -> TlogProof:
        """Read the text strictly; EncodingError for anything that is none. Nothing is verified yet."""
        if len(data) > 2 * MAX_NOTE_BYTES:
            raise _malformed_proof(f"it has {len(data)} bytes, at most {2 * MAX_NOTE_BYTES} are read")
        try:
            text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        except UnicodeDecodeError:
            raise _malformed_proof("it is not valid UTF-8") from None
        head, gap, signed = text.partition("\n\n")
        first, *lines = head.split("\n")
        if not gap or first != TLOG_PROOF_HEADER or not lines:
            start = TLOG_PROOF_HEADER
            raise _malformed_proof(f"it does not begin with {start}, or has no checkpoint after an empty line")
        extra = b""
        if lines[0].startswith("extra "):
            extra = decode64(lines.pop(0).removeprefix("extra "), "the extra data")
            if not extra:
                raise _malformed_proof("the extra data is empty: then its line is left out")
        if not lines or not lines[0].startswith("index ") or len(lines) > MAX_PROOF_HASHES + 1:
            raise _malformed_proof(f"it has no index, or a path of more than {MAX_PROOF_HASHES} hashes")
        index = parse_decimal(lines[0].removeprefix("index "), "the index", MAX_TREE_SIZE)
        path = tuple(decode64(line, "a hash of the path") for line in lines[1:])
        signed_checkpoint.parse_checkpoint(signed)
        try:
            return cls(index, path, signed, extra)
        except LedgerError as error:
            raise _malformed_proof(error.problem) from None

    def verify(
        self,
        leaf: bytes,
        keys: Iterable[NoteKey],
        *,
        origin: str | None = None,
        policy: WitnessQuorum | None = None,
        now: int | None = None,
    ) -> LedgerCheckpoint:
        """The checkpoint whose tree has the leaf (the leaf itself, not its hash) at `index`; NotVerified otherwise."""
        head = signed_checkpoint.verify_checkpoint(self.checkpoint, keys, origin=origin, policy=policy, now=now)
        if not verify_inclusion(leaf_hash(leaf), self.index, head.size, self.path, head.root):
            problem = f"the proof does not show this leaf as leaf {self.index} of {head.size} in {head.origin!r}"
            raise NotVerified("ledger.proof-wrong", problem, "give the proof of this leaf")
        return head


def _malformed_proof(problem: str) -> EncodingError:
    return EncodingError("ledger.proof-malformed", f"malformed proof: {problem}", "ask the ledger for the proof again")
