"""What a schedule of noisy steps costs. This folder sees (sigma, q, steps) and nothing else.

Names are imported when they are first used: events and schedules need neither numpy nor scipy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.account.accountants import ACCOUNTANTS, Accountant, Cost, SpendCurve, calibrate, cost, find_accountant
    from lamina.account.charges import Account
    from lamina.account.filters import GaussianFilter, PrivacyFilter, RenyiFilter, choose_order
    from lamina.account.schedule import Adjacency, Event, Schedule
    from lamina.account.tradeoff import TradeOffCurve, exceedance, trade_off

__all__ = [
    "Account", "ACCOUNTANTS", "Accountant", "Cost", "SpendCurve", "calibrate", "cost", "find_accountant",
    "GaussianFilter", "PrivacyFilter", "RenyiFilter", "choose_order",
    "Adjacency", "Event", "Schedule",
    "TradeOffCurve", "exceedance", "trade_off",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in ("schedule", "charges", "filters", "accountants", "tradeoff"):
            if hasattr(module := import_module(f"lamina.account.{home}"), name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
