"""An Ed25519 seed as PKCS#8 in PEM, encrypted with a passphrase (RFC 5958, 8018, 8410).

The library's own writer stretches a passphrase by 2,048 rounds of PBKDF2, which a graphics card tries some million
times a second. This one writes the same structure with 600,000 rounds; every length in it is fixed, so it is a
template with four holes. What reads it is the library, or `openssl pkey`.
"""

from __future__ import annotations

import base64
import os

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.pbkdf2 import PBKDF2HMAC

ROUNDS = 600_000

_PLAIN = bytes.fromhex("302e020100300506032b657004220420")  # version 0, id-Ed25519, the seed follows
_PBES2 = bytes.fromhex(
    "3081a4"  # EncryptedPrivateKeyInfo
    "3060"
    "06092a864886f70d01050d"  # PBES2
    "3053"
    "3032"
    "06092a864886f70d01050c"  # PBKDF2
    "3025"
    "0410"  # salt: 16 bytes
)
_ROUNDS = bytes.fromhex("0203")  # three bytes, the first of them below 0x80
_SCHEME = bytes.fromhex(
    "300c06082a864886f70d02090500"  # HMAC with SHA-256
    "301d"
    "060960864801650304012a"  # AES-256-CBC
    "0410"  # initial vector: 16 bytes
)
_SEALED = bytes.fromhex("0440")  # 48 bytes of key and a block of padding


def plain_pem(seed: bytes) -> bytes:
    """The seed as it is: whoever can read the file has the key."""
    return _pem("PRIVATE KEY", _PLAIN + seed)


def sealed_pem(seed: bytes, passphrase: bytes) -> bytes:
    """The seed under a passphrase."""
    salt, vector = os.urandom(16), os.urandom(16)
    key = PBKDF2HMAC(algorithm=SHA256(), length=32, salt=salt, iterations=ROUNDS).derive(passphrase)
    cipher = Cipher(algorithms.AES(key), modes.CBC(vector)).encryptor()
    sealed = cipher.update(_PLAIN + seed + b"\x10" * 16) + cipher.finalize()
    der = _PBES2 + salt + _ROUNDS + ROUNDS.to_bytes(3, "big") + _SCHEME + vector + _SEALED + sealed
    return _pem("ENCRYPTED PRIVATE KEY", der)


def _pem(label: str, der: bytes) -> bytes:
    text = base64.b64encode(der).decode("ascii")
    lines = [text[i : i + 64] for i in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""]).encode("ascii")
