"""Our attestations verify elsewhere, and what others sign verifies here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from signed_descriptor import KEY, SEED, described

from lamina.admit.attestation import (
    ATTESTATION_TYPE,
    DESCRIPTOR_CONTENT_TYPE,
    Attestation,
    Descriptor,
    attest,
    subject_tag,
)
from lamina.sign.keys import PrivateKey

Ask = Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]
TAG = subject_tag(bytes(32), "patient 17")


DESCRIPTORS = {
    "plain": (described(), None),
    "tagged": (described(), TAG),
    "everything": (described(profile="top=0.25", anchor=bytes(range(32)), audience="köln.example"), TAG),
    "public": (described(clip_norm=0, noise_multiplier=0, items=1), None),
}


def terms(descriptor: Descriptor) -> dict[int, Any]:
    """The private claims that repeat a descriptor, without its anchor."""
    said = {
        -65537: descriptor.admissibility, -65538: descriptor.data_class, -65539: descriptor.clip_norm,
        -65540: descriptor.noise_multiplier, -65541: descriptor.clip_norm == 0, -65542: descriptor.profile,
    }  # fmt: skip
    return {key: value for key, value in said.items() if value is not None}


def test_ours_verifies_there(peer: Ask) -> None:
    made = [
        attest(each, KEY, issued_at=1_767_225_601, subject_tag=tag, ledger=bytes(range(32)) if tag else None)
        for each, tag in DESCRIPTORS.values()
    ]
    answers = peer(
        "verify",
        [
            {"attestation": data.hex(), "key": KEY.public.cose().hex(), "digest": descriptor.digest().hex()}
            for data, (descriptor, _) in zip(made, DESCRIPTORS.values(), strict=True)
        ],
    )
    for found, data, (descriptor, _) in zip(answers, made, DESCRIPTORS.values(), strict=True):
        ours = Attestation.decode(data)
        claims = {
            "1": KEY.public.name, "2": ours.sub, "3": descriptor.audience, "4": descriptor.expires,
            "5": descriptor.not_before, "6": 1_767_225_601, "7": ours.cti.hex(),
            **{str(key): value for key, value in terms(descriptor).items()},
            **({"-65543": descriptor.anchor.hex()} if descriptor.anchor else {}),
            **({"-65544": bytes(range(32)).hex()} if ours.tag else {}),
        }  # fmt: skip
        assert found.pop("kind") in ("Sign1Message", "Sign1")
        assert found == {
            "verified": True, "alg": -8, "kid": KEY.public.name, "typ": ATTESTATION_TYPE, "hash": -16, "content": DESCRIPTOR_CONTENT_TYPE,
            "unprotected": 0, "detached": True, "claims": claims,
        }  # fmt: skip


def test_another_descriptor_key_or_header_fails_there(peer: Ask) -> None:
    descriptor, _ = DESCRIPTORS["plain"]
    made = attest(descriptor, KEY, issued_at=1_767_225_601)
    right = {"attestation": made.hex(), "key": KEY.public.cose().hex(), "digest": descriptor.digest().hex()}
    later = made.replace((1_767_225_601).to_bytes(4, "big"), (1_767_225_602).to_bytes(4, "big"))
    wrong = [
        {"digest": described(items=13).digest().hex()},
        {"key": PrivateKey.generate().public.cose().hex()},
        {"attestation": later.hex()},
    ]
    found = peer("verify", [right, *(right | each for each in wrong)])
    assert [each["verified"] for each in found] == [True, False, False, False]


def test_theirs_verifies_here(peer: Ask) -> None:
    """What they sign is the same message to the byte: deterministic CBOR, deterministic signatures."""
    asked, expected = [], []
    for descriptor, tag in DESCRIPTORS.values():
        expected.append(attest(descriptor, KEY, issued_at=1_767_225_601, subject_tag=tag))
        sub = f"contribution:{descriptor.digest().hex()}" if tag is None else f"tag:{tag}"
        asked.append(
            {
                "x": KEY.public.x.hex(),
                "d": SEED.hex(),
                "kid": KEY.public.name,
                "iss": KEY.public.name,
                "sub": sub,
                "aud": descriptor.audience,
                "exp": descriptor.expires,
                "nbf": descriptor.not_before,
                "iat": 1_767_225_601,
                "cti": hashlib.sha256(b"cti" + descriptor.nonce).digest()[:16].hex(),
                "terms": list(terms(descriptor).items()),
                "anchor": "" if descriptor.anchor is None else descriptor.anchor.hex(),
                "typ": "application/lamina-attestation+cose",
                "content": "application/lamina-descriptor+cbor",
                "digest": hashlib.sha256(descriptor.encode()).hexdigest(),
            }
        )
    answers = peer("sign", asked)
    for found, ours, (descriptor, tag) in zip(answers, expected, DESCRIPTORS.values(), strict=True):
        theirs = bytes.fromhex(found["attestation"])
        read = Attestation.decode(theirs)
        assert read.signed_by(KEY.public, descriptor.digest())
        assert read.mismatch(descriptor) is None
        assert read.tag == tag
        assert not read.signed_by(KEY.public, described(items=13).digest())
        assert theirs == ours
