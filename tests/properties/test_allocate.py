"""Whatever the policy, the classes and their profiles: nobody gets less noise than was declared for them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lamina.allocate.basic import LSAB, Automatic, Flat, Pareto, Proportional, Quantile, Uniform
from lamina.allocate.ladp import LADP, plan_candidates
from lamina.allocate.make_plan import make_plan
from lamina.allocate.measure.measure import Measure
from lamina.allocate.paper import PaperLADP, PaperLSAB
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.rules import Choose
from lamina.plan.step_plan import Clipping, StepPlan

BOTH = (Clipping.BOX, Clipping.JOINT)


@lru_cache(maxsize=64)
def stack_of(widths: tuple[int, ...]) -> LayerStack:
    return LayerStack.from_model(nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))))


@st.composite
def sound(draw: st.DrawFn) -> Any:
    """A sound policy with options drawn at random."""
    form = draw(st.sampled_from(BOTH))
    part = st.floats(0.01, 0.99)
    return draw(
        st.sampled_from(
            [
                Flat(),
                Uniform(),
                Proportional(clipping=form),
                Pareto(weights=draw(st.sampled_from(["sizes", "harm"])), shrink=draw(part), clipping=form),
                LSAB(bound=draw(st.sampled_from(["tight", "worst"])), clipping=form),
                LADP(share=draw(part), parts=(draw(part), draw(part)), thresholds=(draw(part), 5.0)),
                LADP(choose_every=draw(st.integers(3, 40)), choose_epsilon=draw(part), clipping=form),
                Quantile(cost=draw(part), target=draw(part)),
                Automatic(gamma=draw(part)),
            ]
        )
    )


@st.composite
def settings_of_a_plan(draw: st.DrawFn) -> tuple[LayerStack, Policy, Measure, dict[str, float]]:
    widths = draw(st.lists(st.integers(1, 9), min_size=3, max_size=9))
    stack = stack_of(tuple(widths))
    layers, classes, rho = len(stack), {}, {}
    for k in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, layers - 1))
        last = draw(st.integers(first, layers - 1))
        classes[f"class-{k}"] = {
            "population": draw(st.integers(200, 5000)),
            "clip_norm": draw(st.floats(0.01, 100.0)),
            "profile": draw(st.sampled_from([{"all": True}, {"blocks": [first, last]}, {"layers": [first, last]}])),
        }
        rho[f"class-{k}"] = draw(st.floats(5.0, 50.0))
    if draw(st.booleans()):
        classes["open"] = {"population": 1000, "public": True}
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = ("tight", "worst", "printed", "harm", "norms", "fisher")
    rows = {name: tuple(rng.lognormal(0, 3, layers).tolist()) for name in names}
    measure = Measure(proxy="made up", layers=tuple(layer.name for layer in stack), **rows)
    policy = Policy.from_dict({"corpus": {"origin": "t", "delta": 1e-5}, "class": classes})
    return stack, policy, measure, rho


def owed(plan: StepPlan, rho: dict[str, float]) -> dict[str, float]:
    """sigma of every private class by its ρ, less what choices take: from the definition."""
    rule = plan.rule(Choose)
    found = {}
    for name, cap in rho.items():
        q = plan.classes[plan.index(name)].sampling_rate
        spent = 0.0
        if rule is not None:
            spent = sum(0.5 * e.steps * e.mu**2 for e in plan.schedule(name)[1:])
            assert plan.schedule(name)[1].q == q
        found[name] = math.sqrt(plan.steps / (2 * (cap - spent)))
    return found


@given(asked=settings_of_a_plan(), policy=sound(), steps=st.integers(1, 60))
@settings(max_examples=250)
def test_no_policy_undercuts_the_declared_sigma(asked: Any, policy: Any, steps: int) -> None:
    stack, rules, measure, rho = asked
    public = any(entry.public for entry in rules.classes.values())
    assume(not (public and getattr(policy, "name", policy) == "automatic"))  # refused where it divides by less
    plan = make_plan(stack, rules, batch=20, steps=steps, rho=rho, allocate=policy, measure=measure)
    declared = owed(plan, rho)
    ratios = [plan.sigma(name) / declared[name] for name in rho]
    assert min(ratios) >= 1 - 1e-12
    assert min(ratios) == pytest.approx(1, abs=1e-9)  # and not more noise than somebody needs
    for name, cap in rho.items():
        assert plan.rho(name) <= cap * (1 + 1e-12)
        profile = rules.classes[name].profile.resolve(stack)
        assert [c > 0 for c in plan.clip[plan.index(name)]] == list(profile)
    if plan.rule(Choose) is not None:
        for offer in plan_candidates(plan):
            taken = replace(plan, clip=offer.clip, noise=offer.noise)
            assert all(taken.sigma(name) >= plan.sigma(name) for name in rho)


@given(asked=settings_of_a_plan(), lsab=st.booleans(), steps=st.integers(1, 60))
@settings(max_examples=60)
def test_printed_policies_always_spend_more_than_they_claim(asked: Any, lsab: bool, steps: int) -> None:
    """The plan's own ε is above the claim in every class that the claim's layers are all reached by."""
    stack, rules, measure, rho = asked
    policy: Any = PaperLSAB() if lsab else PaperLADP()
    if lsab:
        plan = make_plan(stack, rules, batch=20, steps=steps, rho=rho, allocate=policy, measure=measure)
    else:
        plan = make_plan(stack, rules, batch=20, steps=steps, rho=rho, allocate=policy)
    for k, name in enumerate(rho):
        if all(plan.reaches(name, i) for i in range(len(stack))) and len(stack) > 2:
            assert plan.epsilon(k) > plan.claimed[k]
