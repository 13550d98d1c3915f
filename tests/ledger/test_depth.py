"""Depth by the layers of a plan: what a profile reaches on the model is let through, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from build import plan

from lamina.errors import PlanError
from lamina.ledger.verify.plan_checks import first_layer_outside
from lamina.plan.depth_profile import DepthProfile
from lamina.plan.layer_stack import Layer, LayerStack
from lamina.plan.selection import Slice
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan


def spans(block: int, tied: int | None) -> tuple[tuple[int, int], ...]:
    if tied is None or tied <= block + 1:
        return ((block, (tied or block) + 1),)
    return ((block, block + 1), (tied, tied + 1))


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
                spans=spans(b, tied if b == here[0] else None),
                shapes=((8, 8), (8,)),
            )
            for b in here
        ),
        blocks=tuple(f"blocks.{b}" for b in range(blocks)),
    )


def planned(layers: LayerStack, reached: tuple[bool, ...], **changes: Any) -> StepPlan:
    return StepPlan(
        layers=tuple(
            PlannedLayer(name=each.name, depth=each.depth, parameters=each.parameters, size=each.size, spans=each.spans)
            for each in layers
        ),
        blocks=len(layers.blocks),
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


@pytest.mark.parametrize("seed", range(8))
def test_one_more_layer_than_a_profile_reaches_is_named(seed: int) -> None:
    dice, asked = random.Random(seed), 0
    while asked < 100:
        blocks = dice.randint(2, 14)
        kept = sorted(dice.sample(range(blocks), dice.randint(2, blocks)))
        layers = stack(blocks, kept, dice.choice([None, blocks - 1]))
        profile = profiles(dice, blocks)
        try:
            reached = profile.resolve(layers)
        except PlanError:
            continue
        for more in (i for i, inside in enumerate(reached) if not inside):
            row = tuple(inside or i == more for i, inside in enumerate(reached))
            found = first_layer_outside(planned(layers, row), 0, profile)
            assert found == layers.layers[more].name, (profile, blocks, kept)
            asked += 1


@pytest.mark.parametrize(
    ("profile", "outside"),
    [
        (DepthProfile.band(0.0, 1.0), None),
        (DepthProfile.blocks(0, -1), None),
        (DepthProfile.top(0.5), "blocks.0.linear"),
        (DepthProfile.band(0.0, 0.5), "blocks.0.linear"),
        (DepthProfile.blocks(1, 2), "blocks.0.linear"),  # the model has no such blocks
    ],
)
def test_the_only_block(profile: DepthProfile, outside: str | None) -> None:
    assert first_layer_outside(planned(stack(1), (True,)), 0, profile) == outside


def test_a_plan_without_blocks_keeps_to_no_band() -> None:
    unplaced = tuple(dataclasses.replace(each, spans=()) for each in plan().layers)
    made = plan(layers=unplaced, blocks=0)
    assert first_layer_outside(made, 0, DepthProfile.all()) is None
    for profile in (DepthProfile.top(0.5), DepthProfile.top(1.0), DepthProfile.band(0, 1), DepthProfile.blocks(0, -1)):
        assert first_layer_outside(made, 0, profile) == "layer.2"


def test_an_adapter_moves_its_own_tensors() -> None:
    adapted = PlannedLayer(
        name="blocks.0.attn",
        depth=0.0,
        parameters=("blocks.0.attn.lora_A.ward.weight", "blocks.0.attn.weight"),
        size=128,
        spans=((0, 1),),
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
    tensors = ("vision.embed.weight", "language.bias")
    joined = PlannedLayer(name="vision.embed", depth=0.0, parameters=tensors, size=9, spans=((0, 1),))
    made = plan(layers=(joined, *plan().layers[1:]), clip=((0.5, 0, 0, 0), (float("inf"),) * 4), noise=(4.0,) * 4)
    assert first_layer_outside(made, 0, DepthProfile.layers(["vision.*"])) == "vision.embed"
    assert first_layer_outside(made, 0, DepthProfile.layers(["vision.embed"])) is None
    assert first_layer_outside(made, 0, DepthProfile.layers(["vision.*", "language.*"])) is None
