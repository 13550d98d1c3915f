"""Signed bounds with accounts of their own: booked beside their class, and held to over all runs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import problem
import pytest
from open_charges import has_begun
from refusals import raises_code
from run_state import attempts
from stopping import complete, figures, killed, lose_ledger, same, told, weights

import lamina
from lamina.account.accountants import find_accountant
from lamina.account.charges import stored_charge
from lamina.account.schedule import Event
from lamina.allocate.ladp import LADP
from lamina.errors import BudgetExceeded
from lamina.ledger.spend_ledger import SpendLedger
from lamina.ledger.writer import Ledger
from lamina.plan.charges import SignedAccount, plan_charges
from lamina.plan.signed_bounds import scale_for_signed_bound, signed_epsilon
from lamina.plan.table import epsilon_text

pytestmark = pytest.mark.usefixtures("known_seeds")
LOOSE = {"clinical": 50.0, "sensitive": 50.0}
STRICT = "clinical@c=9,z=2.25"


def account(plan: Any, z: float = 2.25, c: float = 9.0, epsilon: float | None = None) -> SignedAccount:
    """As a resolver makes it: the scale that this plan needs, the ε that was signed."""
    named = z if epsilon is None else 0.1  # what is signed is held to as well
    return SignedAccount(
        name=f"clinical@c={c:g},z={named:g}",
        cls="clinical",
        scale=scale_for_signed_bound(plan, "clinical", c, z),
        epsilon=signed_epsilon(plan, "clinical", z) if epsilon is None else epsilon,
    )


def priced(plan: Any, made: SignedAccount, steps: int) -> float:
    event = plan.schedule(made.cls)[0]
    more = Event(sigma=plan.sigma(made.cls, made.scale), q=event.q, steps=steps)
    return find_accountant("pld").epsilon([more], 1e-5)


def bounds(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = figures(folder)["bounds"]
    return found


# ---------------------------------------------------------------------------------------- what is charged


def test_charges_of_a_bound_are_the_plans_at_its_scale() -> None:
    plan = problem.plan(problem.net())
    made = account(plan)
    assert made.name == STRICT and made.scale < 1
    own, more = plan_charges(plan, 3, 8), plan_charges(plan, 3, 8, [made])
    assert more[:-1] == own
    assert more[-1] == stored_charge(
        cls=STRICT,
        sigma=plan.sigma("clinical", made.scale),
        q=plan.schedule("clinical")[0].q,
        steps=5,
        delta=1e-5,
        accountant="pld",
    )


def test_a_run_books_class_and_bounds(tmp_path: Path) -> None:
    plan = problem.plan(problem.net())
    two = [account(plan), account(plan, z=4.0)]
    run = problem.trainer(tmp_path / "a", accounts=two)
    outcome = run.fit()
    assert outcome.epsilon["clinical"] == pytest.approx(plan.epsilon("clinical"))
    assert set(outcome.epsilon) == {"open", "clinical", "sensitive"} == set(outcome.total)
    told = bounds(tmp_path / "a")
    assert list(told) == [each.name for each in two]
    for each in two:
        found = told[each.name]
        assert found["epsilon"] == pytest.approx(plan.epsilon("clinical", scale=each.scale))
        assert found["epsilon"] <= each.epsilon == found["signed"]
        assert (found["class"], found["scale"], found["delta"]) == ("clinical", each.scale, 1e-5)
        total = run.spend.total(each.name, delta=1e-5)
        assert total.spent == found["total"] == found["epsilon"]
        assert [row.steps for row in total.runs] == [24]
    metrics = figures(tmp_path / "a")
    assert set(metrics["classes"]) == {"open", "clinical", "sensitive"}
    for attempt in attempts(tmp_path / "a"):
        assert {name for name, steps in attempt.events.items() if steps} == {
            "clinical",
            "sensitive",
            *(each.name for each in two),
        }


# ---------------------------------------------------------------------------------------- over all runs


def test_a_second_run_that_exceeds_a_signed_bound_is_refused_by_its_name(tmp_path: Path) -> None:
    """The class has room for many such runs. Those who signed for less do not."""
    plan = problem.plan(problem.net())
    made = account(plan)
    problem.trainer(tmp_path / "a", accounts=[made], bounds=LOOSE).fit()
    with pytest.raises(BudgetExceeded) as refused:
        problem.trainer(tmp_path / "b", accounts=[made], bounds=LOOSE).fit()
    told = str(refused.value)
    assert "signed bound 'c=9,z=2.25' of class 'clinical' of corpus 'tests'" in told
    assert f"ε ≤ {epsilon_text(made.epsilon)}" in told and "leave out those who signed this bound" in told
    assert not has_begun(tmp_path / "b")
    again = problem.trainer(tmp_path / "b", bounds=LOOSE).fit()  # without them it may
    assert again.total["clinical"] > again.epsilon["clinical"]


def test_another_run_may_need_another_scale_and_both_are_added_up(tmp_path: Path) -> None:
    """The name is the bound; what it is scaled by is the run's own affair."""
    model = problem.net()
    plans = [problem.plan(model, steps=6), problem.plan(model, steps=12)]
    made = [account(plan, epsilon=3.0) for plan in plans]
    assert made[0].name == made[1].name and made[0].scale != made[1].scale
    for i, plan in enumerate(plans):
        problem.trainer(tmp_path / str(i), model=problem.net(), plan=plan, accounts=[made[i]], bounds=LOOSE).fit()
    together = find_accountant("pld").epsilon(
        [
            Event(sigma=plan.sigma("clinical", each.scale), q=plan.schedule("clinical")[0].q, steps=plan.steps)
            for plan, each in zip(plans, made, strict=True)
        ],
        1e-5,
    )
    assert bounds(tmp_path / "1")[made[0].name]["total"] == pytest.approx(together)


