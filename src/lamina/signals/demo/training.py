"""The demo's model, loss and evaluation, which its RUN.toml names; its trainings with and without privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lamina.engine.rules.proxy import Proxy
from lamina.errors import LaminaError
from lamina.ledger.writer import Ledger
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.publisher import Evaluation, Outcome
from lamina.run.trainer import Trainer
from lamina.signals.autoencoders import ClassifierLoss, ResidualClassifier
from lamina.signals.demo.patients import INPUT_SCALE, SEEDS, SEVERITY, PatientGroup, measure_utility
from lamina.signals.ecg_simulator import CLASSES, ECGSimulator

# What the demo's RUN.toml names: the model as the private run found it, its loss, its evaluation.
#
# Paths are those of the folder in which `lamina train` is called.

WEIGHT_SEED = 7  # of the first weights

loss = ClassifierLoss(weight=3.0)


def untrained_model() -> ResidualClassifier:
    """The model with its first weights, which are the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(WEIGHT_SEED)
        return ResidualClassifier(classes=len(CLASSES))


def pretrained_model(weights: str = "start.safetensors") -> ResidualClassifier:
    """The model after it was trained on volunteers alone."""
    model = untrained_model()
    model.load_state_dict(load_file(_in_this_folder(weights)))
    return model


def evaluate(model: nn.Module) -> dict[str, float]:
    """AUC and reconstruction error on simulated patients whom no training saw."""
    return measure_utility(model, PatientGroup.load(_in_this_folder("test.npz"))).figures()


def proxy() -> tuple[Tensor, Tensor]:
    """Return one window each of other simulated patients, to test before training whether the sensitive class helps."""
    simulator = ECGSimulator(severity=SEVERITY, windows=1)
    drawn = simulator.draw(patients=400, seed=SEEDS["proxy"])
    return INPUT_SCALE * torch.from_numpy(drawn.x), torch.from_numpy(drawn.label)


def _in_this_folder(name: str) -> Path:
    if not Path(name).is_file():
        problem = f"there is no '{name}' in this folder"
        raise LaminaError("cli.file-missing", problem, "call lamina train inside the demo's folder")
    return Path(name)


# The demo's trainings: a start on volunteers alone, and from there three ways on.
#
#     without_sensitive   volunteers alone, as before
#     private             volunteers and sensitive patients, as the plan says
#     without_privacy     everybody in every layer, neither clipped nor noised: what privacy is measured against
#
# Steps, batches, optimiser and schedule of the three are the same, so that what differs is the privacy.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Adam under one cycle of the learning rate.

    `eps` of the order of a noised coordinate's noise keeps Adam from stretching gradients that are smaller than it
    to full steps.
    """

    lr: float
    eps: float

    def optimizer_and_schedule(self, model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr, eps=self.eps)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[self.lr], total_steps=steps)


PRETRAINING = AdamSettings(lr=6e-3, eps=1e-8)
FINE_TUNING = AdamSettings(lr=2e-2, eps=2e-2)


def train_without_privacy(
    model: nn.Module, groups: Mapping[str, PatientGroup], batch: Mapping[str, int], *, recipe: AdamSettings, steps: int,
    seed: int, tick: Callable[[int], None],
) -> None:  # fmt: skip
    """Ordinary training on Poisson samples of the same rates: no clipping, no noise, no routing, no privacy."""
    generator = torch.Generator().manual_seed(seed)
    optimizer, schedule = recipe.optimizer_and_schedule(model, steps)
    total = sum(batch[name] for name in groups)
    model.train()
    for step in range(steps):
        parts = [_poisson_sample(group, batch[name], generator) for name, group in groups.items()]
        x, label = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        optimizer.zero_grad()
        (loss(model(x), label).sum() / total).backward()
        optimizer.step()
        schedule.step()
        tick(step + 1)


def _poisson_sample(group: PatientGroup, expected: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each patient with probability expected/len, and one window of each."""
    coins = torch.rand(len(group), generator=generator) < expected / len(group)
    patients = coins.nonzero().flatten()
    windows = torch.randint(group.x.shape[1], patients.shape, generator=generator)
    return group.x[patients, windows], group.label[patients]


def train_privately(
    model: nn.Module, test: PatientGroup, corpus: Corpus, plan: StepPlan, folder: Path, ledger: Ledger
) -> Outcome:
    """The private run: `lamina.Trainer`, charged in the demo's own ledger."""
    optimizer, schedule = FINE_TUNING.optimizer_and_schedule(model, plan.steps)
    evaluation = Evaluation(function=lambda trained: measure_utility(trained, test).figures(), on="simulated")
    x, y = proxy()
    trainer = Trainer(
        model, optimizer, loss, corpus, plan, folder=folder / "run", ledger=ledger, scheduler=schedule,
        evaluate=evaluation, starting_weights="public", proxy=Proxy(source="simulated: other patients", x=x, y=y, loss_fn=loss),
    )  # fmt: skip
    return trainer.fit()
