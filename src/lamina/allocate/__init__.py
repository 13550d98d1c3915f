"""How C and S are chosen: one file per policy, and `make_plan`, which joins layers, policy and allocation."""

from __future__ import annotations

from lamina.allocate.flat import flat
from lamina.allocate.make_plan import make_plan
from lamina.allocate.pareto import pareto
from lamina.allocate.problem import Allocate, Allocation, Problem
from lamina.allocate.registry import ALLOCATIONS, allocation
from lamina.allocate.uniform import uniform

__all__ = [
    "make_plan",
    "Problem",
    "Allocation",
    "Allocate",
    "ALLOCATIONS",
    "allocation",
    "flat",
    "uniform",
    "pareto",
]
