"""The reasons for which the gate refuses a contribution: each with its meaning, its remedy, and its check.

A reason is one entry here, or one call of `refusal` elsewhere: the gate then checks it, `lamina admit --json` prints its word,
and docs/admission.md lists it. Its check looks at a contribution on its way through the gate (`Case`) and returns why it is
refused, or None. Checks run by stage, in the order of their definition, the cheap ones first: no signature is verified for an
unknown key.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lamina.admit.attestation import MAX_ATTESTATION, MAX_DESCRIPTOR, MICRO, Attestation, Descriptor, window_rules
from lamina.sign.key_ring import KeyEntry, KeyStatus
from lamina.sign.keys import CLOCK_SKEW, format_utc

if TYPE_CHECKING:
    from lamina.admit.contribution_sources import Contribution
    from lamina.admit.terms import ClassTerms, PolicyTerms

MAX_ID = 255  # bytes
CONTRIBUTOR_ROLE = "contributor"


class Stage(enum.Enum):
    """When a check runs, and what is known then: the stages before it passed."""

    OFFERED = "as offered"
    KEY = "descriptor and attestation are decoded"
    SIGNATURE = "the key is known"
    CLAIMS = "the signature is verified"
    POLICY = "the claims agree with the descriptor; only the descriptor and the policy count"


@dataclass(slots=True)
class Case:
    """A contribution on its way through the gate, and what is known of it so far."""

    given: Contribution
    now: int
    policy: PolicyTerms
    signed: Descriptor = field(init=False)
    claims: Attestation = field(init=False)
    entry: KeyEntry | None = field(init=False)
    row: bytes = field(init=False)
    refused: tuple[Reason, str] | None = None

    @property
    def key(self) -> KeyEntry:
        """The key that signed it, which the ring has."""
        assert self.entry is not None
        return self.entry

    @property
    def required(self) -> ClassTerms:
        """What the policy requires of its class."""
        return self.policy.classes[self.signed.admissibility]

    @property
    def bound(self) -> tuple[int, int]:
        """The most permissive bound of its class."""
        assert self.required.bound is not None
        return self.required.bound

    @property
    def cls(self) -> str:
        """Its class, for a message."""
        return f"class {self.signed.admissibility!r}"


Check = Callable[[Case], str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Reason:
    """A reason to refuse a contribution. `word` is what `--json` prints; it never changes. `code` stands for it in columns."""

    word: str
    meaning: str
    remedy: str
    code: int

    def __str__(self) -> str:
        return self.word


REASONS: list[Reason] = []
CHECKS: dict[Stage, list[tuple[Reason, Check]]] = {stage: [] for stage in Stage}


class ContributionRefused(Exception):
    """Raised by a check that a contribution fails: a verdict, not an error."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def has_bad_id(id: str) -> bool:
    """Return whether an id is not a printable text of 1 to 255 bytes."""
    return not id or not id.isprintable() or len(id.encode()) > MAX_ID


def refusal(word: str, meaning: str, remedy: str, stage: Stage | None = None, check: Check | None = None) -> Reason:
    """Define a reason. Without a check, it is found where contributions are read, compared with others, or used."""
    assert word not in {each.word for each in REASONS} and len(REASONS) < 0xFE
    made = Reason(word, meaning, remedy, len(REASONS))
    REASONS.append(made)
    if stage is not None and check is not None:
        CHECKS[stage].append((made, check))
    return made


def examine(case: Case, stage: Stage) -> None:
    """Raise ContributionRefused for the first check of a stage that fails."""
    for reason, check in CHECKS[stage]:
        if (detail := check(case)) is not None:
            raise ContributionRefused(reason, detail)


# fmt: off
# ------------------------------------------------------------------------------------------ as offered


def _too_large(case: Case) -> str | None:
    given = case.given
    if given.read_error is not None:
        raise ContributionRefused(*given.read_error)
    if given.descriptor is not None and len(given.descriptor) > MAX_DESCRIPTOR:
        return f"descriptor of more than {MAX_DESCRIPTOR} bytes"
    large = given.attestation is not None and len(given.attestation) > MAX_ATTESTATION
    return f"attestation of more than {MAX_ATTESTATION} bytes" if large else None


