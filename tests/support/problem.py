"""A small run to begin, kill and resume: patients with windows, two classes, dropout, momentum, a schedule."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lamina
from lamina import Corpus, LayerStack, Policy, StepPlan, Trainer, make_plan

POLICY = """
[corpus]
origin = "tests"
delta = 1e-5
[class.open]
public = true
population = 60
[class.clinical]
population = 300
epsilon = 4.0
unit = "patient"
[class.sensitive]
population = 120
epsilon = 2.0
unit = "patient"
profile = { top = 0.5 }
"""


NOISE = {
    "bins": 'injection = "per_microbatch"\nbins = 4',
    "slots": 'injection = "per_sample"\nslots = 12',
    "raw": 'injection = "per_sample_raw"',
    "capped": 'injection = "per_sample_raw"\noccurrences = 2',
}


def net(width: int = 12, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))


def loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def data(seed: int = 0, shift: float = 0.0) -> dict[str, Any]:
    """Contributions of one to three windows, three classes of label."""
    generator = np.random.default_rng(seed)
    patients = 400
    windows = generator.integers(1, 4, patients)
    unit = np.repeat(np.arange(patients), windows)
    label = generator.integers(0, 3, patients)[unit]
    x = generator.normal(size=(len(unit), 6)) + np.eye(6)[label] * 2 + shift
    names = np.array(["open"] * 50 + ["clinical"] * 250 + ["sensitive"] * 100)
    return {"x": x.astype(np.float32), "y": label, "unit": unit, "cls": names[unit]}


def corpus(**changes: Any) -> Corpus:
    policy = Policy.parse(changes.pop("policy", POLICY))
    return Corpus(**{**data(), **changes}, policy=policy)


def singles(**changes: Any) -> Corpus:
    """A corpus of one window of each patient."""
    whole = data()
    first = np.unique(whole["unit"], return_index=True)[1]
    return corpus(**{name: values[first] for name, values in whole.items()} | changes)


def unpromised(**changes: Any) -> Corpus:
    """The same data under no policy: nothing is promised but what a trainer is told."""
    return Corpus(**{**data(), **changes}, origin="tests")


def plan(model: nn.Module, steps: int = 24, policy: str = POLICY, batch: int = 48) -> StepPlan:
    return _plan(LayerStack.from_model(model), steps, policy, batch)


def parts(noise: str, **options: Any) -> dict[str, Any]:
    """Plan and corpus under this noise."""
    policy = f"{POLICY}\n[noise]\n{NOISE[noise]}\n"
    return {"plan": plan(net(), policy=policy, **options), "corpus": corpus(policy=policy)}


@lru_cache
def _plan(stack: LayerStack, steps: int, policy: str, batch: int) -> StepPlan:
    """Calibrated once: that takes longer than the run."""
    return make_plan(stack, Policy.parse(policy), batch=batch, steps=steps)


def trainer(folder: Path, *, steps: int = 24, segment: int = 5, seed: int = 0, **options: Any) -> Trainer:
    """The run of these tests; any part can be replaced. `seed` is of the first weights, `run_seed` the trainer's."""
    torch.manual_seed(seed)
    model = options.pop("model", None) or net()
    made = options.pop("plan", None) or plan(model, steps)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "scheduler" not in options:
        options["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, made.steps)
    data = options.pop("corpus", None) or (corpus() if options.get("bounds") is None else unpromised())
    options = {"progress": False, "segment": segment, "seed": options.pop("run_seed", None), **options}
    return lamina.Trainer(model, optimizer, options.pop("loss_fn", loss), data, made, folder=folder, **options)
