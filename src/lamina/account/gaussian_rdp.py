"""Bounds by formula: exact Gaussian and zCDP without amplification, Rényi DP and moments with it.

And the exponential mechanism as a Gaussian. scipy is imported where it is used: `lamina admit` needs no more than math.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina import validate
from lamina.account.schedule import (
    CHOICE_EPSILON,
    INTEGER_ORDERS,
    INTEGER_RDP,
    RDP_ORDERS,
    Adjacency,
    Schedule,
    bisect_float,
)
from lamina.errors import AccountingError

# The exact cost of Gaussian noise when nothing is credited to sampling.
#
# T steps with multipliers sigma_t, whatever the coins say, are one Gaussian mechanism with
#
#     μ = sqrt( Σ_t sigma_t^-2 ),     δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)          (Balle and Wang 2018)
#
# and both directions are equal. Replacing one contribution by another moves the sum by twice its radius: 2μ.

Array = npt.NDArray[np.float64]

_ROOT2 = math.sqrt(2.0)
_PAD = 1e-12  # relative; covers the rounding of Φ and of the sums below
_HUGE_MU = 1e7  # beyond, μ/2 - ε/μ loses its digits; a closed bound is as good


def squared_mu(schedule: Schedule, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """μ² = Σ steps/sigma² (times 4 for replace-one), rounded once, in any order; inf on overflow."""
    try:
        total = math.fsum(event.steps * (event.mu * event.mu) for event in schedule if not event.free)
    except OverflowError:
        return math.inf
    return total if adjacency is Adjacency.ADD_REMOVE else 4.0 * total


def hockey_stick(epsilon: Any, mu: Any) -> Array:
    """δ(ε) of N(μ,1) against N(0,1) for arrays of ε, negative ones included, and of μ > 0.

    With a = μ/2 - ε/μ and b = a - μ, e^ε φ(b) = φ(a); so in the tail (a ≤ 0) the difference is written
    Φ(a)·(1 - m(b)/m(a)) with Mills ratios m = Φ/φ, which keeps its relative precision.
    """
    from scipy import special

    eps = np.asarray(epsilon, dtype=np.float64)
    a = 0.5 * mu - eps / mu
    b = a - mu
    tail = a <= 0
    a_tail, b_tail = np.where(tail, a, -1.0), np.where(tail, b, -1.0 - mu)
    ratio = special.erfcx(-b_tail / _ROOT2) / special.erfcx(-a_tail / _ROOT2)
    body = special.ndtr(a) - np.exp(np.minimum(eps + special.log_ndtr(b), 0.0))
    return np.asarray(np.clip(np.where(tail, special.ndtr(a) * (1.0 - ratio), body), 0.0, 1.0))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The smallest ε with δ(ε) ≤ delta, rounded up."""
    if mu == 0:
        return 0.0
    if delta == 0 or math.isinf(mu):
        return math.inf
    high = 0.5 * mu * mu + mu * math.sqrt(2.0 * math.log(1.0 / delta))  # from δ(ε) ≤ Φ(a) ≤ exp(-a²/2)
    if mu > _HUGE_MU:
        return high * (1 + _PAD)
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    return bisect_float(lambda epsilon: delta_of_mu(mu, epsilon) <= delta, 0.0, high, relative=_PAD)[1] * (1 + _PAD)


def epsilon_of_noise_multiplier(multiplier: float, delta: float) -> float:
    """The exact ε of one Gaussian release with noise multiplier z: what a signed bound promises. μ = 1/z."""
    return epsilon_of_mu(1.0 / multiplier if multiplier > 1e-308 else math.inf, delta)


def delta_of_mu(mu: float, epsilon: float) -> float:
    """δ(ε), rounded up."""
    if mu == 0:
        return 0.0
    if math.isinf(epsilon):
        return 0.0 if math.isfinite(mu) else 1.0
    if math.isinf(mu) or mu > _HUGE_MU:
        return 1.0
    a = 0.5 * mu - epsilon / mu
    # With Φ(x) = φ(x)·sqrt(π/2)·erfcx(-x/sqrt(2)) and e^ε φ(a - μ) = φ(a); as `hockey_stick`, without scipy
    scale, beyond = math.exp(-0.5 * a * a), _erfcx((mu - a) / _ROOT2)
    above = scale * _erfcx(-a / _ROOT2) if a <= 0 else math.erfc(-a / _ROOT2)
    # The two terms almost cancel for a small μ, so the error is added: a few units of each, and that of `a` itself.
    error = (above + scale * beyond) * (8e-15 + 4 * (abs(a) + 1) * (0.5 * mu + epsilon / mu) * 2.0**-52)
    return min(1.0, max(0.0, 0.5 * (above - scale * beyond + error)) * (1 + _PAD))


