"""What ties an attestation to data without showing it: a salted digest, and a keyed tag of who it is about."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from pathlib import Path

from lamina.errors import AdmissionError

NONCE_BYTES = 16
_CHUNK = 1 << 20


def commit(nonce: bytes, payload: bytes | Path) -> bytes:
    """SHA-256(nonce ‖ payload bytes). The nonce of the descriptor is the salt: one secret, 16 bytes, never published.

    >>> commit(bytes(16), b"abc").hex()[:16]
    '277e7ff6d232b976'
    """
    if len(nonce) != NONCE_BYTES:
        raise AdmissionError(
            "admit.nonce-bytes", f"the nonce has {len(nonce)} bytes, must have {NONCE_BYTES}", "draw it anew"
        )
    if isinstance(payload, bytes):
        return hashlib.sha256(nonce + payload).digest()
    digest = hashlib.sha256(nonce)
    try:
        with open(payload, "rb", buffering=0) as file:
            while part := file.read(_CHUNK):
                digest.update(part)
    except OSError as error:
        raise AdmissionError(
            "admit.payload-not-read",
            f"the payload '{payload}' cannot be read: {error.strerror}",
            "give the file that is contributed",
        ) from None
    return digest.digest()


def subject_tag(key: bytes, subject: str) -> str:
    """HMAC-SHA-256 of who the data is about, in hexadecimal; spaces around it and ways to write an accent do not count.

    Two contributions about one person carry the same tag, and nobody without the key can guess a name from it.
    """
    if len(key) < 16:
        raise AdmissionError(
            "admit.subject-key-bytes",
            f"the subject key has {len(key)} bytes, at least 16 are needed",
            "draw 32 at random, keep them secret",
        )
    name = unicodedata.normalize("NFC", subject.strip())
    if not name:
        raise AdmissionError(
            "admit.subject-empty", "the subject is empty", "name whom the data is about, or give no subject"
        )
    return hmac.new(key, name.encode("utf-8", "surrogatepass"), "sha256").hexdigest()
