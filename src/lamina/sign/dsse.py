"""In-toto Statements in a DSSE envelope (https://github.com/secure-systems-lab/dsse)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any

from lamina.errors import EncodingError, NotVerified
from lamina.sign.keys import PrivateKey, PublicKey
from lamina.sign.signed_json import canonical_json, parse_json

# What is signed is the length and the bytes of type and payload.

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
        if type(each) is not dict or each.keys() != {"keyid", "sig"} or type(each["keyid"]) is not str:
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
    problem = f"the DSSE envelope is not as it must be: {problem}"
    return EncodingError("release.envelope-malformed", problem, "fetch it again")
