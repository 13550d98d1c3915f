"""Plans that are calibrated to a risk bound: its curve is kept, used up, and refused where nothing is proven."""

from __future__ import annotations

import random
from typing import Any

import pytest
from plans import policy_of
from refusals import raises_code
from scipy.stats import norm
from torch import nn

from lamina.account.tradeoff import trade_off
from lamina.allocate.make_plan import make_plan
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.risk import RiskBound, plan_curve
from lamina.plan.step_plan import StepPlan

STACK = LayerStack.from_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def policy(
    risk: dict[str, Any], *, corpus: dict[str, Any] | None = None, noise: dict[str, Any] | None = None, **entry: Any
) -> Policy:
    data: dict[str, Any] = {
        "corpus": {"origin": "example.org/risk", "delta": 1e-5, **(corpus or {})},
        "class": {"clinical": {"population": 1000, "unit": "patient", "risk": risk, **entry}},
    }
    return Policy.from_dict(data | ({"noise": noise} if noise else {}))


def risk(of: str = "membership", fpr: float = 0.01, tpr: float = 0.05) -> dict[str, Any]:
    return {"of": of, "fpr": fpr, "tpr": tpr}


def gaussian_rate(plan: StepPlan, of: str, fpr: float) -> float:
    """By the closed form: μ = √T/sigma, twice that where content is replaced."""
    mu = plan.steps**0.5 / plan.sigma("clinical") * (1 if of == "membership" else 2)
    return float(norm.cdf(norm.ppf(fpr) + mu))


def single_step_rate(plan: StepPlan, fpr: float) -> float:
    """By the Neyman-Pearson test of one sampled step, in both directions: the likelihood ratio grows with the output."""
    q, mu = plan.classes[0].sampling_rate, 1 / plan.sigma("clinical")
    removed = (1 - q) * fpr + q * norm.cdf(norm.ppf(fpr) + mu)  # null: without it
    low, high = -50.0, 50.0
    for _ in range(200):  # null: with it; accuse of absence below a threshold
        middle = 0.5 * (low + high)
        mass = (1 - q) * norm.cdf(middle) + q * norm.cdf(middle - mu)
        low, high = (middle, high) if mass < fpr else (low, middle)
    return float(max(removed, norm.cdf(low)))


@pytest.mark.parametrize("seed", range(40))
def test_random_policies_keep_their_risk_and_use_it(seed: int) -> None:
    draw = random.Random(seed)
    of, fpr = draw.choice(["membership", "content"]), draw.choice([0.001, 0.01, 0.05, draw.uniform(1e-4, 0.2)])
    tpr = fpr + (0.9 - fpr) * draw.random() ** 2 + 1e-3
    kind = draw.choice(["whole", "unsampled", "single", "sampled", "sampled"])
    steps = 1 if kind == "single" else draw.randrange(2, 400)
    batch = 1000 if kind in ("whole",) else draw.randrange(50, 400)
    accountant = draw.choice(["gaussian", "zcdp"]) if kind == "unsampled" else draw.choice(["pld", "rdp", "moments"])
    if kind == "single":
        batch = max(batch, int(1000 * min(1.0, 2 * (tpr - fpr))))
    plan = make_plan(STACK, policy(risk(of, fpr, tpr), corpus={"accountant": accountant}), batch=batch, steps=steps)
    curve = plan_curve(plan, "clinical", of)  # type: ignore[arg-type]
    assert curve is not None
    assert 0.98 * tpr <= curve.tpr(fpr) <= tpr
    if kind in ("whole", "unsampled"):
        assert 0.98 * tpr <= gaussian_rate(plan, of, fpr) <= tpr
    if kind == "single" and of == "membership":
        assert 0.98 * tpr <= single_step_rate(plan, fpr) <= tpr


@pytest.mark.parametrize("noise", [{"kind": "discrete_gaussian"}, {"kind": "skellam"}, {"kind": "laplace"},
                                   {"correlation": "banded", "bands": 4}, {"injection": "per_microbatch", "bins": 2}])  # fmt: skip
@pytest.mark.parametrize("of", ["membership", "content"])
def test_every_noise_with_a_curve_keeps_the_bound(noise: dict[str, Any], of: str) -> None:
    accountant = "rdp-integer" if noise.get("kind") in ("discrete_gaussian", "skellam") else "pld"
    plan = make_plan(STACK, policy(risk(of), noise=noise, corpus={"accountant": accountant}), batch=100, steps=40)
    curve = plan_curve(plan, "clinical", of)  # type: ignore[arg-type]
    assert curve is not None and 0.98 * 0.05 <= curve.tpr(0.01) <= 0.05
    if of == "content" and "bins" not in noise:  # replacing is removing and adding, no better than that is proven
        events = {(event.sigma, event.q, 0.0): event.steps for event in plan.schedule("clinical")}
        apart = trade_off(events, accountant=accountant)
        gaussian = trade_off(events, accountant="pld", adjacency="replace_one")
        assert gaussian.tpr(0.01) < curve.tpr(0.01) <= apart.tpr(apart.tpr(0.01))


