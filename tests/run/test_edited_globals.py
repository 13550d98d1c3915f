"""If values that loss or model read are edited between a kill and the next start, no segment is replayed with its seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from stopping import LOOSE, During, Killed, die, figures, killed, same, told, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.run import trainer as trainer_module


class Box:
    def __init__(self, rate: float) -> None:
        self.rate = rate


WEIGHTS: dict[str, Any] = {"smooth": {"by": 0.0}}
BOX = Box(1.0)
HANDLE: dict[str, Any] = {"lock": threading.Lock()}
CALLS = {"forward": 0}


def by_dict(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none", label_smoothing=WEIGHTS["smooth"]["by"])


def by_object(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none") * BOX.rate


def with_lock(output: Tensor, y: Tensor) -> Tensor:
    with HANDLE["lock"]:
        return F.cross_entropy(output, y, reduction="none")


def counting(output: Tensor, y: Tensor) -> Tensor:
    CALLS["forward"] += 1
    return F.cross_entropy(output, y, reduction="none")


class Scaled(nn.Module):
    """A layer without weights of its own, whose forward reads the object."""

    def forward(self, x: Tensor) -> Tensor:
        return x * BOX.rate


def scaled_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), Scaled(), nn.Tanh(), nn.Linear(12, 3))


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The seed of every segment that is trained."""
    found: list[bytes] = []
    real = trainer_module.Sampler

    def noted(*args: Any, seed: bytes, **options: Any) -> Any:
        found.append(seed)
        return real(*args, seed=seed, **options)

    monkeypatch.setattr(trainer_module, "Sampler", noted)
    return found


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[pytest.MonkeyPatch], None]]] = {
    "dict": (lambda: {"loss_fn": by_dict}, lambda patch: patch.setitem(WEIGHTS, "smooth", {"by": 0.2})),
    "inner dict": (lambda: {"loss_fn": by_dict}, lambda patch: patch.setitem(WEIGHTS["smooth"], "by", 0.2)),
    "object": (lambda: {"loss_fn": by_object}, lambda patch: patch.setattr(BOX, "rate", 2.0)),
    "model": (lambda: {"model": scaled_net()}, lambda patch: patch.setattr(BOX, "rate", 2.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_edit_is_charged_anew(
    case: str, tmp_path: Path, seeds: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, edit = CASES[case]
    killed(tmp_path / "a", 8, bounds=LOOSE, **options())
    edit(monkeypatch)
    used = list(seeds)
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE, **options()).fit()
    assert told(outcome, "charged again, because optimiser, scheduler, loss, model or options changed")
    assert figures(tmp_path / "a")["classes"]["clinical"]["steps_charged"] == 24 + 5
    assert not set(used) & set(seeds[len(used) :])


@pytest.mark.parametrize("case", CASES)
def test_without_an_edit_the_segment_is_replayed_exactly(case: str, tmp_path: Path, seeds: list[bytes]) -> None:
    options, _ = CASES[case]
    stopped = killed(tmp_path / "a", 8, bounds=LOOSE, **options())
    open_seed, at_step_8 = seeds[-1], weights(stopped)
    again = problem.trainer(tmp_path / "a", bounds=LOOSE, **options())
    replayed: dict[str, Tensor] = {}
    again.progress = During({8: lambda: replayed.update(weights(again))})
    outcome = again.fit()
    assert not told(outcome, "charged again") and seeds[2] == open_seed
    assert same(replayed, at_step_8)
    assert figures(tmp_path / "a")["classes"]["clinical"]["steps_charged"] == 24


def test_what_cannot_be_compared_is_named_before_training_and_charged_again(tmp_path: Path, seeds: list[bytes]) -> None:
    class Heard(During):
        notes: list[str] = []  # noqa: RUF012

        def note(self, text: str) -> None:
            assert not seeds  # before the first segment
            self.notes.append(text)

    heard = Heard({8: die})
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", bounds=LOOSE, loss_fn=with_lock, progress=heard).fit()
    (note,) = [text for text in heard.notes if "cannot be compared" in text]
    assert "loss: HANDLE['lock'] (lock)" in note and "charged again instead of replayed" in note
    used = list(seeds)
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE, loss_fn=with_lock).fit()
    assert told(outcome, "charged again, because") and told(outcome, "HANDLE['lock']")
    assert not told(outcome, "options differ")  # nothing is known to
    assert figures(tmp_path / "a")["classes"]["clinical"]["steps_charged"] == 24 + 5
    assert not set(used) & set(seeds[len(used) :])


def test_what_the_steps_themselves_change_is_charged_again(tmp_path: Path, seeds: list[bytes]) -> None:
    """A counter in the loss has another value in the next process, from the second segment on."""
    CALLS["forward"] = 0
    killed(tmp_path / "a", 8, bounds=LOOSE, loss_fn=counting)
    CALLS["forward"] = 0
    outcome = problem.trainer(tmp_path / "a", bounds=LOOSE, loss_fn=counting).fit()
    assert told(outcome, "charged again, because")
    assert len(set(seeds)) == len(seeds)


SETTINGS_FILE = 'RATES = {"a": {"rate": 1.0}}\n'
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
sys.path[:0] = [SUPPORT, "."]
import problem, own_settings
from torch.nn import functional as F
from stopping import LOOSE, During, figures

def loss(output, y):
    return F.cross_entropy(output, y, reduction="none") * own_settings.RATES["a"]["rate"]

kill = During({8: lambda: os.kill(os.getpid(), signal.SIGKILL)}) if sys.argv[1] == "kill" else False
outcome = problem.trainer(Path("run"), bounds=LOOSE, loss_fn=loss, progress=kill).fit()
print(json.dumps([outcome.notes, figures(Path("run"))["classes"]["clinical"]["steps_charged"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("edited", [False, True])
def test_a_file_that_is_edited_between_two_processes(tmp_path: Path, edited: bool) -> None:
    (tmp_path / "own_settings.py").write_text(SETTINGS_FILE)
    (tmp_path / "train.py").write_text(SCRIPT.replace("SUPPORT", repr(str(Path(problem.__file__).parent))))

    def run(how: str) -> subprocess.CompletedProcess[str]:
        hashing = {**os.environ, "PYTHONHASHSEED": "1" if how == "kill" else "2"}
        return subprocess.run(
            [sys.executable, "train.py", how], cwd=tmp_path, env=hashing, capture_output=True, text=True
        )

    assert run("kill").returncode == -signal.SIGKILL
    if edited:
        (tmp_path / "own_settings.py").write_text(SETTINGS_FILE.replace("1.0", "1.5"))
    again = run("go on")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip().endswith("29]" if edited else "24]")
    assert ("charged again" in again.stdout) is edited
