"""The charges of a plan: what its steps take from classes and from signed bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lamina import validate
from lamina.account.charges import Account, Charge, invalid_account
from lamina.account.gaussian_rdp import step_rdp
from lamina.account.schedule import Event, rdp_order_of
from lamina.errors import RunError
from lamina.plan.rules import FollowBudget
from lamina.plan.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedAccount:
    """The account of all contributions of class `cls` that signed the same bound.

    name     CLASS@c=…,z=…, the signed bound; the same in every run
    scale    in (0, 1]: factor of the class's clip norms in this run; `plan.epsilon(cls, scale=scale)` is their loss
    epsilon  their largest loss over all runs: ε(z) at the δ of the class
    """

    name: str
    cls: str
    scale: float
    epsilon: float

    def __post_init__(self) -> None:
        account = Account.parse(self.name)
        if account.cls != self.cls or not account.clip_micro or not account.noise_micro:
            raise invalid_account(self.name)
        remedy = "resolve the signed bound against the plan: lamina.plan.signed_bounds.scale_for"
        check = functools.partial(validate.number, RunError, "spend.account-out-of-range", above=0, remedy=remedy)
        object.__setattr__(self, "scale", check(most=1, scale=self.scale))
        object.__setattr__(self, "epsilon", check(epsilon=self.epsilon))


def check_accounts(plan: StepPlan, accounts: Sequence[SignedAccount]) -> tuple[SignedAccount, ...]:
    """The accounts, if each is of a private class of the plan and given once."""
    private, seen = {entry.name for entry in plan.classes if not entry.public}, set()
    for each in accounts:
        if each.cls not in private:
            problem = f"account {each.name!r} is of class {each.cls!r}, which is public or not in the plan"
            raise RunError("spend.account-class-not-private", problem, "leave it out")
        if each.name in seen:
            raise RunError("spend.account-twice", f"account {each.name!r} is given twice", "give every bound once")
        seen.add(each.name)
    return tuple(accounts)


def plan_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount] = ()) -> tuple[Charge, ...]:
    """What the steps first … last-1 of a plan take from its private classes and the signed bounds among them."""
    classes = (
        _charge_of_event(plan, k, event)
        for k in range(len(plan.classes))
        for event in plan.schedule_between(k, first, last)
    )
    return (*classes, *bound_charges(plan, first, last, accounts))


def remaining_accounts(accounts: Sequence[SignedAccount], factors: Mapping[str, float]) -> tuple[SignedAccount, ...]:
    """The accounts with their scales multiplied by the factors of those that are exhausted; without who is left out."""
    pairs = [(each, factors.get(each.name, 1.0)) for each in accounts]
    return tuple(replace(each, scale=each.scale * factor) for each, factor in pairs if factor)


def bound_charges(plan: StepPlan, first: int, last: int, accounts: Sequence[SignedAccount]) -> tuple[Charge, ...]:
    """What these steps take from signed bounds, each at the sigma that follows from its scale."""
    return tuple(
        replace(_charge_of_event(plan, plan.index(each.cls), event), account=Account.parse(each.name))
        for each in accounts
        for event in plan.schedule_between(each.cls, first, last, each.scale)
    )


def follows_budget(plan: StepPlan) -> bool:
    """Whether the noise is chosen during the run."""
    return plan.rule(FollowBudget) is not None


def charges_in_declared_steps(plan: StepPlan, first: int, last: int, factor: float) -> tuple[Charge, ...]:
    """What these steps take at `factor` times the declared noise, counted in steps at the declared noise.

    At the one Rényi order of the plan, prices add: n steps at another sigma cost as much as
    ⌈n·RDP(factor·sigma)/RDP(sigma)⌉ declared ones. A run stays within its budget if these never exceed T, however
    the factors were chosen: the filter of docs/theory.md, in whole steps.
    """
    order = rdp_order_of(plan.accountant)
    assert order is not None, plan.accountant  # a plan whose noise follows its budget has one
    found = []
    for k in range(len(plan.classes)):
        steps, *choices = plan.schedule_between(k, first, last) or (None,)
        if steps is not None:
            declared = Fraction(step_rdp(steps.q, steps.sigma, order))
            units = math.ceil(steps.steps * Fraction(step_rdp(steps.q, steps.sigma * factor, order)) / declared)
            found += [_charge_of_event(plan, k, event) for event in (replace(steps, steps=units), *choices)]
    return tuple(found)


def _charge_of_event(plan: StepPlan, k: int, event: Event) -> Charge:
    entry, event = plan.classes[k], replace(event, order=rdp_order_of(plan.accountant))
    return Charge(account=Account(entry.name), event=event, delta=entry.delta, accountant=plan.accountant)
