"""Signed statements: JSON under a COSE signature (RFC 9052), and in-toto Statements in a DSSE envelope.

A key has one role and a signature one meaning: the type of what is signed is part of what is signed, and whoever reads
it names the type that it expects.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lamina import cbor
from lamina.admit.keys import ALGORITHMS, EDDSA, PrivateKey, PublicKey
from lamina.errors import EncodingError, NotVerified
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
    if header[_TYP] != typ:
        raise _malformed(f"it is a {header[_TYP]!r}, expected was a {typ!r}")
    return SignedPayload(header[_KID], payload, _to_be_signed(protected, payload), signature)


def _to_be_signed(protected: bytes, payload: bytes) -> bytes:
    """The Sig_structure of RFC 9052 §4.4."""
    return cbor.encode(["Signature1", protected, b"", payload], max_size=MAX_STATEMENT_BYTES + 4096)


def _malformed(problem: str) -> EncodingError:
    return EncodingError("release.cose-malformed", f"the signed file is not as it must be: {problem}", "fetch it again")


# DSSE: what is signed is the length and the bytes of type and payload (https://github.com/secure-systems-lab/dsse).

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
IN_TOTO = "application/vnd.in-toto+json"
_ENVELOPE_FIELDS = {"payload", "payloadType", "signatures"}


def make_statement(subjects: Mapping[str, str], predicate_type: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """An in-toto Statement about files, by name and SHA-256."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(subjects.items())],
        "predicateType": predicate_type,
        "predicate": dict(predicate),
    }


def sign_statement(statement: Mapping[str, Any], *keys: PrivateKey) -> bytes:
    """The DSSE envelope of a statement."""
    return canonical_json(_envelope(canonical_json(statement), keys))


def sign_line(statement: Mapping[str, Any], *keys: PrivateKey) -> bytes:
    """The same as one line of ASCII, without its end."""
    payload = json.dumps(statement, separators=(",", ":"), allow_nan=False).encode()
    return json.dumps(_envelope(payload, keys), separators=(",", ":")).encode()


def _envelope(payload: bytes, keys: Iterable[PrivateKey]) -> dict[str, Any]:
    message = dsse_message(IN_TOTO, payload)
    signatures = [{"keyid": key.public.name, "sig": _base64(key.sign(message))} for key in keys]
    return {"payload": _base64(payload), "payloadType": IN_TOTO, "signatures": signatures}


def dsse_message(payload_type: str, payload: bytes) -> bytes:
    """PAE, the pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def read_statement(
    data: bytes, keys: Iterable[PublicKey], predicate_type: str
) -> tuple[dict[str, Any], PublicKey | None]:
    """The statement in an envelope, and the key among `keys` that signed it; None if none of them did.

    A signature that is there and does not hold is refused, whosever key it names.
    """
    envelope = parse_json(data, "the envelope")
    if type(envelope) is not dict or envelope.keys() != _ENVELOPE_FIELDS or envelope["payloadType"] != IN_TOTO:
        raise _not_an_envelope(f"it must have {', '.join(sorted(_ENVELOPE_FIELDS))} and hold an in-toto statement")
    payload = _from_base64(envelope["payload"])
    message, known, found = dsse_message(IN_TOTO, payload), {key.name: key for key in keys}, None
    signatures = envelope["signatures"]
    if type(signatures) is not list or not 0 < len(signatures) <= 16:
        raise _not_an_envelope("it must have one to sixteen signatures")
    for each in signatures:
        if type(each) is not dict or each.keys() != {"keyid", "sig"}:
            raise _not_an_envelope("each signature must have keyid and sig")
        key, value = known.get(each["keyid"]), _from_base64(each["sig"])
        if key is not None and not key.verify(message, value):
            problem = f"the signature by key {key.name[:16]} does not hold: the envelope was changed"
            raise NotVerified("release.signature-wrong", problem, "fetch the release again")
        found = found or key
    statement = parse_json(payload, "the statement")
    if type(statement) is not dict or statement.keys() != {"_type", "subject", "predicateType", "predicate"}:
        raise _not_an_envelope("its payload is no in-toto statement")
    if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, predicate_type):
        raise _not_an_envelope(f"it states a {statement['predicateType']!r}, expected was {predicate_type!r}")
    return statement, found


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: object) -> bytes:
    try:
        data = base64.b64decode(text if type(text) is str else b"!", validate=True)
    except (binascii.Error, ValueError):
        raise _not_an_envelope("it has text that is no base64") from None
    if _base64(data) != text:
        raise _not_an_envelope("it has base64 that is not canonical")
    return data


def _not_an_envelope(problem: str) -> EncodingError:
    return EncodingError(
        "release.envelope-malformed", f"the DSSE envelope is not as it must be: {problem}", "fetch it again"
    )
