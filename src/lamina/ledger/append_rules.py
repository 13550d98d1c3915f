"""Append rules: what may be the next leaf. Writer, reader and verifier share one rule for each kind of record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lamina.errors import LedgerError
from lamina.ledger.governance_records import GOVERNING_KINDS, Aggregate, GoverningRecord, Header, Withdrawal
from lamina.ledger.key_state import GovernanceState, RootAt
from lamina.ledger.records import CONTRIBUTION_STARTS, KINDS, Epoch, SegmentOutcome
from lamina.ledger.run_history import RecordedRuns
from lamina.ledger.run_records import RunBegin, RunEnd, RunRecord
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.withdrawal_request import withdrawal_refused, withdrawal_target, withdrawal_violation
from lamina.sign.keys import format_utc


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a new record, and what its rule may ask about earlier leaves.

    seq, time   of its leaf
    governance  keys, policy and terms
    root_of     root of the checkpoint of a size
    runs        attempts, starts and ends of runs; None for a reader of single leaves, which leaves them to `verify`
    """

    rows: StoreReader
    header: Header
    seq: int
    time: int
    governance: Callable[[], GovernanceState]
    root_of: RootAt
    runs: Callable[[], RecordedRuns] | None = None


def check_record(record: Any, place: Place) -> None:
    """Raise LedgerError if the record, which is no contribution, may not be the leaf at this place."""
    if (check := KINDS[type(record)].check) is not None:
        check(record, place)


def _check_header(record: Header, place: Place) -> None:
    if place.seq:
        raise LedgerError("ledger.second-header", "a header may only be leaf 0", "leave it out")


def _check_epoch(record: Epoch, place: Place) -> None:
    closed = sum(each.outcome is SegmentOutcome.CLOSED for each in record.segments)
    if closed > place.header.granularity:
        problem = f"the epoch closes {closed} segments, the header allows {place.header.granularity}"
        raise LedgerError("ledger.epoch-too-many-segments", problem, "split it")
    for each in record.segments:
        if not 1 <= each.eligibility <= place.seq:
            problem = (
                f"segment {each.index}, generation {each.generation} of run {record.run.hex()[:8]} read its members after "
                f"{each.eligibility} leaves, must be in [1, {place.seq}]"
            )
            raise LedgerError("ledger.segment-from-future", problem, "give the size when its membership was frozen")


def _check_withdrawal(record: Withdrawal, place: Place) -> None:
    data = place.rows.leaf(record.target) if record.target < place.seq else None
    if data is None or data.leaf[:3] not in CONTRIBUTION_STARTS:
        problem = f"cannot withdraw leaf {record.target}: it is no contribution before leaf {place.seq}"
        raise LedgerError("ledger.withdrawal-target", problem, "give the leaf of a contribution")
    target = withdrawal_target(place.rows, record)
    if (wrong := withdrawal_violation(record, target, place.time, place.governance())) is not None:
        raise withdrawal_refused(record, wrong)


def _check_aggregate(record: Aggregate, place: Place) -> None:
    if record.horizon + (kept := place.governance().retention) > place.time:
        problem = (
            f"at {format_utc(place.time)} it prunes contributions until {format_utc(record.horizon)}, the ledger keeps them "
            f"for {kept} s"
        )
        raise LedgerError("ledger.pruned-before-retention", problem, "wait, or propose again")


def _check_governing(record: GoverningRecord, place: Place) -> None:
    place.governance().check(record, place.seq, place.time, place.root_of)


def _check_run(record: RunRecord, place: Place) -> None:
    if place.runs is not None:
        place.runs().check(record)


KINDS[Header].check = _check_header
KINDS[Epoch].check = _check_epoch
KINDS[Withdrawal].check = _check_withdrawal
KINDS[Aggregate].check = _check_aggregate
KINDS[RunBegin].check = KINDS[RunEnd].check = _check_run
for _governing in GOVERNING_KINDS.values():
    KINDS[_governing].check = _check_governing
