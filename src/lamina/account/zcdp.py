"""Zero-concentrated DP without amplification: ρ = Σ steps/(2 sigma²), and two ways from ρ to ε.

    tight      ε = inf_{α>1}  ρα + [log(1/δ) + (α-1) log(1-1/α) - log α] / (α-1)   (Canonne, Kamath, Steinke)
    classical  ε = ρ + 2 sqrt(ρ log(1/δ))                                            (Bun and Steinke)

Any α gives a valid ε, so a numerical minimum is safe wherever it stops. Replace-one: ρ times 4.
"""

from __future__ import annotations

import math

import scipy

from lamina.account.event import Adjacency, Schedule
from lamina.account.gaussian import squared_mu

_PAD = 1e-12


def rho(schedule: Schedule, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """ρ = Σ steps/(2 sigma²), for replace-one four times that."""
    return 0.5 * squared_mu(schedule, adjacency)


def classical_epsilon(rho: float, delta: float) -> float:
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
        return (
            rho * (1 + excess) + (math.log(1 / delta) - math.log1p(excess)) / excess - math.log1p(1 / excess)
        )

    start = math.log(math.sqrt(math.log(1 / delta) / rho))
    best = scipy.optimize.minimize_scalar(
        cost, bounds=(start - 5, start + 5), method="bounded", options={"xatol": 1e-10}
    )
    return max(0.0, min(cost(float(best.x)), classical_epsilon(rho, delta))) * (1 + _PAD)


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
    best = scipy.optimize.minimize_scalar(
        log_delta, bounds=(centre - 8, centre + 8), method="bounded", options={"xatol": 1e-10}
    )
    return min(1.0, math.exp(min(0.0, log_delta(float(best.x)))) * (1 + _PAD))


def epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule from its ρ."""
    return epsilon_of_rho(rho(schedule, adjacency), delta)


def delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule from its ρ."""
    return delta_of_rho(rho(schedule, adjacency), epsilon)
