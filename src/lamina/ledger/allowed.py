"""What a record may say, given what was said before it. The rest of it is for `verify`, which sees everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamina.ledger.errors import LedgerError
from lamina.ledger.leaf import decode
from lamina.ledger.parties import Parties
from lamina.ledger.records import (
    NUMBERS,
    Aggregate,
    Change,
    Epoch,
    Header,
    KeyEvent,
    Outcome,
    PolicyChange,
    Record,
    Role,
    loosened,
    misplaced,
)
from lamina.ledger.store.base import Reader

_RESERVED = {Header, Aggregate}


def refuse_reserved(records: Sequence[Record]) -> None:
    """A header comes first and once; aggregates come from pruning."""
    for record in records:
        if type(record) in _RESERVED:
            raise LedgerError(
                "ledger.not-appended-like",
                f"{type(record).__name__} is not appended like others",
                "a header comes first and once; prune writes aggregates",
            )


def check(
    rows: Reader,
    records: Sequence[Record],
    header: Header,
    size: int,
    now: int,
    parties: Callable[[], Parties],
) -> None:
    """LedgerError if one of the records may not follow the first `size` leaves and those before it."""
    policy: Header | PolicyChange | None = None
    keys: Parties | None = None
    for record in records:
        if isinstance(record, Epoch):
            _check_epoch(record, header, size)
        elif isinstance(record, KeyEvent):
            keys = keys or parties()
            check_event(record, keys, now)
            keys.apply(record)
        elif isinstance(record, PolicyChange):
            keys = keys or parties()
            _check_change(record, policy or _in_force(rows, header, size), header.origin, keys, now)
            policy = record


def check_event(event: KeyEvent, keys: Parties, now: int) -> None:
    """A key that is there, in its one role; and somebody is left who signs."""
    target = None if event.target is None else keys.get(event.target)
    if event.target is not None and target is None:
        raise LedgerError(
            "ledger.key-not-ledger",
            f"key {event.target.hex()[:16]} is not one of the ledger",
            "lamina ledger key LEDGER lists them",
        )
    if (new := event.key) is not None:
        known, role = keys.get(new.id), new.role.name.lower()
        if known is not None and known.role is not new.role:
            raise LedgerError(
                "ledger.key-already-not",
                f"key {new.id.hex()[:16]} is for {known.role.name.lower()} already, not for {role}",
                "make another key: one key has one role",
            )
        if known is not None and event.change is Change.ROTATE:
            raise LedgerError(
                "ledger.key-ledger-already",
                f"key {new.id.hex()[:16]} is one of the ledger already, and cannot take over",
                "make a new key; or revoke the old one",
            )
        if target is not None and target.role is not new.role:
            raise LedgerError(
                "ledger.key-not-take",
                f"a key for {role} cannot take over from one for {target.role.name.lower()}",
                "give the new key the role of the old one",
            )
        if new.role is Role.LEDGER and new.name != keys.origin:
            raise LedgerError(
                "ledger.key-ledger-named",
                f"a key of the ledger is named {new.name!r}",
                f"name it like the ledger: {keys.origin!r}",
            )
    if event.change is Change.REVOKE and target is not None and target.role is Role.LEDGER:
        _check_left(event, keys, max(now, event.effective))


def _check_left(event: KeyEvent, keys: Parties, time: int) -> None:
    """Nothing after it could be signed, for good, if the last key that signs went."""
    others = (key.id for key in keys.all() if key.id != event.target)
    if all(keys.unsigning(kid, time) is not None for kid in others):
        raise LedgerError(
            "ledger.key-last-signs",
            f"key {(event.target or b'').hex()[:16]} is the last that signs checkpoints of {keys.origin!r}, "
            "and without it nothing could be signed any more",
            "let a new key take over, sign a checkpoint with the old one, and revoke it with the new one",
        )


def _check_change(
    change: PolicyChange,
    before: Header | PolicyChange,
    origin: str,
    keys: Parties,
    now: int,
) -> None:
    names = [each.cls for each in change.presets]
    if len(set(names)) < len(names):
        raise LedgerError("ledger.policy-names-class", "the policy names a class twice", "name each once")
    looser = loosened(before.floors, before.presets, change.floors, change.presets)
    if looser and not keys.allow(change, origin, now):
        raise LedgerError(
            "ledger.policy-protect-less",
            f"the policy would protect less: {looser[0]}",
            "have it signed by two parties",
        )
    if (wrong := misplaced(change, before)) is not None:
        raise LedgerError(
            "ledger.policy-not-changed",
            f"the policy cannot be changed so: {wrong}",
            "make the change anew, and have that signed",
        )
    good = keys.signers(change.message(origin), change.signatures, (Role.LEDGER, Role.AUDITOR), now)
    for signed in change.signatures:
        if signed.key not in good:
            raise LedgerError(
                "ledger.signature-policy-key",
                f"the signature of the policy by key {signed.key.hex()[:16]} does not count",
                "give those of the ledger's keys and auditors, over this very change, or leave it out",
            )


def _check_epoch(record: Epoch, header: Header, size: int) -> None:
    closed = sum(each.outcome is Outcome.CLOSED for each in record.segments)
    if closed > header.granularity:
        raise LedgerError(
            "ledger.epoch-closes-segments",
            f"an epoch closes {closed} segments, the header allows {header.granularity}",
            "split it",
        )
    for each in record.segments:
        if each.eligibility > size:
            raise LedgerError(
                "ledger.segment-opened-after",
                f"segment {each.index} was opened after {each.eligibility} leaves, the ledger has {size}",
                "give the size of the ledger when its membership was frozen",
            )


def _in_force(rows: Reader, header: Header, size: int) -> Header | PolicyChange:
    last: Header | PolicyChange = header
    for _, data in rows.of_kind(NUMBERS[PolicyChange], 0, size):
        record = decode(data).record
        assert isinstance(record, PolicyChange)
        last = record
    return last
