"""Epochs: what was charged becomes a leaf, which an auditor verifies; and no total changes by that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import problem
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import (
    DELTA,
    FIRST,
    GOVERNING,
    KEY,
    SECOND,
    THIRD,
    Attempts,
    capped,
    contents,
    epochs,
    following,
    hold,
    open_book,
    owed,
    passing_book,
    plan,
    signed,
    stated,
    verified,
)
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.charges import Account
from lamina.account.schedule import Event
from lamina.errors import RunError
from lamina.ledger.corpus_terms import CorpusTerms, open_or_create
from lamina.ledger.records import SegmentOutcome
from lamina.ledger.schema import nano_epsilon
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spending import Spending, whole_plan_charges
from lamina.ledger.verify.verifier import verify
from lamina.ledger.writer import Ledger
from lamina.plan.charges import plan_charges
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan

STRICT = "clinical@c=0.5,z=0.6"
STRICTER = "wearable@c=0.125,z=0.7"


def agrees(book: SpendLedger, *names: str) -> None:
    """It verifies, and the last epoch of each account states what the book says, at the header's terms."""
    verified(book)
    header, last = book.ledger.header, stated(book)
    assert set(last) == set(names)
    for name, spend in last.items():
        found = book.total(name, delta=header.delta, accountant=header.accountant)
        assert spend == nano_epsilon(found.spent)
        assert found.spent == found.committed > 0


def priced(*events: tuple[StepPlan, str, float, int]) -> float:
    """ε by RDP of so many steps of plans, from a class at a scale."""
    found = [Event(sigma=p.sigma(cls) / scale, q=0.02, steps=steps) for p, cls, scale, steps in events]
    return find_accountant("rdp").epsilon(found, DELTA)


# --------------------------------------------------------------------------------------- what verifies


def test_a_run_of_several_classes(where: str) -> None:
    with open_book(where, accountant="rdp").ledger as ledger:
        run = Attempts(SpendLedger(ledger))
        run.done(0, 1, 2, 3)
        agrees(run.book, "clinical", "wearable")
        assert [[a.cls for a in epoch.accounts] for epoch in epochs(ledger)] == [["clinical", "wearable"]] * 4
        total = run.book.total("clinical", delta=DELTA, accountant="rdp")
        assert total.spent == pytest.approx(priced((run.plan, "clinical", 1.0, 40)), rel=1e-9)
        assert ledger.blob(run.plan.digest()) == run.plan.to_cbor()


def test_a_plan_made_for_a_model_under_its_policy(tmp_path: Any) -> None:
    made, policy = problem.plan(problem.net(), 20), Policy.parse(problem.POLICY)
    book = SpendLedger(open_or_create(tmp_path / "ledger.db", CorpusTerms.of_policy(policy), KEY, governing=GOVERNING))
    bounds = {"clinical": 4.0, "sensitive": 2.0}
    book.reserve(FIRST, charges=plan_charges(made, 0, 20), bounds=bounds)
    Attempts(book, plan=made, bounds=bounds).done(0, 1)
    agrees(book, "clinical", "sensitive")
    assert stated(book)["clinical"] <= nano_epsilon(4.0)


def test_signed_bounds_with_their_scales(where: str) -> None:
    with open_book(where, accountant="rdp").ledger as ledger:
        run = Attempts(SpendLedger(ledger), accounts=(signed(STRICT, 0.5), signed(STRICTER, 0.25)))
        run.done(0, 1)
        agrees(run.book, "clinical", "wearable", STRICT, STRICTER)
        scales = [{str(a.bound): a.scale for a in epoch.accounts} for epoch in epochs(ledger)]
        assert scales == [{"clinical": 1.0, "wearable": 1.0, STRICT: 0.5, STRICTER: 0.25}] * 2
        found = run.book.total(STRICT, delta=DELTA, accountant="rdp").spent
        assert found == pytest.approx(priced((run.plan, "clinical", 0.5, 20)), rel=1e-9)


