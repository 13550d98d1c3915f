"""A small model, three classes of which one is public, and plans of every adaptive kind."""

from __future__ import annotations

import math
from typing import Any

import torch
from oracle import layers_of
from torch import Tensor, nn

from lamina.engine.batch import Batch
from lamina.plan.rules import Rule
from lamina.plan.step_plan import PlannedClass, StepPlan

ALL = PlannedClass(name="all", population=1000, sampling_rate=0.02, delta=1e-5)
TOP = PlannedClass(name="top", population=500, sampling_rate=0.05, delta=1e-5, profile="upper half")
OPEN = PlannedClass(name="open", population=None, sampling_rate=0.1, public=True)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.mid, self.out = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mid(torch.tanh(self.into(x)))))


def losses_of(model: nn.Module, batch: Batch) -> Tensor | None:
    return (model(batch.x) - batch.y).square().mean(1) if batch.examples else None


def plan_of(model: nn.Module, *rules: Rule, several: bool = True, scale: float = 1.0, **changes: Any) -> StepPlan:
    layers = layers_of(model)
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


def batch_of(n: int = 8, *, seed: int = 0, several: bool = True, spread: float = 1.0) -> Batch:
    source = torch.Generator().manual_seed(seed)
    size = 10.0 ** (spread * (torch.rand(n, 1, generator=source) - 0.5))
    x, y = torch.randn(n, 4, generator=source) * size, torch.randn(n, 2, generator=source) * size
    cls = torch.randint(0, 3 if several else 1, (n,), generator=source)
    return Batch(x, y, cls=cls)


def norms_of(model: nn.Module, batch: Batch, plan: StepPlan) -> Tensor:
    """(P, L) norms of every contribution, by one autograd call for each: nothing of the engine is used."""
    rows = []
    for i in range(len(batch)):
        loss = (model(batch.x[i : i + 1]) - batch.y[i : i + 1]).square().mean()
        names, tensors = zip(*model.named_parameters(), strict=True)
        norms = {n: float(g.double().norm()) for n, g in zip(names, torch.autograd.grad(loss, tensors), strict=True)}
        rows.append([math.hypot(*(norms[n] for n in layer.parameters)) for layer in plan.layers])
    return torch.tensor(rows, dtype=torch.float64)
