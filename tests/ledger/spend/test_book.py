"""The book: the promise over all runs, against oracles that know nothing of a ledger."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keeping import DELTA, FIRST, SECOND, THIRD, contents, exact, hold, open_book, owed, passing_book, pay, spent
from refusals import raises_code

from lamina import cbor
from lamina.account.accountants import calibrate, find_accountant
from lamina.account.charges import Account, stored_charge
from lamina.account.schedule import Event
from lamina.errors import AccountingError, BudgetExceeded, RunError
from lamina.ledger.attempts import Attempt
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spending import Limit
from lamina.ledger.store.rows import RESERVATION_SEGMENT, RunHold
from lamina.plan.table import epsilon_text


def holds(book: SpendLedger) -> dict[tuple[str, int, int], Attempt]:
    """What runs hold, as the store has it."""
    with book.ledger.store.read() as rows:
        return {(h.run.hex(), h.segment, h.generation): Attempt.decode(h) for h in rows.holds()}


def again(book: SpendLedger) -> SpendLedger:
    """The same ledger, as another process would see it."""
    return open_book(book.path)


# --------------------------------------------------------------------------------------- the total


def test_runs_are_priced_together_and_not_added_up(book: SpendLedger) -> None:
    pay(book, FIRST, 0, owed(100, sigma=30))
    pay(book, SECOND, 0, owed(50, sigma=20))
    together = exact((30, 100), (20, 50))
    assert spent(book) == pytest.approx((together, together), rel=1e-6)
    assert together < exact((30, 100)) + exact((20, 50))
    assert book.spent(FIRST, "clinical", delta=DELTA, accountant="gaussian") == pytest.approx(exact((30, 100)))
    assert book.spent(SECOND, "clinical", delta=1e-3, accountant="gaussian") == pytest.approx(
        exact((20, 50), delta=1e-3)
    )


def test_the_price_is_that_of_an_accountant_asked_for_the_whole_schedule(book: SpendLedger) -> None:
    for segment, steps in enumerate((17, 400, 83)):
        pay(book, FIRST, segment, owed(steps, sigma=1.3, q=0.01, accountant="pld"))
    pay(book, SECOND, 0, owed(100, sigma=2.0, q=0.02, accountant="rdp", delta=1e-7))
    schedule = [Event(sigma=1.3, q=0.01, steps=500), Event(sigma=2.0, q=0.02, steps=100)]
    for name in ("pld", "rdp", "zcdp"):
        found = book.total("clinical", delta=1e-6, accountant=name)
        assert found.spent == found.committed == find_accountant(name).epsilon(schedule, 1e-6)


def test_ledgers_and_classes_are_kept_apart(book: SpendLedger) -> None:
    pay(book, FIRST, 0, owed(100), owed(50, cls="sensitive"))
    with passing_book(origin="elsewhere") as other:
        pay(other, FIRST, 1, owed(7))
        assert spent(other)[0] == pytest.approx(exact((10, 7)))
        assert (book.origin, other.origin) == ("o", "elsewhere")
    assert spent(book)[0] == pytest.approx(exact((10, 100)))
    assert spent(book, "sensitive")[0] == pytest.approx(exact((10, 50)))
    assert spent(book, "nobody") == (0.0, 0.0)
    assert book.spent(FIRST, "wearable", delta=DELTA, accountant="gaussian") == 0.0
    assert book.spent(SECOND, "clinical", delta=DELTA, accountant="gaussian") == 0.0


def test_redone_and_abandoned_attempts_stay_charged(book: SpendLedger) -> None:
    hold(book, FIRST, owed(100), label="a label")
    for generation, steps in enumerate((20, 20, 7)):
        assert book.next_generation(FIRST, 4) == generation
        assert pay(book, FIRST, 4, owed(steps), generation=generation, nonce=bytes([generation]) * 16)
    book.finish(FIRST)
    assert spent(book) == pytest.approx((exact((10, 47)),) * 2)
    (run,) = book.total("clinical", delta=DELTA).runs
    assert (run.label, run.steps, run.redone, run.reserved, run.finished) == ("a label", 47, 40, 0, True)
    assert book.next_generation(FIRST, 5) == book.next_generation(SECOND, 4) == 0
    hold(book, FIRST, owed(1))
    (run,) = book.total("clinical", delta=DELTA).runs
    assert (run.label, run.finished) == ("a label", False)


def test_a_charge_comes_off_the_reservation_and_not_below_zero(book: SpendLedger) -> None:
    hold(book, FIRST, owed(100))
    pay(book, FIRST, 0, owed(30))
    assert spent(book) == pytest.approx((exact((10, 30)), exact((10, 100))))
    pay(book, FIRST, 1, owed(90))
    assert spent(book) == pytest.approx((exact((10, 120)),) * 2)
    pay(book, FIRST, 2, owed(5, sigma=11))  # another event than what was reserved
    hold(book, FIRST, owed(40))
    pay(book, FIRST, 3, owed(5, sigma=11))
    assert spent(book) == pytest.approx((exact((10, 120), (11, 10)), exact((10, 160), (11, 10))))


def test_every_event_has_a_reservation_of_its_own(book: SpendLedger) -> None:
    events = [owed(10, sigma=sigma, q=q) for sigma in (2.0, 3.0) for q in (0.1, 0.2)]
    hold(book, FIRST, *events, *events)  # the same twice is twice as much
    pay(book, FIRST, 0, events[0], events[3].times(4), events[3].times(5))
    left: Counter[tuple[float, float]] = Counter()
    for each in holds(book)[FIRST, RESERVATION_SEGMENT, 0].charges:
        left[each.event.sigma, each.event.q] += each.event.steps
    assert left == {(2.0, 0.1): 10, (2.0, 0.2): 20, (3.0, 0.1): 20, (3.0, 0.2): 11}
    pay(book, FIRST, 1, events[2].times(3))
    found = book.total("clinical", delta=DELTA, accountant="rdp")
    paid = [events[0], events[2].times(3), events[3].times(9)]
    assert found.spent == find_accountant("rdp").epsilon([each.event for each in paid], DELTA)
    assert found.committed == find_accountant("rdp").epsilon([each.times(20).event for each in events], DELTA)


def test_a_reservation_replaces_the_one_before_and_is_given_back(book: SpendLedger) -> None:
    hold(book, FIRST, owed(100), owed(5, cls="sensitive"))
    hold(book, FIRST, owed(60))
    assert spent(book) == pytest.approx((0.0, exact((10, 60))))
    assert spent(book, "sensitive") == (0.0, 0.0)
    hold(book, SECOND, owed(10))
    book.finish(FIRST)
    book.finish(FIRST)
    book.finish(THIRD)  # never seen: nothing to give back
    assert spent(book) == pytest.approx((0.0, exact((10, 10))))
    assert book.labels() == {FIRST: "", SECOND: ""}


# --------------------------------------------------------------------------------------- idempotence


def test_the_same_charge_twice_is_charged_once(book: SpendLedger) -> None:
    hold(book, FIRST, owed(50), bound=exact((10, 50)) * 1.0001)
    assert pay(book, FIRST, 0, owed(10))
    before = contents(book)
    assert pay(book, FIRST, 0, owed(10), bound=0.0)  # it is spent: no bound can make it unspent
    assert contents(book) == before


def test_a_copied_run_is_told_so_and_charged_nothing(book: SpendLedger) -> None:
    assert pay(book, FIRST, 0, owed(10), nonce=b"1" * 16)
    before = contents(book)
    assert not pay(book, FIRST, 0, owed(10), nonce=b"2" * 16)
    assert contents(book) == before
    assert pay(book, FIRST, 0, owed(10), nonce=b"2" * 16, generation=book.next_generation(FIRST, 0))
    assert spent(book)[0] == pytest.approx(exact((10, 20)))


def test_other_charges_under_a_booked_nonce_are_refused(book: SpendLedger) -> None:
    pay(book, FIRST, 0, owed(10))
    before = contents(book)
    for other in (owed(11), owed(10, sigma=9.0), owed(10, cls="else"), owed(10, delta=1e-6)):
        with raises_code("spend.charged-differently"):
            pay(book, FIRST, 0, other)
    with raises_code("spend.charged-differently"):
        pay(book, FIRST, 0)
    assert contents(book) == before


def test_a_run_of_public_classes_books_attempts_without_charges(book: SpendLedger) -> None:
    hold(book, FIRST)
    assert pay(book, FIRST, 0, nonce=b"1" * 16)
    assert not pay(book, FIRST, 0, nonce=b"2" * 16)
    assert book.accounts() == ()


# --------------------------------------------------------------------------------------- the bound


def test_two_runs_that_fit_alone_but_not_together(book: SpendLedger) -> None:
    bound = exact((10, 150))
    hold(book, FIRST, owed(100), bound=bound)
    before = contents(book)
    with pytest.raises(BudgetExceeded):
        hold(book, SECOND, owed(100), bound=bound)
    assert contents(book) == before
    pay(book, FIRST, 0, owed(20), bound=bound)
    book.finish(FIRST)  # 80 steps go back, 20 stay
    with pytest.raises(BudgetExceeded):
        hold(book, SECOND, owed(131), bound=bound)
    hold(book, SECOND, owed(129), bound=bound)


def test_nothing_is_booked_if_one_of_the_classes_is_over(book: SpendLedger) -> None:
    fine, over = owed(10, cls="a"), owed(100, cls="b")
    bounds = {"a": exact((10, 10)) * 1.01, "b": exact((10, 50))}
    hold(book, FIRST, owed(1, cls="b"))
    before = contents(book)
    for charges in ((fine, over), (over, fine)):
        with raises_code("spend.budget-exceeded"):
            book.reserve(SECOND, charges=charges, bounds=bounds)
        with raises_code("spend.budget-exceeded"):
            book.charge(SECOND, segment=0, generation=0, nonce=b"n" * 16, charges=charges, bounds=bounds)
    assert contents(book) == before


def test_a_redo_beyond_the_reservation_is_checked(book: SpendLedger) -> None:
    bound = exact((10, 100)) * (1 + 1e-9)
    hold(book, FIRST, owed(100), bound=bound)
    for segment in range(9):
        pay(book, FIRST, segment, owed(10), bound=bound)
    pay(book, FIRST, 8, owed(10), bound=bound, generation=1)  # out of what the last segment was to have
    before = contents(book)
    with pytest.raises(BudgetExceeded):
        pay(book, FIRST, 9, owed(10), bound=bound)
    assert contents(book) == before
    assert spent(book)[0] <= bound


def test_a_lowered_bound_is_obeyed_at_the_next_charge(book: SpendLedger) -> None:
    high, low = exact((10, 100)), exact((10, 60))
    hold(book, FIRST, owed(99), bound=high)
    assert pay(book, FIRST, 0, owed(10), bound=high)
    before = contents(book)
    with pytest.raises(BudgetExceeded):
        pay(book, FIRST, 1, owed(10), bound=low)  # 10 + 10 fit, but 99 are promised
    assert contents(book) == before
    hold(book, FIRST, owed(book.fits(FIRST, charge=owed(89), bound=low)), bound=low)
    assert pay(book, FIRST, 1, owed(10), bound=low)
    assert spent(book)[1] <= low


def test_another_delta_or_accountant_is_priced_anew(book: SpendLedger) -> None:
    bound = exact((10, 100))
    hold(book, FIRST, owed(99), bound=bound)
    assert pay(book, FIRST, 0, owed(10), bound=bound)
    assert exact((10, 99), delta=1e-9) > bound
    with raises_code("spend.budget-exceeded"):
        pay(book, FIRST, 1, owed(10, delta=1e-9), bound=bound)
    with raises_code("spend.budget-exceeded"):
        pay(book, FIRST, 1, owed(10, accountant="zcdp"), bound=bound)
    assert pay(book, FIRST, 1, owed(10), bound=bound)


def test_a_run_is_stopped_when_one_with_a_looser_bound_has_passed_its_own(book: SpendLedger) -> None:
    strict = exact((10, 100))
    hold(book, FIRST, owed(50), bound=strict)
    pay(book, FIRST, 0, owed(10), bound=strict)
    for loose in (strict * 3, None):
        hold(book, SECOND, owed(80), bound=loose)
        with raises_code("spend.budget-exceeded"):
            pay(book, FIRST, 1, owed(10), bound=strict)
        assert pay(book, SECOND, 0, owed(1), bound=loose)
    book.finish(SECOND)
    assert pay(book, FIRST, 1, owed(10), bound=strict)


def test_charges_of_a_lost_book_are_booked_again_whatever_the_bound(book: SpendLedger) -> None:
    bound = exact((10, 15))
    for segment in range(3):
        assert pay(book, FIRST, segment, owed(10))
    assert spent(book)[0] > bound
    assert book.fits(FIRST, charge=owed(5), bound=bound) == 0
    with pytest.raises(BudgetExceeded):
        hold(book, FIRST, owed(1), bound=bound)
    hold(book, FIRST, owed(0), bound=bound)  # a run that is through asks for nothing and is let go
    hold(book, FIRST, bound=bound)


@pytest.mark.parametrize("name", ["pld", "rdp", "gaussian"])
def test_the_bound_is_met_exactly_and_not_passed_by_the_last_bit(book: SpendLedger, name: str) -> None:
    charge = owed(100, sigma=2.0, q=0.1, accountant=name)
    bound = find_accountant(name).epsilon([charge.event], DELTA)
    for booking in (hold, lambda *given, **other: pay(given[0], given[1], 0, *given[2:], **other)):
        with pytest.raises(BudgetExceeded):
            booking(book, FIRST, charge, bound=math.nextafter(bound, 0))
        booking(book, FIRST, charge, bound=bound)


@pytest.mark.parametrize("name", ["pld", "rdp"])
@settings(max_examples=8)
@given(
    steps=st.integers(2, 400),
    q=st.sampled_from([0.3, 0.05, 0.01, 1.0]),
    target=st.sampled_from([0.5, 1.0, 3.0, 8.0]),
    cuts=st.lists(st.integers(1, 399), max_size=6),
    resumes=st.booleans(),
)
def test_a_plan_for_exactly_the_bound_is_charged_to_its_last_step(
    name: str, steps: int, q: float, target: float, cuts: list[int], resumes: bool
) -> None:
    sigma = calibrate(target, delta=DELTA, q=q, steps=steps, accountant=name)
    whole = owed(steps, sigma=sigma, q=q, accountant=name)
    with passing_book() as book:
        hold(book, FIRST, whole, bound=target)
        marks = sorted({0, steps, *(cut for cut in cuts if cut < steps)})
        for segment, (first, last) in enumerate(pairwise(marks)):
            assert pay(book, FIRST, segment, whole.times(last - first), bound=target)
            if resumes:
                book.ledger.close()
                book = again(book)
                left = steps - last
                assert book.fits(FIRST, charge=whole.times(left), bound=target) == left
                hold(book, FIRST, whole.times(left), bound=target)
        found = book.total("clinical", delta=DELTA, accountant=name)
        assert found.spent == found.committed == find_accountant(name).epsilon([whole.event], DELTA) <= target
        several = max(1, steps // 10)  # far beyond the rounding of the calibration
        with pytest.raises(BudgetExceeded):
            pay(book, FIRST, 99, whole.times(several), bound=target)
        with pytest.raises(BudgetExceeded):
            hold(book, SECOND, whole.times(several), bound=target)


def test_a_charge_within_its_reservation_asks_no_accountant(book: SpendLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(book, FIRST, owed(50), bound=5.0)

    def never(*_: Any, **__: Any) -> float:
        raise AssertionError("priced")

    monkeypatch.setattr("lamina.ledger.spending.pooled_epsilon", never)
    monkeypatch.setattr("lamina.ledger.spend_ledger.pooled_epsilon", never)
    assert pay(book, FIRST, 0, owed(20), bound=5.0)
    assert pay(book, FIRST, 1, owed(20), bound=6.0)
    assert book.fits(FIRST, charge=owed(10), bound=5.0) == 10
    hold(book, FIRST, owed(10), bound=5.0)  # resumed: the same promise again
    assert pay(book, FIRST, 2, owed(10), bound=5.0)
    for refused in (
        lambda: pay(book, FIRST, 3, owed(1), bound=5.0),
        lambda: hold(book, FIRST, owed(1), bound=5.0),
        lambda: pay(book, FIRST, 3, owed(1), bound=4.0),
    ):
        with pytest.raises(AssertionError, match="priced"):
            refused()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "charge", "charge", "charge", "finish"]),
        st.sampled_from([FIRST, SECOND, THIRD]),
        st.sampled_from([3.0, 5.0]),
        st.integers(0, 12),
        st.sampled_from([1.0, 2.0, 2.0, 2.0, 4.0, math.inf]),
    ),
    max_size=25,
)


@settings(max_examples=50)
@given(operations=OPERATIONS)
def test_whatever_is_done_the_promise_holds(operations: list[tuple[str, str, float, int, float]]) -> None:
    """Against a dictionary: every booking is allowed iff ε(C + R) ≤ its bound afterwards, or it changes nothing."""
    with passing_book() as book:
        charged: Counter[float] = Counter()
        reserved: dict[str, Counter[float]] = {run: Counter() for run in (FIRST, SECOND, THIRD)}

        def epsilon(parts: Counter[float]) -> float:
            return exact(*parts.items())

        for segment, (what, run, sigma, steps, bound) in enumerate(operations):
            if what == "finish":
                book.finish(run)
                reserved[run] = Counter()
            else:
                now, mine = Counter(charged), Counter(reserved[run])
                if what == "charge":
                    now[sigma] += steps
                    mine[sigma] = max(0, mine[sigma] - steps)
                else:
                    mine = Counter({sigma: steps})
                after = now + mine + sum((reserved[other] for other in reserved if other != run), Counter())
                before = contents(book)
                try:
                    if what == "charge":
                        assert pay(book, run, segment, owed(steps, sigma=sigma), bound=bound)
                    else:
                        hold(book, run, owed(steps, sigma=sigma), bound=bound)
                except BudgetExceeded:
                    assert steps > 0
                    assert epsilon(after) > bound
                    assert contents(book) == before
                else:
                    assert steps == 0 or epsilon(after) <= bound + 1e-9
                    charged, reserved[run] = now, mine
            standing = charged + sum(reserved.values(), Counter())
            assert spent(book) == pytest.approx((epsilon(charged), epsilon(standing)), abs=1e-8)


@settings(max_examples=40)
@given(
    before=st.integers(0, 30),
    others=st.integers(0, 30),
    own=st.integers(0, 30),
    asked=st.integers(0, 60),
    bound=st.floats(0.1, 6.0),
)
@example(before=0, others=0, own=0, asked=60, bound=1e-6)
def test_fits_is_the_largest_number_that_is_admitted(
    before: int, others: int, own: int, asked: int, bound: float
) -> None:
    with passing_book() as book:
        pay(book, FIRST, 0, owed(before, sigma=7.0))
        hold(book, SECOND, owed(others, sigma=7.0))
        hold(book, FIRST, owed(own, sigma=5.0))
        found = book.fits(FIRST, charge=owed(asked, sigma=5.0), bound=bound)
        by_counting = [n for n in range(1, asked + 1) if exact((7.0, before + others), (5.0, n)) <= bound]
        assert found == max(by_counting, default=0)
        if found < asked:
            with pytest.raises(BudgetExceeded):
                hold(book, FIRST, owed(found + 1, sigma=5.0), bound=bound)
        if found:
            hold(book, FIRST, owed(found, sigma=5.0), bound=bound)


def test_fits_knows_what_was_promised_already(book: SpendLedger) -> None:
    sigma = calibrate(1.0, delta=DELTA, q=0.02, steps=200)
    plan = owed(200, sigma=sigma, q=0.02, accountant="pld")
    hold(book, FIRST, plan, bound=1.0)
    assert book.fits(FIRST, charge=plan, bound=1.0) == 200
    assert book.fits(SECOND, charge=plan, bound=1.0) == 0
    assert book.fits(SECOND, charge=plan, bound=math.inf) == 200
    half = book.fits(SECOND, charge=plan, bound=1.2)
    together = [Event(sigma=sigma, q=0.02, steps=200 + half)]
    assert 0 < half < 200
    assert find_accountant("pld").epsilon(together, DELTA) <= 1.2


# --------------------------------------------------------------------------------------- the refusal


def test_a_refusal_teaches(tmp_path: Path) -> None:
    book = open_book(tmp_path / "a folder" / "ledger.db")
    bound = exact((10, 150))
    hold(book, FIRST, owed(100), bound=bound, label="ward 7")
    pay(book, FIRST, 0, owed(40), bound=bound)
    pay(book, SECOND, 0, owed(9), bound=bound)
    with pytest.raises(BudgetExceeded) as caught:
        hold(book, THIRD, owed(1_000), bound=bound, label="again")
    text = str(caught.value)
    told = [
        "class 'clinical'",
        "corpus 'o'",
        f"ε ≤ {epsilon_text(bound)}",
        "δ = 1e-05",
        f"run 'again' ({THIRD[:8]}) asks for 1,000 steps",
        f"lamina spend '{book.path}' --release {FIRST[:8]}",
        "smaller epsilon or fewer steps",
        "whoever answers for the corpus",
        "gaussian",
    ]
    assert [part for part in told if part not in text] == []
    for figure in (exact((10, 49)), exact((10, 109)), exact((10, 1109))):
        assert f"{math.ceil(figure * 1e4) / 1e4:.4f}" in text


def test_a_refusal_names_a_signed_bound_and_leaves_it_as_it_is(book: SpendLedger) -> None:
    name = "clinical@c=1,z=1"
    hold(book, FIRST, owed(100), owed(100, sigma=20.0, cls=name))
    bound = exact((20.0, 150)) * (1 + 1e-9)
    with pytest.raises(BudgetExceeded) as refused:
        book.reserve(SECOND, charges=[owed(100), owed(100, sigma=20.0, cls=name)], bounds={name: bound})
    told = str(refused.value)
    assert told.startswith(
        f"signed bound 'c=1,z=1' of class 'clinical' of corpus 'o' has a bound of ε ≤ {epsilon_text(bound)}"
    )
    assert "leave out those who signed this bound" in told
    assert "a new bound in the policy" not in told
    most = owed(100, sigma=20.0, cls=name)
    assert book.fits(SECOND, charge=most, bound=bound) == 50


def test_a_refusal_names_no_run_to_release_if_none_holds_anything(book: SpendLedger) -> None:
    pay(book, FIRST, 0, owed(10))
    with pytest.raises(BudgetExceeded) as caught:
        pay(book, THIRD, 0, owed(1), bound=0.1)
    assert "1 step," in caught.value.problem and "--release" not in caught.value.remedy


# --------------------------------------------------------------------------------------- numbers and texts


@settings(max_examples=40)
@given(
    sigma=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    q=st.floats(0, 1),
    delta=st.floats(0, 1, exclude_max=True),
    steps=st.integers(0, 2**40),
)
@example(sigma=5e-324, q=5e-324, delta=5e-324, steps=2**40)
@example(sigma=1.7976931348623157e308, q=1.0, delta=-0.0, steps=1)
@example(sigma=3.0, q=-0.0, delta=1 - 2**-53, steps=0)
def test_numbers_come_back_bit_for_bit(sigma: float, q: float, delta: float, steps: int) -> None:
    with passing_book() as book:
        charge = owed(steps, sigma=sigma, q=q, delta=delta)
        hold(book, FIRST, charge)
        assert pay(book, FIRST, 0, charge)
        assert pay(book, FIRST, 0, charge)  # compared with what is on the disk
        ((at, held),) = holds(book).items()  # a reservation that is used up is gone
        assert at == (FIRST, 0, 0)
        (found,) = held.charges
        assert [float.hex(value) for value in (found.event.sigma, found.event.q, found.delta)] == [
            float.hex(value) for value in (sigma, q + 0.0, delta + 0.0)
        ]
        assert found.event.steps == steps
        if steps:
            assert book.accounts()[0] == (Account("clinical"), Limit(delta=delta, accountant="gaussian"))


@pytest.mark.parametrize("name", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [(1e-300, 1.0, 1), (1e-3, 1e-12, 5), (1e9, 1.0, 2**40), (1e300, 1e-300, 2**40), (2.0, 1e-9, 2**40)],
)
def test_extreme_charges_have_a_price(book: SpendLedger, name: str, sigma: float, q: float, steps: int) -> None:
    charge = owed(steps, sigma=sigma, q=q, accountant=name)
    pay(book, FIRST, 0, charge)
    pay(book, SECOND, 0, charge)
    found = book.total("clinical", delta=DELTA, accountant=name)
    assert found.spent >= 0
    if math.isinf(found.spent):
        with raises_code("spend.budget-exceeded"):
            pay(book, THIRD, 0, charge, bound=1e6)
    else:
        assert pay(book, THIRD, 0, charge, bound=math.inf)


@settings(max_examples=30)
@given(label=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
@example(label="'; DROP TABLE held; --")
@example(label="e\u0301")
@example(label="\x1b[31m\n")
def test_any_text_is_the_label_of_a_run(label: str) -> None:
    with passing_book() as book:
        hold(book, FIRST, owed(10), label=label)
        assert pay(book, FIRST, 0, owed(4))
        assert book.labels() == {FIRST: label}
        with pytest.raises(BudgetExceeded):
            hold(book, FIRST, owed(10), bound=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ümlaut",
        "with blank",
        "a" * 65,
        "@c=1,z=2",
        "a@",
        "a@c=1",
        "a@c=1,z=02",
        "a@c=0,z=0",
        "a@c=1,z=0",
        "a@c=1,z=1e3",
    ],
)
def test_an_account_that_no_leaf_can_name_is_refused(book: SpendLedger, name: str) -> None:
    """What is charged is to be recorded."""
    before = contents(book)
    for attempt in (
        lambda: hold(book, FIRST, owed(1), owed(1, cls=name)),
        lambda: pay(book, FIRST, 0, owed(1), owed(1, cls=name)),
        lambda: book.fits(FIRST, charge=owed(1, cls=name), bound=1.0),
    ):
        with raises_code("spend.account-name-invalid", "spend.account-name-invalid"):
            attempt()
    assert contents(book) == before


class Kind(str, Enum):  # noqa: UP042  # a kind of str that is printed as something else
    A = "a"


def test_texts_and_numbers_of_other_kinds_are_made_plain(book: SpendLedger) -> None:
    charge = stored_charge(
        cls=Kind.A,
        sigma=np.float32(1.5),  # type: ignore[arg-type]
        q=np.float64(0.5),
        steps=np.int64(3),  # type: ignore[arg-type]
        delta=np.float64(1e-5),
        accountant=np.str_("gaussian"),
    )
    for _ in range(2):
        given: dict[str, Any] = {"charges": [charge], "bounds": {"a": np.float64(9)}}
        book.reserve(np.str_(FIRST), label=np.str_("x"), **given)
        assert book.charge(np.str_(FIRST), segment=np.int64(0), generation=np.int64(0), nonce=b"n" * 16, **given)
        book.ledger.close()
        book = again(book)
    assert spent(book, "a")[0] == pytest.approx(exact((1.5, 3)))


@pytest.mark.parametrize(
    "change",
    [
        {"sigma": math.nan},
        {"sigma": math.inf},
        {"sigma": 0.0},
        {"sigma": -1.0},
        {"q": math.nan},
        {"q": 1.5},
        {"q": -0.1},
        {"steps": -1},
        {"steps": 2**40 + 1},
        {"steps": 1.5},
        {"delta": math.nan},
        {"delta": 1.0},
        {"delta": -1e-9},
        {"accountant": "magic"},
        {"cls": "\ud800"},
    ],
)
def test_a_charge_without_meaning_is_refused_and_not_booked(book: SpendLedger, change: dict[str, Any]) -> None:
    before = contents(book)
    given: dict[str, Any] = {"steps": 1, **change}
    for attempt in (
        lambda: hold(book, FIRST, owed(1, cls="fine"), owed(**given)),
        lambda: pay(book, FIRST, 0, owed(1, cls="fine"), owed(**given)),
        lambda: book.fits(FIRST, charge=owed(**given), bound=1.0),
    ):
        with pytest.raises((AccountingError, RunError)):
            attempt()
    assert contents(book) == before


@pytest.mark.parametrize("bound", [math.nan, -1.0, -math.inf, "1", True])
def test_a_bound_without_meaning_is_refused(book: SpendLedger, bound: Any) -> None:
    for attempt in (
        lambda: hold(book, FIRST, owed(1), bound=bound),
        lambda: pay(book, FIRST, 0, owed(1), bound=bound),
        lambda: book.fits(FIRST, charge=owed(1), bound=bound),
    ):
        with raises_code("spend.bound-negative"):
            attempt()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda book: pay(book, "", 0, owed(1)),
        lambda book: pay(book, FIRST, -1, owed(1)),
        lambda book: pay(book, FIRST, 2**63, owed(1)),
        lambda book: pay(book, FIRST, 0, owed(1), generation=-1),
        lambda book: pay(book, FIRST, 0, owed(1), nonce=b""),
        lambda book: pay(book, FIRST, 0, owed(1), nonce="text"),
        lambda book: pay(book, FIRST, 0, owed(1), nonce=b"n" * 15),
        lambda book: pay(book, FIRST.upper(), 0, owed(1)),
        lambda book: pay(book, FIRST[1:], 0, owed(1)),
        lambda book: hold(book, FIRST, owed(1), label="\ud800"),
        lambda book: book.finish("\ud800"),
        lambda book: book.next_generation("x", 0),
        lambda book: book.recorded("x", 0, 0),
        lambda book: book.spent("x", "clinical", delta=DELTA),
        lambda book: book.fits("x", charge=owed(1), bound=1.0),
        lambda book: hold(book, "\ud800", owed(1)),
        lambda book: hold(book, FIRST, owed(1), label=None),
    ],
)
def test_a_booking_without_a_name_is_refused(book: SpendLedger, wrong: Callable[[SpendLedger], Any]) -> None:
    before = contents(book)
    with pytest.raises(RunError):
        wrong(book)
    assert contents(book) == before


# --------------------------------------------------------------------------------------- what is kept


def test_nothing_but_charges_is_kept(book: SpendLedger) -> None:
    """A new field must be weighed here: sizes, losses, norms, coins and times of segments have no place."""
    hold(book, FIRST, owed(5), label="ward 7")
    pay(book, FIRST, 0, owed(3), bound=5.0)
    kept = dict(contents(book))
    (run,), attempts, (terms,) = kept["run"], kept["held"], kept["terms"]
    assert run[:2] == (bytes.fromhex(FIRST), "ward 7") and run[2] < 40_000 and run[3] == 0  # days, not seconds
    assert [row[:5] for row in attempts] == [
        (bytes.fromhex(FIRST), RESERVATION_SEGMENT, 0, b"", None),
        (bytes.fromhex(FIRST), 0, 0, b"n" * 16, None),
    ]
    assert [len(row) for row in (run, *attempts, terms)] == [4, 6, 6, 2]
    bodies = [cbor.decode(row[5], floats=True) for row in attempts]
    assert bodies == [[[["clinical", 10.0, 1.0, n, DELTA, "gaussian"]], {}, b"", []] for n in (2, 3)]
    begun = Attempt(
        first=10, last=20, eligibility=7, after=1, variance=(0.25,)
    )  # what the leaf of the attempt will say
    assert cbor.decode(begun.encode(), floats=True) == [[], {}, b"", [10, 20, 7, 1, [0.25]]]
    assert Attempt.decode(RunHold(bytes(16), *begun.key, None, begun.encode())) == begun
    assert terms[0] == "clinical"
    assert cbor.decode(terms[1], floats=True, null=True) == [[5.0, DELTA, "gaussian"]]


def test_a_run_is_dated_by_day_and_by_when_it_last_booked(book: SpendLedger) -> None:
    pay(book, FIRST, 0, owed(3))
    (run,) = book.total("clinical", delta=DELTA, accountant="gaussian").runs
    today = datetime.datetime.now(datetime.UTC).date()
    assert datetime.date.fromisoformat(run.day) in (today, today - datetime.timedelta(days=1))


@pytest.mark.parametrize("name", ["with space", "ümläut ☃", "100%20?mode=ro#x", "file:odd", "-dash", "quote'\""])
def test_any_path_will_do(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = open_book(Path(name) / f"{name}.db")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")  # the working folder may change
    pay(book, FIRST, 0, owed(3))
    book.ledger.close()
    assert [each.name for each in (tmp_path / name).iterdir()] == [f"{name}.db"]
    assert spent(open_book(str(tmp_path / name / f"{name}.db")))[0] == pytest.approx(exact((10, 3)))
