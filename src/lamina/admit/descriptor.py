"""The contribution descriptor: what a contributor signs about a payload, in canonical CBOR.

Integers as map keys, no floats, tags or null, no unknown keys. One descriptor has one encoding, and its SHA-256 is
the contribution's identity in attestation, ledger and content anchor.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from lamina import cbor
from lamina.admit.pattern import BYTES_16, BYTES_32, LENGTH, NUMBER, length, number, pattern
from lamina.admit.times import LAST
from lamina.errors import AdmissionError, EncodingError, UnknownSchema

SCHEMA = 1
MAX_DESCRIPTOR = 2048
MICRO = 1_000_000
MAX_MICRO = 10**15  # 10⁹ in plain units; every integer up to it is a float too
MAX_ITEMS = 10**15
MAX_AUDIENCE = 255  # bytes
MAX_PROFILE = 1024  # bytes

_DATA_CLASS = re.compile(r"[a-z0-9-]{1,64}")
_ADMISSIBILITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NAMES = (
    "schema", "contributor", "data_class", "admissibility", "clip_norm", "noise_multiplier", "not_before", "expires",
    "profile", "commitment", "items", "nonce", "policy", "audience", "anchor",
)  # fmt: skip
_FIELDS = dict(enumerate(_NAMES, start=1))  # the keys of the map
_OPTIONAL = (9, 15)
_SHAPES = {  # the keys that a descriptor may have, in the order of their encodings → the fields that they are
    keys: tuple(_FIELDS[key] for key in keys)
    for left_out in ((), (9,), (15,), _OPTIONAL)
    for keys in [tuple(key for key in _FIELDS if key not in left_out)]
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
    13 policy            digest of the origin and floors that were in force (terms.floors_hash)
    14 audience          origin of the corpus, and of no other
    15 anchor            digest of the contribution in a content-anchoring system; optional

    Data of a public class has no bound to sign: clip_norm and noise_multiplier are both 0. Otherwise neither is.
    """

    schema: int = SCHEMA
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
        if problem := _wrong(self):
            raise AdmissionError(
                "admit.descriptor-sign", f"descriptor: {problem}", "sign it again with lamina attest"
            )

    def encode(self) -> bytes:
        """Its one encoding."""
        values = {key: getattr(self, name) for key, name in _FIELDS.items()}
        return cbor.encode({key: value for key, value in values.items() if value is not None})

    def digest(self) -> bytes:
        """SHA-256 of the encoding: its identity."""
        if self._digest is None:
            object.__setattr__(self, "_digest", hashlib.sha256(self.encode()).digest())
        assert self._digest is not None
        return self._digest

    @classmethod
    def decode(cls, data: bytes) -> Descriptor:
        """Read received bytes: they are the encoding of a valid descriptor, or refused."""
        if type(data) is not bytes:
            raise EncodingError(
                "admit.descriptor-bytes",
                f"the descriptor is {type(data).__name__}, must be bytes",
                "pass what was received",
            )
        if len(data) > MAX_DESCRIPTOR:
            raise EncodingError(
                "admit.descriptor-bytes-allowed",
                f"the descriptor has {len(data)} bytes, at most {MAX_DESCRIPTOR} are allowed",
                "sign it with lamina attest",
            )
        made = cls(**(usual_fields(data) or _fields(data)))
        object.__setattr__(made, "_digest", hashlib.sha256(data).digest())
        return made


_TERMS = pattern(
    rb"([\xad-\xaf])\x01\x01\x02", BYTES_32, rb"\x03", LENGTH, rb"([a-z0-9-]+)\x04", LENGTH, rb"([A-Za-z0-9_.-]+)",
    rb"\x05", NUMBER, rb"\x06", NUMBER, rb"\x07", NUMBER, rb"\x08", NUMBER, rb"(?:\x09", LENGTH, rb")?",
)  # fmt: skip
_CONTENT = pattern(
    rb"\x0a", BYTES_32, rb"\x0b", NUMBER, rb"\x0c", BYTES_16, rb"\x0d", BYTES_32, rb"\x0e", LENGTH
)
_ANCHOR = b"\x0f\x58\x20"


