"""`optimizer="auto"`: follows from the plan, is fixed before the first step, is recorded, and survives being killed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina.cli.run_file import RunFile
from lamina.run.optimizer import signal_to_noise
from lamina.run.trainer import Trainer

STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def trainer(folder: Path, *, optimizer: object = "auto", **options: object) -> Trainer:
    model = build()
    engine, corpus, plan = lamina.make_private(
        model, data(), epsilon=4.0, delta=1e-4, batch=20, steps=STEPS, origin=f"here.example/{folder.name}"
    )
    loss = nn.CrossEntropyLoss(reduction="none")
    return Trainer(model, optimizer, loss, corpus, plan, engine=engine, folder=folder, **options)  # type: ignore[arg-type]


def test_the_rate_falls_to_nothing_over_the_steps_of_the_plan() -> None:
    model = build()
    _, _, plan = lamina.make_private(model, data(), epsilon=4.0, delta=1e-4, batch=20, steps=STEPS)
    optimizer, schedule = lamina.private_optimizer(model, plan)
    first, rates = optimizer.param_groups[0]["lr"], []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [first] * 9 + [first * (STEPS - t) / (0.3 * STEPS) for t in (9, 10, 11)]
    assert rates == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_the_rate_follows_from_signal_and_noise_of_the_plan() -> None:
    """By hand: r = b/(σ√d) for one class under flat clipping; 0.021 below 1, at most 0.042, less over more steps."""
    rates = {}
    for batch, steps in ((20, 12), (60, 12), (20, 600)):
        model = build()
        _, _, plan = lamina.make_private(model, data(), epsilon=4.0, delta=1e-4, batch=batch, steps=steps)
        r = batch / plan.sigma(0) / math.sqrt(4 * 6 + 6 + 6 * 2 + 2)
        assert signal_to_noise(plan) == pytest.approx(r)
        expected = min(0.042, 0.021 * max(1.0, r) ** 0.4) * min(1.25, math.sqrt(150 / steps))
        rates[batch, steps] = lamina.private_optimizer(model, plan)[0].param_groups[0]["lr"]
        assert rates[batch, steps] == pytest.approx(expected)
    assert rates[20, 600] == pytest.approx(0.0105)
    assert rates[60, 12] > rates[20, 12] > 1.25 * 0.021


def test_a_plan_without_noise_has_the_largest_rate() -> None:
    policy = lamina.Policy.from_dict(
        {"corpus": {"origin": "o", "delta": 1e-5}, "class": {"open": {"public": True, "population": 80}}}
    )
    plan = lamina.make_plan(lamina.LayerStack.from_model(build()), policy, batch=20, steps=10)
    assert signal_to_noise(plan) == math.inf
    assert lamina.private_optimizer(build(), plan)[0].param_groups[0]["lr"] == 1.25 * 0.042


def test_only_trainable_parameters_are_held() -> None:
    model = build()
    next(model.parameters()).requires_grad_(False)
    _, _, plan = lamina.make_private(model, data(), epsilon=4.0, delta=1e-4, batch=20, steps=STEPS)
    optimizer, _ = lamina.private_optimizer(model, plan)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


def test_auto_is_recorded_beside_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", seed=3)
    first = run.optimizer.param_groups[0]["lr"]
    run.fit()
    told = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["optimizer"]
    schedule = {"steps": STEPS, "falling": 0.3}
    assert told == {"name": "Adam", "lr": [first], "scheduler": "HoldThenFall", "schedule": schedule}


def test_the_rate_of_every_step_follows_from_the_record_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path / "run", seed=3)
    seen: list[float] = []
    take = run._step

    def noting(batch: lamina.Batch, step: int) -> float | None:
        seen.append(run.optimizer.param_groups[0]["lr"])
        return take(batch, step)

    monkeypatch.setattr(run, "_step", noting)
    run.fit()
    told = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["optimizer"]
    steps, falling, (rate,) = told["schedule"]["steps"], told["schedule"]["falling"], told["lr"]
    assert seen == pytest.approx([rate * min(1.0, (1.0 - t / steps) / falling) for t in range(steps)])


def test_any_schedule_is_recorded_with_its_terms(tmp_path: Path) -> None:
    model = build()
    engine, corpus, plan = lamina.make_private(
        model, data(), epsilon=4.0, delta=1e-4, batch=20, steps=STEPS, origin="here.example/step"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    loss = nn.CrossEntropyLoss(reduction="none")
    Trainer(model, optimizer, loss, corpus, plan, engine=engine, scheduler=scheduler, folder=tmp_path / "run").fit()
    told = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["optimizer"]
    schedule = {"step_size": 5, "gamma": 0.5}
    assert told == {"name": "SGD", "lr": [0.25], "scheduler": "StepLR", "schedule": schedule}


def test_a_given_optimiser_is_recorded_too(tmp_path: Path) -> None:
    model = build()
    engine, corpus, plan = lamina.make_private(
        model, data(), epsilon=4.0, delta=1e-4, batch=20, steps=STEPS, origin="here.example/given"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loss = nn.CrossEntropyLoss(reduction="none")
    Trainer(model, optimizer, loss, corpus, plan, engine=engine, folder=tmp_path / "run").fit()
    told = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["optimizer"]
    assert told == {"name": "SGD", "lr": [0.25], "scheduler": None}


@pytest.mark.parametrize("after", [1, 5, 11])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(tmp_path / "a" / "run", seed=7, segment=3)
    whole.fit()
    killed = trainer(tmp_path / "b" / "run", seed=7, segment=3)
    take = killed._step

    def dies(batch: lamina.Batch, step: int) -> float | None:
        take(batch, step)
        if step + 1 == after:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(killed, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        killed.fit()
    again = trainer(tmp_path / "b" / "run", seed=7, segment=3)
    again.fit()
    for mine, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert again.scheduler.last_epoch == STEPS


def test_another_word_is_refused(tmp_path: Path) -> None:
    with raises_code("train.optimizer-not-an-optimizer"):
        trainer(tmp_path / "run", optimizer="adam")


def test_a_schedule_beside_auto_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD(build().parameters(), lr=1.0)
    with raises_code("train.auto-has-a-schedule"):
        trainer(tmp_path / "run", scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(other, STEPS))


RUN = """
policy = "policy.toml"
model = "nets:build"
loss = "cross_entropy"
batch = 20
steps = 12
{more}
[data]
kind = "npz"
path = "data.npz"
"""


def test_a_run_file_without_an_optimiser_means_auto() -> None:
    assert RunFile.parse(RUN.format(more="")).optimizer.name == "auto"
    assert RunFile.parse(RUN.format(more='optimizer = "auto"\npreset = "ecg-linear"')).scheduler is None


@pytest.mark.parametrize("more", ['scheduler = "cosine"', 'optimizer = "auto"\nscheduler = "cosine"'])
def test_a_run_file_with_auto_names_no_schedule(more: str) -> None:
    with raises_code("plan.policy-invalid"):
        RunFile.parse(RUN.format(more=more))
