"""Why a contribution stays outside: one word for machines, one sentence for people."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """A refusal of the gate or of the resolver. The value is what `--json` prints; it never changes its meaning.

    In the order in which they are looked for. The resolver's own are the two that end in "class".
    """

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Reason:
        member = object.__new__(cls)
        member._value_ = word
        member.meaning = meaning
        return member

    BAD_ID = "bad-id", "its id is empty, longer than 255 bytes, or not printable text"
    UNREADABLE = "unreadable", "it cannot be read: a link, a device, several payloads, no permission"
    TOO_LARGE = "too-large", "descriptor, attestation or payload has more bytes than are looked at"
    NO_ATTESTATION = "no-attestation", "nobody signed it"
    NO_DESCRIPTOR = "no-descriptor", "what was signed is not there"
    NO_PAYLOAD = "no-payload", "there is no data"
    MALFORMED = "malformed", "descriptor or attestation is not the one strict encoding of a valid one"
    UNKNOWN_SCHEMA = "unknown-schema", "the descriptor has a version that this program does not know"
    WRONG_ALGORITHM = "wrong-algorithm", "signed under an algorithm that is not allowed, or not for this key"
    UNKNOWN_KEY = "unknown-key", "the key ring does not have the key that signed it"
    WRONG_ROLE = "wrong-role", "the key is registered, but not for contributors"
    REVOKED_KEY = "revoked-key", "the key that signed it is revoked"
    RETIRED_KEY = "retired-key", "it claims to be signed after its key was replaced"
    EARLY_KEY = "key-not-yet-valid", "it is used, or claims to be signed, before its key becomes valid"
    BAD_SIGNATURE = "bad-signature", "the signature is not the key's over this descriptor"
    MISMATCH = "mismatch", "the signed claims say something else than the descriptor"
    WRONG_AUDIENCE = "wrong-audience", "it was signed for another corpus"
    NOT_YET_VALID = "not-yet-valid", "its window has not begun, or it claims to be signed in the future"
    EXPIRED = "expired", "its window is over"
    POLICY_MISMATCH = "policy-mismatch", "it was signed under floors that never were this corpus's"
    UNKNOWN_CLASS = "unknown-class", "the policy does not have its admissibility class"
    UNBOUNDED_CLASS = "unbounded-class", "its class bounds no ε, so that no bound can be held against it"
    PUBLIC_BOUND = "bound-in-public-class", "it signs a bound, which a public class would not keep"
    CLIP_BELOW_FLOOR = "clip-norm-below-floor", "its clip norm is below the corpus minimum"
    NOISE_BELOW_FLOOR = "noise-below-floor", "its noise multiplier is below the corpus minimum"
    CLIP_ABOVE_CLASS = "clip-norm-above-class", "its clip norm is more permissive than its class"
    NOISE_BELOW_CLASS = "noise-below-class", "its noise multiplier is more permissive than its class"
    PROFILE_MISMATCH = "profile-mismatch", "its class reaches deeper than the depth profile that was signed"
    PAYLOAD_MISMATCH = "payload-mismatch", "the data is not what was committed to"
    CHECK_FAILED = "check-failed", "the check itself could not be finished; nothing enters on half a check"
    REPLAYED = "replayed", "the same attestation or descriptor was admitted before"
    WITHDRAWN = "withdrawn", "it was withdrawn, which the ledger remembers for good"
    DUPLICATE_ID = "duplicate-id", "another contribution has the same id"
    DUPLICATE_SUBJECT = "duplicate-subject", "another contribution is about the same person"
    CLASS_FULL = "class-full", "its class holds as many contributions as were declared"
    OUT_OF_REACH = "out-of-reach", "no scale of its class's thresholds keeps its bound under this plan"
    GONE = "gone", "it was admitted, and its source no longer has it"
    CHANGED = "changed", "it was admitted, and its descriptor or attestation is another one now"
    NOT_REPEATED = "not-repeated", "its epoch is over, and its source cannot be read a second time"

    def __str__(self) -> str:
        return str(self.value)


REASONS = tuple(Reason)
CODES = {reason: code for code, reason in enumerate(REASONS)}  # how a reason is kept in a column of bytes
