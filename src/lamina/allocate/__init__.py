"""How C and S are chosen: one file per policy, and `make_plan`, which joins layers, policy and allocation."""

from __future__ import annotations

from lamina.allocate.automatic import Automatic, automatic
from lamina.allocate.choice import Offer, draw, offers, utilities
from lamina.allocate.flat import Flat, flat
from lamina.allocate.ladp import LADP, ladp
from lamina.allocate.lsab import LSAB, lsab
from lamina.allocate.make_plan import explained_plan, make_plan
from lamina.allocate.pareto import Pareto, pareto
from lamina.allocate.printed_ladp import PrintedLADP, printed_ladp
from lamina.allocate.printed_lsab import PrintedLSAB, printed_lsab
from lamina.allocate.problem import Allocate, Allocation, Problem
from lamina.allocate.proportional import Proportional, proportional
from lamina.allocate.quantile import Quantile, quantile
from lamina.allocate.registry import ALLOCATIONS, allocation
from lamina.allocate.uniform import Uniform, uniform

__all__ = [
    "make_plan", "explained_plan",
    "Problem", "Allocation", "Allocate", "ALLOCATIONS", "allocation",
    "Flat", "Uniform", "Proportional", "Pareto", "LSAB", "LADP", "Quantile", "Automatic",
    "PrintedLSAB", "PrintedLADP",
    "flat", "uniform", "proportional", "pareto", "lsab", "ladp", "quantile", "automatic",
    "printed_lsab", "printed_ladp",
    "Offer", "offers", "utilities", "draw",
]  # fmt: skip
