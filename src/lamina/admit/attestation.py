"""What a contributor signs: the descriptor of a payload, and the detached COSE_Sign1 attestation over it."""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from lamina import cbor
from lamina.errors import AdmissionError, EncodingError, UnknownSchema, WrongAlgorithm
from lamina.sign.keys import ALGORITHMS, CLOCK_SKEW, EDDSA, LAST_SECOND, PrivateKey, PublicKey
from lamina.sign.signed_json import sig_structure
from lamina.validate import open_regular, short_repr

# Patterns for canonical CBOR. They read what is signed in the usual form in a fifth of the time of a decoder.
#
# A pattern matches nothing that `lamina.cbor` would refuse, and reads the same; whatever it does not match goes to
# `lamina.cbor`. A text ends where its length says, and no pattern can match in two ways: one pass is enough.

BYTES_32, BYTES_16 = rb"\x58\x20(.{32})", rb"\x50(.{16})"
NUMBER = rb"([\x00-\x17]|\x18[\x18-\xff]|\x19(?!\x00).{2}|\x1a(?!\x00{2}).{4}|\x1b(?!\x00{4}).{8})"
LENGTH = rb"([\x61-\x77]|\x78[\x18-\xff]|\x79(?!\x00).{2})"  # of a text that is not empty; both in shortest form


def compile_pattern(*parts: bytes) -> re.Pattern[bytes]:
    """One pattern of several parts."""
    return re.compile(b"".join(parts), re.DOTALL)


def exact_pattern(value: Any) -> bytes:
    """The pattern of one value."""
    return re.escape(cbor.encode(value))


def read_number(raw: bytes) -> int:
    """What `NUMBER` found."""
    return raw[0] if len(raw) == 1 else int.from_bytes(raw[1:], "big")


def read_length(raw: bytes) -> int:
    """What `LENGTH` found, in bytes."""
    return raw[0] - 0x60 if len(raw) == 1 else int.from_bytes(raw[1:], "big")


NONCE_BYTES = 16


def commit(nonce: bytes, payload: bytes | Path) -> bytes:
    """SHA-256(nonce ‖ payload bytes). The nonce of the descriptor is the salt: one secret, 16 bytes, never published.

    >>> commit(bytes(16), b"abc").hex()[:16]
    '277e7ff6d232b976'
    """
    if len(nonce) != NONCE_BYTES:
        problem = f"the nonce has {len(nonce)} bytes, must have {NONCE_BYTES}"
        raise AdmissionError("admit.nonce-size", problem, "draw it with secrets.token_bytes(16)")
    if isinstance(payload, bytes):
        return hashlib.sha256(nonce + payload).digest()
    try:
        with open(open_regular(payload), "rb", buffering=0) as file:
            return hashlib.file_digest(file, lambda: hashlib.sha256(nonce)).digest()
    except OSError as error:
        problem = f"cannot read the payload '{payload}': {error.strerror}"
        raise AdmissionError("admit.file-unreadable", problem, "give the file that is contributed") from None