def usual_fields(data: bytes) -> dict[str, Any] | None:
    """The fields of a descriptor in its one encoding; None for anything else. Ranges are not looked at."""
    if (terms := _TERMS.match(data)) is None:
        return None
    count, contributor, size, data_class, other, admissibility, c, z, begin, end, told = terms.groups()
    start = terms.end()
    at = start if told is None else start + length(told)
    if (content := _CONTENT.match(data, at)) is None:
        return None
    commitment, items, nonce, policy, said = content.groups()
    first = content.end()
    last = first + length(said)
    anchor = data[last + len(_ANCHOR) :] if len(data) != last else None
    if (
        length(size) != len(data_class)
        or length(other) != len(admissibility)
        or count[0] - 0xAD != (told is not None) + (anchor is not None)
        or (anchor is not None and (len(anchor) != 32 or not data.startswith(_ANCHOR, last)))
    ):  # fmt: skip
        return None
    try:
        profile = None if told is None else data[start:at].decode()
        audience = data[first:last].decode()
    except UnicodeDecodeError:
        return None
    return {
        "contributor": contributor,
        "data_class": data_class.decode(),
        "admissibility": admissibility.decode(),
        "clip_norm": number(c),
        "noise_multiplier": number(z),
        "not_before": number(begin),
        "expires": number(end),
        "profile": profile,
        "commitment": commitment,
        "items": number(items),
        "nonce": nonce,
        "policy": policy,
        "audience": audience,
        "anchor": anchor,
    }


def _fields(data: bytes) -> dict[str, Any]:
    """The same by the general decoder, which says what is wrong."""
    found = cbor.decode(data, max_depth=1)
    if type(found) is not dict:
        raise AdmissionError(
            "admit.descriptor-no-map", "the descriptor is no map", "sign it with lamina attest"
        )
    if found.get(1) != SCHEMA or type(found[1]) is not int:
        raise _unknown_schema(found)
    if (names := _SHAPES.get(tuple(found))) is None:
        raise _wrong_keys(found)
    return dict(zip(names, found.values(), strict=True))


def _unknown_schema(found: dict[Any, Any]) -> AdmissionError:
    version = found.get(1)
    if type(version) is not int:
        return AdmissionError(
            "admit.descriptor-schema-number",
            f"descriptor: schema is {version!r}, must be a number",
            "sign it with lamina attest",
        )
    return UnknownSchema(
        "admit.descriptor-schema-program",
        f"descriptor: schema is {version}, this program knows {SCHEMA}",
        "use a program that knows it",
    )


def _wrong_keys(found: dict[Any, Any]) -> AdmissionError:
    missing = ", ".join(_FIELDS[key] for key in _FIELDS if key not in found and key not in _OPTIONAL)
    unknown = ", ".join(sorted(map(repr, found.keys() - _FIELDS.keys())))
    told = " and ".join(
        text for text in (missing and f"lacks {missing}", unknown and f"has unknown keys {unknown}") if text
    )
    return AdmissionError("admit.descriptor", f"the descriptor {told}", "sign it with lamina attest")


def _wrong(d: Descriptor) -> str | None:
    """What does not fit, in words; the type is looked at before the value."""
    for name, size, held in (
        ("contributor", 32, d.contributor),
        ("commitment", 32, d.commitment),
        ("policy", 32, d.policy),
        ("nonce", 16, d.nonce),
    ):
        if type(held) is not bytes or len(held) != size:
            return f"{name} must be {size} bytes"
    if d.anchor is not None and (type(d.anchor) is not bytes or len(d.anchor) != 32):
        return "anchor must be 32 bytes"
    if type(d.schema) is not int or d.schema != SCHEMA:
        return f"schema is {d.schema!r}, must be {SCHEMA}"
    for name, low, value, high in (
        ("clip_norm", 0, d.clip_norm, MAX_MICRO),
        ("noise_multiplier", 0, d.noise_multiplier, MAX_MICRO),
        ("not_before", 0, d.not_before, LAST),
        ("expires", 0, d.expires, LAST),
        ("items", 1, d.items, MAX_ITEMS),
    ):
        if type(value) is not int or not low <= value <= high:
            return f"{name} is {_brief(value)}, must be an integer in [{low}, {high}]"
    if (d.clip_norm == 0) != (d.noise_multiplier == 0):
        return f"clip_norm {d.clip_norm} and noise_multiplier {d.noise_multiplier} must be both 0 (public) or neither"
    if d.not_before >= d.expires:
        return f"not_before {d.not_before} is not before expires {d.expires}"
    if type(d.data_class) is not str or not _DATA_CLASS.fullmatch(d.data_class):
        return f"data_class is {_brief(d.data_class)}, must be 1 to 64 of a-z, 0-9 and -"
    if type(d.admissibility) is not str or not _ADMISSIBILITY.fullmatch(d.admissibility):
        return f"admissibility is {_brief(d.admissibility)}, must be the name of a class, 1 to 64 letters"
    for name, most, text in (("audience", MAX_AUDIENCE, d.audience), ("profile", MAX_PROFILE, d.profile)):
        if text is None and name == "profile":
            continue
        if type(text) is not str or not text.isprintable() or not 0 < len(text.encode("utf-8")) <= most:
            return f"{name} is {_brief(text)}, must be 1 to {most} bytes of printable text"
    return None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
