"""Privacy events and schedules: noise multiplier, sampling rate, number of steps; and bisection.

Needs neither numpy nor scipy.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lamina import validate
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
    sigma = inf, q = 0 and steps = 0 release nothing about the contribution and cost nothing. `order` is the Rényi order
    of noise that followed its budget, under a filter at that order; None for any other.
    """

    sigma: float
    q: float
    steps: int
    order: float | None = None

    def __post_init__(self) -> None:  # not by `validate`: a schedule makes many events, and float() takes any number
        try:
            sigma, q, steps = float(self.sigma), float(self.q), operator.index(self.steps)
        except (TypeError, ValueError, OverflowError):
            raise AccountingError(
                "account.event-not-numbers", f"{self} must hold two numbers and a whole number"
            ) from None
        if not sigma > 0:
            problem = f"noise multiplier sigma is {sigma}, must be > 0"
            raise AccountingError("account.sigma-not-positive", problem, "use inf for no release")
        if not 0 <= q <= 1:
            problem = f"sampling rate q is {q}, must be in [0, 1]"
            raise AccountingError("account.rate-out-of-range", problem, "q = expected batch / population")
        if steps < 0 or isinstance(self.steps, bool):
            raise AccountingError("account.steps-negative", f"steps is {self.steps!r}, must be a whole number >= 0")
        object.__setattr__(self, "sigma", sigma)
        object.__setattr__(self, "q", q)
        object.__setattr__(self, "steps", steps)

    @property
    def key(self) -> EventKey:
        """Return the parameters that determine the price of a step."""
        return (self.sigma, self.q, self.order or 0.0)

    @property
    def free(self) -> bool:
        """Whether the event releases nothing about the contribution."""
        return math.isinf(self.sigma) or self.q == 0 or self.steps == 0

    @property
    def mu(self) -> float:
        """1/sigma: the shift of one unsampled step in units of its noise (inf if sigma is that small)."""
        return 1.0 / self.sigma if self.sigma > 1e-308 else math.inf


Schedule = tuple[Event, ...]

EventKey = tuple[float, float, float]
"""sigma, q, and the Rényi order of noise that follows its budget; 0 for any other."""

EventCounts = Mapping[EventKey, int]
"""→ steps. Whole numbers of steps add exactly, so a schedule costs the same however it was cut into segments."""


def event_counts(schedule: Iterable[Event]) -> dict[EventKey, int]:
    """Return the steps of a schedule by kind of event; those without steps are left out."""
    found: dict[EventKey, int] = {}
    for event in schedule:
        if event.steps:
            found[event.key] = found.get(event.key, 0) + event.steps
    return found


def add_events(events: dict[EventKey, int], more: EventCounts) -> None:
    """Add counts to `events`, in place."""
    for kind, steps in more.items():
        events[kind] = events.get(kind, 0) + steps


def grouped(schedule: Iterable[Event]) -> Schedule:
    """The same releases with equal steps merged, free ones dropped, in a fixed order.

    Composition does not depend on the order, so two schedules with the same grouping cost the same.
    """
    counts: dict[tuple[float, float], int] = {}
    for event in schedule:
        if not isinstance(event, Event):
            raise AccountingError("account.not-an-event", f"the schedule holds {event!r}, must hold Events")
        if not event.free:
            counts[event.sigma, event.q] = counts.get((event.sigma, event.q), 0) + event.steps
    return tuple(Event(sigma=sigma, q=q, steps=steps) for (sigma, q), steps in sorted(counts.items()))


def total_steps(schedule: Iterable[Event]) -> int:
    """How many steps the schedule has, free ones included."""
    return sum(event.steps for event in schedule)


def prefix(schedule: Iterable[Event], steps: int) -> Schedule:
    """The first `steps` steps of a schedule, in the order given."""
    validate.whole(AccountingError, "account.steps-negative", least=0, steps=steps)
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
    remedy = "choose it well below 1 / population, e.g. 1e-5"
    return validate.number(AccountingError, "account.delta-out-of-range", least=0, below=1, remedy=remedy, delta=delta)


def check_epsilon(epsilon: float) -> float:
    """epsilon as a float in [0, inf]."""
    return validate.number(AccountingError, "account.epsilon-negative", least=0, infinite=True, epsilon=epsilon)


def check_adjacency(adjacency: Adjacency | str) -> Adjacency:
    """The enum, also from its name."""
    if isinstance(adjacency, Adjacency):
        return adjacency
    names = [each.value for each in Adjacency]
    return Adjacency(validate.one_of(AccountingError, "account.adjacency-unknown", names, adjacency=adjacency))


# ---------------------------------------------------------------------------------------------- Rényi orders

RDP_ORDERS: tuple[float, ...] = tuple(
    sorted(
        (
            *(round(1 + x / 20, 2) for x in range(1, 20)),
            *(round(2 + x / 10, 1) for x in range(1, 80) if x % 10),
            *map(float, range(2, 66)),
            *(72.0, 80.0, 96.0, 112.0, 128.0, 160.0, 192.0, 224.0, 256.0, 320.0, 384.0, 512.0, 768.0),
            *(1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0),
        )
    )
)
"""The orders at which RDP is computed."""

INTEGER_ORDERS: tuple[float, ...] = tuple(order for order in RDP_ORDERS if order == int(order))
INTEGER_RDP = "rdp-integer"
"""The accountant that uses these alone: it also holds for noise on a grid of integers."""

CHOICE_EPSILON = (1e-6, 50.0)
"""ε of one choice by the exponential mechanism. With less it is a toss-up, whose price floats do not tell from 0."""


def check_order(order: float) -> float:
    """A Rényi order that is fixed in advance."""
    remedy = "choose_order finds a good one, e.g. 32"
    return validate.number(
        AccountingError, "account.order-out-of-range", above=1.01, below=1e6, remedy=remedy, order=order
    )


def rdp_order_of(name: str) -> float | None:
    """The order of an accountant `rdp@ORDER`; None for every other."""
    if not isinstance(name, str) or not name.startswith("rdp@"):
        return None
    try:
        order = check_order(float(name.removeprefix("rdp@")))
    except (ValueError, AccountingError):
        order = 0.0
    if not order or name != f"rdp@{order:g}":
        raise AccountingError(
            "account.order-out-of-range", f"accountant {name!r} has no order in (1.01, 1e6)", "write e.g. rdp@32"
        )
    return order


# Bisection, once for the whole project: where a condition that holds from some point on begins to hold.
#
# Both functions return (last point that failed, first point that held). The caller takes the side that is safe for it.


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
