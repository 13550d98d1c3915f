"""A check of a contributor's statement by docs/ledger-format.md alone: hashlib, Ed25519, and nothing of Lamina."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

STATEMENT = "application/lamina-contributor-statement+json"


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """One CBOR item, and where it ends."""
    major, low, at = data[at] >> 5, data[at] & 31, at + 1
    if major == 7:
        return {20: False, 21: True, 22: None}[low], at
    width = {24: 1, 25: 2, 26: 4, 27: 8}.get(low, 0)
    number, at = (int.from_bytes(data[at : at + width], "big") if width else low), at + width
    if major < 2:
        return (number if major == 0 else -1 - number), at
    if major < 4:
        raw = data[at : at + number]
        return (raw if major == 2 else raw.decode()), at + number
    if major == 6:
        return unpack(data, at)
    items = []
    for _ in range(number * (major - 3)):
        item, at = unpack(data, at)
        items.append(item)
    return (items if major == 4 else dict(zip(items[::2], items[1::2], strict=True))), at


def head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    width = next(w for w in (1, 2, 4, 8) if number < 256**w)
    return bytes([major << 5 | 23 + width.bit_length()]) + number.to_bytes(width, "big")


def to_be_signed(protected: bytes, payload: bytes) -> bytes:
    """["Signature1", protected, h'', payload]"""
    parts = [head(3, 10) + b"Signature1", *(head(2, len(part)) + part for part in (protected, b"", payload))]
    return head(4, 4) + b"".join(parts)


def thumbprint(x: bytes) -> bytes:
    """RFC 9679: SHA-256 of the COSE key {1: 1, -1: 6, -2: x}."""
    return hashlib.sha256(b"\xa3\x01\x01\x20\x06\x21" + head(2, 32) + x).digest()


def root_of(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 9162, 2.1.3.2."""
    assert 0 <= index < size
    at, last, found = index, size - 1, hashlib.sha256(b"\0" + leaf).digest()
    for sibling in path:
        assert last
        if at & 1 or at == last:
            found = hashlib.sha256(b"\1" + sibling + found).digest()
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            found = hashlib.sha256(b"\1" + found + sibling).digest()
        at, last = at >> 1, last >> 1
    assert not last
    return found


def check(data: bytes, x: bytes, origin: str) -> tuple[dict[str, Any], dict[int, tuple[dict[int, Any], Any]]]:
    """The statement, and (leaf, body) of every leaf that it proves, both as CBOR maps; raises for anything that is wrong."""
    key = Ed25519PublicKey.from_public_bytes(x)
    # 1. the signature of the file
    (protected, unprotected, payload, signature), end = unpack(data)
    header = unpack(protected)[0]
    assert end == len(data) and not unprotected
    assert (header[1], header[3], header[4], header[16]) == (-8, "application/json", thumbprint(x), STATEMENT)
    key.verify(signature, to_be_signed(protected, payload))
    told = json.loads(payload)
    # 2. the checkpoint
    text, _, lines = told["checkpoint"].partition("\n\n")
    text += "\n"
    said, size, root = text.split("\n")[:3]
    assert said == origin == told["ledger"]["origin"] and int(size) == told["ledger"]["size"]
    assert base64.b64decode(root).hex() == told["ledger"]["root"]
    key_id = hashlib.sha256(origin.encode() + b"\n\x01" + x).digest()[:4]
    own = [line for line in lines.splitlines() if line.startswith(f"— {origin} ")]
    (mine,) = (raw for line in own if (raw := base64.b64decode(line.split(" ")[2]))[:4] == key_id)
    key.verify(mine[4:], text.encode())
    # 3. the receipts
    leaves: dict[int, tuple[dict[int, Any], Any]] = {}
    for each in told["receipts"]:
        leaf, receipt = base64.b64decode(each["leaf"]), base64.b64decode(each["receipt"])
        (inner, proof, detached, seal), _ = unpack(receipt)
        count, index, path = unpack(proof[396][-1][0])[0]
        assert detached is None and (count, index) == (int(size), each["index"])
        assert unpack(inner)[0][15] == {1: origin, 2: f"tree:{size}"}
        computed = root_of(leaf, index, count, path)
        assert computed == base64.b64decode(root)
        key.verify(seal, to_be_signed(inner, computed))
        kept, body = unpack(leaf)[0], None if each["body"] is None else base64.b64decode(each["body"])
        assert kept[2] == index and (body is None or hashlib.sha256(body).digest() == kept[5])
        leaves[index] = kept, None if body is None else unpack(body)[0]
    # 4. the facts that leaves prove
    contribution, gone = told["contribution"], told["withdrawn"]
    assert contribution["descriptor"] == leaves[contribution["index"]][0][6].hex()
    stated = {contribution["index"], *(each["index"] for each in told["events"] + told["releases"])}
    assert set(leaves) == stated | ({gone["index"]} if gone else set())
    assert gone is None or leaves[gone["index"]][1][1] == contribution["index"]  # field 1 of a withdrawal is its target
    return told, leaves
