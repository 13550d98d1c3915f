"""Withdrawals: of a contribution that is there, once, and heeded by the segments that came after."""

from __future__ import annotations

import hashlib

from lamina.ledger.check.problem import bad
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Epoch, Outcome, Segment, Withdrawal
from lamina.ledger.store.base import Reader


class Withdrawals:
    """The withdrawals that were read: target → leaf."""

    def __init__(self, rows: Reader) -> None:
        self._rows = rows
        self.targets: dict[int, int] = {}
        self._barred: dict[bytes, list[tuple[int, int]]] = {}  # run → (first segment without it, leaf)

    def see(self, leaf: Leaf, contribution: bool) -> None:
        """`contribution` is whether its target is one."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Withdrawal)
        if not contribution:
            bad(
                seq,
                Withdrawal,
                "verify.withdraws-leaf-no",
                f"it withdraws leaf {record.target}, which is no contribution before it",
            )
        if (before := self.targets.setdefault(record.target, seq)) != seq:
            bad(
                seq,
                Withdrawal,
                "verify.leaf-withdrawn-already",
                f"leaf {record.target} was withdrawn already, in leaf {before}",
            )
        data = None if record.request is None else self._rows.evidence(seq)
        if data is not None and hashlib.sha256(data).digest() != record.request:
            bad(
                seq,
                Withdrawal,
                "verify.request-beside-another",
                "the request beside it is another one than it names",
            )
        if record.run is not None and record.segment is not None:
            self._barred.setdefault(record.run, []).append((record.segment, seq))

    def heeded(self, index: int, run: bytes, segment: Segment) -> None:
        """A segment that was to be without a contribution was frozen after its withdrawal, or given up."""
        if segment.outcome is Outcome.ABANDONED:
            return
        for first, seq in self._barred.get(run, ()):
            if segment.index >= first and segment.eligibility <= seq:
                bad(
                    index,
                    Epoch,
                    "verify.segment-run-without",
                    f"segment {segment.index} of run {run.hex()[:8]} was to be without leaf "
                    f"{self._target(seq)} (withdrawn in leaf {seq}), and its members were read before that",
                )

    def _target(self, seq: int) -> int:
        return next(target for target, withdrawn in self.targets.items() if withdrawn == seq)
