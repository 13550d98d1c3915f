"""Withdrawing contributions: by call, by a signed request, or by files that others put into a folder."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lamina import validate
from lamina.errors import EncodingError, LaminaError, LedgerDamaged, LedgerError, NotVerified, StoreBusy, StoreError
from lamina.ledger.contribution_trace import ContributionSpend, contribution_spend
from lamina.ledger.governance_records import Withdrawal, WithdrawalEffect, WithdrawalReason
from lamina.ledger.reader import LedgerReader, find_contributions
from lamina.ledger.records import ContributionRecord, KeptContribution, Leaf
from lamina.ledger.show import epsilon_or_none, leaf_excerpt
from lamina.ledger.withdrawal_request import (
    WithdrawalRequest,
    is_hex_digest,
    parse_effect,
    parse_reason,
    parse_request,
    sign_withdrawal,
    withdrawal_refused,
    withdrawal_violation,
)
from lamina.ledger.writer import Ledger
from lamina.sign import keys
from lamina.sign.keys import PrivateKey

# Withdrawals: how a contribution leaves. A record is appended; nothing is erased.
#
# From the next segment on it is in no batch of any run. What it has lost stays lost, and is reconciled here: a
# withdrawal stops further loss, it does not unlearn. Whoever serves a model asks the ledger, and the record is what
# counts.


@dataclass(frozen=True, slots=True)
class WithdrawnContribution:
    """A contribution that is out: the leaf that says so, the contribution, and what it had lost until then.

    `again` is whether it was out before, and nothing was appended.
    """

    leaf: Leaf
    target: Leaf
    lost: ContributionSpend
    again: bool

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        of, lost = self.target.record, self.lost
        assert isinstance(of, ContributionRecord | KeptContribution)
        return {
            **leaf_excerpt(self.leaf, "target", "reason", "effect", "by"),
            "descriptor": of.descriptor.hex(),
            "class": of.bound.cls,
            "again": self.again,
            "epsilon": epsilon_or_none(lost.spend),
            "epsilon_signed": None if lost.signed is None else epsilon_or_none(lost.signed),
            "epochs": lost.epochs,
            "releases": [each.seq for each in lost.releases],
        }


def withdraw(
    ledger: Ledger,
    name: str,
    reason: WithdrawalReason,
    *,
    effect: WithdrawalEffect = WithdrawalEffect.FINISH,
    run: bytes | None = None,
    segment: int | None = None,
    request: bytes | None = None,
    operator: PrivateKey | None = None,
) -> list[WithdrawnContribution]:
    """Withdraw the contributions of a descriptor digest or content anchor (64 hex digits), or of a leaf.

    All or none; whoever is out already stays out, for the reason that was given first. `request` is the digest of what
    the contributor handed in, and `operator` an operator's or governing key, which signs that there is one; without it
    the record says that the keeper alone withdrew, if the ledger allows that. With the ledger's key, a checkpoint covers
    it at once. `run` and `segment` say which segment is the first without it; one that is open already can only be
    given up.
    """
    if operator is not None and request is None:
        problem = "an operator signs for a contributor who asked, and the digest of what was asked is not given"
        raise LedgerError("ledger.operator-without-request", problem, "give what was handed in: --request FILE")
    if run is not None and segment is not None and effect is WithdrawalEffect.FINISH:
        with ledger.store.read() as rows:
            if ledger.checked(rows).generations(rows, run, segment):
                problem = f"segment {segment} of run {run.hex()[:8]} was opened before"
                remedy = "name the segment after it, or abandon it: effect abandon"
                raise LedgerError("ledger.segment-already-open", problem, remedy)
    leaves = find_contributions(ledger, name)
    fields: dict[str, Any] = {"reason": reason, "effect": effect, "run": run, "segment": segment, "request": request}

    def record(leaf: Leaf) -> Withdrawal:
        if operator is None:
            return Withdrawal(target=leaf.seq, **fields)
        assert isinstance(leaf.record, ContributionRecord | KeptContribution)
        signed = sign_withdrawal(
            leaf.record.descriptor, reason.name.lower(), operator, ledger=ledger.header_hash,
            effect=effect.name.lower(), time=ledger.now(), request=request,
        )  # fmt: skip
        return Withdrawal(target=leaf.seq, signed=signed, **fields)

    return _append(ledger, leaves, record)


def withdraw_signed(ledger: Ledger, data: bytes) -> list[WithdrawnContribution]:
    """Withdraw the contribution that a signed request names. LedgerError if the request does not allow it."""
    request = parse_request(data)
    leaf = ledger.contribution(request.withdraw)
    if leaf is None:
        problem = f"there is no contribution {request.withdraw.hex()[:16]}… in the ledger {ledger.name}"
        raise LedgerError("ledger.request-of-no-contribution", problem, "give the ledger that admitted it")
    return _append(ledger, [leaf], lambda leaf: request.record(leaf.seq))


def _append(
    ledger: Ledger, leaves: Sequence[Leaf], record: Callable[[Leaf], Withdrawal]
) -> list[WithdrawnContribution]:
    new = [leaf for leaf in leaves if ledger.withdrawn(leaf.seq) is None]
    records = [record(leaf) for leaf in new]
    try:
        ledger.append(records)
    except LedgerError:
        if any(ledger.withdrawn(leaf.seq) is None for leaf in new):
            raise  # otherwise another process was quicker
    if ledger.signs:
        ledger.checkpoint()
    return [_describe_withdrawn(ledger, leaf, new) for leaf in leaves]


def _describe_withdrawn(ledger: Ledger, leaf: Leaf, new: Iterable[Leaf]) -> WithdrawnContribution:
    seq = ledger.withdrawn(leaf.seq)
    assert seq is not None
    return WithdrawnContribution(ledger.checked_leaf(seq), leaf, contribution_spend(ledger, leaf), leaf not in new)


def check_withdrawal(data: bytes, ledger: LedgerReader, *, now: float | None = None) -> WithdrawalRequest:
    """The request in `data`, if it may withdraw a contribution of this ledger now; refused otherwise.

    One refusal for what is not there and what is somebody else's: who asks learns nothing about others.
    """
    request, state = parse_request(data), ledger.parties()
    if request.ledger != state.header_hash:
        raise NotVerified("ledger.request-other-ledger", "it is for another ledger", "name the header of this ledger")
    at = int(time.time() if now is None else now)
    if request.time > at + keys.CLOCK_SKEW:
        problem = f"it is of {keys.format_utc(request.time)}"
        raise NotVerified("ledger.request-from-the-future", problem, "set the clock, sign again")
    leaf = ledger.contribution(request.withdraw)
    target = None if leaf is None else leaf.record
    if leaf is None or not isinstance(target, ContributionRecord) or withdrawal_violation(
        request.record(leaf.seq), target, at, state
    ):  # fmt: skip
        problem = f"no contribution {request.withdraw.hex()[:16]}… with a key in force signed this"
        remedy = (
            "sign with the key that signed the contribution; after pruning or revocation, ask the keeper of the ledger"
        )
        raise NotVerified("ledger.request-not-signed", problem, remedy)
    return request


# `WithdrawalInbox`: a folder into which others put withdrawals, one small file each.
#
#     NAME.cose            a signed request (`lamina ledger request`, or what the service took)
#     NAME.json            {"withdraw": "64 hex digits", "reason": "consent"}, perhaps "effect" and "request": nobody
#                          signed it, so it counts only where the keeper may withdraw alone
#     done/NAME.json       what became a record, with the answer beside it: done/NAME.answer.json (.cose.answer.json)
#     refused/NAME.json    what did not, with the reason beside it: refused/NAME.answer.json
#
# A file is best written under another name and then renamed, so that it is never read half; what cannot be read and was
# changed a moment ago is left for the next look. Each becomes a record once: the record is appended before the file
# is moved, appending it again appends nothing, and one process at a time looks into the folder. A kill at any moment
# leaves a file that is taken up again.

MAX_FILE_BYTES = 16 * 1024  # bytes of one file
MAX_FILES = 1000  # files in one look
GRACE_SECONDS = 2.0  # seconds for which a file that cannot be read may still be written
DONE_FOLDER, REFUSED_FOLDER = "done", "refused"
_REQUEST_FIELDS = {"withdraw", "reason", "effect", "request"}


@dataclass(frozen=True, slots=True)
class InboxResult:
    """A file that was looked at, and what it came to."""

    name: str
    withdrawn: tuple[WithdrawnContribution, ...] = ()
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For machines, and for whoever put the file there."""
        return {
            "file": self.name,
            "refused": self.refused or None,
            "withdrawn": [each.to_dict() for each in self.withdrawn],
        }


