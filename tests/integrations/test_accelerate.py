"""What `Accelerator.prepare` returns in one process: models and optimisers run as they are, loaders are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from refusals import raises_code
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lamina

LOSS = nn.CrossEntropyLoss(reduction="none")
pytestmark = pytest.mark.filterwarnings("ignore::lamina.train.private.PlannedBefore", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """accelerate keeps its settings for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def fit(folder: Path, model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    engine, corpus, plan = lamina.make_private(
        model, (x, (x[:, 0] > 0).long()), epsilon=5.0, batch=8, steps=4, clip_norm=0.5
    )
    lamina.Trainer(
        model, optimizer, LOSS, corpus, plan, engine=engine, folder=folder, seed=3, probe=False, progress=False
    ).fit()  # fmt: skip


def test_a_prepared_model_and_optimiser_train_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    plain, optimizer = net()
    fit(tmp_path / "a", plain, optimizer, x)
    model, prepared = Accelerator(cpu=True).prepare(*net())
    keys = list(model.state_dict())
    fit(tmp_path / "b", model, prepared, x)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


def test_a_prepared_loader_is_refused(tmp_path: Path) -> None:
    model, _ = net()
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4))
    with raises_code("corpus.dataloader-not-poisson"):
        lamina.make_private(model, loader, epsilon=5.0, batch=4, steps=2)


def test_backward_of_the_accelerator_is_refused() -> None:
    """A gradient that goes past the engine."""
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*net())
    x = torch.randn(20, 4)
    engine, _, _ = lamina.make_private(model, (x, torch.zeros(20).long()), epsilon=5.0, batch=4, steps=2, clip_norm=0.5)
    with engine, raises_code("engine.backward-outside-engine"):
        accelerator.backward(LOSS(model(x), torch.zeros(20).long()).mean())


def test_mixed_precision_is_that_of_torch(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    plain, optimizer = net()
    with torch.autocast("cpu", torch.bfloat16):
        fit(tmp_path / "a", plain, optimizer, x)
    model, prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(*net())
    fit(tmp_path / "b", model, prepared, x)
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())