def test_a_bound_at_the_scale_of_its_class_is_held_to_as_well(tmp_path: Path) -> None:
    """A plan that spends little needs no scaling for it; two such plans may still be too much."""
    plan = problem.plan(problem.net())
    made = SignedAccount(name="clinical@c=9,z=0.1", cls="clinical", scale=1.0, epsilon=plan.epsilon("clinical") * 1.05)
    problem.trainer(tmp_path / "a", accounts=[made], bounds=LOOSE).fit()
    with raises_code("spend.budget-exceeded"):
        problem.trainer(tmp_path / "b", accounts=[made], bounds=LOOSE).fit()


# ---------------------------------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("step", [8, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 5, 24))])
def test_a_killed_run_resumes_at_the_same_cost(tmp_path: Path, step: int) -> None:
    """The bound is exactly what the run takes: one step charged twice would not fit."""
    plan = problem.plan(problem.net())
    scale = account(plan).scale
    made = SignedAccount(name=STRICT, cls="clinical", scale=scale, epsilon=plan.epsilon("clinical", scale=scale))
    whole = problem.trainer(tmp_path / "whole" / "a", accounts=[made])
    whole.fit()
    killed(tmp_path / "cut" / "a", step, accounts=[made])
    resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, accounts=[made])
    outcome = resumed.fit()
    assert outcome.notes == () and outcome.steps == 24
    assert same(weights(whole), weights(resumed))
    assert bounds(tmp_path / "cut" / "a") == bounds(tmp_path / "whole" / "a")
    spent = resumed.spend.spent(outcome.run, STRICT, delta=1e-5)
    assert spent == pytest.approx(made.epsilon, rel=1e-9)


def test_what_is_redone_is_charged_to_the_bound_again(tmp_path: Path) -> None:
    plan = problem.plan(problem.net())
    made = account(plan, epsilon=9.0)
    killed(tmp_path / "a", 8, accounts=[made], bounds=LOOSE)
    problem.trainer(tmp_path / "a", accounts=[made], bounds=LOOSE, microbatches=2).fit()
    assert bounds(tmp_path / "a")[made.name]["epsilon"] == pytest.approx(priced(plan, made, 24 + 5))


