"""Runs of a model on another device: batches move to it, and its checkpoints are those of a model on the CPU.

Run by tests/engine/test_device.py, in a process of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from pretend_device import PretendTensor, pretend_device, without_float64
from safetensors.torch import load_file
from stopping import LOOSE, killed, told
from torch import Tensor, nn

import lamina
from lamina.engine import native
from lamina.engine.noise.source import PlainNoise
from lamina.run import training_checkpoint

pretend_device()  # before the first backward pass
pytestmark = pytest.mark.usefixtures("known_seeds")


@pytest.fixture(autouse=True)
def plain_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tensors of a real device are of no class of their own: checkpoints refuse those that are."""
    own = training_checkpoint._dense_tensor

    def dense(name: str, t: Tensor) -> Tensor:
        return t.detach() if isinstance(t, PretendTensor) else own(name, t)

    monkeypatch.setattr(training_checkpoint, "_dense_tensor", dense)
    with native.switched(False):
        yield


def on_device(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return problem.net().to(pretend_device())


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_a_run_is_that_of_the_cpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ema": 0.9, "max_occurrences": {"clinical": 3}, "microbatches": 2}
    want = problem.trainer(tmp_path / "here" / "a", **options).fit()
    found = problem.trainer(tmp_path / "there" / "a", model=on_device(), **options).fit()
    assert found.epsilon == want.epsilon and found.steps == want.steps and found.notes == want.notes == ()
    assert close(weights(tmp_path / "there" / "a"), weights(tmp_path / "here" / "a"))


def test_a_run_goes_on_elsewhere(tmp_path: Path) -> None:
    """Its checkpoint is restored to whatever device the model is on."""
    options: dict[str, Any] = {"bounds": LOOSE, "steps": 12, "ema": 0.9}
    killed(tmp_path / "a", 7, **options)
    killed(tmp_path / "a", 11, model=on_device(5), **options)
    assert problem.trainer(tmp_path / "a", seed=6, **options).fit().steps == 12


def test_an_open_segment_is_never_replayed(tmp_path: Path) -> None:
    """Sums of an accelerator need not be the same again, and the same noise on other sums would give them away."""
    killed(tmp_path / "a", 7, model=on_device(), bounds=LOOSE)
    trainer = problem.trainer(tmp_path / "a", model=on_device(), bounds=LOOSE)
    again = trainer.fit()
    assert told(again, "sums are not the same again") and again.total["clinical"] > trainer.plan.epsilon("clinical")


def test_noise_is_hardened_and_certified_so(tmp_path: Path) -> None:
    found = problem.trainer(tmp_path / "a", model=on_device()).fit()
    assert conditions(found.folder)["hardened"] is True and found.notes == ()


def test_plain_noise_of_a_device_without_float64_is_announced_and_certified(tmp_path: Path) -> None:
    with without_float64():
        with pytest.warns(PlainNoise):
            trainer = problem.trainer(tmp_path / "a", model=on_device())
        found = trainer.fit()
    assert told(found, "the noise is plain") and conditions(found.folder)["hardened"] is False


def conditions(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())["conditions"]
    return found


def test_targets_that_the_loss_cannot_take_are_found_on_the_cpu(tmp_path: Path) -> None:
    """On a real device they would end the process."""
    data = problem.data()
    data["y"] = data["y"].copy()
    data["y"][data["unit"] == 200] = 9
    with pytest.raises(lamina.LaminaError) as refused:
        problem.trainer(tmp_path / "a", model=on_device(), corpus=problem.corpus(y=data["y"]))
    assert refused.value.code == "train.labels-out-of-range"


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """With `make_private`, a probe, dropout and `batch.to`."""
    device, found = pretend_device(), {}
    for where in ("cpu", device):
        torch.manual_seed(0)
        model = problem.net().to(where)
        data = problem.data()
        engine, corpus, plan = lamina.make_private(
            model, (data["x"], data["y"]), unit=data["unit"], noise_multiplier=1.0, clip_norm=1.0, batch=32, steps=3
        )
        engine.noise = lamina.SeededNoise(3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with engine:
            for batch in (b.to(where) for b in corpus.batches(plan, seed=5)):
                torch.manual_seed(1)
                engine.backward(problem.loss(model(batch.x), batch.y) if len(batch) else None, batch)
                optimizer.step()
                optimizer.zero_grad()
            assert engine.probed and engine.budget.taken == 3
        found[str(where)] = {name: p.detach().cpu() for name, p in model.named_parameters()}
    assert close(*found.values())
