"""The risk bound of a class over all runs: kept by the writer before a segment is charged, and checked from the leaves."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hand_ledger import EPOCH, HandLedger, encoded
from keeping import (
    FIRST,
    SECOND,
    THIRD,
    Attempts,
    capped,
    contents,
    contract,
    epochs,
    exact,
    open_book,
    passing_book,
    plan,
    signed,
    verified,
)
from making import ended
from refusals import raises_code
from scipy.stats import norm

from lamina.ledger.corpus_terms import adopt_policy
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.spending import epoch_marks
from lamina.ledger.verify.epoch_checks import SpendClaim
from lamina.ledger.verify.verifier import verify
from lamina.plan.charges import plan_charges
from lamina.plan.risk import RiskBound

SEED = hashlib.sha256(b"key of the book's tests").digest()
SIGMA = 6.0  # of a step for the class clinical


def rate(steps: int, of: str = "membership", fpr: float = 0.01, sigma: float = SIGMA) -> float:
    """What an attack finds after so many Gaussian steps: the closed form."""
    mu = math.sqrt(steps) / sigma * (1 if of == "membership" else 2)
    return float(norm.cdf(norm.ppf(fpr) + mu))


def risk_of(steps: float, of: str = "membership") -> dict[str, RiskBound]:
    """The bound that so many steps reach."""
    mu = math.sqrt(steps) / SIGMA * (1 if of == "membership" else 2)
    return {"clinical": RiskBound(of=of, fpr=0.01, tpr=float(norm.cdf(norm.ppf(0.01) + mu)))}  # type: ignore[arg-type]


def reserve(run: Attempts) -> None:
    whole = plan_charges(run.plan, 0, run.plan.steps)
    run.book.reserve(run.run, charges=whole, bounds={}, plan=run.plan)


def two_runs(book: SpendLedger, **changes: Any) -> tuple[Attempts, Attempts]:
    made = plan(30, accountant="gaussian", **changes)
    return Attempts(book, run=FIRST, plan=made), Attempts(book, run=SECOND, plan=made)


@pytest.mark.parametrize("of", ["membership", "content"])
def test_runs_together_keep_the_bound(of: str) -> None:
    with passing_book(risks=risk_of(50.5, of)) as book:
        first, second = two_runs(book)
        reserve(first)
        first.done(0, 1)
        before = contents(book)
        with raises_code("spend.risk-exceeded") as refused:  # 30 more would make 60
            reserve(second)
        assert contents(book) == before and "over all runs" in str(refused.value)
        total = book.total("clinical", delta=1e-5, accountant="gaussian", risk=risk_of(50.5, of)["clinical"])
        assert (total.spent, total.committed) == pytest.approx((rate(20, of), rate(30, of)), rel=1e-9)
        charge = plan_charges(second.plan, 0, 30)[0]
        assert book.fits(SECOND, charge=charge, bound=math.inf) == 20
        book.finish(FIRST)  # gives ten steps back
        reserve(second)
        second.done(0, 1, 2)
        with raises_code("spend.risk-exceeded"):
            Attempts(book, run=THIRD, plan=first.plan).charge(0)
        verified(book)


def test_a_stricter_bound_holds_from_the_next_charge_on_and_a_looser_one_needs_two_keys() -> None:
    with passing_book(risks=risk_of(40.5)) as book:
        first, _ = two_runs(book)
        reserve(first)
        first.done(0)
        assert adopt_policy(book.ledger, contract(risks=risk_of(25.5)))
        with raises_code("spend.risk-exceeded"):
            first.charge(1)
        for looser in (risk_of(26), {}, risk_of(25, "content")):
            with raises_code("ledger.policy-loosened"):
                adopt_policy(book.ledger, contract(risks=looser))
        verified(book)


def test_a_class_whose_membership_is_not_hidden_keeps_no_such_bound() -> None:
    """Raw noise hides content only. A run that was charged before counts too."""
    raw = capped(4, steps=30, accountant="gaussian")
    with passing_book(risks=risk_of(1000)) as book, pytest.raises(Exception, match="nothing is proven"):
        reserve(Attempts(book, plan=raw))
    with passing_book(risks=risk_of(1000, "content")) as book:
        reserve(Attempts(book, plan=raw))
    with passing_book() as book:
        earlier = Attempts(book, run=FIRST, plan=raw)
        reserve(earlier)
        earlier.done(0)
        assert adopt_policy(book.ledger, contract(risks=risk_of(1000)))
        with raises_code("spend.risk-exceeded"):
            reserve(two_runs(book)[1])


def test_a_charge_under_a_plan_that_the_ledger_lacks_is_refused() -> None:
    with passing_book(risks=risk_of(1000)) as book, raises_code("spend.risk-exceeded"):
        two_runs(book)[0].charge(0)


def test_what_was_drawn_already_is_named_by_the_verifier() -> None:
    with passing_book(risks=risk_of(25.5)) as book:
        first, _ = two_runs(book)
        for index in range(3):
            assert first.charge(index, already=True)
            first.record(index)
        found = verify(book.ledger.store).problem
        assert found is not None
        assert (found.index, found.code) == (3, "verify.risk-exceeded")
        assert f"{100 * rate(30):.6g} %" in found.reason


def test_nothing_is_proven_of_a_class_that_is_charged_by_signed_bounds_alone() -> None:
    """What one member lost would be split over the account of the class and that of the bound."""
    with passing_book() as book:
        run = Attempts(book, plan=plan(20, accountant="gaussian"), accounts=(signed("clinical@c=0.5,z=2", 0.5),))
        run.done(0)
        (epoch,) = epochs(book.ledger)
        assert epoch_marks(epoch, run.plan) == {"clinical": frozenset(), "wearable": frozenset()}
        split = replace(epoch, accounts=tuple(each for each in epoch.accounts if each.noise_multiplier))
        assert epoch_marks(split, run.plan) == {"clinical": frozenset(("unproven",))}
        (account,) = split.accounts
        events = {(charge.sigma, charge.q, 0.0): charge.steps for charge in account.charges}
        for marks, code in ((frozenset(), None), (frozenset(("unproven",)), "verify.risk-exceeded")):
            found = SpendClaim(1, account, events, None, tuple(risk_of(1000).values()), marks).finding(
                book.ledger.header
            )
            assert (found and found.code) == code


# ------------------------------------------------------------------------------ a forger with the ledger's key


def exact_number(value: float) -> str:
    return repr(float(value))


def forged_epoch(ledger: HandLedger, charged: int) -> None:
    """One more run of ten steps, charged as its plan takes it and stated at its true ε; so many were `charged` before."""
    body = ledger.body(len(ledger.rows) - 1)
    accounts, rows = [], []
    for account in body[5]:
        sigma, total = float(account[5][0][1]), charged + 10
        charge = {1: exact_number(sigma), 2: account[5][0][2], 3: 10}
        spend = math.ceil(exact((sigma, total)) * 1e9)
        accounts.append({**account, 5: [charge], 6: spend})
        rows.append([account[1], 0, 0, [[exact_number(sigma), account[5][0][2], "0.0", total]]])
    state = hashlib.sha256(b"lamina/spending/1\n" + encoded(rows)).digest()
    run = hashlib.sha256(b"%d" % len(ledger.rows)).digest()[:16]
    segment = {**body[2][0], 1: 0, 3: run, 4: 0, 5: 10, 6: len(ledger.rows)}
    segment.pop(8, None)
    seq = ledger.append(EPOCH, {**body, 1: run, 2: [segment], 5: accounts, 6: state})
    with closing(sqlite3.connect(ledger.path)) as db, db:
        db.execute("INSERT INTO attempt VALUES (?, ?, ?, ?)", (run, 0, 0, seq))
        db.execute("DELETE FROM meta WHERE name = 'open'")


@pytest.mark.parametrize(("bound", "code"), [(35.5, None), (25.5, "verify.risk-exceeded")])
def test_an_epoch_written_by_hand_beyond_the_bound_is_refused(tmp_path: Path, bound: float, code: str | None) -> None:
    """The forger signs with the key of the ledger; every figure that an epoch states is true."""
    path = str(tmp_path / "ledger.db")
    book = open_book(path, risks=risk_of(bound))
    try:
        first = Attempts(book, plan=plan(20, accountant="gaussian"))
        reserve(first)
        first.done(0, 1)
        book.finish(FIRST)
    finally:
        book.ledger.close()
    ledger = HandLedger(path)
    assert ledger.header[7][0][7] == ["membership", "0.01", repr(risk_of(bound)["clinical"].tpr)]
    forged_epoch(ledger, 20)
    ledger.write(SEED)
    found = verify(path).problem
    assert (None if found is None else found.code) == code, found
    assert found is None or found.index == 3


def test_a_header_with_a_malformed_risk_is_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.db")
    open_book(path, risks=risk_of(9)).ledger.close()
    for wrong in (["both", "0.01", "0.05"], ["membership", "0.05", "0.01"], ["membership", "0.010", "0.05"],
                  ["membership", "0.01"], {1: "membership"}, "abc", ["membership", "0.01", "1.5"]):  # fmt: skip
        ledger = HandLedger(path)
        ledger.header[7][0][7] = wrong
        ledger.rows = []
        ledger.rows.append(_header_row(ledger.header))
        ledger.write(SEED)
        found = verify(path).problem
        assert found is not None and found.code == "verify.leaf-unreadable", found


def _header_row(header: dict[int, Any]) -> tuple[bytes, bytes]:
    body = encoded(header)
    return encoded({1: 1, 2: 0, 3: 1_700_000_000, 4: 0, 5: hashlib.sha256(body).digest()}), body


def test_the_plan_of_a_reservation_is_not_exchanged_for_one_that_hides_less() -> None:
    """The same events under a plan with raw noise: nothing grows, and yet nothing is proven of membership."""
    classes = tuple(replace(each, sampling_rate=1.0) for each in plan().classes)
    hiding = plan(30, accountant="gaussian", classes=classes, batch=2000.0)
    raw = capped(30, steps=30, accountant="gaussian", classes=classes, batch=2000.0)
    assert raw.schedule("clinical") == hiding.schedule("clinical")
    with passing_book(risks=risk_of(1000)) as book:
        reserve(Attempts(book, run=FIRST, plan=hiding))
        before = contents(book)
        for attack in (reserve, lambda run: run.charge(0)):
            with raises_code("spend.risk-exceeded"):
                attack(Attempts(book, run=FIRST, plan=raw))
        assert contents(book) == before


def end_at_a_public_number(run: Attempts) -> None:
    """Record the end of a run after its first segment: the number of contributions is public, ε is about content alone."""
    book = run.book.ledger
    book.append([ended(bytes.fromhex(run.run), plan=run.plan.digest(), public_number=True)])
    book.checkpoint()


@pytest.mark.parametrize(("of", "code"), [("membership", "verify.risk-exceeded"), ("content", None)])
def test_an_end_that_claims_content_alone_is_named_under_a_bound_on_membership(of: str, code: str | None) -> None:
    with passing_book(risks=risk_of(1000, of)) as book:
        run = two_runs(book)[0]
        reserve(run)
        run.done(0)
        end_at_a_public_number(run)
        found = verify(book.ledger.store).problem
        assert (None if found is None else found.code) == code, found


def test_a_later_bound_on_membership_counts_runs_that_claimed_content_alone() -> None:
    with passing_book() as book:
        first, second = two_runs(book)
        first.done(0)
        end_at_a_public_number(first)
        assert adopt_policy(book.ledger, contract(risks=risk_of(1000)))
        with raises_code("spend.risk-exceeded"):
            reserve(second)
        verified(book)
        assert second.charge(0, already=True)
        second.record(0)
        found = verify(book.ledger.store).problem
        assert found is not None and found.code == "verify.risk-exceeded"


@pytest.mark.parametrize("swapped", [False, True])
def test_a_swapped_plan_in_the_store_proves_nothing(swapped: bool) -> None:
    """Without any key: the bytes of a plan with raw noise are exchanged for those of a plan that hides membership."""
    classes = tuple(replace(each, sampling_rate=1.0) for each in plan().classes)
    hiding = plan(30, accountant="gaussian", classes=classes, batch=2000.0)
    raw = capped(30, steps=30, accountant="gaussian", classes=classes, batch=2000.0)
    with passing_book() as book:
        Attempts(book, run=FIRST, plan=raw).done(0)
        assert adopt_policy(book.ledger, contract(risks=risk_of(1000)))
        if swapped:
            with closing(sqlite3.connect(book.path)) as db, db:
                change = "UPDATE blob SET data = ? WHERE digest = ?"
                assert db.execute(change, (hiding.to_cbor(), raw.digest())).rowcount == 1
            assert book.ledger.blob(raw.digest()) is None
        with raises_code("spend.risk-exceeded"):
            reserve(Attempts(book, run=SECOND, plan=hiding))
