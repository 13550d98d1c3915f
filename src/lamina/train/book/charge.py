"""`Charge`: what a stretch of steps takes from a class, before it is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lamina.account import Event, order_of
from lamina.account.renyi import divergence
from lamina.errors import RunError
from lamina.plan import FollowBudget, StepPlan
from lamina.train.book.account import Account


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """`steps` Poisson-subsampled Gaussian events with multiplier `sigma` and rate `q`, owed by class `cls`.

    `cls` may also name a signed bound (account.py), which is booked beside its class.

    `delta` and `accountant` say at which δ, and by whom, the run that it belongs to is priced.
    """

    cls: str
    sigma: float
    q: float
    steps: int
    delta: float
    accountant: str

    @property
    def event(self) -> Event:
        return Event(sigma=self.sigma, q=self.q, steps=self.steps)

    def times(self, steps: int) -> Charge:
        """The same for another number of steps."""
        return replace(self, steps=steps)


def charges(plan: StepPlan, first: int, last: int, accounts: Sequence[Account] = ()) -> tuple[Charge, ...]:
    """What the steps first … last-1 of a plan take: per class that is owed noise, the steps, and any choices.

    And from the signed bounds among them.
    """
    classes = [
        _charge(plan, k, event) for k in range(len(plan.classes)) for event in plan.stretch(k, first, last)
    ]
    return (*classes, *bound_charges(plan, first, last, accounts))


def bound_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[Account]) -> tuple[Charge, ...]:
    """What they take from signed bounds, each at the sigma that its scale gives it."""
    return tuple(
        replace(_charge(plan, plan.index(each.cls), event), cls=each.name)
        for each in accounts
        for event in plan.stretch(each.cls, first, last, each.scale)
    )


def follows_budget(plan: StepPlan) -> bool:
    """Whether sigma is chosen on the way."""
    return plan.rule(FollowBudget) is not None


def in_units(plan: StepPlan, first: int, last: int, factor: float) -> tuple[Charge, ...]:
    """What these steps take at `factor` times the declared noise, counted in steps as they were declared.

    At the one Rényi order of the plan, prices add: n steps at another sigma cost as much as
    ⌈n·RDP(factor·sigma)/RDP(sigma)⌉ declared ones. A run stays within its budget if these never exceed T, however
    the factors were chosen on the way: the filter of docs/theory.md, in whole steps.
    """
    order = order_of(plan.accountant)
    if order is None:
        raise RunError(
            "spend.accountant-no-order",
            f"accountant '{plan.accountant}' has no order",
            "noise that follows the budget needs one",
        )
    found = []
    for k in range(len(plan.classes)):
        steps, *choices = plan.stretch(k, first, last) or (None,)
        if steps is not None:
            declared = Fraction(divergence(steps.q, steps.sigma, order))
            units = math.ceil(
                steps.steps * Fraction(divergence(steps.q, steps.sigma * factor, order)) / declared
            )
            found += [_charge(plan, k, replace(steps, steps=units)), *(_charge(plan, k, e) for e in choices)]
    return tuple(found)


def _charge(plan: StepPlan, k: int, event: Event) -> Charge:
    return Charge(
        cls=plan.classes[k].name,
        sigma=event.sigma,
        q=event.q,
        steps=event.steps,
        delta=plan.classes[k].delta,
        accountant=plan.accountant,
    )
