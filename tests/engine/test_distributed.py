"""Steps that several ranks take together: the clipped sum of one process, and noise of the planned variance."""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

import engine_ranks
import numpy as np
import pytest
import ranks
import torch
from oracle import clip_by_hand, example_grads, unit_grads
from refusals import raises_code

from lamina import Batch, SeededNoise
from lamina.engine.noise.grid import layer_grids
from lamina.engine.noise.source import rounding_grid
from lamina.plan.rules import NoiseKind

Answers = list[dict[str, Any]]
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed"
)


@pytest.fixture(scope="module")
def two() -> Answers:
    return ranks.run_ranks("engine_ranks.py", 2, "cases")


@pytest.fixture(scope="module")
def four() -> Answers:
    return ranks.run_ranks("engine_ranks.py", 4, "cases")


def expected(name: str, size: int) -> tuple[dict[str, torch.Tensor], float]:
    """(clipped sum + the shares of all ranks) / B, by the oracle and by hand; and how far it may be off, over B."""
    model, plan, whole, options = engine_ranks.case(name)
    grads = unit_grads(example_grads(model, whole.x), whole)
    sums = clip_by_hand(grads, whole.cls.tolist(), plan).sums
    tensors = list(sums)
    layer_of = {each: i for i, layer in enumerate(plan.layers) for each in layer.parameters}
    tolerance = 1e-5
    for rank in range(size):
        noise = SeededNoise(engine_ranks.SEED, rank=rank, hardened=False)
        if plan.noise_kind is not NoiseKind.GAUSSIAN:
            if rank == 0:
                units = [torch.zeros(sums[each].shape, dtype=torch.int64) for each in tensors]
                grids = [layer_grids(plan)[layer_of[each]] for each in tensors]
                noise.add_integers_(units, [grid.bits for grid in grids], step=0, kind=plan.noise_kind)
                for each, drawn, grid in zip(tensors, units, grids, strict=True):
                    sums[each] = sums[each] + drawn * grid.unit
                    tolerance = max(tolerance, len(whole) * grid.unit)
            continue
        drawn = [torch.empty(sums[each].shape, dtype=torch.float64) for each in tensors]
        noise.fill_many_(drawn, [plan.noise[layer_of[each]] / math.sqrt(size) for each in tensors], step=0)
        sums = {each: sums[each] + z for each, z in zip(tensors, drawn, strict=True)}
    if options["hardened"]:
        tolerance += rounding_grid(max(plan.noise)) / 2
    return {each: total / plan.batch for each, total in sums.items()}, tolerance / plan.batch


def check(name: str, answers: Answers) -> None:
    wanted, tolerance = expected(name, len(answers))
    assert all(answer[name] == answers[0][name] for answer in answers)  # the same bits on every rank
    for tensor, value in wanted.items():
        found = np.array(answers[0][name][tensor])
        assert np.abs(found - value.numpy()).max() <= tolerance + 1e-6 * float(value.abs().max()), tensor


@pytest.mark.parametrize("name", engine_ranks.CASES)
def test_two_ranks_take_the_step_of_one_process(name: str, two: Answers) -> None:
    """Sums over uneven and empty ranks, in parts, of several examples, tied and restricted; and exactly these shares."""
    check(name, two)


@pytest.mark.parametrize("name", ["plain box", "several joint", "plain box 1", "restricted joint", "hardened box"])
def test_four_ranks_take_the_step_of_one_process(name: str, four: Answers) -> None:
    check(name, four)


def check_sharded(name: str, answers: Answers) -> None:
    """With two ranks bit for bit; messages of more ranks add floats in another order."""
    for answer in answers:
        found = answer["sharded"][name]
        assert found == answers[0]["sharded"][name]
        if len(answers) == 2:
            assert found == answer[name]
        for tensor, value in answer[name].items():
            assert np.allclose(np.array(found[tensor]), np.array(value), rtol=1e-6, atol=1e-7), tensor


@pytest.mark.parametrize("name", engine_ranks.SHARDED)
def test_ranks_under_fully_shard_take_the_same_step(name: str, two: Answers, four: Answers) -> None:
    """The gradient of the same ranks without it, also where a rank is empty."""
    check_sharded(name, two)
    check_sharded(name, four)


def check_every_case(answers: Answers) -> None:
    for name in answers[0]:
        if name in engine_ranks.CASES:
            check(name, answers)
    for name in answers[0]["sharded"]:
        check_sharded(name, answers)


def test_eight_ranks_take_the_step_of_one_process() -> None:
    """Seven contributions, or a single one: some ranks are empty. Plain and under fully_shard."""
    check_every_case(ranks.run_ranks("engine_ranks.py", 8, "few"))


@pytest.mark.slow
def test_eight_ranks_take_every_step_of_one_process() -> None:
    answers = ranks.run_ranks("engine_ranks.py", 8, "every", timeout=280)
    check_every_case(answers)
    variance_is_right(answers, 5 * math.sqrt(2 / 19_200))


