"""How much noise a target ε needs: the smallest sigma, found from above and checked after solving."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

from lamina.account import gaussian
from lamina.account.accountant import accountant as find_accountant
from lamina.account.event import Adjacency, Event, Schedule, check_adjacency, check_delta, grouped
from lamina.errors import AccountingError

_TOLERANCE = 2e-5  # relative width of the final bracket
_MARGIN = 1e-9  # on top, so that a filter with the same budget admits the last planned step despite rounding
_SMALLEST, _LARGEST = 1e-3, 1e9

_Function = Callable[[float], float]


def calibrate(
    epsilon: float,
    *,
    delta: float,
    q: float,
    steps: int,
    accountant: str = "pld",
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
    besides: Iterable[Event] = (),
) -> float:
    """The smallest sigma, to 1e-4 relative, with ε(`steps` at rate `q`, together with `besides`) ≤ `epsilon`.

    `besides` are releases charged to the same budget, e.g. noised quantiles.
    """
    delta = check_delta(delta)
    if not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise AccountingError(
            "account.target-epsilon-lie", f"target epsilon is {epsilon!r}, must lie in (0, inf)", "e.g. 1.0"
        )
    if delta == 0:
        raise AccountingError(
            "account.delta-no-gaussian",
            "delta is 0, which no Gaussian noise reaches",
            "allow e.g. delta = 1e-5",
        )
    if Event(sigma=1.0, q=q, steps=steps).free:
        raise AccountingError(
            "account.steps-release-nothing",
            f"q={q}, steps={steps} release nothing and need no noise",
            "leave the class out",
        )
    relation = check_adjacency(adjacency)
    return _solve(float(epsilon), delta, float(q), int(steps), accountant, relation, grouped(besides))


@lru_cache(maxsize=1024)
def _solve(
    target: float, delta: float, q: float, steps: int, name: str, adjacency: Adjacency, besides: Schedule
) -> float:
    priced_by = find_accountant(name)
    floor = priced_by.epsilon(besides, delta, adjacency)
    if floor > target:
        raise AccountingError(
            "account.releases-alone-cost",
            f"the other releases alone cost epsilon {floor:.4g}, above the target {target:.4g}",
            "make them rarer or noisier, or raise epsilon",
        )

    def excess(sigma: float) -> float:
        """log ε - log target: nearly linear in log sigma."""
        cost = priced_by.epsilon((*besides, Event(sigma=sigma, q=q, steps=steps)), delta, adjacency)
        return math.log(cost / target) if cost > 0 else -50.0

    # Many steps are nearly Gaussian with μ² = steps·q²·(e^(1/sigma²) - 1): a first guess, nothing more.
    mu = max(gaussian.mu_of_epsilon(target, delta), 1e-6) / (1 if adjacency is Adjacency.ADD_REMOVE else 2)
    rate = q if priced_by.amplified else 1.0
    guess = math.log1p(mu * mu / (steps * rate * rate)) ** -0.5 if rate < 1 else math.sqrt(steps) / mu
    low, high = _bracket(excess, min(max(guess, 0.3), _LARGEST), target, name, delta)
    sigma = high if low == high else _close_in(excess, low, high)
    for _ in range(100):
        if excess(sigma) <= 0:
            return sigma
        sigma *= 1 + _TOLERANCE
    raise AccountingError(
        "account.no-sigma-near",
        f"no sigma near {sigma:.6g} holds epsilon {target}",
        "report this: the search failed",
    )


def _bracket(excess: _Function, guess: float, target: float, name: str, delta: float) -> tuple[float, float]:
    """sigmas with too much and with at most the target cost, searched outwards from a guess."""
    sigma, factor = guess, 1.05
    if excess(sigma) > 0:
        while excess(sigma * factor) > 0:
            sigma, factor = sigma * factor, min(factor * factor, 8.0)
            if sigma > _LARGEST:
                raise AccountingError(
                    "account.no-noise-brings",
                    f"no noise brings accountant '{name}' to epsilon {target:.4g} at delta {delta:.4g}",
                    "raise epsilon or delta, take fewer steps, or use accountant 'pld'",
                )
        return sigma, sigma * factor
    while excess(sigma / factor) <= 0:
        sigma, factor = sigma / factor, min(factor * factor, 2.0)
        if sigma <= _SMALLEST:
            return sigma, sigma
    return sigma / factor, sigma


def _close_in(excess: _Function, low: float, high: float) -> float:
    """False position in log sigma (Illinois), keeping excess(high) ≤ 0 < excess(low)."""
    a, b = math.log(low), math.log(high)
    at_a, at_b = excess(low), excess(high)
    for _ in range(60):
        if b - a <= _TOLERANCE:
            break
        share = min(0.95, max(0.05, at_a / (at_a - at_b))) if at_a > at_b else 0.5
        middle = min(b - 0.4 * _TOLERANCE, a + (b - a) * share + 0.2 * _TOLERANCE)
        value = excess(math.exp(middle))
        if value > 0:
            a, at_a, at_b = middle, value, at_b * 0.5
        else:
            b, at_b, at_a = middle, value, at_a * 0.5
    return math.exp(b) * (1 + _MARGIN)