def _erfcx(x: float) -> float:
    """exp(x²)·erfc(x) for x ≥ 0, to a few units of the last place. scipy has it; `lamina admit` does without scipy."""
    if x < 12:
        near = math.floor(16 * x) / 16  # its square is exact (Cody 1969)
        return math.exp(near * near) * math.exp((x - near) * (x + near)) * math.erfc(x)
    total, term = 1.0, 1.0
    for k in range(1, 14):  # asymptotic series: Σ (-1)^k (2k-1)!! / (2x²)^k
        term *= -(2 * k - 1) / (2 * x * x)
        total += term
    return total / (x * math.sqrt(math.pi))


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest μ with ε(μ, delta) ≤ epsilon, rounded down: the budget of a Gaussian filter."""
    if delta == 0:
        return 0.0
    low, high = 0.0, 1.0
    while high < _HUGE_MU and epsilon_of_mu(high, delta) <= epsilon:
        low, high = high, 2.0 * high
    return bisect_float(lambda mu: epsilon_of_mu(mu, delta) > epsilon, low, high, relative=_PAD)[0]


def gaussian_epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule without amplification, exact up to rounding (upwards)."""
    return epsilon_of_mu(math.sqrt(squared_mu(schedule, adjacency)), delta)


def gaussian_delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule without amplification, exact up to rounding (upwards)."""
    return delta_of_mu(math.sqrt(squared_mu(schedule, adjacency)), epsilon)


# Zero-concentrated DP without amplification: ρ = Σ steps/(2 sigma²), and two ways from ρ to ε.
#
#     tight      ε = inf_{α>1}  ρα + [log(1/δ) + (α-1) log(1-1/α) - log α] / (α-1)   (Canonne, Kamath, Steinke)
#     classical  ε = ρ + 2 sqrt(ρ log(1/δ))                                            (Bun and Steinke)
#
# Any α gives a valid ε, so a numerical minimum is safe wherever it stops. Replace-one: ρ times 4.


def zcdp_rho(schedule: Schedule, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """ρ = Σ steps/(2 sigma²), for replace-one four times that."""
    return 0.5 * squared_mu(schedule, adjacency)


def classical_zcdp_epsilon(rho: float, delta: float) -> float:
    """ρ + 2 sqrt(ρ log 1/δ): valid, looser, the one older papers print."""
    if rho == 0:
        return 0.0
    return math.inf if delta == 0 else rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))


def epsilon_of_rho(rho: float, delta: float) -> float:
    """The tight conversion: the infimum over all orders."""
    if rho == 0:
        return 0.0
    if delta == 0 or math.isinf(rho):
        return math.inf

    def cost(log_excess: float) -> float:
        excess = math.exp(log_excess)  # α - 1
        return rho * (1 + excess) + (math.log(1 / delta) - math.log1p(excess)) / excess - math.log1p(1 / excess)

    start = math.log(math.sqrt(math.log(1 / delta) / rho))
    return max(0.0, min(cost(_minimize(cost, start - 5, start + 5)), classical_zcdp_epsilon(rho, delta))) * (1 + _PAD)


def _minimize(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import minimize_scalar

    return float(minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-10}).x)


def delta_of_rho(rho: float, epsilon: float) -> float:
    """δ = inf_α exp((α-1)(αρ - ε)) (1-1/α)^(α-1) / α."""
    if rho == 0:
        return 0.0
    if math.isinf(rho):
        return 1.0
    if math.isinf(epsilon):
        return 0.0

    def log_delta(log_excess: float) -> float:
        excess = math.exp(log_excess)
        return excess * (rho * (1 + excess) - epsilon - math.log1p(1 / excess)) - math.log1p(excess)

    centre = math.log(max(epsilon - rho, math.sqrt(rho)) / (2 * rho))
    least = log_delta(_minimize(log_delta, centre - 8, centre + 8))
    return min(1.0, math.exp(min(0.0, least)) * (1 + _PAD))


def zcdp_epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule from its ρ."""
    return epsilon_of_rho(zcdp_rho(schedule, adjacency), delta)