BAD_ID = refusal(
    "bad-id", "its id is empty, longer than 255 bytes, or not printable", "rename its folder to printable text",
    Stage.OFFERED, lambda case: "" if has_bad_id(case.given.id) else None,
)
UNREADABLE = refusal(
    "unreadable", "it cannot be read: a link, a device, several payloads, no permission",
    "put one readable payload.npz or payload.csv there, with the arrays that the others have",
)
TOO_LARGE = refusal(
    "too-large", "its descriptor, attestation or payload is too large",
    "split it, check that it is the right file, or allow larger payloads: Gate(max_payload=…)", Stage.OFFERED, _too_large,
)
NO_ATTESTATION = refusal(
    "no-attestation", "it is not signed", "sign it: lamina attest",
    Stage.OFFERED, lambda case: "" if case.given.attestation is None else None,
)
NO_DESCRIPTOR = refusal(
    "no-descriptor", "its descriptor is missing", "put descriptor.cbor back, or sign it again: lamina attest",
    Stage.OFFERED, lambda case: "" if case.given.descriptor is None else None,
)
NO_PAYLOAD = refusal(
    "no-payload", "its payload is missing", "put the payload that was signed there",
    Stage.OFFERED, lambda case: "" if case.given.payload is None else None,
)

# ------------------------------------------------------------------------------------------ decoded; the key


def _standing(wanted: KeyStatus) -> Check:
    return lambda case: f"key {case.key.label!r}" if case.key.standing(case.now, case.claims.iat) is wanted else None


MALFORMED = refusal(
    "malformed", "its descriptor or attestation is not valid, or not in canonical encoding", "sign it again: lamina attest",
)
UNKNOWN_SCHEMA = refusal(
    "unknown-schema", "the descriptor has a version that this program does not know", "use a version of Lamina that knows it",
)
UNKNOWN_KEY = refusal(
    "unknown-key", "the key ring does not have the key that signed it",
    "check whose key it is, then lamina keys add; or leave it out",
    Stage.KEY, lambda case: f"key {case.claims.kid.hex()[:16]}…" if case.entry is None else None,
)
WRONG_ROLE = refusal(
    "wrong-role", "the key is registered, but not for contributors",
    "sign with a key for contributors: lamina attest --force; lamina keys list shows what the ring says about it",
    Stage.KEY, lambda case: None if case.key.role == CONTRIBUTOR_ROLE else f"key {case.key.label!r} is for {case.key.role}",
)
REVOKED_KEY = refusal(
    "revoked-key", "the key that signed it is revoked", "let its owner sign it again with a new key: lamina attest --force",
    Stage.KEY, _standing(KeyStatus.REVOKED),
)
RETIRED_KEY = refusal(
    "retired-key", "it was signed after its key was replaced",
    "let its owner sign it again with the new key: lamina attest --force", Stage.KEY, _standing(KeyStatus.RETIRED),
)
EARLY_KEY = refusal(
    "key-not-yet-valid", "it is used, or was signed, before its key became valid",
    "wait, or correct valid_from in the ring; lamina keys list shows what the ring says about it",
    Stage.KEY, _standing(KeyStatus.NOT_YET),
)
WRONG_ALGORITHM = refusal(
    "wrong-algorithm", "its signature algorithm is not allowed, or not for this key", "sign with Ed25519: lamina attest",
    Stage.KEY, lambda case: None if case.claims.alg in case.key.algorithms
    else f"{case.claims.alg}, key {case.key.label!r} is for {case.key.algorithms}",
)
BAD_SIGNATURE = refusal(
    "bad-signature", "the key did not sign this descriptor",
    "it was changed, or never signed by that key: sign it again: lamina attest", Stage.SIGNATURE,
    lambda case: None if case.claims.signed_by(case.key.key, case.signed.digest()) else f"key {case.key.key.name[:16]}…",
)
REASON_OF_KEY_STATUS = {
    KeyStatus.REVOKED: REVOKED_KEY, KeyStatus.NOT_YET: EARLY_KEY, KeyStatus.RETIRED: RETIRED_KEY,
}

