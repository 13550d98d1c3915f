"""What is measured on the stand-in before any plan is made: norms, Δ, harm and Fisher information of the layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lamina import LayerStack
from lamina.allocate.measure.measure import Measure, measure

from .data import Split
from .policies import ENTRIES, planned
from .tasks import Task
from .train import trained

SEED = 99  # of none of the runs that are compared
EXAMPLES = 500


def measured(task: Task, split: Split, folder: Path) -> Measure:
    """Measured in the middle of training: after half of a `flat` run on the stand-in, on 500 of its examples.

    At initialisation the classifiers' last layer has about twice its later part of the norm; a network that was trained
    to the end without noise has gradients that a private one never sees.
    """
    path = folder / f"measure-{task.name}.json"
    if path.exists():
        return Measure.load(path)
    clip, rate = task.usual
    plan = planned(ENTRIES["flat"], task, split.train.units, clip, None)
    model = trained(task, split.train, plan, rate=rate, clip=clip, seed=SEED, steps=task.steps // 2)
    rows = torch.randperm(len(split.test.x), generator=torch.Generator().manual_seed(SEED))[:EXAMPLES]
    x, y = split.test.x[rows], split.test.y[rows]
    found = measure(
        model,
        LayerStack.from_model(model),
        x=x,
        y=y,
        losses_of=_losses(task, model),
        passes=len(x),
        radius=float(x.norm(dim=1).quantile(0.99)),
        seed=SEED,
        proxy=task.stand_in,
        examples=len(x),
        draws=64,
    )
    folder.mkdir(parents=True, exist_ok=True)
    found.save(path)
    return found


def _losses(task: Task, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return task.losses(model(x), x, y)

    return losses_of
