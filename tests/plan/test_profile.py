"""Depth profiles: what they reach, exactly, and what they refuse."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lamina.errors import PlanError
from lamina.plan import DepthProfile, Layer, LayerStack


def stack_of(blocks: int) -> LayerStack:
    layers = tuple(
        Layer(
            name=f"b.{i}",
            depth=i / max(blocks - 1, 1),
            block=i,
            parameters=(f"b.{i}.w",),
            size=1,
            spans=((i, i + 1),),
        )
        for i in range(blocks)
    )
    return LayerStack(layers=layers, blocks=tuple(layer.name for layer in layers))


def reached(profile: DepthProfile, stack: LayerStack) -> list[int]:
    return [i for i, inside in enumerate(profile.resolve(stack)) if inside]


@given(st.integers(1, 200), st.data())
@settings(max_examples=200, deadline=None)
def test_top_of_k_nths_is_exactly_k_blocks(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    assert reached(DepthProfile.top(k / n), stack_of(n)) == list(range(n - k, n))


@given(st.integers(1, 60), st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_top_counts_whole_blocks_only(n: int, percent: int) -> None:
    expected = int(Fraction(percent, 100) * n)  # floor: a block that straddles is out
    profile = DepthProfile.top(percent / 100)
    assert sum(profile.resolve(stack_of(n), allow_empty=True)) == expected


def test_the_contract_examples() -> None:
    assert reached(DepthProfile.top(0.25), stack_of(8)) == [6, 7]
    assert reached(DepthProfile.top(0.1), stack_of(10)) == [9]
    assert reached(DepthProfile.top(0.3), stack_of(10)) == [7, 8, 9]
    assert reached(DepthProfile.band(0.25, 0.75), stack_of(4)) == [1, 2]
    assert reached(DepthProfile.band(0.2, 0.8), stack_of(4)) == [1, 2]
    assert reached(DepthProfile.blocks(1, 2), stack_of(4)) == [1, 2]
    assert reached(DepthProfile.blocks(-2, -1), stack_of(4)) == [2, 3]
    assert reached(DepthProfile.layers(["b.1", -1]), stack_of(4)) == [1, 3]
    assert reached(DepthProfile.layers(["b.[02]"]), stack_of(4)) == [0, 2]
    assert reached(DepthProfile.layers(["b"]), stack_of(3)) == [0, 1, 2]
    assert reached(DepthProfile.all(), stack_of(3)) == [0, 1, 2]


def test_a_tied_layer_is_reached_only_if_all_its_uses_are_inside() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    model[3].weight = model[0].weight
    stack = LayerStack.from_model(model)
    assert [layer.name for layer in stack] == ["0", "1", "2"]
    assert reached(DepthProfile.top(0.5), stack) == [2]
    assert reached(DepthProfile.band(0, 0.5), stack) == [1]
    assert reached(DepthProfile.top(1), stack) == [0, 1, 2]
    with pytest.raises(PlanError, match="reaches no trainable layer"):
        DepthProfile.top(0.25).resolve(stack)
    with pytest.raises(PlanError, match="shares a tensor with layer '0'"):
        DepthProfile.layers(["3"]).resolve(stack)


def test_a_layer_of_several_blocks_must_lie_inside() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    stack = LayerStack.from_model(model, {"upper": ["1", "2"]})
    assert reached(DepthProfile.top(0.5), stack) == [2]
    assert reached(DepthProfile.top(0.75), stack) == [1, 2]


def test_freezing_moves_no_ones_depth() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[:2].requires_grad_(False)
    stack = LayerStack.from_model(model)
    assert [stack.layers[i].name for i in reached(DepthProfile.top(0.25), stack)] == ["3"]
    with pytest.raises(PlanError, match="frozen"):
        DepthProfile.layers(["0"]).resolve(stack)


def test_empty_is_refused_unless_allowed() -> None:
    with pytest.raises(PlanError, match=r"'top 25 %' reaches no trainable layer of 3 blocks"):
        DepthProfile.top(0.25).resolve(stack_of(3))
    assert DepthProfile.top(0.25).resolve(stack_of(3), allow_empty=True) == (False, False, False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"top": 0}, "top is 0"),
        ({"top": 1.5}, "top is 1.5"),
        ({"top": 25}, "top is 25"),
        ({"top": True}, "top is True"),
        ({"top": "25%"}, "top is '25%'"),
        ({"top": float("nan")}, "top is nan"),
        ({"band": [0.5, 0.5]}, r"band is \[0.5, 0.5\]"),
        ({"band": [0.5]}, "must be fractions"),
        ({"band": [4, 7]}, "blocks = "),
        ({"band": 0.5}, "must be a list"),
        ({"blocks": [0.5, 1]}, "first and the last block"),
        ({"layers": []}, "must hold names"),
        ({"layers": [""]}, "must hold names"),
        ({"layers": [True]}, "must hold names"),
        ({"heads": [1]}, "not a known kind.*all = true.*top.*band.*blocks.*layers"),
        ({"top": 0.25, "band": [0, 1]}, "not a known kind"),
        ({"all": False}, "all is False"),
        ("top", "not a known kind"),
        ({}, "not a known kind"),
    ],
)
def test_nonsense_is_refused(value: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        DepthProfile.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (DepthProfile.blocks(2, 4), "blocks 0 to 3"),
        (DepthProfile.blocks(3, 2), "blocks 0 to 3"),
        (DepthProfile.blocks(-5, -1), "blocks 0 to 3"),
        (DepthProfile.layers([4]), "layers 0 to 3"),
        (DepthProfile.layers(["b.9"]), "did you mean"),
        (DepthProfile.layers(["decoder"]), "does not have"),
    ],
)
def test_out_of_range_is_refused(profile: DepthProfile, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        profile.resolve(stack_of(4))


@pytest.mark.parametrize(
    "value", [{"all": True}, {"top": 0.1}, {"band": [0.5, 1.0]}, {"blocks": [-2, -1]}, {"layers": ["a.*", 3]}]
)
def test_round_trip(value: dict[str, object]) -> None:
    profile = DepthProfile.parse(value)
    assert profile.to_dict() == value
    assert DepthProfile.parse(profile.to_dict()) == profile
    assert hash(profile) == hash(DepthProfile.parse(value))
    assert str(profile)
