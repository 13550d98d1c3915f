"""What a schedule of noisy steps costs. This folder sees (sigma, q, steps) and nothing else."""

from __future__ import annotations

from lamina.account.accountant import ACCOUNTANTS, Accountant, accountant, order_of
from lamina.account.calibrate import calibrate
from lamina.account.choice import choice_multiplier
from lamina.account.cost import Cost, capped, cost, epsilon_of_multiplier
from lamina.account.curve import SpendCurve
from lamina.account.event import Adjacency, Event, Schedule, grouped, prefix, total_steps
from lamina.account.filters import Filter, GaussianFilter, RenyiFilter, choose_order

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Adjacency",
    "Cost",
    "Event",
    "Filter",
    "GaussianFilter",
    "RenyiFilter",
    "Schedule",
    "SpendCurve",
    "accountant",
    "calibrate",
    "capped",
    "choice_multiplier",
    "choose_order",
    "cost",
    "epsilon_of_multiplier",
    "grouped",
    "order_of",
    "prefix",
    "total_steps",
]
