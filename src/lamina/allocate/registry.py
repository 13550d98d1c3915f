"""Allocations by name."""

from __future__ import annotations

from types import MappingProxyType

from lamina.allocate.flat import flat
from lamina.allocate.pareto import pareto
from lamina.allocate.problem import Allocate
from lamina.allocate.uniform import uniform
from lamina.errors import PlanError

ALLOCATIONS = MappingProxyType({"flat": flat, "uniform": uniform, "pareto": pareto})


def allocation(name: str) -> Allocate:
    """The allocation of that name."""
    if name not in ALLOCATIONS:
        raise PlanError(f"allocation {name!r} is not known", f"use one of {', '.join(ALLOCATIONS)}")
    return ALLOCATIONS[name]
