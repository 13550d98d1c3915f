"""How C and S are chosen: the allocations, and `make_plan`, which joins layers, policy and allocation."""

from __future__ import annotations

from lamina.allocate.basic import (
    LSAB,
    Automatic,
    Flat,
    Pareto,
    Proportional,
    Quantile,
    Uniform,
    automatic,
    flat,
    lsab,
    pareto,
    proportional,
    quantile,
    uniform,
)
from lamina.allocate.ladp import LADP, Candidate, draw, ladp, plan_candidates, utilities
from lamina.allocate.make_plan import ALLOCATIONS, declare_allocation, explained_plan, find_allocation, make_plan
from lamina.allocate.paper import PaperLADP, PaperLSAB, paper_ladp, paper_lsab
from lamina.allocate.problem import Allocate, Allocation, AllocationProblem

__all__ = [
    "make_plan", "explained_plan",
    "AllocationProblem", "Allocation", "Allocate", "ALLOCATIONS", "declare_allocation", "find_allocation",
    "Flat", "Uniform", "Proportional", "Pareto", "LSAB", "LADP", "Quantile", "Automatic",
    "PaperLSAB", "PaperLADP",
    "flat", "uniform", "proportional", "pareto", "lsab", "ladp", "quantile", "automatic",
    "paper_lsab", "paper_ladp",
    "Candidate", "plan_candidates", "utilities", "draw",
]  # fmt: skip
