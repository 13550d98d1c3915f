"""Allocations by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from lamina.allocate.automatic import automatic
from lamina.allocate.flat import flat
from lamina.allocate.ladp import LADP, ladp
from lamina.allocate.lsab import lsab
from lamina.allocate.pareto import pareto
from lamina.allocate.printed_ladp import printed_ladp
from lamina.allocate.printed_lsab import printed_lsab
from lamina.allocate.problem import Allocate, Policy
from lamina.allocate.proportional import proportional
from lamina.allocate.quantile import quantile
from lamina.allocate.uniform import uniform
from lamina.errors import PlanError

_DEFAULTS: tuple[Policy, ...] = (
    flat, uniform, proportional, pareto, lsab, ladp, LADP(mode="budget"), quantile, automatic,
    printed_lsab, printed_ladp,
)  # fmt: skip
ALLOCATIONS: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in _DEFAULTS})
"""Every policy with its default options. The printed ones reproduce documents and are not what these claim."""

DEFAULT = pareto.name
"""What `make_plan` does unless it is told otherwise. Without a measure and with one class it is `flat`, which real data
support (docs/policies/utility.md); with several it gives each its whole budget, which `flat` does not."""


def allocation(name: str | Allocate) -> Allocate:
    """The allocation of that name; a policy or function stands for itself."""
    if not isinstance(name, str):
        if isinstance(name, type):
            raise PlanError(
                "allocate.allocate-class",
                f"allocate is the class {name.__name__}",
                f"make one: {name.__name__}()",
            )
        if not callable(name):
            raise PlanError(
                "allocate.allocate",
                f"allocate is a {type(name).__name__}",
                f"use one of {', '.join(ALLOCATIONS)}",
            )
        return name
    if name not in ALLOCATIONS:
        close = get_close_matches(name, ALLOCATIONS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise PlanError(
            "allocate.allocation-not-known",
            f"allocation {name!r} is not known{hint}",
            f"use one of {', '.join(ALLOCATIONS)}",
        )
    return ALLOCATIONS[name]
