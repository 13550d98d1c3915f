"""Exhausted bounds: the largest factor of the list that what was charged leaves room for, and never more than was signed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from keeping import DELTA, FIRST, SECOND, THIRD, Attempts, epochs, exact, passing_book, plan, signed, verified
from refusals import raises_code

from lamina.account.charges import Account
from lamina.account.schedule import RDP_ORDERS
from lamina.ledger.attempts import Attempt
from lamina.ledger.records import EpochAccount, SegmentOutcome
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.store.rows import RunHold
from lamina.plan.charges import plan_charges, remaining_accounts
from lamina.plan.signed_bounds import REMAINING_FACTORS
from lamina.plan.step_plan import StepPlan

FACTORS = REMAINING_FACTORS["scale"]
LEFT_OUT = REMAINING_FACTORS["leave-out"]


def opened(
    run: Attempts, index: int, generation: int = 0, factors: tuple[float, ...] = FACTORS, **other: Any
) -> dict[str, float]:
    """Charge a segment as a run does; the exhausted bounds and their factors."""
    first, last = 10 * index, 10 * index + 10
    found = run.book.exhausted(run.plan, first, last, run.accounts, factors)
    due = plan_charges(run.plan, first, last, remaining_accounts(run.accounts, found))
    scales = {each.name: each.scale for each in run.accounts}
    assert run.charge(index, generation, due, scales=scales, factors=found, **other)
    return found


def epsilon(charges: Counter[tuple[float, float]], accountant: str) -> float:
    """By an accountant of its own: the exact Gaussian curve without sampling, or RDP over the same orders."""
    if accountant == "gaussian":
        return exact(*((sigma, steps) for (sigma, _), steps in charges.items()))
    found = RdpAccountant(orders=RDP_ORDERS)
    for (sigma, q), steps in charges.items():
        found.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
    return float(found.get_epsilon(DELTA))


def charged(book: SpendLedger) -> dict[tuple[str, int, int], Counter[tuple[float, float]]]:
    """By bound, what the leaves say."""
    found: dict[tuple[str, int, int], Counter[tuple[float, float]]] = {}
    for epoch in epochs(book.ledger):
        for account in epoch.accounts:
            events = found.setdefault(account.bound, Counter())
            for each in account.charges:
                events[each.sigma, each.q] += each.steps
    return found


@pytest.mark.parametrize(
    ("seed", "accountant"),
    [*((seed, "gaussian") for seed in range(30)), pytest.param(0, "rdp", marks=pytest.mark.slow)],
)
def test_whatever_runs_do_nobody_loses_more_than_was_signed(seed: int, accountant: str) -> None:
    """Three runs beside each other, killed, redone and lost, with several bounds in two classes: by another accountant."""
    dice = random.Random(seed)
    factors = dice.choice((FACTORS, LEFT_OUT))
    multipliers = [("clinical", z / 10) for z in dice.sample(range(12, 60), 3)] + [
        ("wearable", dice.randint(3, 16) / 2)
    ]
    accounts = [signed(f"{cls}@c=9,z={z:g}", dice.choice((1.0, 0.7))) for cls, z in multipliers]
    noise = {"gaussian": (5.0, 8.0), "rdp": (0.8, 1.2)}[accountant]
    seen: Counter[float] = Counter()
    with passing_book(accountant=accountant) as book:
        runs = []
        for run in (FIRST, SECOND, THIRD):
            mine = tuple(each for each in accounts if dice.random() < 0.8)
            of = plan(steps=60, sigma=dice.choice(noise), accountant=accountant)
            runs.append((Attempts(book, run, of, mine), [0, 0, 0]))
        for _ in range(24):
            run, at = dice.choice(runs)
            index, generation, read = at
            if index == 6:
                continue
            if not read:
                at[2] = book.ledger.size
                seen.update(opened(run, index, generation, factors).values())
            elif dice.random() < 0.7:
                run.record(index, generation, eligibility=read)
                at[:] = [index + 1, 0, 0]
            else:
                run.record(index, generation, eligibility=read, outcome=SegmentOutcome.ABANDONED)
                at[1:] = [generation + 1, 0]
        for each, (_, _, read) in runs:
            if read:
                book.abandon_run(each.run)
        verified(book)
        for bound, events in charged(book).items():
            if bound[2]:
                assert epsilon(events, accountant) <= exact((bound[2] / 1e6, 1)) * (1 + 1e-9), bound
        recorded = Counter(each.factor for epoch in epochs(book.ledger) for each in epoch.accounts if each.factor < 1)
    assert set(recorded) <= set(factors) and recorded == seen


def test_the_largest_factor_that_fits_is_taken_and_no_larger_one_would() -> None:
    """Alone with its bound, a run goes down the list, and each factor is the largest by another accountant."""
    tight, of = signed("clinical@c=9,z=2", 1.0), plan(steps=400, sigma=7.5, accountant="gaussian")
    most = exact((2.0, 1))
    with passing_book(accountant="gaussian") as book:
        run, found = Attempts(book, plan=of, accounts=(tight,)), []
        for index in range(40):
            before = charged(book).get(Account.parse(tight.name), Counter())
            factor = opened(run, index).get(tight.name, 1.0)
            run.record(index)
            found.append(factor)
            for larger in FACTORS:
                more = Counter(dict(before))
                if larger:
                    more[of.sigma("clinical", larger), 0.02] += 10
                fits = epsilon(more, "gaussian") <= most if larger else True
                assert fits == (larger <= factor)
        verified(book)
    assert sorted(set(found), reverse=True) == list(FACTORS)
    assert found == sorted(found, reverse=True)


def used_up(book: SpendLedger, of: StepPlan) -> Attempts:
    """A run whose bound is exhausted after its first segment."""
    run = Attempts(book, plan=of, accounts=(signed("clinical@c=9,z=4", 1.0),))
    assert opened(run, 0) == {}
    return run


def test_an_open_attempt_counts_and_a_reservation_does_not() -> None:
    of = plan(steps=60, sigma=14.0, accountant="gaussian")
    with passing_book() as book:
        first = used_up(book, of)  # killed: it is charged, and no leaf says so yet
        second = Attempts(book, SECOND, of, first.accounts)
        name = first.accounts[0].name
        assert opened(second, 0, factors=LEFT_OUT) == {name: 0.0}
        read = book.ledger.size
        second.record(0)
        first.record(0, outcome=SegmentOutcome.ABANDONED, eligibility=read)
        verified(book)  # it was open then: its leaf says how many leaves it had read
    with passing_book() as book:
        first = Attempts(book, plan=of, accounts=first.accounts)
        book.reserve(FIRST, charges=plan_charges(of, 0, 10, first.accounts), bounds={})
        assert book.exhausted(of, 0, 10, first.accounts, FACTORS) == {}
        with raises_code("spend.budget-exceeded"):  # as now: what another run holds is not spent
            opened(Attempts(book, SECOND, of, first.accounts), 0)


def test_while_an_attempt_is_open_the_ledger_verifies_and_is_not_trusted() -> None:
    from lamina.ledger.verify.verifier import verify

    of = plan(steps=60, sigma=14.0, accountant="gaussian")
    with passing_book() as book:
        first = used_up(book, of)
        second = Attempts(book, SECOND, of, first.accounts)
        opened(second, 0, factors=LEFT_OUT)
        second.record(0)
        found = verify(book.ledger.store)
        assert found.verified and any("no leaf shows" in note for note in found.notes)


def test_a_lost_run_is_recorded_with_its_factors() -> None:
    of = plan(steps=60, sigma=14.0, accountant="gaussian")
    with passing_book() as book:
        run = used_up(book, of)
        run.record(0)
        found = opened(run, 1)
        assert found and book.abandon_run(FIRST) == 1
        (last,) = (each for each in epochs(book.ledger)[-1].accounts if each.noise_multiplier)
        assert last.factor == found["clinical@c=9,z=4"] and last.scale == 1.0
        verified(book)


def test_a_ledger_that_lacks_the_charges_is_charged_for_more_than_was_taken(tmp_path: Any) -> None:
    """Put back from an older copy, it does not show that the bound was exhausted; and nobody has to believe it."""
    of, name = plan(steps=60, sigma=14.0, accountant="gaussian"), "clinical@c=9,z=4"
    with passing_book() as book:
        run = Attempts(book, plan=of, accounts=(signed(name, 1.0),))
        due = plan_charges(of, 0, 10)
        assert run.charge(0, 0, due, scales={name: 1.0}, factors={name: 0.0})  # by charges that this ledger has not
        run.record(0)
        (told,) = (each for each in epochs(book.ledger)[0].accounts if each.noise_multiplier)
        assert told.factor == 1.0 and [each.steps for each in told.charges] == [10]
        verified(book)


def test_what_such_a_ledger_records_is_weighed_against_what_others_reserved() -> None:
    """The leaf charges more than was held, so that a reservation which fitted before may fit no longer."""
    of, name = plan(steps=60, sigma=14.0, accountant="gaussian"), "clinical@c=9,z=4"
    with passing_book() as book:
        other = Attempts(book, SECOND, of, (signed(name, 1.0),))
        book.reserve(SECOND, charges=plan_charges(of, 0, 10, other.accounts), bounds={})
        run = Attempts(book, plan=of, accounts=other.accounts)
        assert run.charge(0, 0, plan_charges(of, 0, 10), scales={name: 1.0}, factors={name: 0.0})
        run.record(0)
        with raises_code("spend.budget-exceeded"):
            other.charge(0)
        verified(book)
        assert epsilon(charged(book)[Account.parse(name)], "gaussian") <= exact((4.0, 1)) * (1 + 1e-9)


def test_open_charges_keep_their_factors() -> None:
    made = Attempt(scales={"clinical@c=9,z=4": 0.5}, plan=b"p" * 32, factors={"clinical@c=9,z=4": 0.25})
    row = RunHold(b"r" * 16, *made.key, None, made.encode())
    assert Attempt.decode(row) == made
    assert Attempt.decode(row._replace(body=replace(made, factors={}).encode())).factors == {}


def test_what_an_account_says_of_its_factor() -> None:
    made = EpochAccount(cls="a", clip_norm=1, noise_multiplier=1, scale=0.8, charges=(), spend=0, exhausted=0.25)
    assert (made.scaled, made.next_factor) == (0.2, 0.5)
    assert replace(made, exhausted=0.0).next_factor == 1.0 and replace(made, exhausted=None).next_factor == 1.0
    assert set(LEFT_OUT) <= set(FACTORS) and REMAINING_FACTORS["refuse"] == ()
    for factor in FACTORS[1:]:  # so `next_factor` finds the next larger of the list
        assert replace(made, exhausted=factor).next_factor in FACTORS
