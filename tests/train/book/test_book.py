"""The spend book: the promise over all runs, against oracles that know nothing of SQLite."""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from lamina.account import Event, accountant, calibrate
from lamina.errors import AccountingError, BudgetExceeded, RunError
from lamina.train.book import SpendBook
from lamina.train.book.charge import Charge

FIRST, SECOND, THIRD = "a1" * 16, "b2" * 16, "c3" * 16
DELTA = 1e-5


def owed(steps: int, *, sigma: float = 10.0, q: float = 1.0, cls: str = "clinical", **other: Any) -> Charge:
    """A charge whose price is exact and quick: the Gaussian mechanism without sampling."""
    return Charge(
        **{
            "cls": cls,
            "sigma": sigma,
            "q": q,
            "steps": steps,
            "delta": DELTA,
            "accountant": "gaussian",
            **other,
        }
    )


def exact(*events: tuple[float, int], delta: float = DELTA) -> float:
    """ε of Gaussian releases (sigma, steps), solved from Φ(μ/2-ε/μ) - e^ε Φ(-μ/2-ε/μ) = δ."""
    mu = math.sqrt(sum(steps / sigma**2 for sigma, steps in events))
    if mu == 0:
        return 0.0

    def excess(epsilon: float) -> float:
        far = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return float(ndtr(mu / 2 - epsilon / mu)) - far - delta

    return 0.0 if excess(0) <= 0 else float(brentq(excess, 0, 500, xtol=1e-12))


