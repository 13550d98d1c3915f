"""The countersignature of a privacy officer: the determination that one certified model may be released to a recipient.

It is a COSE_Sign1 message over canonical JSON that names the SHA-256 of the signed certificate. Its fields include those of
an expert determination (45 CFR 164.514(b)(1)): name, qualification, date, recipient, method, result and expiry. A field that
the officer left out is null, which papers print as "not stated". The key has the role `officer` in a key ring and no other
role anywhere. The public key in the statement makes the message self-consistent; trust comes from the ring of the verifier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lamina.errors import BadKey, EncodingError, LaminaError, NotVerified, PlanError
from lamina.ledger.key_state import KeyState
from lamina.ledger.verify.tree_checks import Trust
from lamina.release.comparison import Note
from lamina.release.schema import Digest, Document, Text, read_document
from lamina.sign.key_ring import KeyStatus
from lamina.sign.keys import CLOCK_SKEW, PrivateKey, PublicKey, format_utc, parse_utc
from lamina.sign.signed_json import canonical_json, parse_json, read_cose, sign_json

COUNTERSIGNATURE_TYPE = "application/lamina-countersignature+json"
OFFICER = "officer"  # role in a key ring; a ledger has no such role


class Determination(Document):
    """What an officer states, in the order of its bytes: the certificate that it is about, dates, and texts."""

    version: Literal[1]
    certificate: Digest
    signer: Digest
    signed: str
    valid_until: str
    name: Text
    role: Text
    qualification: Text | None
    recipient: Text | None
    purpose: Text | None
    legal_basis: Text | None
    method: Text | None
    result: Text | None


TEXTS = tuple(Determination.model_fields)[5:]


@dataclass(frozen=True, kw_only=True)
class Countersignature:
    """A countersignature that is valid under the key that it names. `check` decides whether that key is accepted."""

    content: Mapping[str, Any]
    signer: PublicKey
    signed: int
    valid_until: int
    data: bytes

    @classmethod
    def read(cls, data: bytes) -> Countersignature:
        """Read a countersignature strictly and check its signature with the key that it names."""
        found = read_cose(data, COUNTERSIGNATURE_TYPE)
        content = parse_json(found.payload, "the countersignature")
        code = "release.countersignature-malformed"
        stated = read_document(Determination, content, "the countersignature", code)
        try:
            if canonical_json(stated.model_dump()) != found.payload:
                raise EncodingError(code, "it is not canonical JSON with its fields in their order")
            signer = PublicKey(bytes.fromhex(stated.signer))
            signed, until = parse_utc(stated.signed), parse_utc(stated.valid_until)
        except LaminaError as error:
            raise EncodingError(
                code, f"the countersignature cannot be read: {error.problem}", "fetch it again"
            ) from None
        if found.by((signer,)) is None:
            problem = "the key that the countersignature names did not sign it"
            raise NotVerified("release.countersignature-wrong", problem, "fetch it again")
        return cls(content=content, signer=signer, signed=signed, valid_until=until, data=data)

    def is_about(self, certificate: bytes) -> bool:
        """Return whether it names the SHA-256 of this signed certificate."""
        return bool(self.content["certificate"] == hashlib.sha256(certificate).hexdigest())

    def check(
        self, certificate: bytes, release: PublicKey, *, trust: Trust | None, parties: KeyState | None, not_after: int,
        now: int, file: str, note: Note,
    ) -> None:  # fmt: skip
        """Note everything that is wrong with it as the countersignature of a certificate in a release.

        release    the key that signed the certificate
        trust      trusted keys, of which one in the role `officer` must have signed; None: any key
        parties    the keys of the ledger, none of which may have signed; None if the ledger is not at hand
        not_after  until when the release may be served, which the officer's date bounds
        """
        if not self.is_about(certificate):
            note("release.countersignature-other-certificate", "it was made for another certificate", file)
        entry = None if trust is None or trust.ring is None else trust.ring.get(self.signer.id)
        if role := role_of(self.signer, release, trust, parties):
            note("release.officer-key-in-other-role", other_role(self.signer, role).problem, file)
        elif entry is not None and entry.standing(now, self.signed) is not KeyStatus.USABLE:
            status = entry.standing(now, self.signed).value
            note("release.officer-key-retired", f"its key is {status}; it was signed at {self.content['signed']}", file)
        elif trust is not None and entry is None:
            told = f"the key ring has no key {self.signer.name[:16]} of role officer: lamina keys add --role {OFFICER}"
            note("release.officer-key-not-trusted", told, file)
        if self.valid_until <= now:
            note("release.countersignature-expired", f"it was valid until {self.content['valid_until']}", file)
        elif self.valid_until < not_after:
            ends = f"it ends {self.content['valid_until']}, but the release may be served until {format_utc(not_after)}"
            note("release.countersignature-ends-earlier", ends, file)
        if self.signed > now + CLOCK_SKEW:
            note(
                "release.countersignature-from-the-future", f"its date is in the future: {self.content['signed']}", file
            )

    def __str__(self) -> str:
        return f"{self.content['name']}, {self.content['role']}, valid until {self.content['valid_until']}"


def countersign(
    certificate: bytes, key: PrivateKey, texts: Mapping[str, str | None], *, now: int, valid_until: int
) -> bytes:
    """Return the countersignature of a signed certificate. `texts` are the officer's statements by name (`TEXTS`)."""
    if valid_until <= now:
        problem = f"valid until {format_utc(valid_until)} is not after its date, {format_utc(now)}"
        raise PlanError("release.countersignature-expired", problem, "give a later date: --valid-until 2027-12-31")
    about = {"version": 1, "certificate": hashlib.sha256(certificate).hexdigest(), "signer": key.public.x.hex()}
    times = {"signed": format_utc(now), "valid_until": format_utc(valid_until)}
    content = about | times | {name: texts.get(name) for name in TEXTS}
    try:
        read_document(Determination, content, "the countersignature", "release.countersignature-field")
    except EncodingError as error:
        remedy = "give --name, --role and your statements, each of 1 to 512 printable characters"
        raise PlanError(error.code, error.problem, remedy) from None
    return sign_json(content, key, COUNTERSIGNATURE_TYPE)


def role_of(key: PublicKey, release: PublicKey, trust: Trust | None, parties: KeyState | None) -> str | None:
    """Return the other role in which a key is known (release, in a ring, in the ledger), or None."""
    if key.id == release.id:
        return "release"
    entry = None if trust is None or trust.ring is None else trust.ring.get(key.id)
    if entry is not None and entry.role != OFFICER:
        return entry.role
    known = None if parties is None else parties.history(key.id)
    return None if known is None else known.key.role.name.lower()


def other_role(key: PublicKey, role: str) -> BadKey:
    """Return the error for an officer's key that has another role."""
    problem = f"key {key.name[:16]} of the officer has the role {role}, but a key may have only one role"
    remedy = "sign with a separate key: lamina keys new officer.key"
    return BadKey("release.officer-key-in-other-role", problem, remedy)
