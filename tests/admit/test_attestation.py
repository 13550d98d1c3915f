"""The attestation: what it says, what it must not say, and that one changed bit is one too many."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from refusals import raises_code
from signed_descriptor import FULL_VALUES, KEY, NONCE, described, encoded

from lamina import cbor
from lamina.admit import attestation
from lamina.admit.attestation import MAX_ATTESTATION, Attestation, Descriptor, attest, subject_tag
from lamina.errors import AdmissionError, EncodingError
from lamina.sign.keys import LAST_SECOND, PrivateKey
from lamina.sign.signed_json import sig_structure

DESCRIPTOR = described()
DIGEST = DESCRIPTOR.digest()
IAT = 1_767_225_601
MADE = attest(DESCRIPTOR, KEY, issued_at=IAT)
TYPE, CONTENT = "application/lamina-attestation+cose", "application/lamina-descriptor+cbor"

CLAIMS: dict[Any, Any] = {
    1: KEY.public.name,
    2: f"contribution:{DIGEST.hex()}",
    3: "example.org/corpus",
    4: 1_798_761_600,
    5: 1_767_225_600,
    6: IAT,
    7: hashlib.sha256(b"cti" + NONCE).digest()[:16],
    -65537: "sensitive",
    -65538: "ecg",
    -65539: 1_000_000,
    -65540: 4_224_679,
    -65541: False,
}
HEADER: dict[Any, Any] = {1: -8, 4: KEY.public.id, 15: CLAIMS, 16: TYPE, 258: -16, 259: CONTENT}


def message(
    header: dict[Any, Any] | bytes = HEADER,
    *,
    unprotected: Any = None,
    payload: Any = None,
    tag: int | None = 18,
    key: PrivateKey = KEY,
) -> bytes:
    """A message of any content with a signature that is right for it."""
    protected = header if isinstance(header, bytes) else encoded(header)
    signature = key.sign(encoded(["Signature1", protected, b"", DIGEST]))
    body = encoded([protected, {} if unprotected is None else unprotected, payload, signature])
    return body if tag is None else bytes([0xC0 + tag]) + body


def accepted(data: bytes, descriptor: bytes | None = None) -> bool:
    """The whole check, as a gate does it: decode both, signature over the digest of received bytes, claims."""
    try:
        found = Attestation.decode(data)
        described = Descriptor.decode(DESCRIPTOR.encode() if descriptor is None else descriptor)
    except (EncodingError, AdmissionError):
        return False
    return found.signed_by(KEY.public, described.digest()) and found.mismatch(described) is None


# ------------------------------------------------------------------------------ what it is


def test_it_is_what_another_codec_and_another_library_sign() -> None:
    assert message() == MADE
    tagged = cbor2.loads(MADE)
    assert tagged.tag == 18
    protected, unprotected, payload, signature = tagged.value
    assert (unprotected, payload) == ({}, None)
    assert cbor2.loads(protected) == HEADER
    Ed25519PublicKey.from_public_bytes(KEY.public.x).verify(
        signature, cbor2.dumps(["Signature1", protected, b"", DIGEST])
    )
    assert len(MADE) < 450


def test_what_it_says() -> None:
    found = Attestation.decode(MADE)
    assert (found.alg, found.kid, found.iss) == (-8, KEY.public.id, KEY.public.name)
    assert (found.aud, found.exp, found.nbf, found.iat) == (DESCRIPTOR.audience, DESCRIPTOR.expires, 1_767_225_600, IAT)
    assert found.cti == CLAIMS[7]
    assert found.tag is None
    assert accepted(MADE)


@pytest.mark.parametrize("optional", [{}, {"profile": "top=0.25"}, {"anchor": bytes(range(32))}, FULL_VALUES])
def test_it_repeats_the_terms_of_use(optional: dict[str, Any]) -> None:
    """Also where it is public, which is a claim of its own."""
    for bound in ({}, {"clip_norm": 0, "noise_multiplier": 0}):
        descriptor = described(**{**optional, **bound})
        found = Attestation.decode(attest(descriptor, KEY, issued_at=IAT))
        assert found.mismatch(descriptor) is None
        assert (found.terms, found.anchor) == (descriptor.terms, descriptor.anchor)
        assert found.terms.public is (descriptor.clip_norm == 0)
        assert cbor2.loads(found.protected)[15][-65541] is bool(bound)


@pytest.mark.parametrize("optional", [{}, {"profile": "top=0.25"}, {"anchor": bytes(range(32))}, FULL_VALUES])
def test_it_may_name_its_ledger(optional: dict[str, Any]) -> None:
    """As the last claim; both readers read it, and no other ledger may admit it."""
    descriptor = described(**optional)
    data = attest(descriptor, KEY, issued_at=IAT, ledger=bytes(range(50, 82)))
    found = Attestation.decode(data)
    assert found.mismatch(descriptor) is None and found.signed_by(KEY.public, descriptor.digest())
    assert list(cbor2.loads(found.protected)[15].items())[-1] == (-65544, bytes(range(50, 82)))
    fields = attestation.match_header(found.protected)
    assert fields == attestation._decode_header(found.protected)
    assert fields is not None and fields[-1] == found.ledger == bytes(range(50, 82))
    assert found.may_enter(bytes(range(50, 82))) and not found.may_enter(bytes(32))
    assert Attestation.decode(attest(descriptor, KEY, issued_at=IAT)).may_enter(bytes(32))


def test_a_subject_tag() -> None:
    tag = subject_tag(bytes(32), "patient 17")
    data = attest(DESCRIPTOR, KEY, issued_at=IAT, subject_tag=tag)
    found = Attestation.decode(data)
    assert (found.tag, found.sub) == (tag, f"tag:{tag}")
    assert accepted(data)
    for wrong in ("", "17", tag.upper(), tag + "00"):
        with raises_code("admit.attestation-malformed"):
            attest(DESCRIPTOR, KEY, issued_at=IAT, subject_tag=wrong)


def test_the_newer_name_of_the_algorithm_is_accepted() -> None:
    data = message(HEADER | {1: -19})
    assert Attestation.decode(data).alg == -19
    assert accepted(data)


def test_the_signed_structure_is_the_codec_s() -> None:
    for size in (24, 255, 256, 300, 1023, 65_535):
        protected = bytes(size)
        expected = ["Signature1", protected, b"", DIGEST]
        assert sig_structure(protected, DIGEST) == cbor2.dumps(expected)
        assert sig_structure(protected, DIGEST) == cbor.encode(expected, max_size=2**17)


# ------------------------------------------------------------------------------ who and what it is about


def test_another_key_descriptor_or_signature() -> None:
    found = Attestation.decode(MADE)
    stranger = PrivateKey.generate()
    assert found.signed_by(KEY.public, DIGEST)
    assert not found.signed_by(stranger.public, DIGEST)
    assert not found.signed_by(KEY.public, hashlib.sha256(b"").digest())
    stolen = Attestation.decode(message(key=stranger))  # names our key, signed by another
    assert not stolen.signed_by(KEY.public, DIGEST)
    assert not stolen.signed_by(stranger.public, DIGEST)  # not the key it names


def test_a_key_signs_only_for_itself() -> None:
    with raises_code("admit.contributor-not-signer"):
        attest(DESCRIPTOR, PrivateKey.generate(), issued_at=IAT)
    for moment in (-1, LAST_SECOND + 1, True, 1.5):
        with raises_code("admit.issued-at-out-of-range"):
            attest(DESCRIPTOR, KEY, issued_at=moment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "value", "word"),
    [
        (4, 1_798_761_601, "exp"),
        (5, 1_767_225_599, "nbf"),
        (3, "example.org/other", "aud"),
        (7, bytes(16), "cti"),
        (2, f"contribution:{bytes(32).hex()}", "sub"),
        (-65537, "standard", "admissibility"),
        (-65538, "eeg", "data_class"),
        (-65539, 999_999, "clip_norm"),
        (-65540, 4_224_680, "noise_multiplier"),
        (-65542, "top=0.25", "profile"),
        (-65543, bytes(32), "anchor"),
    ],
)
def test_claims_that_differ_from_the_descriptor(claim: int, value: Any, word: str) -> None:
    """Strictly encoded and rightly signed, but about something else."""
    data = message(HEADER | {15: CLAIMS | {claim: value}})
    found = Attestation.decode(data)
    assert found.signed_by(KEY.public, DIGEST)
    told = found.mismatch(DESCRIPTOR)
    assert told is not None
    assert word in told
    assert not accepted(data)


def test_a_contributor_who_is_not_the_key() -> None:
    other = PrivateKey.generate()
    header = HEADER | {4: other.public.id, 15: CLAIMS | {1: other.public.name}}
    found = Attestation.decode(message(header, key=other))
    assert found.signed_by(other.public, DIGEST)
    assert found.mismatch(DESCRIPTOR) == "the key is not the contributor"


# ------------------------------------------------------------------------------ what it must not say


@pytest.mark.parametrize("alg", [-7, -35, -36, -53, -257, -48, 0, 1, 5, -9, 2**32, "EdDSA", b"\x27", True])
def test_algorithm_confusion(alg: object) -> None:
    data = message(HEADER | {1: alg})
    with raises_code("admit.algorithm-not-allowed"):
        Attestation.decode(data)


def without(header: dict[Any, Any], *labels: int) -> dict[Any, Any]:
    return {label: value for label, value in header.items() if label not in labels}


REFUSED: dict[str, Callable[[], bytes]] = {
    "no alg": lambda: message(without(HEADER, 1)),
    "alg unprotected": lambda: message(without(HEADER, 1), unprotected={1: -8}),
    "alg in both": lambda: message(unprotected={1: -8}),
    "kid unprotected": lambda: message(without(HEADER, 4), unprotected={4: KEY.public.id}),
    "hash unprotected": lambda: message(without(HEADER, 258), unprotected={258: -16}),
    "anything unprotected": lambda: message(unprotected={99: 1}),
    "unprotected no map": lambda: message(unprotected=[]),
    "kid short": lambda: message(HEADER | {4: KEY.public.id[:31]}),
    "kid text": lambda: message(HEADER | {4: KEY.public.name}),
    "no typ": lambda: message(without(HEADER, 16)),
    "another typ": lambda: message(HEADER | {16: "application/lamina-receipt+cose"}),
    "typ number": lambda: message(HEADER | {16: 60}),
    "typ upper case": lambda: message(HEADER | {16: TYPE.upper()}),
    "no 258": lambda: message(without(HEADER, 258)),
    "258 sha-512": lambda: message(HEADER | {258: -44}),
    "258 positive": lambda: message(HEADER | {258: 16}),
    "258 text": lambda: message(HEADER | {258: "sha-256"}),
    "no 259": lambda: message(without(HEADER, 259)),
    "another 259": lambda: message(HEADER | {259: "application/cbor"}),
    "259 number": lambda: message(HEADER | {259: 60}),
    "260 present": lambda: message(HEADER | {260: "https://example.org/d"}),
    "label 3": lambda: message(HEADER | {3: CONTENT}),
    "crit": lambda: message(HEADER | {2: [258]}),
    "crit empty": lambda: message(HEADER | {2: []}),
    "unknown label": lambda: message(HEADER | {100: 1}),
    "text label": lambda: message(HEADER | {"x": 1}),
    "no claims": lambda: message(without(HEADER, 15)),
    "claims no map": lambda: message(HEADER | {15: []}),
    "claim missing": lambda: message(HEADER | {15: without(CLAIMS, 6)}),
    "claim unknown": lambda: message(HEADER | {15: CLAIMS | {8: 1}}),
    "iss another": lambda: message(HEADER | {15: CLAIMS | {1: "example.org"}}),
    "iss upper case": lambda: message(HEADER | {15: CLAIMS | {1: KEY.public.name.upper()}}),
    "iss bytes": lambda: message(HEADER | {15: CLAIMS | {1: KEY.public.id}}),
    "sub free text": lambda: message(HEADER | {15: CLAIMS | {2: "patient 17"}}),
    "sub short": lambda: message(HEADER | {15: CLAIMS | {2: "tag:00"}}),
    "sub not hex": lambda: message(HEADER | {15: CLAIMS | {2: "tag:" + "g" * 64}}),
    "sub unicode digits": lambda: message(HEADER | {15: CLAIMS | {2: "tag:" + "٣" * 64}}),
    "sub another kind": lambda: message(HEADER | {15: CLAIMS | {2: "name:" + "0" * 64}}),
    "sub bytes": lambda: message(HEADER | {15: CLAIMS | {2: DIGEST}}),
    "aud empty": lambda: message(HEADER | {15: CLAIMS | {3: ""}}),
    "aud long": lambda: message(HEADER | {15: CLAIMS | {3: "a" * 256}}),
    "aud bytes": lambda: message(HEADER | {15: CLAIMS | {3: b"example.org/corpus"}}),
    "exp negative": lambda: message(HEADER | {15: CLAIMS | {4: -1}}),
    "exp float": lambda: message(HEADER | {15: CLAIMS | {4: 1_798_761_600.5}}),
    "exp bool": lambda: message(HEADER | {15: CLAIMS | {4: True}}),
    "exp tagged": lambda: message(HEADER | {15: CLAIMS | {4: cbor2.CBORTag(1, 1_798_761_600)}}),
    "nbf beyond": lambda: message(HEADER | {15: CLAIMS | {5: LAST_SECOND + 1}}),
    "iat text": lambda: message(HEADER | {15: CLAIMS | {6: "now"}}),
    "iat null": lambda: message(HEADER | {15: CLAIMS | {6: None}}),
    "cti short": lambda: message(HEADER | {15: CLAIMS | {7: bytes(15)}}),
    "cti text": lambda: message(HEADER | {15: CLAIMS | {7: "0" * 16}}),
    "no terms": lambda: message(HEADER | {15: without(CLAIMS, *range(-65541, -65536))}),
    "no class": lambda: message(HEADER | {15: without(CLAIMS, -65537)}),
    "no public": lambda: message(HEADER | {15: without(CLAIMS, -65541)}),
    "class empty": lambda: message(HEADER | {15: CLAIMS | {-65537: ""}}),
    "class bytes": lambda: message(HEADER | {15: CLAIMS | {-65537: b"sensitive"}}),
    "data class upper case": lambda: message(HEADER | {15: CLAIMS | {-65538: "ECG"}}),
    "clip norm negative": lambda: message(HEADER | {15: CLAIMS | {-65539: -1}}),
    "clip norm bool": lambda: message(HEADER | {15: CLAIMS | {-65539: True}}),
    "noise beyond": lambda: message(HEADER | {15: CLAIMS | {-65540: 10**15 + 1}}),
    "half a bound": lambda: message(HEADER | {15: CLAIMS | {-65540: 0}}),
    "public with a bound": lambda: message(HEADER | {15: CLAIMS | {-65541: True}}),
    "private without": lambda: message(HEADER | {15: CLAIMS | {-65539: 0, -65540: 0}}),
    "public a number": lambda: message(HEADER | {15: CLAIMS | {-65541: 0}}),
    "profile empty": lambda: message(HEADER | {15: CLAIMS | {-65542: ""}}),
    "profile not printable": lambda: message(HEADER | {15: CLAIMS | {-65542: "top=\n1"}}),
    "profile long": lambda: message(HEADER | {15: CLAIMS | {-65542: "a" * 1025}}),
    "anchor short": lambda: message(HEADER | {15: CLAIMS | {-65543: bytes(31)}}),
    "anchor in a profile": lambda: message(HEADER | {15: CLAIMS | {-65542: ":\0\1\0\6X " + "a" * 32}}),
    "ledger short": lambda: message(HEADER | {15: CLAIMS | {-65544: bytes(31)}}),
    "ledger text": lambda: message(HEADER | {15: CLAIMS | {-65544: "0" * 64}}),
    "ledger in a profile": lambda: message(HEADER | {15: CLAIMS | {-65542: ":\0\1\0\7X " + "a" * 32}}),
    "term unknown": lambda: message(HEADER | {15: CLAIMS | {-65545: 1}}),
    "payload attached": lambda: message(payload=DIGEST),
    "payload empty": lambda: message(payload=b""),
    "untagged": lambda: message(tag=None),
    "tag of COSE_Mac0": lambda: message(tag=17),
    "tag twice": lambda: b"\xd2" + MADE,
    "CWT tag": lambda: b"\xd8\x3d" + MADE,
    "trailing byte": lambda: MADE + b"\x00",
    "cut": lambda: MADE[:-1],
    "five items": lambda: b"\xd2\x85" + MADE[2:] + b"\x00",
    "three items": lambda: b"\xd2\x83" + MADE[2:-66],
    "short signature": lambda: MADE[:-66] + b"\x58\x3f" + MADE[-64:-1],
    "signature as text": lambda: MADE[:-66] + b"\x78\x40" + b"a" * 64,
    "tag not shortest": lambda: b"\xd8\x12" + MADE[1:],
    "indefinite array": lambda: b"\xd2\x9f" + MADE[2:] + b"\xff",
    "protected no bytes": lambda: b"\xd2\x84" + encoded(HEADER) + MADE[-68:],
    "protected empty": lambda: message(b""),
    "protected no map": lambda: message(encoded([1])),
    "protected trailing": lambda: message(encoded(HEADER) + b"\x00"),
    "protected indefinite": lambda: message(b"\xbf" + encoded(HEADER)[1:] + b"\xff"),
    "protected head not shortest": lambda: message(b"\xb8\x06" + encoded(HEADER)[1:]),
    "alg not shortest": lambda: message(encoded(HEADER).replace(b"\x01\x27\x04", b"\x01\x38\x07\x04", 1)),
    "258 not shortest": lambda: message(encoded(HEADER).replace(b"\x19\x01\x02\x2f", b"\x1a\x00\x00\x01\x02\x2f", 1)),
    "duplicate alg": lambda: message(b"\xa7\x01\x27" + encoded(HEADER)[1:]),
    "duplicate claim": lambda: message(encoded(HEADER).replace(b"\x0f\xac", b"\x0f\xad" + encoded(CLAIMS)[1:68], 1)),
    "labels out of order": lambda: message(b"\xa6" + encoded(HEADER)[3:38] + b"\x01\x27" + encoded(HEADER)[38:]),
    "too large": lambda: MADE + bytes(MAX_ATTESTATION),
    "nothing": lambda: b"",
    "a number": lambda: b"\x01",
    "null": lambda: b"\xf6",
    "a tagged number": lambda: b"\xd2\x01",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_though_rightly_signed(name: str) -> None:
    with pytest.raises((EncodingError, AdmissionError)):
        Attestation.decode(REFUSED[name]())


def test_the_mutations_are_what_they_are_called() -> None:
    """Each of the byte edits above hits: the message that it starts from would be accepted."""
    plain = encoded(HEADER)
    assert plain[:3] == b"\xa6\x01\x27"
    assert plain.count(b"\x01\x27\x04") == plain.count(b"\x19\x01\x02\x2f") == plain.count(b"\x0f\xac") == 1
    assert plain[3:38] == b"\x04" + cbor2.dumps(KEY.public.id)
    assert encoded(CLAIMS)[1:68] == b"\x01" + cbor2.dumps(KEY.public.name)
    assert MADE[-68:] == b"\xa0\xf6\x58\x40" + MADE[-64:]
    assert len({REFUSED[name]() for name in REFUSED}) == len(REFUSED)


def test_the_size_is_looked_at_first() -> None:
    with raises_code("admit.attestation-too-large"):
        Attestation.decode(bytes(10_000_000))


# ------------------------------------------------------------------------------ one bit


def test_no_changed_bit_is_accepted() -> None:
    """Every bit of an attestation and of its descriptor, and of others until there are 10,000."""
    made = MADE, DESCRIPTOR.encode()
    assert accepted(*made)
    tried = 0
    number = 0
    while tried < 10_000:
        attestation, descriptor = made
        for which, data in enumerate((attestation, descriptor)):
            for bit in range(8 * len(data)):
                flipped = bytearray(data)
                flipped[bit // 8] ^= 1 << bit % 8
                pair = (bytes(flipped), descriptor) if which == 0 else (attestation, bytes(flipped))
                assert not accepted(*pair), (number, which, bit)
                tried += 1
        number += 1
        other = Descriptor.decode(DESCRIPTOR.encode().replace(NONCE, hashlib.sha256(bytes([number])).digest()[:16]))
        tag = subject_tag(bytes(32), str(number))
        made = attest(other, KEY, issued_at=IAT + number, subject_tag=tag), other.encode()
        assert accepted(*made)
