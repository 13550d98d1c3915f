"""Whoever keeps a ledger cannot use a budget more often than it was paid for: an auditor sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from keeping import FIRST, Attempts, following, passing_book

from lamina.account.charges import Account
from lamina.ledger.records import Epoch, EpochAccount, NoiseChange
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spending import Spending, whole_plan_charges
from lamina.ledger.verify.verifier import verify
from lamina.plan.rules import FollowBudget, FollowQuantile
from lamina.plan.step_plan import Clipping, StepPlan

CLINICAL, WEARABLE = ("clinical", 0, 0), ("wearable", 0, 0)
SIGNED, OTHER = ("clinical", 9_000_000, 2_250_000), ("wearable", 9_000_000, 2_250_000)
Paid = Callable[[int], list[tuple[Account, float, bool]]]


def written(
    book: SpendLedger,
    plan: StepPlan,
    copies: int,
    paid: Paid,
    variance: Sequence[float] = (),
    later: float | None = None,
) -> None:
    """A whole run, again and again, by who has the key: spends and states are right for what he says he charged.

    `paid(copy)`: accounts, their scales, and whether each pays for the copy. `later` times the noise variance is
    applied from the third step of every segment on.
    """
    spending = Spending(book.ledger.header)
    for copy, index in product(range(copies), range(4)):
        accounts = []
        for bound, scale, pays in paid(copy):
            charged = whole_plan_charges(plan, bound[0], scale) if pays and not index else ()
            spending.charge(bound, charged)
            cls, clip, noise = bound
            spend = spending.spend(bound)
            accounts.append(
                EpochAccount(cls=cls, clip_norm=clip, noise_multiplier=noise, scale=scale, charges=charged, spend=spend)
            )
        epoch = Epoch(
            run=bytes.fromhex(FIRST),
            segments=(Attempts(book).segment(index, copy, after=(copy or None) if index else None),),
            plan=plan.digest(),
            variance=tuple(variance or [s * s for s in plan.noise]),
            accounts=tuple(accounts),
            state=spending.state(),
            changes=None if later is None else (_change(plan, 10 * index + 2, later),),
        )
        book.ledger.append([epoch], [plan.to_cbor()])


def _change(plan: StepPlan, step: int, factor: float) -> NoiseChange:
    return NoiseChange(step=step, variance=tuple(factor * s * s for s in plan.noise))


def every(copy: int) -> list[tuple[Account, float, bool]]:
    return [(CLINICAL, 1.0, True), (WEARABLE, 1.0, True)]


def once(copy: int) -> list[tuple[Account, float, bool]]:
    return [(CLINICAL, 1.0, not copy), (WEARABLE, 1.0, not copy)]


def bounds_alone(copy: int) -> list[tuple[Account, float, bool]]:
    return [(SIGNED, 0.5, not copy), (OTHER, 0.5, not copy)]


def bound_once(copy: int) -> list[tuple[Account, float, bool]]:
    return [(CLINICAL, 1.0, True), (SIGNED, 0.5, not copy), (WEARABLE, 1.0, True)]


def moving_clip_norms() -> StepPlan:
    return replace(following(), rules=(FollowBudget(order=16), FollowQuantile(noise=50.0)))


@pytest.fixture
def book() -> Iterator[SpendLedger]:
    with passing_book(accountant="rdp") as made:
        yield made


def test_who_pays_for_every_copy(book: SpendLedger) -> None:
    written(book, following(), 3, every)
    assert verify(book.ledger.store).problem is None


@pytest.mark.parametrize(
    ("plan", "paid", "factor", "code", "figures"),
    [
        (following(), once, 1.0, "verify.budget-overdrawn", "account clinical used 50 steps of its budget, 40 "),
        (following(clipping=Clipping.JOINT), once, 1.0, "verify.budget-overdrawn", "used 50 steps of its budget, 40 "),
        (moving_clip_norms(), once, 1.0, "verify.budget-overdrawn", "40 are charged"),
        (following(), once, 1e6, "verify.noise-above-plan", "1.5 times"),
        (following(), bounds_alone, 1.0, "verify.trained-class-not-charged", "clinical"),
        (following(), bound_once, 1.0, "verify.budget-overdrawn", "clinical@c=9,z=2.25 used 50 "),
    ],
    ids=["one budget", "joint", "thresholds unknown", "noise overstated", "bounds alone", "a bound pays once"],
)
def test_who_does_not(book: SpendLedger, plan: StepPlan, paid: Paid, factor: float, code: str, figures: str) -> None:
    written(book, plan, 10, paid, [factor * s * s for s in plan.noise])
    problem = verify(book.ledger.store).problem
    assert problem is not None and problem.code == code and figures in problem.reason, problem


@pytest.mark.parametrize(
    ("later", "code"), [(None, None), (1.0, None), (0.81, "verify.budget-overdrawn"), (0.36, "verify.noise-below-plan")]
)
@pytest.mark.parametrize("form", [Clipping.BOX, Clipping.JOINT])
def test_noise_that_falls_within_a_segment_counts(
    book: SpendLedger, form: Clipping, later: float | None, code: str | None
) -> None:
    """One run, paid once, declares its noise; from the third step of each segment it has less."""
    written(book, following(clipping=form), 1, every, later=later)
    problem = verify(book.ledger.store).problem
    assert (problem and problem.code) == code