# ------------------------------------------------------------------------------------------ the claims


def other_ledger(claims: Attestation, ledger: bytes | None) -> str | None:
    """Return why a ledger may not admit what was signed for another one; None if it may."""
    if ledger is None or claims.ledger is None or claims.ledger == ledger:
        return None
    return f"it names {claims.ledger.hex()[:16]}…, this is {ledger.hex()[:16]}…"


def _not_yet_valid(case: Case) -> str | None:
    if window_rules(case.now, case.signed.not_before, case.signed.expires)[0]:
        return f"valid from {format_utc(case.signed.not_before)}"
    late = case.now + CLOCK_SKEW < case.claims.iat
    return f"its signing time {format_utc(case.claims.iat)} is in the future" if late else None


MISMATCH = refusal(
    "mismatch", "its attestation and its descriptor do not say the same",
    "make folder, listing and signature agree, or sign it again: lamina attest",
    Stage.CLAIMS, lambda case: case.claims.mismatch(case.signed),
)
WRONG_AUDIENCE = refusal(
    "wrong-audience", "it was signed for another corpus", "ask its owner to sign it for this corpus", Stage.CLAIMS,
    lambda case: None if case.signed.audience == case.policy.origin else f"it was signed for {case.signed.audience!r}",
)
NOT_BOUND = refusal(
    "not-bound", "it names no ledger, and the policy names one",
    "sign it again: lamina attest, under the policy.toml that names the ledger",
    Stage.CLAIMS, lambda case: None if case.policy.ledger is None or case.claims.ledger is not None
    else f"the policy names the ledger {case.policy.ledger.hex()[:16]}…",
)
OTHER_LEDGER = refusal(
    "other-ledger", "it was signed for another ledger of this corpus",
    "admit it into the ledger that it names, or ask its owner to sign for this one: lamina attest --force",
    Stage.CLAIMS, lambda case: other_ledger(case.claims, case.policy.ledger),
)
NOT_YET_VALID = refusal(
    "not-yet-valid", "its validity has not begun, or its signing time is in the future",
    "wait; or correct the clock of the computer that signed", Stage.CLAIMS, _not_yet_valid,
)
EXPIRED = refusal(
    "expired", "its validity has ended", "ask its owner whether it may be used longer, and to sign it again",
    Stage.CLAIMS, lambda case: f"expired at {format_utc(case.signed.expires)}"
    if window_rules(case.now, case.signed.not_before, case.signed.expires)[1] else None,
)

# ------------------------------------------------------------------------------------------ the policy


def _beyond(signed: int, limit: int) -> str:
    return f"signed {signed / MICRO:.9g}, the limit is {limit / MICRO:.9g}"


def _below(name: str, limit: Callable[[Case], int]) -> Check:
    """Check that a signed number of a private class is no smaller."""

    def check(case: Case) -> str | None:
        signed, least = getattr(case.signed, name), limit(case)
        return _beyond(signed, least) if signed < least and not case.signed.public else None

    return check


