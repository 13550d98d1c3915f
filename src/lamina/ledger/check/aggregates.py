"""Aggregates: what was summed up was old enough, and is what the aggregate says, as far as that can still be seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise

from lamina.admit.times import shown
from lamina.ledger.check.keys import Keys
from lamina.ledger.check.problem import bad
from lamina.ledger.check.tallies import Tallies
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Aggregate, Header, Role, Span


class Aggregates:
    """The aggregates of a ledger, in order. `countersigned` are those that an auditor looked at."""

    def __init__(self, header: Header, keys: Keys, tallies: Tallies) -> None:
        self._header, self._keys, self._tallies = header, keys, tallies
        self._spans: list[Span] = []
        self.summed = 0
        self.countersigned = 0
        self.alone = 0  # without any countersignature

    def see(self, leaf: Leaf, withdrawn: Mapping[int, int], spent: Mapping[str, int]) -> None:
        """`withdrawn` are the targets of withdrawals before it, `spent` is the most that an account of a class lost."""
        record, seq = leaf.record, leaf.seq
        assert isinstance(record, Aggregate)
        if record.horizon + self._header.retention > leaf.time:
            bad(
                seq,
                Aggregate,
                "verify.sums-up-contributions",
                f"it sums up contributions until {shown(record.horizon)}, the header keeps them for "
                f"{self._header.retention} s, and it is of {shown(leaf.time)}: pruned beyond the horizon",
            )
        self._check_spans(seq, record)
        self._check_members(leaf, record)
        self._check_figures(seq, record, withdrawn, spent)
        signers, wrong = self._keys.signers(
            record.message(self._header.origin), record.signatures, (Role.AUDITOR,), leaf.time
        )
        if wrong is not None:
            bad(
                seq,
                Aggregate,
                "verify.countersignature-under-not",
                f"a countersignature under it does not count: {wrong}",
            )
        self.summed += record.count
        self.countersigned += bool(signers)
        self.alone += not signers

    def _check_spans(self, seq: int, record: Aggregate) -> None:
        if record.spans[-1].stop > seq:
            bad(
                seq,
                Aggregate,
                "verify.sums-up-leaves",
                f"it sums up leaves until {record.spans[-1].stop}, which come after it",
            )
        spans = sorted([*self._spans, *record.spans], key=lambda span: span.first)
        for one, two in pairwise(spans):
            if two.first < one.stop:
                bad(
                    seq,
                    Aggregate,
                    "verify.leaves-summed-up",
                    f"leaves from {two.first} on were summed up before",
                )
        self._spans = spans

    def _check_members(self, leaf: Leaf, record: Aggregate) -> None:
        """What can be seen of the contributions themselves."""
        seq, tally = leaf.seq, self._tallies.of(leaf.seq)
        if tally is None or tally.aggregate != record:
            bad(
                seq,
                Aggregate,
                "verify.store-finds-another",
                "the store finds another aggregate here than the leaf",
            )
        if tally.latest >= record.horizon or tally.earliest >= record.horizon:
            bad(
                seq,
                Aggregate,
                "verify.sums-up-contribution",
                f"it sums up a contribution that was admitted at {shown(max(tally.latest, tally.earliest))} or later, "
                f"its horizon is {shown(record.horizon)}: pruned beyond the horizon",
            )
        if tally.expires > leaf.time:
            bad(
                seq,
                Aggregate,
                "verify.sums-up-contribution-expires",
                f"it sums up a contribution that expires at {shown(tally.expires)}, after it",
            )
        if (sealed := tally.sealed) is not None and sealed != record.digest:
            bad(seq, Aggregate, "verify.digest-not-leaves", "its digest is not of the leaves that it sums up")
        stated = {each.cls: each.count for each in record.classes}
        for cls, count in tally.counts.items():
            if count > stated.get(cls, 0) or (tally.present == record.count and count != stated[cls]):
                bad(
                    seq,
                    Aggregate,
                    "verify.counts-contributions-class",
                    f"it counts {stated.get(cls, 0)} contributions of class {cls!r}, {count} are there",
                )

    def _check_figures(
        self, seq: int, record: Aggregate, withdrawn: Mapping[int, int], spent: Mapping[str, int]
    ) -> None:
        gone = _within(withdrawn, record.spans)
        if (stated := sum(each.withdrawn for each in record.classes)) != gone:
            bad(
                seq,
                Aggregate,
                "verify.counts-withdrawn-contributions",
                f"it counts {stated} withdrawn contributions, {gone} were withdrawn before it",
            )
        for each in record.classes:
            if each.spend != spent.get(each.cls, 0):
                found = spent.get(each.cls, 0)
                bad(
                    seq,
                    Aggregate,
                    "verify.class-lost-epochs",
                    f"class {each.cls!r} lost {each.spend} (1e-9) by it, {found} by the epochs",
                )


def _within(seqs: Iterable[int], spans: Iterable[Span]) -> int:
    sorted_spans = sorted((span.first, span.stop) for span in spans)
    found = 0
    for seq in seqs:
        at = bisect_right(sorted_spans, (seq, 1 << 63)) - 1
        found += at >= 0 and seq < sorted_spans[at][1]
    return found
