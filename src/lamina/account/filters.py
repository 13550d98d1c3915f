"""Privacy filters: budgets that may be spent adaptively, asked before every step.

A filter prices one step, adds prices exactly, and refuses a step that would pass its budget. Then, whatever
rule chose sigma_t and q_t from earlier (noised) outputs, everything together stays within the budget:

    GaussianFilter   price sigma^-2 (sampling is not credited), budget μ²: together μ-GDP
    RenyiFilter      price RDP(α; q, sigma) at ONE order α fixed in advance: together (α, budget)-RDP
                     (Feldman and Zrnic 2021). Choosing α afterwards is not valid.

Prices are counted in whole units of budget/2^60, rounded up per step. Sums of integers do not depend on the
order, so a schedule that was planned for the budget is admitted to its last step, and the state is a few
plain numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import ClassVar, Self

import numpy as np

from lamina import validate
from lamina.account import gaussian_rdp
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import RDP_ORDERS, Event, check_delta, check_order, grouped
from lamina.errors import AccountingError, BudgetExceeded

_BUDGET_UNITS = 2**60  # the whole budget; below 2^63, so that the state fits into CBOR integers


class PrivacyFilter(ABC):
    """What the engine asks before each step: a budget counted in integers. Subclasses say what a step costs."""

    kind: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ("budget",)

    def __init__(self, *, budget: float, limit: int = _BUDGET_UNITS, spent: int = 0) -> None:
        self.budget = validate.positive(AccountingError, "account.budget-not-positive", budget=budget)
        if not 0 <= spent <= limit or limit < _BUDGET_UNITS:
            raise AccountingError("account.filter-state-damaged", f"{self.kind} filter has spent {spent} of {limit}")
        self._limit, self._spent = limit, spent

    @abstractmethod
    def _price(self, event: Event) -> float:
        """The cost of one step, rounded up."""

    def _units(self, event: Event) -> int | None:
        """The cost of all steps of the event in whole units, or None if it is infinite."""
        if event.free:
            return 0
        price = self._price(event)
        if not math.isfinite(price):
            return None
        return event.steps * math.ceil(Fraction(price) * _BUDGET_UNITS / Fraction(self.budget))

    def _allow(self, schedule: Iterable[Event]) -> None:
        """Lifts the limit by the rounding (1e-18 per step) of the schedule that the budget was made for."""
        self._limit = max(self._limit, sum(self._units(event) or 0 for event in grouped(schedule)))

    def admits(self, sigma: float, q: float, steps: int = 1) -> bool:
        """Whether `steps` steps with these parameters still fit. Nothing is spent."""
        units = self._units(Event(sigma=sigma, q=q, steps=steps))
        return units is not None and self._spent + units <= self._limit

    def charge(self, sigma: float, q: float, steps: int = 1) -> None:
        """Spends `steps` steps; raises BudgetExceeded, and spends nothing, if they do not fit."""
        units = self._units(Event(sigma=sigma, q=q, steps=steps))
        if units is None or self._spent + units > self._limit:
            raise BudgetExceeded(
                "account.budget-exceeded",
                f"{steps} step(s) at sigma={sigma:.6g}, q={q:.6g} exceed the remaining {self.remaining:.6g}"
                f" of a {self.kind} budget of {self.budget:.6g}",
                "stop here and keep the model, or take noisier steps",
            )
        self._spent += units

    @property
    def ceiling(self) -> float:
        """The cost that can never be passed: the budget, rounding included."""
        if self._limit == _BUDGET_UNITS:
            return self.budget
        return math.nextafter(self.budget * (self._limit / _BUDGET_UNITS), math.inf)

    @property
    def remaining(self) -> float:
        """What is left, in the units of the price."""
        return self.budget * ((self._limit - self._spent) / _BUDGET_UNITS)

    def to_state(self) -> dict[str, str | int | float]:
        """Plain numbers for a checkpoint; `from_state` restores the filter exactly."""
        own = {name: getattr(self, name) for name in self.parameters}
        return {"kind": self.kind, **own, "limit": self._limit, "spent": self._spent}

    @classmethod
    def from_state(cls, state: Mapping[str, str | int | float]) -> Self:
        """The filter that `to_state` described."""
        if state.get("kind") != cls.kind or set(state) != {"kind", "limit", "spent", *cls.parameters}:
            raise AccountingError(
                "account.filter-state-other", f"{dict(state)!r} is not the state of a {cls.kind} filter"
            )
        limit, spent = state["limit"], state["spent"]
        if not isinstance(limit, int) or not isinstance(spent, int):
            raise AccountingError("account.filter-state-damaged", "filter state must count in integers, found floats")
        return cls(**{name: float(state[name]) for name in cls.parameters}, limit=limit, spent=spent)


class GaussianFilter(PrivacyFilter):
    """Σ steps/sigma² ≤ budget = μ². No amplification: q counts only as zero or not."""

    kind = "gaussian"

    @classmethod
    def for_target(cls, epsilon: float, *, delta: float) -> Self:
        """The largest budget whose exact ε at `delta` is at most `epsilon`."""
        return cls(budget=gaussian_rdp.mu_of_epsilon(epsilon, check_delta(delta)) ** 2 * (1 - 1e-15))

    @classmethod
    def for_schedule(cls, schedule: Iterable[Event]) -> Self:
        """The budget of a planned schedule: exactly these steps fit."""
        parts = grouped(schedule)
        made = cls(budget=gaussian_rdp.squared_mu(parts))
        made._allow(parts)
        return made

    def _price(self, event: Event) -> float:
        return math.nextafter(event.mu * event.mu, math.inf)

    def epsilon(self, delta: float) -> float:
        """The ε that holds whatever is charged: known before the first step."""
        return gaussian_rdp.epsilon_of_mu(math.sqrt(self.ceiling) * (1 + 1e-15), check_delta(delta))


class RenyiFilter(PrivacyFilter):
    """Σ RDP(order) ≤ budget at one order; credits sampling. Add/remove adjacency."""

    kind = "renyi"
    parameters = ("budget", "order")

    def __init__(self, *, order: float, budget: float, limit: int = _BUDGET_UNITS, spent: int = 0) -> None:
        self.order = check_order(order)
        super().__init__(budget=budget, limit=limit, spent=spent)

    @classmethod
    def for_target(cls, epsilon: float, *, delta: float, order: float) -> Self:
        """The budget that converts to `epsilon` at `delta`."""
        validate.positive(AccountingError, "account.delta-zero", remedy="allow e.g. 1e-5", delta=check_delta(delta))
        budget = float(epsilon - gaussian_rdp.order_offset(check_order(order), delta))
        if budget <= 0:
            problem = f"order {order:g} cannot prove epsilon {epsilon:g} at delta {delta:g}"
            raise AccountingError("account.order-too-small", problem, "choose a larger order")
        return cls(order=order, budget=budget * (1 - 1e-12))

    @classmethod
    def for_schedule(cls, schedule: Iterable[Event], *, order: float) -> Self:
        """The budget of a planned schedule at `order`: exactly these steps fit."""
        parts = grouped(schedule)
        made = cls(order=order, budget=gaussian_rdp.rdp_at_order(parts, order))
        made._allow(parts)
        return made

    def _price(self, event: Event) -> float:
        return step_rdp(event.q, event.sigma, self.order)

    def epsilon(self, delta: float) -> float:
        """The ε that holds whatever is charged: known before the first step."""
        if check_delta(delta) == 0:
            return math.inf
        return float(max(0.0, self.ceiling + gaussian_rdp.order_offset(self.order, delta)))


def choose_order(schedule: Iterable[Event], *, delta: float) -> float:
    """The order at which the *intended* schedule converts best. It is then fixed for the whole run."""
    offsets = gaussian_rdp.order_offset(np.asarray(RDP_ORDERS), check_delta(delta))
    return RDP_ORDERS[int(np.argmin(gaussian_rdp.rdp_curve(grouped(schedule)) + offsets))]
