"""A stranger with pycose: checks or makes attestations. Runs in an environment of its own, without Lamina.

Reads a JSON list of requests from standard input, writes one of answers to standard output.
"""

import json
import sys

from pycose.algorithms import EdDSA
from pycose.headers import KID, Algorithm
from pycose.keys import CoseKey, OKPKey
from pycose.keys.curves import Ed25519
from pycose.messages import CoseMessage, Sign1Message


def verify(asked: dict) -> dict:
    message = CoseMessage.decode(bytes.fromhex(asked["attestation"]))
    message.key = CoseKey.decode(bytes.fromhex(asked["key"]))
    claims = message.phdr[15]
    return {
        "verified": message.verify_signature(detached_payload=bytes.fromhex(asked["digest"])),
        "kind": type(message).__name__,
        "alg": message.phdr[Algorithm].identifier,
        "kid": message.phdr[KID].hex(),
        "claims": {str(key): value.hex() if isinstance(value, bytes) else value for key, value in claims.items()},
        "typ": message.phdr[16],
        "hash": message.phdr[258],
        "content": message.phdr[259],
        "unprotected": len(message.uhdr),
        "detached": message.payload is None,
    }


def sign(asked: dict) -> dict:
    header = {
        Algorithm: EdDSA,
        KID: bytes.fromhex(asked["kid"]),
        15: {
            1: asked["iss"],
            2: asked["sub"],
            3: asked["aud"],
            4: asked["exp"],
            5: asked["nbf"],
            6: asked["iat"],
            7: bytes.fromhex(asked["cti"]),
            **dict(asked["terms"]),
            **({-65543: bytes.fromhex(asked["anchor"])} if asked["anchor"] else {}),
        },
        16: asked["typ"],
        258: -16,
        259: asked["content"],
    }
    message = Sign1Message(phdr=header)
    message.key = OKPKey(crv=Ed25519, x=bytes.fromhex(asked["x"]), d=bytes.fromhex(asked["d"]))
    return {"attestation": message.encode(detached_payload=bytes.fromhex(asked["digest"])).hex()}


ACTIONS = {"verify": verify, "sign": sign}
json.dump([ACTIONS[asked["action"]](asked) for asked in json.load(sys.stdin)], sys.stdout)