def subject_tag(key: bytes, subject: str) -> str:
    """HMAC-SHA-256 of the person that the data is about, in hexadecimal.

    Two contributions about one person carry the same tag, and nobody without the key can guess a name from it. Spaces
    around the name, and the two ways to encode an accent, make no difference.
    """
    if len(key) < 16:
        problem = f"the subject key has {len(key)} bytes, needs at least 16"
        raise AdmissionError("admit.subject-key-too-short", problem, "make one with lamina keys subject")
    name = unicodedata.normalize("NFC", subject.strip())
    if not name:
        raise AdmissionError("admit.subject-empty", "the subject is empty", "name a person, or give no subject")
    return hmac.new(key, name.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


class SignedTerms(NamedTuple):
    """Under which terms a contribution may be used: those of its descriptor, as the attestation repeats them."""

    admissibility: str
    data_class: str
    clip_norm: int
    noise_multiplier: int
    public: bool
    profile: str | None = None


# The contribution descriptor: what a contributor signs about a payload, in canonical CBOR.
#
# Integers as map keys, no floats, tags or null, no unknown keys. One descriptor has one encoding, and its SHA-256 is
# the contribution's identity in attestation, ledger and content anchor.

DESCRIPTOR_SCHEMA = 1
MAX_DESCRIPTOR = 2048
MICRO = 1_000_000
MAX_MICRO = 10**15  # 10⁹ in plain units; every integer up to it is a float too
MAX_ITEMS = 10**15
MAX_AUDIENCE = 255  # bytes
MAX_PROFILE = 1024  # bytes

_DATA_CLASS = re.compile(r"[a-z0-9-]{1,64}")
_ADMISSIBILITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FIELD_NAMES = (
    "schema", "contributor", "data_class", "admissibility", "clip_norm", "noise_multiplier", "not_before", "expires",
    "profile", "commitment", "items", "nonce", "policy", "audience", "anchor",
)  # fmt: skip
_FIELD_OF_KEY = dict(enumerate(_FIELD_NAMES, start=1))  # the keys of the map
_OPTIONAL_KEYS = (9, 15)
_FIELDS_OF_KEYS = {  # the keys that a descriptor may have, in the order of their encodings → the fields that they are
    keys: tuple(_FIELD_OF_KEY[key] for key in keys)
    for left_out in ((), (9,), (15,), _OPTIONAL_KEYS)
    for keys in [tuple(key for key in _FIELD_OF_KEY if key not in left_out)]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What is signed about one contribution.

     1 schema            1
     2 contributor       thumbprint of the signing key, 32 bytes
     3 data_class        what the data is: [a-z0-9-], 1 to 64
     4 admissibility     the class of the policy under which it may be used
     5 clip_norm         c in 1e-6: its gradient counts for no more than this norm
     6 noise_multiplier  z in 1e-6, over its whole participation: no worse than one Gaussian release with z·c
     7 not_before        first second of validity
     8 expires           first second after it
     9 profile           depth profile that was agreed on; absent: whatever the policy gives the class
    10 commitment        SHA-256(nonce ‖ payload)
    11 items             examples in the payload
    12 nonce             16 random bytes, never published: without it the digest of a descriptor could be guessed
    13 policy            digest of the origin and floors that were in force (`checks.floors_hash`)
    14 audience          origin of the corpus, and of no other
    15 anchor            digest of the contribution in a content-anchoring system; optional

    Data of a public class has no bound to sign: clip_norm and noise_multiplier are both 0. Otherwise neither is.
    The attestation repeats the terms of use, so that whoever has it can hold a ledger against them (`SignedTerms`).
    """

    schema: int = DESCRIPTOR_SCHEMA
    contributor: bytes
    data_class: str
    admissibility: str
    clip_norm: int
    noise_multiplier: int
    not_before: int
    expires: int
    profile: str | None = None
    commitment: bytes
    items: int
    nonce: bytes = field(repr=False)
    policy: bytes
    audience: str
    anchor: bytes | None = None
    _digest: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if problem := _field_problem(self):
            raise AdmissionError("admit.descriptor-field-invalid", f"descriptor: {problem}", _SIGN)

    def encode(self) -> bytes:
        """Its one encoding."""
        values = {key: getattr(self, name) for key, name in _FIELD_OF_KEY.items()}
        return cbor.encode({key: value for key, value in values.items() if value is not None})

    def digest(self) -> bytes:
        """SHA-256 of the encoding: its identity."""
        if self._digest is None:
            object.__setattr__(self, "_digest", hashlib.sha256(self.encode()).digest())
        assert self._digest is not None
        return self._digest

    @property
    def public(self) -> bool:
        """Whether it is public: nothing bounds its use."""
        return self.clip_norm == 0

    @property
    def terms(self) -> SignedTerms:
        """What its attestation must repeat."""
        bound = self.clip_norm, self.noise_multiplier
        return SignedTerms(self.admissibility, self.data_class, *bound, self.public, self.profile)

    @classmethod
    def decode(cls, data: bytes) -> Descriptor:
        """Read received bytes: they are the encoding of a valid descriptor, or refused."""
        if len(data) > MAX_DESCRIPTOR:
            problem = f"the descriptor has {len(data)} bytes, at most {MAX_DESCRIPTOR} are allowed"
            raise EncodingError("admit.descriptor-too-large", problem, "sign it with lamina attest")
        made = cls(**_decode_descriptor(data))
        object.__setattr__(made, "_digest", hashlib.sha256(data).digest())
        return made


_SIGN = "sign it with lamina attest"


def _decode_descriptor(data: bytes) -> dict[str, Any]:
    """Return the fields of a descriptor by name. Their ranges are not checked here."""
    found = cbor.decode(data, max_depth=1)
    if type(found) is not dict:
        raise AdmissionError("admit.descriptor-not-map", "the descriptor is not a map", _SIGN)
    version = found.get(1)
    if type(version) is not int:
        raise AdmissionError("admit.schema-not-number", f"schema of the descriptor is {version!r}, not a number", _SIGN)
    if version != DESCRIPTOR_SCHEMA:
        problem = f"schema of the descriptor is {version}, this program reads {DESCRIPTOR_SCHEMA}"
        raise UnknownSchema("admit.schema-unknown", problem, "use a program that knows it")
    if (names := _FIELDS_OF_KEYS.get(tuple(found))) is None:
        missing = ", ".join(_FIELD_OF_KEY[key] for key in _FIELD_OF_KEY if key not in {*found, *_OPTIONAL_KEYS})
        unknown = ", ".join(sorted(map(repr, found.keys() - _FIELD_OF_KEY.keys())))
        problems = [f"lacks {missing}"] * bool(missing) + [f"has unknown keys {unknown}"] * bool(unknown)
        raise AdmissionError("admit.descriptor-fields", f"the descriptor {' and '.join(problems)}", _SIGN)
    return dict(zip(names, found.values(), strict=True))


def _field_problem(d: Descriptor) -> str | None:
    """The first field that does not fit, in words."""
    anchor = bytes(32) if d.anchor is None else d.anchor
    for name, size, value in (
        ("contributor", 32, d.contributor), ("commitment", 32, d.commitment), ("policy", 32, d.policy),
        ("anchor", 32, anchor), ("nonce", 16, d.nonce),
    ):  # fmt: skip
        if type(value) is not bytes or len(value) != size:
            return f"{name} must be {size} bytes"
    if type(d.schema) is not int or d.schema != DESCRIPTOR_SCHEMA:
        return f"schema is {d.schema!r}, must be {DESCRIPTOR_SCHEMA}"
    for name, low, number, high in (
        ("not_before", 0, d.not_before, LAST_SECOND), ("expires", 0, d.expires, LAST_SECOND),
        ("items", 1, d.items, MAX_ITEMS),
    ):  # fmt: skip
        if type(number) is not int or not low <= number <= high:
            return f"{name} is {short_repr(number)}, must be an integer in [{low}, {high}]"
    if d.not_before >= d.expires:
        return f"not_before {d.not_before} is not before expires {d.expires}"
    return _terms_problem(d) or _text_problem("audience", d.audience, MAX_AUDIENCE)


def _terms_problem(d: Descriptor | SignedTerms) -> str | None:
    """The first of the terms of use that does not fit, in words."""
    for name, number in (("clip_norm", d.clip_norm), ("noise_multiplier", d.noise_multiplier)):
        if type(number) is not int or not 0 <= number <= MAX_MICRO:
            return f"{name} is {short_repr(number)}, must be an integer in [0, {MAX_MICRO}]"
    if (d.clip_norm == 0) != (d.noise_multiplier == 0):
        return f"clip_norm {d.clip_norm} and noise_multiplier {d.noise_multiplier} must be both 0 (public) or neither"
    if d.public is not (d.clip_norm == 0):
        return f"public is {short_repr(d.public)} and clip_norm {d.clip_norm}: it has a bound, or it is public"
    if type(d.data_class) is not str or not _DATA_CLASS.fullmatch(d.data_class):
        return f"data_class is {short_repr(d.data_class)}, must be 1 to 64 of a-z, 0-9 and -"
    if type(d.admissibility) is not str or not _ADMISSIBILITY.fullmatch(d.admissibility):
        return f"admissibility is {short_repr(d.admissibility)}, must be the name of a class, 1 to 64 letters"
    return None if d.profile is None else _text_problem("profile", d.profile, MAX_PROFILE)


def _text_problem(name: str, text: object, most: int) -> str | None:
    if type(text) is not str or not text.isprintable() or not 0 < len(text.encode("utf-8")) <= most:
        return f"{name} is {short_repr(text)}, must be 1 to {most} bytes of printable text"
    return None


def window_rules(at: Any, not_before: Any, expires: Any) -> tuple[Any, Any]:
    """(not yet valid, expired) at the second `at`, of one contribution or of columns of them.

    A contributor's clock may be ahead, so the begin has a margin. The end has none: nobody agreed to more.
    """
    return at + CLOCK_SKEW < not_before, at >= expires


# The attestation: a detached COSE_Sign1 signature over the digest of a descriptor.
#
#     18([ h'protected', {}, nil, h'signature' ])           RFC 9052 §4.2, payload detached
#
# The payload is SHA-256(descriptor): a hash envelope, which the protected labels 258 and 259 declare (RFC 9995). Claims
# about who, for whom and when are CWT claims in label 15 (RFC 9597), and so are the terms of use, as private claims: with
# the descriptor alone, a ledger could say anything about them. `typ` (RFC 9596) keeps a signature that was made for
# something else from passing as an attestation. Nothing stands in the unprotected map.

MAX_ATTESTATION = 2048
ATTESTATION_TYPE = "application/lamina-attestation+cose"
DESCRIPTOR_CONTENT_TYPE = "application/lamina-descriptor+cbor"

_COSE_SIGN1_TAG = 18
_ALG, _KID, _CLAIMS, _TYP, _HASH_ALG, _PREIMAGE = 1, 4, 15, 16, 258, 259
_LABELS = (_ALG, _KID, _CLAIMS, _TYP, _HASH_ALG, _PREIMAGE)  # in the order of their encodings
_ISS, _SUB, _AUD, _EXP, _NBF, _IAT, _CTI = 1, 2, 3, 4, 5, 6, 7
_CLASS, _DATA, _CLIP, _NOISE, _PUBLIC, _PROFILE, _ANCHOR, _LEDGER = range(-65537, -65545, -1)  # private (RFC 8392 §9.1)
_TERM_KEYS = (_CLASS, _DATA, _CLIP, _NOISE, _PUBLIC)
_CLAIM_KEYS = (_ISS, _SUB, _AUD, _EXP, _NBF, _IAT, _CTI, *_TERM_KEYS)  # in the order of their encodings
_OPTIONAL_CLAIMS = (_PROFILE, _ANCHOR, _LEDGER)
_CLAIM_SETS = {(*_CLAIM_KEYS, *some) for n in range(4) for some in combinations(_OPTIONAL_CLAIMS, n)}
_SHA256 = -16
_CONTRIBUTION_PREFIX, _SUBJECT_PREFIX = "contribution:", "tag:"
_SUBJECT = re.compile(r"(contribution|tag):[0-9a-f]{64}")


class Attestation(NamedTuple):
    """An attestation as it was received. It means something only if `signed_by` is true and `mismatch` None.

    `kid` is the thumbprint of the signing key and `iss` the same in hexadecimal; `sub` is "tag:…" with a keyed tag of
    who the data is about, or "contribution:…" with the digest of the descriptor; `cti` is derived from the
    descriptor's nonce and unique for a contribution. `terms` and `anchor` repeat the descriptor's. `ledger` is the hash of
    the header leaf of the only ledger that may admit it; None: any ledger of `aud` may.
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
    terms: SignedTerms
    anchor: bytes | None
    ledger: bytes | None
    protected: bytes
    signature: bytes

    @classmethod
    def decode(cls, data: bytes) -> Attestation:
        """Read received bytes strictly. Nothing is verified yet."""
        if len(data) > MAX_ATTESTATION:
            problem = f"the attestation has {len(data)} bytes, at most {MAX_ATTESTATION} are allowed"
            raise EncodingError("admit.attestation-too-large", problem, _SIGN)
        protected, signature = match_message(data) or _decode_message(data)
        fields = match_header(protected) or _decode_header(protected)
        return cls._make((*fields, protected, signature))

    def signed_by(self, key: PublicKey, descriptor_digest: bytes) -> bool:
        """Whether `key` made this attestation for the descriptor with that digest."""
        return self.kid == key.id and key.verify(sig_structure(self.protected, descriptor_digest), self.signature)

    def mismatch(self, descriptor: Descriptor) -> str | None:
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
        if self.tag is None and self.sub != _CONTRIBUTION_PREFIX + descriptor.digest().hex():
            return "sub names another contribution"
        if self.terms != (signed := descriptor.terms):
            name, ours, theirs = next(
                each for each in zip(SignedTerms._fields, self.terms, signed, strict=True) if each[1] != each[2]
            )
            return f"{name} is {short_repr(ours)}, the descriptor says {short_repr(theirs)}"
        return None if self.anchor == descriptor.anchor else "anchor is not the one of the descriptor"

    def may_enter(self, ledger: bytes) -> bool:
        """Whether the ledger whose header leaf has this hash may admit it: it names that one, or none."""
        return self.ledger is None or self.ledger == ledger

    @property
    def tag(self) -> str | None:
        """The keyed tag of who the data is about, if it carries one."""
        return self.sub[len(_SUBJECT_PREFIX) :] if self.sub.startswith(_SUBJECT_PREFIX) else None


def attest(
    descriptor: Descriptor,
    key: PrivateKey,
    *,
    issued_at: int,
    subject_tag: str | None = None,
    ledger: bytes | None = None,
) -> bytes:
    """Sign a descriptor; with the hash of its header leaf, for this ledger alone."""
    if descriptor.contributor != key.public.id:
        problem = f"the descriptor names contributor {descriptor.contributor.hex()}, the key is {key.public.name}"
        raise AdmissionError("admit.contributor-not-signer", problem, "sign with the key that the descriptor names")
    if type(issued_at) is not int or not 0 <= issued_at <= LAST_SECOND:
        problem = f"issued_at is {issued_at!r}, must be seconds since 1970"
        raise AdmissionError("admit.issued-at-out-of-range", problem, "give int(time.time())")
    digest = descriptor.digest()
    claims = {
        _ISS: key.public.name,
        _SUB: _CONTRIBUTION_PREFIX + digest.hex() if subject_tag is None else _SUBJECT_PREFIX + subject_tag,
        _AUD: descriptor.audience,
        _EXP: descriptor.expires,
        _NBF: descriptor.not_before,
        _IAT: issued_at,
        _CTI: token_id(descriptor.nonce),
        **dict(zip((*_TERM_KEYS, _PROFILE), descriptor.terms, strict=True)),
        _ANCHOR: descriptor.anchor,
        _LEDGER: ledger,
    }
    claims = {key: value for key, value in claims.items() if value is not None}
    header = {
        _ALG: EDDSA, _KID: key.public.id, _CLAIMS: claims, _TYP: ATTESTATION_TYPE, _HASH_ALG: _SHA256,
        _PREIMAGE: DESCRIPTOR_CONTENT_TYPE,
    }  # fmt: skip
    _header_fields(header)  # what we sign is what we would accept
    protected = cbor.encode(header)
    signature = key.sign(sig_structure(protected, digest))
    message = cbor.Tag(number=_COSE_SIGN1_TAG, value=[protected, {}, None, signature])
    return cbor.encode(message, null=True, tags=(_COSE_SIGN1_TAG,))


def token_id(nonce: bytes) -> bytes:
    """cti: SHA-256('cti' ‖ nonce), its first 16 bytes. Unique as the nonce is, and does not show it."""
    assert len(nonce) == NONCE_BYTES
    return hashlib.sha256(b"cti" + nonce).digest()[:16]


def match_message(data: bytes) -> tuple[bytes, bytes] | None:
    """Protected header and signature of a message of the one shape that is accepted; None for any other.

    A header that says all it must has 256 bytes or more, so the bytes around it are always the same.
    """
    end = len(data) - 68
    if data[:3] != b"\xd2\x84\x59" or data[end : end + 4] != b"\xa0\xf6\x58\x40" or end < 261:
        return None
    return (data[5:end], data[end + 4 :]) if int.from_bytes(data[3:5], "big") == end - 5 else None


def _decode_message(data: bytes) -> tuple[bytes, bytes]:
    """The same by the general decoder, which says what is wrong."""
    outer = cbor.decode(data, null=True, tags=(_COSE_SIGN1_TAG,), max_depth=3)
    if type(outer) is not cbor.Tag or type(outer.value) is not list or len(outer.value) != 4:
        raise _malformed("it is not a COSE_Sign1 message (tag 18 of four items)")
    protected, unprotected, payload, signature = outer.value
    if type(protected) is not bytes or type(signature) is not bytes or len(signature) != 64:
        raise _malformed("protected header and a signature of 64 bytes must be byte strings")
    if type(unprotected) is not dict or unprotected:
        raise _malformed("the unprotected header must be an empty map")
    if payload is not None:
        raise _malformed("the payload must be detached (nil)")
    return protected, signature


_HEADER_START = compile_pattern(
    rb"\xa6\x01(", b"|".join(map(exact_pattern, ALGORITHMS)), rb")\x04", BYTES_32,
    rb"\x0f([\xac-\xaf])\x01\x78\x40([0-9a-f]{64})",
    rb"\x02(?:\x78\x4d(?=contribution:)|\x78\x44(?=tag:))([a-z]+:[0-9a-f]{64})\x03", LENGTH,
)  # fmt: skip
_HEADER_TIMES = compile_pattern(rb"\x04", NUMBER, rb"\x05", NUMBER, rb"\x06", NUMBER, rb"\x07", BYTES_16)
_TIMES_32 = Struct(">2xI2xI2xI").unpack_from
_HEADER_TERMS = compile_pattern(
    exact_pattern(_CLASS), LENGTH, rb"([A-Za-z0-9_.-]+)", exact_pattern(_DATA), LENGTH, rb"([a-z0-9-]+)",
    exact_pattern(_CLIP), NUMBER, exact_pattern(_NOISE), NUMBER, exact_pattern(_PUBLIC), rb"([\xf4\xf5])",
    rb"(?:", exact_pattern(_PROFILE), LENGTH, rb")?",
)  # fmt: skip
_ANCHOR_HEAD, _LEDGER_HEAD = (cbor.encode(each) + b"\x58\x20" for each in (_ANCHOR, _LEDGER))
_ANCHOR_BYTES = len(_ANCHOR_HEAD) + 32
_HEADER_REST = (_TYP, ATTESTATION_TYPE, _HASH_ALG, _SHA256, _PREIMAGE, DESCRIPTOR_CONTENT_TYPE)
_HEADER_END = b"".join(map(cbor.encode, _HEADER_REST))
_ALGORITHM_OF_ENCODING = {cbor.encode(each): each for each in ALGORITHMS}


def match_header(protected: bytes) -> tuple[Any, ...] | None:
    """The fields of an attestation in a protected header in its one encoding; None for anything else."""
    if (who := _HEADER_START.match(protected)) is None or not protected.endswith(_HEADER_END):
        return None
    alg, kid, count, iss, sub, audience_size = who.groups()
    first = who.end()
    last = first + read_length(audience_size)
    if (when := _HEADER_TIMES.match(protected, last)) is None or last - first > MAX_AUDIENCE:
        return None
    ends, begins, issued, cti = when.groups()
    if len(ends) == len(begins) == len(issued) == 5:  # as they all are, from 1970 to 2106
        exp, nbf, iat = _TIMES_32(protected, last)
    else:
        exp, nbf, iat = map(read_number, (ends, begins, issued))
    if (name := kid.hex()) != iss.decode() or exp > LAST_SECOND or nbf > LAST_SECOND or iat > LAST_SECOND:
        return None
    end, anchor, ledger = len(protected) - len(_HEADER_END), None, None
    if protected.startswith(_LEDGER_HEAD, end - _ANCHOR_BYTES):
        ledger, end = protected[end - 32 : end], end - _ANCHOR_BYTES
    if protected.startswith(_ANCHOR_HEAD, end - _ANCHOR_BYTES):
        anchor, end = protected[end - 32 : end], end - _ANCHOR_BYTES
    terms = _match_terms(protected[when.end() : end])
    if terms is None or count[0] - 0xAC != sum(each is not None for each in (terms.profile, anchor, ledger)):
        return None
    try:
        aud = protected[first:last].decode()
    except UnicodeDecodeError:
        return None
    return _ALGORITHM_OF_ENCODING[alg], kid, name, sub.decode(), aud, exp, nbf, iat, cti, terms, anchor, ledger


@lru_cache(maxsize=1024)  # in a corpus nearly all say the same
def _match_terms(data: bytes) -> SignedTerms | None:
    """The terms in a protected header; None if they are not valid, or not in their one encoding."""
    if (found := _HEADER_TERMS.match(data)) is None:
        return None
    size, admissibility, other, data_class, c, z, public, profile_size = found.groups()
    profile = data[found.end() :]
    if (
        read_length(size) != len(admissibility)
        or read_length(other) != len(data_class)
        or len(profile) != (0 if profile_size is None else read_length(profile_size))
    ):
        return None
    try:
        text = None if profile_size is None else profile.decode()
    except UnicodeDecodeError:
        return None
    bound = read_number(c), read_number(z)
    terms = SignedTerms(admissibility.decode(), data_class.decode(), *bound, public == b"\xf5", text)
    return terms if _terms_problem(terms) is None else None


def _decode_header(protected: bytes) -> tuple[Any, ...]:
    """The same by the general decoder, which says what is wrong."""
    header = cbor.decode(protected, max_depth=2)
    if type(header) is not dict or tuple(header) != _LABELS:
        raise _malformed(f"the protected labels must be {list(_LABELS)}")
    return _header_fields(header)


def _header_fields(header: dict[Any, Any]) -> tuple[Any, ...]:
    """The fields of an attestation in a protected header with the right labels."""
    alg, kid, claims = header[_ALG], header[_KID], header[_CLAIMS]
    if type(alg) is not int or alg not in ALGORITHMS:
        problem = f"attestation: algorithm {alg!r} is not allowed, {' and '.join(map(str, ALGORITHMS))} are"
        raise WrongAlgorithm("admit.algorithm-not-allowed", problem, "sign with Ed25519")
    if type(kid) is not bytes or len(kid) != 32:
        raise _malformed("kid must be 32 bytes")
    if header[_TYP] != ATTESTATION_TYPE or type(header[_TYP]) is not str:
        raise _malformed(f"typ must be {ATTESTATION_TYPE}")
    if header[_HASH_ALG] != _SHA256 or header[_PREIMAGE] != DESCRIPTOR_CONTENT_TYPE:
        raise _malformed(f"labels 258 and 259 must be {_SHA256} and {DESCRIPTOR_CONTENT_TYPE}")
    if type(claims) is not dict or tuple(claims) not in _CLAIM_SETS:
        known = f"{list(_CLAIM_KEYS)}, perhaps some of {list(_OPTIONAL_CLAIMS)}"
        raise _malformed(f"the claims must be {known}, in this order")
    iss, sub, aud, exp, nbf, iat, cti = (claims[key] for key in range(_ISS, _CTI + 1))
    if iss != kid.hex():
        raise _malformed("iss must be the kid in hexadecimal")
    if type(sub) is not str or not _SUBJECT.fullmatch(sub):
        raise _malformed("sub must be contribution: or tag: and 64 hexadecimal digits")
    if type(aud) is not str or not 0 < len(aud.encode("utf-8")) <= MAX_AUDIENCE:
        raise _malformed(f"aud must be 1 to {MAX_AUDIENCE} bytes of text")
    for name, value in (("exp", exp), ("nbf", nbf), ("iat", iat)):
        if type(value) is not int or not 0 <= value <= LAST_SECOND:
            raise _malformed(f"{name} must be seconds since 1970")
    if type(cti) is not bytes or len(cti) != 16:
        raise _malformed("cti must be 16 bytes")
    values: list[Any] = [claims.get(key) for key in (*_TERM_KEYS, _PROFILE)]
    terms, anchor, ledger = SignedTerms(*values), claims.get(_ANCHOR), claims.get(_LEDGER)
    if (wrong := _terms_problem(terms)) is not None:
        raise _malformed(wrong)
    for name, value in (("anchor", anchor), ("ledger", ledger)):
        if value is not None and (type(value) is not bytes or len(value) != 32):
            raise _malformed(f"{name} must be 32 bytes")
    return alg, kid, iss, sub, aud, exp, nbf, iat, cti, terms, anchor, ledger


def _malformed(problem: str) -> AdmissionError:
    return AdmissionError("admit.attestation-malformed", f"attestation: {problem}", _SIGN)
