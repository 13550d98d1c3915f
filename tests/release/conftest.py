"""A small private run with two classes, trained once, and a release of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from trained_run import Trained

import lamina
from lamina.admit.keys import PrivateKey
from lamina.plan.policy import Policy
from lamina.release.manifest import GatePolicy, make_release

POLICY = """
[corpus]
origin = "example.org/ecg"
accountant = "pld"
delta = 1e-5
[class.clinical]
population = 120
purposes = ["care", "research"]
[class.sensitive]
population = 80
profile = {top = 0.34}
purposes = ["care"]
[class.open]
population = 10
public = true
purposes = ["care", "research", "teaching"]
"""


@pytest.fixture(scope="session")
def key() -> PrivateKey:
    """The release key."""
    return PrivateKey.generate()


@pytest.fixture(scope="session")
def _trained_once(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("release")
    (folder / "policy.toml").write_text(POLICY)
    policy = Policy.load(folder / "policy.toml")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(210, 4)
    classes = ["clinical"] * 120 + ["sensitive"] * 80 + ["open"] * 10
    corpus = lamina.Corpus(x, (x.sum(1) > 0).long(), policy=policy, cls=classes)
    plan = lamina.make_plan(
        lamina.LayerStack.from_model(model), policy, batch=40, steps=20, epsilon={"clinical": 2.0, "sensitive": 1.0}
    )
    trainer = lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(reduction="none"), corpus, plan,
        folder=folder / "runs" / "first", progress=False,
    )  # fmt: skip
    return Trained(folder / "runs" / "first", trainer.fit())


@pytest.fixture
def trained(_trained_once: Trained, tmp_path: Path) -> Trained:
    """A copy of the run and its ledger, which a test may change."""
    shutil.copytree(_trained_once.folder.parent, tmp_path / "trained", symlinks=True)
    return Trained(tmp_path / "trained" / "first", _trained_once.outcome)


@pytest.fixture
def release(trained: Trained, key: PrivateKey, tmp_path: Path) -> Path:
    """A release of it."""
    out = tmp_path / "release"
    with trained.open() as ledger:
        make_release(
            out, [trained.folder], ledger, key, gate=GatePolicy(generation_classes={"head": {"layers": ["4"]}})
        )
    return out
