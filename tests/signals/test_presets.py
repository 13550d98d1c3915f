"""Presets: known by name, enough for a run, and under whatever a run file says itself."""

from __future__ import annotations

import pytest
import torch
from refusals import raises_code
from torch import nn

import lamina
from lamina.cli.run_file import RunFile
from lamina.signals import presets

RUN = """
policy = "policy.toml"
model = "nets:build"
loss = "bce"
preset = "ecg-linear"
[data]
kind = "npz"
path = "data.npz"
"""


@pytest.mark.parametrize("name", list(presets.PRESETS))
def test_a_preset_is_enough_for_a_private_step(name: str) -> None:
    preset = presets.find(name)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(50, 4)
    engine, corpus, plan = lamina.make_private(model, x, epsilon=2.0, delta=1e-4, **preset.settings(50))
    optimizer, schedule = preset.optimizer_for(model, plan)
    rate = optimizer.param_groups[0]["lr"]
    assert plan.steps == preset.steps
    assert plan.epsilon(0) <= 2.0
    before = model.weight.detach().clone()
    for _, batch in zip(range(12), corpus.batches(plan, probe=False), strict=False):
        engine.backward(model(batch.x).square().mean(1) if len(batch) else None, batch)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert not torch.equal(before, model.weight)
    if preset.optimizer["name"] == "auto":
        assert rate == lamina.private_optimizer(model, plan)[0].param_groups[0]["lr"]
        with raises_code("plan.preset-needs-plan"):
            preset.optimizer_for(model)
    else:
        assert optimizer.param_groups[0]["lr"] < rate == preset.optimizer["lr"]
    assert preset.chosen_on and preset.task
    engine.detach()


def test_a_run_file_may_take_all_of_it_or_parts() -> None:
    run = RunFile.parse(RUN)
    preset = presets.find("ecg-linear")
    assert (run.steps, run.clip_norm, run.batch) == (preset.steps, preset.clip_norm, None)
    assert run.optimizer.name == preset.optimizer["name"]
    assert run.optimizer.arguments == {"lr": preset.optimizer["lr"]}
    assert run.scheduler.name == "cosine"
    table = RunFile.parse(RUN.replace("ecg-linear", "tabular"))
    assert (table.optimizer.name, table.scheduler, table.steps) == ("auto", None, presets.find("tabular").steps)
    mine = RunFile.parse('batch = 20\nepochs = 3\noptimizer = { name = "adam", lr = 0.1 }\n' + RUN)
    assert (mine.batch, mine.epochs, mine.steps, mine.optimizer.name) == (20, 3, None, "adam")
    assert mine.clip_norm == preset.clip_norm


def test_unknown_names_and_files_without_batch_are_refused() -> None:
    with raises_code("plan.preset-not-known"):
        RunFile.parse(RUN.replace("ecg-linear", "ecg-linera"))
    with raises_code("plan.preset-not-known"):
        presets.find("everything")
    with raises_code("cli.run-keys-missing"):
        RunFile.parse('optimizer = "sgd"\nsteps = 3\n' + RUN.replace('preset = "ecg-linear"\n', ""))
