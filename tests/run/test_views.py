"""Several random views of one example: averaged within the contribution, clipped once, charged as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import problem
import pytest
import torch
from audit_steps import plan_for
from oracle import agree
from refusals import raises_code
from stopping import same, weights
from torch import Tensor, nn

from lamina import Batch
from lamina.audit.paired_step import paired_step
from lamina.audit.target import AuditTarget

UNIT = torch.tensor([0, 0, 1, 2, 2, 2])


def shaken(x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn_like(x)


def test_the_rows_of_a_view_belong_to_whom_the_example_belongs() -> None:
    batch = Batch({"a": torch.arange(6)}, torch.arange(6.0), unit=UNIT, weight=torch.tensor([1, 0, 1, 1, 2, 1.0]))
    found = batch.views(2)
    assert found.x["a"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert found.unit.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert found.weight.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 2, 2, 1, 1]
    assert found.draw is batch.draw  # no second draw: it is charged once
    assert not found.classified
    assert batch.views(1) is batch
    with raises_code("engine.views"):
        batch.views(0)


def test_the_mean_over_views_is_clipped_once() -> None:
    """Against `vmap(grad)` of every view alone, averaged and clipped by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    batch = Batch(torch.randn(6, 4), unit=UNIT).views(3)
    batch = replace(batch, x=shaken(batch.x))
    agree(model, batch.x, batch={"unit": batch.unit})


def test_views_leave_the_sensitivity_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plan = plan_for(model)
    target = AuditTarget(model=model, plan=plan, losses_of=lambda x, y: model(x).flatten(1).sum(1) * y)
    batch = Batch(torch.randn(4, 3).double(), torch.full((4,), 1e3).double()).views(4)
    batch = replace(batch, x=shaken(batch.x))
    for unit in range(4):
        found = paired_step(target, batch, unit)
        assert found.sensitivity == pytest.approx(1 / plan.sigma(0), rel=1e-5)  # the canary's gradients fill the bound
        assert found.sensitivity <= found.bound * (1 + 1e-9)


@pytest.mark.usefixtures("known_seeds")
def test_a_run_with_views_costs_the_same_and_goes_on_exactly(tmp_path: Path) -> None:
    plain = problem.trainer(tmp_path / "plain" / "run", augment=shaken).fit()
    whole = problem.trainer(tmp_path / "whole" / "run", augment=shaken, views=3)
    assert whole.fit().epsilon == plain.epsilon
    half = problem.trainer(tmp_path / "cut" / "run", augment=shaken, views=3)
    run_steps, stopped = half._run_steps, []

    def stops_once(*args: object) -> bool:
        stopped.append(1)
        if len(stopped) == 3:
            raise KeyboardInterrupt
        return run_steps(*args)

    half._run_steps = stops_once
    with pytest.raises(KeyboardInterrupt):
        half.fit()
    again = problem.trainer(tmp_path / "cut" / "run", augment=shaken, views=3)
    again.fit()
    assert same(weights(again), weights(whole))
    parts = problem.trainer(tmp_path / "parts" / "run", augment=shaken, views=3, microbatches=3)
    parts.fit()
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # dropout is drawn in other pieces


def test_views_need_an_augmentation(tmp_path: Path) -> None:
    with raises_code("train.views-without-augment"):
        problem.trainer(tmp_path / "run", views=2)
    with raises_code("train.not-a-count"):
        problem.trainer(tmp_path / "run", views=0, augment=shaken)
