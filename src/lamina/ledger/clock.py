"""The time of a ledger: seconds that never fall, from a clock that may be a little wrong."""

from __future__ import annotations

from lamina.admit.times import LAST, shown
from lamina.ledger.errors import LedgerError

SKEW = 120  # seconds by which clocks of several machines may differ


def next_time(last: int, now: float) -> int:
    """The time of the next leaf: that of the clock, or of the last leaf where the clock is a little behind.

    A clock that is further behind is refused: one of two machines is wrong, and what it would write could never be
    told from something back-dated.
    """
    if not 0 <= now <= LAST:
        raise LedgerError("ledger.clock-says", f"the clock says {now!r}", "set the clock of this machine")
    if now < last - SKEW:
        raise LedgerError(
            "ledger.clock-says-last",
            f"the clock says {shown(int(now))}, the last leaf is of {shown(last)}: more than {SKEW} s later",
            "set the clock of this machine; if the ledger is what is wrong, whoever answers for it must say so",
        )
    return max(last, int(now))


def epoch_time(last: int, now: int, step: int) -> int:
    """The time of an epoch: rounded down to the header's `epoch_clock`, but never before the last leaf.

    >>> epoch_time(7000, 10_000, 3600), epoch_time(9000, 10_000, 3600)
    (7200, 9000)
    """
    return max(last, now - now % step)
