"""Attestations: what the leaf says of a contribution is what its contributor signed."""

from __future__ import annotations

import hashlib

from lamina.admit.attestation import Attestation
from lamina.admit.times import shown
from lamina.errors import AdmissionError, EncodingError
from lamina.ledger.check.keys import Keys
from lamina.ledger.check.problem import bad
from lamina.ledger.clock import SKEW
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Admitted


class Attestations:
    """Checks the signature of each contribution with the key that counted when it was admitted."""

    def __init__(self, origin: str, keys: Keys) -> None:
        self._origin, self._keys = origin, keys
        self.checked = 0

    def check(self, leaf: Leaf, data: bytes | None) -> bytes:
        """The token (key, cti) of a contribution whose attestation is these bytes."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Admitted)
        if data is None:
            bad(
                seq,
                Admitted,
                "verify.attestation-not-not",
                "its attestation is not there, and it is not pruned",
            )
        if hashlib.sha256(data).digest() != record.attestation:
            bad(
                seq,
                Admitted,
                "verify.attestation-beside-another",
                "the attestation beside it is another one than it names",
            )
        try:
            signed = Attestation.decode(data)
        except (EncodingError, AdmissionError) as error:
            bad(
                seq,
                Admitted,
                "verify.attestation-not-read",
                f"its attestation cannot be read: {error.problem}",
            )
        if signed.kid != record.key:
            bad(
                seq,
                Admitted,
                "verify.attestation-key-not",
                f"its attestation is by key {signed.kid.hex()[:16]}, not {record.key.hex()[:16]}",
            )
        key = self._keys.contributor(record.key, leaf.time, signed.iat)
        if isinstance(key, str):
            bad(seq, Admitted, "verify.check", key)
        if signed.iat > leaf.time + SKEW:
            bad(
                seq,
                Admitted,
                "verify.signed-admitted-leaf",
                f"signed at {shown(signed.iat)}, admitted at {shown(leaf.time)}: the leaf was back-dated",
            )
        if not signed.signed_by(key, record.descriptor):
            bad(
                seq,
                Admitted,
                "verify.signature-attestation-not",
                f"the signature of its attestation is not by key {record.key.hex()[:16]} over it",
            )
        if signed.aud != self._origin:
            bad(
                seq,
                Admitted,
                "verify.attestation-signed-another",
                f"its attestation was signed for {signed.aud!r}, another ledger",
            )
        if (signed.nbf, signed.exp) != (record.not_before, record.expires):
            bad(
                seq,
                Admitted,
                "verify.attestation-valid-another",
                "its attestation is valid in another window than the leaf says",
            )
        if signed.tag != (None if record.subject is None else record.subject.hex()):
            bad(
                seq,
                Admitted,
                "verify.attestation-another-subject",
                "its attestation is about another subject than the leaf says",
            )
        self.checked += 1
        return signed.kid + signed.cti
