"""Withdrawal requests: what a contributor signs to have a contribution withdrawn.

A COSE_Sign1 message of type `application/lamina-withdrawal+json` over

    {"withdraw": digest of the descriptor, "reason": …, "effect": …, "ledger": hash of its header leaf, "time": …}

signed with the key that signed the contribution. Once checked, it goes as a file into the folder of withdrawals that
`lamina ledger withdraw --folder` takes up, and its digest into the record.
"""

from __future__ import annotations

import hashlib
import json
import time as system
from dataclasses import dataclass
from pathlib import Path

from lamina.admit.keys import CLOCK_SKEW, PrivateKey, format_utc, parse_utc, replace_file
from lamina.admit.signed_json import parse_json, read_cose, sign_json
from lamina.errors import EncodingError, LaminaError, LedgerError, NotVerified
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord
from lamina.ledger.withdrawal import DONE_FOLDER, MAX_FILES, REFUSED_FOLDER, parse_effect, parse_reason

REQUEST_TYPE = "application/lamina-withdrawal+json"
MAX_REQUEST_BYTES = 4096
_FIELDS = {"withdraw", "reason", "effect", "ledger", "time"}


def sign_withdrawal(
    descriptor: bytes, reason: str, key: PrivateKey, *, ledger: bytes, effect: str = "finish", time: int | None = None
) -> bytes:
    """A signed request to withdraw the contribution with this descriptor digest from the ledger with this header hash."""
    request = {
        "withdraw": descriptor.hex(),
        "reason": parse_reason(reason).name.lower(),
        "effect": parse_effect(effect).name.lower(),
        "ledger": ledger.hex(),
        "time": format_utc(int(system.time()) if time is None else time),
    }
    return sign_json(request, key, REQUEST_TYPE)


@dataclass(frozen=True, slots=True)
class WithdrawalRequest:
    """A request whose signature holds. `digest` is the SHA-256 of what was signed and sent."""

    withdraw: str
    reason: str
    effect: str
    digest: str

    @property
    def name(self) -> str:
        """Of its file."""
        return self.digest[:32]


def check_withdrawal(data: bytes, ledger: LedgerReader, *, now: float | None = None) -> WithdrawalRequest:
    """The request in `data`, if the key that signed the contribution signed it for this ledger; refused otherwise."""
    if len(data) > MAX_REQUEST_BYTES:
        raise _malformed(f"it has {len(data)} bytes, at most {MAX_REQUEST_BYTES} are read")
    signed = read_cose(data, REQUEST_TYPE)
    plain = parse_json(signed.payload, "the request")
    if type(plain) is not dict or plain.keys() != _FIELDS or not all(type(each) is str for each in plain.values()):
        raise _malformed(f"it must have {', '.join(sorted(_FIELDS))}, all of them text")
    try:
        parse_reason(plain["reason"])
        parse_effect(plain["effect"])
        target, time = bytes.fromhex(plain["withdraw"]), parse_utc(plain["time"])
    except (LaminaError, ValueError) as error:
        raise _malformed(error.problem if isinstance(error, LaminaError) else "withdraw is not hexadecimal") from None
    if plain["ledger"] != ledger.header_hash.hex():
        raise NotVerified("release.request-other-ledger", "it is for another ledger", "name the header of this ledger")
    if time > (system.time() if now is None else now) + CLOCK_SKEW:
        raise NotVerified("release.request-from-the-future", f"it is of {plain['time']}", "set the clock, sign again")
    _check_signer(ledger, target, signed.kid, signed.message, signed.signature)
    return WithdrawalRequest(target.hex(), plain["reason"], plain["effect"], hashlib.sha256(data).hexdigest())


def _check_signer(ledger: LedgerReader, target: bytes, kid: bytes, message: bytes, signature: bytes) -> None:
    """One refusal for what is not there and what is somebody else's: who asks learns nothing about others."""
    leaf = ledger.known([target]).get(target)
    record = None if leaf is None else ledger.leaf(leaf).record
    if isinstance(record, ContributionRecord) and record.key == kid:
        known = ledger.parties().history(kid)
        if known is not None and known.revoked is None and known.public.verify(message, signature):
            return
    problem = f"no contribution {target.hex()[:16]}… with a key in force signed this"
    remedy = "sign with the key that signed the contribution; after pruning or revocation, ask the keeper of the ledger"
    raise NotVerified("release.request-not-signed", problem, remedy)


def drop_withdrawal(folder: Path, data: bytes, request: WithdrawalRequest) -> str:
    """Put a checked request into a folder of withdrawals, once; what became of it: pending, done or refused."""
    if (state := withdrawal_state(folder, request.name)) is not None:
        return state
    if sum(1 for _ in folder.glob("*.json")) >= MAX_FILES:
        problem = f"{MAX_FILES} withdrawals wait to be taken up"
        raise LedgerError("release.withdrawals-waiting", problem, "the keeper runs lamina ledger withdraw --folder")
    fields = {"withdraw": request.withdraw, "reason": request.reason, "effect": request.effect}
    plain = json.dumps({**fields, "request": request.digest}).encode() + b"\n"
    replace_file(folder / f"{request.name}.cose", data, "the request", mode=0o644)
    replace_file(folder / f"{request.name}.json", plain, "the withdrawal", mode=0o644)
    return "pending"


def withdrawal_state(folder: Path, name: str) -> str | None:
    """What became of a request by its name; None if there is none."""
    places = {"done": folder / DONE_FOLDER, "refused": folder / REFUSED_FOLDER, "pending": folder}
    return next((state for state, place in places.items() if (place / f"{name}.json").is_file()), None)


def _malformed(problem: str) -> EncodingError:
    return EncodingError("release.request-malformed", f"the request cannot be read: {problem}", "sign it again")
