"""A small model, three classes of which one is public, and plans of every adaptive kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina.engine.batch import Batch
from lamina.plan.layer_stack import LayerStack
from lamina.plan.rules import Rule
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan

ALL = PlannedClass(name="all", population=1000, sampling_rate=0.02, delta=1e-5)
TOP = PlannedClass(name="top", population=500, sampling_rate=0.05, delta=1e-5, profile="upper half")
OPEN = PlannedClass(name="open", population=None, sampling_rate=0.1, public=True)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.mid, self.out = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mid(torch.tanh(self.into(x)))))


def _losses(model: nn.Module, batch: Batch) -> Tensor | None:
    return (model(batch.x) - batch.y).square().mean(1) if batch.examples else None


def _plan(model: nn.Module, *rules: Rule, several: bool = True, scale: float = 1.0, **changes: Any) -> StepPlan:
    layers = tuple(
        PlannedLayer(name=x.name, depth=x.depth, parameters=x.parameters, size=x.size)
        for x in LayerStack.from_model(model)
    )
    size = len(layers)
    row = tuple(0.3 * scale * 1.4**i for i in range(size))
    top = tuple(0.6 * c if i >= size // 2 else 0.0 for i, c in enumerate(row))
    rows = (row, top, (math.inf,) * size) if several else (row,)
    fields = {
        "layers": layers,
        "classes": (ALL, TOP, OPEN)[: len(rows)],
        "clip": rows,
        "noise": tuple(0.8 * scale * 1.2**i for i in range(size)),
        "batch": 8.0,
        "steps": 40,
        "rules": rules,
    }
    return StepPlan(**{**fields, **changes})


def _batch(n: int = 8, *, seed: int = 0, several: bool = True, spread: float = 1.0) -> Batch:
    source = torch.Generator().manual_seed(seed)
    size = 10.0 ** (spread * (torch.rand(n, 1, generator=source) - 0.5))
    x, y = torch.randn(n, 4, generator=source) * size, torch.randn(n, 2, generator=source) * size
    cls = torch.randint(0, 3 if several else 1, (n,), generator=source)
    return Batch(x, y, cls=cls)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(7)
    return Small()


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., StepPlan]:
    return _plan


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    return _batch


@pytest.fixture(scope="session")
def losses_of() -> Callable[[nn.Module, Batch], Tensor | None]:
    return _losses


@pytest.fixture(scope="session")
def norms_of() -> Callable[[nn.Module, Batch, StepPlan], Tensor]:
    """(P, L) norms of every contribution, by one autograd call for each: nothing of the engine is used."""

    def norms(model: nn.Module, batch: Batch, plan: StepPlan) -> Tensor:
        rows = []
        for i in range(len(batch)):
            model.zero_grad(set_to_none=True)
            loss = (model(batch.x[i : i + 1]) - batch.y[i : i + 1]).square().mean()
            grads = dict(
                zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
            )
            rows.append([_length([grads[n] for n in layer.parameters]) for layer in plan.layers])
        return torch.tensor(rows, dtype=torch.float64)

    return norms


def _length(grads: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))
