"""`Recipe`: the parts of a private training, assembled by a function of `lamina.recipes`, and two ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lamina.engine.engine import Engine
from lamina.engine.probe import preserve_global_generators
from lamina.errors import LaminaError
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.private import make_private
from lamina.run.trainer import Trainer
from lamina.signals.presets import Preset


def class_numbers(y: Any, classes: int) -> Tensor:
    """Return labels as whole numbers; refuse any that is not one of 0 … classes - 1."""
    given = np.asarray(y)
    if given.dtype.kind not in "biuf" or not np.isin(given, np.arange(classes)).all():
        problem = f"y of type {given.dtype} has labels that are not whole numbers from 0 to {classes - 1}"
        remedy = "number the labels 0 … C-1: numpy.unique(labels, return_inverse=True)[1]"
        raise LaminaError("train.labels-out-of-range", problem, remedy)
    return torch.as_tensor(given.astype(np.int64))


def shaped(name: str, x: Any, *axes: int | str) -> NDArray[np.float64]:
    """Return records as float64; refuse another shape than `axes`, of which names fit any length."""
    found = np.asarray(x, dtype=np.float64)
    if len(found.shape) != len(axes) or any(
        a != b for a, b in zip(axes, found.shape, strict=True) if isinstance(a, int)
    ):
        wanted = f"({', '.join(map(str, axes))})"
        raise LaminaError(
            "data.records-shape", f"{name} of shape {found.shape}, must be {wanted}", "reshape the records"
        )
    return found


def class_losses(output: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of each example; y holds class numbers."""
    return F.cross_entropy(output, y, reduction="none")


def binary(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean binary cross entropy of each example; y holds 0 or 1 for each output."""
    return F.binary_cross_entropy_with_logits(output, y, reduction="none").mean(1)


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of each example."""
    return (output - y).square().flatten(1).mean(1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias, all weights 0."""
    model = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(model.weight)
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """The arguments of a training loop or of `lamina.Trainer`.

    features  a fixed map from raw records to what `model` takes: apply it to new records first
    loss_fn   (output, y), or (output, x) where there is no y
    """

    model: nn.Module
    engine: Engine
    corpus: Corpus
    plan: StepPlan
    optimizer: Optimizer
    schedule: Any
    features: Callable[[Any], Tensor]
    loss_fn: Callable[[Any, Any], Tensor] = class_losses

    @classmethod
    def of(
        cls, model: nn.Module, features: Callable[[Any], Tensor], x: Any, y: Tensor | None, preset: Preset,
        loss_fn: Callable[[Any, Any], Tensor], *, unit: Any, population: int | None, origin: str | None = None, **options: Any,
    ) -> Recipe:  # fmt: skip
        """Plan the settings of a preset for these records; `options` are those of `make_private` and come first."""
        corpus = Corpus(features(x).numpy(), None if y is None else y.numpy(), unit=unit, origin=origin)
        settings = preset.settings(len(corpus) if population is None else population) | options
        engine, corpus, plan = make_private(model, corpus, population=population, **settings)
        optimizer, schedule = preset.optimizer_for(model, plan)
        return cls(
            model=model, engine=engine, corpus=corpus, plan=plan, optimizer=optimizer, schedule=schedule, features=features,
            loss_fn=loss_fn,
        )  # fmt: skip

    def trainer(self, folder: str | Path, **options: Any) -> Trainer:
        """Return a resumable trainer with a ledger; `options` are those of `Trainer`."""
        given: dict[str, Any] = {"engine": self.engine, "scheduler": self.schedule, **options}
        return Trainer(self.model, self.optimizer, self.loss_fn, self.corpus, self.plan, folder=folder, **given)

    def train(self) -> nn.Module:
        """Take every step of the plan in this process, without a ledger, and return the model in evaluation mode."""
        self.model.train()
        for batch in self.corpus.batches(self.plan):
            target = batch.x if batch.y is None else batch.y
            self.engine.backward(self.loss_fn(self.model(batch.x), target) if len(batch) else None, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        self.engine.detach()
        return self.model.eval()

    def predict(self, records: Any) -> Tensor:
        """Return the model's output for raw records, in evaluation mode."""
        with torch.no_grad(), preserve_global_generators():
            output: Tensor = self.model.eval()(self.features(records))
            return output
