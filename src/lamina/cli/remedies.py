"""What to do about a refusal of the gate."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.admit.reason import Reason

_SIGN = "sign it: lamina attest"
_AGAIN = "sign it again: lamina attest"
_KEYS = "lamina keys list shows what the ring says of it"

REMEDIES: dict[Reason, str] = {
    Reason.BAD_ID: "rename its folder to printable text",
    Reason.UNREADABLE: "put one plain, readable payload.npz or payload.csv of the common form there",
    Reason.TOO_LARGE: "cut it into several contributions, or see whether the file is the right one",
    Reason.NO_ATTESTATION: _SIGN,
    Reason.NO_DESCRIPTOR: f"put descriptor.cbor back, or {_AGAIN}",
    Reason.NO_PAYLOAD: "put the payload that was signed there",
    Reason.MALFORMED: _AGAIN,
    Reason.UNKNOWN_SCHEMA: "use a version of Lamina that knows it",
    Reason.WRONG_ALGORITHM: "sign with Ed25519: lamina attest",
    Reason.UNKNOWN_KEY: "make sure whose key it is, then lamina keys add; or leave it out",
    Reason.WRONG_ROLE: f"sign with a key for contributors: lamina attest --force; {_KEYS}",
    Reason.REVOKED_KEY: "let its owner sign it again with a new key: lamina attest --force",
    Reason.RETIRED_KEY: "let its owner sign it again with the key that took over: lamina attest --force",
    Reason.EARLY_KEY: f"wait, or correct valid_from in the ring; {_KEYS}",
    Reason.BAD_SIGNATURE: f"it was changed, or never signed by that key: {_AGAIN}",
    Reason.MISMATCH: f"let all places say the same, or {_AGAIN}",
    Reason.WRONG_AUDIENCE: "ask its owner to sign it for this corpus",
    Reason.NOT_YET_VALID: "wait; or set the clock of whoever signed right",
    Reason.EXPIRED: "ask its owner whether it may be used longer, and to sign it again",
    Reason.POLICY_MISMATCH: "ask its owner to sign under the floors in force: lamina attest",
    Reason.UNKNOWN_CLASS: "add the class to the policy, or ask its owner to sign for another one",
    Reason.UNBOUNDED_CLASS: "give the class an epsilon or a noise_multiplier in the policy",
    Reason.PUBLIC_BOUND: "ask its owner for which class it is meant",
    Reason.CLIP_BELOW_FLOOR: "it is too strict for this corpus: leave it out, or lower the floor",
    Reason.NOISE_BELOW_FLOOR: "ask its owner to sign a larger noise multiplier",
    Reason.CLIP_ABOVE_CLASS: "ask its owner to sign the class's clip norm or a smaller one",
    Reason.NOISE_BELOW_CLASS: "ask its owner to sign the class's noise multiplier or a larger one",
    Reason.PROFILE_MISMATCH: "it signed less depth than the policy gives its class: ask its owner, or narrow the class",
    Reason.PAYLOAD_MISMATCH: "put back the data that was signed, or let its owner sign the new data",
    Reason.CHECK_FAILED: "try again; if it stays, report it",
    Reason.WITHDRAWN: "leave it out: a withdrawal is final; lamina ledger trace shows when and why",
    Reason.DUPLICATE_ID: "give every contribution an id of its own",
    Reason.REPLAYED: "leave the copy out: one contribution is admitted once",
    Reason.DUPLICATE_SUBJECT: "make one contribution of all that is about one person",
    Reason.CLASS_FULL: "raise population in the policy and plan again, or leave some out",
    Reason.OUT_OF_REACH: "plan with fewer steps or a smaller batch, or leave it out",
    Reason.GONE: "put it back, or leave it out for good",
    Reason.CHANGED: "admit again: it is another contribution now",
    Reason.NOT_REPEATED: "admit again; a folder can be read as often as needed",
}


def remedies(reasons: Iterable[Reason]) -> dict[Reason, str]:
    """What to do about each of these."""
    return {reason: REMEDIES[reason] for reason in reasons}