POLICY_MISMATCH = refusal(
    "policy-mismatch", "it was signed under floors that this corpus never had",
    "ask its owner to sign under the floors in force, or list its floors as earlier_floors", Stage.POLICY,
    lambda case: None if case.signed.policy in case.policy.digests else f"signed under {case.signed.policy.hex()[:16]}…",
)
UNKNOWN_CLASS = refusal(
    "unknown-class", "the policy does not have its admissibility class",
    "add the class to the policy, or ask its owner to sign for another one",
    Stage.POLICY, lambda case: None if case.signed.admissibility in case.policy.classes else case.cls,
)
PUBLIC_BOUND = refusal(
    "bound-in-public-class", "it signed a bound, which a public class does not keep",
    "ask its owner which class it is meant for",
    Stage.POLICY, lambda case: case.cls if case.required.public and not case.signed.public else None,
)
PUBLIC_CLAIM = refusal(
    "public-in-private-class", "it is signed as public, and its class is private",
    "ask its owner whether it is public: then it belongs to a public class",
    Stage.POLICY, lambda case: case.cls if case.signed.public and not case.required.public else None,
)
CLIP_BELOW_FLOOR = refusal(
    "clip-norm-below-floor", "its clip norm is below the corpus minimum",
    "it is too strict for this corpus: leave it out, or lower the floor",
    Stage.POLICY, _below("clip_norm", lambda case: case.policy.clip_floor),
)
NOISE_BELOW_FLOOR = refusal(
    "noise-below-floor", "its noise multiplier is below the corpus minimum", "ask its owner to sign a larger noise multiplier",
    Stage.POLICY, _below("noise_multiplier", lambda case: case.policy.noise_floor),
)
UNBOUNDED_CLASS = refusal(
    "unbounded-class", "its class has no bound on ε, so no signed bound can be checked",
    "give the class an epsilon or a noise_multiplier in the policy, or the corpus a floor",
    Stage.POLICY, lambda case: case.cls if case.required.bound is None else None,
)
CLIP_ABOVE_CLASS = refusal(
    "clip-norm-above-class", "its clip norm is above the one of its class",
    "ask its owner to sign the class's clip norm or a smaller one", Stage.POLICY,
    lambda case: _beyond(case.signed.clip_norm, case.bound[0]) if case.signed.clip_norm > case.bound[0] else None,
)
NOISE_BELOW_CLASS = refusal(
    "noise-below-class", "its noise multiplier is below the one of its class",
    "ask its owner to sign the class's noise multiplier or a larger one",
    Stage.POLICY, _below("noise_multiplier", lambda case: case.bound[1]),
)
PROFILE_MISMATCH = refusal(
    "profile-mismatch", "its class reaches deeper than the depth profile that was signed",
    "it signed less depth than the policy gives its class: ask its owner, or narrow the class",
    Stage.POLICY, lambda case: None if case.policy.profile_allows(case.signed.profile, case.signed.admissibility)
    else f"it signed {case.signed.profile}, the class reaches {case.required.profile}",
)

# ------------------------------------------------------------------------------------------ found elsewhere

PAYLOAD_MISMATCH = refusal(
    "payload-mismatch", "its payload is not the one that was signed",
    "put back the data that was signed, or let its owner sign the new data",
)
CHECK_FAILED = refusal(
    "check-failed", "a check failed to run, so it is not admitted", "try again; if it fails again, report it",
)
REPLAYED = refusal(
    "replayed", "the same attestation or descriptor was admitted before",
    "leave the copy out: one contribution is admitted once",
)
WITHDRAWN = refusal(
    "withdrawn", "it was withdrawn, which is final",
    "leave it out: a withdrawal is final; lamina ledger trace shows when and why",
)
DUPLICATE_ID = refusal(
    "duplicate-id", "another contribution has the same id, or one that looks like it",
    "rename one: give every contribution an id of its own that cannot be taken for another",
)
DUPLICATE_PAYLOAD = refusal(
    "duplicate-payload", "another contribution has the same payload, byte for byte",
    "leave the copy out; if two people really have the same data, ask their owners",
)
DUPLICATE_SUBJECT = refusal(
    "duplicate-subject", "another contribution is about the same person",
    "make one contribution of all that is about one person",
)
CLASS_FULL = refusal(
    "class-full", "its class already has its declared population",
    "raise population in the policy and plan again, or leave some out",
)
OUT_OF_REACH = refusal(
    "out-of-reach", "under this plan no scale of its thresholds keeps its bound",
    "plan with fewer steps or a smaller batch, or leave it out",
)
NOT_TRAINABLE = refusal(
    "not-trainable", "model and loss cannot be computed on it: a target or token id is out of range",
    "correct its targets (class numbers from 0, finite values), sign it again; or leave it out",
)
GONE = refusal(
    "gone", "it was admitted, but its source no longer has it", "put it back, or leave it out for good"
)
CHANGED = refusal(
    "changed", "it was admitted, but its descriptor or attestation has changed",
    "admit again: it is another contribution now",
)
NOT_REPEATED = refusal(
    "not-repeated", "its epoch is over, and its source can be read only once",
    "admit again; a folder can be read as often as needed",
)
# fmt: on
