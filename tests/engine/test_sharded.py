"""Models under fully_shard: the same steps as without it, however the model is built, used, cut and attacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ranks
import sharded_ranks

Answers = list[dict[str, Any]]
ORDERS = {
    "other order": [0, 2, 3, 1],
    "used twice": [0, 2, 1, 2, 3],
    "without gradient": [0, 2, 1, 2, 3],
    "called twice": [0, 1, 2, 3] * 2,
    "left out": None,  # not the same on all ranks: the model stays whole during steps
    "in parts": [0],
    "tied": [0, 1],
    "twice over positions": [0, 2, 1, 2, 3],
}


FEW = [
    "plain",
    "joint",
    "other order",
    "left out",
    "used twice",
    "checkpointed",
    "frozen below",
    "in parts",
    "hardened",
    "nobody",
    "twice over positions",
    "in an object",
    "looked at",
    "looked at with gradients",
    "beside an object",
]
MORE = [way for way in sharded_ranks.WAYS if way not in FEW]


@pytest.fixture(scope="module")
def two() -> Answers:
    return ranks.run_ranks("sharded_ranks.py", 2, ",".join([*FEW, "attacks"]))


@pytest.fixture(scope="module")
def two_more() -> Answers:
    return ranks.run_ranks("sharded_ranks.py", 2, ",".join(MORE))


@pytest.mark.parametrize("way", FEW)
def test_a_sharded_model_takes_the_same_steps(way: str, two: Answers) -> None:
    takes_the_same_steps(way, two)


@pytest.mark.slow
@pytest.mark.parametrize("way", MORE)
def test_a_sharded_model_takes_the_same_steps_in_every_way(way: str, two_more: Answers) -> None:
    takes_the_same_steps(way, two_more)


def takes_the_same_steps(way: str, two: Answers) -> None:
    """Weights, clip norms and noise after five steps, bit for bit; between steps a rank holds its part only."""
    for answer in two:
        plain, found = answer[way]
        assert found["weights"] == plain["weights"] == two[0][way][0]["weights"]
        assert found["notes"] == plain["notes"] and found["whole"] == 0
        assert found["order"] == ORDERS.get(way, [0, 1, 2, 3])
    if way == "refused between":
        assert two[0][way][1]["notes"][0] == "engine.batch-of-other-ranks"


def test_what_is_refused_of_a_sharded_model(two: Answers) -> None:
    wanted = {
        "not divided, before any forward pass": "engine.batch-of-other-ranks",
        "an error in the backward pass": "engine.rank-failed",
        "and then": "",
        "another sample": "engine.ranks-out-of-step",
        "another step": "engine.ranks-out-of-step",
        "written to": "engine.parameter-written",
        "another buffer": "engine.ranks-differ",
        "other weights that are not divided": "engine.ranks-differ",
        "a part of a block": "engine.sharded-part-bypassed",
        "tied over two blocks": "plan.tensor-not-in-plan",
        "compiled": "engine.sharded-model",
    }
    first, second = (dict(answer["attacks"]) for answer in two)
    assert first.pop("detached") == second.pop("detached")  # FSDP adds gradients up again
    assert first == wanted
    assert second == {**wanted, "an error in the backward pass": "test.itself", "written to": "engine.rank-failed"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_models_of_three_ranks() -> None:
    """Another order of additions, and parts of unequal size."""
    ways = [way for way in sharded_ranks.WAYS if way not in ("columns", "bfloat16")]  # not divisible; coarse
    for answer in ranks.run_ranks("sharded_ranks.py", 3, ",".join(ways), timeout=500):
        for way in ways:
            plain, found = answer[way]
            for name, weights in plain["weights"].items():
                assert np.allclose(np.array(found["weights"][name]), np.array(weights), atol=1e-4), (way, name)
