"""What the ledger itself promises is kept, whatever a run is told: its classes' presets, and what was signed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from keeping import (
    DELTA,
    FIRST,
    SECOND,
    Attempts,
    capped,
    contents,
    contract,
    exact,
    hold,
    open_book,
    owed,
    passing_book,
    pay,
    signed,
    spent,
    verified,
)
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Event
from lamina.errors import BudgetExceeded
from lamina.ledger.corpus_terms import adopt_policy
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spending import signed_spend
from lamina.ledger.verify.verifier import verify
from lamina.plan.charges import plan_charges

ONE = {"clinical": 1_000_000}  # a noise multiplier of 1: a hundred steps at sigma 10, exactly
SIGNED = "clinical@c=0.5,z=2"  # a hundred steps at sigma 20


# --------------------------------------------------------------------------------------- classes and signed bounds


@pytest.mark.parametrize("bounds", [{}, {"clinical": math.inf}, {"clinical": 100.0}, {"wearable": 0.1}])
def test_the_preset_of_a_class_is_kept_under_looser_bounds_and_none(bounds: dict[str, float]) -> None:
    with passing_book(promised=ONE) as book:
        given: dict[str, Any] = {"charges": [owed(101)], "bounds": bounds}
        before = contents(book)
        for booking in (
            lambda: book.reserve(FIRST, **given),
            lambda: book.charge(FIRST, segment=0, generation=0, nonce=b"n" * 16, **given),
        ):
            with raises_code("spend.budget-exceeded"):
                booking()
            assert contents(book) == before
        assert book.fits(FIRST, charge=owed(500), bound=bounds.get("clinical", math.inf)) == 100
        book.reserve(FIRST, charges=[owed(60)], bounds=bounds)
        assert pay(book, SECOND, 0, owed(40))
        with pytest.raises(BudgetExceeded):
            pay(book, SECOND, 1, owed(1))
        assert pay(book, FIRST, 0, owed(60))
        assert spent(book)[0] == pytest.approx(exact((10, 100)), rel=1e-6)
        assert pay(book, FIRST, 1, owed(500, cls="wearable"))  # which is promised nothing


def test_a_stricter_bound_than_the_preset_is_kept_too() -> None:
    with passing_book(promised=ONE) as book:
        strict = exact((10, 50)) * (1 + 1e-9)
        assert book.fits(FIRST, charge=owed(500), bound=strict) == 50
        with raises_code("spend.budget-exceeded"):
            hold(book, FIRST, owed(51), bound=strict)
        hold(book, FIRST, owed(50), bound=strict)


def test_the_promise_is_at_the_ledgers_own_terms() -> None:
    """The run is priced by another accountant and at another δ; both are asked."""
    with passing_book(promised=ONE) as book:
        loose = owed(101, delta=1e-2, accountant="zcdp")
        with raises_code("spend.budget-exceeded"):
            hold(book, FIRST, loose, bound=1e6)
        strict = owed(99, delta=1e-12, accountant="gaussian")
        with raises_code("spend.budget-exceeded"):
            hold(book, FIRST, strict, bound=exact((10, 100)))
        hold(book, FIRST, loose.times(100), bound=1e6)


def test_a_signed_bound_is_kept_to_what_was_signed(book: SpendLedger) -> None:
    for bound in (None, math.inf, 50.0):
        with raises_code("spend.budget-exceeded"):
            hold(book, FIRST, owed(101, sigma=20.0, cls=SIGNED), bound=bound)
        with raises_code("spend.budget-exceeded"):
            pay(book, FIRST, 0, owed(101, sigma=20.0, cls=SIGNED), bound=bound)
    most = book.fits(FIRST, charge=owed(500, sigma=20.0, cls=SIGNED), bound=50.0)
    assert most == 100
    hold(book, FIRST, owed(1000), owed(most, sigma=20.0, cls=SIGNED))  # the class itself is promised nothing
    assert book.total(SIGNED, delta=DELTA, accountant="gaussian").committed <= signed_spend(2_000_000, DELTA) / 1e9


def test_what_a_class_is_promised_does_not_bind_who_signed() -> None:
    with passing_book(promised=ONE) as book:
        loose = "clinical@c=0.5,z=0.5"
        hold(book, FIRST, owed(399, cls=loose), owed(100))
        with raises_code("spend.budget-exceeded"):
            hold(book, FIRST, owed(401, cls=loose))


# --------------------------------------------------------------------------------------- what is admitted verifies


@pytest.mark.parametrize("z", [310_000, 500_000, 777_777, 1_000_000, 1_234_567])
@pytest.mark.parametrize("who", ["class", "signed"])
def test_what_is_admitted_to_the_last_step_verifies(z: int, who: str) -> None:
    """Raw noise, priced exactly: steps until the book refuses, all of them in one leaf."""
    bound = f"clinical@c=1,z={z / 1e6:.6f}".rstrip("0")
    bound = bound.rstrip(".")
    with passing_book(promised={"clinical": z} if who == "class" else {}) as book:
        accounts = (signed(bound, 1.0),) if who == "signed" else ()
        run = Attempts(book, plan=capped(500, steps=500), accounts=accounts)
        one = plan_charges(run.plan, 0, 1, accounts)
        name = bound if who == "signed" else "clinical"
        (mine,) = (each for each in one if str(each.account) == name)
        most = book.fits(FIRST, charge=mine.times(500), bound=math.inf)
        assert abs(most - 36e12 / z**2) <= 1  # sigma is 6
        with pytest.raises(BudgetExceeded):
            run.charge(0, due=[each.times(most + 1) for each in one])
        assert run.charge(0, due=[each.times(most) for each in one])
        run.record(0, last=most)
        verified(book)
        assert nano_epsilon(book.total(name, delta=DELTA, accountant="gaussian").spent) <= signed_spend(z, DELTA) * (
            1 + 1e-6 * (who == "class")
        )


# --------------------------------------------------------------------------------------- a policy that changes


def test_a_stricter_policy_is_obeyed_at_the_next_charge() -> None:
    with passing_book(promised=ONE) as book:
        hold(book, FIRST, owed(100))
        assert pay(book, FIRST, 0, owed(10))
        assert adopt_policy(book.ledger, contract(promised={"clinical": 2_000_000}))  # 25 steps
        before = contents(book)
        with pytest.raises(BudgetExceeded):
            pay(book, FIRST, 1, owed(10))
        assert contents(book) == before
        assert book.fits(FIRST, charge=owed(90), bound=math.inf) == 15
        hold(book, FIRST, owed(15))
        assert pay(book, FIRST, 1, owed(10))


def test_a_class_that_comes_with_a_policy_is_promised_what_that_says(book: SpendLedger) -> None:
    hold(book, FIRST, owed(200))
    assert adopt_policy(book.ledger, contract(promised=ONE))
    with pytest.raises(BudgetExceeded):
        pay(book, FIRST, 0, owed(10))


# --------------------------------------------------------------------------------------- what was drawn already


def test_what_was_drawn_is_charged_whatever_is_promised_and_bound() -> None:
    with passing_book(promised=ONE) as book:
        hold(book, FIRST, owed(90), bound=4.2)
        assert pay(book, SECOND, 0, owed(95), owed(300, sigma=20.0, cls=SIGNED), bound=0.1, already=True)
        assert spent(book)[0] == pytest.approx(exact((10, 95)))
        assert spent(book)[1] == pytest.approx(exact((10, 185)))
        with pytest.raises(BudgetExceeded):
            pay(book, FIRST, 0, owed(1), bound=4.2)  # out of its own reservation, and priced again all the same
        with pytest.raises(BudgetExceeded):
            pay(book, SECOND, 1, owed(1, sigma=20.0, cls=SIGNED))
        assert book.fits(FIRST, charge=owed(90), bound=math.inf) == 5
        hold(book, FIRST, owed(5))
        assert pay(book, FIRST, 0, owed(5))


def test_an_account_is_priced_once_after_something_was_charged_already(
    book: SpendLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(book, FIRST, owed(50), owed(5, cls="wearable"), bound=5.0)
    assert pay(book, SECOND, 0, owed(1), already=True)
    priced: list[Any] = []
    pooled = find_accountant("gaussian").epsilon

    def counted(events: Any, *, delta: float, name: str) -> float:
        priced.append(name)
        return pooled([Event(sigma=s, q=q, steps=n) for (s, q, _), n in events.items()], delta)

    monkeypatch.setattr("lamina.ledger.spending.pooled_epsilon", counted)
    monkeypatch.setattr("lamina.ledger.spend_ledger.pooled_epsilon", counted)
    for segment in range(3):
        assert pay(book, FIRST, segment, owed(10), owed(1, cls="wearable"), bound=5.0)
    assert len(priced) == 1


def test_what_was_drawn_already_comes_off_the_reservation_and_is_charged_once(book: SpendLedger) -> None:
    hold(book, FIRST, owed(50))
    for _ in range(2):
        assert pay(book, FIRST, 0, owed(20), bound=0.0, already=True)
    assert not pay(book, FIRST, 0, owed(20), already=True, nonce=b"x" * 16)
    assert spent(book) == pytest.approx((exact((10, 20)), exact((10, 50))))


def test_a_promise_that_was_broken_is_told_by_the_auditor() -> None:
    """A ledger that was lost is told what was drawn, also what it would have refused."""
    with passing_book(promised=ONE) as book:
        run = Attempts(book, plan=capped(500, steps=500))
        one = plan_charges(run.plan, 0, 1)
        assert run.charge(0, due=[each.times(40) for each in one], already=True)
        run.record(0, last=40)
        found = verify(book.ledger.store).problem
        assert found is not None and found.index == 1
        assert found.code == "verify.bound-exceeded" and "account clinical has lost ε" in found.reason


def test_a_server_keeps_the_same_promises(server: Any) -> None:
    with open_book(server.url("promises"), promised=ONE).ledger as ledger:
        book = SpendLedger(ledger)
        hold(book, FIRST, owed(60), owed(10, sigma=20.0, cls=SIGNED), label="ward 7")
        with raises_code("spend.budget-exceeded"):
            pay(book, SECOND, 0, owed(41))
        assert pay(book, SECOND, 0, owed(40))
        assert not pay(book, SECOND, 0, owed(40), nonce=b"x" * 16)
        assert pay(book, SECOND, 1, owed(1), already=True)
        with pytest.raises(BudgetExceeded):
            pay(book, FIRST, 0, owed(1))
        assert book.fits(FIRST, charge=owed(60), bound=math.inf) == 59
        book.finish(FIRST)
        assert spent(book) == pytest.approx((exact((10, 41)),) * 2)
        assert book.labels() == {FIRST: "ward 7", SECOND: ""}
        assert [(str(account), limit.delta, limit.accountant) for account, limit in book.accounts()] == [
            ("clinical", DELTA, "gaussian"),
            (SIGNED, DELTA, "gaussian"),
        ]