def test_a_signed_bound_that_comes_later_and_one_that_goes(book: SpendLedger) -> None:
    run = Attempts(book)
    run.done(0)
    replace(run, accounts=(signed(STRICT, 0.5),)).done(1)
    replace(run, accounts=(signed(STRICT, 0.5),)).done(2)
    run.done(3)
    agrees(book, "clinical", "wearable", STRICT)


def test_attempts_that_were_given_up_and_done_again(where: str) -> None:
    with open_book(where, accountant="rdp").ledger as ledger:
        run = Attempts(SpendLedger(ledger))
        run.done(0)
        for generation, outcome in enumerate(
            [SegmentOutcome.ABANDONED, SegmentOutcome.ABANDONED, SegmentOutcome.CLOSED]
        ):
            assert run.charge(1, generation)
            assert run.book.next_generation(FIRST, 1) == generation + 1
            run.record(1, generation, outcome=outcome)
            assert run.book.next_generation(FIRST, 1) == generation + 1
        agrees(run.book, "clinical", "wearable")
        (found,) = run.book.total("clinical", delta=DELTA, accountant="rdp").runs
        assert (found.steps, found.redone) == (40, 20)
        assert run.book.total("clinical", delta=DELTA, accountant="rdp").spent == pytest.approx(
            priced((run.plan, "clinical", 1.0, 40)), rel=1e-9
        )


def test_an_attempt_may_be_recorded_after_the_next_was_charged(book: SpendLedger) -> None:
    run = Attempts(book)
    for generation in range(3):
        assert run.charge(0, generation)
    run.record(0, 2)
    run.record(0, 0, outcome=SegmentOutcome.ABANDONED)
    run.record(0, 1, outcome=SegmentOutcome.ABANDONED)
    agrees(book, "clinical", "wearable")


def test_two_runs_that_take_turns(where: str) -> None:
    with open_book(where, accountant="rdp").ledger as ledger, Ledger.open(where, KEY) as other:
        one = Attempts(SpendLedger(ledger))
        two = Attempts(SpendLedger(other), SECOND, plan=plan(30, sigma=9.0), accounts=(signed(STRICT, 0.5),))
        for index in range(3):
            assert one.charge(index) and two.charge(index)
            two.record(index)
            one.record(index)
        agrees(one.book, "clinical", "wearable", STRICT)
        for book in (one.book, two.book):
            assert book.total("clinical", delta=DELTA, accountant="rdp").spent == pytest.approx(
                priced((one.plan, "clinical", 1.0, 30), (two.plan, "clinical", 1.0, 30)), rel=1e-9
            )
            assert book.spent(SECOND, "clinical", delta=DELTA, accountant="rdp") == pytest.approx(
                priced((two.plan, "clinical", 1.0, 30)), rel=1e-9
            )


def test_two_plans_of_one_run(book: SpendLedger) -> None:
    run = Attempts(book)
    run.done(0)
    replace(run, plan=plan(40, sigma=8.0)).done(1, 2)
    agrees(book, "clinical", "wearable")


def test_a_ledger_that_counts_otherwise_than_the_plan() -> None:
    """Charges are priced by the run at its own δ; what the ledger states is at its own."""
    with passing_book(accountant="pld", delta=1e-7) as book:
        run = Attempts(book, bounds={"clinical": 1.0})
        run.done(0, 1)
        agrees(book, "clinical", "wearable")
        found = book.accounts()
        assert [(str(account), limit.delta, limit.accountant) for account, limit in found] == [
            ("clinical", DELTA, "rdp"),
            ("clinical", 1e-7, "pld"),
            ("wearable", DELTA, "rdp"),
            ("wearable", 1e-7, "pld"),
        ]


# --------------------------------------------------------------------------------------- raw noise with a cap


