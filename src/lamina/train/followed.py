"""A budget that is followed: sigma is chosen on the way, under a filter at one Rényi order.

Its whole price is booked when the run begins, under a segment of its own. What the attempts take of it is written in
the journal, in declared steps, and `room` is the filter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

from lamina.account import order_of
from lamina.account.renyi import divergence
from lamina.ledger.store.base import WHOLE
from lamina.plan import StepPlan
from lamina.train.book.account import Account
from lamina.train.book.charge import Charge, bound_charges, charges
from lamina.train.store.records import Open


def nonce(plan: StepPlan, life: str) -> bytes:
    """Names the booking: one for a plan in a life of the run, so that a copy, or a state put back, has its own."""
    return hashlib.sha256(plan.digest() + life.encode()).digest()[:16]


def parts(plan: StepPlan, accounts: Sequence[Account]) -> dict[int, tuple[Charge, ...]]:
    """What is booked together, by segment: all classes, and every signed bound by itself, since bounds come and go."""
    found = {WHOLE: charges(plan, 0, plan.steps)}
    for each in accounts:
        number = int.from_bytes(hashlib.sha256(each.name.encode()).digest()[:8], "big") >> 3
        found[WHOLE + 1 + number] = bound_charges(plan, 0, plan.steps, [each])
    return found


def belongs(opened: Open) -> bool:
    """Whether an attempt belongs to such a budget: its charges count in declared steps of it."""
    return any(order_of(charge.accountant) is not None for charge in opened.charges)


def booked(opened: Open) -> tuple[Charge, ...]:
    """What an attempt adds to the book: nothing where the whole budget is there already."""
    return () if belongs(opened) else opened.charges


def room(plan: StepPlan, attempts: Sequence[Open], due: Sequence[Charge]) -> bool:
    """Whether the budget of `plan` has room for `due`, after all that was charged under the same plan.

    The filter itself, in exact arithmetic: at the plan's one order, prices add.
    """
    order = order_of(plan.accountant)
    assert order is not None
    whole = charges(plan, 0, plan.steps)
    taken = [c for opened in attempts if opened.plan == plan.digest() for c in opened.charges]

    def price(found: Sequence[Charge], name: str) -> Fraction:
        mine = (c for c in found if c.cls == name)
        return sum((c.steps * Fraction(divergence(c.q, c.sigma, order)) for c in mine), Fraction())

    return all(price([*taken, *due], name) <= price(whole, name) for name in {c.cls for c in whole})
