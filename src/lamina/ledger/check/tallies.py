"""What an aggregate says of contributions, counted again where they are still there."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lamina.ledger.records import Admitted, Aggregate, Span

if TYPE_CHECKING:
    from lamina.ledger.check.columns import Columns, Ints


@dataclass(slots=True)
class Tally:
    """Of one aggregate: leaves of it that were there, by class, their latest times, and the digest over all hashes."""

    aggregate: Aggregate
    counts: Counter[str] = field(default_factory=Counter)
    latest: int = -1
    expires: int = -1
    earliest: int = -1  # of leaves that are gone: they are not older than this
    hashed: int = 0
    whole: bool = True
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def present(self) -> int:
        return self.counts.total()

    @property
    def sealed(self) -> bytes | None:
        """The digest, if every hash was there."""
        return self.digest.digest() if self.whole and self.hashed == self.aggregate.count else None


class Tallies:
    """The tallies of all aggregates of a ledger, by the leaf of each. Their spans are known before they are reached."""

    def __init__(self, aggregates: Mapping[int, Aggregate]) -> None:
        self._tallies = {seq: Tally(aggregate) for seq, aggregate in aggregates.items()}
        spans = [(span.first, span.stop, seq) for seq, each in aggregates.items() for span in each.spans]
        self._spans = sorted(spans)
        self._first: Ints = np.array([first for first, _, _ in self._spans], dtype=np.int64)

    def of(self, seq: int) -> Tally | None:
        """The tally of the aggregate in that leaf."""
        return self._tallies.get(seq)

    def covering(self, seq: int) -> tuple[Span, Tally] | None:
        """The span that has a leaf in it."""
        at = int(np.searchsorted(self._first, seq, side="right")) - 1
        if at < 0 or not seq < self._spans[at][1]:
            return None
        first, stop, owner = self._spans[at]
        return Span(first=first, stop=stop), self._tallies[owner]

    def within(self, one: int, two: int) -> bool:
        """Whether one span has both leaves."""
        first, second = self.covering(one), self.covering(two)
        return first is not None and second is not None and first[0] == second[0]

    def columns(self, group: Columns) -> None:
        """Contributions that are there."""
        if not self._spans:
            return
        at = np.searchsorted(self._first, group.seq, side="right") - 1
        for place in np.unique(at[at >= 0]).tolist():
            first, stop, owner = self._spans[place]
            inside = (group.seq >= first) & (group.seq < stop)
            if inside.any():
                tally = self._tallies[owner]
                tally.counts[group.terms.cls] += int(inside.sum())
                tally.latest = max(tally.latest, int(group.time[inside].max()))
                tally.expires = max(tally.expires, int(group.expires[inside].max()))

    def one(self, seq: int, time: int, record: Admitted) -> None:
        """A contribution that is there."""
        if self._spans and (found := self.covering(seq)) is not None:
            tally = found[1]
            tally.counts[record.terms.cls] += 1
            tally.latest, tally.expires = max(tally.latest, time), max(tally.expires, record.expires)

    def hashes(self, first: int, hashes: Sequence[bytes]) -> None:
        """Leaf hashes, in order, of leaves that are there or in a tile."""
        at, stop = first, first + len(hashes)
        while self._spans and at < stop:
            found = self.covering(at)
            if found is None:
                later = self._first[self._first > at]
                at = min(stop, int(later[0])) if len(later) else stop
                continue
            span, tally = found
            end = min(stop, span.stop)
            tally.digest.update(b"".join(hashes[at - first : end - first]))
            tally.hashed += end - at
            at = end

    def gone(self, first: int, stop: int, time: int) -> None:
        """Leaves [first, stop) of one span are not there; the leaf before them is of `time`."""
        found = self.covering(first)
        assert found is not None and stop <= found[0].stop
        found[1].earliest = max(found[1].earliest, time)

    def unknown(self, seq: int) -> None:
        """Not even the hash of this leaf is there."""
        found = self.covering(seq)
        assert found is not None
        found[1].whole = False
