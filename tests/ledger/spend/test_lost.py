"""A run that will never go on: what it had begun is recorded as given up, by the ledger alone."""

from __future__ import annotations

import pytest
from keeping import DELTA, FIRST, SECOND, Attempts, capped, epochs, following, open_book, plan, signed, verified
from refusals import raises_code

from lamina.ledger.records import SegmentOutcome
from lamina.ledger.spend_ledger import SpendLedger
from lamina.plan.charges import plan_charges

STRICT = "clinical@c=9,z=2.25"


@pytest.mark.parametrize("kind", ["exact", "capped", "followed"])
def test_what_it_had_begun_is_recorded_as_given_up(where: str, kind: str) -> None:
    made = {"exact": plan, "capped": capped, "followed": following}[kind]()
    with open_book(where, accountant="rdp").ledger as ledger:
        run = Attempts(SpendLedger(ledger), plan=made, accounts=(signed(STRICT, 0.5, 60.0),))
        reserved = plan_charges(made, 0, made.steps, run.accounts) if kind == "exact" else []
        run.book.reserve(FIRST, charges=reserved, bounds={}, label="lost", plan=made)
        run.budget() if kind == "followed" else None
        first = [each.times(4) for each in plan_charges(made, 0, 1, run.accounts)] if kind == "capped" else None
        assert run.charge(0, due=[] if kind == "followed" else first)
        run.record(0)
        assert run.charge(1, due=None if kind == "exact" else [])
        before = run.book.total("clinical", delta=DELTA, accountant="rdp")
        assert run.book.abandon_run(FIRST) == 1
        after = run.book.total("clinical", delta=DELTA, accountant="rdp")
        assert after.spent == before.spent == after.committed
        last = epochs(ledger)[-1]
        assert [(s.index, s.first, s.last, s.outcome) for s in last.segments] == [(1, 10, 20, SegmentOutcome.ABANDONED)]
        assert {str(account.bound) for account in last.accounts} >= {"clinical", "clinical@c=9,z=2.25"}
        found = verified(run.book)
        assert found.held == ()
        assert run.book.abandon_run(FIRST) == 0  # nothing is left to be recorded
        assert len(epochs(ledger)) == 2


def test_of_others_nothing_is_said(where: str) -> None:
    with open_book(where).ledger as ledger:
        one, two = Attempts(SpendLedger(ledger)), Attempts(SpendLedger(ledger), SECOND)
        for each in (one, two):
            each.book.reserve(each.run, charges=[], bounds={}, plan=each.plan)
            assert each.charge(0)
        assert one.book.abandon_run(FIRST) == 1
        assert [epoch.run.hex() for epoch in epochs(ledger)] == [FIRST]
        two.record(0)
        verified(two.book)


def test_a_run_that_went_on_meanwhile_is_told(where: str) -> None:
    with open_book(where).ledger as ledger:
        run = Attempts(SpendLedger(ledger))
        run.book.reserve(FIRST, charges=[], bounds={}, plan=run.plan)
        assert run.charge(0)
        run.book.abandon_run(FIRST)
        with raises_code("spend.recorded-as-abandoned"):
            run.record(0)
        assert run.record(0, outcome=SegmentOutcome.ABANDONED) == 1
        assert run.charge(0, 1)
        run.record(0, 1)
        verified(run.book)


@pytest.mark.parametrize("missing", ["plan", "begun"])
def test_what_the_ledger_does_not_know_it_does_not_say(where: str, missing: str) -> None:
    with open_book(where).ledger as ledger:
        run = Attempts(SpendLedger(ledger))
        if missing != "plan":
            run.book.reserve(FIRST, charges=[], bounds={}, plan=run.plan)
        assert run.charge(0, **({"begun": None} if missing == "begun" else {}))
        with raises_code("spend.attempt-unknown"):
            run.book.abandon_run(FIRST)
        assert epochs(ledger) == []
        run.record(0)
        verified(run.book)
