"""The attestation: a detached COSE_Sign1 signature over the digest of a descriptor.

    18([ h'protected', {}, nil, h'signature' ])           RFC 9052 §4.2, payload detached

The payload is SHA-256(descriptor): a hash envelope, which the protected labels 258 and 259 declare (RFC 9995). Claims
about who, for whom and when are CWT claims in label 15 (RFC 9597); `typ` (RFC 9596) keeps a signature that was made
for something else from passing as an attestation. Nothing stands in the unprotected map.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from lamina import cbor
from lamina.admit.commitment import NONCE_BYTES
from lamina.admit.descriptor import MAX_AUDIENCE, Descriptor
from lamina.admit.key import ALGORITHMS, EDDSA, PrivateKey, PublicKey
from lamina.admit.pattern import BYTES_16, BYTES_32, LENGTH, NUMBER, exactly, length, number, pattern
from lamina.admit.times import LAST
from lamina.errors import AdmissionError, EncodingError, WrongAlgorithm

MAX_ATTESTATION = 1024
TYPE = "application/lamina-attestation+cose"
CONTENT = "application/lamina-descriptor+cbor"

_TAG = 18
_ALG, _KID, _CLAIMS, _TYP, _HASH_ALG, _PREIMAGE = 1, 4, 15, 16, 258, 259
_LABELS = (_ALG, _KID, _CLAIMS, _TYP, _HASH_ALG, _PREIMAGE)  # in the order of their encodings
_ISS, _SUB, _AUD, _EXP, _NBF, _IAT, _CTI = 1, 2, 3, 4, 5, 6, 7
_CLAIM_KEYS = (_ISS, _SUB, _AUD, _EXP, _NBF, _IAT, _CTI)
_SHA256 = -16
_CONTRIBUTION, _SUBJECT = "contribution:", "tag:"
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """An attestation as it was received. It says something only if `signed_by` and `agrees` hold.

    `kid` is the thumbprint of the signing key and `iss` the same in hexadecimal; `sub` is "tag:…" with a keyed tag of
    who the data is about, or "contribution:…" with the digest of the descriptor; `cti` is derived from the
    descriptor's nonce and unique for a contribution.
    """

    alg: int
    kid: bytes
    iss: str
    sub: str
    aud: str
    exp: int
    nbf: int
    iat: int
    cti: bytes
    protected: bytes
    signature: bytes

    @classmethod
    def decode(cls, data: bytes) -> Attestation:
        """Read received bytes strictly. Nothing is verified yet."""
        if type(data) is not bytes:
            raise EncodingError(
                "admit.attestation-bytes",
                f"the attestation is {type(data).__name__}, must be bytes",
                "pass what was received",
            )
        if len(data) > MAX_ATTESTATION:
            raise EncodingError(
                "admit.attestation-bytes-allowed",
                f"the attestation has {len(data)} bytes, at most {MAX_ATTESTATION} are allowed",
                "sign with lamina attest",
            )
        protected, signature = usual_parts(data) or _parts(data)
        fields = usual_fields(protected) or _fields(protected)
        return cls(protected=protected, signature=signature, **fields)

    def signed_by(self, key: PublicKey, descriptor_digest: bytes) -> bool:
        """Whether `key` made this attestation for the descriptor with that digest."""
        return self.kid == key.id and key.verify(
            to_be_signed(self.protected, descriptor_digest), self.signature
        )

    def agrees(self, descriptor: Descriptor) -> str | None:
        """None if the claims say what the descriptor says; otherwise what differs."""
        if self.kid != descriptor.contributor:
            return "the key is not the contributor"
        if self.exp != descriptor.expires:
            return f"exp is {self.exp}, the descriptor expires at {descriptor.expires}"
        if self.nbf != descriptor.not_before:
            return f"nbf is {self.nbf}, the descriptor begins at {descriptor.not_before}"
        if self.aud != descriptor.audience:
            return "aud is not the audience of the descriptor"
        if self.cti != token_id(descriptor.nonce):
            return "cti does not come from the nonce of the descriptor"
        if self.tag is None and self.sub != _CONTRIBUTION + descriptor.digest().hex():
            return "sub names another contribution"
        return None

    @property
    def tag(self) -> str | None:
        """The keyed tag of who the data is about, if it carries one."""
        return self.sub[len(_SUBJECT) :] if self.sub.startswith(_SUBJECT) else None


def attest(
    descriptor: Descriptor, key: PrivateKey, *, issued_at: int, subject_tag: str | None = None
) -> bytes:
    """Sign a descriptor."""
    if descriptor.contributor != key.public.id:
        raise AdmissionError(
            "admit.descriptor-names-contributor",
            f"the descriptor names contributor {descriptor.contributor.hex()}, the key is {key.public.name}",
            "sign with the key that the descriptor names",
        )
    if type(issued_at) is not int or not 0 <= issued_at <= LAST:
        raise AdmissionError(
            "admit.issued-seconds-since",
            f"issued_at is {issued_at!r}, must be seconds since 1970",
            "give int(time.time())",
        )
    digest = descriptor.digest()
    claims = {
        _ISS: key.public.name,
        _SUB: _CONTRIBUTION + digest.hex() if subject_tag is None else _SUBJECT + subject_tag,
        _AUD: descriptor.audience,
        _EXP: descriptor.expires,
        _NBF: descriptor.not_before,
        _IAT: issued_at,
        _CTI: token_id(descriptor.nonce),
    }
    header = {
        _ALG: EDDSA,
        _KID: key.public.id,
        _CLAIMS: claims,
        _TYP: TYPE,
        _HASH_ALG: _SHA256,
        _PREIMAGE: CONTENT,
    }
    _read(header)  # what we sign is what we would accept
    protected = cbor.encode(header)
    signature = key.sign(to_be_signed(protected, digest))
    message = cbor.Tag(number=_TAG, value=[protected, {}, None, signature])
    return cbor.encode(message, null=True, tags=(_TAG,))


def token_id(nonce: bytes) -> bytes:
    """cti: SHA-256('cti' ‖ nonce), its first 16 bytes. Unique as the nonce is, and does not show it."""
    assert len(nonce) == NONCE_BYTES
    return hashlib.sha256(b"cti" + nonce).digest()[:16]


def to_be_signed(protected: bytes, digest: bytes) -> bytes:
    """The Sig_structure of RFC 9052 §4.4: ["Signature1", protected, external_aad = h'', payload]."""
    size = len(protected)
    assert len(digest) == 32 and 24 <= size < 2**16
    head = bytes((0x58, size)) if size < 256 else bytes((0x59, size >> 8, size & 0xFF))
    return b"\x84\x6aSignature1" + head + protected + b"\x40\x58\x20" + digest


def usual_parts(data: bytes) -> tuple[bytes, bytes] | None:
    """Protected header and signature of a message of the one shape that is accepted; None for any other.

    A header that says all it must has 256 bytes or more, so the bytes around it are always the same.
    """
    end = len(data) - 68
    if data[:3] != b"\xd2\x84\x59" or data[end : end + 4] != b"\xa0\xf6\x58\x40" or end < 261:
        return None
    return (data[5:end], data[end + 4 :]) if int.from_bytes(data[3:5], "big") == end - 5 else None


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """The same by the general decoder, which says what is wrong."""
    outer = cbor.decode(data, null=True, tags=(_TAG,), max_depth=3)
    if type(outer) is not cbor.Tag or type(outer.value) is not list or len(outer.value) != 4:
        raise _refused("it is no COSE_Sign1 message (tag 18 of four items)")
    protected, unprotected, payload, signature = outer.value
    if type(protected) is not bytes or type(signature) is not bytes or len(signature) != 64:
        raise _refused("protected header and a signature of 64 bytes must be byte strings")
    if type(unprotected) is not dict or unprotected:
        raise _refused("the unprotected header must be an empty map")
    if payload is not None:
        raise _refused("the payload must be detached (nil)")
    return protected, signature


_WHO = pattern(
    rb"\xa6\x01(", b"|".join(map(exactly, ALGORITHMS)), rb")\x04", BYTES_32, rb"\x0f\xa7\x01\x78\x40([0-9a-f]{64})",
    rb"\x02(?:\x78\x4d(?=contribution:)|\x78\x44(?=tag:))([a-z]+:[0-9a-f]{64})\x03", LENGTH,
)  # fmt: skip
_WHEN = pattern(
    rb"\x04", NUMBER, rb"\x05", NUMBER, rb"\x06", NUMBER, rb"\x07", BYTES_16, rb"\x10", exactly(TYPE),
    exactly(_HASH_ALG), exactly(_SHA256), exactly(_PREIMAGE), exactly(CONTENT),
)  # fmt: skip
_ALGORITHM = {cbor.encode(each): each for each in ALGORITHMS}


def usual_fields(protected: bytes) -> dict[str, Any] | None:
    """The fields of a protected header in its one encoding; None for anything else."""
    if (who := _WHO.match(protected)) is None:
        return None
    alg, kid, iss, sub, told = who.groups()
    first = who.end()
    last = first + length(told)
    if (when := _WHEN.fullmatch(protected, last)) is None or last - first > MAX_AUDIENCE:
        return None
    *times, cti = when.groups()
    exp, nbf, iat = map(number, times)
    if iss.decode() != kid.hex() or max(exp, nbf, iat) > LAST:
        return None
    try:
        aud = protected[first:last].decode()
    except UnicodeDecodeError:
        return None
    return {
        "alg": _ALGORITHM[alg], "kid": kid, "iss": iss.decode(), "sub": sub.decode(), "aud": aud,
        "exp": exp, "nbf": nbf, "iat": iat, "cti": cti,
    }  # fmt: skip


def _fields(protected: bytes) -> dict[str, Any]:
    """The same by the general decoder, which says what is wrong."""
    header = cbor.decode(protected, max_depth=2)
    if type(header) is not dict or tuple(header) != _LABELS:
        raise _refused(f"the protected labels must be {list(_LABELS)}")
    return _read(header)


def _read(header: dict[Any, Any]) -> dict[str, Any]:
    """The fields of a protected header with the right labels."""
    alg, kid, claims = header[_ALG], header[_KID], header[_CLAIMS]
    if type(alg) is not int or alg not in ALGORITHMS:
        raise WrongAlgorithm(
            "admit.attestation-algorithm-not",
            f"attestation: algorithm {alg!r} is not allowed, {' and '.join(map(str, ALGORITHMS))} are",
            "sign with Ed25519",
        )
    if type(kid) is not bytes or len(kid) != 32:
        raise _refused("kid must be 32 bytes")
    if header[_TYP] != TYPE or type(header[_TYP]) is not str:
        raise _refused(f"typ must be {TYPE}")
    if header[_HASH_ALG] != _SHA256 or header[_PREIMAGE] != CONTENT:
        raise _refused(f"labels 258 and 259 must be {_SHA256} and {CONTENT}")
    if type(claims) is not dict or tuple(claims) != _CLAIM_KEYS:
        raise _refused(f"the claims must be {list(_CLAIM_KEYS)}")
    iss, sub, aud, exp, nbf, iat, cti = claims.values()
    if iss != kid.hex():
        raise _refused("iss must be the kid in hexadecimal")
    if type(sub) is not str or not _is_subject(sub):
        raise _refused("sub must be contribution: or tag: and 64 hexadecimal digits")
    if type(aud) is not str or not 0 < len(aud.encode("utf-8")) <= MAX_AUDIENCE:
        raise _refused(f"aud must be 1 to {MAX_AUDIENCE} bytes of text")
    for name, value in (("exp", exp), ("nbf", nbf), ("iat", iat)):
        if type(value) is not int or not 0 <= value <= LAST:
            raise _refused(f"{name} must be seconds since 1970")
    if type(cti) is not bytes or len(cti) != 16:
        raise _refused("cti must be 16 bytes")
    return {
        "alg": alg, "kid": kid, "iss": iss, "sub": sub, "aud": aud, "exp": exp, "nbf": nbf, "iat": iat, "cti": cti,
    }  # fmt: skip


def _is_subject(sub: str) -> bool:
    kind, colon, digits = sub.partition(":")
    return kind + colon in (_CONTRIBUTION, _SUBJECT) and len(digits) == 64 and _HEX.issuperset(digits)


def _refused(problem: str) -> AdmissionError:
    return AdmissionError("admit.attestation", f"attestation: {problem}", "sign with lamina attest")
