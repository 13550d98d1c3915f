"""What rounding in a sum of clipped gradients adds to its sensitivity, for contributions that are built to make it large.

docs/decisions/noise.md states what is proven and what was measured: the figures here are the measured ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle import plan_of
from torch import Tensor, nn

from lamina import Batch, Engine, SeededNoise
from lamina.engine import native

REMOVED, EMPTIED = 1.032, 1.001  # of the bound, if a contribution is left out, or replaced by nothing in its place
COUNT = 16_384


def built_for(count: int) -> NDArray[np.float32]:
    """Numbers of at most 1 whose float32 sum, taken one after the other, moves by much more than 1 without the first of them.

    They climb to a power of two, and then go back and forth across it: there the spacing of float32 doubles, and each
    number is chosen so that the sum with the first one and the sum without it are rounded apart.
    """
    half = count // 2
    chosen = [np.float32(1.0)] * half
    with_first, without = np.float32(half), np.float32(half - 1)
    spacing = float(np.spacing(np.float32(half)))
    steps = np.array([k * spacing / 8 for k in range(-8192, 8193, 3)], dtype=np.float32)
    steps = steps[np.abs(steps) <= 1]
    for _ in range(count - half):
        apart = (with_first + steps) - (without + steps)
        best = int(np.argmax(apart - 1e-6 * np.abs(with_first + steps - half)))
        chosen.append(steps[best])
        with_first, without = with_first + steps[best], without + steps[best]
    return np.array(chosen, dtype=np.float32)


def one_after_the_other(numbers: NDArray[np.float32]) -> float:
    return float(np.cumsum(numbers, dtype=np.float32)[-1])


def summed(numbers: NDArray[np.float32], kind: str, *, use: bool) -> float:
    """The clipped sum of contributions with these gradients."""
    layer, x = nn.Linear(1, 1, bias=kind == "bias"), torch.from_numpy(numbers).view(-1, 1)
    model = nn.Sequential(nn.Embedding(1, 1) if kind == "embedding" else layer)
    if kind == "bias":
        layer.weight.requires_grad_(False)
    plan = plan_of(model, 1.0001, 1.0, batch=1.0)
    with native.switched(use), Engine(model, plan, noise=SeededNoise(0)) as engine:
        losses: Tensor
        if kind == "weight":
            losses = model(x)
        elif kind == "positions":
            losses = model(torch.stack([x, torch.zeros_like(x)], 1)).sum(1)
        elif kind == "embedding":
            losses = (model(torch.zeros_like(x, dtype=torch.long)) * x.unsqueeze(1)).sum(1)
        else:
            losses = model(torch.zeros_like(x)) * x
        (total,) = engine.clipped_sums(losses.flatten(), Batch(x)).values()
    return float(total)


def test_sums_taken_one_after_the_other_leave_their_bound() -> None:
    """So that the tests below can fail."""
    numbers = built_for(COUNT)
    assert one_after_the_other(numbers) - one_after_the_other(numbers[1:]) > 1.01


@pytest.mark.parametrize("use", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("kind", ["weight", "bias", "positions", "embedding"])
@pytest.mark.parametrize("length", [128, 256, COUNT])
def test_sums_of_an_engine_move_by_little_more_than_their_bound(kind: str, use: bool, length: int) -> None:
    """Contributions built for the whole sum, and for the blocks in which an engine adds it up."""
    numbers = np.tile(built_for(length), COUNT // length)
    emptied = np.concatenate([np.zeros(1, dtype=np.float32), numbers[1:]])
    whole = summed(numbers, kind, use=use)
    assert abs(whole - summed(numbers[1:], kind, use=use)) <= REMOVED
    assert abs(whole - summed(emptied, kind, use=use)) <= EMPTIED
