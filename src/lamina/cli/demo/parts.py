"""What the demo's RUN.toml names: the model as the private run found it, its loss, its evaluation.

Paths are those of the folder in which `lamina train` is called.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from lamina.cli.demo.patients import load
from lamina.cli.demo.utility import measure
from lamina.errors import LaminaError
from lamina.models import ClassifierLoss, ResidualClassifier

SEED = 7  # of the first weights

loss = ClassifierLoss(weight=3.0)


def untrained() -> ResidualClassifier:
    """The model with its first weights, which are the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return ResidualClassifier()


def started(weights: str = "start.safetensors") -> ResidualClassifier:
    """The model after it was trained on volunteers alone."""
    model = untrained()
    model.load_state_dict(load_file(_here(weights)))
    return model


def evaluate(model: nn.Module) -> dict[str, float]:
    """AUC and reconstruction error on simulated patients whom no training saw."""
    found = measure(model, load(_here("test.npz")))
    return {"auc": found.auc, "error": found.error}


def _here(name: str) -> Path:
    if not Path(name).is_file():
        raise LaminaError(
            "cli.no-folder",
            f"there is no '{name}' in this folder",
            "call lamina train inside the demo's folder",
        )
    return Path(name)