def test_a_redo_that_a_bound_has_no_room_for_shortens_the_run(tmp_path: Path) -> None:
    plan = problem.plan(problem.net())
    made = account(plan)
    killed(tmp_path / "a", 8, accounts=[made], bounds=LOOSE)
    outcome = problem.trainer(tmp_path / "a", accounts=[made], bounds=LOOSE, microbatches=2).fit()
    assert outcome.steps == 19
    assert told(outcome, "19 of 24")
    assert bounds(tmp_path / "a")[STRICT]["epsilon"] <= made.epsilon


def test_a_lost_book_is_made_whole(tmp_path: Path) -> None:
    plan = problem.plan(problem.net())
    made = account(plan)
    killed(tmp_path / "a", 8, accounts=[made])
    lose_ledger(tmp_path)
    with raises_code("train.ledger-missing"):  # not forgotten by chance
        problem.trainer(tmp_path / "a", accounts=[made]).fit()
    with raises_code("train.ledger-differs"):  # nor by choice
        problem.trainer(tmp_path / "a", accounts=[made], ledger=tmp_path / "tests.ledger.db").fit()
    complete(tmp_path / "tests.ledger.db", tmp_path / "a")
    outcome = problem.trainer(tmp_path / "a", accounts=[made]).fit()
    assert outcome.total == outcome.epsilon
    assert outcome.epsilon["clinical"] == pytest.approx(plan.epsilon("clinical"))
    found = SpendLedger(Ledger.open(tmp_path / "tests.ledger.db")).total(STRICT, delta=1e-5)
    assert found.spent == pytest.approx(plan.epsilon("clinical", scale=made.scale))
    assert found.runs[0].redone == 0


def test_bounds_may_come_and_go_between_two_starts(tmp_path: Path) -> None:
    """Whoever signed it has withdrawn: no further charge, and what was charged is still told."""
    plan = problem.plan(problem.net())
    made, other = account(plan), account(plan, z=4.0)
    killed(tmp_path / "a", 8, accounts=[made])
    problem.trainer(tmp_path / "a", accounts=[other]).fit()
    told = bounds(tmp_path / "a")
    assert told[STRICT]["epsilon"] == pytest.approx(priced(plan, made, 10))  # two segments of five
    assert "signed" not in told[STRICT]
    assert told[other.name]["epsilon"] == pytest.approx(priced(plan, other, 14))


# ---------------------------------------------------------------------------------------- other plans


@lru_cache
def followed() -> lamina.StepPlan:
    stack, policy = lamina.LayerStack.from_model(problem.net()), lamina.Policy.parse(problem.POLICY)
    return lamina.make_plan(stack, policy, batch=48, steps=10, allocate=LADP(mode="budget"))


def bound_of(name: str, epsilon: float) -> SignedAccount:
    return SignedAccount(name=f"clinical@{name}", cls="clinical", scale=0.25, epsilon=epsilon)


def test_where_sigma_follows_the_budget_a_bound_pays_what_its_class_pays(tmp_path: Path) -> None:
    plan = followed()
    made = bound_of("c=9,z=0.1", plan.epsilon("clinical"))
    problem.trainer(tmp_path / "a", plan=plan, accounts=[made], bounds={}).fit()
    found = bounds(tmp_path / "a")[made.name]
    assert found["epsilon"] == pytest.approx(plan.epsilon("clinical"))
    with raises_code("spend.budget-exceeded"):
        problem.trainer(tmp_path / "b", plan=plan, accounts=[made], bounds={}).fit()