def test_a_budget_that_noise_follows_keeps_the_bound_at_its_order() -> None:
    plan = make_plan(STACK, policy(risk()), batch=100, steps=200, allocate="ladp-budget")
    curve = plan_curve(plan, "clinical", "membership")
    assert curve is not None and 0.98 * 0.05 <= curve.tpr(0.01) <= 0.05


def test_raw_noise_keeps_a_bound_on_content_and_refuses_one_on_membership() -> None:
    raw = {"injection": "per_sample_raw"}
    plan = make_plan(STACK, policy(risk("content"), noise=raw), batch=100, steps=20)
    assert 0.98 * 0.05 <= gaussian_rate(plan, "content", 0.01) <= 0.05
    assert plan_curve(plan, "clinical", "membership") is None
    with raises_code("plan.risk-not-proven"):
        policy(risk("membership"), noise=raw)


@pytest.mark.parametrize("other", [{"epsilon": 0.2}, {"noise_multiplier": 8.0}])
def test_beside_another_budget_the_stricter_holds(other: dict[str, float]) -> None:
    loose, strict = risk(tpr=0.5), risk(tpr=0.0101)
    given, alone = (make_plan(STACK, policy(each, **other), batch=100, steps=50) for each in (loose, strict))
    plain = policy_of(accountant="pld", clinical={"population": 1000, "unit": "patient", **other})
    assert given.sigma("clinical") == make_plan(STACK, plain, batch=100, steps=50).sigma("clinical")
    assert alone.sigma("clinical") > given.sigma("clinical")


def test_a_floor_holds_beside_a_risk() -> None:
    floors = {"floors": {"noise_multiplier": 4.0}}
    plan = make_plan(STACK, policy(risk(tpr=0.9), corpus=floors), batch=100, steps=50)
    bound = policy(risk(tpr=0.9), corpus=floors).bound("clinical")
    assert bound is not None and 0.99 * bound < plan.epsilon("clinical") <= bound


def test_given_noise_and_rho_are_held_to_the_risk() -> None:
    rules = policy(risk())
    least = make_plan(STACK, rules, batch=100, steps=50).sigma("clinical")
    make_plan(STACK, rules, batch=100, steps=50, noise_multiplier=1.01 * least)
    with raises_code("allocate.above-policy-bound"):
        make_plan(STACK, rules, batch=100, steps=50, noise_multiplier=0.99 * least)
    with raises_code("allocate.above-policy-bound"):
        make_plan(STACK, rules, batch=100, steps=50, rho=5.0)
    with raises_code("allocate.above-policy-bound"):  # ε may be asked for, and the risk still holds
        make_plan(STACK, policy(risk(), epsilon=1.0), batch=100, steps=50, epsilon=1.5)
    assert make_plan(STACK, rules, batch=100, steps=50, epsilon=50.0).sigma("clinical") == least


def test_what_cannot_be_reached_is_refused_by_name() -> None:
    with raises_code("allocate.risk-unreachable"):  # hardly more than guessing
        make_plan(STACK, policy(risk(tpr=0.01 + 1e-13)), batch=100, steps=50)
    with raises_code("allocate.risk-needs-no-noise"):  # one in a thousand is sampled once
        make_plan(STACK, policy(risk(tpr=0.05)), batch=1, steps=1)
    assert make_plan(STACK, policy(risk(tpr=0.05), epsilon=1.0), batch=1, steps=1).epsilon("clinical") <= 1.0


@pytest.mark.parametrize("wrong", [
    risk(fpr=0.0), risk(fpr=-0.1), risk(tpr=1.0), risk(tpr=0.01), risk(fpr=0.05, tpr=0.01), risk(of="both"), risk(tpr=float("nan")),
    {"of": "membership", "fpr": 0.01}, {**risk(), "delta": 1e-5}, {**risk(), "tpr": True}, {**risk(), "tpr": "0.05"}, 0.05,
])  # fmt: skip
def test_a_malformed_risk_is_refused_and_named(wrong: Any) -> None:
    with raises_code("plan.policy-invalid") as found:
        policy(wrong)
    assert "class.clinical.risk" in str(found.value)


def test_a_public_class_has_no_risk() -> None:
    with raises_code("plan.policy-invalid"):
        policy_of(open={"population": 10, "public": True, "risk": risk()})


def test_a_bound_implies_those_that_are_looser() -> None:
    bound = RiskBound(of="membership", fpr=0.01, tpr=0.05)
    assert bound.implies(bound) and bound.implies(RiskBound(of="membership", fpr=0.001, tpr=0.06))
    assert not bound.implies(RiskBound(of="membership", fpr=0.02, tpr=0.05))
    assert not bound.implies(RiskBound(of="membership", fpr=0.01, tpr=0.04))
    assert not bound.implies(RiskBound(of="content", fpr=0.01, tpr=0.05))
