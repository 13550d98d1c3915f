"""Withdrawal requests: what a contributor signs to have a contribution withdrawn, and whether a withdrawal may stand.

A COSE_Sign1 message of type `application/lamina-withdrawal+json` over

    {"withdraw": digest of the descriptor, "reason": …, "effect": …, "ledger": hash of its header leaf, "time": …}

signed with the key that signed the contribution, or one that took over from it. For who asked in another way, an operator
or a governing key of the ledger signs the same with "request", the SHA-256 of what was handed in. The record of the
withdrawal holds the message whole.
"""

from __future__ import annotations

import hashlib
import time as system
from dataclasses import dataclass

from lamina import validate
from lamina.errors import EncodingError, LaminaError, LedgerError
from lamina.ledger.governance_records import (
    MAX_REQUEST_BYTES,
    Role,
    Withdrawal,
    WithdrawalEffect,
    WithdrawalReason,
    WithdrawalRule,
)
from lamina.ledger.key_state import GovernanceState, Violation, contributor_key
from lamina.ledger.records import ContributionRecord, KeptContribution, decode_leaf
from lamina.ledger.store.rows import StoreReader
from lamina.sign.key_ring import KeyRing
from lamina.sign.keys import CLOCK_SKEW, PrivateKey, format_utc, parse_utc
from lamina.sign.signed_json import SignedPayload, parse_json, read_cose, sign_json

REQUEST_TYPE = "application/lamina-withdrawal+json"
OPERATOR_ROLES = (Role.OPERATOR, Role.GOVERNING)
WITHDRAWAL_REASONS = {reason.name.lower(): reason for reason in WithdrawalReason}
WITHDRAWAL_EFFECTS = {effect.name.lower(): effect for effect in WithdrawalEffect}
_FIELDS = {"withdraw", "reason", "effect", "ledger", "time"}
_DIGESTS = ("withdraw", "ledger", "request")


def parse_reason(word: str) -> WithdrawalReason:
    """A reason by its name."""
    return WITHDRAWAL_REASONS[validate.one_of(LedgerError, "ledger.reason-unknown", WITHDRAWAL_REASONS, reason=word)]


def parse_effect(word: str) -> WithdrawalEffect:
    """An effect by its name."""
    return WITHDRAWAL_EFFECTS[validate.one_of(LedgerError, "ledger.effect-unknown", WITHDRAWAL_EFFECTS, effect=word)]


def sign_withdrawal(
    descriptor: bytes, reason: str, key: PrivateKey, *, ledger: bytes, effect: str = "finish", time: int | None = None,
    request: bytes | None = None,
) -> bytes:  # fmt: skip
    """A signed request to withdraw the contribution with this descriptor digest from the ledger with this header hash.

    `request` is what an operator gives: the digest of what the contributor handed in.
    """
    plain = {
        "withdraw": descriptor.hex(),
        "reason": parse_reason(reason).name.lower(),
        "effect": parse_effect(effect).name.lower(),
        "ledger": ledger.hex(),
        "time": format_utc(int(system.time()) if time is None else time),
    }
    return sign_json(plain if request is None else plain | {"request": request.hex()}, key, REQUEST_TYPE)


