"""A key, a descriptor that it may sign, and canonical CBOR by another codec."""

from __future__ import annotations

from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lamina.admit.attestation import Descriptor, commit
from lamina.sign.keys import PrivateKey

SEED = bytes(range(32))
KEY = PrivateKey(Ed25519PrivateKey.from_private_bytes(SEED))
NONCE = bytes(range(100, 116))
VALUES: dict[str, Any] = {  # what a descriptor must say
    "contributor": KEY.public.id,
    "data_class": "ecg",
    "admissibility": "sensitive",
    "clip_norm": 1_000_000,
    "noise_multiplier": 4_224_679,
    "not_before": 1_767_225_600,
    "expires": 1_798_761_600,
    "commitment": commit(NONCE, b"a payload"),
    "items": 12,
    "nonce": NONCE,
    "policy": bytes(range(64, 96)),
    "audience": "example.org/corpus",
}
FULL_VALUES = VALUES | {"profile": "top=0.25", "anchor": bytes(range(96, 128))}  # and all that it may say


def described(**changes: Any) -> Descriptor:
    return Descriptor(**VALUES | changes)


def encoded(value: Any) -> bytes:
    """By another codec, maps in the order of RFC 8949 §4.2.1."""
    if isinstance(value, dict):
        items = sorted((encoded(key), encoded(each)) for key, each in value.items())
        return bytes([0xA0 + len(items)]) + b"".join(key + each for key, each in items)
    if isinstance(value, list):
        return bytes([0x80 + len(value)]) + b"".join(map(encoded, value))
    return cbor2.dumps(value)