def zcdp_delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule from its ρ."""
    return delta_of_rho(zcdp_rho(schedule, adjacency), epsilon)


# What one call of the exponential mechanism costs, as an event that every accountant knows.
#
# A mechanism is ε-bounded-range if, for neighbouring data, its log-likelihood ratios over all outputs lie in some
# interval [t-ε, t]. Choosing with p ∝ exp(ε·u) is, if one contribution moves every u by at most 1 and with one sign.
#
# Claim. It is dominated by one Gaussian release with multiplier 1/μ,   μ = 2Φ⁻¹(1/(1+e^(-ε/2))).
#
# Among all mechanisms with ratios in [t-ε, t], the most revealing has two outputs, with ratios t and t-ε. Telling
# N(μ,1) from N(0,1) by a threshold c has the log-odds logit Φ(μ-c) and logit Φ(-c), which differ by at least
# 2·logit Φ(μ/2) = ε: the slope of logit∘Φ is least at 0, so the difference is least for c = μ/2. So some threshold,
# coarsened by a coin, gives exactly the two-output mechanism: it is a post-processing of the Gaussian release. Both
# may then be sampled with the same coins: choosing on a Poisson sample of rate q is dominated by the subsampled
# Gaussian of rate q, and any accountant that prices that one prices the choice. (μ ≈ 0.627ε; the zCDP of a choice is
# ε²/8 = 0.125ε², that of the Gaussian 0.196ε²: what being one kind of event with the steps costs.)


def choice_noise_multiplier(epsilon: float) -> float:
    """The noise multiplier 1/μ of the Gaussian that dominates an ε-bounded-range choice; rounded down.

    >>> round(choice_noise_multiplier(0.5), 4)
    3.1951
    """
    from scipy import special

    least, most = CHOICE_EPSILON
    validate.number(AccountingError, "account.choice-epsilon-out-of-range", least=least, most=most, epsilon=epsilon)
    if epsilon < 1:  # 1/(1+e^(-ε/2)) is near ½ there, which is where its digits are: 2p - 1 = tanh(ε/4)
        mu = 2.0 * math.sqrt(2.0) * float(special.erfinv(math.tanh(0.25 * epsilon)))
    else:
        mu = -2.0 * float(special.ndtri(special.expit(-0.5 * epsilon)))
    return 1.0 / (mu * (1 + 1e-12))


# The Rényi divergence of one Poisson-subsampled Gaussian step.
#
# With r(z) = 1-q + q·exp(z/sigma - 1/(2 sigma²)) the likelihood ratio and z ~ N(0,1),
#
#     A(α) = E[r^α],     RDP(α) = log A(α) / (α-1)          the larger direction (Mironov, Talwar, Zhang 2019)
#
# E[r] = 1, so A(α) - 1 is a sum or integral of terms that are all ≥ 0, and nothing cancels however small
# q/sigma is:
#     integer α     A - 1 = Σ_{i=2..α} binom(α,i) q^i (1-q)^(α-i) (e^{(i²-i)/(2 sigma²)} - 1)
#     any α > 1     A - 1 = E[ r^α - 1 - α(r-1) ]           by the trapezoidal rule
# log A is convex in α with log A(1) = 0, so where the rule would need too many points a chord bounds it from
# above.

_RDP_PAD = 1e-9  # relative; gammaln at order 32768 is good to 1e-10
_QUADRATURE_FROM = 0.1  # smallest sigma for which fractional orders are integrated


@lru_cache(maxsize=4096)
def step_rdp_at_orders(q: float, sigma: float) -> Array:
    """RDP of one step at each of ORDERS, rounded up; read-only."""
    orders = np.asarray(RDP_ORDERS)
    with np.errstate(over="ignore", divide="ignore"):
        result = step_log_moments(q, sigma, RDP_ORDERS) / (orders - 1.0)
    result.setflags(write=False)
    return result


@lru_cache(maxsize=65536)
def step_rdp(q: float, sigma: float, order: float) -> float:
    """RDP of one step at one order > 1, rounded up."""
    return float(step_log_moments(q, sigma, (order,))[0] / (order - 1.0))


def step_log_moments(q: float, sigma: float, orders: tuple[float, ...]) -> Array:
    """log A(α) for each order, rounded up; inf where it overflows."""
    alpha = np.asarray(orders, dtype=np.float64)
    if q == 0 or math.isinf(sigma):
        return np.zeros_like(alpha)
    if sigma < 1e-150:
        return np.full_like(alpha, math.inf)
    if q == 1:
        return alpha * (alpha - 1.0) / (2.0 * sigma * sigma) * (1.0 + _RDP_PAD)
    result = np.empty_like(alpha)
    whole = alpha == np.floor(alpha)
    result[whole] = [_log_moment_at_integer(q, sigma, int(a)) for a in alpha[whole]]
    if not whole.all():
        fractional = alpha[~whole]
        if sigma >= _QUADRATURE_FROM and fractional.max() <= 64:
            result[~whole] = _log_moments_by_quadrature(q, sigma, fractional)
        else:
            low = np.floor(fractional)
            below = np.array([_log_moment_at_integer(q, sigma, int(a)) if a > 1 else 0.0 for a in low])
            above = np.array([_log_moment_at_integer(q, sigma, int(a)) for a in low + 1])
            result[~whole] = below + (fractional - low) * (above - below)
    return result * (1.0 + _RDP_PAD)


def _log_moment_at_integer(q: float, sigma: float, alpha: int) -> float:
    i = np.arange(2, alpha + 1, dtype=np.float64)
    exponent = i * (i - 1.0) / (2.0 * sigma * sigma)
    log_expm1 = exponent + np.log(-np.expm1(-exponent))
    terms = _log_choose(alpha) + i * math.log(q) + (alpha - i) * math.log1p(-q) + log_expm1
    top = float(terms.max())
    if not math.isfinite(top):
        return math.inf
    return float(np.logaddexp(0.0, top + math.log(float(np.exp(terms - top).sum()))))


@lru_cache(maxsize=256)
def _log_choose(alpha: int) -> Array:
    from scipy import special

    i = np.arange(2, alpha + 1, dtype=np.float64)
    return np.asarray(special.gammaln(alpha + 1) - special.gammaln(i + 1) - special.gammaln(alpha - i + 1))


def _log_moments_by_quadrature(q: float, sigma: float, orders: Array) -> Array:
    from scipy import special

    mu = 1.0 / sigma
    alpha = orders[:, None]
    # The integrand is analytic up to Im z = π·sigma and falls like a Gaussian: convergence is geometric.
    width = min(0.2, 0.3 * sigma)
    z = np.arange(-13.0, float(orders.max()) * mu + 13.0, width)[None, :]
    shift = mu * z - 0.5 * mu * mu
    u = q * np.expm1(np.minimum(shift, 700.0))  # r - 1
    log_r = np.logaddexp(math.log1p(-q), math.log(q) + shift)
    small = np.minimum(u, 0.5)
    series = 0.5 * alpha * (alpha - 1) * small**2 * (1 + (alpha - 2) * small / 3 * (1 + (alpha - 3) * small / 4))
    near = np.where(np.abs(small) * alpha < 1e-3, series, np.expm1(alpha * np.log1p(small)) - alpha * small)
    with np.errstate(divide="ignore"):
        log_near = np.log(np.maximum(near, 0.0))
    power = alpha * log_r
    with np.errstate(divide="ignore", invalid="ignore"):
        log_far = power + np.log1p(-(1 + alpha * np.maximum(u, 0.5)) * np.exp(-np.maximum(power, 0.0)))
    integrand = np.where(u > 0.5, log_far, log_near) - 0.5 * z * z
    log_excess = special.logsumexp(integrand, axis=1) + math.log(width) - 0.5 * math.log(2 * math.pi)
    return np.asarray(np.logaddexp(0.0, log_excess))


# Rényi accounting: divergences add over steps at each order, and the best order is taken at the end.
#
#     ε = min_α  RDP(α) + log(1-1/α) - log(αδ)/(α-1)            (Canonne, Kamath, Steinke 2020, Prop. 12)
#     ε = 0      if 1 - exp(-RDP(α)) ≤ δ² for some α             (Bretagnolle and Huber)
#
# Add/remove only: the divergence of a subsampled step under replace-one is not the one computed here.


def rdp_curve(schedule: Schedule) -> Array:
    """RDP of a grouped schedule at each of ORDERS."""
    total = np.zeros(len(RDP_ORDERS))
    for event in schedule:
        total = total + event.steps * step_rdp_at_orders(event.q, event.sigma)
    return total


def epsilon_of_rdp(rdp: Array, delta: float, orders: tuple[float, ...] = RDP_ORDERS) -> float:
    """The best conversion over the orders."""
    if delta == 0:
        return 0.0 if not rdp.any() else math.inf
    if float(-np.expm1(-rdp.min())) <= delta * delta:
        return 0.0
    return max(0.0, float(np.min(rdp + order_offset(np.asarray(orders), delta))))


def delta_of_rdp(rdp: Array, epsilon: float, orders: tuple[float, ...] = RDP_ORDERS) -> float:
    """The best conversion over the orders, in the other direction."""
    if math.isinf(epsilon):
        return 0.0
    alpha = np.asarray(orders)
    logs = (alpha - 1) * (rdp - epsilon + np.log1p(-1 / alpha)) - np.log(alpha)
    by_kl = math.sqrt(float(-np.expm1(-rdp.min())))
    return min(1.0, by_kl, math.exp(min(0.0, float(logs.min()))))


def order_offset(order: Any, delta: float) -> Any:
    """What an order, or an array of them, adds to its RDP to become ε: log(1-1/α) - log(αδ)/(α-1)."""
    return np.log1p(-1 / order) - (np.log(order) + math.log(delta)) / (order - 1)


def rdp_epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "rdp")
    return epsilon_of_rdp(rdp_curve(schedule), delta)


def rdp_delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "rdp")
    return delta_of_rdp(rdp_curve(schedule), epsilon)


# The same at integer orders alone, which also price the discrete Gaussian. On the integers, with P(x) ∝ exp(-x²/2s²) in
# every coordinate and a shift by a whole vector y, RDP(α) ≤ α‖y‖²/(2s²) as for the Gaussian itself (Canonne, Kamath and
# Steinke 2020, Thm. 4 and Prop. 5); and for any symmetric noise, sampled at rate q, both directions are at most
#
#     1/(α-1) · log Σ_j binom(α,j) (1-q)^(α-j) q^j e^((j-1)·RDP(j))          (Mironov, Talwar and Zhang 2019)
#
# which is the sum above. Skellam noise has it too, on a grid that is coarser by 1e-7. At fractional orders, and for a
# PLD, a discrete law costs what only itself would tell.

_INTEGER_AT = np.isin(np.asarray(RDP_ORDERS), np.asarray(INTEGER_ORDERS))


def integer_rdp_epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification, by integer orders."""
    _add_remove_only(adjacency, INTEGER_RDP)
    return epsilon_of_rdp(rdp_curve(schedule)[_INTEGER_AT], delta, INTEGER_ORDERS)


