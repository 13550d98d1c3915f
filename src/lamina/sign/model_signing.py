"""The OpenSSF model-signing bundle of a release: a second signature over all its files, for `model_signing verify key`.

A Sigstore bundle (v0.3) that holds a DSSE envelope with an in-toto Statement: one subject, the model, whose digest is the
SHA-256 over the digests of all files in the order of their names; the files stand in the predicate. The signature is ECDSA
on the curve P-256. The manifest of the release holds the public key, so whoever trusts the release key trusts the bundle.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from lamina.errors import LaminaError, NotVerified
from lamina.sign.dsse import IN_TOTO, dsse_message, make_statement
from lamina.sign.keys import P256Key, p256_verifies
from lamina.sign.signed_json import canonical_json, parse_json

MODEL_SIGNATURE = "model.sig"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def sign_model(name: str, digests: Mapping[str, str], key: P256Key) -> bytes:
    """The bundle over a model with these files, by name and SHA-256."""
    payload = _payload(name, digests)
    return _bundle(payload, key.sign(dsse_message(IN_TOTO, payload)), key.public_pem)


def check_model_signature(data: bytes, name: str, digests: Mapping[str, str], public_pem: bytes) -> None:
    """NotVerified unless these bytes are the bundle over exactly these files by this key."""
    payload = _payload(name, digests)
    try:
        signature = base64.b64decode(parse_json(data, "it")["dsseEnvelope"]["signatures"][0]["sig"])
    except (LaminaError, KeyError, IndexError, TypeError, ValueError):
        signature = b""
    made_so = data == _bundle(payload, signature, public_pem)
    if not made_so or not p256_verifies(public_pem, dsse_message(IN_TOTO, payload), signature):
        problem = "it is not the signature over these files by the key that the manifest names"
        raise NotVerified("release.model-signature-wrong", problem, "fetch the release again")


def _payload(name: str, digests: Mapping[str, str]) -> bytes:
    files = [{"name": each, "algorithm": "sha256", "digest": digests[each]} for each in sorted(digests)]
    root = hashlib.sha256(b"".join(bytes.fromhex(each["digest"]) for each in files)).hexdigest()
    how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [MODEL_SIGNATURE]}
    return canonical_json(make_statement({name: root}, _PREDICATE_TYPE, {"serialization": how, "resources": files}))


def _bundle(payload: bytes, signature: bytes, public_pem: bytes) -> bytes:
    made: dict[str, Any] = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(public_pem).hexdigest()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": IN_TOTO,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return canonical_json(made)
