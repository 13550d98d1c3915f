"""What a schedule of noisy steps costs. This folder sees (sigma, q, steps) and nothing else."""

from __future__ import annotations

from lamina.account.accountants import (
    ACCOUNTANTS,
    Accountant,
    Cost,
    SpendCurve,
    calibrate,
    cap_occurrences,
    cost,
    epsilon_of_noise_multiplier,
    find_accountant,
    rdp_order_of,
)
from lamina.account.filters import GaussianFilter, PrivacyFilter, RenyiFilter, choose_order
from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.account.schedule import Adjacency, Event, Schedule, grouped, prefix, total_steps

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Adjacency",
    "Cost",
    "Event",
    "PrivacyFilter",
    "GaussianFilter",
    "RenyiFilter",
    "Schedule",
    "SpendCurve",
    "find_accountant",
    "calibrate",
    "cap_occurrences",
    "choice_noise_multiplier",
    "choose_order",
    "cost",
    "epsilon_of_noise_multiplier",
    "grouped",
    "rdp_order_of",
    "prefix",
    "total_steps",
]