def test_hardened_sums_lie_on_the_grid_of_the_whole_noise(two: Answers) -> None:
    _, plan, _, _ = engine_ranks.case("hardened box")
    spacing = rounding_grid(plan.noise[0])
    found = np.array(two[0]["hardened box"]["0.weight"]) * plan.batch / spacing
    assert np.abs(found - np.rint(found)).max() < 1e-3


def test_counts_of_all_ranks_move_the_clip_norms_alike(two: Answers) -> None:
    assert two[0]["quantile"] == two[1]["quantile"] != [0.3, 0.3, 0.3]


def test_compiled_steps_of_ranks_are_those_of_the_hook_engine(two: Answers, four: Answers) -> None:
    """Also where one rank has a graph and another does not: sums are added up by the name of their tensor."""
    assert all(answer["compiled"] < 1e-6 for answer in (*two, *four))


@pytest.mark.slow
@needs_compiler
def test_steps_that_inductor_compiles_under_two_ranks_are_those_of_the_oracle() -> None:
    """One rank may have too few examples for a graph while the other has enough."""
    for answer in ranks.run_ranks("engine_ranks.py", 2, "inductor", timeout=500):
        assert set(answer) == {f"{kind} {form}" for kind in ("dense", "encoder") for form in ("box", "joint")}
        for name, found in answer.items():
            assert found["off"] < 1e-5, (name, found)
            assert found["steps"] > 2, (name, found)
            assert found["clipped"] > 10, (name, found)


def test_shares_that_follow_a_proxy_are_those_of_one_process(two: Answers, four: Answers) -> None:
    for answers in (two, four):
        for answer in answers:
            found = answer["proxied"]
            assert found["followed"] == answers[0]["proxied"]["followed"] and found["off"] < 1e-5
            assert found["followed"][::2] == found["alone"] and found["alone"][0] != found["alone"][1]
            assert found["followed"][0] == found["followed"][1]


def test_what_ranks_refuse(two: Answers) -> None:
    wanted = {
        "wrapped": "engine.ddp-wrapped",
        "whole batch": "engine.batch-of-other-ranks",
        "part of another rank": "engine.batch-of-other-ranks",
        "same draw again": "engine.batch-used-again",
        "another sample": "engine.ranks-out-of-step",
        "a batch of one's own": "engine.ranks-out-of-step",
        "out of step": "engine.ranks-out-of-step",
        "noise of rank 7": "engine.noise-of-other-rank",
        "other weights": "engine.ranks-differ",
        "other plan": "engine.ranks-differ",
        "other noise": "engine.ranks-differ",
        "slots": "engine.plan-not-for-ranks",
    }
    assert two[0]["refusals"] == wanted
    assert two[1]["refusals"] == {**wanted, "another rank failed": "engine.rank-failed"}


def variance_is_right(answers: Answers, within: float) -> None:
    found = [answer["variance"] for answer in answers]
    assert all(each == found[0] for each in found)
    for mean_square, s in zip(found[0], (0.5, 2.0, 8.0), strict=True):
        assert abs(mean_square / s**2 - 1) < within


def test_noise_of_several_ranks_has_the_planned_variance(two: Answers, four: Answers) -> None:
    """Of 300 steps: 19,200 draws a tensor, five standard deviations of their mean square."""
    for answers in (two, four):
        variance_is_right(answers, 5 * math.sqrt(2 / 19_200))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_noise_has_the_planned_variance_over_ten_thousand_steps(size: int) -> None:
    """Each tensor has 640,000 draws: 1 % are more than five standard deviations of their mean square."""
    variance_is_right(ranks.run_ranks("engine_ranks.py", size, "variance", "10000", timeout=1100), 0.01)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_of_a_batch_are_the_batch(size: int) -> None:
    """Every contribution is whole, on one rank, with its own class, weight and limits."""
    unit = torch.tensor([0, 1, 1, 2, 3, 3, 4])
    whole = Batch(
        torch.arange(7.0).view(7, 1), unit=unit, cls=torch.tensor([0, 1, 0, 1, 0]), weight=torch.arange(7.0),
        scale=torch.linspace(0.2, 1.0, 5), ceiling=torch.linspace(1.0, 2.0, 5),
    )  # fmt: skip
    parts = [whole.shard(rank, size) for rank in range(size)]
    assert sum(map(len, parts)) == len(whole)
    for rank, part in enumerate(parts):
        mine = range(rank, 5, size)
        assert part.cls.tolist() == [int(whole.cls[u]) for u in mine]
        assert part.scale.tolist() == [float(whole.scale[u]) for u in mine]
        assert part.ceiling.tolist() == [float(whole.ceiling[u]) for u in mine]
        for row, owner in zip(part.x[:, 0].tolist(), part.unit.tolist(), strict=True):
            assert int(unit[int(row)]) == mine[owner]
        assert part.weight.tolist() == part.x[:, 0].tolist()


def test_a_shard_that_no_rank_has_is_refused() -> None:
    with raises_code("engine.shard"):
        Batch(torch.zeros(2, 1)).shard(2, 2)
