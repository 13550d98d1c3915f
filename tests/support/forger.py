"""A forger who knows the format and not our code: writes leaves, trees and authorizations into a file of its own hand.

CBOR is cbor2's, hashes are hashlib's, signatures are of `cryptography`, SQL is plain. Nothing here imports lamina.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from keyless import rows_of

KEYS, POLICY, TERMS = 5, 7, 9  # kinds of governing records
_PLACE_OF_AUTHORIZATION = {KEYS: 2, POLICY: 4, TERMS: 3}
_TILE = 256


def cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def point(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def key_id(seed: bytes) -> bytes:
    return sha256(bytes.fromhex("a301012006215820"), point(seed))


def signed(seed: bytes, message: bytes) -> dict[int, bytes]:
    return {1: key_id(seed), 2: Ed25519PrivateKey.from_private_bytes(seed).sign(message)}


def subtrees(hashes: Sequence[bytes]) -> list[bytes]:
    """Roots of the complete subtrees, left to right."""
    found, first = [], 0
    while first < len(hashes):
        size = 1 << (len(hashes) - first).bit_length() - 1
        found.append(root(hashes[first : first + size]))
        first += size
    return found


def root(hashes: Sequence[bytes]) -> bytes:
    """RFC 6962 §2.1."""
    if len(hashes) <= 1:
        return hashes[0] if hashes else sha256()
    left = 1 << (len(hashes) - 1).bit_length() - 1
    return sha256(b"\x01", root(hashes[:left]), root(hashes[left:]))


class Forger:
    """Writes into a ledger of fewer than 256 leaves, past its keeper. `path` is a file or the address of a schema."""

    def __init__(self, path: str) -> None:
        self.path = path

    def sql(self, statement: str, *values: Any) -> list[Any]:
        return rows_of(self.path, statement, *values)

    @property
    def leaves(self) -> list[bytes]:
        return [bytes(data) for (data,) in self.sql("SELECT data FROM leaf ORDER BY seq")]

    @property
    def hashes(self) -> list[bytes]:
        return [sha256(b"\x00", data) for data in self.leaves]

    def last_governing(self) -> bytes:
        """The hash of the leaf that the next governing record must name."""
        kinds = [cbor2.loads(data)[1] for data in self.leaves]
        return [one for kind, one in zip(kinds, self.hashes, strict=True) if kind in (1, KEYS, POLICY, TERMS)][-1]

    def leave(self, **changes: Any) -> dict[int, Any]:
        """An authorization as it must be, without signatures; `changes` by name."""
        ((size, text),) = self.sql("SELECT size, text FROM checkpoint ORDER BY size DESC LIMIT 1")
        right = {
            "header": self.hashes[0], "previous": self.last_governing(), "size": size, "root": root(self.hashes[:size]),
            "expires": cbor2.loads(self.leaves[-1])[3] + 1000,
        }  # fmt: skip
        assert str(size) == text.split("\n")[1]
        assert changes.keys() <= right.keys()
        return dict(enumerate((right | changes).values(), start=1))

    def governing(self, kind: int, change: dict[int, Any], *seeds: bytes, kind_signed: int | None = None,
                  signed_change: dict[int, Any] | None = None, **leave: Any) -> dict[int, Any]:  # fmt: skip
        """The body of a governing record that these keys signed, perhaps over something else."""
        place, given = _PLACE_OF_AUTHORIZATION[kind], self.leave(**leave)
        whole = {**(signed_change or change), place: {**given, 6: []}}
        message = b"lamina/governing-record/1\n" + cbor([kind_signed or kind, whole])
        return {**change, place: {**given, 6: [signed(seed, message) for seed in seeds]}}

    def cosign(self, seed: bytes, name: str, time: int) -> None:
        """Put the cosignature of a witness under the newest checkpoint (C2SP tlog-cosignature, v1)."""
        ((size, text),) = self.sql("SELECT size, text FROM checkpoint ORDER BY size DESC LIMIT 1")
        body = text.split("\n\n")[0] + "\n"
        value = Ed25519PrivateKey.from_private_bytes(seed).sign(f"cosignature/v1\ntime {time}\n{body}".encode())
        number = sha256(name.encode(), b"\n\x04", point(seed))[:4]
        line = base64.b64encode(number + time.to_bytes(8, "big") + value).decode()
        self.sql("UPDATE checkpoint SET text = ? WHERE size = ?", f"{text}— {name} {line}\n", size)

    def append(self, kind: int, body: dict[int, Any], *, kept: dict[int, Any] | None = None) -> int:
        """Write a leaf, which keeps some fields, its body, and tree, tiles and head as they must be; its number."""
        seq, (time, epochs) = len(self.leaves), self.sql("SELECT time, epoch FROM head")[0]
        beside = cbor(body)
        data = cbor({1: kind, 2: seq, 3: time, 4: epochs, 5: sha256(beside), **(kept or {})})
        hashes = [*self.hashes, sha256(b"\x00", data)]
        assert len(hashes) < _TILE
        self.sql("INSERT INTO leaf (seq, data, body) VALUES (?, ?, ?)", seq, data, beside)
        replace = "INSERT INTO tile (id, data) VALUES (0, ?) ON CONFLICT (id) DO UPDATE SET data = excluded.data"
        self.sql(replace, b"".join(hashes))
        self.sql("UPDATE head SET size = ?, frontier = ?", len(hashes), cbor([len(hashes), subtrees(hashes)]))
        return seq


def key(seed: bytes, role: int, name: str) -> dict[int, Any]:
    return {1: name, 2: point(seed), 3: role, 4: 0}


def add(seed: bytes, role: int, name: str, since: int) -> dict[int, Any]:
    return {1: 1, 2: key(seed, role, name), 4: since}


def rotate(old: bytes, seed: bytes, role: int, name: str, since: int) -> dict[int, Any]:
    return {1: 2, 2: key(seed, role, name), 3: key_id(old), 4: since}