@contextmanager
def passing_book() -> Iterator[SpendBook]:
    """In memory where the system has a place for that, where syncing is free."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield SpendBook(Path(folder) / "spend.db")


@pytest.fixture
def book() -> Iterator[SpendBook]:
    with passing_book() as made:
        yield made


def contents(book: SpendBook) -> list[str]:
    with sqlite3.connect(book.path) as db:
        lines = list(db.iterdump())
    db.close()
    return lines


def pay(
    book: SpendBook, run: str, segment: int, *charges: Charge, bound: float | None = None, **other: Any
) -> bool:
    bounds = {} if bound is None else {each.cls: bound for each in charges}
    given_ = {"origin": "o", "generation": 0, "nonce": b"n" * 16, **other}
    return book.charge(run, segment=segment, charges=charges, bounds=bounds, **given_)


def hold(book: SpendBook, run: str, *charges: Charge, bound: float | None = None, **other: Any) -> None:
    bounds = {} if bound is None else {each.cls: bound for each in charges}
    book.reserve(run, charges=charges, bounds=bounds, **{"origin": "o", **other})


def spent(book: SpendBook, cls: str = "clinical", origin: str = "o") -> tuple[float, float]:
    found = book.total(origin, cls, delta=DELTA, accountant="gaussian")
    return found.spent, found.committed


# --------------------------------------------------------------------------------------- the total


def test_runs_are_priced_together_and_not_added_up(book: SpendBook) -> None:
    pay(book, FIRST, 0, owed(100, sigma=30))
    pay(book, SECOND, 0, owed(50, sigma=20))
    together = exact((30, 100), (20, 50))
    assert spent(book) == pytest.approx((together, together), rel=1e-6)
    assert together < exact((30, 100)) + exact((20, 50))
    assert book.spent(FIRST, "clinical", delta=DELTA, accountant="gaussian") == pytest.approx(
        exact((30, 100))
    )
    assert book.spent(SECOND, "clinical", delta=1e-3, accountant="gaussian") == pytest.approx(
        exact((20, 50), delta=1e-3)
    )


def test_the_price_is_that_of_an_accountant_asked_for_the_whole_schedule(book: SpendBook) -> None:
    for segment, steps in enumerate((17, 400, 83)):
        pay(book, FIRST, segment, owed(steps, sigma=1.3, q=0.01, accountant="pld"))
    pay(book, SECOND, 0, owed(100, sigma=2.0, q=0.02, accountant="rdp", delta=1e-7))
    schedule = [Event(sigma=1.3, q=0.01, steps=500), Event(sigma=2.0, q=0.02, steps=100)]
    for name in ("pld", "rdp", "zcdp"):
        found = book.total("o", "clinical", delta=1e-6, accountant=name)
        assert found.spent == found.committed == accountant(name).epsilon(schedule, 1e-6)


def test_origins_and_classes_are_kept_apart(book: SpendBook) -> None:
    pay(book, FIRST, 0, owed(100), owed(50, cls="sensitive"))
    pay(book, FIRST, 1, owed(7), origin="elsewhere")
    assert spent(book)[0] == pytest.approx(exact((10, 100)))
    assert spent(book, "sensitive")[0] == pytest.approx(exact((10, 50)))
    assert spent(book, origin="elsewhere")[0] == pytest.approx(exact((10, 7)))
    assert spent(book, "nobody") == (0.0, 0.0)
    whole = book.spent(FIRST, "clinical", delta=DELTA, accountant="gaussian")
    part = book.spent(FIRST, "clinical", delta=DELTA, accountant="gaussian", origin="o")
    assert (whole, part) == pytest.approx((exact((10, 107)), exact((10, 100))))


def test_redone_and_abandoned_attempts_stay_charged(book: SpendBook) -> None:
    hold(book, FIRST, owed(100), label="a label")
    for generation, steps in enumerate((20, 20, 7)):
        assert book.next_generation(FIRST, 4) == generation
        assert pay(book, FIRST, 4, owed(steps), generation=generation, nonce=bytes([generation]))
    book.finish(FIRST)
    assert spent(book) == pytest.approx((exact((10, 47)),) * 2)
    (run,) = book.total("o", "clinical", delta=DELTA).runs
    assert (run.label, run.steps, run.redone, run.reserved, run.finished) == ("a label", 47, 40, 0, True)
    assert book.next_generation(FIRST, 5) == book.next_generation(SECOND, 4) == 0
    hold(book, FIRST, owed(1))
    (run,) = book.total("o", "clinical", delta=DELTA).runs
    assert (run.label, run.finished) == ("a label", False)


def test_a_charge_comes_off_the_reservation_and_not_below_zero(book: SpendBook) -> None:
    hold(book, FIRST, owed(100))
    pay(book, FIRST, 0, owed(30))
    assert spent(book) == pytest.approx((exact((10, 30)), exact((10, 100))))
    pay(book, FIRST, 1, owed(90))
    assert spent(book) == pytest.approx((exact((10, 120)),) * 2)
    pay(book, FIRST, 2, owed(5, sigma=11))  # another event than what was reserved
    hold(book, FIRST, owed(40))
    pay(book, FIRST, 3, owed(5, sigma=11))
    assert spent(book) == pytest.approx((exact((10, 120), (11, 10)), exact((10, 160), (11, 10))))


def test_every_event_has_a_reservation_of_its_own(book: SpendBook) -> None:
    events = [owed(10, sigma=sigma, q=q) for sigma in (2.0, 3.0) for q in (0.1, 0.2)]
    hold(book, FIRST, *events, *events)  # the same twice is twice as much
    pay(book, FIRST, 0, events[0], events[3].times(4), events[3].times(5))
    with sqlite3.connect(book.path) as db:
        left = db.execute("SELECT sigma, q, steps FROM reserved ORDER BY sigma, q").fetchall()
    db.close()
    assert left == [(2.0, 0.1, 10), (2.0, 0.2, 20), (3.0, 0.1, 20), (3.0, 0.2, 11)]
    pay(book, FIRST, 1, events[2].times(3))
    found = book.total("o", "clinical", delta=DELTA, accountant="rdp")
    paid = [events[0], events[2].times(3), events[3].times(9)]
    assert found.spent == accountant("rdp").epsilon([each.event for each in paid], DELTA)
    assert found.committed == accountant("rdp").epsilon([each.times(20).event for each in events], DELTA)


def test_a_reservation_replaces_the_one_before_and_is_given_back(book: SpendBook) -> None:
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


def test_the_same_charge_twice_is_charged_once(book: SpendBook) -> None:
    hold(book, FIRST, owed(50), bound=exact((10, 50)) * 1.0001)
    assert pay(book, FIRST, 0, owed(10))
    before = contents(book)
    assert pay(book, FIRST, 0, owed(10), bound=0.0)  # it is spent: no bound can make it unspent
    assert pay(book, FIRST, 0, owed(10), origin="moved")
    assert contents(book) == before


def test_a_copied_run_is_told_so_and_charged_nothing(book: SpendBook) -> None:
    assert pay(book, FIRST, 0, owed(10), nonce=b"one")
    before = contents(book)
    assert not pay(book, FIRST, 0, owed(10), nonce=b"two")
    assert contents(book) == before
    assert pay(book, FIRST, 0, owed(10), nonce=b"two", generation=book.next_generation(FIRST, 0))
    assert spent(book)[0] == pytest.approx(exact((10, 20)))


def test_other_charges_under_a_booked_nonce_are_refused(book: SpendBook) -> None:
    pay(book, FIRST, 0, owed(10))
    before = contents(book)
    for other in (owed(11), owed(10, sigma=9.0), owed(10, cls="else"), owed(10, delta=1e-6)):
        with pytest.raises(RunError, match="other charges"):
            pay(book, FIRST, 0, other)
    with pytest.raises(RunError, match="other charges"):
        pay(book, FIRST, 0)
    assert contents(book) == before


def test_a_run_of_public_classes_books_attempts_without_charges(book: SpendBook) -> None:
    hold(book, FIRST)
    assert pay(book, FIRST, 0, nonce=b"one")
    assert not pay(book, FIRST, 0, nonce=b"two")
    assert book.accounts() == ()


# --------------------------------------------------------------------------------------- the bound


def test_two_runs_that_fit_alone_but_not_together(book: SpendBook) -> None:
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


def test_nothing_is_booked_if_one_of_the_classes_is_over(book: SpendBook) -> None:
    fine, over = owed(10, cls="a"), owed(100, cls="b")
    bounds = {"a": exact((10, 10)) * 1.01, "b": exact((10, 50))}
    hold(book, FIRST, owed(1, cls="b"))
    before = contents(book)
    for charges in ((fine, over), (over, fine)):
        with pytest.raises(BudgetExceeded, match="class 'b'"):
            book.reserve(SECOND, origin="o", charges=charges, bounds=bounds)
        with pytest.raises(BudgetExceeded, match="class 'b'"):
            book.charge(
                SECOND, origin="o", segment=0, generation=0, nonce=b"n", charges=charges, bounds=bounds
            )
    assert contents(book) == before


def test_a_redo_beyond_the_reservation_is_checked(book: SpendBook) -> None:
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


def test_a_lowered_bound_is_obeyed_at_the_next_charge(book: SpendBook) -> None:
    high, low = exact((10, 100)), exact((10, 60))
    hold(book, FIRST, owed(99), bound=high)
    assert pay(book, FIRST, 0, owed(10), bound=high)
    before = contents(book)
    with pytest.raises(BudgetExceeded):
        pay(book, FIRST, 1, owed(10), bound=low)  # 10 + 10 fit, but 99 are promised
    assert contents(book) == before
    hold(book, FIRST, owed(book.fits(FIRST, origin="o", charge=owed(89), bound=low)), bound=low)
    assert pay(book, FIRST, 1, owed(10), bound=low)
    assert spent(book)[1] <= low


def test_another_delta_or_accountant_is_priced_anew(book: SpendBook) -> None:
    bound = exact((10, 100))
    hold(book, FIRST, owed(99), bound=bound)
    assert pay(book, FIRST, 0, owed(10), bound=bound)
    assert exact((10, 99), delta=1e-9) > bound
    with pytest.raises(BudgetExceeded, match="1e-09"):
        pay(book, FIRST, 1, owed(10, delta=1e-9), bound=bound)
    with pytest.raises(BudgetExceeded, match="zcdp"):
        pay(book, FIRST, 1, owed(10, accountant="zcdp"), bound=bound)
    assert pay(book, FIRST, 1, owed(10), bound=bound)


def test_a_run_is_stopped_when_one_with_a_looser_bound_has_passed_its_own(book: SpendBook) -> None:
    strict = exact((10, 100))
    hold(book, FIRST, owed(50), bound=strict)
    pay(book, FIRST, 0, owed(10), bound=strict)
    for loose in (strict * 3, None):
        hold(book, SECOND, owed(80), bound=loose)
        with pytest.raises(BudgetExceeded, match=SECOND[:8]):
            pay(book, FIRST, 1, owed(10), bound=strict)
        assert pay(book, SECOND, 0, owed(1), bound=loose)
    book.finish(SECOND)
    assert pay(book, FIRST, 1, owed(10), bound=strict)


def test_charges_of_a_lost_book_are_booked_again_whatever_the_bound(book: SpendBook) -> None:
    bound = exact((10, 15))
    for segment in range(3):
        assert pay(book, FIRST, segment, owed(10))
    assert spent(book)[0] > bound
    assert book.fits(FIRST, origin="o", charge=owed(5), bound=bound) == 0
    with pytest.raises(BudgetExceeded):
        hold(book, FIRST, owed(1), bound=bound)
    hold(book, FIRST, owed(0), bound=bound)  # a run that is through asks for nothing and is let go
    hold(book, FIRST, bound=bound)


@pytest.mark.parametrize("name", ["pld", "rdp", "gaussian"])
def test_the_bound_is_met_exactly_and_not_passed_by_the_last_bit(book: SpendBook, name: str) -> None:
    charge = owed(100, sigma=2.0, q=0.1, accountant=name)
    bound = accountant(name).epsilon([charge.event], DELTA)
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
    name: str,
    steps: int,
    q: float,
    target: float,
    cuts: list[int],
    resumes: bool,
) -> None:
    sigma = calibrate(target, delta=DELTA, q=q, steps=steps, accountant=name)
    whole = owed(steps, sigma=sigma, q=q, accountant=name)
    with passing_book() as book:
        hold(book, FIRST, whole, bound=target)
        marks = sorted({0, steps, *(cut for cut in cuts if cut < steps)})
        for segment, (first, last) in enumerate(pairwise(marks)):
            assert pay(book, FIRST, segment, whole.times(last - first), bound=target)
            if resumes:
                book = SpendBook(book.path)
                left = steps - last
                assert book.fits(FIRST, origin="o", charge=whole.times(left), bound=target) == left
                hold(book, FIRST, whole.times(left), bound=target)
        found = book.total("o", "clinical", delta=DELTA, accountant=name)
        assert found.spent == found.committed == accountant(name).epsilon([whole.event], DELTA) <= target
        several = max(1, steps // 10)  # far beyond the rounding of the calibration
        with pytest.raises(BudgetExceeded):
            pay(book, FIRST, 99, whole.times(several), bound=target)
        with pytest.raises(BudgetExceeded):
            hold(book, SECOND, whole.times(several), bound=target)


def test_a_charge_within_its_reservation_asks_no_accountant(
    book: SpendBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(book, FIRST, owed(50), bound=5.0)

    def never(*_: Any, **__: Any) -> float:
        raise AssertionError("priced")

    monkeypatch.setattr("lamina.train.book.book.pooled", never)
    assert pay(book, FIRST, 0, owed(20), bound=5.0)
    assert pay(book, FIRST, 1, owed(20), bound=6.0)
    assert book.fits(FIRST, origin="o", charge=owed(10), bound=5.0) == 10
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
        found = book.fits(FIRST, origin="o", charge=owed(asked, sigma=5.0), bound=bound)
        by_counting = [n for n in range(1, asked + 1) if exact((7.0, before + others), (5.0, n)) <= bound]
        assert found == max(by_counting, default=0)
        if found < asked:
            with pytest.raises(BudgetExceeded):
                hold(book, FIRST, owed(found + 1, sigma=5.0), bound=bound)
        if found:
            hold(book, FIRST, owed(found, sigma=5.0), bound=bound)


def test_fits_knows_what_was_promised_already(book: SpendBook) -> None:
    sigma = calibrate(1.0, delta=DELTA, q=0.02, steps=200)
    plan = owed(200, sigma=sigma, q=0.02, accountant="pld")
    hold(book, FIRST, plan, bound=1.0)
    assert book.fits(FIRST, origin="o", charge=plan, bound=1.0) == 200
    assert book.fits(SECOND, origin="o", charge=plan, bound=1.0) == 0
    assert book.fits(SECOND, origin="elsewhere", charge=plan, bound=1.0) == 200
    assert book.fits(SECOND, origin="o", charge=plan, bound=math.inf) == 200
    half = book.fits(SECOND, origin="o", charge=plan, bound=1.2)
    together = [Event(sigma=sigma, q=0.02, steps=200 + half)]
    assert 0 < half < 200
    assert accountant("pld").epsilon(together, DELTA) <= 1.2


# --------------------------------------------------------------------------------------- the refusal


def test_a_refusal_teaches(tmp_path: Path) -> None:
    book = SpendBook(tmp_path / "a folder" / "spend.db")
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
        f"ε ≤ {bound:.6g}",
        "δ = 1e-05",
        f"'ward 7' ({FIRST[:8]}): 40 steps charged, 60 reserved",
        f"{SECOND[:8]}: 9 steps charged",
        f"run 'again' ({THIRD[:8]}) asks for 1,000 steps",
        f"lamina spend '{book.path}' --release {FIRST[:8]}",
        "smaller epsilon or fewer steps",
        "whoever answers for the corpus",
        "gaussian",
    ]
    assert [part for part in told if part not in text] == []
    for figure in (exact((10, 49)), exact((10, 109)), exact((10, 1109))):
        assert f"{math.ceil(figure * 1e4) / 1e4:.4f}" in text


def test_a_refusal_names_a_signed_bound_and_leaves_it_as_it_is(book: SpendBook) -> None:
    name = "clinical@c=1,z=4"
    hold(book, "a", owed(100), owed(100, sigma=20.0, cls=name))
    bound = exact((20.0, 150)) * (1 + 1e-9)
    with pytest.raises(BudgetExceeded) as refused:
        book.reserve(
            "b", origin="o", charges=[owed(100), owed(100, sigma=20.0, cls=name)], bounds={name: bound}
        )
    told = str(refused.value)
    assert told.startswith(
        f"signed bound 'c=1,z=4' of class 'clinical' of corpus 'o' is bound to ε ≤ {bound:.6g}"
    )
    assert "leave out those who signed it, for whom this is final" in told
    assert "a new bound in the policy" not in told
    most = owed(100, sigma=20.0, cls=name)
    assert book.fits("b", origin="o", charge=most, bound=bound) == 50


def test_a_refusal_stays_short_and_names_no_run_to_release_if_none_holds_anything(book: SpendBook) -> None:
    for number in range(12):
        pay(book, f"{number:032x}", 0, owed(10 + number), origin="o")
    with pytest.raises(BudgetExceeded) as caught:
        pay(book, THIRD, 0, owed(1), bound=0.1)
    assert "and 7 more" in caught.value.problem
    assert "1 step," in caught.value.problem
    assert "--release" not in caught.value.remedy
    assert len(str(caught.value)) < 1000


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
        with sqlite3.connect(book.path) as db:
            (row,) = db.execute("SELECT sigma, q, delta, steps FROM charged")
            (left,) = db.execute("SELECT sigma, q, steps FROM reserved")
        db.close()
        assert [float.hex(value) for value in row[:3]] == [
            float.hex(v) for v in (sigma, q + 0.0, delta + 0.0)
        ]
        assert row[3] == steps
        assert left == (sigma, q + 0.0, 0)
        (account,) = SpendBook(book.path).accounts()  # opened anew, its checksums are verified
        assert account.delta == delta


@pytest.mark.parametrize("name", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [(1e-300, 1.0, 1), (1e-3, 1e-12, 5), (1e9, 1.0, 2**40), (1e300, 1e-300, 2**40), (2.0, 1e-9, 2**40)],
)
def test_extreme_charges_have_a_price(book: SpendBook, name: str, sigma: float, q: float, steps: int) -> None:
    charge = owed(steps, sigma=sigma, q=q, accountant=name)
    pay(book, FIRST, 0, charge)
    pay(book, SECOND, 0, charge)
    found = book.total("o", "clinical", delta=DELTA, accountant=name)
    assert found.spent >= 0
    if math.isinf(found.spent):
        with pytest.raises(BudgetExceeded, match="inf"):
            pay(book, THIRD, 0, charge, bound=1e6)
    else:
        assert pay(book, THIRD, 0, charge, bound=math.inf)


@settings(max_examples=30)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=4, max_size=4))
@example(texts=["\0", "'; DROP TABLE charged; --", "a\0b", "é"])
@example(texts=["e\u0301", "é", "[red]", "\x1b[31m\n"])
def test_any_text_names_a_run_a_class_and_an_origin(texts: list[str]) -> None:
    run, origin, cls, label = texts
    with passing_book() as book:
        hold(book, run, owed(10, cls=cls), origin=origin, label=label)
        assert pay(book, run, 0, owed(4, cls=cls), origin=origin)
        assert spent(book, cls, origin) == pytest.approx((exact((10, 4)), exact((10, 10))))
        assert [(each.origin, each.cls) for each in book.accounts()] == [(origin, cls)]
        assert book.labels() == {run: label}
        with pytest.raises(BudgetExceeded):
            hold(book, run, owed(10, cls=cls), origin=origin, bound=0.01)
        assert spent(book, cls + "x", origin) == spent(book, cls, origin + "x") == (0.0, 0.0)


class Kind(str, Enum):  # noqa: UP042  # a kind of str that is printed as something else
    A = "a"


def test_texts_and_numbers_of_other_kinds_are_made_plain(book: SpendBook) -> None:
    charge = Charge(
        cls=Kind.A,
        sigma=np.float32(1.5),  # type: ignore[arg-type]
        q=np.float64(0.5),
        steps=np.int64(3),  # type: ignore[arg-type]
        delta=np.float64(1e-5),
        accountant=np.str_("gaussian"),
    )
    for _ in range(2):
        given: dict[str, Any] = {"origin": np.str_("o"), "charges": [charge], "bounds": {"a": np.float64(9)}}
        book.reserve(np.str_(FIRST), label=np.str_("x"), **given)
        assert book.charge(np.str_(FIRST), segment=np.int64(0), generation=np.int64(0), nonce=b"n", **given)
        book = SpendBook(book.path)
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
def test_a_charge_without_meaning_is_refused_and_not_booked(book: SpendBook, change: dict[str, Any]) -> None:
    before = contents(book)
    wrong = replace(owed(1), **change)
    for attempt in (
        lambda: hold(book, FIRST, owed(1, cls="fine"), wrong),
        lambda: pay(book, FIRST, 0, owed(1, cls="fine"), wrong),
        lambda: book.fits(FIRST, origin="o", charge=wrong, bound=1.0),
    ):
        with pytest.raises((AccountingError, RunError)):
            attempt()
    assert contents(book) == before


@pytest.mark.parametrize("bound", [math.nan, -1.0, -math.inf, "1", True])
def test_a_bound_without_meaning_is_refused(book: SpendBook, bound: Any) -> None:
    for attempt in (
        lambda: hold(book, FIRST, owed(1), bound=bound),
        lambda: pay(book, FIRST, 0, owed(1), bound=bound),
        lambda: book.fits(FIRST, origin="o", charge=owed(1), bound=bound),
    ):
        with pytest.raises(AccountingError, match="bound"):
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
        lambda book: pay(book, FIRST, 0, owed(1), origin=""),
        lambda book: pay(book, FIRST, 0, owed(1), origin="\udfff"),
        lambda book: hold(book, "\ud800", owed(1)),
        lambda book: hold(book, FIRST, owed(1), label=None),
    ],
)
def test_a_booking_without_a_name_is_refused(book: SpendBook, wrong: Callable[[SpendBook], Any]) -> None:
    before = contents(book)
    with pytest.raises(RunError):
        wrong(book)
    assert contents(book) == before


# --------------------------------------------------------------------------------------- what is kept


def test_nothing_but_charges_is_kept(book: SpendBook) -> None:
    """A new column must be weighed here: sizes, losses, norms, coins and times of segments have no place."""
    with sqlite3.connect(book.path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {table: {row[1] for row in db.execute(f"PRAGMA table_info({table})")} for table in tables}
    db.close()
    event = {"sigma", "q", "steps"}
    assert found == {
        "run": {"run", "label", "day", "finished"},
        "account": {"id", "origin", "cls", "bound", "delta", "accountant"},
        "attempt": {"run", "segment", "generation", "nonce", "seal"},
        "charged": {"run", "segment", "generation", "account", *event, "delta", "accountant"},
        "reserved": {"run", "account", *event},
    }


def test_the_file_itself_refuses_to_forget_a_charge(book: SpendBook) -> None:
    pay(book, FIRST, 0, owed(3))
    db = sqlite3.connect(book.path)

    def again(numbers: str) -> str:
        return (
            "INSERT INTO charged SELECT run, segment, generation, account, "
            f"{numbers}, delta, accountant FROM charged"
        )

    db.execute(again("sigma, q, steps"))  # as such it would be allowed
    for statement in (
        "DELETE FROM charged",
        "DELETE FROM attempt",
        "UPDATE attempt SET nonce = x'00'",
        "UPDATE charged SET steps = 0",
        again("9e999, q, steps"),
        again("sigma, 2.0, steps"),
        again("sigma, q, -1"),
        "UPDATE account SET bound = -1",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            db.execute(statement)
    db.close()


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        book = SpendBook(tmp_path / "new" / "deep" / "spend.db")
        journals: list[int] = []
        with book._file.write() as db:
            db.execute("INSERT INTO run VALUES ('x', '', '', 0)")
            journals = [stat.S_IMODE(each.stat().st_mode) for each in book.path.parent.iterdir()]
    finally:
        os.umask(old)
    assert journals == [0o600, 0o600]
    assert [each.name for each in book.path.parent.iterdir()] == ["spend.db"]
    assert stat.S_IMODE(book.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name", ["with space", "ümläut ☃", "100%20?mode=ro#x", "file:odd", "-dash", "quote'\""]
)
def test_any_path_will_do(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = SpendBook(Path(name) / f"{name}.db")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")  # the working folder may change
    pay(book, FIRST, 0, owed(3))
    assert [each.name for each in (tmp_path / name).iterdir()] == [f"{name}.db"]
    assert spent(SpendBook(str(tmp_path / name / f"{name}.db")))[0] == pytest.approx(exact((10, 3)))
