"""What `Accelerator.prepare` returns in one process: models and optimisers run as they are, the Dataset of a loader is used."""

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
from lamina.run.corpus import LoaderReplaced

LOSS = nn.CrossEntropyLoss(reduction="none")
pytestmark = pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore", "ignore::FutureWarning")


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


def trainer(folder: Path, model: nn.Module, optimizer: Any, x: torch.Tensor, **options: Any) -> lamina.Trainer:
    engine, corpus, plan = lamina.make_private(
        model, (x, (x[:, 0] > 0).long()), noise_multiplier=2.0, batch=8, steps=4, clip_norm=0.5
    )
    given = {"folder": folder, "seed": 3, "probe": False, "progress": False, **options}
    return lamina.Trainer(model, optimizer, LOSS, corpus, plan, engine=engine, **given)


def fit(folder: Path, model: nn.Module, optimizer: Any, x: torch.Tensor, **options: Any) -> None:
    trainer(folder, model, optimizer, x, **options).fit()


def test_a_prepared_model_and_optimiser_train_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    plain, optimizer = net()
    fit(tmp_path / "a", plain, optimizer, x)
    model, prepared = Accelerator(cpu=True).prepare(*net())
    keys = list(model.state_dict())
    fit(tmp_path / "b", model, prepared, x)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


def test_the_dataset_of_a_prepared_loader_is_used() -> None:
    model, _ = net()
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4))
    with pytest.warns(LoaderReplaced):
        _, corpus, plan = lamina.make_private(model, loader, epsilon=5.0, batch=4, steps=2)
    assert len(corpus) == 20 and plan.steps == 2


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


def test_accumulation_leaves_no_step_out(tmp_path: Path) -> None:
    """Inside of `accumulate`, a prepared optimiser skips all steps but the last."""
    x = torch.randn(60, 4)
    plain, optimizer = net()
    fit(tmp_path / "a", plain, optimizer, x)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    model, prepared = accelerator.prepare(*net())
    with accelerator.accumulate(model):
        fit(tmp_path / "b", model, prepared, x)
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


class Halved(torch.optim.SGD):
    """Another optimiser with the settings of SGD."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.5 * group["lr"])


def prepared_with(folder: Path, kind: Any, factor: Any, x: torch.Tensor) -> lamina.Trainer:
    model, _ = net()
    optimizer = kind(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model, optimizer, schedule = Accelerator(cpu=True).prepare(model, optimizer, schedule)
    return trainer(folder, model, optimizer, x, scheduler=schedule, seed=None, segment=4)


@pytest.mark.parametrize(("kind", "factor"), [(torch.optim.SGD, lambda step: 0.1**step), (Halved, lambda step: 1.0)])
def test_noise_is_not_used_again_with_another_optimiser_or_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, factor: Any
) -> None:
    """If the wrapped optimiser is edited between a kill and the next start, the segment is charged again."""
    x, seen = torch.randn(60, 4), list[bytes]()
    of_segment = lamina.SecureNoise.of_segment

    def noted(seed: bytes, **options: Any) -> Any:
        seen.append(seed)
        return of_segment(seed, **options)

    monkeypatch.setattr(lamina.SecureNoise, "of_segment", noted)
    killed = prepared_with(tmp_path / "run", torch.optim.SGD, lambda step: 1.0, x)
    take = killed._step
    calls = iter(range(9))
    monkeypatch.setattr(killed, "_step", lambda *given: take(*given) if next(calls) < 2 else killed_here())
    with pytest.raises(KeyboardInterrupt):
        killed.fit()
    outcome = prepared_with(tmp_path / "run", kind, factor, x).fit()
    assert len(seen) == len(set(seen))
    assert any("charged again" in note for note in outcome.notes)


def killed_here() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "schedule", "code"),
    [
        (torch.optim.LBFGS, None, "train.optimizer-several-gradients"),
        (torch.optim.SGD, torch.optim.lr_scheduler.ReduceLROnPlateau, "train.scheduler-follows-loss"),
    ],
)
def test_what_is_refused_is_refused_prepared(tmp_path: Path, kind: Any, schedule: Any, code: str) -> None:
    model, _ = net()
    optimizer = kind(model.parameters(), 0.1)
    given = (model, optimizer) if schedule is None else (model, optimizer, schedule(optimizer))
    model, optimizer, *schedules = Accelerator(cpu=True).prepare(*given)
    with raises_code(code):
        trainer(tmp_path / "run", model, optimizer, torch.randn(60, 4), scheduler=next(iter(schedules), None))
