"""What is signed in a folder already: whose it is, and whether signing it again would take back a promise."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from lamina.admit.attestation import Attestation
from lamina.admit.demands import Demands
from lamina.admit.descriptor import Descriptor
from lamina.admit.key import PrivateKey
from lamina.admit.source import Contribution
from lamina.admit.terms import Terms
from lamina.errors import AdmissionError, EncodingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Descriptor and attestation as far as they can be read; `attested` if there is an attestation at all."""

    descriptor: Descriptor | None
    claims: Attestation | None
    attested: bool

    @classmethod
    def of(cls, given: Contribution) -> Prior:
        descriptor = claims = None
        with suppress(EncodingError, AdmissionError):
            descriptor = None if given.descriptor is None else Descriptor.decode(given.descriptor)
        with suppress(EncodingError, AdmissionError):
            claims = None if given.attestation is None else Attestation.decode(given.attestation)
        return cls(descriptor=descriptor, claims=claims, attested=given.attestation is not None)

    def of_another(self, kid: bytes | None) -> bool:
        """Whether it names another key than this one. Its signature cannot be verified: only its thumbprint is known.

        What was torn while this key replaced it names this key in its descriptor, which is written first.
        """
        owner = None
        if self.descriptor is not None:
            owner = self.descriptor.contributor
        elif self.claims is not None:
            owner = self.claims.kid
        return self.attested and owner is not None and owner != kid

    def by(self, key: PrivateKey | None) -> Descriptor | None:
        """The descriptor, if it names this key; whether it is signed is another question."""
        if key is None or self.descriptor is None or self.descriptor.contributor != key.public.id:
            return None
        return self.descriptor

    def holds(self, key: PrivateKey | None) -> bool:
        """Whether the two belong together and this key signed them."""
        if key is None or self.descriptor is None or self.claims is None:
            return False
        return self.claims.agrees(self.descriptor) is None and self.claims.signed_by(
            key.public, self.descriptor.digest()
        )


def as_strict(signed: Descriptor, terms: Terms) -> bool:
    """Whether the signed bound is at least as strict as the one in `terms`."""
    if not terms.noise_multiplier or not signed.noise_multiplier:  # public: no bound at all
        return not terms.noise_multiplier
    return signed.clip_norm <= terms.clip_norm and signed.noise_multiplier >= terms.noise_multiplier


def loosens(terms: Terms, signed: Descriptor, demands: Demands) -> bool:
    """Whether signing `terms` would give up anything that was promised: c, z or depth."""
    if signed.noise_multiplier:
        if not terms.noise_multiplier:
            return True
        if terms.clip_norm > signed.clip_norm or terms.noise_multiplier < signed.noise_multiplier:
            return True
    if signed.profile is None:
        return False
    if not demands.allows(signed.profile, terms.admissibility):
        return True
    return terms.profile is None and not demands.classes[terms.admissibility].profile.whole


def strictest(terms: Terms, signed: Descriptor) -> Terms:
    """The terms, with what was signed in the same class wherever that is stricter."""
    if terms.noise_multiplier and signed.noise_multiplier:
        terms = replace(
            terms,
            clip_norm=min(terms.clip_norm, signed.clip_norm),
            noise_multiplier=max(terms.noise_multiplier, signed.noise_multiplier),
        )
    return terms if terms.profile is not None else replace(terms, profile=signed.profile)
