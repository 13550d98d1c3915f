"""What a ledger holds: one frozen dataclass per kind of record. docs/ledger.md has their CDDL."""

from __future__ import annotations

from lamina.ledger.records.admitted import Admitted, Terms
from lamina.ledger.records.aggregate import MOST_SPANS, Aggregate, ClassTotal, Span
from lamina.ledger.records.epoch import Account, Charge, Epoch, Outcome, Segment
from lamina.ledger.records.header import Header, Parent
from lamina.ledger.records.keys import Change, Key, KeyEvent, Role
from lamina.ledger.records.policy import Floors, PolicyChange, Preset, Signed, in_force, loosened, misplaced
from lamina.ledger.records.release import Release
from lamina.ledger.records.withdrawal import Effect, Reason, Withdrawal

Record = Header | Admitted | Epoch | Withdrawal | KeyEvent | Aggregate | PolicyChange | Release

KINDS: dict[int, type[Record]] = {
    1: Header, 2: Admitted, 3: Epoch, 4: Withdrawal, 5: KeyEvent, 6: Aggregate, 7: PolicyChange, 8: Release,
}  # fmt: skip
NUMBERS: dict[type[Record], int] = {kind: number for number, kind in KINDS.items()}
WORDS: dict[type[Record], str] = {  # what people read
    Header: "header", Admitted: "contribution", Epoch: "epoch", Withdrawal: "withdrawal", KeyEvent: "key",
    Aggregate: "aggregate", PolicyChange: "policy", Release: "release",
}  # fmt: skip

__all__ = [
    "Record", "KINDS", "NUMBERS", "WORDS",
    "Header", "Parent", "Floors", "Preset", "Key", "Role",
    "Admitted", "Terms",
    "Epoch", "Segment", "Outcome", "Account", "Charge",
    "Withdrawal", "Reason", "Effect",
    "KeyEvent", "Change",
    "Aggregate", "ClassTotal", "Span", "MOST_SPANS",
    "PolicyChange", "Signed", "in_force", "loosened", "misplaced",
    "Release",
]  # fmt: skip
