"""A plan that reaches deeper than the policy, held against model and policy by what it does."""

from __future__ import annotations

from dataclasses import replace

from refusals import raises_code
from torch import nn

from lamina.allocate.make_plan import make_plan
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.selection import Slice
from lamina.plan.step_plan import StepPlan
from lamina.run.trainer_checks import DEPTH_NOT_COMPARED, check_depth_profiles
from lamina.signals.autoencoders import TransformerAutoencoder


def policy(profile: dict[str, object]) -> Policy:
    table = {"population": 500, "epsilon": 2.0}
    return Policy.from_dict(
        {
            "corpus": {"origin": "test", "delta": 1e-5, "accountant": "gaussian"},
            "class": {"all": table, "few": {**table, "profile": profile}},
        }
    )


def planned(model: nn.Module, under: Policy, **options: object) -> StepPlan:
    stack = LayerStack.from_model(model, **options)  # type: ignore[arg-type]
    return make_plan(stack, under, batch=20, steps=5, allocate="uniform")


def stacked() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def test_a_plan_of_this_policy_passes() -> None:
    model, under = stacked(), policy({"top": 0.5})
    assert check_depth_profiles(model, under, planned(model, under)) is None
    assert check_depth_profiles(model, None, planned(model, under)) is None
    assert check_depth_profiles(model, under, planned(model, under, group="block")) is None


def test_thresholds_outside_of_the_profile_are_refused_whatever_the_words_say() -> None:
    model, under = stacked(), policy({"top": 0.5})
    plan = planned(model, under)
    k = plan.index("few")
    deep = replace(plan, clip=tuple(row if i != k else (0.1,) * 4 for i, row in enumerate(plan.clip)))
    assert deep.classes[k].profile == plan.classes[k].profile
    with raises_code("train.class-outside-profile"):
        check_depth_profiles(model, under, deep)


def test_heads_outside_of_the_mask_are_refused() -> None:
    model = TransformerAutoencoder(4, tokens=4, width=8, layers=2, heads=4, hidden=8, code=4)
    under = policy({"heads": [1]})
    plan = planned(model, under)
    assert plan.slices and check_depth_profiles(model, under, plan) is None
    with raises_code("train.class-outside-profile"):
        check_depth_profiles(model, under, replace(plan, slices=()))
    part = next(part for part in plan.slices if part.ranges)
    wider = Slice(cls=part.cls, tensor=part.tensor, axis=part.axis, length=part.length, ranges=((0, part.length),))
    others = tuple(each for each in plan.slices if each is not part)
    with raises_code("train.class-outside-profile"):
        check_depth_profiles(model, under, replace(plan, slices=(*others, wider)))


def test_what_cannot_be_compared_is_said() -> None:
    model, under = stacked(), policy({"top": 0.5})
    plan = planned(model, under)
    layers = zip(plan.layers, reversed(plan.layers), strict=True)  # in an order that an example may have given
    placed = (replace(one, depth=other.depth, spans=other.spans) for one, other in layers)
    turned = replace(plan, layers=tuple(placed)[::-1])
    assert check_depth_profiles(model, under, turned) == DEPTH_NOT_COMPARED
