"""The paired-seed audit with native kernels on: taking one contribution away moves the release by no more than its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from audit_steps import plan_for
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lamina.audit.paired_step import paired_step
from lamina.audit.target import AuditTarget
from lamina.engine import native
from lamina.engine.batch import Batch


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv1d(8, 4, 2, stride=2), nn.Flatten(), nn.Linear(16, 2)
    )  # fmt: skip


@settings(max_examples=15)
@given(
    size=st.floats(-15, 15),
    other=st.floats(-15, 15),
    clipping=st.sampled_from(["box", "joint"]),
    units=st.sampled_from([[0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 2, 2], [2, 0, 1, 0, 2, 0]]),
    seed=st.integers(0, 10**6),
)
def test_one_contribution_is_bounded(size: float, other: float, clipping: str, units: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model, unit = net(), torch.tensor(units)
    plan = plan_for(model, clipping)
    x, y = torch.randn(6, 2, 8, generator=generator), torch.randn(6, generator=generator)
    x[unit == 1] *= 10.0**size
    y[unit == 1] *= 10.0**other

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return model(x).flatten(1).sum(1) * y

    with native.switched(True):
        subject = AuditTarget(model=model, plan=replace(plan, batch=3.0, steps=10), losses_of=losses_of)
        found = paired_step(subject, Batch(x, y, unit=unit), 1)
    assert found.sound, found


@pytest.mark.parametrize("clipping", ["box", "joint"])
def test_what_is_not_finite_adds_nothing(clipping: str) -> None:
    model, x = net(), torch.randn(4, 2, 8)
    x[1, 0, 3] = float("nan")

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return model(x).flatten(1).sum(1) * y

    with native.switched(True):
        subject = AuditTarget(model=model, plan=plan_for(model, clipping), losses_of=losses_of)
        assert paired_step(subject, Batch(x, torch.ones(4)), 1).sensitivity < 1e-5