def test_a_followed_budget_that_a_bound_has_no_room_for_is_not_booked_at_all(tmp_path: Path) -> None:
    plan = followed()
    good, bad = (bound_of("c=9,z=0.1", plan.epsilon("clinical")), bound_of("c=9,z=0.2", 0.5 * plan.epsilon("clinical")))
    with raises_code("spend.budget-exceeded"):
        problem.trainer(tmp_path / "a", plan=plan, accounts=[good, bad]).fit()
    book = SpendLedger(Ledger.open(tmp_path / "tests.ledger.db"))
    for name in ("clinical", good.name, bad.name):
        assert book.total(name, delta=1e-5, accountant=plan.accountant).committed == 0


def test_bounds_come_and_go_under_a_followed_budget(tmp_path: Path) -> None:
    """Each is booked once, in full, when it first takes part; the class is not booked again for it."""
    plan = followed()
    first, later = bound_of("c=9,z=0.1", 9.0), bound_of("c=9,z=0.2", 9.0)
    killed(tmp_path / "a", 4, plan=plan, accounts=[first], segment=2)
    for _ in range(2):
        problem.trainer(tmp_path / "a", plan=plan, accounts=[later], segment=2).fit()
    book = SpendLedger(Ledger.open(tmp_path / "tests.ledger.db"))
    for name in ("clinical", first.name, later.name):
        total = book.total(name, delta=1e-5, accountant=plan.accountant)
        assert total.spent == pytest.approx(plan.epsilon("clinical")) == total.committed


@pytest.mark.parametrize("later", [False, True])
def test_raw_noise_charges_a_bound_its_occurrences(tmp_path: Path, later: bool) -> None:
    """Also one that comes into the run when all that the class may lose is charged."""
    plan = problem.parts("capped")["plan"]
    made = account(plan)
    if later:
        killed(tmp_path / "a", 12, **problem.parts("capped"))
    problem.trainer(tmp_path / "a", **problem.parts("capped"), accounts=[made]).fit()
    event = Event(sigma=plan.sigma("clinical", made.scale), q=1.0, steps=2)
    assert bounds(tmp_path / "a")[STRICT]["epsilon"] == pytest.approx(find_accountant("pld").epsilon([event], 1e-5))


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": "clinical"}, "spend.account-name-invalid"),
        ({"name": "clinical@"}, "spend.account-name-invalid"),
        ({"name": "clinical@z=2"}, "spend.account-name-invalid"),
        ({"name": "clinical@c=0.50,z=2"}, "spend.account-name-invalid"),
        ({"name": "clinical@c=0,z=2"}, "spend.account-name-invalid"),
        ({"name": "sensitive@c=1,z=2"}, "spend.account-name-invalid"),
        ({"scale": 0.0}, "spend.account-out-of-range"),
        ({"scale": 1.5}, "spend.account-out-of-range"),
        ({"scale": True}, "spend.account-out-of-range"),
        ({"epsilon": 0.0}, "spend.account-out-of-range"),
        ({"epsilon": float("inf")}, "spend.account-out-of-range"),
    ],
)
def test_accounts_that_mean_nothing(change: dict[str, Any], word: str) -> None:
    good: dict[str, Any] = {"name": STRICT, "cls": "clinical", "scale": 0.5, "epsilon": 1.0}
    SignedAccount(**good)
    with raises_code(word):
        SignedAccount(**{**good, **change})


def test_accounts_that_do_not_fit_the_plan(tmp_path: Path) -> None:
    made = SignedAccount(name=STRICT, cls="clinical", scale=0.5, epsilon=1.0)
    public = SignedAccount(name="open@c=1,z=1", cls="open", scale=0.5, epsilon=1.0)
    other = SignedAccount(name="else@c=1,z=1", cls="else", scale=0.5, epsilon=1.0)
    for wrong, word in (
        ([made, made], "spend.account-twice"),
        ([public], "spend.account-class-not-private"),
        ([other], "spend.account-class-not-private"),
    ):
        with raises_code(word):
            problem.trainer(tmp_path / "a", accounts=wrong)
    assert not (tmp_path / "a").exists()