def capped_run(book: SpendLedger, *tries: tuple[int, int, int, SegmentOutcome]) -> Attempts:
    """Raw noise with at most four occurrences; (segment, generation, events, outcome) of segments of ten steps."""
    run = Attempts(book, plan=capped(4), accounts=(signed(STRICT, 0.5),))
    one = plan_charges(run.plan, 0, 1, run.accounts)
    for index, generation, count, outcome in tries:
        assert run.charge(index, generation, due=[each.times(count) for each in one] if count else [])
        run.record(index, generation, outcome=outcome)
        verified(book)
    return run


def test_raw_noise_pays_for_occurrences(book: SpendLedger) -> None:
    capped_run(book, *((index, 0, count, SegmentOutcome.CLOSED) for index, count in enumerate((4, 0, 0))))
    agrees(book, "clinical", "wearable", STRICT)
    found = epochs(book.ledger)
    assert all(each.q == 1.0 for epoch in found for a in epoch.accounts for each in a.charges)


def test_raw_noise_pays_again_for_what_is_done_again(book: SpendLedger) -> None:
    """An attempt that was given up counted along the weights; from the next one on it counts beside them."""
    capped_run(
        book,
        (0, 0, 4, SegmentOutcome.ABANDONED),
        (0, 1, 4, SegmentOutcome.CLOSED),
        (1, 0, 0, SegmentOutcome.ABANDONED),
        (1, 1, 4, SegmentOutcome.CLOSED),
        (2, 0, 0, SegmentOutcome.CLOSED),
    )
    agrees(book, "clinical", "wearable", STRICT)
    assert book.total("clinical", delta=DELTA, accountant="rdp").runs[0].steps == 12


@pytest.mark.parametrize(
    ("charged", "after", "code"),
    [
        (4, None, None),
        (3, None, "verify.charge-differs-from-plan"),
        (4, 1, "verify.segment-missing"),
        (4, 7, "verify.segment-missing"),
    ],
)
def test_a_branch_pays_for_itself(book: SpendLedger, charged: int, after: int | None, code: str | None) -> None:
    """Three segments; a copy goes on from the first. Its weights come from an attempt that was closed."""
    tries = [(0, 0, 4, SegmentOutcome.CLOSED), (0, 1, 4, SegmentOutcome.ABANDONED), (1, 0, 0, SegmentOutcome.CLOSED)]
    run = capped_run(book, *tries, (2, 0, 0, SegmentOutcome.CLOSED))
    one = plan_charges(run.plan, 0, 1, run.accounts)
    assert run.charge(1, 1, due=[each.times(charged) for each in one])
    seq = run.record(1, 1, after=after)
    problem = verify(book.ledger.store).problem
    if code is None:
        assert problem is None
    else:
        assert problem is not None and (problem.index, problem.kind, problem.code) == (seq, "epoch", code)


# --------------------------------------------------------------------------------------- noise that follows a budget


def test_a_budget_that_is_followed_is_recorded_with_the_first_epoch(where: str) -> None:
    with open_book(where, accountant="rdp").ledger as ledger:
        run = Attempts(SpendLedger(ledger), plan=following(), accounts=(signed(STRICT, 0.5, 60.0),))
        run.budget()
        before = run.book.total("clinical", delta=DELTA, accountant="rdp")
        for index in range(3):
            assert run.charge(index, due=[])
            run.record(index)
        agrees(run.book, "clinical", "wearable", STRICT)
        after = run.book.total("clinical", delta=DELTA, accountant="rdp")
        assert (after.spent, after.committed) == (before.spent, before.committed)
        assert [each.steps for each in after.runs] == [each.steps for each in before.runs] == [40]
        first, *others = epochs(ledger)
        for account in first.accounts:
            assert account.charges == whole_plan_charges(run.plan, account.cls, account.scale)
        assert all(account.charges == () for epoch in others for account in epoch.accounts)


