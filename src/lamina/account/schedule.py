"""Privacy events and schedules: noise multiplier, sampling rate, number of steps.

Needs neither numpy nor scipy.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.errors import AccountingError


class Adjacency(enum.Enum):
    """Which two datasets must be hard to tell apart.

    ADD_REMOVE: one contribution is there or not. REPLACE_ONE: one contribution has other content.
    """

    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`steps` Poisson-subsampled Gaussian mechanisms of sensitivity 1.

    Each step includes the contribution with probability q, independently, and adds N(0, sigma²) to the sum:
    it releases  (1-q)·N(0, sigma²) + q·N(1, sigma²)  in the worst direction, against N(0, sigma²) without it.
    sigma = inf, q = 0 and steps = 0 release nothing about the contribution and cost nothing.
    """

    sigma: float
    q: float
    steps: int

    def __post_init__(self) -> None:
        try:
            sigma, q = float(self.sigma), float(self.q)
        except (TypeError, ValueError, OverflowError):
            raise AccountingError(
                "account.event-sigma-both",
                f"event has sigma={self.sigma!r}, q={self.q!r}, both must be numbers",
                "pass floats",
            ) from None
        if not sigma > 0:
            raise AccountingError(
                "account.noise-multiplier-sigma",
                f"noise multiplier sigma is {sigma}, must be > 0",
                "add noise, or use inf",
            )
        if not 0 <= q <= 1:
            raise AccountingError(
                "account.sampling-rate-lie",
                f"sampling rate q is {q}, must lie in [0, 1]",
                "q = expected batch / population",
            )
        try:
            steps = operator.index(self.steps)
        except TypeError:
            raise AccountingError(
                "account.steps-integer-round", f"steps is {self.steps!r}, must be an integer", "round up"
            ) from None
        if steps < 0 or isinstance(self.steps, bool):
            raise AccountingError(
                "account.steps-integer", f"steps is {self.steps!r}, must be an integer >= 0", "count the steps"
            )
        object.__setattr__(self, "sigma", sigma)
        object.__setattr__(self, "q", q)
        object.__setattr__(self, "steps", steps)

    @property
    def free(self) -> bool:
        """Whether the event releases nothing about the contribution."""
        return math.isinf(self.sigma) or self.q == 0 or self.steps == 0

    @property
    def mu(self) -> float:
        """1/sigma: the shift of one unsampled step in units of its noise (inf if sigma is that small)."""
        return 1.0 / self.sigma if self.sigma > 1e-308 else math.inf


Schedule = tuple[Event, ...]


def grouped(schedule: Iterable[Event]) -> Schedule:
    """The same releases with equal steps merged, free ones dropped, in a fixed order.

    Composition does not depend on the order, so two schedules with the same grouping cost the same.
    """
    counts: dict[tuple[float, float], int] = {}
    for event in schedule:
        if not isinstance(event, Event):
            raise AccountingError(
                "account.schedule-holds-hold",
                f"schedule holds {event!r}, must hold Events",
                "Event(sigma=…, q=…, steps=…)",
            )
        if not event.free:
            counts[event.sigma, event.q] = counts.get((event.sigma, event.q), 0) + event.steps
    return tuple(Event(sigma=sigma, q=q, steps=steps) for (sigma, q), steps in sorted(counts.items()))


def total_steps(schedule: Iterable[Event]) -> int:
    """How many steps the schedule has, free ones included."""
    return sum(event.steps for event in schedule)


def prefix(schedule: Iterable[Event], steps: int) -> Schedule:
    """The first `steps` steps of a schedule, in the order given."""
    if steps < 0:
        raise AccountingError(
            "account.prefix-steps-asked", f"prefix of {steps} steps asked for, must be >= 0", "count the steps done"
        )
    taken: list[Event] = []
    for event in schedule:
        if steps == 0:
            break
        count = min(event.steps, steps)
        taken.append(Event(sigma=event.sigma, q=event.q, steps=count))
        steps -= count
    return tuple(taken)


def check_delta(delta: float) -> float:
    """delta as a float in [0, 1); 0 asks for pure ε, which Gaussian noise never gives."""
    if not isinstance(delta, int | float) or not 0 <= delta < 1:
        raise AccountingError(
            "account.delta-lie", f"delta is {delta!r}, must lie in [0, 1)", "well below 1 / population, e.g. 1e-5"
        )
    return float(delta)


def check_adjacency(adjacency: Adjacency | str) -> Adjacency:
    """The enum, also from its name."""
    try:
        return Adjacency(adjacency)
    except ValueError:
        names = ", ".join(each.value for each in Adjacency)
        raise AccountingError(
            "account.adjacency-not-known", f"adjacency is {adjacency!r}, which is not known", f"use one of {names}"
        ) from None


def check_epsilon(epsilon: float) -> float:
    """epsilon as a float in [0, inf]."""
    if not isinstance(epsilon, int | float) or not epsilon >= 0:
        raise AccountingError("account.epsilon", f"epsilon is {epsilon!r}, must be >= 0", "e.g. 1.0")
    return float(epsilon)
