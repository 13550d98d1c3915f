"""A ledger file changed by somebody who shares no code with the writer: own CBOR, own tree, own signatures, plain SQLite.

It begins with the file of an honest ledger, of which it keeps the header, and puts whatever leaves and bodies it likes
behind them. What it signs it signs with the key of the ledger: the operator himself.
"""

from __future__ import annotations

import base64
import hashlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Row = tuple[bytes, bytes | None]  # a leaf and its body
CONTRIBUTION, EPOCH, AGGREGATE = 2, 3, 6


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def encoded(value: Any) -> bytes:
    """Deterministic CBOR of maps with integer keys: shortest first is the order of their bytes too."""
    return cbor2.dumps(value, canonical=True)


def leaf_of(row: Row) -> bytes:
    return sha(b"\x00" + row[0])


def made(kind: int, seq: int, time: int, epoch: int, body: dict[int, Any], kept: dict[int, Any] | None = None) -> Row:
    """A leaf and its body."""
    data = encoded(body)
    return encoded({1: kind, 2: seq, 3: time, 4: epoch, 5: sha(data), **(kept or {})}), data


def root(hashes: Sequence[bytes]) -> bytes:
    """RFC 6962 §2.1, as it is written there."""
    if len(hashes) < 2:
        return hashes[0] if hashes else sha(b"")
    split = 1
    while 2 * split < len(hashes):
        split *= 2
    return sha(b"\x01" + root(hashes[:split]) + root(hashes[split:]))


def _subtrees(hashes: Sequence[bytes]) -> list[bytes]:
    """The roots of the complete subtrees, from the largest on."""
    found, at = [], 0
    for bit in reversed(range(len(hashes).bit_length())):
        if len(hashes) >> bit & 1:
            found.append(root(hashes[at : at + (1 << bit)]))
            at += 1 << bit
    return found


class HandLedger:
    """The rows of a ledger file, read into memory and written back."""

    def __init__(self, path: str) -> None:
        self.path = path
        with closing(sqlite3.connect(path)) as db:
            self.rows: list[Row] = list(db.execute("SELECT data, body FROM leaf ORDER BY seq"))
        self.header = cbor2.loads(self.rows[0][1] or b"")

    def kept(self, seq: int) -> dict[int, Any]:
        return dict(cbor2.loads(self.rows[seq][0]))

    def body(self, seq: int) -> dict[int, Any]:
        return dict(cbor2.loads(self.rows[seq][1] or b""))

    def prune(self, *seqs: int) -> None:
        """Drop bodies, of whatever they are."""
        for seq in seqs:
            self.rows[seq] = (self.rows[seq][0], None)

    def append(self, kind: int, body: dict[int, Any], time: int | None = None) -> int:
        """One more leaf at the end."""
        last = self.kept(len(self.rows) - 1)
        epoch = last[4] + (last[1] == EPOCH)
        self.rows.append(made(kind, len(self.rows), last[3] if time is None else time, epoch, body))
        return len(self.rows) - 1

    def aggregate(
        self, first: int, stop: int, horizon: int, classes: Sequence[tuple[str, int, int, int]]
    ) -> dict[int, Any]:
        """The body of an aggregate over leaves [first, stop); classes are (name, count, withdrawn, spend)."""
        totals = [{1: cls, 2: count, 3: withdrawn, 4: spend} for cls, count, withdrawn, spend in classes]
        digest = sha(b"".join(map(leaf_of, self.rows[first:stop])))
        return {1: [{1: first, 2: stop}], 2: horizon, 3: totals, 4: digest, 5: []}

    def write(self, seed: bytes) -> None:
        """Put it all into the file: leaves, tiles, head, what lists leaves, and a checkpoint over everything."""
        hashes = [leaf_of(row) for row in self.rows]
        kinds = [self.kept(seq)[1] for seq in range(len(self.rows))]
        last, size = self.kept(len(self.rows) - 1), len(self.rows)
        with closing(sqlite3.connect(self.path)) as db, db:
            for table in ("leaf", "tile"):
                db.execute(f"DELETE FROM {table}")
            db.executemany("INSERT INTO leaf VALUES (?, ?, ?)", [(seq, *row) for seq, row in enumerate(self.rows)])
            for level in range(3):
                count = size // 256**level
                nodes = [root(hashes[at * 256**level : (at + 1) * 256**level]) for at in range(count)]
                for index in range(-(-count // 256)):
                    data = b"".join(nodes[256 * index : 256 * (index + 1)])
                    db.execute("INSERT INTO tile VALUES (?, ?)", (level << 56 | index, data))
            head = (size, last[3], kinds.count(EPOCH), encoded([size, _subtrees(hashes)]))
            db.execute("UPDATE head SET size = ?, time = ?, epoch = ?, frontier = ?", head)
            db.execute("DELETE FROM checkpoint WHERE size >= ?", (size,))
            db.execute("INSERT INTO checkpoint VALUES (?, ?, ?)", (size, *self._signed(size, root(hashes), seed)))

    def _signed(self, size: int, tree: bytes, seed: bytes) -> tuple[str, bytes]:
        """A checkpoint as a signed note (C2SP), and the signature of the same tree from which receipts are made (COSE)."""
        key, origin = Ed25519PrivateKey.from_private_bytes(seed), self.header[1]
        public = key.public_key().public_bytes_raw()
        text = f"{origin}\n{size}\n{base64.b64encode(tree).decode()}\n"
        note_id = sha(origin.encode() + b"\n\x01" + public)[:4]
        line = base64.b64encode(note_id + key.sign(text.encode())).decode()
        kid = sha(encoded({1: 1, -1: 6, -2: public}))  # RFC 9679
        claims = {1: origin, 2: f"tree:{size}"}
        protected = _in_order({1: -8, 4: kid, 15: claims, 16: "application/lamina-receipt+cose", 395: 1})
        message = cbor2.dumps(["Signature1", protected, b"", tree])
        return f"{text}\n— {origin} {line}\n", kid + key.sign(message)


def _in_order(items: dict[int, Any]) -> bytes:
    return bytes((0xA0 | len(items),)) + b"".join(cbor2.dumps(key) + cbor2.dumps(value) for key, value in items.items())