def test_a_followed_budget_is_used_once(book: SpendLedger) -> None:
    """Steps may be given up and done again, as long as the budget lasts; then it has to be charged once more."""
    run = Attempts(book, plan=following())
    run.budget()
    for index, generation, outcome in (
        (0, 0, SegmentOutcome.CLOSED),
        (1, 0, SegmentOutcome.ABANDONED),
        (1, 1, SegmentOutcome.CLOSED),
        (2, 0, SegmentOutcome.CLOSED),
    ):
        assert run.charge(index, generation, due=[])
        run.record(index, generation, outcome=outcome)
    verified(book)
    assert run.charge(3, due=[])
    seq = run.record(3)  # forty steps were charged, fifty are used
    problem = verify(book.ledger.store).problem
    assert problem is not None and (problem.index, problem.kind) == (seq, "epoch")
    assert problem.code == "verify.budget-overdrawn"


def test_a_capped_run_that_changes_its_plan_and_goes_back(book: SpendLedger) -> None:
    """Occurrences are counted along the weights, whatever plan the steps between had."""
    one, two = Attempts(book, plan=capped(4)), Attempts(book, plan=capped(4, sigma=7.0))
    for run, index, count in ((one, 0, 4), (two, 1, 4), (one, 2, 0)):
        assert run.charge(index, due=[c.times(count) for c in plan_charges(run.plan, 0, 1)] if count else [])
        run.record(index)
        verified(book)


def test_a_followed_budget_beside_fixed_noise_and_another_one(book: SpendLedger) -> None:
    one, two = Attempts(book, plan=following()), Attempts(book, SECOND)
    one.budget()
    two.done(0)
    assert one.charge(0, due=[])
    one.record(0, outcome=SegmentOutcome.ABANDONED)
    assert one.charge(0, 1, due=[])
    one.record(0, 1)
    three = Attempts(book, THIRD, plan=following(sigma=9.0))
    three.budget()
    assert three.charge(0, due=[])
    two.done(1)
    three.record(0)
    agrees(book, "clinical", "wearable")


def test_a_budget_of_which_no_step_was_recorded_stays_charged(book: SpendLedger) -> None:
    run = Attempts(book, plan=following())
    run.budget()
    book.finish(FIRST)
    total = book.total("clinical", delta=DELTA, accountant="rdp")
    assert total.spent == pytest.approx(run.plan.epsilon("clinical"), rel=1e-9)
    other = Attempts(book, FIRST, plan=following(sigma=9.0))  # of this plan, not of that
    other.budget()
    assert other.charge(0, due=[])
    other.record(0)
    verified(book)
    recorded = {kind[0] for kind in map(_kind, epochs(book.ledger)[0].accounts[0].charges)}
    assert recorded == {other.plan.sigma("clinical")}
    assert book.total("clinical", delta=DELTA, accountant="rdp").spent > total.spent


def _kind(charge: Any) -> tuple[float, float]:
    return charge.sigma, charge.q


# --------------------------------------------------------------------------------------- once, and what was charged


def test_recording_twice_is_recording_once(where: str) -> None:
    with open_book(where, accountant="rdp").ledger as ledger, Ledger.open(where, KEY) as other:
        run = Attempts(SpendLedger(ledger))
        assert not run.book.recorded(FIRST, 0, 0)
        assert run.charge(0)
        assert not run.book.recorded(FIRST, 0, 0)
        assert run.record(0) == 1 == run.record(0)
        assert replace(run, book=SpendLedger(other)).record(0) == 1
        assert run.record(0, outcome=SegmentOutcome.ABANDONED) == 1  # it stays as it is
        assert run.book.recorded(FIRST, 0, 0)
        assert ledger.size == 2
        assert run.charge(0)  # the same charge once more is the same charge
        assert run.book.total("clinical", delta=DELTA).runs[0].steps == 10
        agrees(run.book, "clinical", "wearable")


