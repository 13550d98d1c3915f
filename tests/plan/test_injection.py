"""Where noise enters, as plans and policies have it: what is priced how, and what cannot be combined."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import hand_plan
from refusals import raises_code
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from lamina import LayerStack, Policy, make_plan
from lamina.account.accountants import find_accountant
from lamina.account.filters import RenyiFilter
from lamina.account.schedule import Adjacency, Event
from lamina.engine.budget import Budget
from lamina.errors import PlanError
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy, FollowQuantile, Injection
from lamina.plan.step_plan import Clipping, StepPlan

SAME = [Injection(form="per_microbatch", parts=16), Injection(form="per_sample", parts=300)]
RAW = Injection(form="per_sample_raw")
CAPPED = Injection(form="per_sample_raw", occurrences=30)


def plan(**changes: Any) -> StepPlan:
    given = {"batch": 50.0, "steps": 200, **changes}
    return hand_plan(((2.0,), (math.inf,)), (20.0,), names=("k", "open"), public=(1,), rate=0.05, **given)


def gaussian_epsilon(mu: float, delta: float = 1e-5) -> float:
    """From the definition, by a solver that Lamina does not use."""

    def excess(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 1e-9, 600.0, xtol=1e-12))


# ---------------------------------------------------------------------------------------- prices


@pytest.mark.parametrize("injection", SAME, ids=str)
def test_parts_of_one_noise_cost_what_the_whole_costs(injection: Injection) -> None:
    whole, cut = plan(), plan(injection=injection)
    assert cut.schedule("k") == whole.schedule("k") == (Event(sigma=10.0, q=0.05, steps=200),)
    assert cut.epsilon("k") == whole.epsilon("k") and cut.rho("k") == whole.rho("k")
    assert cut.adjacency == whole.adjacency == "add/remove"
    assert cut.digest() != whole.digest()


@pytest.mark.parametrize("name", ["pld", "rdp", "moments", "zcdp", "gaussian"])
@pytest.mark.parametrize(("injection", "count"), [(RAW, 200), (CAPPED, 30)], ids=["every step", "capped"])
def test_raw_noise_costs_its_occurrences_and_nothing_less(name: str, injection: Injection, count: int) -> None:
    """ρ = N c²/(2 s²), its exact ε by an independent solver, and no accountant below it."""
    made = plan(injection=injection, accountant=name)
    assert made.schedule("k") == (Event(sigma=10.0, q=1.0, steps=count),)
    assert made.rho("k") == pytest.approx(count * 2.0**2 / (2 * 20.0**2))
    exact = gaussian_epsilon(math.sqrt(count) / 10.0)
    assert made.epsilon("k") >= exact * (1 - 1e-9)
    if name in ("pld", "gaussian"):
        assert made.epsilon("k") == pytest.approx(exact, rel=2e-3)
    replaced = made.epsilon("k", Adjacency.REPLACE_ONE)  # another content is twice as far away as none
    assert replaced == pytest.approx(gaussian_epsilon(2 * math.sqrt(count) / 10.0), rel=1e-6)
    assert made.epsilon("open") == 0.0
    assert made.adjacency == "zero-out, no amplification"
    assert plan(accountant="pld").epsilon("k") < 0.5 * exact if count == 200 else True


@given(cap=st.integers(1, 60), cuts=st.lists(st.integers(0, 50), max_size=6))
def test_stretches_add_up_to_the_whole_however_they_are_cut(cap: int, cuts: list[int]) -> None:
    made = plan(steps=50, injection=Injection(form="per_sample_raw", occurrences=cap))
    edges = sorted({0, 50, *cuts})
    parts = [e.steps for a, b in pairwise(edges) for e in made.schedule_between("k", a, b)]
    assert sum(parts) == min(cap, 50)
    assert all(e.q == 1.0 for e in made.schedule_between("k", 0, 50))


def test_a_scaled_contribution_under_raw_noise() -> None:
    made = plan(injection=CAPPED, accountant="gaussian")
    assert made.epsilon("k", scale=0.5) == pytest.approx(gaussian_epsilon(math.sqrt(30) / 20.0), rel=1e-6)
    assert made.rho("k", scale=0.5) == pytest.approx(made.rho("k") / 4)


# ---------------------------------------------------------------------------------------- what does not go together


@pytest.mark.parametrize(
    "rules",
    [(FollowEnergy(),), (FollowQuantile(noise=9.0),), (Choose(epsilon=0.1, every=10, names=("x",), noise=((1.0,),)),)],
    ids=["energy", "quantile", "choose"],
)
def test_rules_are_priced_or_read_as_if_noise_hid_who_was_sampled(rules: Any) -> None:
    with raises_code("plan.raw-noise-with-rule"):
        plan(injection=RAW, rules=rules)
    for injection in SAME:
        assert plan(injection=injection, rules=rules).epsilon("k") == plan(rules=rules).epsilon("k")


def test_a_budget_that_is_followed_needs_sampling() -> None:
    with raises_code("plan.raw-noise-with-rule"):
        plan(injection=RAW, accountant="rdp@8", rules=(FollowBudget(order=8.0), FollowEnergy()))


def test_the_printed_clamp_adds_its_noise_once() -> None:
    printed = plan(clipping=Clipping.ELEMENTWISE, allocation="printed-ladp", batch=1.0, claimed=(1.0, 0.0))
    for injection in (*SAME, RAW):
        with raises_code("plan.injection-not-per-step"):
            replace(printed, injection=injection)


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "per_layer"},
        {"form": "per_microbatch", "parts": 0},
        {"form": "per_microbatch", "parts": 65537},
        {"form": "per_microbatch", "parts": True},
        {"parts": 2},
        {"form": "per_sample_raw", "parts": 2},
        {"form": "per_sample_raw", "occurrences": 0},
        {"form": "per_sample", "parts": 2, "occurrences": 3},
    ],
)
def test_forms_that_mean_nothing(wrong: Any) -> None:
    with pytest.raises(PlanError):
        Injection(**wrong)


# ---------------------------------------------------------------------------------------- as it is told and kept


@pytest.mark.parametrize("injection", [*SAME, RAW, CAPPED], ids=str)
def test_a_plan_comes_back_as_it_was(injection: Injection) -> None:
    made = plan(injection=injection)
    assert StepPlan.from_json(made.to_json()) == made == StepPlan.from_cbor(made.to_cbor())
    told = made.to_dict()
    assert told["injection"] == {
        "form": injection.form.value,
        "parts": injection.parts,
        "occurrences": injection.occurrences,
    }
    assert told["classes"]["k"]["adjacency"] == made.adjacency
    assert f"noise {injection}" in made.table()


def test_the_table_says_what_raw_figures_are() -> None:
    assert "zero-out, no amplification: it prices 30 occurrences" in plan(injection=CAPPED).table()
    assert "zero-out" not in plan(injection=SAME[0]).table() + plan().table()
    assert "noise" not in plan().table().splitlines()[0]


# ---------------------------------------------------------------------------------------- from a policy

POLICY = """
[corpus]
origin = "tests"
delta = 1e-5
accountant = "ACCOUNTANT"
[class.k]
population = 1000
epsilon = 2.0
[noise]
injection = INJECTION
"""


def policy(injection: str, name: str = "pld") -> Policy:
    return Policy.parse(POLICY.replace("INJECTION", injection).replace("ACCOUNTANT", name))


def made_from(injection: str, name: str = "pld", **options: Any) -> StepPlan:
    stack = LayerStack.from_model(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
    return make_plan(stack, policy(injection, name), batch=50, steps=200, **options)


def test_plans_take_it_from_the_policy() -> None:
    plain = made_from('"per_step"')
    bins, slots = made_from('"per_microbatch"\nbins = 8'), made_from('"per_sample"\nslots = 80')
    assert bins.injection == Injection(form="per_microbatch", parts=8)
    assert slots.injection == Injection(form="per_sample", parts=80)
    assert plain.noise == bins.noise == slots.noise


@pytest.mark.parametrize("name", ["pld", "rdp", "zcdp", "gaussian"])
@pytest.mark.parametrize(("cap", "count"), [("", 200), ("\noccurrences = 12", 12), ("\noccurrences = 900", 200)])
def test_raw_plans_are_calibrated_for_what_they_claim(name: str, cap: str, count: int) -> None:
    made = made_from(f'"per_sample_raw"{cap}', name)
    assert 2.0 * (1 - 2e-3) <= made.epsilon("k") <= 2.0
    assert made.schedule("k")[0].q == 1.0 and made.schedule("k")[0].steps == count
    if name in ("pld", "gaussian"):
        assert gaussian_epsilon(math.sqrt(count) / made.sigma("k")) == pytest.approx(2.0, rel=3e-3)


def test_a_budget_in_rho() -> None:
    made = made_from('"per_sample_raw"\noccurrences = 12', rho=0.05)
    assert made.rho("k") == pytest.approx(0.05, rel=1e-9)
    assert made.sigma("k") == pytest.approx(math.sqrt(12 / (2 * 0.05)))


@pytest.mark.parametrize("allocate", ["ladp", "quantile"])
def test_allocations_that_move_are_refused_by_name(allocate: str) -> None:
    with raises_code("plan.raw-noise-with-rule"):
        made_from('"per_sample_raw"', allocate=allocate)


def test_one_capped_occurrence_costs_far_less_noise_than_every_step() -> None:
    every, once = made_from('"per_sample_raw"'), made_from('"per_sample_raw"\noccurrences = 1')
    assert every.sigma("k") == pytest.approx(once.sigma("k") * math.sqrt(200), rel=1e-3)


# ---------------------------------------------------------------------------------------- asking before a step


def test_a_filter_is_asked_for_what_a_raw_step_costs() -> None:
    """Unsampled, and only as often as one contribution can take part."""
    made = plan(injection=Injection(form="per_sample_raw", occurrences=3), steps=10)
    sampled = RenyiFilter.for_schedule((Event(sigma=10.0, q=0.05, steps=10),), order=8.0)
    with raises_code("engine.budget-exhausted"):
        Budget(made, {"k": sampled}).charge()
    enough = RenyiFilter.for_schedule((Event(sigma=10.0, q=1.0, steps=3),), order=8.0)
    budget = Budget(made, {"k": enough})
    for _ in range(10):
        budget.charge()
    assert not enough.admits(10.0, 1.0)
    assert budget.epsilon(0) == made.epsilon("k")
    exact = find_accountant("pld").epsilon([Event(sigma=10.0, q=1.0, steps=3)], 1e-5)
    assert made.epsilon("k") == exact
