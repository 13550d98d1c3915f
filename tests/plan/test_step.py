"""The step plan: its formula, its refusals, its encodings."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import hand_plan
from refusals import raises_code

from lamina.account.accountants import find_accountant
from lamina.account.schedule import Adjacency, Event
from lamina.errors import PlanError
from lamina.plan.rules import effective_sigma, rescale_noise
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan

numbers = st.floats(1e-6, 1e6)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    classes, layers = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    noise = draw(st.lists(numbers, min_size=layers, max_size=layers))
    cell = st.one_of(st.just(0.0), numbers)
    clip = draw(st.lists(st.lists(cell, min_size=layers, max_size=layers), min_size=classes, max_size=classes))
    return clip, noise


@given(matrices())
@settings(max_examples=200, deadline=None)
def test_sigma_is_the_formula(given_: tuple[list[list[float]], list[float]]) -> None:
    clip, noise = given_
    plan = hand_plan(clip, noise)
    with np.errstate(divide="ignore"):
        expected = np.square(np.array(clip) / np.array(noise)).sum(1) ** -0.5
    for k in range(len(clip)):
        assert plan.sigma(k) == pytest.approx(expected[k], rel=1e-12)
        assert plan.sigma(f"c{k}", scale=0.25) == pytest.approx(4 * expected[k], rel=1e-12)
        assert plan.rho(k) == pytest.approx(50 / (2 * expected[k] ** 2), rel=1e-12)
        if math.isfinite(expected[k]):
            assert plan.joint(k) == pytest.approx(1 / expected[k], rel=1e-12)
            assert sum(plan.share(k)) == pytest.approx(1, rel=1e-9)


@given(matrices(), st.data())
@settings(max_examples=100, deadline=None)
def test_no_clipped_contribution_moves_the_step_further_than_one_over_sigma(
    given_: tuple[list[list[float]], list[float]], data: st.DataObject
) -> None:
    """Brute force: random directions at the corner of the box, and at the radius of the joint clip."""
    clip, noise = given_
    plan = hand_plan(clip, noise)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for k, row in enumerate(clip):
        shift = []
        for c, s in zip(row, noise, strict=True):
            g = rng.normal(size=7)
            shift.append(g * min(c, 1e9) / np.linalg.norm(g) / s)
        moved = np.linalg.norm(np.concatenate(shift))
        assert moved <= plan.joint(k) * (1 + 1e-9)
        assert moved >= plan.joint(k) * (1 - 1e-9)


@given(matrices(), st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4))
@settings(max_examples=300, deadline=None)
def test_rescale_gives_every_class_its_sigma_and_no_more_than_needed(
    given_: tuple[list[list[float]], list[float]], declared: list[float]
) -> None:
    clip, noise = given_
    sigma = declared[: len(clip)]
    assume(any(any(row) for row in clip))
    scaled = rescale_noise(clip, noise, sigma)
    owed = [(effective_sigma(row, scaled), s) for row, s in zip(clip, sigma, strict=True) if any(row)]
    assert all(got >= s for got, s in owed)  # exactly, not approximately
    assert min(got / s for got, s in owed) <= 1 + 1e-12
    ratios = np.array(scaled) / np.array(noise)
    assert np.ptp(ratios) <= 1e-12 * ratios.max()


def test_rescale_leaves_public_rows_and_silent_layers_alone() -> None:
    clip = [[1.0, 0.0], [math.inf, math.inf]]
    assert rescale_noise(clip, [2.0, 0.0], [3.0, math.inf]) == (3.0, 0.0)
    assert rescale_noise([[math.inf]], [0.0], [math.inf]) == (0.0,)
    with raises_code("plan.layer-without-noise"):
        rescale_noise([[1.0]], [0.0], [1.0])


def test_rescaled_plan_declares_by_name() -> None:
    plan = hand_plan([[1.0, 1.0], [0.0, 2.0]], [1.0, 1.0]).rescaled({"c0": 2.0, "c1": 5.0})
    assert plan.sigma("c1") == pytest.approx(5.0)
    assert plan.sigma("c0") >= 2.0


def test_epsilon_is_the_joint_event_priced_by_the_plans_accountant() -> None:
    plan = hand_plan([[3.0, 4.0]], [5.0, 5.0], accountant="rdp")
    assert plan.sigma(0) == pytest.approx(1.0)
    event = (Event(sigma=plan.sigma(0), q=0.1, steps=50),)
    assert plan.schedule(0) == event
    assert plan.epsilon(0) == find_accountant("rdp").epsilon(event, 1e-5, Adjacency.ADD_REMOVE)
    assert plan.epsilon(0, scale=0.5) < plan.epsilon(0)


def test_public_and_unreaching_classes_cost_nothing() -> None:
    inf = math.inf
    plan = hand_plan([[1.0, 0.0], [inf, inf], [0.0, 0.0]], [1.0, 0.0], public=(1,))
    for k in ("c1", "c2"):
        assert plan.sigma(k) == inf
        assert plan.epsilon(k) == 0.0
        assert plan.rho(k) == 0.0
        assert plan.schedule(k) == ()
    assert plan.delta("c1") == 0.0
    assert plan.delta("c0") == 1e-5
    assert plan.reaches("c1", 1)
    assert not plan.reaches("c0", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": [1.0, 0.0]}, "plan.layer-without-noise"),
        ({"noise": [1.0, -1.0]}, "plan.noise-out-of-range"),
        ({"noise": [1.0, math.nan]}, "plan.noise-out-of-range"),
        ({"noise": [1.0, math.inf]}, "plan.noise-out-of-range"),
        ({"noise": [1.0]}, "plan.noise-shape"),
        ({"clip": [[1.0, -2.0]]}, "plan.clip-out-of-range"),
        ({"clip": [[1.0, math.nan]]}, "plan.clip-out-of-range"),
        ({"clip": [[1.0, math.inf]]}, "plan.clip-out-of-range"),
        ({"clip": [[1.0]]}, "plan.clip-shape"),
        ({"clip": [[1.0, 1.0]] * 2}, "plan.clip-shape"),
        ({"batch": 0}, "plan.batch-not-positive"),
        ({"batch": math.nan}, "plan.batch-not-positive"),
        ({"steps": 0}, "plan.steps-not-positive"),
        ({"steps": 1.5}, "plan.steps-not-positive"),
        ({"steps": True}, "plan.steps-not-positive"),
        ({"clipping": "sphere"}, "plan.clipping-unknown"),
        ({"layers": ()}, "plan.no-layers-or-classes"),
    ],
)
def test_unsound_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = hand_plan([[1.0, 2.0]], [1.0, 1.0])
    with raises_code(message):
        dataclasses.replace(plan, **changes)


def test_public_thresholds_are_infinite_or_zero() -> None:
    with raises_code("plan.public-clip-finite"):
        hand_plan([[2.0]], [1.0], public=(0,))


def test_names_and_tensors_occur_once() -> None:
    plan = hand_plan([[1.0, 1.0]], [1.0, 1.0])
    first, second = plan.layers
    with raises_code("plan.name-twice"):
        dataclasses.replace(plan, layers=(first, dataclasses.replace(second, name="l0")))
    with raises_code("plan.name-twice"):
        dataclasses.replace(plan, layers=(first, dataclasses.replace(second, parameters=("l0.w",))))
    with raises_code("plan.name-twice"):
        dataclasses.replace(plan, classes=plan.classes * 2, clip=plan.clip * 2)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_sampling_rates_are_probabilities(rate: float) -> None:
    with raises_code("plan.sampling-rate-out-of-range"):
        PlannedClass(name="a", population=10, sampling_rate=rate, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_private_classes_have_a_delta(delta: float) -> None:
    with raises_code("plan.delta-out-of-range"):
        PlannedClass(name="a", population=10, sampling_rate=0.1, delta=delta)


def test_questions_about_unknown_classes_are_refused() -> None:
    plan = hand_plan([[1.0]], [1.0])
    for wrong in ("clinical", 1, -1):
        with raises_code("plan.class-unknown", "plan.class-unknown"):
            plan.sigma(wrong)
    for scale in (0.0, 1.5, math.nan):
        with raises_code("plan.scale-out-of-range"):
            plan.sigma(0, scale)


@given(matrices(), st.sampled_from([Clipping.BOX, Clipping.JOINT]), st.floats(1e-3, 1e6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_round_trips_are_exact(
    given_: tuple[list[list[float]], list[float]], clipping: Clipping, batch: float, public: bool
) -> None:
    clip, noise = given_
    rows = [*clip, [math.inf] * len(noise)] if public else clip
    plan = hand_plan(rows, noise, public=(len(clip),) if public else (), clipping=clipping, batch=batch)
    assert StepPlan.from_json(plan.to_json()) == plan
    assert StepPlan.from_cbor(plan.to_cbor()) == plan
    assert StepPlan.from_json(plan.to_json()).to_cbor() == plan.to_cbor()
    assert plan.digest() == StepPlan.from_cbor(plan.to_cbor()).digest()
    json.loads(plan.to_json(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert cbor2.loads(plan.to_cbor())["batch"] == batch


def test_equal_plans_have_equal_digests_and_others_do_not() -> None:
    plan = hand_plan([[1, 0]], [2, 1])
    assert plan.digest() == hand_plan([[1.0, -0.0]], [2.0, 1.0], batch=100.0, clipping="box").digest()
    changed = [
        hand_plan([[1, 0]], [2, 1.0000000000000002]),
        hand_plan([[1, 0]], [2, 1], clipping="joint"),
        hand_plan([[1, 0]], [2, 1], steps=51),
        hand_plan([[1, 0]], [2, 1], accountant="rdp"),
    ]
    assert len({plan.digest(), *(other.digest() for other in changed)}) == 5


def test_damaged_encodings_are_refused() -> None:
    plan = hand_plan([[1.0]], [1.0])
    state = json.loads(plan.to_json())
    damaged = [
        "",
        "[]",
        "{}",
        json.dumps({**state, "version": 1}),
        json.dumps({**state, "extra": 1}),
        json.dumps({key: value for key, value in state.items() if key != "noise"}),
        json.dumps({**state, "noise": "1.0"}),
        json.dumps({**state, "noise": [True]}),
        json.dumps({**state, "noise": [math.inf]}),
        json.dumps({**state, "steps": 50.0}),
        json.dumps({**state, "layers": [{"name": "x"}]}),
        json.dumps({**state, "noise": [0.0]}),
        plan.to_json()[:-1] + ',"steps":7}',
    ]
    for text in damaged:
        with pytest.raises(PlanError):
            StepPlan.from_json(text)
    for data in (b"", plan.to_cbor()[:-1], plan.to_cbor() + b"\0", cbor2.dumps({"kind": "other"})):
        with pytest.raises(PlanError):
            StepPlan.from_cbor(data)


def test_table_and_summary_tell_the_same() -> None:
    plan = hand_plan(
        [[1.0, 2.0, 0.0], [math.inf] * 3], [2.0, 4.0, 0.0], public=(1,), accountant="rdp", allocation="pareto"
    )
    text = str(plan)
    assert text.splitlines()[0].startswith("3 layers, 33 parameters; pareto allocation, box clipping; 50 steps")
    assert all(line == line.rstrip() for line in text.splitlines())
    row = next(line for line in text.splitlines() if line.startswith("l1")).split()
    assert row == ["l1", "0.50", "11", "4", "2", "public", "50.0", "%"]
    silent = next(line for line in text.splitlines() if line.startswith("l2")).split()
    assert silent == ["l2", "1.00", "12", "none", "-", "public", "0.0", "%"]
    public = next(line for line in text.splitlines() if line.startswith("c1"))
    assert "public  not protected  " in public  # no ε and no δ
    told = plan.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    c0 = told["classes"]["c0"]
    assert c0["sigma"] == plan.sigma("c0")
    assert c0["epsilon"] == plan.epsilon("c0")
    c1 = told["classes"]["c1"]
    assert c1["public"] is True and c1["epsilon"] is c1["rho"] is c1["delta"] is c1["sigma"] is None  # no protection
    assert set(c0) >= {"sigma", "epsilon", "rho", "delta", "sampling_rate", "steps"}
    assert set(told["layers"][0]) >= {"name", "depth", "parameters", "noise_std", "clip", "share"}
    assert told["layers"][1]["clip"] == {"c0": 2.0, "c1": None}
    assert sum(layer["share"] for layer in told["layers"]) == pytest.approx(1)


def test_table_warns_of_a_delta_above_one_over_the_population() -> None:
    plan = hand_plan([[1.0]], [1.0], accountant="rdp")
    entry = dataclasses.replace(plan.classes[0], delta=0.01)
    assert "δ of class c0 is not below 1/population" in str(dataclasses.replace(plan, classes=(entry,)))
    assert "note" not in str(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": [[5e-324]], "noise": [1.0]}, "plan.clip-out-of-range"),
        ({"clip": [[1e-20]], "noise": [1e20]}, None),
        ({"clip": [[1.0]], "noise": [1e-300]}, "plan.noise-out-of-range"),
        ({"clip": [[1.0]], "noise": [1.0], "batch": 1e30}, "plan.noise-out-of-range"),
    ],
)
def test_numbers_that_float32_cannot_carry_are_refused(change: dict[str, Any], message: str | None) -> None:
    fields: dict[str, Any] = {"batch": 1.0, "steps": 1, **change}
    fields["layers"] = (PlannedLayer(name="l", depth=0.0, parameters=("w",), size=1),)
    fields["classes"] = (PlannedClass(name="a", population=10, sampling_rate=0.1, delta=1e-5),)
    if message is None:
        assert StepPlan(**fields).sigma("a") > 1e39
    else:
        with raises_code(message):
            StepPlan(**fields)


def test_another_encoding_of_the_same_plan_is_refused() -> None:
    """A CBOR infinity instead of the text "inf" would give one plan two digests."""
    written = hand_plan([[1.0, 0.5], [math.inf, math.inf]], [1.0, 1.0], public=(1,)).to_cbor()
    assert StepPlan.from_cbor(written).to_cbor() == written
    other = cbor2.dumps(_with_infinity(cbor2.loads(written)), canonical=True)
    assert other != written
    with raises_code("plan.not-cbor"):
        StepPlan.from_cbor(other)


def _with_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_infinity(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_infinity(each) for each in value]
    return math.inf if value == "inf" else value


@pytest.mark.parametrize(
    ("code", "blocks", "spans", "depth"),
    [
        ("plan.spans-out-of-range", 3, (), 0.5),
        ("plan.spans-out-of-range", 0, ((0, 1),), 0.0),
        ("plan.spans-out-of-range", 3, ((1, 4),), 0.5),
        ("plan.spans-out-of-range", 3, ((-1, 1),), 0.0),
        ("plan.spans-out-of-range", 3, ((1, 1),), 0.5),
        ("plan.spans-out-of-range", 3, ((0, 1), (1, 2)), 0.0),
        ("plan.spans-out-of-range", 3, ((2, 3), (0, 1)), 0.0),
        ("plan.depth-differs", 3, ((1, 2),), 0.0),
        ("plan.blocks-negative", -1, ((0, 1),), 0.0),
    ],
)
def test_a_layer_lies_in_blocks_of_the_model(code: str, blocks: int, spans: Any, depth: float) -> None:
    layer = PlannedLayer(name="l", depth=depth, parameters=("w",), size=1, spans=spans)
    with raises_code(code):
        hand_plan([[1.0]], [1.0], layers=(layer,), blocks=blocks)


def test_blocks_are_read_back() -> None:
    made = hand_plan([[1.0, 1.0]], [1.0, 1.0])
    tied = (
        dataclasses.replace(made.layers[0], spans=((0, 1), (2, 3))),
        dataclasses.replace(made.layers[1], spans=((2, 3),)),
    )
    made = dataclasses.replace(made, layers=tied, blocks=3)
    assert StepPlan.from_cbor(made.to_cbor()) == StepPlan.from_json(made.to_json()) == made