def test_a_leaf_that_was_not_signed_yet_is_signed_when_it_is_recorded_again(book: SpendLedger) -> None:
    with Ledger.open(book.path) as keyless:  # as after a kill between the leaf and the checkpoint
        run = Attempts(SpendLedger(keyless))
        assert run.charge(0)
        assert run.record(0) == 1
    found = verify(book.ledger.store)
    assert found.verified and (found.signed, found.size) == (1, 2)
    book.ledger.accept()
    assert replace(run, book=book).record(0) == 1
    verified(book)


def test_another_nonce_is_somebody_elses(book: SpendLedger) -> None:
    run = Attempts(book)
    assert run.charge(0)
    before = contents(book)
    with raises_code("spend.never-charged"):
        run.record(0, nonce=b"x" * 16)
    assert contents(book) == before
    run.record(0)
    before = contents(book)
    with raises_code("spend.recorded-by-other-run"):
        run.record(0, nonce=b"x" * 16)
    assert contents(book) == before
    assert not run.charge(0, nonce=b"x" * 16)  # a copy of the run is told so, also by a leaf
    assert contents(book) == before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda run: run.record(1),
        lambda run: run.record(0, 1),
        lambda run: replace(run, run=SECOND).record(0),
        lambda run: replace(run, run="x").record(0),
    ],
)
def test_what_was_never_charged_cannot_be_recorded(book: SpendLedger, wrong: Callable[[Attempts], int]) -> None:
    run = Attempts(book)
    hold(book, SECOND, owed(3))
    assert run.charge(0)
    before = contents(book)
    with pytest.raises(RunError):
        wrong(run)
    assert contents(book) == before


def test_an_attempt_is_recorded_under_the_plan_that_it_was_charged_under(book: SpendLedger) -> None:
    """A leaf is for good: one that could not be verified is not written."""
    run = Attempts(book)
    assert run.charge(0)
    before = contents(book)
    with raises_code("spend.plan-differs"):
        replace(run, plan=plan(sigma=8.0)).record(0)
    assert contents(book) == before
    run.record(0)
    verified(book)


def test_a_signed_bound_without_its_scale_is_recorded_as_soon_as_that_is_known(book: SpendLedger) -> None:
    """After a ledger was lost, a run may book what it no longer has the accounts of."""
    run = Attempts(book, accounts=(signed(STRICT, 0.5),))
    assert run.charge(0, scales={}, already=True)
    before = contents(book)
    with raises_code("spend.scale-unknown"):
        replace(run, accounts=()).record(0)
    assert contents(book) == before
    run.record(0)
    agrees(book, "clinical", "wearable", STRICT)


def test_more_accounts_than_a_leaf_holds_are_refused_before_anything_is_charged(book: SpendLedger) -> None:
    names = ["clinical", *(f"clinical@c=1,z={number}" for number in range(1, 1025))]
    due = [owed(1, cls=name, sigma=1e6) for name in names]
    with raises_code("spend.too-many-accounts"):
        hold(book, FIRST, *due)
    with raises_code("spend.too-many-accounts"):
        Attempts(book).charge(0, due=due)
    assert Attempts(book).charge(0, due=due[:-1], scales=dict.fromkeys(names[1:], 0.5), already=True)
    Attempts(book).record(0)
    assert len(epochs(book.ledger)[0].accounts) == 1024


def test_a_book_without_the_key_records_and_signs_nothing(book: SpendLedger) -> None:
    with Ledger.open(book.path) as keyless:
        run = Attempts(SpendLedger(keyless))
        assert run.charge(0)
        run.record(0)
        assert len(list(book.ledger.checkpoints())) == 1
        assert any(note.startswith("not checked: open charges") for note in keyless.notes)
    with raises_code("ledger.open-rows-unsigned"):  # its keeper reviews what was charged without the key
        Attempts(book).charge(1)
    book.ledger.accept()
    Attempts(book).done(1)
    verified(book)


