"""Depth by the layers of a plan: what a profile reaches on some model is let through, and little else."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from build import plan

from lamina.errors import PlanError
from lamina.ledger.verify.epoch_checks import first_layer_outside
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import Layer, LayerStack
from lamina.plan.selection import Slice
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan


def stack(blocks: int, kept: list[int] | None = None, tied: int | None = None) -> LayerStack:
    """A layer in every block that is trained; the first of them also used in block `tied`."""
    here = list(range(blocks)) if kept is None else kept
    return LayerStack(
        layers=tuple(
            Layer(
                name=f"blocks.{b}.linear",
                depth=b / (blocks - 1) if blocks > 1 else 1.0,
                block=b,
                parameters=(f"blocks.{b}.linear.weight", f"blocks.{b}.linear.bias"),
                size=72,
                spans=((b, b + 1),) if tied is None or b != here[0] else ((b, b + 1), (tied, tied + 1)),
                shapes=((8, 8), (8,)),
            )
            for b in here
        ),
        blocks=tuple(f"blocks.{b}" for b in range(blocks)),
    )


def planned(layers: LayerStack, reached: tuple[bool, ...], **changes: Any) -> StepPlan:
    return StepPlan(
        layers=tuple(
            PlannedLayer(name=each.name, depth=each.depth, parameters=each.parameters, size=each.size)
            for each in layers
        ),
        classes=(PlannedClass(name="clinical", population=1000, sampling_rate=0.01, delta=1e-5),),
        clip=(tuple(float(each) for each in reached),),
        noise=tuple(float(each) for each in reached),
        batch=10.0,
        steps=10,
        **changes,
    )


def profiles(dice: random.Random, blocks: int) -> DepthProfile:
    low, high = sorted(dice.sample(range(21), 2))
    first, last = sorted(dice.choices(range(blocks), k=2))
    return dice.choice(
        [
            DepthProfile.top(dice.choice([0.1, 0.25, 1 / 3, 0.5, 0.75, 1.0])),
            DepthProfile.band(low / 20, high / 20),
            DepthProfile.blocks(first, last),
            DepthProfile.blocks(first - blocks, last - blocks),
            DepthProfile.blocks(first, last - blocks),
            DepthProfile.blocks(first - blocks, last),
            DepthProfile.layers([f"blocks.{first}.*", last % 2 - 1]),
            DepthProfile.all().weighted({f"blocks.{first}.linear": 0.0}),
        ]
    )


def test_what_a_profile_reaches_on_a_model_is_never_refused() -> None:
    dice, seen = random.Random(7), 0
    for _ in range(3000):
        blocks = dice.randint(1, 14)
        kept = sorted(dice.sample(range(blocks), dice.randint(1, blocks)))
        layers = stack(blocks, kept, dice.choice([None, blocks - 1]))
        profile = profiles(dice, blocks)
        try:
            reached = profile.resolve(layers)
        except PlanError:
            continue  # nothing there
        seen += 1
        assert first_layer_outside(planned(layers, reached), 0, profile) is None, (profile, blocks, kept)
    assert seen > 1000


@pytest.mark.parametrize(
    ("blocks", "profile", "layer"),
    [
        (4, DepthProfile.top(0.5), 1),
        (4, DepthProfile.top(0.25), 0),
        (3, DepthProfile.top(0.5), 1),  # it straddles the edge
        (12, DepthProfile.top(0.25), 8),
        (12, DepthProfile.band(0.25, 0.5), 6),
        (12, DepthProfile.band(0.25, 0.5), 2),
        (8, DepthProfile.blocks(4, 7), 3),
        (8, DepthProfile.blocks(2, 3), 4),
        (8, DepthProfile.blocks(-2, -1), 5),
        (8, DepthProfile.blocks(0, -2), 7),
        (6, DepthProfile.layers(["blocks.5", "blocks.4.*"]), 3),
        (6, DepthProfile.layers([-1, 0]), 4),
        (6, DepthProfile.all().weighted({"blocks.2.*": 0.0}), 2),
    ],
)
def test_a_layer_outside_is_named(blocks: int, profile: DepthProfile, layer: int) -> None:
    layers = stack(blocks)
    reached = list(profile.resolve(layers))
    assert not reached[layer]
    reached[layer] = True
    assert first_layer_outside(planned(layers, tuple(reached)), 0, profile) is not None


def test_one_more_layer_is_found_nearly_always() -> None:
    """How many blocks a model has is not in a plan; with all of them trained, that hides few."""
    found = asked = 0
    for blocks in range(2, 14):
        layers = stack(blocks)
        for share in (0.1, 0.2, 0.25, 1 / 3, 0.5, 0.75):
            for profile in (DepthProfile.top(share), DepthProfile.band(0.0, share)):
                try:
                    reached = profile.resolve(layers)
                except PlanError:
                    continue
                for more in (i for i, inside in enumerate(reached) if not inside):
                    row = tuple(inside or i == more for i, inside in enumerate(reached))
                    asked += 1
                    found += first_layer_outside(planned(layers, row), 0, profile) is not None
    assert asked > 300
    assert found / asked > 0.9


def test_the_only_block() -> None:
    layers = stack(1)
    made = planned(layers, (True,))
    assert first_layer_outside(made, 0, DepthProfile.band(0.0, 1.0)) is None
    assert first_layer_outside(made, 0, DepthProfile.blocks(0, -1)) is None
    assert first_layer_outside(made, 0, DepthProfile.top(0.5)) is None  # it may be the last of many
    assert first_layer_outside(made, 0, DepthProfile.band(0.0, 0.5)) == "blocks.0.linear"


def test_depths_that_were_not_counted_in_blocks_are_compared_as_they_are() -> None:
    assert first_layer_outside(plan(), 0, DepthProfile.top(0.5)) is None
    assert first_layer_outside(plan(), 0, DepthProfile.top(0.25)) == "layer.2"
    odd = tuple(dataclasses.replace(each, depth=each.depth + 0.0123457) for each in plan().layers)
    assert first_layer_outside(plan(layers=odd), 0, DepthProfile.top(0.5)) is None


def test_an_adapter_moves_its_own_tensors() -> None:
    adapted = PlannedLayer(
        name="blocks.0.attn",
        depth=0.0,
        parameters=("blocks.0.attn.lora_A.ward.weight", "blocks.0.attn.weight"),
        size=128,
    )
    profile = DepthProfile.adapter("ward")
    whole = plan(layers=(adapted, *plan().layers[1:]), clip=((0.5, 0, 0, 0), (float("inf"),) * 4), noise=(4.0,) * 4)
    assert first_layer_outside(whole, 0, profile) == "blocks.0.attn"
    closed = Slice(cls="clinical", tensor="blocks.0.attn.weight", axis=0, length=8, ranges=())
    assert first_layer_outside(dataclasses.replace(whole, slices=(closed,)), 0, profile) is None
    ajar = dataclasses.replace(closed, ranges=((0, 2),))
    assert first_layer_outside(dataclasses.replace(whole, slices=(ajar,)), 0, profile) == "blocks.0.attn"
    assert (
        first_layer_outside(dataclasses.replace(whole, slices=(closed,)), 0, DepthProfile.adapter("other")) is not None
    )
    assert first_layer_outside(plan(), 0, profile) == "layer.2"


def test_a_tied_tensor_is_meant_by_patterns_for_all_of_its_uses() -> None:
    joined = PlannedLayer(name="vision.embed", depth=0.0, parameters=("vision.embed.weight", "language.bias"), size=9)
    made = plan(layers=(joined, *plan().layers[1:]), clip=((0.5, 0, 0, 0), (float("inf"),) * 4), noise=(4.0,) * 4)
    assert first_layer_outside(made, 0, DepthProfile.layers(["vision.*"])) == "vision.embed"
    assert first_layer_outside(made, 0, DepthProfile.layers(["vision.embed"])) is None
    assert first_layer_outside(made, 0, DepthProfile.layers(["vision.*", "language.*"])) is None
