"""`Recipe`: what a private training needs, put together by a function of `lamina.recipes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lamina.engine.engine import Engine
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """What a training loop or `lamina.Trainer` takes.

    features  the fixed map from raw records to what `model` takes: apply it to new records first
    """

    model: nn.Module
    engine: Engine
    corpus: Corpus
    plan: StepPlan
    optimizer: Optimizer
    schedule: Any
    features: nn.Module
