"""Rényi accounting: divergences add over steps at each order, and the best order is taken at the end.

    ε = min_α  RDP(α) + log(1-1/α) - log(αδ)/(α-1)            (Canonne, Kamath, Steinke 2020, Prop. 12)
    ε = 0      if 1 - exp(-RDP(α)) ≤ δ² for some α             (Bretagnolle and Huber)

Add/remove only: the divergence of a subsampled step under replace-one is not the one computed here.
"""

from __future__ import annotations

import math

import numpy as np

from lamina.account.event import Adjacency, Schedule
from lamina.account.renyi import ORDERS, Array, divergence, divergences
from lamina.errors import AccountingError


def curve(schedule: Schedule) -> Array:
    """RDP of a grouped schedule at each of ORDERS."""
    total = np.zeros(len(ORDERS))
    for event in schedule:
        total = total + event.steps * divergences(event.q, event.sigma)
    return total


def epsilon_of_curve(rdp: Array, delta: float) -> float:
    """The best conversion over ORDERS."""
    if delta == 0:
        return 0.0 if not rdp.any() else math.inf
    if float(-np.expm1(-rdp.min())) <= delta * delta:
        return 0.0
    return max(0.0, float(np.min(rdp + _offsets(delta))))


def delta_of_curve(rdp: Array, epsilon: float) -> float:
    """The best conversion over ORDERS, in the other direction."""
    if math.isinf(epsilon):
        return 0.0
    orders = np.asarray(ORDERS)
    logs = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    by_kl = math.sqrt(float(-np.expm1(-rdp.min())))
    return min(1.0, by_kl, math.exp(min(0.0, float(logs.min()))))


def order_offset(order: float, delta: float) -> float:
    """What one order adds to its RDP to become ε: log(1-1/α) - log(αδ)/(α-1)."""
    return math.log1p(-1 / order) - math.log(order * delta) / (order - 1)


def _offsets(delta: float) -> Array:
    orders = np.asarray(ORDERS)
    return np.asarray(np.log1p(-1 / orders) - (np.log(orders) + math.log(delta)) / (orders - 1))


def epsilon(schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "rdp")
    return epsilon_of_curve(curve(schedule), delta)


def delta(schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ of a grouped schedule with amplification."""
    _add_remove_only(adjacency, "rdp")
    return delta_of_curve(curve(schedule), epsilon)


def total_at(schedule: Schedule, order: float) -> float:
    """RDP of a grouped schedule at one order."""
    return math.fsum(event.steps * divergence(event.q, event.sigma, order) for event in schedule)


def epsilon_at(order: float, schedule: Schedule, delta: float, adjacency: Adjacency) -> float:
    """ε by one order, fixed in advance: what a filter at that order can promise."""
    _add_remove_only(adjacency, f"rdp@{order:g}")
    return max(0.0, total_at(schedule, order) + order_offset(order, delta)) * (1 + 1e-12)


def delta_at(order: float, schedule: Schedule, epsilon: float, adjacency: Adjacency) -> float:
    """δ by one order, fixed in advance."""
    _add_remove_only(adjacency, f"rdp@{order:g}")
    if math.isinf(epsilon):
        return 0.0
    log = (order - 1) * (total_at(schedule, order) - epsilon + math.log1p(-1 / order)) - math.log(order)
    return min(1.0, math.exp(min(0.0, log)) * (1 + 1e-12))


def _add_remove_only(adjacency: Adjacency, name: str) -> None:
    if adjacency is not Adjacency.ADD_REMOVE:
        raise AccountingError(
            "account.accountant-no-figure",
            f"accountant '{name}' has no {adjacency.value} figure for subsampled steps",
            "use accountant 'pld' (with amplification), or 'gaussian' or 'zcdp' (without)",
        )
