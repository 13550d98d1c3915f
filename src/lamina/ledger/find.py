"""Contributions by what people know of them: a digest, a content anchor, or the number of the leaf."""

from __future__ import annotations

import re

from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import Leaf, decode
from lamina.ledger.records import Admitted
from lamina.ledger.view import View

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MOST = 18  # digits of a leaf


def find(ledger: View, name: str) -> list[Leaf]:
    """The contributions of this descriptor digest, content anchor or subject tag (64 hex digits), or of this leaf.

    The index of the store is asked first. If it knows nothing, all leaves are read: an index is no evidence.
    """
    if name.isascii() and name.isdecimal() and len(name) <= _MOST:
        return [_contribution(ledger, int(name))]
    if _DIGEST.fullmatch(name) is None:
        raise LedgerError(
            f"{name[:80]!r} names no contribution", "give a digest of 64 hex digits, or the number of a leaf"
        )
    digest = bytes.fromhex(name)
    found = [_contribution(ledger, seq) for seq in ledger.find(digest)]
    found = [leaf for leaf in found if _has(leaf, digest)]
    if not found:
        found = [leaf for leaf in map(decode, _holding(ledger, digest)) if _has(leaf, digest)]
    if not found:
        raise LedgerError(
            f"no contribution {name.lower()[:16]}… is in the ledger {ledger.name}",
            "copy the digest again; what was pruned can be proven only by who kept its receipt",
        )
    return found


def _contribution(ledger: View, seq: int) -> Leaf:
    leaf = ledger.leaf(seq)
    if leaf.kind is not Admitted:
        raise LedgerError(
            f"leaf {seq} is no contribution", "lamina ledger show --kind contribution lists them"
        )
    return leaf


def _holding(ledger: View, digest: bytes) -> list[bytes]:
    return [data for _, data in ledger.raws() if digest in data]


def _has(leaf: Leaf, digest: bytes) -> bool:
    record = leaf.record
    return isinstance(record, Admitted) and digest in (record.descriptor, record.anchor, record.subject)
