"""Withdrawing contributions: by call, or by files that others put into a folder."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina import validate
from lamina.admit import keys
from lamina.errors import LaminaError, LedgerDamaged, LedgerError, StoreBusy, StoreError
from lamina.ledger.contribution_trace import ContributionSpend, contribution_spend
from lamina.ledger.governance_records import Withdrawal, WithdrawalEffect, WithdrawalReason
from lamina.ledger.reader import find_contributions
from lamina.ledger.records import ContributionRecord, KeptContribution, Leaf
from lamina.ledger.show import epsilon_or_none, leaf_excerpt
from lamina.ledger.writer import Ledger

# Withdrawals: how a contribution leaves. A record is appended; nothing is erased.
#
# From the next segment on it is in no batch of any run. What it has lost stays lost, and is reconciled here: a
# withdrawal stops further loss, it does not unlearn. Whoever serves a model asks the ledger, and the record is what
# counts.

WITHDRAWAL_REASONS = {reason.name.lower(): reason for reason in WithdrawalReason}
WITHDRAWAL_EFFECTS = {effect.name.lower(): effect for effect in WithdrawalEffect}


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
            **leaf_excerpt(self.leaf, "target", "reason", "effect"),
            "descriptor": of.descriptor.hex(),
            "class": of.bound[0],
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
) -> list[WithdrawnContribution]:
    """Withdraw the contributions of a descriptor digest or content anchor (64 hex digits), or of a leaf.

    All or none; whoever is out already stays out, for the reason that was given first. `request` is the digest of a
    signed request. With the ledger's key, a checkpoint covers it at once. `run` and `segment` say which segment is the
    first without it; one that is open already can only be given up.
    """
    if run is not None and segment is not None and effect is WithdrawalEffect.FINISH:
        with ledger.store.read() as rows:
            if rows.generations(run, segment):
                problem = f"segment {segment} of run {run.hex()[:8]} was opened before"
                remedy = "name the segment after it, or abandon it: effect abandon"
                raise LedgerError("ledger.segment-already-open", problem, remedy)
    leaves = find_contributions(ledger, name)
    new = [leaf for leaf in leaves if ledger.withdrawn(leaf.seq) is None]
    records = [
        Withdrawal(target=leaf.seq, reason=reason, effect=effect, run=run, segment=segment, request=request)
        for leaf in new
    ]
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
    return WithdrawnContribution(ledger.leaf(seq), leaf, contribution_spend(ledger, leaf), leaf not in new)


def parse_reason(word: str) -> WithdrawalReason:
    """A reason by its name."""
    return WITHDRAWAL_REASONS[validate.one_of(LedgerError, "ledger.reason-unknown", WITHDRAWAL_REASONS, reason=word)]


def parse_effect(word: str) -> WithdrawalEffect:
    """An effect by its name."""
    return WITHDRAWAL_EFFECTS[validate.one_of(LedgerError, "ledger.effect-unknown", WITHDRAWAL_EFFECTS, effect=word)]


# `WithdrawalInbox`: a folder into which others put withdrawals, one small JSON file each.
#
#     NAME.json            {"withdraw": "64 hex digits", "reason": "consent"}, perhaps "effect" and "request"
#     done/NAME.json       what became a record, with the answer beside it: done/NAME.answer.json
#     refused/NAME.json    what did not, with the reason beside it: refused/NAME.answer.json
#
# A file is best written under another name and then renamed, so that it is never read half; what is not JSON and was
# changed a moment ago is left for the next look. Each becomes a record once: the record is appended before the file
# is moved, appending it again appends nothing, and one process at a time looks into the folder. A kill at any moment
# leaves a file that is taken up again.

MAX_FILE_BYTES = 16 * 1024  # bytes of one file
MAX_FILES = 1000  # files in one look
GRACE_SECONDS = 2.0  # seconds for which a file that is not JSON may still be written
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
        with keys.folder_lock(self.folder):
            for path in sorted(self.folder.glob("*.json"))[:MAX_FILES]:
                if not path.name.startswith(".") and (taken := self._take(path)) is not None:
                    yield taken

    def _take(self, path: Path) -> InboxResult | None:
        try:
            name, reason, effect, request = _read_request(path)
            find_contributions(self._ledger, name)
        except _UnfinishedFile:
            return None
        except (StoreError, StoreBusy, LedgerDamaged):
            raise  # nothing is wrong with the file
        except LaminaError as error:
            taken = InboxResult(path.name, refused=error.problem)
        else:
            found = withdraw(self._ledger, name, reason, effect=effect, request=request)
            taken = InboxResult(path.name, tuple(found))
        self._move_answered(path, REFUSED_FOLDER if taken.refused else DONE_FOLDER, taken)
        return taken

    def _move_answered(self, path: Path, where: str, taken: InboxResult) -> None:
        place = self.folder / where / path.name
        number = 1
        while os.path.lexists(place):
            number += 1
            place = self.folder / where / f"{path.stem}.{number}.json"
        answer = json.dumps(taken.to_dict(), indent=2, ensure_ascii=False).encode("utf-8") + b"\n"
        keys.replace_file(place.with_suffix(".answer.json"), answer, "the answer", mode=0o644)
        os.rename(path, place)


class _UnfinishedFile(Exception):
    """Somebody is still writing it."""


def _read_request(path: Path) -> tuple[str, WithdrawalReason, WithdrawalEffect, bytes | None]:
    """What a file asks for: of which contribution, why, to which effect, and the digest of a signed request."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise _bad_request(path, "is no plain file")
    except OSError as error:
        raise _bad_request(path, f"cannot be read: {error.strerror}") from None
    data = keys.read_small(path, "the withdrawal", most=MAX_FILE_BYTES)
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=validate.distinct_fields)
    except (ValueError, RecursionError):
        if time.time() - path.stat().st_mtime < GRACE_SECONDS:
            raise _UnfinishedFile from None
        raise _bad_request(path, "is not JSON, or names a field twice") from None
    if not isinstance(found, dict) or not {"withdraw", "reason"} <= found.keys() <= _REQUEST_FIELDS:
        raise _bad_request(path, "must have the fields withdraw and reason, and may have effect and request")
    if not all(isinstance(value, str) for value in found.values()):
        raise _bad_request(path, "has a field that is no text")
    for name in ("withdraw", "request"):
        if name in found and not _is_hex_digest(found[name]):
            raise _bad_request(path, f"has {name}, which is not 64 hex digits")
    reason, effect = parse_reason(found["reason"]), parse_effect(found.get("effect", "finish"))
    return found["withdraw"], reason, effect, bytes.fromhex(found["request"]) if "request" in found else None


def _is_hex_digest(text: str) -> bool:
    return len(text) == 64 and all(each in "0123456789abcdefABCDEF" for each in text)


def _bad_request(path: Path, problem: str) -> LedgerError:
    return LedgerError(
        "ledger.withdrawal-file", f"'{path.name}' {problem}", 'write {"withdraw": "64 hex digits", "reason": "consent"}'
    )
