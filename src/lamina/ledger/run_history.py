"""`RecordedRuns`: checks whether the start or end of a run may follow the leaves before it. Writer and verifier share it."""

from __future__ import annotations

from lamina.errors import LedgerError
from lamina.ledger.records import Epoch, SegmentOutcome
from lamina.ledger.run_records import RunBegin, RunEnd, RunRecord

_RESUME = "resume the run in its own folder, with its own checkpoints"


class RecordedRuns:
    """Attempts, starts and ends of runs, in the order of the leaves."""

    def __init__(self) -> None:
        self.begins: dict[bytes, RunBegin] = {}
        self.ends: dict[bytes, RunEnd] = {}  # the newest of each run
        self._ended: set[tuple[bytes, int, int]] = set()
        self._closed: dict[tuple[bytes, int, int], tuple[int, bytes]] = {}  # closed attempt → its last step, its plan
        self._continued: set[tuple[bytes, int, int]] = set()
        self._charged: set[bytes] = set()
        self._writers: dict[bytes, set[bytes]] = {}  # SHA-256 of final weights → the runs that wrote them

    def check(self, record: RunRecord) -> None:
        """Raise LedgerError if the record may not come next."""
        run = f"run {record.run.hex()[:8]}"
        if isinstance(record, RunBegin):
            self._check_begin(record, run)
            return
        at = f"segment {record.segment}, generation {record.generation} of {run}"
        if record.attempt not in self._closed:
            problem = f"the end of {run} names {at}, which no epoch before it closes"
            raise LedgerError("ledger.run-end-unknown-segment", problem, _RESUME)
        last, plan = self._closed[record.attempt]
        if (record.steps, record.plan) != (last, plan):
            stated = f"{record.steps} steps under plan {record.plan.hex()[:16]}"
            problem = f"the end of {run} states {stated}, but its epoch {last} steps under plan {plan.hex()[:16]}"
            raise LedgerError("ledger.run-end-differs", problem, _RESUME)
        if record.attempt in self._continued:
            problem = f"the end of {run} names {at}, but the ledger records later steps of the run"
            raise LedgerError("ledger.run-end-continued", problem, _RESUME)
        if record.attempt in self._ended:
            problem = f"the ledger already records an end after {at}, with other facts"
            raise LedgerError("ledger.run-ended-twice", problem, _RESUME)

    def _check_begin(self, record: RunBegin, run: str) -> None:
        if record.run in self.begins:
            problem = f"the ledger already records the start of {run}, with other weights"
            raise LedgerError("ledger.run-begun-twice", problem, _RESUME)
        if record.run in self._charged:
            problem = f"{run} already has epochs, so its starting weights can no longer be recorded"
            raise LedgerError("ledger.run-begin-late", problem, "record the start before the first segment")
        writers = self._writers.get(record.weights, set())
        if record.parent is not None and record.parent not in writers:
            problem = f"{run} does not start from the final weights of run {record.parent.hex()[:8]}"
            raise LedgerError("ledger.run-parent-differs", problem, "name the run whose weights these are")
        if record.parent is None and writers:
            problem = f"{run} starts from the final weights of run {min(writers).hex()[:8]} but does not name that run as its parent"
            raise LedgerError("ledger.run-parent-missing", problem, "name the run whose weights these are")

    def see(self, record: object) -> None:
        """Add the record of the next leaf. Records of other kinds have no effect."""
        if isinstance(record, RunBegin):
            self.begins[record.run] = record
        elif isinstance(record, RunEnd):
            self.ends[record.run] = record
            self._ended.add(record.attempt)
            for digest in record.weight_files:
                self._writers.setdefault(digest, set()).add(record.run)
        elif isinstance(record, Epoch):
            self._charged.add(record.run)
            for each in record.segments:
                if each.outcome is SegmentOutcome.CLOSED:
                    self._closed[record.run, each.index, each.generation] = each.last, record.plan
                    self._continued.add((record.run, each.index - 1, each.after or 0))
