"""The accountants by name; calibration of the noise multiplier.

The cost of a schedule, or of several runs together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from lamina import validate
from lamina.account import gaussian_rdp, pld
from lamina.account.gaussian_rdp import Array, hockey_stick, step_rdp
from lamina.account.schedule import (
    INTEGER_ORDERS,
    INTEGER_RDP,
    RDP_ORDERS,
    Adjacency,
    Event,
    EventCounts,
    Schedule,
    bisect_float,
    check_adjacency,
    check_delta,
    check_epsilon,
    grouped,
    prefix,
    rdp_order_of,
    total_steps,
)
from lamina.errors import AccountingError

# An accountant turns a schedule into ε at a given δ (or δ at a given ε). It never under-reports: what it
# cannot compute exactly it rounds up. Asking again for the same schedule, in whatever order it is written, is
# a dictionary look-up.


_PriceFunction = Callable[[Schedule, float, Adjacency], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accountant:
    """What a schedule costs. `amplified` says whether the secrecy of the sampling is credited."""

    name: str
    amplified: bool
    _epsilon: _PriceFunction
    _delta: _PriceFunction

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


def _cached_accountant(name: str, amplified: bool, epsilon: _PriceFunction, delta: _PriceFunction) -> Accountant:
    remember = lru_cache(maxsize=4096)
    return Accountant(name=name, amplified=amplified, _epsilon=remember(epsilon), _delta=remember(delta))


ACCOUNTANTS: dict[str, Accountant] = {
    each.name: each
    for each in (
        _cached_accountant("pld", True, pld.pld_epsilon, pld.pld_delta),
        _cached_accountant("rdp", True, gaussian_rdp.rdp_epsilon, gaussian_rdp.rdp_delta),
        _cached_accountant(INTEGER_RDP, True, gaussian_rdp.integer_rdp_epsilon, gaussian_rdp.integer_rdp_delta),
        _cached_accountant("moments", True, gaussian_rdp.moments_epsilon, gaussian_rdp.moments_delta),
        _cached_accountant("zcdp", False, gaussian_rdp.zcdp_epsilon, gaussian_rdp.zcdp_delta),
        _cached_accountant("gaussian", False, gaussian_rdp.gaussian_epsilon, gaussian_rdp.gaussian_delta),
    )
}


def find_accountant(name: str) -> Accountant:
    """The accountant called `name`: pld, rdp, rdp-integer, moments, zcdp, gaussian, or rdp@ORDER.

    `rdp-integer` is RDP at integer orders, which also hold for noise on a grid of integers. `rdp@ORDER` is RDP at one
    order that is fixed in advance: looser, and the only one here that also prices steps whose noise was chosen on the
    way, under a `RenyiFilter` of that order.

    >>> round(find_accountant("gaussian").epsilon([Event(sigma=37.3, q=1.0, steps=100)], 1e-5), 2)
    1.0
    """
    if (order := rdp_order_of(name)) is not None:
        return _accountant_at_order(name, order)
    validate.one_of(AccountingError, "account.accountant-unknown", list(ACCOUNTANTS), accountant=name)
    return ACCOUNTANTS[name]


@lru_cache(maxsize=64)
def _accountant_at_order(name: str, order: float) -> Accountant:
    return _cached_accountant(
        name, True, partial(gaussian_rdp.rdp_epsilon_at_order, order), partial(gaussian_rdp.rdp_delta_at_order, order)
    )


_SIGMA_TOLERANCE = 2e-5  # relative width of the final bracket
_SIGMA_MARGIN = 1e-9  # on top, so that a filter with the same budget admits the last planned step despite rounding
_MIN_SIGMA, _MAX_SIGMA = 1e-3, 1e9

_ExcessFunction = Callable[[float], float]


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
    validate.positive(AccountingError, "account.epsilon-not-positive", epsilon=epsilon)
    validate.positive(AccountingError, "account.delta-zero", remedy="allow e.g. 1e-5", delta=delta)
    if Event(sigma=1.0, q=q, steps=steps).free:
        raise AccountingError("account.nothing-released", f"q={q}, steps={steps} release nothing and need no noise")
    relation = check_adjacency(adjacency)
    return _solve_sigma(float(epsilon), delta, float(q), int(steps), accountant, relation, grouped(besides))


@lru_cache(maxsize=1024)
def _solve_sigma(
    target: float, delta: float, q: float, steps: int, name: str, adjacency: Adjacency, besides: Schedule
) -> float:
    priced_by = find_accountant(name)
    floor = priced_by.epsilon(besides, delta, adjacency)
    if floor > target:
        problem = f"the other releases alone cost epsilon {floor:.4g}, above the target {target:.4g}"
        raise AccountingError("account.other-releases-too-expensive", problem, "make them rarer or noisier")

    def excess(sigma: float) -> float:
        """log ε - log target: nearly linear in log sigma."""
        cost = priced_by.epsilon((*besides, Event(sigma=sigma, q=q, steps=steps)), delta, adjacency)
        return math.log(cost / target) if cost > 0 else -50.0

    mu = max(gaussian_rdp.mu_of_epsilon(target, delta), 1e-6) / (1 if adjacency is Adjacency.ADD_REMOVE else 2)
    unreachable = AccountingError(
        "account.target-unreachable",
        f"no noise brings accountant '{name}' to epsilon {target:.4g} at delta {delta:.4g}",
        "raise epsilon or delta, take fewer steps, or use 'pld'",
    )
    return solve_sigma(excess, mu, q if priced_by.amplified else 1.0, steps, unreachable)


def solve_sigma(excess: _ExcessFunction, mu: float, rate: float, steps: int, unreachable: AccountingError) -> float:
    """Return the smallest sigma, to 1e-4 relative, with excess(sigma) ≤ 0; raise `unreachable` if there is none.

    `excess` falls with sigma. `mu` is that of the Gaussian release which reaches the target, `rate` the credited q.
    """
    # Many steps are nearly Gaussian with μ² = steps·q²·(e^(1/sigma²) - 1): a first guess, nothing more.
    guess = math.log1p(mu * mu / (steps * rate * rate)) ** -0.5 if rate < 1 else math.sqrt(steps) / mu
    low, high = _bracket_sigma(excess, min(max(guess, 0.3), _MAX_SIGMA), unreachable)
    sigma = high if low == high else _narrow_bracket(excess, low, high)
    for _ in range(100):
        if excess(sigma) <= 0:
            return sigma
        sigma *= 1 + _SIGMA_TOLERANCE
    raise AccountingError(
        "account.search-failed", f"no sigma near {sigma:.6g} reaches the target", "report this as a bug"
    )


def _bracket_sigma(excess: _ExcessFunction, guess: float, unreachable: AccountingError) -> tuple[float, float]:
    """sigmas with too much and with at most the target cost, searched outwards from a guess."""
    sigma, factor = guess, 1.05
    if excess(sigma) > 0:
        while excess(sigma * factor) > 0:
            sigma, factor = sigma * factor, min(factor * factor, 8.0)
            if sigma > _MAX_SIGMA:
                raise unreachable
        return sigma, sigma * factor
    while excess(sigma / factor) <= 0:
        sigma, factor = sigma / factor, min(factor * factor, 2.0)
        if sigma <= _MIN_SIGMA:
            return sigma, sigma
    return sigma / factor, sigma


def _narrow_bracket(excess: _ExcessFunction, low: float, high: float) -> float:
    """False position in log sigma (Illinois), keeping excess(high) ≤ 0 < excess(low)."""
    a, b = math.log(low), math.log(high)
    at_a, at_b = excess(low), excess(high)
    for _ in range(60):
        if b - a <= _SIGMA_TOLERANCE:
            break
        share = min(0.95, max(0.05, at_a / (at_a - at_b))) if at_a > at_b else 0.5
        middle = min(b - 0.4 * _SIGMA_TOLERANCE, a + (b - a) * share + 0.2 * _SIGMA_TOLERANCE)
        value = excess(math.exp(middle))
        if value > 0:
            a, at_a, at_b = middle, value, at_b * 0.5
        else:
            b, at_b, at_a = middle, value, at_a * 0.5
    return math.exp(b) * (1 + _SIGMA_MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The figures of one class at one δ.

    epsilon, epsilon_replace_one: by `accountant`. If `amplified` they assume Poisson sampling, secret coins,
        noise and divisor independent of the batch.
    rho, epsilon_unamplified: hold even if every occurrence is disclosed. ρ = N/(2 sigma²), N the cap on
        occurrences or else every step, and its exact ε (by integer orders: an upper bound of it).
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


def cost(schedule: Iterable[Event], *, delta: float, accountant: str = "pld", occurrences: int | None = None) -> Cost:
    """Prices a schedule; `occurrences` is the cap on how often one contribution is used, if there is one."""
    parts, delta = grouped(schedule), check_delta(delta)
    priced_by = find_accountant(accountant)
    known = parts if occurrences is None else cap_occurrences(parts, occurrences)
    own = parts if priced_by.amplified else known
    # RDP and moments have no replace-one figure for subsampled steps; PLD has.
    replacing = priced_by if priced_by.name not in ("rdp", "moments") else find_accountant("pld")
    whole = priced_by.name == INTEGER_RDP  # the events may be of discrete noise, which no Gaussian figure bounds
    if whole:
        known = tuple(Event(sigma=each.sigma, q=1.0, steps=each.steps) for each in known)
        twice = tuple(Event(sigma=each.sigma / 2, q=1.0, steps=each.steps) for each in known)
        sure, sure_replaced = priced_by.epsilon(known, delta), priced_by.epsilon(twice, delta)
    else:
        exact = find_accountant("gaussian")
        sure, sure_replaced = exact.epsilon(known, delta), exact.epsilon(known, delta, Adjacency.REPLACE_ONE)
    disclosed = sure if whole else DISCLOSED.epsilon(parts, delta) if occurrences is None else None
    return Cost(
        accountant=priced_by.name,
        amplified=priced_by.amplified,
        delta=delta,
        occurrences=occurrences,
        epsilon=priced_by.epsilon(own, delta),
        epsilon_replace_one=_replace_one_epsilon(replacing, own, delta),
        rho=gaussian_rdp.zcdp_rho(known),
        epsilon_unamplified=sure,
        epsilon_unamplified_replace_one=sure_replaced,
        epsilon_disclosed=disclosed if occurrences is None else None,
    )


def _replace_one_epsilon(priced_by: Accountant, schedule: Schedule, delta: float) -> float:
    """ε of replacing one contribution. Steps that are proven at some orders only have it from add/remove:

    (ε, δ') twice is (2ε, (1 + e^ε)δ'), at the δ' for which that is `delta`.
    """
    if rdp_order_of(priced_by.name) is None and priced_by.name != INTEGER_RDP:
        return priced_by.epsilon(schedule, delta, Adjacency.REPLACE_ONE)
    share = 0.5 * delta
    for _ in range(200):
        epsilon = priced_by.epsilon(schedule, share)
        if epsilon > 300:
            break  # no δ' that a float can hold is small enough
        if share * (1.0 + math.exp(epsilon)) <= delta:
            return 2.0 * epsilon
        share = 0.999 * delta / (1.0 + math.exp(epsilon))
    return math.inf


def cap_occurrences(schedule: Iterable[Event], occurrences: int) -> Schedule:
    """The most expensive `occurrences` steps of a schedule: those with the least noise."""
    validate.whole(AccountingError, "account.occurrences-negative", least=0, occurrences=occurrences)
    taken: list[Event] = []
    for event in sorted(grouped(schedule), key=lambda each: each.sigma):
        count = min(event.steps, occurrences)
        taken.append(Event(sigma=event.sigma, q=event.q, steps=count))
        occurrences -= count
    return grouped(taken)


# Uncapped Poisson sampling when the occurrences become known: the binomial mixture.
#
# A contribution occurs N times, N = Σ_e Binomial(steps_e, q_e), and the pattern is drawn from coins that do
# not depend on its content. If the pattern is disclosed beside the outputs it has the same law under both
# datasets, so the hockey-stick divergences average:
#
#     δ(ε) = E_N[ δ_Gauss(ε; μ²) ],     μ² = Σ_e N_e/sigma_e²
#
# This is a statement about content (zero-out adjacency: the contribution is there or is replaced by nothing,
# with its pattern in both worlds); REPLACE_ONE doubles μ. It says less than T/(2 sigma²), which holds for
# every pattern, and more than the mean E[N] alone: calibrating to the mean gives ε 1.017 for a target of 1.

_TAIL_PROBABILITY = 1e-18  # probability of occurrence counts that are treated as a full disclosure
_MIXTURE_POINTS = 2**14  # resolution of μ² when several events are mixed; rounded up
_MIXTURE_PAD = 1e-9


def _disclosed_epsilon(parts: Schedule, delta: float, adjacency: Adjacency) -> float:
    """The smallest ε with δ(ε) ≤ `delta`, rounded up."""
    if delta <= 2 * _TAIL_PROBABILITY * len(parts):
        return math.inf
    if _disclosed_delta(parts, 0.0, adjacency) <= delta:
        return 0.0
    high = 1.0
    while _disclosed_delta(parts, high, adjacency) > delta:
        high *= 2.0
        if high > 1e300:
            return math.inf
    return bisect_float(lambda epsilon: _disclosed_delta(parts, epsilon, adjacency) <= delta, 0.0, high, relative=1e-9)[
        1
    ]


def _disclosed_delta(parts: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    if math.isinf(epsilon):
        return 0.0
    squares, weights, lost = _squared_mu_distribution(parts)
    scale = 1.0 if adjacency is Adjacency.ADD_REMOVE else 2.0
    positive = squares > 0
    mus = scale * np.sqrt(squares[positive])
    each = hockey_stick(epsilon, mus)
    return min(1.0, float((weights[positive] * each).sum()) * (1 + _MIXTURE_PAD) + lost)


@lru_cache(maxsize=64)
def _squared_mu_distribution(parts: Schedule) -> tuple[Array, Array, float]:
    """Values of μ², their probabilities, and the probability left out."""
    if len(parts) == 1:
        counts, weights = _occurrence_distribution(parts[0])
        return counts * parts[0].mu ** 2, weights, 2 * _TAIL_PROBABILITY
    if len(parts) > 64:
        problem = f"a mixture of {len(parts)} distinct events is too large, at most 64"
        raise AccountingError("account.too-many-events", problem, "coarsen the schedule")
    spread = [_occurrence_distribution(event) for event in parts]
    top = sum(float(counts[-1]) * event.mu**2 for event, (counts, _) in zip(parts, spread, strict=True))
    unit = top / _MIXTURE_POINTS
    total = np.ones(1)
    for event, (counts, weights) in zip(parts, spread, strict=True):
        total = np.convolve(total, np.bincount(np.ceil(counts * event.mu**2 / unit).astype(int), weights=weights))
    return np.arange(len(total), dtype=np.float64) * unit, total, 2 * _TAIL_PROBABILITY * len(parts)


def _occurrence_distribution(event: Event) -> tuple[Array, Array]:
    """Counts and probabilities; what lies below the range is moved up into it."""
    from scipy.stats import binom

    law = binom(event.steps, event.q)
    low, high = int(law.ppf(_TAIL_PROBABILITY)), int(law.isf(_TAIL_PROBABILITY)) + 1
    counts = np.arange(max(0, low), min(event.steps, high) + 1, dtype=np.float64)
    weights = np.asarray(law.pmf(counts), dtype=np.float64)
    weights[0] += float(law.cdf(counts[0] - 1))
    return counts, weights


DISCLOSED = _cached_accountant("disclosed", False, _disclosed_epsilon, _disclosed_delta)
"""ε and δ when the occurrences of the contribution are disclosed. No plan is priced by it, so it has no entry above."""


def pooled_epsilon(events: EventCounts, *, delta: float, name: str) -> float:
    """ε of all events together by the accountant called `name`: one schedule, composed, not ε added to ε.

    Noise that followed its budget is proven at its own order α alone: D_α ≤ steps·RDP_α. At every order β up to the
    smallest such one, D_β ≤ D_α, so these bounds and the others' RDP at β add up, and the best β is taken. More events
    never cost less: every sum grows, and there are fewer β. An accountant without amplification has no figure for it.
    """
    fixed = [Event(sigma=sigma, q=q, steps=n) for (sigma, q, order), n in events.items() if not order]
    followed = {kind: n for kind, n in events.items() if kind[2] and n}
    priced_by = find_accountant(name)
    if not followed:
        return priced_by.epsilon(fixed, delta)
    if not priced_by.amplified or delta == 0:
        return math.inf
    least = min(order for _, _, order in followed)
    whole = math.fsum(n * step_rdp(q, sigma, order) for (sigma, q, order), n in followed.items())
    schedule = grouped(fixed)
    if name == INTEGER_RDP:
        orders = tuple(order for order in INTEGER_ORDERS if order <= least)
    else:
        orders = (least, *(order for order in RDP_ORDERS if order < least))
    if not orders:
        return math.inf
    best = min(gaussian_rdp.rdp_at_order(schedule, order) + gaussian_rdp.order_offset(order, delta) for order in orders)
    return float(max(0.0, whole + best)) * (1 + 1e-12)


# ε after t of T steps, cheap enough for a progress bar and never below the truth.
#
# The accountant is asked at `points` step counts only, when training reaches them, spaced like the square
# root that ε follows. ε never falls with further steps, so the value at the next point bounds every step
# before it (interpolating between points would not: ε(t) is concave and lies above its chords). At t = T the
# curve is exact.


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
        validate.whole(AccountingError, "account.no-curve-points", points=points)
        self._delta, self._adjacency = check_delta(delta), check_adjacency(adjacency)
        self._accountant = find_accountant(accountant)
        self._points = points
        self._upto: Callable[[int], Schedule]
        if callable(schedule):
            if steps is None:
                raise AccountingError(
                    "account.steps-missing", "the schedule is a function, and steps is not given", "give both"
                )
            self._upto, self.steps = schedule, steps
        else:
            whole = tuple(schedule)
            self._upto, self.steps = (lambda t: prefix(whole, t)), total_steps(whole)

    def epsilon(self, t: int) -> float:
        """An ε that holds after t steps."""
        validate.whole(AccountingError, "account.step-out-of-range", least=0, most=self.steps, step=t)
        if t == 0:
            return 0.0
        return self._accountant.epsilon(self._upto(self._next(t)), self._delta, self._adjacency)

    def _next(self, t: int) -> int:
        """The smallest point T·(j/points)², rounded up, that is not before t."""
        j = max(1, math.floor(self._points * math.sqrt(t / self.steps)) - 1)
        while (point := min(self.steps, -(-self.steps * j * j // self._points**2))) < t:
            j += 1
        return point
