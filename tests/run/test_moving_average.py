"""The moving average of the weights: how it begins, and that figures are of it and of the weights themselves."""

from __future__ import annotations

from pathlib import Path

import problem
import pytest
import torch
from safetensors.torch import load_file
from stopping import figures
from torch import nn

from lamina import Evaluation
from lamina.run.training_checkpoint import MovingAverage


def test_the_average_of_a_short_run_is_not_that_of_its_first_weights() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = MovingAverage(model, 0.999)
    for step in range(300):
        with torch.no_grad():
            model.weight.fill_((step + 1) / 300)
        average.update(step)
    assert 0.85 < float(average.average["weight"]) < 1.0


def test_a_long_run_is_averaged_with_the_decay_that_was_asked_for() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = MovingAverage(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(0.0)
    average.update(100_000)
    assert float(average.average["weight"]) == pytest.approx(0.9, rel=1e-6)


def test_both_weights_are_evaluated_and_the_better_is_kept(tmp_path: Path) -> None:
    start = problem.trainer(tmp_path / "start").model.state_dict()
    first = torch.cat([t.flatten().clone() for t in start.values()])

    def moved(model: nn.Module) -> dict[str, float]:
        now = torch.cat([t.flatten() for t in model.state_dict().values()])
        return {"moved": float((now - first).norm())}

    rule = Evaluation(function=moved, on="public", best="moved")
    trainer = problem.trainer(tmp_path / "a", evaluate=rule, ema=0.999)
    outcome = trainer.fit()
    assert outcome.metrics["moved_without_ema"] == pytest.approx(moved(trainer.model)["moved"], rel=1e-6)
    assert 0 < outcome.metrics["moved"] < outcome.metrics["moved_without_ema"]  # the average lags behind
    history = figures(tmp_path / "a")["evaluations"]
    best = max(max(entry["figures"].values()) for entry in history)
    kept = problem.trainer(tmp_path / "b").model
    kept.load_state_dict(load_file(tmp_path / "a" / "best.safetensors"))
    assert moved(kept)["moved"] == pytest.approx(best, rel=1e-6)
