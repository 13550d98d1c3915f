"""`Examiner`: everything that can be said about one contribution by itself."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lamina.admit.attestation import MAX_ATTESTATION, Attestation
from lamina.admit.demands import Demands
from lamina.admit.descriptor import MAX_DESCRIPTOR, Descriptor
from lamina.admit.keyring import KeyEntry, KeyRing, Standing
from lamina.admit.reason import Reason
from lamina.admit.refusal import Refused
from lamina.admit.rows import pack
from lamina.admit.source import Contribution, open_plain
from lamina.admit.times import shown
from lamina.errors import AdmissionError, EncodingError, UnknownSchema, WrongAlgorithm

SKEW = 120  # seconds by which a contributor's clock may be ahead
MAX_PAYLOAD = 1 << 36
MAX_ID = 255  # bytes
ROLE = "contributor"

Verdict = bytes | tuple[Reason, str]  # a row of `rows.ROW`, or why not

_CHUNK = 1 << 20
_STANDING = {
    Standing.REVOKED: Reason.REVOKED_KEY,
    Standing.RETIRED: Reason.RETIRED_KEY,
    Standing.NOT_YET: Reason.EARLY_KEY,
}


class Examiner:
    """Checks in a fixed order, the cheap ones first: nothing is verified for a key that nobody knows. Changes nothing.

    size, presence · strict encoding, schema · key: known, role, standing, algorithm · signature · claims · audience ·
    window · policy, class, floors, bound, profile · payload
    """

    def __init__(self, demands: Demands, keys: KeyRing, max_payload: int = MAX_PAYLOAD) -> None:
        self._demands = demands
        self._keys = keys
        self._max_payload = max_payload
        self.version = keys.version
        self.kids = tuple(sorted(entry.id for entry in keys))  # what the column `key` counts in
        self._rows = {kid: row for row, kid in enumerate(self.kids)}

    def examine(self, given: Contribution, now: int) -> Verdict:
        """A row if it may enter at the second `now`, as far as it alone is concerned."""
        try:
            return self._examined(given, now)
        except Refused as refused:
            return refused.reason, refused.detail
        except Exception as error:
            return Reason.CHECK_FAILED, type(error).__name__

    def _examined(self, given: Contribution, now: int) -> bytes:
        check_id(given.id)
        if given.trouble is not None:
            raise Refused(*given.trouble)
        descriptor, attestation = _present(given)
        signed, claims = _parsed(descriptor, attestation)
        entry = self._key(claims, now)
        if not claims.signed_by(entry.key, signed.digest()):
            raise Refused(Reason.BAD_SIGNATURE, f"key {entry.key.name[:16]}…")
        if differs := claims.agrees(signed):
            raise Refused(Reason.MISMATCH, differs)
        if signed.audience != self._demands.origin:
            raise Refused(Reason.WRONG_AUDIENCE, f"signed for {signed.audience!r}")
        _check_window(signed, claims, now)
        demand = self._demands.check(signed)
        self.check_payload(given.payload, signed.nonce, signed.commitment)
        digest = hashlib.sha256(attestation).digest()
        return pack(given.id, signed, claims, digest, self._rows[entry.id], demand.row)

    def _key(self, claims: Attestation, now: int) -> KeyEntry:
        entry = self._keys.get(claims.kid)
        if entry is None:
            raise Refused(Reason.UNKNOWN_KEY, f"key {claims.kid.hex()[:16]}…")
        if entry.role != ROLE:
            raise Refused(Reason.WRONG_ROLE, f"key {entry.label!r} is for {entry.role}")
        standing = entry.standing(now, claims.iat)
        if standing is not Standing.USABLE:
            raise Refused(_STANDING[standing], f"key {entry.label!r}")
        if not entry.accepts(claims.alg):
            raise Refused(
                Reason.WRONG_ALGORITHM, f"{claims.alg}, key {entry.label!r} is for {entry.algorithms}"
            )
        return entry

    def check_payload(self, payload: bytes | Path | None, nonce: bytes, commitment: bytes) -> None:
        """Whether it is what was committed to. Refused otherwise."""
        if isinstance(payload, bytes):
            if len(payload) > self._max_payload:
                raise Refused(Reason.TOO_LARGE, f"payload of {len(payload)} bytes")
            found = hashlib.sha256(nonce + payload).digest()
        elif payload is not None:
            found = self._digest_of(payload, nonce)
        else:
            raise Refused(Reason.NO_PAYLOAD)
        if found != commitment:
            raise Refused(Reason.PAYLOAD_MISMATCH)

    def _digest_of(self, path: Path, nonce: bytes) -> bytes:
        """Read once, from one open file: what is measured is what is hashed."""
        hasher, size = hashlib.sha256(nonce), 0
        try:
            file = open_plain(path)
        except FileNotFoundError:
            raise Refused(Reason.NO_PAYLOAD) from None
        try:
            if (length := os.fstat(file).st_size) > self._max_payload:
                raise Refused(Reason.TOO_LARGE, f"payload of {length} bytes")
            while part := os.read(file, _CHUNK):
                hasher.update(part)
                size += len(part)
                if size > self._max_payload:
                    raise Refused(Reason.TOO_LARGE, "the payload grew while it was read")
        except OSError as error:
            raise Refused(Reason.UNREADABLE, f"payload: {error.strerror}") from None
        finally:
            os.close(file)
        return hasher.digest()


def check_id(id: str) -> None:
    """An id is printable text of 1 to 255 bytes."""
    if not id or not id.isprintable() or len(id.encode()) > MAX_ID:
        raise Refused(Reason.BAD_ID)


def _present(given: Contribution) -> tuple[bytes, bytes]:
    descriptor, attestation = given.descriptor, given.attestation
    for what, data, most in (
        ("descriptor", descriptor, MAX_DESCRIPTOR),
        ("attestation", attestation, MAX_ATTESTATION),
    ):
        if data is not None and len(data) > most:
            raise Refused(Reason.TOO_LARGE, f"{what} of more than {most} bytes")
    if attestation is None:
        raise Refused(Reason.NO_ATTESTATION)
    if descriptor is None:
        raise Refused(Reason.NO_DESCRIPTOR)
    if given.payload is None:
        raise Refused(Reason.NO_PAYLOAD)
    return descriptor, attestation


def _parsed(descriptor: bytes, attestation: bytes) -> tuple[Descriptor, Attestation]:
    try:
        return Descriptor.decode(descriptor), Attestation.decode(attestation)
    except UnknownSchema as error:
        raise Refused(Reason.UNKNOWN_SCHEMA, error.problem) from None
    except WrongAlgorithm as error:
        raise Refused(Reason.WRONG_ALGORITHM, error.problem) from None
    except (EncodingError, AdmissionError) as error:
        raise Refused(Reason.MALFORMED, error.problem) from None


def _check_window(signed: Descriptor, claims: Attestation, now: int) -> None:
    if now + SKEW < signed.not_before:
        raise Refused(Reason.NOT_YET_VALID, f"valid from {shown(signed.not_before)}")
    if now + SKEW < claims.iat:
        raise Refused(Reason.NOT_YET_VALID, f"signed at {shown(claims.iat)}, which is not yet")
    if now >= signed.expires:
        raise Refused(Reason.EXPIRED, f"expired at {shown(signed.expires)}")
