"""Signed JSON: strict and canonical JSON, and JSON under a COSE signature (RFC 9052).

A key has one role and a signature one meaning: the type of what is signed is part of what is signed, and whoever reads
it names the type that it expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lamina import cbor
from lamina.errors import EncodingError
from lamina.sign.keys import ALGORITHMS, EDDSA, PrivateKey, PublicKey
from lamina.validate import distinct_fields

MAX_STATEMENT_BYTES = 64 << 20  # bytes; a manifest of a model with 10,000 layers takes a few

_COSE_SIGN1_TAG = 18
_ALG, _CONTENT_TYPE, _KID, _TYP = 1, 3, 4, 16
_JSON = "application/json"


def canonical_json(value: Any) -> bytes:
    """JSON for people and for hashes: the same value gives the same bytes. Keys keep their order; no NaN, no Infinity."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def parse_json(data: bytes, what: str) -> Any:
    """Strict JSON: UTF-8, no field twice, no NaN; EncodingError otherwise."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=distinct_fields, parse_constant=refuse)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        said = "it has half a surrogate pair" if isinstance(error, UnicodeError) else error
        problem = f"{what} is no strict JSON: {said}"
        raise EncodingError("release.not-json", problem, "make it again, or fetch it again") from None
    return found


def sign_json(value: Any, key: PrivateKey, typ: str) -> bytes:
    """A COSE_Sign1 message with the JSON of `value` as its payload; `typ` is signed with it (RFC 9596)."""
    return sign_cose(canonical_json(value), key, typ)


def sign_cose(payload: bytes, key: PrivateKey, typ: str) -> bytes:
    """The same over bytes that are JSON already."""
    protected = cbor.encode({_ALG: EDDSA, _CONTENT_TYPE: _JSON, _KID: key.public.id, _TYP: typ})
    message = [protected, {}, payload, key.sign(_to_be_signed(protected, payload))]
    return cbor.encode(
        cbor.Tag(number=_COSE_SIGN1_TAG, value=message), tags=(_COSE_SIGN1_TAG,), max_size=MAX_STATEMENT_BYTES
    )


@dataclass(frozen=True, slots=True)
class SignedPayload:
    """A payload as it was received: `kid` is the id of the key that is said to have signed it."""

    kid: bytes
    payload: bytes
    message: bytes
    signature: bytes

    def by(self, keys: Iterable[PublicKey]) -> PublicKey | None:
        """The one of these keys that signed it."""
        return next((key for key in keys if key.id == self.kid and key.verify(self.message, self.signature)), None)


def read_cose(data: bytes, typ: str) -> SignedPayload:
    """Read a COSE_Sign1 message of this type strictly; EncodingError for anything else. Nothing is verified yet."""
    outer = cbor.decode(data, tags=(_COSE_SIGN1_TAG,), max_depth=3, max_size=MAX_STATEMENT_BYTES)
    if type(outer) is not cbor.Tag or type(outer.value) is not list or len(outer.value) != 4:
        raise _malformed("it is no COSE_Sign1 message (tag 18 of four items)")
    protected, unprotected, payload, signature = outer.value
    if [type(each) for each in outer.value] != [bytes, dict, bytes, bytes] or unprotected or len(signature) != 64:
        raise _malformed("it must have a protected header, no other, a payload and a signature of 64 bytes")
    header = cbor.decode(protected)
    if type(header) is not dict or header.keys() != {_ALG, _CONTENT_TYPE, _KID, _TYP}:
        raise _malformed("its header must say algorithm, content type, key and type, and nothing else")
    if header[_ALG] not in ALGORITHMS or header[_CONTENT_TYPE] != _JSON:
        raise _malformed(f"its algorithm is {header[_ALG]!r} and its content {header[_CONTENT_TYPE]!r}")
    if type(header[_KID]) is not bytes:
        raise _malformed("the id of its key is no byte string")
    if header[_TYP] != typ:
        raise _malformed(f"it is a {header[_TYP]!r}, expected was a {typ!r}")
    return SignedPayload(header[_KID], payload, _to_be_signed(protected, payload), signature)


def sig_structure(protected: bytes, digest: bytes) -> bytes:
    """The Sig_structure of RFC 9052 §4.4: ["Signature1", protected, external_aad = h'', payload]."""
    size = len(protected)
    assert len(digest) == 32 and 24 <= size < 2**16
    head = bytes((0x58, size)) if size < 256 else bytes((0x59, size >> 8, size & 0xFF))
    return b"\x84\x6aSignature1" + head + protected + b"\x40\x58\x20" + digest


def _to_be_signed(protected: bytes, payload: bytes) -> bytes:
    """The Sig_structure of RFC 9052 §4.4."""
    return cbor.encode(["Signature1", protected, b"", payload], max_size=MAX_STATEMENT_BYTES + 4096)


def _malformed(problem: str) -> EncodingError:
    return EncodingError("release.cose-malformed", f"the signed file is not as it must be: {problem}", "fetch it again")
