"""Contributions that are stricter than their class: whose scale is whose, and that it reaches the step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code
from torch import nn

from lamina import Corpus, Engine
from lamina.engine.noise.source import SeededNoise
from lamina.plan.rules import Choose
from lamina.plan.step_plan import Clipping, PlannedClass, PlannedLayer, StepPlan
from lamina.run.sampler import Sampler

KEY = bytes(range(32))


def plan(q: float = 0.5, **changes: Any) -> StepPlan:
    made: dict[str, Any] = {
        "layers": (PlannedLayer(name="0", depth=0.0, parameters=("weight",), size=3),),
        "classes": (PlannedClass(name="data", population=100, sampling_rate=q, delta=1e-5),),
        "clip": ((2.0,),),
        "noise": (1.0,),
        "batch": 4.0,
        "steps": 10,
    }
    return StepPlan(**{**made, **changes})


def corpus(**changes: Any) -> Corpus:
    x = torch.arange(18, dtype=torch.float32).view(6, 3)
    return Corpus(x, unit=[0, 0, 1, 2, 3, 3], **changes)


def test_by_contribution_by_unit_or_by_id() -> None:
    rows = np.array([3, 0])
    for given in (
        [0.1, 0.2, 0.3, 0.4],
        {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4},
        np.array([0.1, 0.1, 0.2, 0.3, 0.4, 0.4]),
        torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
    ):
        scale, ceiling = corpus(scale=given).limits(rows)
        assert ceiling is None and scale is not None
        assert scale.tolist() == [0.4, 0.1] and scale.dtype == torch.float64
    named = corpus(ids=["a", "b", "c", "d"], ceiling={"a": 1.0, "b": math.inf, "c": 3.0, "d": 4.0})
    scale, ceiling = named.limits(rows)
    assert scale is None and ceiling is not None and ceiling.tolist() == [4.0, 1.0]
    assert corpus().limits(rows) == (None, None)


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.5, math.nan])
def test_what_is_no_scale_is_refused_by_name(wrong: float) -> None:
    with raises_code("corpus.limit-out-of-range", "corpus.value-missing"):
        corpus(scale=[1.0, 1.0, wrong, 1.0])


def test_other_mistakes() -> None:
    with raises_code("corpus.limit-not-a-number"):
        corpus(scale=["a", "b", "c", "d"])
    with raises_code("corpus.limit-out-of-range"):
        corpus(ceiling=[1.0, 0.0, 1.0, 1.0])
    with raises_code("corpus.column-wrong-length"):
        corpus(scale=[1.0, 1.0, 1.0])
    with raises_code("corpus.column-contradicts-itself"):
        corpus(scale=[0.5, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_membership_says_who_is_how_strict_and_order_does_not() -> None:
    scales = [0.5, 1.0, 1.0, 1.0]
    digests = {
        corpus().membership(KEY),
        corpus(scale=scales).membership(KEY),
        corpus(scale=scales[::-1]).membership(KEY),
        corpus(ceiling=scales).membership(KEY),
        corpus(scale=scales, ceiling=scales).membership(KEY),
    }
    assert len(digests) == 5
    assert corpus(scale=scales).membership(KEY) == corpus(scale=np.array(scales)).membership(KEY)
    assert corpus(scale=scales).order(KEY) == corpus().order(KEY)


def test_a_batch_has_the_limits_of_its_contributions() -> None:
    scales, ceilings = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    data = corpus(scale=scales, ceiling=ceilings)
    rule = Choose(epsilon=0.1, every=5, names=("x",), noise=((1.0,),))
    sampler = Sampler(data, plan(rules=(rule,)), seed=KEY)
    seen = 0
    for draw in (sampler.draw, sampler.draw_for_choice):
        for step in range(10):
            batch = draw(step)
            assert batch.scale is not None and batch.ceiling is not None and batch.unit is not None
            owner = [int(x[0]) for x in batch.x]  # the first number of an example: 0, 3 | 6 | 9 | 12, 15
            rows = [[0, 0, 1, 2, 3, 3][first // 3] for first in owner]
            for unit, row in zip(batch.unit.tolist(), rows, strict=True):
                assert float(batch.scale[unit]) == scales[row]
                assert float(batch.ceiling[unit]) == ceilings[row]
            seen += len(batch)
            parts = list(batch.split(2))
            assert torch.equal(torch.cat([p.scale for p in parts]), batch.scale)  # type: ignore[misc]
    assert seen > 20


def test_who_withdraws_takes_the_limits_along() -> None:
    data = corpus(scale=[0.1, 0.2, 0.3, 0.4])
    data.withdraw("1")
    batch = Sampler(data, plan(q=1.0), seed=KEY).draw(0)
    assert batch.scale is not None and batch.scale.tolist() == [0.1, 0.3, 0.4]


def test_a_scaled_contribution_moves_the_step_by_less() -> None:
    """scale·C, or the ceiling if that is lower, in the clipped sum of a real step."""
    data = corpus(scale=[0.25, 1.0, 0.5, 1.0], ceiling=[9.0, 0.75, 9.0, 9.0])
    model = nn.Linear(3, 1, bias=False)
    made = plan(q=1.0)
    batch = Sampler(data, made, seed=KEY).draw(0)
    with Engine(model, made, noise=SeededNoise(1)) as engine:
        norms = []
        for unit in range(4):
            weight = (batch.unit == unit).float()  # the others become slots of weight 0
            alone = type(batch)(
                batch.x, unit=batch.unit, cls=batch.cls, weight=weight, scale=batch.scale, ceiling=batch.ceiling
            )
            sums = engine.clipped_sums(1e3 * model(alone.x).squeeze(1), alone)
            norms.append(float(sums["weight"].norm()))
    assert norms == pytest.approx([0.5, 0.75, 1.0, 2.0], rel=1e-5)


def test_the_printed_clamp_bounds_nobody() -> None:
    printed = plan(clipping=Clipping.ELEMENTWISE, allocation="printed-ladp", batch=1.0, claimed=(1.0,))
    corpus().check(printed)
    with raises_code("corpus.limits-need-clipping"):
        corpus(scale=[0.5] * 4).check(printed)
