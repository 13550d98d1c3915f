"""Profiles in plans: slices, factors, what counts as noise, words; and that every class still has its sigma."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from plans import policy_of
from refusals import raises_code
from torch import nn

from lamina.allocate.make_plan import ALLOCATIONS, explained_plan, make_plan
from lamina.allocate.measure.measure import Measure
from lamina.allocate.problem import Allocation, AllocationProblem
from lamina.plan.coverage import check_coverage
from lamina.plan.layer_stack import LayerStack
from lamina.plan.rules import effective_sigma
from lamina.plan.selection import Slice, planned_noised_sizes
from lamina.plan.step_plan import Clipping, StepPlan
from lamina.signals.autoencoders import TransformerAutoencoder

MODEL = TransformerAutoencoder(3, 4, width=8, layers=2, heads=4, hidden=5, code=2)
STACK = LayerStack.from_model(MODEL)
HEADS = {"population": 1000, "epsilon": 1.0, "profile": {"layers": ["decoder.*"], "heads": [0, 1]}}


def plan_of(stack: LayerStack = STACK, *, allocate: Any = "pareto", clipping: Any = None, measure: Any = None,
            **classes: dict[str, Any]) -> StepPlan:  # fmt: skip
    return make_plan(
        stack, policy_of(**classes), batch=80, steps=50, allocate=allocate, clipping=clipping, measure=measure
    )


def reached(plan: StepPlan, k: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """By brute force: True at every number that class k moves."""
    made = {}
    for i, layer in enumerate(plan.layers):
        for name in layer.parameters:
            grid = np.zeros(shapes[name], dtype=bool)
            part = plan.slice(k, name)
            if plan.reaches(k, i):
                if part is None:
                    grid[...] = True
                for first, stop in part.ranges if part is not None else ():
                    grid[(slice(None),) * part.axis + (slice(first, stop),)] = True
            made[name] = grid
    return made


def test_a_head_mask_becomes_slices() -> None:
    plan = plan_of(sensitive=HEADS)
    rows = Slice(cls="sensitive", tensor="decoder.0.query.weight", axis=0, length=8, ranges=((0, 4),))
    assert plan.slice("sensitive", "decoder.0.query.weight") == rows
    columns = plan.slice("sensitive", "decoder.0.out.weight")
    assert columns is not None and (columns.axis, columns.ranges) == (1, ((0, 4),))
    bias = plan.slice("sensitive", "decoder.0.out.bias")
    assert bias is not None and bias.ranges == ()
    assert [layer.name for i, layer in enumerate(plan.layers) if plan.reaches("sensitive", i)] == [
        f"decoder.0.{name}" for name in ("query", "key", "value", "out")
    ]
    assert plan.classes[0].profile == "layers decoder.*, heads 0, 1"
    assert StepPlan.from_cbor(plan.to_cbor()) == plan


def test_public_classes_are_masked_too() -> None:
    plan = plan_of(sensitive=HEADS, open={"population": 10, "public": True, "profile": {"heads": [3]}})
    part = plan.slice("open", "decoder.0.query.weight")
    assert part is not None and part.ranges == ((6, 8),)
    assert plan.open_ranges("decoder.0.query.weight") == (0, ((0, 4), (6, 8)))
    assert plan.noise[[layer.name for layer in plan.layers].index("encoder.0.query")] == 0


@pytest.mark.parametrize("clipping", ["box", "joint"])
@pytest.mark.parametrize("allocate", [name for name in sorted(ALLOCATIONS) if not name.startswith("printed")])
def test_every_class_has_its_sigma_and_counts_what_is_reached(allocate: str, clipping: str) -> None:
    if allocate == "quantile" and clipping == "joint":
        return  # refused: thresholds follow a quantile in a box
    seen: list[AllocationProblem] = []
    chooser = ALLOCATIONS[allocate]

    class Watched(type(chooser)):  # type: ignore[misc]
        def __call__(self, problem: AllocationProblem) -> Allocation:
            seen.append(problem)
            return super().__call__(problem)

    watched = Watched(**{field.name: getattr(chooser, field.name) for field in dataclasses.fields(chooser)})  # type: ignore[arg-type]
    known = None
    if allocate == "lsab":
        known = measured()
    other = {"population": 3000, "epsilon": 3.0, "profile": {"top": 0.75, "heads": [1, 3], "others": True}}
    plan = plan_of(sensitive=HEADS, other=other, allocate=watched, clipping=clipping, measure=known)
    for name, target in (("sensitive", 1.0), ("other", 3.0)):
        assert plan.epsilon(name) <= target
    assert max(plan.epsilon("sensitive"), plan.epsilon("other") / 3) > 0.999
    grids = [reached(plan, name, STACK.shapes) for name in ("sensitive", "other")]
    for i, layer in enumerate(STACK):
        union = sum(int((grids[0][name] | grids[1][name]).sum()) for name in layer.parameters)
        assert seen[0].sizes[i] == (union or layer.size)
        assert seen[0].weights[i] == float(seen[0].sizes[i])
    assert planned_noised_sizes(plan, STACK.shapes) == seen[0].sizes


def measured(**rows: Any) -> Measure:
    count = len(STACK)
    fields: dict[str, Any] = {
        "proxy": "made up", "layers": tuple(layer.name for layer in STACK),
        "tight": (1.0,) * count, "worst": (1.0,) * count, "printed": (1.0,) * count,
        "harm": (4.0,) * count, "norms": (3.0,) * count, "fisher": (2.0,) * count,
    }  # fmt: skip
    return Measure(**{**fields, **rows})


def test_what_was_measured_on_whole_layers_shrinks_with_them() -> None:
    seen: list[AllocationProblem] = []

    def look(problem: AllocationProblem) -> Allocation:
        from lamina.allocate.problem import measured_row as row

        seen.append(problem)
        assert problem.reached_share[-3] == 1.0  # reached by nobody: whole
        i = problem.layers.index("decoder.0.query")
        assert problem.reached_share[i] == 0.5
        assert row(problem, "norms", "it")[i] == pytest.approx(3.0 / math.sqrt(2))
        assert row(problem, "harm", "it")[i] == pytest.approx(2.0)
        assert row(problem, "tight", "it")[i] == 1.0
        return ALLOCATIONS["uniform"](problem)

    plan_of(sensitive=HEADS, allocate=look, measure=measured())
    assert seen


# ------------------------------------------------------------------------------------------------- weights

WEIGHED = {"population": 1000, "epsilon": 1.0, "profile": {"layers": ["decoder.*", "head"], "weights": {"head": 0.25}}}


def test_weights_scale_thresholds_and_sigma_stays() -> None:
    plain = {**WEIGHED, "profile": {"layers": ["decoder.*", "head"]}}
    for allocate in ("uniform", "proportional", "pareto", "ladp", "quantile"):
        one = plan_of(sensitive=plain, allocate=allocate, clipping="box")
        two = plan_of(sensitive=WEIGHED, allocate=allocate, clipping="box")
        head = [layer.name for layer in STACK].index("head")
        for i, (c, d) in enumerate(zip(one.clip[0], two.clip[0], strict=True)):
            assert d == pytest.approx(c * (0.25 if i == head else 1.0), rel=1e-12)
        assert two.sigma("sensitive") == pytest.approx(one.sigma("sensitive"), rel=1e-9)
        d = [layer.size for layer in STACK]
        assert sum(n * s * s for n, s in zip(d, two.noise, strict=True)) < sum(
            n * s * s for n, s in zip(d, one.noise, strict=True)
        )
        assert two.classes[0].profile == "layers decoder.*, head, weights 0.25 of head"


def test_pareto_is_the_optimum_of_the_weighted_thresholds() -> None:
    plan = plan_of(sensitive=WEIGHED, clipping="box")
    c, m = np.array(plan.clip[0]), np.array([float(layer.size) for layer in STACK])
    on = c > 0
    best = np.sqrt(c[on] / np.sqrt(m[on]) * (c[on] * np.sqrt(m[on])).sum())  # docs/theory.md, "Choosing C and S"
    assert np.array(plan.noise)[on] / plan.sigma("sensitive") == pytest.approx(best, rel=1e-9)


def test_a_weight_of_nothing_takes_the_layer_out_under_any_clipping() -> None:
    out = {**WEIGHED, "profile": {"layers": ["decoder.*", "head"], "weights": {"head": 0.0}}}
    plan = plan_of(sensitive=out)
    assert plan.clipping is Clipping.JOINT
    assert plan.clip[0][-1] == 0


@pytest.mark.parametrize("given", ["joint", Clipping.JOINT, None])
def test_weights_are_refused_under_joint_clipping(given: Any) -> None:
    with raises_code("allocate.weights-joint-clipping"):
        plan_of(sensitive=WEIGHED, clipping=given)


def test_weights_of_a_public_class_are_refused() -> None:
    public = {"population": 10, "public": True, "profile": {"weights": {"head": 0.5}}}
    with raises_code("allocate.weights-public-class"):
        plan_of(sensitive=HEADS, open=public, clipping="box")


def test_printed_methods_know_neither_slices_nor_weights() -> None:
    for entry in (HEADS, WEIGHED):
        with raises_code("allocate.weights-paper-method"):
            plan_of(sensitive=entry, allocate="printed-ladp")


def test_a_function_of_the_users_need_not_know_of_weights() -> None:
    problems: list[AllocationProblem] = []

    def mine(problem: AllocationProblem) -> Allocation:
        problems.append(problem)
        rows = tuple(tuple(1.0 if may else 0.0 for may in row) for row in problem.reach)
        return Allocation(clip=rows, noise=problem.equal_noise(), clipping=Clipping.BOX)

    plan, chosen = explained_plan(STACK, policy_of(sensitive=WEIGHED), batch=80, steps=50, allocate=mine)
    assert plan.clip[0][-1] == 0.25 and chosen.clip == plan.clip
    assert plan.sigma("sensitive") == pytest.approx(effective_sigma(plan.clip[0], plan.noise))
    with raises_code("allocate.problem-shape"):
        dataclasses.replace(problems[0], factors=((1.0,),))


# -------------------------------------------------------------------------------------- adapters, refusals


def test_an_adapter_in_the_plan_says_which_it_is() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as hf
        from peft import LoraConfig, get_peft_model

        config = hf.GPT2Config(
            vocab_size=13, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1
        )
        model: Any = get_peft_model(hf.GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=["c_attn"]))  # type: ignore[arg-type]
    for name, tensor in model.named_parameters():
        if "ln_f" in name:
            tensor.requires_grad_(True)  # a part of the base that another class trains
    stack = LayerStack.from_model(model)
    profile = {"adapter": {"name": "default", "scope": "ward-7/ecg"}}
    plan = plan_of(
        stack,
        sensitive={"population": 100, "epsilon": 1.0, "profile": profile},
        other={"population": 100, "epsilon": 1.0},
    )
    assert plan.classes[0].profile == f"adapter default ({stack.adapters[0].config[:12]}, for ward-7/ecg)"
    names = [layer.name for i, layer in enumerate(plan.layers) if plan.reaches("sensitive", i)]
    assert len(names) == 4 and all("lora" in name for name in names)
    assert not plan.slices
    one = LayerStack.from_model(model, group={"everything": ["*"]})
    joined = plan_of(one, sensitive={"population": 100, "epsilon": 1.0, "profile": profile})
    assert {part.tensor for part in joined.slices} == {
        "base_model.model.transformer.ln_f.weight", "base_model.model.transformer.ln_f.bias"
    }  # fmt: skip
    assert check_coverage(model, joined).unreached == tuple(part.tensor for part in joined.slices)


def test_a_refusal_names_the_class() -> None:
    with raises_code("allocate.profile-refused"):
        plan_of(sensitive={**HEADS, "profile": {"heads": [9]}})


# ------------------------------------------------------------------------------------------------ coverage


def test_coverage_tells_slices_that_nobody_reaches() -> None:
    plan = plan_of(sensitive=HEADS, open={"population": 10, "public": True, "profile": {"layers": ["embed"]}})
    coverage = check_coverage(MODEL, plan)
    assert "decoder.0.query.weight" in coverage.covered
    assert "decoder.0.out.bias" in coverage.unreached and "encoder.0.out.bias" in coverage.unreached
    assert coverage.public_only == ("embed.weight", "embed.bias")
    assert coverage.closed == (
        "decoder.0.query.weight[4:8]", "decoder.0.query.bias[4:8]", "decoder.0.key.weight[4:8]",
        "decoder.0.key.bias[4:8]", "decoder.0.value.weight[4:8]", "decoder.0.value.bias[4:8]",
        "decoder.0.out.weight[:, 4:8]",
    )  # fmt: skip
    assert "and parts of 7 not reached" in str(coverage)
    tensors = {*coverage.covered, *coverage.public_only, *coverage.unreached}
    assert tensors == {name for name, _ in MODEL.named_parameters()}


def test_slices_of_another_model_are_refused() -> None:
    plan = plan_of(sensitive=HEADS)
    other = TransformerAutoencoder(3, 4, width=8, layers=2, heads=4, hidden=5, code=2)
    other.decoder[0].query.weight = nn.Parameter(torch.zeros(4, 16))
    with raises_code("plan.slice-shape-differs"):
        check_coverage(other, plan)


def test_the_table_and_the_json_tell_slices() -> None:
    plan = plan_of(sensitive=HEADS)
    text, told = plan.table(), plan.to_dict()
    assert "* reached in part by  tensor" in text
    assert "decoder.0.out.weight" in text and "[:, 0:4]" in text and "none" in text
    stars = [line for line in text.splitlines() if line.startswith("decoder.0.") and "*" in line]
    assert len(stars) == 4
    assert {"class": "sensitive", "tensor": "decoder.0.out.weight", "axis": 1, "length": 8, "ranges": [[0, 4]]} in told[
        "slices"
    ]
    assert told["classes"]["sensitive"]["profile"] == "layers decoder.*, heads 0, 1"
    plain = plan_of(sensitive={"population": 100, "epsilon": 1.0})
    assert "*" not in plain.table() and plain.to_dict()["slices"] == []


def test_tensors_that_differ_by_number_share_a_line() -> None:
    deep = TransformerAutoencoder(3, 4, width=8, layers=6, heads=4, hidden=5, code=2)
    text = plan_of(LayerStack.from_model(deep), sensitive={**HEADS, "profile": {"heads": [2]}}).table()
    lines = [line for line in text.splitlines() if "and 2 like it" in line]
    assert len(lines) == 2 * 5  # of encoder and decoder: query, key, value, weight and bias of the output
    assert any("encoder.0.query.weight, bias" in line for line in lines)
