"""`Aggregate`: what stands in a ledger for contributions whose bodies are gone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from lamina import cbor
from lamina.ledger.errors import LedgerError
from lamina.ledger.records.fields import (
    CLASS,
    COUNT,
    DIGEST,
    SEQ,
    SPEND,
    TIME,
    Many,
    Part,
    check,
    define,
    schema,
)
from lamina.ledger.records.policy import MOST_CLASSES, Signed

MOST_SPANS = 32_768
_CONTEXT = b"lamina/aggregate/1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTotal:
    """What is left of one class: how many contributions, how many of them withdrawn, and the most that any has lost.

    `spend` is in 1e-9, after the last epoch before the aggregate, over all runs.
    """

    cls: str
    count: int
    withdrawn: int
    spend: int

    def __post_init__(self) -> None:
        check(self)
        if self.withdrawn > self.count:
            raise LedgerError(
                "ledger.class-withdrawn-contributions",
                f"class {self.cls!r} has {self.withdrawn} withdrawn of {self.count} contributions",
                "count again",
            )


define(ClassTotal, {1: ("cls", CLASS), 2: ("count", COUNT), 3: ("withdrawn", COUNT), 4: ("spend", SPEND)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Leaves [first, stop)."""

    first: int
    stop: int

    def __post_init__(self) -> None:
        check(self)
        if not self.first < self.stop:
            raise LedgerError(
                "ledger.span-covers-leaves",
                f"a span covers leaves [{self.first}, {self.stop})",
                "give first < stop",
            )


define(Span, {1: ("first", SEQ), 2: ("stop", SEQ)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Contributions that were admitted before `horizon`, and have expired, were summed up and their bodies dropped.

    `spans` are their leaves, every one of them a contribution. `digest` is SHA-256 over the leaf hashes in order. It
    stays checkable for whoever kept the bodies, and, while the tiles are there, for everybody. An auditor who
    recomputed the totals countersigns before the bodies go: afterwards this record is all that there is.
    """

    spans: tuple[Span, ...]
    horizon: int
    classes: tuple[ClassTotal, ...]
    digest: bytes
    signatures: tuple[Signed, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        if any(one.stop >= two.first for one, two in pairwise(self.spans)):
            raise LedgerError(
                "ledger.spans-aggregate-touch",
                "spans of Aggregate touch or are out of order",
                "join and sort them",
            )
        if self.count != sum(each.count for each in self.classes):
            raise LedgerError(
                "ledger.aggregate-over-leaves",
                f"Aggregate is over {self.count} leaves, its classes count others",
                "count again",
            )
        names = [each.cls for each in self.classes]
        if names != sorted(set(names)):
            raise LedgerError(
                "ledger.aggregate-classes", f"Aggregate has classes {names}", "name each once, in order"
            )

    @property
    def count(self) -> int:
        """How many leaves it stands for."""
        return sum(span.stop - span.first for span in self.spans)

    def message(self, origin: str) -> bytes:
        """What an auditor signs: the aggregate without signatures, for one ledger."""
        body = schema(Aggregate).plain(replace(self, signatures=()))
        return _CONTEXT + cbor.encode([origin, body], max_size=1 << 20)


define(
    Aggregate,
    {
        1: ("spans", Many(Part(Span), 1, MOST_SPANS)),
        2: ("horizon", TIME),
        3: ("classes", Many(Part(ClassTotal), 1, MOST_CLASSES)),
        4: ("digest", DIGEST),
        5: ("signatures", Many(Part(Signed), 0, 16)),
    },
)
