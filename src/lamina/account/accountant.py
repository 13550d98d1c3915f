"""The accountants by name, behind one small interface, with results cached.

An accountant turns a schedule into ε at a given δ (or δ at a given ε). It never under-reports: what it
cannot compute exactly it rounds up. Asking again for the same schedule, in whatever order it is written, is
a dictionary look-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

from lamina.account import gaussian, moments, pld, rdp, zcdp
from lamina.account.event import (
    Adjacency,
    Event,
    Schedule,
    check_adjacency,
    check_delta,
    check_epsilon,
    grouped,
)
from lamina.errors import AccountingError


class Accountant(Protocol):
    """What a schedule costs. `amplified` says whether the secrecy of the sampling is credited."""

    @property
    def name(self) -> str: ...

    @property
    def amplified(self) -> bool: ...

    def epsilon(
        self, schedule: Iterable[Event], delta: float, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
    ) -> float: ...

    def delta(
        self, schedule: Iterable[Event], epsilon: float, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
    ) -> float: ...


_Figure = Callable[[Schedule, float, Adjacency], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cached:
    """An accountant over two functions of grouped schedules."""

    name: str
    amplified: bool
    _epsilon: _Figure
    _delta: _Figure

    def epsilon(
        self, schedule: Iterable[Event], delta: float, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
    ) -> float:
        """The ε that the schedule guarantees at `delta`; inf for delta = 0 unless nothing is released."""
        parts, delta, relation = grouped(schedule), check_delta(delta), check_adjacency(adjacency)
        if not parts:
            return 0.0
        return self._epsilon(parts, delta, relation) if delta > 0 else math.inf

    def delta(
        self, schedule: Iterable[Event], epsilon: float, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
    ) -> float:
        """The δ that the schedule guarantees at `epsilon`."""
        parts, epsilon, relation = grouped(schedule), check_epsilon(epsilon), check_adjacency(adjacency)
        return self._delta(parts, epsilon, relation) if parts else 0.0


def _cached(name: str, amplified: bool, epsilon: _Figure, delta: _Figure) -> _Cached:
    remember = lru_cache(maxsize=4096)
    return _Cached(name=name, amplified=amplified, _epsilon=remember(epsilon), _delta=remember(delta))


ACCOUNTANTS: dict[str, Accountant] = {
    each.name: each
    for each in (
        _cached("pld", True, pld.epsilon, pld.delta),
        _cached("rdp", True, rdp.epsilon, rdp.delta),
        _cached("moments", True, moments.epsilon, moments.delta),
        _cached("zcdp", False, zcdp.epsilon, zcdp.delta),
        _cached("gaussian", False, gaussian.epsilon, gaussian.delta),
    )
}


def accountant(name: str) -> Accountant:
    """The accountant called `name`: pld, rdp, moments, zcdp, gaussian, or rdp@ORDER.

    The last is RDP at one order that is fixed in advance: looser, and the only one here that also prices steps whose
    noise was chosen on the way, under a `RenyiFilter` of that order.

    >>> round(accountant("gaussian").epsilon([Event(sigma=37.3, q=1.0, steps=100)], 1e-5), 2)
    1.0
    """
    found = ACCOUNTANTS.get(name) if isinstance(name, str) else None
    if found is None and (order := order_of(name)) is not None:
        return _at_order(name, order)
    if found is None:
        raise AccountingError(
            "account.accountant-not-known",
            f"accountant {name!r} is not known",
            f"use one of {', '.join(ACCOUNTANTS)}",
        )
    return found


def order_of(name: str) -> float | None:
    """The order of an accountant `rdp@ORDER`; None for every other."""
    if not isinstance(name, str) or not name.startswith("rdp@"):
        return None
    try:
        order = float(name.removeprefix("rdp@"))
    except ValueError:
        order = math.nan
    if not 1.01 < order < 1e6 or name != f"rdp@{order:g}":
        raise AccountingError(
            "account.accountant-no-order", f"accountant {name!r} has no order in (1.01, 1e6)", "e.g. rdp@32"
        )
    return order


@lru_cache(maxsize=64)
def _at_order(name: str, order: float) -> Accountant:
    return _cached(name, True, partial(rdp.epsilon_at, order), partial(rdp.delta_at, order))
