"""ε after t of T steps, cheap enough for a progress bar and never below the truth.

The accountant is asked at `points` step counts only, when training reaches them, spaced like the square
root that ε follows. ε never falls with further steps, so the value at the next point bounds every step
before it (interpolating between points would not: ε(t) is concave and lies above its chords). At t = T the
curve is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from lamina.account.accountant import accountant as find_accountant
from lamina.account.event import (
    Adjacency,
    Event,
    Schedule,
    check_adjacency,
    check_delta,
    prefix,
    total_steps,
)
from lamina.errors import AccountingError


class SpendCurve:
    """An upper bound on ε(t), t = 0..T, of the prefixes of one schedule, in the order it is written.

    Where something else is released on the way, `schedule` is a function: what the first t of `steps` steps release,
    never less for more steps.
    """

    def __init__(
        self,
        schedule: Iterable[Event] | Callable[[int], Schedule],
        *,
        steps: int | None = None,
        delta: float,
        accountant: str = "pld",
        adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
        points: int = 64,
    ) -> None:
        if points < 1:
            raise AccountingError(
                "account.curve-points-asked",
                f"a curve with {points} points was asked for, must be >= 1",
                "e.g. 64",
            )
        self._delta, self._adjacency = check_delta(delta), check_adjacency(adjacency)
        self._accountant = find_accountant(accountant)
        self._points = points
        self._upto: Callable[[int], Schedule]
        if callable(schedule):
            if steps is None:
                raise AccountingError(
                    "account.schedule-function-steps",
                    "the schedule is a function, and steps is not given",
                    "give both",
                )
            self._upto, self.steps = schedule, steps
        else:
            whole = tuple(schedule)
            self._upto, self.steps = (lambda t: prefix(whole, t)), total_steps(whole)

    def epsilon(self, t: int) -> float:
        """An ε that holds after t steps."""
        if not 0 <= t <= self.steps:
            raise AccountingError(
                "account.step-lies-outside",
                f"step {t} lies outside the schedule's 0..{self.steps}",
                "make a longer schedule",
            )
        if t == 0:
            return 0.0
        return self._accountant.epsilon(self._upto(self._next(t)), self._delta, self._adjacency)

    def _next(self, t: int) -> int:
        """The smallest point T·(j/points)², rounded up, that is not before t."""
        j = max(1, math.floor(self._points * math.sqrt(t / self.steps)) - 1)
        while (point := min(self.steps, -(-self.steps * j * j // self._points**2))) < t:
            j += 1
        return point
