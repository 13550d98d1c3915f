"""Checks of release records: their runs, dates and manifest, and the figures of the manifest against the epochs."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Container, Mapping
from typing import Any

from lamina.account.accountants import pooled_epsilon
from lamina.account.charges import Account
from lamina.account.schedule import EventKey, add_events
from lamina.errors import EncodingError
from lamina.ledger.governance_records import Header, Release
from lamina.ledger.records import Epoch, Leaf
from lamina.ledger.run_records import WEIGHTS, RunEnd
from lamina.ledger.schema import NANO, nano_epsilon
from lamina.ledger.spending import Spending
from lamina.ledger.store.rows import StoreReader
from lamina.ledger.verify.tree_checks import fail
from lamina.plan.risk import UNPROVEN, ZERO_OUT, RiskOf, curve_marks, stated_rates
from lamina.plan.step_plan import StepPlan
from lamina.sign.keys import format_utc
from lamina.sign.signed_json import parse_json

FIGURE_TOLERANCE = 1e-7  # relative, of an ε computed on two machines: accountants sum many small numbers


def understated(stated: float, found: float) -> bool:
    """Return whether a stated ε is smaller than the computed one by more than rounding between two machines."""
    return stated < found and not math.isclose(stated, found, rel_tol=FIGURE_TOLERANCE, abs_tol=2 / NANO)


class ReleaseChecks:
    """Checks of releases. A manifest that contradicts the epochs is a finding; one that cannot be compared is listed."""

    def __init__(self, header: Header, rows: StoreReader) -> None:
        self._header, self._rows = header, rows
        self._spending = Spending(header)  # as epochs state it
        self._marks: dict[bytes, frozenset[str]] = {}  # run → what limits the curves of its plans
        self._public: set[tuple[bytes, str]] = set()  # (run, class) that a plan of the run declares public
        self.without_manifest: list[int] = []  # leaves of releases of which nothing could be compared
        self.without_end: list[int] = []  # leaves of releases of runs whose end is not recorded

    def charge(self, epoch: Epoch, plan: StepPlan) -> None:
        """Add the charges of an epoch under its plan."""
        self._marks[epoch.run] = self._marks.get(epoch.run, frozenset()) | curve_marks(plan)
        self._public |= {(epoch.run, cls) for cls in plan.public_classes}
        self._spending.add(epoch)

    def see(self, leaf: Leaf, runs: Container[bytes], ends: Mapping[bytes, RunEnd]) -> None:
        """Check a release record. `runs` have an epoch before it; the ends in `ends` are recorded before it."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Release)
        for run in record.runs:
            if run not in runs:
                reason = f"its model was trained in run {run.hex()[:8]}, which has no earlier epoch in the ledger"
                fail(seq, Release, "verify.release-of-unknown-run", reason)
        if len(set(record.runs)) < len(record.runs):
            fail(seq, Release, "verify.release-run-twice", "it names a run twice")
        if record.not_after is not None and record.not_after <= leaf.time:
            reason = f"it may be served until {format_utc(record.not_after)}, but is of {format_utc(leaf.time)}"
            fail(seq, Release, "verify.release-expired", reason)
        data = self._rows.blob(record.manifest)
        if data is not None and hashlib.sha256(data).digest() != record.manifest:
            reason = "its stored manifest does not have the digest in the leaf"
            fail(seq, Release, "verify.release-manifest-swapped", reason)
        if any(run not in ends for run in record.runs):
            self.without_end.append(seq)
        if data is None or (found := _read_manifest(data)) is None:
            self.without_manifest.append(seq)
            return
        self._compare(seq, record, *found, ends)

    def _compare(
        self, seq: int, record: Release, stated_runs: Any, classes: Mapping[str, Any], weights: Any,
        ends: Mapping[bytes, RunEnd],
    ) -> None:  # fmt: skip
        """Compare what a manifest states with the epochs and ends of its runs."""
        if stated_runs != [run.hex() for run in record.runs]:
            fail(seq, Release, "verify.release-runs-differ", "its manifest names other runs than the record")
        if record.runs and (end := ends.get(record.runs[-1])) is not None and weights != end.weights:
            reason = f"its weights are {str(weights)[:16]}…, but run {end.run.hex()[:8]} ended with {end.weights[:16]}…"
            fail(seq, Release, "verify.release-weights-differ", reason)
        for cls in sorted(self._spending.classes(record.runs)):
            stated = classes.get(cls)
            if type(stated) is not dict or stated.get("public") is not False:
                reason = f"class {cls!r} was charged, but its manifest does not state it as a private class"
                fail(seq, Release, "verify.release-contradicts-epochs", reason)
            events: dict[EventKey, int] = {}
            marks = frozenset[str]().union(*(self._marks.get(run, frozenset()) for run in record.runs))
            if any(run in ends and ends[run].public_number for run in record.runs):
                marks |= {ZERO_OUT}  # the number of contributions is public: nothing is claimed about membership
            for run in record.runs:
                add_events(events, self._spending.events(Account(cls), run))
            # a loss may be split over two accounts, or nothing bounded it in one of the runs
            unproven = cls in self._spending.split or any((run, cls) in self._public for run in record.runs)
            self._compare_class(seq, cls, stated, events, unproven=unproven)
            if unproven:
                marks |= {UNPROVEN}
            kinds: tuple[RiskOf, ...] = ("membership", "content")
            for of in kinds:
                self._compare_rates(seq, cls, of, stated.get(of), events, marks)

    def _compare_rates(
        self, seq: int, cls: str, of: RiskOf, stated: Any, events: dict[EventKey, int], marks: frozenset[str]
    ) -> None:
        """Compare the true-positive rates that a manifest states for a class with those of its epochs."""
        if stated is None:
            return
        found = stated_rates(events, accountant=self._header.accountant, of=of, marks=marks) or {}
        figures: dict[Any, Any] = stated if type(stated) is dict else {"": None}
        for rate, value in figures.items():
            least = found.get(rate, 1.0)
            if type(value) not in (int, float) or understated(value, least):
                reason = f"its manifest states {of} of class {cls!r} as {str(value)[:24]} at {str(rate)[:24]}"
                fail(seq, Release, "verify.release-contradicts-epochs", f"{reason}, but its epochs give {least:.6g}")

    def _compare_class(
        self, seq: int, cls: str, stated: Mapping[str, Any], events: dict[EventKey, int], *, unproven: bool
    ) -> None:
        header, epsilon, noise = self._header, stated.get("epsilon"), stated.get("noise_multiplier")
        found = nano_epsilon(pooled_epsilon(events, delta=header.delta, name=header.accountant)) / NANO
        found = math.inf if unproven else found
        if epsilon is not None and (type(epsilon) not in (int, float) or understated(epsilon, found)):
            shown = "no finite figure" if math.isinf(found) else f"{found:.6g}"
            reason = f"its manifest states ε = {str(epsilon)[:24]} for class {cls!r}, but its epochs give {shown}"
            fail(seq, Release, "verify.release-contradicts-epochs", reason)
        least = min((sigma for sigma, _, _ in events), default=None)
        if noise is not None and (type(noise) not in (int, float) or least is None or noise > least * (1 + 1e-12)):
            reason = f"its manifest states noise multiplier {str(noise)[:24]} for class {cls!r}, but its epochs state {least}"
            fail(seq, Release, "verify.release-contradicts-epochs", reason)


def _read_manifest(data: bytes) -> tuple[Any, Mapping[str, Any], Any] | None:
    """Return runs, classes by name and digest of the weights of a manifest; None if the data is no manifest."""
    try:
        payload = base64.b64decode(parse_json(data, "the envelope")["payload"], validate=True)
        statement = parse_json(payload, "the manifest")
        predicate = statement["predicate"]
        digests = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        classes = predicate["posture"]["classes"]
        return (predicate["runs"], classes, digests.get(WEIGHTS)) if type(classes) is dict else None
    except (EncodingError, KeyError, TypeError, ValueError):
        return None