class WithdrawalInbox:
    """A folder of withdrawals for one ledger."""

    def __init__(self, ledger: Ledger, folder: str | os.PathLike[str]) -> None:
        self._ledger, self.folder = ledger, Path(folder)
        if not self.folder.is_dir():
            raise LedgerError("ledger.folder-missing", f"there is no folder '{self.folder}'", "create it")
        for name in (DONE_FOLDER, REFUSED_FOLDER):
            (self.folder / name).mkdir(exist_ok=True)

    def take(self) -> Iterator[InboxResult]:
        """Everything that lies there now, by name. Trouble with the ledger itself ends it; the files stay."""
        with keys.path_lock(self.folder):
            for path in waiting_files(self.folder)[:MAX_FILES]:
                if not path.name.startswith(".") and (taken := self._take(path)) is not None:
                    yield taken

    def _take(self, path: Path) -> InboxResult | None:
        with self._ledger.store.read() as rows:  # what is wrong with the ledger is not wrong with the file
            self._ledger.checked(rows)
        try:
            append = self._signed(path) if path.suffix == ".cose" else self._unsigned(path)
        except _UnfinishedFile:
            return None
        except (StoreError, StoreBusy, LedgerDamaged):
            raise  # nothing is wrong with the file
        except LaminaError as error:
            taken = InboxResult(path.name, refused=error.problem)
        else:
            taken = InboxResult(path.name, tuple(append()))
        self._move_answered(path, REFUSED_FOLDER if taken.refused else DONE_FOLDER, taken)
        return taken

    def _signed(self, path: Path) -> Callable[[], list[WithdrawnContribution]]:
        data = _read_file(path)
        try:
            request = parse_request(data)
        except EncodingError:
            _refuse_unfinished(path)
            raise
        leaf = self._ledger.contribution(request.withdraw)
        if leaf is None or self._ledger.withdrawn(leaf.seq) is None:
            check_withdrawal(data, self._ledger, now=self._ledger.now())
        return partial(withdraw_signed, self._ledger, data)

    def _unsigned(self, path: Path) -> Callable[[], list[WithdrawnContribution]]:
        name, reason, effect, request = _read_request(path)
        for leaf in find_contributions(self._ledger, name):
            record = Withdrawal(target=leaf.seq, reason=reason, effect=effect)
            if self._ledger.withdrawn(leaf.seq) is None:
                if not isinstance(leaf.record, ContributionRecord):
                    raise _bad_request(path, f"names leaf {leaf.seq}, which is pruned")
                if (wrong := withdrawal_violation(record, None, leaf.time, self._ledger.parties())) is not None:
                    raise withdrawal_refused(record, wrong)
        return partial(withdraw, self._ledger, name, reason, effect=effect, request=request)

    def _move_answered(self, path: Path, where: str, taken: InboxResult) -> None:
        place = self.folder / where / path.name
        number = 1
        while os.path.lexists(place):
            number += 1
            place = self.folder / where / f"{path.stem}.{number}{path.suffix}"
        answer = json.dumps(taken.to_dict(), indent=2, ensure_ascii=False).encode("utf-8") + b"\n"
        beside = place.with_suffix(".answer.json" if path.suffix == ".json" else f"{path.suffix}.answer.json")
        keys.replace_file(beside, answer, "the answer", mode=0o644)
        os.rename(path, place)


