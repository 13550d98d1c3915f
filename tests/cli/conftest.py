"""The program in an empty folder, beside a ledger, or in a user's project: policy, data, module, run file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from asking import Call, Result, answer, asker
from build import YEAR, Story, build
from making import START, Clock
from run_state import attempts

from lamina.cli.app import app as program
from lamina.ledger.writer import Ledger

COMMAND = [sys.executable, "-c", "import sys; from lamina.cli import main; main(sys.argv[1:])"]
BUILT = typer.main.get_command(program)  # once, not at every call

POLICY = """
[corpus]
origin = "test"
delta = 1e-5
[class.clinical]
population = 60
epsilon = 6.0
unit = "patient"
"""

MODULE = """
import torch
from torch import nn

PUBLIC = torch.linspace(-1, 1, 80).reshape(20, 4)

def build(width=4):
    print("the factory talks")
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

def evaluate(model):
    return {"mean": float(model(PUBLIC).mean())}
"""

RUN = """
policy = "policy.toml"
model = "{module}:build"
loss = "cross_entropy"
optimizer = {{ name = "adam", lr = 1e-2 }}
batch = 12
steps = 6
segment = 2
epsilon = 2.0

[data]
kind = "npz"
path = "data.npz"
y = "y"
unit = "patient"
"""


@dataclass
class Project:
    """`write` makes its files; `train` runs the command in this process and says how it ended."""

    folder: Path
    module: str
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    run: str = field(init=False)

    def __post_init__(self) -> None:
        self.run = RUN.format(module=self.module)
        self.write("policy.toml", POLICY)
        self.write(f"{self.module}.py", MODULE)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(100, 4)).astype("f4")
        y = (x[:, 0] > 0).astype("int64")
        patient = np.repeat(np.arange(50), 2)
        np.savez(self.folder / "data.npz", x=x, y=y, patient=patient)
        rows = [",".join(map(str, (*x[i].tolist(), y[i], f"p{patient[i]}"))) for i in range(100)]
        self.write("data.csv", "\n".join(["a,b,c,d,label,patient", *rows]) + "\n")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def call(self, *words: str) -> Result:
        """Exit code, standard output, standard error."""
        return asker(self.capsys)(*words)

    def plan(self, *words: str, model: str = "build") -> Result:
        """`lamina plan policy.toml …` in the folder."""
        self.monkeypatch.chdir(self.folder)
        return self.call("plan", "policy.toml", "--model", f"{self.module}:{model}", *words)

    def train(self, *words: str, run: str | None = None) -> Result:
        path = self.write("first.toml", self.run if run is None else run)
        return self.call("train", str(path), *words)

    def train_killed_in_a_segment(self, path: Path) -> dict[str, Any]:
        """`lamina train` in another process, killed once a segment is open; returns options to start it again."""
        options: dict[str, Any] = {"cwd": self.folder, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*COMMAND, "train", str(path)], **options, **quiet)
        try:
            for _ in range(6000):
                with suppress(Exception):  # the other process may be writing it at this moment
                    if attempts(self.folder / "runs" / path.stem):
                        break
                assert process.poll() is None, "the run ended before it could be killed"
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return options

    def train_again(self, path: Path, options: dict[str, Any]) -> dict[str, Any]:
        """The same command again, in a process of its own, to its end."""
        done = subprocess.run(
            [*COMMAND, "train", str(path), "--json"], **options, capture_output=True, text=True, check=False
        )
        return answer((done.returncode, done.stdout, done.stderr))

    def train_json(self, *words: str, run: str | None = None) -> dict[str, Any]:
        return answer(self.train("--json", *words, run=run))


_count = iter(range(10_000))


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Its module has a name of its own, because a module is imported once per process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only make threads wait for each other
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what a power cut leaves is tested elsewhere
    made = Project(folder=tmp_path, module=f"user_module_{next(_count)}", capsys=capsys, monkeypatch=monkeypatch)
    yield made
    sys.modules.pop(made.module, None)
    torch.set_num_threads(threads)


@pytest.fixture
def again(project: Project) -> Callable[[str], None]:
    """Replace the user's module, as a new process would see it."""

    def replace(text: str) -> None:
        project.write(f"{project.module}.py", text)
        sys.modules.pop(project.module, None)

    return replace


@pytest.fixture
def lamina(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`lamina …` in an empty folder; a passphrase is never asked for, unless a test says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAMINA_PASSPHRASE", raising=False)
    monkeypatch.setattr("lamina.cli.terminal.can_prompt", lambda: False)
    monkeypatch.setattr("lamina.sign.keys.PBKDF2_ROUNDS", 70_000)  # three bytes, as the real number; faster
    monkeypatch.setattr(sys.modules["lamina.cli.app"], "app", BUILT)
    return asker(capsys)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Story]:
    """A ledger with every kind of record, to copy."""
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    story = build(str(path), prune=False)
    story.ledger.close()
    return path, story


@pytest.fixture
def ledger_call(lamina: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`lamina ledger …` at a time after all that is in the template."""
    monkeypatch.setattr(Ledger, "open", partial(Ledger.open, clock=Clock(START + 4 * YEAR)))
    return partial(lamina, "ledger")