def integer_rdp_delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification, by integer orders."""
    _add_remove_only(adjacency, INTEGER_RDP)
    return delta_of_rdp(rdp_curve(schedule)[_INTEGER_AT], epsilon, INTEGER_ORDERS)


def rdp_at_order(schedule: Schedule, order: float) -> float:
    """RDP of a grouped schedule at one order."""
    return math.fsum(event.steps * step_rdp(event.q, event.sigma, order) for event in schedule)


def rdp_epsilon_at_order(order: float, schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε by one order, fixed in advance: what a filter at that order can promise."""
    _add_remove_only(adjacency, f"rdp@{order:g}")
    return float(max(0.0, rdp_at_order(schedule, order) + order_offset(order, delta))) * (1 + 1e-12)


def rdp_delta_at_order(order: float, schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ by one order, fixed in advance."""
    _add_remove_only(adjacency, f"rdp@{order:g}")
    if math.isinf(epsilon):
        return 0.0
    log = (order - 1) * (rdp_at_order(schedule, order) - epsilon + math.log1p(-1 / order)) - math.log(order)
    return min(1.0, math.exp(min(0.0, log)) * (1 + 1e-12))


def _add_remove_only(adjacency: Adjacency, name: str) -> None:
    if adjacency is not Adjacency.ADD_REMOVE:
        problem = f"accountant '{name}' has no {adjacency.value} figure for subsampled steps"
        remedy = "use accountant 'pld' (with amplification), or 'gaussian' or 'zcdp' (without)"
        raise AccountingError("account.add-remove-only", problem, remedy)


# The moments accountant of Abadi et al. 2016: integer moments and the plain tail bound.
#
#     α(λ) = Σ_t log A_t(λ+1),  λ = 1..64,      ε = min_λ (α(λ) + log 1/δ)/λ,      δ = min_λ exp(α(λ) - λε)
#
# Kept because older reports use it; never below `rdp`, which converts the same moments better.

MOMENT_ORDERS = np.arange(1, 65, dtype=np.float64)


@lru_cache(maxsize=4096)
def _step_moments(q: float, sigma: float) -> Array:
    result = step_log_moments(q, sigma, tuple(MOMENT_ORDERS + 1.0))
    result.setflags(write=False)
    return result


def moments_curve(schedule: Schedule) -> Array:
    """α(λ) of a grouped schedule."""
    total = np.zeros(len(MOMENT_ORDERS))
    for event in schedule:
        total = total + event.steps * _step_moments(event.q, event.sigma)
    return total


def moments_epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "moments")
    if delta == 0:
        return math.inf
    return float(np.min((moments_curve(schedule) - math.log(delta)) / MOMENT_ORDERS))


def moments_delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "moments")
    if math.isinf(epsilon):
        return 0.0
    return math.exp(min(0.0, float(np.min(moments_curve(schedule) - MOMENT_ORDERS * epsilon))))
