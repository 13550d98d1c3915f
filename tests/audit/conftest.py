"""Plans for audits: thresholds and noise that differ from layer to layer, so that whitening matters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lamina.plan.layer_stack import LayerStack
from lamina.plan.step_plan import PlannedClass, PlannedLayer, StepPlan

PLAIN = PlannedClass(name="plain", population=1000, sampling_rate=0.02, delta=1e-5)
TOP = PlannedClass(name="top", population=500, sampling_rate=0.05, delta=1e-5, profile="upper half")
OPEN = PlannedClass(name="open", population=None, sampling_rate=0.1, public=True)


def _plan(model: nn.Module, clipping: str = "box", *, group: Any = "module", several: bool = False) -> StepPlan:
    """Class 0 reaches every layer; with `several`, class 1 only the upper half, and class 2 is public."""
    layers = LayerStack.from_model(model, group=group).layers
    planned = tuple(PlannedLayer(name=x.name, depth=x.depth, parameters=x.parameters, size=x.size) for x in layers)
    size = len(planned)
    row = tuple(0.5 * 1.3 ** (i % 5) for i in range(size))
    rows = [row]
    if several:
        rows += [tuple(0.7 * c if i >= size // 2 else 0.0 for i, c in enumerate(row)), tuple(math.inf for _ in row)]
    return StepPlan(
        layers=planned,
        classes=(PLAIN, TOP, OPEN)[: len(rows)],
        clip=tuple(rows),
        noise=tuple(0.9 * 1.2 ** (i % 4) for i in range(size)),
        batch=4.0,
        steps=100,
        clipping=clipping,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="session")
def plan_for() -> Callable[..., StepPlan]:
    return _plan
