"""Numbers of a ledger without floats: privacy spend as whole billionths, every other float as its exact text."""

from __future__ import annotations

import math
from fractions import Fraction

from lamina.ledger.errors import LedgerError

NANO = 1_000_000_000
UNBOUNDED = 2**64 - 1  # a spend for which no finite figure is known
_LONGEST = 32  # characters; the longest text of a double has 24


def nano(epsilon: float) -> int:
    """ε in billionths, rounded up: what a ledger says is never less than what was spent.

    >>> nano(0.5), nano(0.1), nano(float("inf")) == UNBOUNDED
    (500000000, 100000001, True)
    """
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not epsilon >= 0:
        raise LedgerError("ledger.spend-makes-no", f"a spend of {epsilon!r} makes no sense", "give an ε >= 0")
    if math.isinf(epsilon):
        return UNBOUNDED
    return min(math.ceil(Fraction(epsilon) * NANO), UNBOUNDED)


def epsilon(spend: int) -> float:
    """ε of a spend in billionths, never below it."""
    if spend == UNBOUNDED:
        return math.inf
    nearest = spend / NANO
    return nearest if Fraction(nearest) * NANO >= spend else math.nextafter(nearest, math.inf)


def exact_text(value: float) -> str:
    """The shortest decimal text that reads back as the very same float.

    >>> exact_text(1e-05), exact_text(0.1)
    ('1e-05', '0.1')
    """
    return repr(float(value))


def exact_float(text: object) -> float | None:
    """The float that `exact_text` wrote; None for anything else, also for another text of the same number.

    >>> exact_float("0.10"), exact_float("0.1"), exact_float("nan")
    (None, 0.1, None)
    """
    if type(text) is not str or len(text) > _LONGEST:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and repr(value) == text else None