@dataclass(frozen=True, slots=True)
class WithdrawalRequest:
    """A request as it was received; nothing of it is verified yet. `handed_in` is the digest that an operator names."""

    withdraw: bytes
    reason: WithdrawalReason
    effect: WithdrawalEffect
    ledger: bytes
    time: int
    handed_in: bytes | None
    message: SignedPayload
    data: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of what was signed and sent."""
        return hashlib.sha256(self.data).digest()

    @property
    def name(self) -> str:
        """Of its file."""
        return self.digest.hex()[:32]

    @property
    def signer(self) -> str:
        """Who signed it, by what it says: the contributor, or an operator."""
        return "contributor" if self.handed_in is None else "operator"

    def record(self, target: int) -> Withdrawal:
        """The withdrawal of that leaf by this request."""
        asked = self.digest if self.handed_in is None else self.handed_in
        return Withdrawal(target=target, reason=self.reason, effect=self.effect, request=asked, signed=self.data)


def parse_request(data: bytes) -> WithdrawalRequest:
    """Read a request strictly; EncodingError for anything else."""
    if len(data) > MAX_REQUEST_BYTES:
        raise _malformed(f"it has {len(data)} bytes, at most {MAX_REQUEST_BYTES} are read")
    message = read_cose(data, REQUEST_TYPE)
    plain = parse_json(message.payload, "the request")
    if type(plain) is not dict or plain.keys() - {"request"} != _FIELDS:
        raise _malformed(f"it must have {', '.join(sorted(_FIELDS))}, and of an operator request")
    if not all(type(each) is str for each in plain.values()):
        raise _malformed("it has a field that is no text")
    for name in _DIGESTS:
        if name in plain and not is_hex_digest(plain[name]):
            raise _malformed(f"it has {name}, which is not 64 hex digits")
    digests = {name: bytes.fromhex(plain[name]) for name in _DIGESTS if name in plain}
    try:
        reason, effect, time = parse_reason(plain["reason"]), parse_effect(plain["effect"]), parse_utc(plain["time"])
    except LaminaError as error:
        raise _malformed(error.problem) from None
    return WithdrawalRequest(
        digests["withdraw"], reason, effect, digests["ledger"], time, digests.get("request"), message, data
    )


def is_hex_digest(text: str) -> bool:
    """Whether a text is a SHA-256 in hexadecimal."""
    return len(text) == 64 and all(each in "0123456789abcdefABCDEF" for each in text)


def _malformed(problem: str) -> EncodingError:
    return EncodingError("ledger.request-malformed", f"the request cannot be read: {problem}", "sign it again")


def describe_signer(record: Withdrawal) -> str:
    """Who withdrew, by what the record says: contributor, operator, or the keeper alone."""
    try:
        return "keeper" if record.signed is None else parse_request(record.signed).signer
    except EncodingError:
        return "unreadable"


# ----------------------------------------------------------------------------------- may it stand

Target = ContributionRecord | KeptContribution


def withdrawal_violation(
    record: Withdrawal, target: Target | None, time: int, state: GovernanceState, ring: KeyRing | None = None
) -> Violation | None:
    """Why the withdrawal of `target` may not stand in a leaf of that time after `state`; None if it may.

    Of a contribution whose body is pruned nobody can tell which key signed it: any contributor's key of the ledger does
    then. `ring` are the keys that an auditor trusts. Only a signed withdrawal needs its `target`.
    """
    if record.signed is None:
        if state.withdraw is WithdrawalRule.KEEPER:
            return None
        reason = "nobody signed it, and this ledger takes signed requests alone"
        return Violation("verify.withdrawal-not-signed", reason)
    assert target is not None
    try:
        request = parse_request(record.signed)
    except EncodingError as error:
        return Violation("verify.withdrawal-request-malformed", error.problem)
    if request.ledger != state.header_hash:
        return Violation("verify.withdrawal-request-other-ledger", "its request is for another ledger")
    if request.withdraw != target.descriptor:
        reason = f"its request is about {request.withdraw.hex()[:16]}, not about leaf {record.target}"
        return Violation("verify.withdrawal-request-other-contribution", reason)
    signed, said = (f"{x.reason.name.lower()}, {x.effect.name.lower()}" for x in (request, record))
    if signed != said:
        return Violation("verify.withdrawal-request-differs", f"its request says {signed}, the leaf says {said}")
    if request.record(record.target).request != record.request:
        return Violation("verify.withdrawal-request-swapped", "its request does not have the digest in the leaf")
    if request.time > time + CLOCK_SKEW:
        reason = f"its request was signed at {format_utc(request.time)}, and recorded at {format_utc(time)}"
        return Violation("verify.withdrawn-before-request", reason)
    return _signer_violation(request, target, time, state, ring)


def _signer_violation(
    request: WithdrawalRequest, target: Target, time: int, state: GovernanceState, ring: KeyRing | None
) -> Violation | None:
    kid = request.message.kid
    name, known = f"key {kid.hex()[:16]}", state.history(kid)
    if request.handed_in is None:
        if isinstance(target, ContributionRecord) and kid not in state.heirs(target.key):
            reason = f"{name} signed its request"
            reason += ", and neither signed the contribution nor took over from the key that did"
            return Violation("verify.withdrawal-not-by-contributor", reason)
        key = contributor_key(state, ring, kid, time, request.time)
        if isinstance(key, Violation):
            return key
    else:
        if known is None or known.key.role not in OPERATOR_ROLES:
            reason = f"{name} signed as an operator, and is no operator or governing key"
            return Violation("verify.signer-wrong-role", reason)
        if (wrong := known.problem(time, request.time)) is not None:
            return Violation(wrong.code, f"{name} {wrong.reason}")
        key = known.public
    if request.message.by([key]) is None:
        return Violation("verify.withdrawal-signature-invalid", f"{name} did not sign its request")
    return None


def withdrawal_target(rows: StoreReader, record: Withdrawal) -> Target | None:
    """The contribution of which a signed withdrawal is; None if nobody signed it."""
    data = None if record.signed is None else rows.leaf(record.target)
    found = None if data is None else decode_leaf(data).record
    assert found is None or isinstance(found, Target)
    return found


def withdrawal_refused(record: Withdrawal, wrong: Violation) -> LedgerError:
    """The refusal of a withdrawal."""
    problem = f"leaf {record.target} cannot be withdrawn so: {wrong.reason}"
    if record.signed is None:
        remedy = "have its contributor sign (lamina ledger request)"
        remedy += ", or an operator: withdraw --request LETTER --key KEY"
        return LedgerError("ledger.withdrawal-not-signed", problem, remedy)
    remedy = "have it signed for this contribution, ledger, reason and effect, with a key that counts now"
    return LedgerError("ledger.withdrawal-not-allowed", problem, remedy)
