"""ladp: presets, which layers are sensitive and why, its rules, and what its choices cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import policy_of
from refusals import raises_code
from torch import nn

from lamina.account.gaussian_rdp import choice_noise_multiplier
from lamina.allocate.ladp import LADP, default_shapes, plan_candidates
from lamina.allocate.make_plan import explained_plan, make_plan
from lamina.allocate.problem import AllocationProblem
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import LayerStack
from lamina.plan.rules import Choose, FollowBudget, FollowEnergy
from lamina.plan.step_plan import Clipping, StepPlan

Make = Callable[..., Any]
STACK = LayerStack.from_model(nn.Sequential(*(nn.Linear(4 + i, 5 + i) for i in range(8))))
NAMES = tuple(layer.name for layer in STACK)
POLICY = policy_of(
    a={"population": 1000, "epsilon": 2.0, "profile": {"top": 0.5}},
    b={"population": 3000, "epsilon": 4.0, "clip_norm": 2.0},
    open={"population": 1000, "public": True},
)


def plan_of(allocate: LADP, **changes: Any) -> StepPlan:
    return make_plan(STACK, POLICY, **{"batch": 80, "steps": 200, "allocate": allocate, **changes})


def test_presets_give_thresholds_and_shares(alone: Make) -> None:
    stack = LayerStack.from_model(nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))))
    asked = alone(stack=stack)
    given = LADP(sensitive=lambda layer: layer.name in ("1", "3"))(asked)
    shape = np.array([5.0, 1.0, 5.0, 1.0, 5.0])
    np.testing.assert_allclose(given.clip[0], 2 * shape / np.linalg.norm(shape))
    shares = np.square(np.array(given.clip[0]) / given.noise) * 9  # sigma is 3
    np.testing.assert_allclose(shares, np.array([0.5, 1.0, 0.5, 1.0, 0.5]) / 3.5)
    assert given.rules == (FollowEnergy(decay=0.9, least=0.1, every=10),)
    assert given.clipping is Clipping.BOX


@pytest.mark.parametrize(
    ("sensitive", "expected", "because"),
    [
        (["1", "3"], {1, 3}, "the plan names them"),
        ([-1], {7}, "the plan names them"),
        ("2", {2}, "the plan names them"),
        (DepthProfile.band(0.25, 0.5), {2, 3}, "the profile 'band 0.25 to 0.5' names them"),
        (lambda layer: layer.size > 100, {6, 7}, "the rule '<lambda>' picks them"),
        (None, {6, 7}, "the top 25 % of the depth, and nothing was measured"),
    ],
)
def test_what_is_sensitive_can_be_said_in_many_ways(sensitive: Any, expected: set[int], because: str) -> None:
    plan, given = explained_plan(STACK, POLICY, batch=80, steps=20, allocate=LADP(sensitive=sensitive))
    row = plan.clip[plan.index("b")]
    assert {i for i in range(8) if row[i] == min(row)} == expected
    assert because in given.why[0]
    assert given.why[0].startswith(f"Sensitive layers: {', '.join(str(i) for i in sorted(expected))}, because")


def test_without_a_word_the_measured_fisher_information_decides(measure: Make) -> None:
    known = measure(NAMES, fisher=(1.0, 9.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0))
    plan, given = explained_plan(STACK, POLICY, batch=80, steps=20, allocate="ladp", measure=known)
    row = plan.clip[plan.index("b")]
    assert {i for i in range(8) if row[i] == min(row)} == {1, 4}
    assert "most Fisher information on the proxy (made up), 70 % of all" in given.why[0]
    wide = LADP(share=0.5)(Problem_of(known))
    assert sum(c == min(wide.clip[0]) for c in wide.clip[0]) == 4


def Problem_of(known: Any) -> AllocationProblem:
    sizes = tuple(layer.size for layer in STACK)
    return AllocationProblem(
        sizes=sizes,
        weights=tuple(map(float, sizes)),
        reach=((True,) * 8,),
        clip_norm=(1.0,),
        sigma=(1.0,),
        measure=known,
        stack=STACK,
    )


def test_a_shallow_model_has_its_last_layer_sensitive(alone: Make) -> None:
    given = LADP()(alone())  # no stack: ⌈5/4⌉ = 2 layers
    assert [c == min(given.clip[0]) for c in given.clip[0]] == [False] * 3 + [True] * 2
    two = LayerStack.from_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    plan = make_plan(two, policy_of(a={"population": 100}), batch=10, steps=5, rho=1.0, allocate="ladp")
    assert plan.clip[0][0] == pytest.approx(5 * plan.clip[0][1])


# --------------------------------------------------------------------------------------------------------- modes


def test_the_second_mode_is_priced_at_one_order() -> None:
    plan = plan_of(LADP(mode="budget", lower=0.9, upper=1.001))
    rule = plan.rule(FollowBudget)
    assert rule is not None
    assert plan.accountant == f"rdp@{rule.order:g}"
    assert 0.9 <= rule.least <= 1  # the plan may narrow what was asked for, never widen it
    assert rule.most == 1.001
    assert plan.allocation == "ladp-budget"
    assert plan.epsilon("a") <= 2.0
    assert plan.epsilon("b") <= 4.0
    assert max(plan.epsilon("a") / 2, plan.epsilon("b") / 4) > 0.999
    assert StepPlan.from_json(plan.to_json()) == plan


def test_choices_are_paid_for() -> None:
    """The same ε with fewer choices, or none, allows less noise; ε counts the choices."""
    none, rare, often = (plan_of(LADP(choose_every=every)) for every in (None, 100, 10))
    sigma = [plan.sigma("a") for plan in (none, rare, often)]
    assert sigma[0] < sigma[1] < sigma[2]
    for plan, calls in ((rare, 2), (often, 20)):
        steps, choices = plan.schedule("a")
        assert (steps.steps, choices.steps) == (200, calls)
        assert choices.sigma == choice_noise_multiplier(0.5)
        assert plan.clipping is Clipping.JOINT
        assert max(plan.epsilon("a") / 2, plan.epsilon("b") / 4) == pytest.approx(1, abs=1e-3)
        assert StepPlan.from_cbor(plan.to_cbor()) == plan
    assert LADP(choose_every=30).side_releases(91) == ((choice_noise_multiplier(0.5), 4),)
    assert LADP().side_releases(91) == ()


def test_thirty_choices_in_a_long_run_cost_little() -> None:
    """At the sigma of ε = 0.997, q = 0.0128, 30 choices at 0.5 add 0.004; as pure ε they would add 0.025."""
    one = policy_of("pld", a={"population": 20_000, "epsilon": 1.0})
    bare = make_plan(STACK, one, batch=256, steps=7812, allocate=LADP(), epsilon=0.997)
    choosing = make_plan(STACK, one, batch=256, steps=7812, allocate=LADP(choose_every=261), epsilon=0.997).rescaled(
        {"a": bare.sigma("a")}
    )
    assert len(choosing.schedule("a")) == 2
    assert choosing.schedule("a")[1].steps == 30
    assert bare.epsilon("a") == pytest.approx(0.997, abs=1e-3)
    assert choosing.epsilon("a") - bare.epsilon("a") == pytest.approx(0.004, abs=0.001)


def test_candidates_are_public_shapes_with_noise_where_it_is_needed(problem: Make) -> None:
    asked = problem()
    given = LADP(choose_every=10, price=3.0)(asked)
    rule = given.rules[-1]
    assert isinstance(rule, Choose)
    assert rule.names == ("flat", "proportional", "pareto", "preset", "input-heavy", "output-heavy")
    assert all([s > 0 for s in row] == [True, True, True, False, False] for row in rule.noise)
    assert rule.noise[3] == given.noise
    assert rule.price == 3.0
    default = LADP(choose_every=10)(asked).rules[-1]
    assert isinstance(default, Choose)
    assert default.price == 16.0  # a quarter of the batch of 64


def test_noise_falls_along_the_depth_as_the_name_says(alone: Make) -> None:
    asked = alone(sizes=(10,) * 5, weights=(10.0,) * 5)
    clip = asked.thresholds()
    rows = dict(default_shapes(asked, clip, np.ones(5)))
    heavy = np.square(1 / np.array(rows["input-heavy"]))
    assert heavy[0] / heavy[-1] == pytest.approx(4.0)
    assert rows["output-heavy"] == pytest.approx(rows["input-heavy"][::-1])


def test_candidates_of_ones_own() -> None:
    shapes = (("even", (1.0,) * 8), ("late", (2.0,) * 4 + (1.0,) * 4))
    plan = plan_of(LADP(choose_every=50, candidates=shapes), batch={"a": 20, "b": 0, "open": 10})
    rule = plan.rule(Choose)
    assert rule is not None
    assert rule.names == ("even", "late")
    assert rule.noise[1] == (0.0,) * 4 + (1.0,) * 4  # no private class reaches the first four
    assert [offer.name for offer in plan_candidates(plan)] == ["even", "late"]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "allocate.option-unknown"),
        ({"thresholds": (1.0,)}, "allocate.option-pair"),
        ({"thresholds": (0.0, 5.0)}, "allocate.option-range"),
        ({"parts": (1.0, -0.5)}, "allocate.option-range"),
        ({"share": 0.0}, "allocate.option-range"),
        ({"sensitive": 3}, "allocate.sensitive-type"),
        ({"sensitive": []}, "allocate.sensitive-type"),
        ({"choose_every": 0}, "allocate.option-not-whole"),
        ({"choose_every": 1.5}, "allocate.option-not-whole"),
        ({"choose_every": 5, "choose_epsilon": 0.0}, "account.choice-epsilon-out-of-range"),
        ({"candidates": (("flat", (1.0,)),)}, "allocate.candidates-unused"),
        ({"price": -1.0}, "allocate.option-range"),
        ({"decay": 1.0}, "plan.rule-out-of-range"),
        ({"every": 0}, "plan.rule-out-of-range"),
        ({"mode": "budget", "lower": 2.0}, "plan.rule-out-of-range"),
        ({"clipping": "elementwise"}, "allocate.option-unknown"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with raises_code(message):
        LADP(**options)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ((("short", (1.0, 1.0)),), "allocate.candidate-length"),
        ((("zero", (0.0,) * 8),), "allocate.candidate-range"),
        ((("nan", (math.nan,) * 8),), "allocate.candidate-range"),
        ((("x", (1.0,) * 8), ("x", (2.0,) * 8)), "plan.candidates-unnamed"),
    ],
)
def test_candidates_that_do_not_fit_are_refused(shapes: Any, message: str) -> None:
    with raises_code(message):
        plan_of(LADP(choose_every=50, candidates=shapes))


def test_names_of_layers_that_do_not_exist_are_refused(alone: Make) -> None:
    with raises_code("plan.layer-unknown"):
        plan_of(LADP(sensitive=["head"]))
    with raises_code("allocate.no-stack"):
        LADP(sensitive=["1"])(alone())


class Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "shapes",
    [
        "abc",
        5,
        (),
        {},
        (("a", ("x", 1.0)),),
        (("a", (None,) * 8),),
        (("a", (True,) * 8),),
        (("a", "12345678"),),
        (("a", 3),),
        (("a",),),
        ("ab", "cd"),
        ((5, (1.0,) * 8),),
        (("", (1.0,) * 8),),
        (("a", (1e200,) + (1.0,) * 7),),
        (("a", (1e-300,) + (1.0,) * 7),),
        (("a", (10**400,) + (1.0,) * 7),),
        (("a", (Unwritable(),) * 8),),
    ],
)
def test_candidates_that_are_none_are_refused_where_they_are_given(shapes: Any) -> None:
    with raises_code("allocate.candidate-type", "allocate.candidate-range", "allocate.candidate-type"):
        LADP(choose_every=50, candidates=shapes)


@pytest.mark.parametrize("clipping", [None, "box"])
@pytest.mark.parametrize("far", [1e-17, 1e17])
def test_candidates_that_no_step_could_take_are_refused_with_the_plan(clipping: Any, far: float) -> None:
    """Each number is one that float32 carries; scaled to the plan's sigma, some are not."""
    shapes = (("even", (1.0,) * 8), ("wild", (far,) + (1.0,) * 6 + (1 / far,)))
    with raises_code("allocate.candidate-range"):
        plan_of(LADP(choose_every=50, candidates=shapes, clipping=clipping))


@pytest.mark.parametrize("clipping", [None, "box"])
@pytest.mark.parametrize("far", [1e-8, 1e-5, 1.0, 1e5, 1e8])
def test_every_offer_of_a_plan_can_be_taken(clipping: Any, far: float) -> None:
    shapes = (("even", [1.0] * 8), ["wild", (far, *(1.0,) * 6, 1 / far)])
    plan = plan_of(LADP(choose_every=50, candidates=shapes, clipping=clipping))  # type: ignore[arg-type]
    for offer in plan_candidates(plan):
        replace(plan, clip=offer.clip, noise=offer.noise)  # checks itself


def test_a_rule_for_sensitive_layers_that_fails_is_refused() -> None:
    with raises_code("allocate.sensitive-predicate"):
        plan_of(LADP(sensitive=lambda layer: 1 / 0 > 1))
    for answer in ("yes", 1, None, np.ones(2)):
        with raises_code("allocate.sensitive-predicate"):
            plan_of(LADP(sensitive=lambda layer, answer=answer: answer))
    assert plan_of(LADP(sensitive=lambda layer: np.bool_(layer.depth > 0.5))) == plan_of(
        LADP(sensitive=lambda layer: layer.depth > 0.5)
    )
