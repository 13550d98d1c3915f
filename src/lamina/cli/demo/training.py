"""The demo's trainings: a start on volunteers alone, and from there three ways on.

    without_sensitive   volunteers alone, as before
    private             volunteers and sensitive patients, as the plan says
    without_privacy     everybody in every layer, neither clipped nor noised: what privacy is measured against

Steps, batches, optimiser and schedule of the three are the same, so that what differs is the privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.allocate import make_plan
from lamina.cli.demo.parts import loss
from lamina.cli.demo.patients import Group
from lamina.cli.demo.sizes import Sizes
from lamina.cli.demo.utility import measure
from lamina.ledger.ledger import Ledger
from lamina.plan import LayerStack, Policy, StepPlan
from lamina.train import Corpus, Evaluation, Outcome, Trainer

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Adam under one cycle of the learning rate.

    `eps` of the order of a noised coordinate's noise keeps Adam from stretching gradients that are smaller than it
    to full steps.
    """

    lr: float
    eps: float

    def tools(self, model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr, eps=self.eps)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[self.lr], total_steps=steps)


START = Recipe(lr=6e-3, eps=1e-8)
ONWARD = Recipe(lr=2e-2, eps=2e-2)


def plan_of(model: nn.Module, policy: Policy, sizes: Sizes) -> StepPlan:
    """What the private run will do, and cost."""
    return make_plan(LayerStack.from_model(model), policy, batch=sizes.batch, steps=sizes.steps)


def plainly(
    model: nn.Module,
    groups: Mapping[str, Group],
    batch: Mapping[str, int],
    *,
    recipe: Recipe,
    steps: int,
    seed: int,
    tick: Tick,
) -> None:
    """Ordinary training on Poisson samples of the same rates: no clipping, no noise, no routing, no privacy."""
    generator = torch.Generator().manual_seed(seed)
    optimizer, schedule = recipe.tools(model, steps)
    total = sum(batch[name] for name in groups)
    model.train()
    for step in range(steps):
        parts = [_sample(group, batch[name], generator) for name, group in groups.items()]
        x, label = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        optimizer.zero_grad()
        (loss(model(x), label).sum() / total).backward()
        optimizer.step()
        schedule.step()
        tick(step + 1)


def _sample(group: Group, expected: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each patient with probability expected/len, and one window of each."""
    coins = torch.rand(len(group), generator=generator) < expected / len(group)
    patients = coins.nonzero().flatten()
    windows = torch.randint(group.x.shape[1], patients.shape, generator=generator)
    return group.take(patients, windows)


def privately(
    model: nn.Module, test: Group, corpus: Corpus, plan: StepPlan, folder: Path, ledger: Ledger
) -> Outcome:
    """The private run: `lamina.Trainer`, charged in the demo's own ledger."""

    def figures(model: nn.Module) -> dict[str, float]:
        found = measure(model, test)
        return {"auc": found.auc, "error": found.error}

    optimizer, schedule = ONWARD.tools(model, plan.steps)
    trainer = Trainer(
        model,
        optimizer,
        loss,
        corpus,
        plan,
        folder=folder / "run",
        ledger=ledger,
        scheduler=schedule,
        evaluate=Evaluation(function=figures, on="simulated"),
    )
    return trainer.fit()
