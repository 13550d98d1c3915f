"""Asking before each step whether it may be taken."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.account import Filter
from lamina.errors import BudgetExceeded, PlanError
from lamina.plan.step import StepPlan


class Budget:
    """The steps that the plan priced, and the filters that a caller adds to them.

    Charged means spent: a step that fails after it was charged is not given back.
    """

    def __init__(self, plan: StepPlan, filters: Mapping[str, Filter], taken: int = 0) -> None:
        if not 0 <= taken <= plan.steps:
            raise PlanError(
                f"taken is {taken}, the plan has {plan.steps} steps", "say how many were taken before"
            )
        self.plan = plan
        self.taken = taken
        self._filters = []
        for name, filter_ in filters.items():
            k = plan.index(name)
            if plan.classes[k].public:
                raise PlanError(
                    f"class '{name}' is public and has no budget to filter", "leave it out of filters"
                )
            self._filters.append((name, filter_, plan.sigma(k), plan.classes[k].sampling_rate))

    def charge(self) -> int:
        """Take one step's price from every class, or refuse and take nothing. Returns the step's number."""
        if self.taken >= self.plan.steps:
            raise BudgetExceeded(
                f"the plan was priced for {self.plan.steps} steps, and all are taken",
                "make a plan with more steps: its noise, or its epsilon, will be larger",
            )
        for name, filter_, sigma, q in self._filters:
            if not filter_.admits(sigma, q):
                raise BudgetExceeded(
                    f"the budget of class '{name}' does not allow step {self.taken + 1} "
                    f"at sigma {sigma:.4g}, q {q:.4g}",
                    "stop here and release the model as it is",
                )
        for _, filter_, sigma, q in self._filters:
            filter_.charge(sigma, q)
        self.taken += 1
        return self.taken - 1
