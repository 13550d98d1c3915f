"""Signs releases and certificates with raw keys, and appends records to a ledger file. Nothing here imports lamina.

It uses json, cbor2, `cryptography` and plain SQL, as any holder of a key could.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from hand_ledger import HandLedger

RELEASE, RUN_BEGIN, RUN_END = 8, 10, 11
IN_TOTO = "application/vnd.in-toto+json"
Change = Callable[[dict[str, Any]], object]


def seed_of(pem: Path) -> bytes:
    """The private bytes of an unsealed key file."""
    key = load_pem_private_key(pem.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    return key.private_bytes_raw()


def point(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def key_id(seed: bytes) -> bytes:
    """RFC 9679."""
    return hashlib.sha256(bytes.fromhex("a301012006215820") + point(seed)).digest()


def written(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def statement(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.b64decode(json.loads((folder / "manifest.json").read_text())["payload"]))
    return found


def cose(payload: bytes, seed: bytes, typ: str) -> bytes:
    """COSE_Sign1 over a payload (RFC 9052 §4.4)."""
    protected = cbor2.dumps({1: -8, 3: "application/json", 4: key_id(seed), 16: typ}, canonical=True)
    signature = Ed25519PrivateKey.from_private_bytes(seed).sign(cbor2.dumps(["Signature1", protected, b"", payload]))
    return cbor2.dumps(cbor2.CBORTag(18, [protected, {}, payload, signature]))


def forge(folder: Path, seed: bytes, *, certificate: Change | None = None, predicate: Change | None = None) -> None:
    """Change the certificate and the manifest of a release, and sign both with this key; digests follow the files."""
    content = json.loads((folder / "certificate.json").read_text())
    if certificate is not None:
        certificate(content)
    payload, kid = written(content), key_id(seed)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    (folder / "certificate.json").write_bytes(payload)
    (folder / "certificate.cose").write_bytes(cose(payload, seed, "application/lamina-certificate+json"))
    made = statement(folder)
    made["predicate"]["signer"] = point(seed).hex()
    if predicate is not None:
        predicate(made["predicate"])
    for subject in made["subject"]:
        subject["digest"]["sha256"] = hashlib.sha256((folder / subject["name"]).read_bytes()).hexdigest()
    body = written(made)
    message = b"DSSEv1 %d %s %d %s" % (len(IN_TOTO), IN_TOTO.encode(), len(body), body)
    signed = [{"keyid": kid.hex(), "sig": base64.b64encode(key.sign(message)).decode()}]
    envelope = {"payload": base64.b64encode(body).decode(), "payloadType": IN_TOTO, "signatures": signed}
    (folder / "manifest.json").write_bytes(written(envelope))


def record_release(ledger: Path, folder: Path, seed: bytes) -> int:
    """Append the release record of a folder to the ledger, with its manifest, signed with the ledger's key; its leaf."""
    data = (folder / "manifest.json").read_bytes()
    digest, predicate = hashlib.sha256(data).digest(), statement(folder)["predicate"]
    hand = HandLedger(str(ledger))
    until = 4_000_000_000
    seq = hand.append(RELEASE, {1: digest, 2: [bytes.fromhex(run) for run in predicate["runs"]], 3: until})
    hand.write(seed)
    with closing(sqlite3.connect(ledger)) as db, db:
        db.execute("INSERT OR REPLACE INTO blob VALUES (?, ?)", (digest, data))
    return seq


def append(ledger: Path, kind: int, body: dict[int, Any], seed: bytes) -> int:
    """Append any record, signed with the ledger's key; its leaf."""
    hand = HandLedger(str(ledger))
    seq = hand.append(kind, body)
    hand.write(seed)
    return seq


def last(ledger: Path, kind: int) -> dict[int, Any]:
    """The body of the newest record of a kind."""
    hand = HandLedger(str(ledger))
    return next(hand.body(seq) for seq in reversed(range(len(hand.rows))) if hand.kept(seq)[1] == kind)


def cut(ledger: Path, kind: int, seed: bytes) -> None:
    """Remove the newest record of a kind, which must be the last leaf, and sign the remaining leaves."""
    hand = HandLedger(str(ledger))
    assert hand.kept(len(hand.rows) - 1)[1] == kind
    hand.rows.pop()
    with closing(sqlite3.connect(ledger)) as db, db:
        db.execute("DELETE FROM meta WHERE name IN ('written', 'signing', 'open')")
        db.execute("DELETE FROM checkpoint WHERE size >= ?", (len(hand.rows),))
    hand.write(seed)
