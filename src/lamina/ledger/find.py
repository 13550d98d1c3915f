"""Contributions by what people know of them: a digest or its first digits, a content anchor, the number of the leaf."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import Leaf, decode
from lamina.ledger.records import Admitted
from lamina.ledger.view import View

SHORT = 8  # hex digits of a digest that are enough, if nobody else's begins with them
_HEX = re.compile(r"[0-9a-f]{8,64}")
_WHOLE = 64
_MOST = 18  # digits of a leaf
_LISTED = 5  # of several that a name could be


def find(ledger: View, name: str) -> list[Leaf]:
    """The contributions of this descriptor digest or content anchor (64 hex digits, or the first 8 or more), of this
    subject tag (64 hex digits), or of this leaf.

    First digits must be those of one digest alone. The index of the store is asked first. If it knows nothing, all
    leaves are read: an index is no evidence.
    """
    number = _number(ledger, name)
    return _named(ledger, name) if number is None else [_contribution(ledger, number)]


def find_one(ledger: View, name: str) -> int:
    """One leaf: of any kind by its number, a contribution as `find` does."""
    number = _number(ledger, name)
    if number is not None:
        return number
    found = _named(ledger, name)
    if len(found) > 1:
        listed = ", ".join(str(leaf.seq) for leaf in found[:_LISTED]) + (
            ", …" if len(found) > _LISTED else ""
        )
        raise LedgerError(
            "ledger.contributions-digest-leaves",
            f"{len(found)} contributions have the digest {name.lower()[:16]}…: leaves {listed}",
            "give the number of one leaf",
        )
    return found[0].seq


def _number(ledger: View, name: str) -> int | None:
    """The leaf that a name is the number of. Long numbers may be the first digits of a digest, and never mean both."""
    if not (name.isascii() and name.isdecimal() and len(name) <= _MOST):
        return None
    number = int(name)
    if len(name) < SHORT:
        return number
    if name[0] == "0" or number >= ledger.size:
        return None
    if found := _indexed(ledger, name):
        raise _ambiguous(name, [f"leaf {number}", *_listed(found, name)])
    return number


def _named(ledger: View, name: str) -> list[Leaf]:
    digits = name.lower()
    if _HEX.fullmatch(digits) is None:
        raise LedgerError(
            "ledger.names-no-contribution",
            f"{name[:80]!r} names no contribution",
            f"give its folder, its digest ({_WHOLE} hex digits, or its first {SHORT} or more), or its leaf",
        )
    found = _whole(ledger, bytes.fromhex(digits)) if len(digits) == _WHOLE else _beginning(ledger, digits)
    if not found:
        raise LedgerError(
            "ledger.no-contribution-ledger",
            f"no contribution {digits[:16]}{'…' if len(digits) > 16 else ''} is in the ledger {ledger.name}",
            "copy the digest again; what was pruned can be proven only by who kept its receipt",
        )
    if len(listed := _listed(found, digits)) > 1:
        raise _ambiguous(digits, listed)
    return found


def _whole(ledger: View, digest: bytes) -> list[Leaf]:
    found = [_contribution(ledger, seq) for seq in ledger.find(digest)]
    found = [leaf for leaf in found if digest in _digests(leaf)]
    return found or [leaf for leaf in _holding(ledger, digest) if digest in _digests(leaf)]


def _beginning(ledger: View, digits: str) -> list[Leaf]:
    """Those of which a digest begins so."""
    part = bytes.fromhex(digits[: len(digits) // 2 * 2])
    return _indexed(ledger, digits) or [leaf for leaf in _holding(ledger, part) if _begun(leaf, digits)]


def _indexed(ledger: View, digits: str) -> list[Leaf]:
    found = (_contribution(ledger, seq) for seq in ledger.beginning(digits, _LISTED + 1))
    return [leaf for leaf in found if _begun(leaf, digits)]


def _begun(leaf: Leaf, digits: str) -> list[str]:
    """Its descriptor or anchor, if one begins so. A subject's tag is given whole: it is about a person."""
    return [each.hex() for each in _digests(leaf)[:2] if each is not None and each.hex().startswith(digits)]


def _listed(found: list[Leaf], digits: str) -> list[str]:
    """The digests that begin so, each with a leaf."""
    known: dict[str, Leaf] = {}
    for leaf in found:
        for digest in _begun(leaf, digits):
            known.setdefault(digest, leaf)
    return [f"{digest} (leaf {leaf.seq})" for digest, leaf in known.items()]


def _ambiguous(name: str, listed: list[str]) -> LedgerError:
    more = ", …" if len(listed) > _LISTED else ""
    return LedgerError(
        "ledger.could-things",
        f"{name!r} could be {'more than ' if more else ''}{min(len(listed), _LISTED)} things: "
        f"{', '.join(listed[:_LISTED])}{more}",
        "give more digits",
    )


def _contribution(ledger: View, seq: int) -> Leaf:
    leaf = ledger.leaf(seq)
    if leaf.kind is not Admitted:
        raise LedgerError(
            "ledger.leaf-no-contribution",
            f"leaf {seq} is no contribution",
            "lamina ledger show --kind contribution lists them",
        )
    return leaf


def _holding(ledger: View, part: bytes) -> Iterator[Leaf]:
    return (decode(data) for _, data in ledger.raws() if part in data)


def _digests(leaf: Leaf) -> tuple[bytes | None, ...]:
    record = leaf.record
    return (record.descriptor, record.anchor, record.subject) if isinstance(record, Admitted) else ()