def test_what_was_read_of_a_longer_ledger_is_forgotten(book: SpendLedger) -> None:
    """A server may be restored from a copy under a process that goes on."""
    Attempts(book).done(0, 1)
    recorded = Spending(book.ledger.header)
    found = []
    with book.ledger.store.read() as rows:
        for size in (3, 2, 1, 3):
            recorded.follow(rows, size, book.ledger.checked(rows))
            events = recorded.events(Account("clinical"))
            found.append((recorded.epochs, sum(events.values()), list(map(str, recorded.bounds()))))
    both = ["clinical", "wearable"]
    assert found == [(2, 20, both), (1, 10, both), (0, 0, []), (2, 20, both)]


# --------------------------------------------------------------------------------------- no total changes


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "charge", "charge", "record", "record", "again", "finish"]),
        st.sampled_from([FIRST, SECOND, THIRD]),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    min_size=5,
    max_size=30,
)
PLANS = {FIRST: plan(), SECOND: plan(sigma=9.0), THIRD: plan(sigma=9.0)}  # the events of two are the same
NAMES = ("clinical", "wearable", STRICT)
Parts = Counter[tuple[str, float]]  # (account, sigma) → steps


def taking(run: Attempts, steps: int) -> Parts:
    of = {"clinical": ("clinical", 1.0), "wearable": ("wearable", 1.0)}
    of |= {each.name: (each.cls, each.scale) for each in run.accounts}
    return Counter({(name, run.plan.sigma(cls) / scale): steps for name, (cls, scale) in of.items()})


def price(parts: Parts, name: str) -> float:
    found = [Event(sigma=s, q=0.02, steps=n) for (of, s), n in sorted(parts.items()) if of == name and n]
    return find_accountant("rdp").epsilon(found, DELTA) if found else 0.0


@settings(max_examples=30)
@given(operations=OPERATIONS)
def test_whatever_is_charged_and_recorded_no_total_changes(operations: list[tuple[str, str, int, int]]) -> None:
    """Against counters that add up events by themselves."""
    with passing_book(accountant="rdp") as book:
        runs = {
            name: Attempts(book, name, made, (signed(STRICT, 0.5),) if name == SECOND else ())
            for name, made in PLANS.items()
        }
        charged: Parts = Counter()
        reserved: dict[str, Parts] = {name: Counter() for name in runs}
        held: list[tuple[str, int, int]] = []
        recorded: list[tuple[str, int, int]] = []
        for what, name, index, generation in operations:
            run = runs[name]
            if what == "reserve":
                book.reserve(name, charges=plan_charges(run.plan, 0, 10 * index, run.accounts), bounds={})
                reserved[name] = taking(run, 10 * index)
            elif what == "finish":
                book.finish(name)
                reserved[name] = Counter()
            elif what == "charge":
                assert run.charge(index, generation)
                if (name, index, generation) not in (*held, *recorded):
                    held.append((name, index, generation))
                    charged += taking(run, 10)
                    reserved[name] -= taking(run, 10)  # not below zero
            elif of := held if what == "record" else recorded:
                key = of[(2 * index + generation) % len(of)]
                outcome = SegmentOutcome.CLOSED if key[2] else SegmentOutcome.ABANDONED
                runs[key[0]].record(*key[1:], outcome=outcome)
                assert book.recorded(*key)
                if what == "record":
                    held.remove(key)
                    recorded.append(key)
            standing = charged + sum(reserved.values(), Counter())
            for account in NAMES:
                found = book.total(account, delta=DELTA, accountant="rdp")
                assert found.spent == pytest.approx(price(charged, account), rel=1e-9)
                assert found.committed == pytest.approx(price(standing, account), rel=1e-9)
            steps = Counter(each for each, *_ in (*held, *recorded))
            found = book.total("clinical", delta=DELTA, accountant="rdp")
            assert {each.run: each.steps for each in found.runs if each.steps} == {
                each: 10 * count for each, count in steps.items()
            }
        assert len(epochs(book.ledger)) == len(recorded)
        problem = verify(book.ledger.store).problem  # runs here jump, which no run does, and that is noticed
        assert problem is None or problem.code == "verify.segment-missing"
