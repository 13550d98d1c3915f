"""Pruning after the retention horizon: contributions are aggregated and their bodies deleted.

In two steps, so that an auditor can look in between:

    propose   what would be summed up: leaves, totals per class, a digest over the leaves
    prune     the aggregate, with the countersignatures that it got, becomes a leaf; a checkpoint covers it; then the
              bodies go, with their attestations

A contribution is old enough when it was admitted before the horizon and its attestation has expired. And no attempt is
open of a run that began before it expired: what that takes from it is in no leaf yet, and the totals would leave it
out. A kill on the way leaves a ledger that is whole, and `resume` goes on.

Only bodies of contributions go. Their leaves stay, and say for ever what class and bound each had, until when, and whose
it was not to be admitted again; so do all tiles, and every proof can still be made. Epochs stay whole, and with each its
plan: without them no spend could be computed again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lamina.errors import LedgerError
from lamina.ledger.checked_leaves import CheckedLeaves, LeafSet
from lamina.ledger.governance_records import MAX_SPANS, Aggregate, ClassTotal, LeafSpan, Role, Withdrawal
from lamina.ledger.merkle import leaf_hash
from lamina.ledger.records import CONTRIBUTION_STARTS, ContributionRecord, Epoch, decode_kept, decode_leaf
from lamina.ledger.store.rows import StoredLeaf, StoreReader, StoreWriter, head_of
from lamina.ledger.writer import DAY_SECONDS, Ledger

_NEVER = 1 << 62  # later than any time
_LEAVES_PER_TRANSACTION = 4096  # leaves whose bodies go in one transaction
_KINDS_CHANGING_AGGREGATE = {Epoch, Withdrawal, Aggregate}


class Retention:
    """Pruning of one ledger, opened with its key."""

    def __init__(self, ledger: Ledger) -> None:
        ledger.signing_key()
        self._ledger, self._store = ledger, ledger.store

    def horizon(self) -> int:
        """Seconds before which contributions may be summed up now, by the retention in force."""
        return max(0, self._ledger.now() - self._ledger.parties().retention)

    def propose(self, before: int | None = None) -> Aggregate | None:
        """The aggregate over every contribution that is old enough; None if none is.

        `before` is an earlier horizon than the retention asks for; a later one is refused.
        """
        latest, now = self.horizon(), self._ledger.now()
        horizon = latest if before is None else before
        if not 0 <= horizon <= latest:
            problem = f"the horizon {horizon} is later than {latest}, which the retention allows"
            raise LedgerError("ledger.horizon-too-late", problem, "give an earlier one, or wait")
        with self._store.read() as rows:
            return self._propose(rows, horizon, now)

    def receipts(self, aggregate: Aggregate) -> Iterator[tuple[int, bytes]]:
        """(leaf, COSE receipt) of everything whose body would go, under the newest checkpoint."""
        for span in aggregate.spans:
            for seq in range(span.first, span.stop):
                yield seq, self._ledger.receipt(seq)

    def prune(self, aggregate: Aggregate) -> int:
        """Make the aggregate a leaf, sign, and let the bodies go; the leaf.

        It must be what `propose` says now, but for its signatures, and these must all be of auditors of the ledger.
        """
        self._ledger.check_signs()  # before anything is written that could not be signed
        self.resume()
        with self._store.read() as rows:
            size, used = head_of(rows).size, _earliest_open_run(rows)
            fresh = self._propose(rows, aggregate.horizon, self._ledger.now())
        if aggregate.horizon > self.horizon():
            problem = f"the horizon {aggregate.horizon} is not reached yet"
            raise LedgerError("ledger.horizon-too-late", problem, "wait, or propose again")
        if fresh != replace(aggregate, signatures=()):
            problem = "the ledger has changed since the aggregate was proposed"
            raise LedgerError("ledger.proposal-outdated", problem, "propose again, and have that signed")
        self._check_signatures(aggregate)

        def check_unchanged(rows: StoreWriter, seqs: list[int]) -> None:
            new = {decode_kept(leaf).kind for _, block in rows.kept_blocks(size, seqs[0]) for leaf in block}
            if new & _KINDS_CHANGING_AGGREGATE or _earliest_open_run(rows) < used:
                problem = "the ledger grew, or a run began a segment, while it was being pruned"
                raise LedgerError("ledger.proposal-outdated", problem, "propose again")

        (seq,) = self._ledger.append_aggregate(aggregate, check_unchanged)
        self.resume()
        return seq

    def resume(self) -> None:
        """Delete the bodies that aggregates in the ledger cover, as far as they are still there."""
        with self._store.read() as rows:
            unfinished = _with_bodies(rows, _aggregates(rows, self._ledger.checked(rows)))
        for aggregate in unfinished:
            self._ledger.checkpoint()  # nothing goes before what stands for it is signed
            for span in aggregate.spans:
                for first in range(span.first, span.stop, _LEAVES_PER_TRANSACTION):
                    part = first, min(first + _LEAVES_PER_TRANSACTION, span.stop)
                    self._ledger.transact(lambda rows, part=part: rows.drop_bodies(*part))  # type: ignore[misc]

    # ----------------------------------------------------------------------------------- inside

    def _propose(self, rows: StoreReader, horizon: int, now: int) -> Aggregate | None:
        self._ledger.check_open(rows)  # an open attempt that is hidden may be using contributions
        return _propose_aggregate(rows, self._ledger.checked(rows), horizon, now)

    def _check_signatures(self, aggregate: Aggregate) -> None:
        message, now = aggregate.message(self._ledger.origin), self._ledger.now()
        good, wrong = self._ledger.parties().signers(message, aggregate.signatures, (Role.AUDITOR,), now)
        if wrong is not None or len(good) < len(aggregate.signatures):
            reason = "one key signed twice" if wrong is None else wrong.reason
            problem = f"a signature of the aggregate does not count: {reason}"
            remedy = "leave it out, or have an auditor of this ledger sign this very aggregate"
            raise LedgerError("ledger.aggregate-signature-invalid", problem, remedy)


def _propose_aggregate(rows: StoreReader, leaves: CheckedLeaves, horizon: int, now: int) -> Aggregate | None:
    used = _earliest_open_run(rows)
    summed = LeafSet(span for each in _aggregates(rows, leaves) for span in each.spans)
    withdrawn = leaves.withdrawals(rows)
    counts, withdrawn_counts = Counter[str](), Counter[str]()
    spans: list[list[int]] = []
    digest = hashlib.sha256()
    for seq, data in _genuine_leaves(rows, leaves):
        if data.leaf[:3] not in CONTRIBUTION_STARTS:
            continue
        leaf = decode_leaf(data)
        if leaf.time >= horizon:
            break  # time never falls
        if seq in summed:
            continue
        assert isinstance(leaf.record, ContributionRecord)
        if leaf.record.expires > min(now, used):
            continue
        if not spans or spans[-1][1] != seq:
            if len(spans) == MAX_SPANS:
                break  # the rest is for another aggregate
            spans.append([seq, seq])
        spans[-1][1] = seq + 1
        digest.update(leaf_hash(data.leaf))
        counts[leaf.record.terms.cls] += 1
        withdrawn_counts[leaf.record.terms.cls] += seq in withdrawn
    if not spans:
        return None
    spent = _largest_spend(rows, leaves)
    return Aggregate(
        spans=tuple(LeafSpan(first=first, stop=stop) for first, stop in spans),
        horizon=horizon,
        classes=tuple(
            ClassTotal(cls=cls, count=count, withdrawn=withdrawn_counts[cls], spend=spent.get(cls, 0))
            for cls, count in sorted(counts.items())
        ),
        digest=digest.digest(),
    )


def _genuine_leaves(rows: StoreReader, leaves: CheckedLeaves) -> Iterator[tuple[int, StoredLeaf]]:
    """Yield all leaves with their bodies, in order. Each is compared with its checked hash."""
    for first in range(0, leaves.size, _LEAVES_PER_TRANSACTION):
        stop = min(first + _LEAVES_PER_TRANSACTION, leaves.size)
        yield from leaves.leaves(rows, range(first, stop)).items()


def _aggregates(rows: StoreReader, leaves: CheckedLeaves) -> list[Aggregate]:
    """Return the aggregates in all leaves, in order."""
    return [leaf.record for leaf in leaves.records(rows, Aggregate) if isinstance(leaf.record, Aggregate)]


def _with_bodies(rows: StoreReader, aggregates: Sequence[Aggregate]) -> list[Aggregate]:
    """Return the aggregates that cover a body that is still there."""
    covered = LeafSet(span for each in aggregates for span in each.spans)
    stop = max((span.stop for span in covered.spans), default=0)
    left = [seq for seq in rows.with_body(0, stop) if seq in covered]  # one query, however many aggregates there are
    spans = ((each, LeafSet(each.spans)) for each in aggregates if left)
    return [each for each, own in spans if any(seq in own for seq in left)]


def _earliest_open_run(rows: StoreReader) -> int:
    """The time from which on attempts that are still open may have read their members."""
    at_work = {hold.run for hold in rows.holds() if hold.attempt}
    days = {run.id: run.day for run in rows.runs()}
    return min((days.get(run, 0) * DAY_SECONDS for run in at_work), default=_NEVER)


def _largest_spend(rows: StoreReader, leaves: CheckedLeaves) -> dict[str, int]:
    """By class the largest spend that an epoch has recorded: spend never falls."""
    found: dict[str, int] = {}
    for leaf in leaves.records(rows, Epoch):
        assert isinstance(leaf.record, Epoch)
        for account in leaf.record.accounts:
            found[account.cls] = max(account.spend, found.get(account.cls, 0))
    return found
