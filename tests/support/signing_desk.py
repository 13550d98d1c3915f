"""A desk that signs contributions: good ones, and any kind of bad one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina import cbor
from lamina.admit.attestation import Descriptor, attest, commit
from lamina.admit.contribution_sources import Contribution
from lamina.admit.gate import AdmissionGate
from lamina.admit.terms import SigningTerms
from lamina.plan.policy import Policy
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import PrivateKey
from lamina.sign.signed_json import sig_structure

NOW = 1_800_000_000
HOUR = 3600


def policy(**changes: Any) -> Policy:
    """Three classes: restricted, whole, public. `changes` go into [corpus]; those named by a class into its table."""
    classes: dict[str, dict[str, Any]] = {
        "clinical": {"population": 1000, "clip_norm": 2.0, "epsilon": 1.0, "profile": {"top": 0.25}},
        "standard": {"population": 1000, "clip_norm": 1.0, "noise_multiplier": 2.0},
        "open": {"public": True},
    }
    for name in list(changes):
        if name in classes:
            classes[name].update(changes.pop(name))
    corpus = {
        "origin": "example.org/ecg",
        "delta": 1e-5,
        "accountant": "rdp",
        "floors": {"clip_norm": 0.1, "noise_multiplier": 0.5},
        **changes,
    }
    return Policy.from_dict({"corpus": corpus, "class": classes})


class Desk:
    """One contributor with one key, registered; a policy; a clock that is set by hand."""

    NOW, HOUR = NOW, HOUR
    policy_with = staticmethod(policy)

    def __init__(self) -> None:
        self.policy = policy()
        self.key = PrivateKey.generate()
        self.keys = KeyRing()
        self.keys.add(self.key.public, label="clinic", valid_from=NOW - 10 * HOUR)
        self.now: float = NOW
        self.ledger: bytes | None = None  # that contributions name

    def gate(self, **options: Any) -> AdmissionGate:
        chosen = options.pop("policy", self.policy)
        return AdmissionGate(chosen, options.pop("keys", self.keys), clock=lambda: self.now, **options)

    def terms(self, cls: str = "clinical", **options: Any) -> SigningTerms:
        window = {"not_before": NOW - HOUR, "expires": NOW + 100 * HOUR}
        return SigningTerms.make(options.pop("policy", self.policy), cls, **{**window, **options})

    def descriptor(self, payload: bytes, cls: str = "clinical", **changes: Any) -> Descriptor:
        """A descriptor of the class's terms; `changes` are fields of it."""
        nonce = changes.pop("nonce", None) or os.urandom(16)
        made = self.terms(cls).descriptor(
            contributor=self.key.public.id, nonce=nonce, commitment=commit(nonce, payload), items=1
        )
        return replace(made, **changes)

    def offer(
        self,
        id: str = "one",
        cls: str = "clinical",
        *,
        payload: bytes | None = None,
        key: PrivateKey | None = None,
        issued_at: int = NOW - HOUR,
        tag: str | None = None,
        **changes: Any,
    ) -> Contribution:
        """A contribution, signed as it should be unless `changes` say otherwise."""
        data = b"data of " + id.encode("utf-8", "surrogatepass") if payload is None else payload
        signer, only = key or self.key, changes.pop("ledger", self.ledger)
        descriptor = self.descriptor(data, cls, **{"contributor": signer.public.id, **changes})
        signed = attest(descriptor, signer, issued_at=issued_at, subject_tag=tag, ledger=only)
        return Contribution(id, descriptor.encode(), signed, data)

    def resigned(self, given: Contribution, change: Callable[[dict[Any, Any]], None]) -> Contribution:
        """The same with another protected header, and a signature that is right for it."""
        assert given.descriptor is not None and given.attestation is not None
        protected = cbor.decode(given.attestation, null=True, tags=(18,)).value[0]
        header = cbor.decode(protected)
        change(header)
        protected = cbor.encode(header)
        digest = hashlib.sha256(given.descriptor).digest()
        signature = self.key.sign(sig_structure(protected, digest))
        message = cbor.Tag(number=18, value=[protected, {}, None, signature])
        return replace(given, attestation=cbor.encode(message, null=True, tags=(18,)))

    @staticmethod
    def write(folder: Path, given: Contribution, suffix: str = ".bin") -> Path:
        """Put it into a folder of contributions."""
        place = folder / given.id
        place.mkdir(parents=True)
        if given.descriptor is not None:
            (place / "descriptor.cbor").write_bytes(given.descriptor)
        if given.attestation is not None:
            (place / "attestation.cose").write_bytes(given.attestation)
        if isinstance(given.payload, bytes):
            (place / f"payload{suffix}").write_bytes(given.payload)
        return place
