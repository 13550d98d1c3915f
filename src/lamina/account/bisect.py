"""Bisection, once for the whole project: where a condition that holds from some point on begins to hold.

Both functions return (last point that failed, first point that held). The caller takes the side that is safe for it.
"""

from __future__ import annotations

from collections.abc import Callable


def bisect_int(holds: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """Neighbouring integers between which `holds` turns true; it is taken to fail at `low` and to hold at `high`.

    >>> bisect_int(lambda n: n * n >= 50, 0, 50)
    (7, 8)
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def bisect_float(
    holds: Callable[[float], bool], low: float, high: float, *, relative: float = 1e-12, absolute: float = 0.0
) -> tuple[float, float]:
    """The same between floats, until they differ by at most absolute + relative·high.

    >>> low, high = bisect_float(lambda x: x * x >= 2, 0.0, 2.0)
    >>> low * low < 2 <= high * high and high - low < 1e-11
    True
    """
    while high - low > absolute + relative * abs(high) and low < (middle := 0.5 * (low + high)) < high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
