"""Trade-off curves: the largest true-positive rate of any attack at a given false-positive rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lamina import validate
from lamina.account import gaussian_rdp, pld
from lamina.account.accountants import find_accountant
from lamina.account.gaussian_rdp import Array, step_rdp
from lamina.account.pld import PrivacyLossDistribution
from lamina.account.schedule import (
    INTEGER_ORDERS,
    INTEGER_RDP,
    RDP_ORDERS,
    Adjacency,
    Event,
    EventCounts,
    Schedule,
    check_adjacency,
    grouped,
    rdp_order_of,
)
from lamina.errors import AccountingError

# An attacker decides between two worlds, such as "the patient took part" and "the patient did not". Let α be the
# false-positive rate of the decision, and TPR(α) the largest true-positive rate that any decision rule can have at α.
# The trade-off function of the literature is f(α) = 1 - TPR(α) (Dong, Roth and Su 2022). Three bounds are used here.
#
#   loss distribution   TPR(α) = min over ε of e^ε·α + δ(ε), for ε of any sign. Every single ε gives a valid bound, so the
#                       choice of ε needs no proof. The curve has corners at the grid points of the distribution.
#   Gaussian            TPR(α) = Φ(Φ⁻¹(α) + μ), exactly.
#   Rényi               A decision is post-processing, so the Bernoulli pair (TPR, α) has at most the divergence of the
#                       mechanism, at every order and in both directions.
#
# Each direction of add/remove has a concave branch that does not decrease; the larger TPR of both is reported. Branches
# compose along a chain of neighbours: if A bounds (D, D') and B bounds (D', D''), then B(A(α)) bounds (D, D'').

BY_LOSSES, BY_GAUSSIAN, BY_RENYI = "privacy loss distribution", "Gaussian", "Rényi divergence"
_ROOT_STEPS, _ROOT_TOLERANCE = 60, 1e-11  # of the log odds of a TPR; the tolerance is absolute and relative
_MU_TOLERANCE = 1e-4  # of μ; ten times that of a curve by Rényi divergences, whose points cost more


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffCurve:
    """An upper bound on the true-positive rate of every attack, for each false-positive rate.

    adjacency  the two worlds between which the attacker decides
    bound      the kind of bound that it comes from: `BY_LOSSES`, `BY_GAUSSIAN` or `BY_RENYI`
    branches   TPR(α) with the one and with the other world as the null hypothesis; one entry if they are equal
    """

    adjacency: Adjacency
    bound: str
    branches: tuple[Callable[[Array], Array], ...]

    def tpr(self, fpr: float) -> float:
        """Return the largest true-positive rate at a false-positive rate, rounded up."""
        remedy = "give a false-positive rate such as 0.01"
        fpr = validate.number(AccountingError, "account.rate-out-of-range", least=0, most=1, remedy=remedy, fpr=fpr)
        return float(self.rates(np.array([fpr]))[0])

    def rates(self, fpr: Array) -> Array:
        """Return the largest true-positive rate at each of these false-positive rates."""
        return np.asarray(np.max([_bounded(branch, fpr) for branch in self.branches], axis=0))

    def advantage(self) -> float:
        """Return the largest difference TPR(α) - α over all α: the total variation distance of the two worlds."""
        return max(map(_advantage, self.branches))

    def accuracy(self) -> float:
        """Return the largest share of right answers when a fair coin decides between the two worlds."""
        return 0.5 + 0.5 * self.advantage()

    def success(self, baseline: float) -> float:
        """Return a bound on an attack that succeeds with probability `baseline` in the other world.

        It bounds attribute inference and reconstruction by 1 - f(baseline) (Kulynych et al. 2025, arXiv 2507.06969).
        """
        return self.tpr(baseline)

    def mu(self, least_rate: float = 1e-3) -> float:
        """Return the smallest μ for which Gaussian differential privacy holds while both error rates exceed `least_rate`.

        Without a lower limit on the error rates no finite μ holds, because the curve includes the probability mass of
        infinite loss.
        """
        least = validate.number(AccountingError, "account.rate-out-of-range", above=0, below=0.5, least_rate=least_rate)
        from scipy.special import ndtri

        tolerance = _MU_TOLERANCE * (10 if self.bound == BY_RENYI else 1)
        grid = np.linspace(ndtri(least), -ndtri(least), 257)
        if self.tpr(least) >= 1 - least:
            return math.inf
        while True:  # on an interval, the difference is at most that of the right end's TPR and the left end's α
            rates = self.rates(_normal(grid))
            grid = grid[: int(np.searchsorted(rates, 1 - least)) + 1]  # up to the first point whose rate is too large
            values = ndtri(np.minimum(rates[: len(grid)], 1 - least))
            upper, lower = values[1:] - grid[:-1], float(np.max(values - grid))
            if float(upper.max()) <= lower + tolerance:
                return max(0.0, float(upper.max()))
            wide = np.flatnonzero(upper > lower + 0.5 * tolerance)
            grid = np.unique(np.concatenate([grid, 0.5 * (grid[wide] + grid[wide + 1])]))

    def twice(self) -> TradeOffCurve:
        """Return the curve for two neighbouring steps, such as removing one contribution and adding another."""
        first, last = self.branches[0], self.branches[-1]
        both = (lambda fpr: _bounded(first, _bounded(last, fpr)),)
        return TradeOffCurve(adjacency=Adjacency.REPLACE_ONE, bound=self.bound, branches=both)


def _bounded(branch: Callable[[Array], Array], fpr: Array) -> Array:
    return np.where(fpr >= 1, 1.0, np.clip(branch(np.asarray(fpr, dtype=np.float64)), fpr, 1.0))


def _advantage(branch: Callable[[Array], Array]) -> float:
    low, high = 0.0, 1.0
    for _ in range(5):  # TPR(α) - α is concave, so its maximum lies beside the largest grid value
        grid = np.linspace(low, high, 65)
        rates = _bounded(branch, grid)
        best = int(np.argmax(rates - grid))
        low, high = grid[max(0, best - 1)], grid[min(64, best + 1)]
    return float(min(1.0, np.max(rates[1:] - grid[:-1])))


def trade_off(
    events: EventCounts, *, accountant: str, adjacency: Adjacency | str = Adjacency.ADD_REMOVE
) -> TradeOffCurve:
    """Return the trade-off curve of all events together.

    The bound follows the accountant: the privacy loss distribution for `pld`, `rdp` and `moments`; the exact Gaussian
    curve for `gaussian` and `zcdp`, which credit no sampling; Rényi divergences for `rdp-integer`, `rdp@ORDER` and noise
    that followed its budget. Where no replace-one divergence is proven, the add/remove curve is composed with itself.
    """
    relation, fixed_order = check_adjacency(adjacency), rdp_order_of(accountant)
    find_accountant(accountant)
    fixed = grouped(Event(sigma=sigma, q=q, steps=n) for (sigma, q, order), n in events.items() if not order)
    followed = tuple((key, n) for key, n in events.items() if key[2] and n)
    if fixed_order is not None or accountant == INTEGER_RDP or followed:
        orders = (fixed_order,) if fixed_order else INTEGER_ORDERS if accountant == INTEGER_RDP else RDP_ORDERS
        branch = _renyi_rates(fixed, followed, orders)
        curve = TradeOffCurve(adjacency=Adjacency.ADD_REMOVE, bound=BY_RENYI, branches=(branch,))
        return curve if relation is Adjacency.ADD_REMOVE else curve.twice()
    plain = partial(_gaussian_rates, math.sqrt(gaussian_rdp.squared_mu(fixed, relation)))
    if accountant in ("gaussian", "zcdp") or all(event.q == 1 for event in fixed):
        return TradeOffCurve(adjacency=relation, bound=BY_GAUSSIAN, branches=(plain,))
    composed = [pld.compose_losses(fixed, direction) for direction in pld.directions(relation)]
    branches = tuple(plain if each is None else partial(_sampled_rates, plain, each) for each in composed)
    return TradeOffCurve(adjacency=relation, bound=BY_LOSSES, branches=branches)


def exceedance(events: EventCounts, epsilon: float, *, accountant: str) -> float:
    """Return a bound on the probability that an output changes the odds by more than e^ε.

    It is the minimum of δ(ε')/(1 - e^(ε'-ε)) over ε' < ε. The tail of a dominating loss distribution is no such bound:
    domination orders δ(ε), not the tails.
    """
    priced_by = find_accountant(accountant)
    if any(order for _, _, order in events):
        problem = "noise that followed its budget has no δ(ε) for other ε than its own"
        raise AccountingError("account.no-exceedance", problem, "leave the figure out")
    fixed = grouped(Event(sigma=sigma, q=q, steps=n) for (sigma, q, _), n in events.items())
    shares = np.linspace(0.0, 0.98, 50)
    found = [priced_by.delta(fixed, epsilon * share) / -math.expm1(epsilon * (share - 1)) for share in shares]
    return min(1.0, *found)


def _normal(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))


def _gaussian_rates(mu: float, fpr: Array) -> Array:
    from scipy.special import ndtri

    if math.isinf(mu):
        return np.ones_like(fpr)
    return np.where(fpr > 0, _normal(ndtri(fpr) + mu) * (1 + 1e-12), 0.0)


def _sampled_rates(plain: Callable[[Array], Array], losses: PrivacyLossDistribution, fpr: Array) -> Array:
    """Return min over ε of e^ε·α + δ(ε) for one loss distribution, and at most the rate without amplification."""
    epsilons, deltas, reached = _loss_corners(losses)
    if not len(epsilons):  # every loss is too large for e^ε
        return plain(fpr)
    at = np.searchsorted(-reached, -fpr)  # `reached` falls
    near = [np.clip(at + shift, 0, len(epsilons) - 1) for shift in (-1, 0)]
    return np.asarray(np.min([plain(fpr), *(np.exp(epsilons[j]) * fpr + deltas[j] for j in near)], axis=0))


_corners: dict[int, tuple[PrivacyLossDistribution, tuple[Array, Array, Array]]] = {}


def _loss_corners(losses: PrivacyLossDistribution) -> tuple[Array, Array, Array]:
    """Return, for each grid point ε: ε, δ(ε) rounded up, and the false-positive rate of the test "loss > ε"."""
    known = _corners.get(id(losses))
    if known is None or known[0] is not losses:
        if len(_corners) >= 16:
            _corners.clear()
        known = _corners[id(losses)] = losses, _make_corners(losses)
    return known[1]


def _make_corners(losses: PrivacyLossDistribution) -> tuple[Array, Array, Array]:
    from scipy.signal import lfilter

    p, shrink = losses.probabilities, math.exp(-losses.h)
    above = np.concatenate([np.cumsum(p[::-1])[::-1][1:], [0.0]])  # P[loss > ε]
    # Σ_{i>j} p_i·e^(ε_j-loss_i) by the recurrence E_{j-1} = e^-h·(p_j + E_j), which adds positive numbers only
    weighted = np.concatenate([lfilter([shrink], [1.0, -shrink], p[::-1])[::-1][1:], [0.0]])
    rounding = 4.0 * len(p) * 2.0**-53 * above  # the worst case of both running sums
    epsilons = (losses.first + np.arange(len(p))) * losses.h
    inside = np.abs(epsilons) < 700.0
    epsilons, above, weighted, rounding = (each[inside] for each in (epsilons, above, weighted, rounding))
    deltas = np.minimum(1.0, losses.infinite + np.maximum(0.0, above - weighted) + rounding)
    return epsilons, deltas, np.minimum.accumulate(weighted * np.exp(-epsilons))


def _renyi_rates(
    fixed: Schedule, followed: tuple[tuple[tuple[float, float, float], int], ...], orders: tuple[float, ...]
) -> Callable[[Array], Array]:
    if followed:  # proven at its own order, and so at every smaller one
        least = min(order for (_, _, order), _ in followed)
        proven = orders is not INTEGER_ORDERS or least == int(least)  # noise on integers has integer orders only
        orders = (*(order for order in orders if order < least), *(least,) * proven)
        whole = math.fsum(n * step_rdp(q, sigma, order) for (sigma, q, order), n in followed)
    else:
        whole = 0.0
    divergences = np.array([whole + gaussian_rdp.rdp_at_order(fixed, order) for order in orders])
    kept = np.isfinite(divergences)
    if not kept.any():
        return np.ones_like
    order, most = np.asarray(orders)[kept][:, None], divergences[kept][:, None] * (1 + 1e-12)
    # few orders decide the curve; leaving the others out can only raise it
    deciding = np.unique(np.argmin(_two_point_rates(order, most, _normal(np.linspace(-4.0, 4.0, 33))), axis=0))
    order, most = order[deciding], most[deciding]
    return lambda fpr: np.min(_two_point_rates(order, most, fpr), axis=0)


def _two_point_rates(order: Array, most: Array, fpr: Array) -> Array:
    """Return, for each order, the largest TPR whose Bernoulli pair keeps the Rényi divergence `most` in both directions.

    The root is found by Newton's method in the log odds of the TPR, from above, where one term of each divergence alone
    exceeds the limit. A step that leaves the bracket is a bisection. The result is an upper end of the bracket.
    """
    inside = (fpr > 0) & (fpr < 1)
    alpha, limit = np.where(inside, fpr, 0.5), (order - 1) * most
    log_alpha, log_rest = np.log(alpha), np.log1p(-alpha)
    low = np.broadcast_to(log_alpha - log_rest, (len(order), len(fpr)))
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.minimum((limit + (order - 1) * log_alpha) / order, 0.0)
        high = np.minimum(whole - np.log(-np.expm1(whole)), (limit - order * log_rest) / (order - 1))
        at = high
        for _ in range(_ROOT_STEPS):
            excess, slope = _excess_divergence(order, limit, at, log_alpha, log_rest)
            low, high = np.where(excess <= 0, at, low), np.where(excess > 0, at, high)
            step = at - excess / slope
            step = np.where((step >= low) & (step <= high), step, 0.5 * (low + high))
            moved, at = float(np.max(np.abs(step - at) / (1 + np.abs(at)))), step
            if moved < _ROOT_TOLERANCE:
                break
        near = at + 2 * _ROOT_TOLERANCE * (1 + np.abs(at))
        excess, _ = _excess_divergence(order, limit, near, log_alpha, log_rest)
    odds = np.where((excess > 0) & (near < high), near, high)
    return np.where(inside, np.exp(-np.logaddexp(0.0, -odds)), np.where(fpr <= 0, 0.0, 1.0))


def _excess_divergence(order: Array, limit: Array, odds: Array, log_q: Array, log_not_q: Array) -> tuple[Array, Array]:
    """Return (a - 1) times the larger divergence of two Bernoulli laws, minus `limit`, and its slope.

    One law is given by its log odds, in which the slope is taken, and the other by the logarithms of both probabilities.
    """
    log_p, log_not_p = -np.logaddexp(0.0, -odds), -np.logaddexp(0.0, odds)
    found = []
    for a, b in ((order, 1 - order), (1 - order, order)):  # log Σ p^a q^b, in both directions
        first, second = a * log_p + b * log_q, a * log_not_p + b * log_not_q
        moment = np.logaddexp(first, second)
        found.append((moment, a * (np.exp(first - moment) - np.exp(log_p))))
    (one, slope_one), (two, slope_two) = found
    larger = one > two
    return np.where(larger, one, two) - limit, np.where(larger, slope_one, slope_two)
