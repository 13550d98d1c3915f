"""Everything a certificate says about the cost of one schedule, with and without amplification."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.account import gaussian, mixture, zcdp
from lamina.account.accountant import Accountant, order_of
from lamina.account.accountant import accountant as find_accountant
from lamina.account.event import Adjacency, Event, Schedule, check_delta, grouped
from lamina.errors import AccountingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The figures of one class at one δ.

    epsilon, epsilon_replace_one: by `accountant`. If `amplified` they assume Poisson sampling, secret coins,
        noise and divisor independent of the batch.
    rho, epsilon_unamplified: hold even if every occurrence is disclosed. ρ = N/(2 sigma²), N the cap on
        occurrences or else every step, and its exact ε.
    epsilon_unamplified_replace_one: the same with twice the radius.
    epsilon_disclosed: uncapped only; occurrences disclosed, averaged over the coins (zero-out adjacency).
    """

    accountant: str
    amplified: bool
    delta: float
    occurrences: int | None
    epsilon: float
    epsilon_replace_one: float
    rho: float
    epsilon_unamplified: float
    epsilon_unamplified_replace_one: float
    epsilon_disclosed: float | None


def cost(
    schedule: Iterable[Event], *, delta: float, accountant: str = "pld", occurrences: int | None = None
) -> Cost:
    """Prices a schedule; `occurrences` is the cap on how often one contribution is used, if there is one."""
    parts, delta = grouped(schedule), check_delta(delta)
    priced_by = find_accountant(accountant)
    known = parts if occurrences is None else capped(parts, occurrences)
    own = parts if priced_by.amplified else known
    # RDP and moments have no replace-one figure for subsampled steps; PLD has.
    replacing = priced_by if priced_by.name not in ("rdp", "moments") else find_accountant("pld")
    exact = find_accountant("gaussian")
    return Cost(
        accountant=priced_by.name,
        amplified=priced_by.amplified,
        delta=delta,
        occurrences=occurrences,
        epsilon=priced_by.epsilon(own, delta),
        epsilon_replace_one=replacing.epsilon(own, delta, Adjacency.REPLACE_ONE)
        if order_of(replacing.name) is None
        else _removed_and_added(replacing, own, delta),
        rho=zcdp.rho(known),
        epsilon_unamplified=exact.epsilon(known, delta),
        epsilon_unamplified_replace_one=exact.epsilon(known, delta, Adjacency.REPLACE_ONE),
        epsilon_disclosed=mixture.epsilon(parts, delta) if occurrences is None else None,
    )


def _removed_and_added(priced_by: Accountant, schedule: Schedule, delta: float) -> float:
    """Replace-one from add/remove: (ε, δ') twice is (2ε, (1 + e^ε)δ'), at the δ' for which that is `delta`.

    For steps that are proven at one order only, no finer composition is.
    """
    share = 0.5 * delta
    for _ in range(200):
        epsilon = priced_by.epsilon(schedule, share)
        if epsilon > 300:
            break  # no δ' that a float can hold is small enough
        if share * (1.0 + math.exp(epsilon)) <= delta:
            return 2.0 * epsilon
        share = 0.999 * delta / (1.0 + math.exp(epsilon))
    return math.inf


def capped(schedule: Iterable[Event], occurrences: int) -> Schedule:
    """The most expensive `occurrences` steps of a schedule: those with the least noise."""
    if isinstance(occurrences, bool) or not isinstance(occurrences, int) or occurrences < 0:
        raise AccountingError(
            "account.cap-occurrences-integer",
            f"cap on occurrences is {occurrences!r}, must be an integer >= 0",
            "or None",
        )
    taken: list[Event] = []
    for event in sorted(grouped(schedule), key=lambda each: each.sigma):
        count = min(event.steps, occurrences)
        taken.append(Event(sigma=event.sigma, q=event.q, steps=count))
        occurrences -= count
    return grouped(taken)


def epsilon_of_multiplier(multiplier: float, delta: float) -> float:
    """The exact ε of one Gaussian release with noise multiplier z: what a signed bound promises."""
    return gaussian.epsilon_of_mu(Event(sigma=multiplier, q=1.0, steps=1).mu, check_delta(delta))