def waiting_files(folder: Path) -> list[Path]:
    """The withdrawals in a folder that wait to be taken up, by name."""
    return sorted([*folder.glob("*.json"), *folder.glob("*.cose")])


def drop_withdrawal(folder: Path, data: bytes, request: WithdrawalRequest) -> str:
    """Put a checked request into a folder of withdrawals, once; what became of it: pending, done or refused."""
    if (state := withdrawal_state(folder, request.name)) is not None:
        return state
    if len(waiting_files(folder)) >= MAX_FILES:
        problem = f"{MAX_FILES} withdrawals wait to be taken up"
        raise LedgerError("ledger.withdrawals-waiting", problem, "the keeper runs lamina ledger withdraw --folder")
    keys.replace_file(folder / f"{request.name}.cose", data, "the request", mode=0o644)
    return "pending"


def withdrawal_state(folder: Path, name: str) -> str | None:
    """What became of a request by its name; None if there is none."""
    places = {"done": folder / DONE_FOLDER, "refused": folder / REFUSED_FOLDER, "pending": folder}
    return next((state for state, place in places.items() if (place / f"{name}.cose").is_file()), None)


class _UnfinishedFile(Exception):
    """Somebody is still writing it."""


def _refuse_unfinished(path: Path) -> None:
    if time.time() - path.stat().st_mtime < GRACE_SECONDS:
        raise _UnfinishedFile


def _read_file(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise _bad_request(path, "is no plain file")
    except OSError as error:
        raise _bad_request(path, f"cannot be read: {error.strerror}") from None
    return keys.read_small(path, "the withdrawal", most=MAX_FILE_BYTES)


def _read_request(path: Path) -> tuple[str, WithdrawalReason, WithdrawalEffect, bytes | None]:
    """What a file asks for: of which contribution, why, to which effect, and the digest of a signed request."""
    data = _read_file(path)
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=validate.distinct_fields)
    except (ValueError, RecursionError):
        _refuse_unfinished(path)
        raise _bad_request(path, "is not JSON, or names a field twice") from None
    if not isinstance(found, dict) or not {"withdraw", "reason"} <= found.keys() <= _REQUEST_FIELDS:
        raise _bad_request(path, "must have the fields withdraw and reason, and may have effect and request")
    if not all(isinstance(value, str) for value in found.values()):
        raise _bad_request(path, "has a field that is no text")
    for name in ("withdraw", "request"):
        if name in found and not is_hex_digest(found[name]):
            raise _bad_request(path, f"has {name}, which is not 64 hex digits")
    reason, effect = parse_reason(found["reason"]), parse_effect(found.get("effect", "finish"))
    return found["withdraw"], reason, effect, bytes.fromhex(found["request"]) if "request" in found else None


def _bad_request(path: Path, problem: str) -> LedgerError:
    return LedgerError(
        "ledger.withdrawal-file", f"'{path.name}' {problem}", 'write {"withdraw": "64 hex digits", "reason": "consent"}'
    )
