"""Runs whose gradients native kernels form: killed and resumed, and resumed without them."""

from __future__ import annotations

from pathlib import Path

import problem
import pytest
import torch
from stopping import killed, same, told, weights
from torch import nn

from lamina.engine import native
from lamina.engine.native.products import NativeGrads


@pytest.fixture(autouse=True)
def built() -> None:
    with native.switched(True):
        if (reason := native.missing()) is not None:
            pytest.skip(reason)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.usefixtures("known_seeds")
def test_a_killed_run_resumes_exactly_with_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = [], NativeGrads._run
    monkeypatch.setattr(NativeGrads, "_run", lambda *args, **options: (ran.append(1), run(*args, **options)))
    with native.switched(True):
        whole = problem.trainer(tmp_path / "whole" / "a", model=net())
        expected = whole.fit()
        killed(tmp_path / "cut" / "a", 13, model=net())
        resumed = problem.trainer(tmp_path / "cut" / "a", seed=9, model=net())
        outcome = resumed.fit()
    assert ran and same(weights(whole), weights(resumed))
    assert outcome.epsilon == expected.epsilon and outcome.notes == ()


def test_a_run_that_goes_on_without_them_is_charged_again_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with native.switched(True):
        killed(tmp_path / "a", 13, model=net())
        monkeypatch.setattr(native, "kind", lambda: "torch")
        outcome = problem.trainer(tmp_path / "a", seed=9, model=net()).fit()
    assert told(outcome, "charged again, because the version of the program, what draws its noise, its kernels")
