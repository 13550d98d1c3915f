"""Depth profiles: what they reach, exactly, and what they refuse."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raises_code
from torch import nn

from lamina.errors import PlanError
from lamina.plan.depth_profile import PROFILE_SCHEMA, DepthProfile, ProfileKind
from lamina.plan.layer_stack import Layer, LayerStack
from lamina.signals.autoencoders import TransformerAutoencoder


def stack_of(blocks: int) -> LayerStack:
    layers = tuple(
        Layer(
            name=f"b.{i}", depth=i / max(blocks - 1, 1), block=i, parameters=(f"b.{i}.w",), size=1, spans=((i, i + 1),)
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
    with raises_code("plan.profile-reaches-nothing"):
        DepthProfile.top(0.25).resolve(stack)
    with raises_code("plan.layer-shared"):
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
    with raises_code("plan.layer-frozen"):
        DepthProfile.layers(["0"]).resolve(stack)


def test_empty_is_refused_unless_allowed() -> None:
    with raises_code("plan.profile-reaches-nothing"):
        DepthProfile.top(0.25).resolve(stack_of(3))
    assert DepthProfile.top(0.25).resolve(stack_of(3), allow_empty=True) == (False, False, False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"top": 0}, "plan.profile-fractions"),
        ({"top": 1.5}, "plan.profile-fractions"),
        ({"top": 25}, "plan.profile-fractions"),
        ({"top": True}, "plan.profile-fractions"),
        ({"top": "25%"}, "plan.profile-fractions"),
        ({"top": float("nan")}, "plan.profile-fractions"),
        ({"band": [0.5, 0.5]}, "plan.profile-fractions"),
        ({"band": [0.5]}, "plan.profile-fractions"),
        ({"band": [4, 7]}, "plan.profile-fractions"),
        ({"band": 0.5}, "plan.profile-not-list"),
        ({"blocks": [0.5, 1]}, "plan.profile-blocks"),
        ({"layers": []}, "plan.profile-layers"),
        ({"layers": [""]}, "plan.profile-layers"),
        ({"layers": [True]}, "plan.profile-layers"),
        ({"head": [1]}, "plan.profile-unknown"),
        ({"top": 0.25, "band": [0, 1]}, "plan.profile-two-places"),
        ({"heads": []}, "plan.profile-parts"),
        ({"heads": 3}, "plan.profile-parts"),
        ({"heads": "01"}, "plan.profile-parts"),
        ({"heads": [-1]}, "plan.profile-parts"),
        ({"heads": [True]}, "plan.profile-parts"),
        ({"experts": [0.5]}, "plan.profile-parts"),
        ({"heads": {}}, "plan.profile-parts"),
        ({"heads": {"": [0]}}, "plan.profile-parts"),
        ({"heads": {"*": [0], "a.*": [1]}}, "plan.profile-parts-overlap"),
        ({"others": True}, "plan.profile-others"),
        ({"heads": [0], "others": 3}, "plan.profile-others"),
        ({"weights": 0.5}, "plan.profile-weights"),
        ({"weights": {}}, "plan.profile-weights"),
        ({"weights": {"a": 2}}, "plan.profile-weights"),
        ({"weights": {"a": float("nan")}}, "plan.profile-weights"),
        ({"weights": {"a": "b"}}, "plan.profile-weights"),
        ({"weights": {"": 0.5}}, "plan.profile-weights"),
        ({"adapter": ""}, "plan.profile-adapter-name"),
        ({"adapter": 3}, "plan.profile-adapter-name"),
        ({"adapter": {"config": "ab"}}, "plan.profile-adapter-name"),
        ({"adapter": {"name": "a", "config": "ab"}}, "plan.profile-adapter-config"),
        ({"adapter": {"name": "a", "scope": "line\nbreak"}}, "plan.profile-adapter-name"),
        ({"adapter": {"name": "a", "scoop": "b"}}, "plan.profile-adapter-key"),
        ({"all": False}, "plan.profile-all"),
        ("top", "plan.profile-unknown"),
        ({}, "plan.profile-unknown"),
    ],
)
def test_nonsense_is_refused(value: object, message: str) -> None:
    with raises_code(message):
        DepthProfile.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (DepthProfile.blocks(2, 4), "plan.profile-blocks-out-of-range"),
        (DepthProfile.blocks(3, 2), "plan.profile-blocks-out-of-range"),
        (DepthProfile.blocks(-5, -1), "plan.profile-blocks-out-of-range"),
        (DepthProfile.layers([4]), "plan.layer-unknown"),
        (DepthProfile.layers(["b.9"]), "plan.layer-unknown"),
        (DepthProfile.layers(["decoder"]), "plan.layer-unknown"),
    ],
)
def test_out_of_range_is_refused(profile: DepthProfile, message: str) -> None:
    with raises_code(message):
        profile.resolve(stack_of(4))


@pytest.mark.parametrize(
    "value",
    [
        {"all": True},
        {"top": 0.1},
        {"band": [0.5, 1.0]},
        {"blocks": [-2, -1]},
        {"layers": ["a.*", 3]},
        {"heads": [0, 1]},
        {"top": 0.25, "heads": {"a.*": [0], "b.*": [1, 2]}, "experts": [3], "others": True},
        {"adapter": "default"},
        {"adapter": {"name": "default", "config": "0f" * 32, "scope": "ward-7/ecg"}, "heads": [2]},
        {"top": 0.5, "weights": {"decoder.*": 0.5, "head": 0.0}},
        {"weights": {"decoder.*": 0.5}},
    ],
)
def test_round_trip(value: dict[str, object]) -> None:
    profile = DepthProfile.parse(value)
    assert profile.to_dict() == value
    assert DepthProfile.parse(profile.to_dict()) == profile
    assert hash(profile) == hash(DepthProfile.parse(value))
    assert str(profile)


# --------------------------------------------------------------------------------------------------- weights


def test_weights_are_factors_on_layers_that_are_reached() -> None:
    profile = DepthProfile.top(0.5).weighted({"b.2": 0.5, "b.3": 0.0})
    reach = profile.reach(stack_of(4))
    assert reach.layers == (False, False, True, False)
    assert reach.factors == (1.0, 1.0, 0.5, 1.0)
    assert DepthProfile.all().weighted({"b.[01]": 0.25}).reach(stack_of(4)).factors == (0.25, 0.25, 1.0, 1.0)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (DepthProfile.top(0.5).weighted({"b.0": 0.5}), "plan.profile-weights-unreached"),
        (DepthProfile.all().weighted({"c.*": 0.5}), "plan.profile-weights-unreached"),
        (DepthProfile.all().weighted({"b.*": 0.5, "b.1": 0.25}), "plan.profile-weights-conflict"),
        (DepthProfile.all().weighted({"b": 0.0}), "plan.profile-reaches-nothing"),
    ],
)
def test_weights_that_mean_nothing_are_refused(profile: DepthProfile, message: str) -> None:
    with raises_code(message):
        profile.reach(stack_of(4))


def test_a_weight_finds_a_tied_layer_by_any_of_its_names() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    model[2].weight = model[0].weight
    stack = LayerStack.from_model(model)
    assert DepthProfile.all().weighted({"2": 0.5}).reach(stack).factors == (0.5, 1.0)


def test_a_pattern_means_a_tied_layer_only_with_all_of_its_uses() -> None:
    towers = nn.ModuleDict(
        {"vision": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), "language": nn.ModuleList([nn.Linear(3, 3)])}
    )
    towers["language"][0].weight = towers["vision"][1].weight
    stack = LayerStack.from_model(towers)
    assert [layer.name for layer in stack] == ["vision.0", "vision.1"]
    assert reached(DepthProfile.layers(["vision"]), stack) == [0]
    assert reached(DepthProfile.layers(["vision.*"]), stack) == [0]
    assert reached(DepthProfile.layers(["vision.*", "language"]), stack) == [0, 1]
    assert reached(DepthProfile.layers(["vision.1"]), stack) == [1]  # by its own name: meant
    assert reached(DepthProfile.layers([1]), stack) == [1]


# ------------------------------------------------------------------------------------------ text and within

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=6) | st.sampled_from(
    ["decoder.*", "3", "-1", "a b", "a;b", 'a"b', "a,b=c:d|e", "\\", "all", "*.3.*"]
).filter(str.isprintable)
NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=5)
MASKS = NUMBERS | st.dictionaries(NAMES.filter(lambda n: n != "*"), NUMBERS, min_size=1, max_size=3)
FRACTIONS = st.fractions(0, 1, max_denominator=40).map(float)


@st.composite
def profiles(draw: st.DrawFn) -> DepthProfile:
    kind = draw(st.sampled_from(ProfileKind))
    if kind is ProfileKind.ALL:
        made = DepthProfile.all()
    elif kind is ProfileKind.TOP:
        made = DepthProfile.top(draw(FRACTIONS.filter(bool)))
    elif kind is ProfileKind.BAND:
        low, high = sorted(draw(st.tuples(FRACTIONS, FRACTIONS).filter(lambda pair: pair[0] != pair[1])))
        made = DepthProfile.band(low, high)
    elif kind is ProfileKind.BLOCKS:
        made = DepthProfile.blocks(draw(st.integers(-9, 9)), draw(st.integers(-9, 9)))
    elif kind is ProfileKind.LAYERS:
        made = DepthProfile.layers(draw(st.lists(NAMES | st.integers(-5, 5), min_size=1, max_size=4)))
    else:
        config = st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex)
        made = DepthProfile.adapter(draw(NAMES), config=draw(config), scope=draw(st.none() | NAMES))
    if draw(st.booleans()):
        masks = {"heads": draw(st.none() | MASKS), "experts": draw(st.none() | MASKS)}
        others = draw(st.booleans()) and any(mask is not None for mask in masks.values())
        made = made.only(**masks, others=others)
    if draw(st.booleans()):
        made = made.weighted(draw(st.dictionaries(NAMES, FRACTIONS, min_size=1, max_size=3)))
    return made


@given(profiles())
@settings(max_examples=300, deadline=None)
def test_both_written_forms_read_back(profile: DepthProfile) -> None:
    assert DepthProfile.from_text(profile.text()) == profile
    assert DepthProfile.parse(profile.to_dict()) == profile
    assert profile.text().isprintable()
    assert profile.within(profile) and profile.within(DepthProfile.all())
    assert profile.described_by(str(profile))


@given(profiles(), profiles())
@settings(max_examples=300, deadline=None)
def test_equal_texts_are_equal_profiles(one: DepthProfile, other: DepthProfile) -> None:
    assert (one.text() == other.text()) == (one == other)
    if one.within(other) and other.within(one) and one.kind is other.kind and one.kind is not ProfileKind.BLOCKS:
        assert one.text() == other.text() or one.whole or one.weights != other.weights


def test_the_text_says_what_it_says() -> None:
    assert PROFILE_SCHEMA == 1
    said = {
        "all": DepthProfile.all(),
        "top=0.25;heads=0,1": DepthProfile.top(0.25).only(heads=[1, 0, 1]),
        "band=0.25,0.75": DepthProfile.band(0.25, 0.75),
        "blocks=4,-1;experts=2,5;others": DepthProfile.blocks(4, -1).only(experts=[2, 5], others=True),
        'layers="3",decoder.*,-1': DepthProfile.layers([-1, "decoder.*", "3"]),
        "adapter=default;scope=ward-7/ecg": DepthProfile.adapter("default", scope="ward-7/ecg"),
        "all;heads=*.3.*:0,1|*.4.*:2": DepthProfile.all().only(heads={"*.4.*": [2], "*.3.*": [0, 1]}),
        "top=0.5;weights=a.*:0.5|b:0.0": DepthProfile.top(0.5).weighted({"b": 0, "a.*": 0.5}),
    }
    for text, profile in said.items():
        assert profile.text() == text
        assert DepthProfile.from_text(text) == profile


@pytest.mark.parametrize(
    "text",
    [
        "", "top", "top=0.25;", ";top=0.25", "top=.25", "top=0.250", "top=25", "TOP=0.25", "top=0.25;top=0.25",
        "heads=0", "top=0.25;heads=1,0", "top=0.25;heads=0,0", "heads=0;top=0.25", "top=0.25;heads=",
        "top=0.25;heads=a", "top=0.25;heads=a:b", "top=0.25;heads=a:0|a:0", "top=0.25;weights=a", "band=0.5,0.25",
        "band=0.5", "blocks=1.0,2", 'layers="unended', 'layers="a"', "layers=b,a", "adapter=", "adapter=a;config=00",
        "scope=a", "all;others", "all=true", "all;others=true;heads=0", "top=nan", "blocks=0,0x1", "unknown=1",
        "layers=a b", "top=0.25\n",
    ],
)  # fmt: skip
def test_another_text_is_refused(text: str) -> None:
    with raises_code("plan.profile-text", "plan.profile-text-not-canonical"):
        DepthProfile.from_text(text)
    with raises_code("plan.profile-text"):
        DepthProfile.from_text(3)  # type: ignore[arg-type]


@given(st.text(st.sampled_from('topheadslyr=0.25;,:|"\\*-1e')))
@settings(max_examples=300, deadline=None)
def test_no_text_is_anything_but_read_or_refused(text: str) -> None:
    with suppress(PlanError):
        assert DepthProfile.from_text(text).text() == text


HEADS = DepthProfile.top(0.5).only(heads=[0, 1])
WITHIN = [
    (DepthProfile.top(0.25), DepthProfile.top(0.5), True),
    (DepthProfile.top(0.5), DepthProfile.top(0.25), False),
    (DepthProfile.band(0.5, 1.0), DepthProfile.top(0.5), True),
    (DepthProfile.band(0.4, 0.6), DepthProfile.band(0.3, 0.5), False),
    (DepthProfile.all(), DepthProfile.top(0.9), False),
    (DepthProfile.blocks(2, 3), DepthProfile.blocks(1, 4), True),
    (DepthProfile.blocks(2, 3), DepthProfile.blocks(0, -1), True),
    (DepthProfile.blocks(-2, -1), DepthProfile.blocks(-3, -1), True),
    (DepthProfile.blocks(-4, -1), DepthProfile.blocks(-3, -1), False),
    (DepthProfile.blocks(5, 6), DepthProfile.blocks(-3, -1), False),  # by the number of blocks
    (DepthProfile.blocks(5, -2), DepthProfile.blocks(4, 9), False),
    (DepthProfile.blocks(5, 6), DepthProfile.top(0.5), False),
    (DepthProfile.layers(["a.*"]), DepthProfile.layers(["b", "a.*"]), True),
    (DepthProfile.layers(["a.1"]), DepthProfile.layers(["a.*"]), False),  # a tied layer may be meant by its name alone
    (DepthProfile.adapter("a"), DepthProfile.all(), True),
    (DepthProfile.adapter("a"), DepthProfile.adapter("b"), False),
    (DepthProfile.adapter("a", config="00" * 32, scope="s"), DepthProfile.adapter("a"), True),
    (DepthProfile.adapter("a"), DepthProfile.adapter("a", config="00" * 32), False),
    (DepthProfile.adapter("a"), DepthProfile.adapter("a", scope="s"), False),
    (HEADS, DepthProfile.top(0.5), True),
    (DepthProfile.top(0.5), HEADS, False),
    (DepthProfile.top(0.25).only(heads=[1]), HEADS, True),
    (DepthProfile.top(0.25).only(heads=[2]), HEADS, False),
    (DepthProfile.top(0.25).only(heads={"a": [1]}), HEADS, True),
    (HEADS, DepthProfile.top(0.5).only(heads={"a": [0, 1]}), False),
    (DepthProfile.all().only(heads={"a": [1]}), DepthProfile.all().only(heads={"a": [0, 1], "b": [2]}), True),
    (DepthProfile.all().only(heads=[0], others=True), DepthProfile.all().only(heads=[0]), False),
    (DepthProfile.all().only(heads=[0]), DepthProfile.all().only(heads=[0], others=True), True),
    (DepthProfile.all().only(heads=[0]), DepthProfile.all().only(experts=[0], others=True), False),
    (DepthProfile.all().only(heads=[0], experts=[1]), DepthProfile.all().only(experts=[1], others=True), True),
    (DepthProfile.all().only(heads=[0], experts=[1]), DepthProfile.all().only(experts=[1]), False),
    (DepthProfile.all().weighted({"a": 0.5}), DepthProfile.all(), True),
    (DepthProfile.all(), DepthProfile.all().weighted({"a": 0.5}), False),
    (DepthProfile.all().weighted({"a": 0.5, "b": 0.1}), DepthProfile.all().weighted({"a": 0.5}), True),
    (DepthProfile.all().weighted({"a": 0.6}), DepthProfile.all().weighted({"a": 0.5}), False),
]


@pytest.mark.parametrize(("one", "other", "answer"), WITHIN, ids=[f"{a} in {b}" for a, b, _ in WITHIN])
def test_within(one: DepthProfile, other: DepthProfile, answer: bool) -> None:
    assert one.within(other) is answer


PLACES = st.one_of(
    st.just(DepthProfile.all()),
    st.integers(1, 6).map(lambda k: DepthProfile.top(k / 6)),
    st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda p: p[0] < p[1]).map(
        lambda p: DepthProfile.band(p[0] / 6, p[1] / 6)
    ),
    st.tuples(st.integers(-6, 5), st.integers(-6, 5)).map(lambda p: DepthProfile.blocks(*p)),
    st.lists(st.sampled_from(["encoder.*", "decoder.0", "head", -1, "encoder.0.query", "*"]), min_size=1).map(
        DepthProfile.layers
    ),
)  # fmt: skip
FEW = st.lists(st.integers(0, 3), min_size=1, max_size=4) | st.dictionaries(
    st.sampled_from(["encoder.0", "decoder.0", "*coder.0"]),
    st.lists(st.integers(0, 3), min_size=1),
    min_size=1,
    max_size=2,
)
SOME = st.builds(
    lambda place, heads, others, w: place.only(heads=heads, others=others and heads is not None).weighted(w),
    PLACES,
    st.none() | FEW,
    st.booleans(),
    st.dictionaries(st.sampled_from(["encoder.*", "decoder.0.out", "*"]), st.sampled_from([0.0, 0.5, 1.0]), max_size=1),
)  # fmt: skip
STACK = LayerStack.from_model(TransformerAutoencoder(3, 4, width=8, layers=2, heads=4, hidden=5, code=2))


def places_of(profile: DepthProfile) -> dict[tuple[str, int], float]:
    """Every place of every tensor that is reached, with its factor."""
    reach = profile.reach(STACK, allow_empty=True)
    parts, made = {o.tensor: o for o in reach.openings}, {}
    axes = {part.tensor: part.axis for part in STACK.parts}
    for layer, kept, factor in zip(STACK, reach.layers, reach.factors, strict=True):
        for name, shape in zip(layer.parameters, layer.shapes, strict=True):
            part = parts.get(name)
            ranges = part.ranges if part is not None else ((0, shape[axes.get(name, 0)]),)
            if kept:
                made |= {(name, p): factor for first, stop in ranges for p in range(first, stop)}
    return made


@st.composite
def pairs(draw: st.DrawFn) -> tuple[DepthProfile, DepthProfile]:
    """Two profiles, the first often a narrower form of the second."""
    other = draw(SOME)
    one = draw(SOME)
    if draw(st.booleans()):
        one = replace(one, kind=other.kind, bounds=other.bounds, names=other.names)
    if other.heads is not None and draw(st.booleans()):
        rows = {pattern: draw(st.lists(st.sampled_from(numbers), min_size=1)) for pattern, numbers in other.heads.rows}
        one = one.only(heads=rows, others=other.others and draw(st.booleans()))
    if draw(st.booleans()):
        one = one.weighted({pattern: factor * draw(st.sampled_from([0.5, 1.0])) for pattern, factor in other.weights})
    return one, other


def test_what_is_within_reaches_no_further() -> None:
    proper = 0

    @given(pairs())
    @settings(max_examples=600, deadline=None)
    def check(pair: tuple[DepthProfile, DepthProfile]) -> None:
        nonlocal proper
        one, other = pair
        if not one.within(other):
            return
        try:
            inner, outer = places_of(one), places_of(other)
        except PlanError:  # out of range on this model, or two patterns for one attention
            return
        proper += one != other and not other.whole
        assert inner.keys() <= outer.keys()
        assert all(factor <= outer[place] for place, factor in inner.items())

    check()
    assert proper >= 30  # otherwise this tested next to nothing
