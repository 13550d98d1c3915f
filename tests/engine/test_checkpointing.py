"""Activation checkpointing: the non-reentrant form gives the same sums, the reentrant form is refused."""

from __future__ import annotations

import pytest
import torch
from net_builders import refused, tensors_close
from oracle import FORMS, losses_of, plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lamina import Batch, Engine

N = 5
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class Gain(nn.Module):
    """A bare parameter: differentiated per contribution."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.g


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.gain = nn.Linear(8, 8), Gain()
        self.recur = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = x + self.attention(h, h, h, need_weights=False)[0]
        return h + self.gain(self.recur(self.up(h).tanh())[0])


class Net(nn.Module):
    """`how`: None without checkpoints, else the value of use_reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Plain() if i else Block() for i in range(3))
        self.head = nn.Linear(8, 2)
        self.how: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h) if self.how is None else checkpoint(block, h, use_reentrant=self.how)
        return self.head(h)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.drop(self.a(x).tanh()))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_sums_with_and_without(form: str, autocast: bool) -> None:
    model, x = Net(), torch.randn(N, 4, 3)
    bands = [[0.1] * len(plan_of(model).layers), [0.0] * 6 + [0.1] * (len(plan_of(model).layers) - 6)]
    batch = Batch(x, unit=torch.tensor([0, 1, 1, 2, 2]), cls=torch.tensor([0, 1, 0]))
    sums = []
    with Engine(model, plan_of(model, bands, clipping=form)) as engine:
        for how in (None, False, None, False):
            model.how = how
            torch.manual_seed(7)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = losses_of(model, x, None).float()
            sums.append(engine.clipped_sums(losses, batch))
    for other in sums[1:]:
        tensors_close(other, sums[0])


def test_the_reentrant_form_is_refused() -> None:
    model = Net()
    model.how = True
    refused(model, torch.randn(N, 4, 3), "engine.reentrant-checkpoint")


def test_a_training_step_under_checkpoints() -> None:
    model, x = Net(), torch.randn(N, 4, 3)
    model.how = False
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Engine(model, plan_of(model, 0.1, 0.01)) as engine:
        for _ in range(3):
            engine.backward(losses_of(model, x, None), Batch(x))
            optimizer.step()
            optimizer.zero_grad()
        assert engine.budget.taken == 3
