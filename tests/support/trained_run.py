"""A run that was trained, and its ledger, for tests of what leaves the house."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from hospital import usual
from torch import nn

import lamina
from lamina.ledger.corpus_terms import ledger_key_path
from lamina.ledger.reader import LedgerReader
from lamina.ledger.records import ContributionRecord
from lamina.ledger.writer import Ledger
from lamina.plan.policy import Policy
from lamina.sign.keys import PrivateKey

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


@dataclass(frozen=True)
class Trained:
    """Where a run and its ledger are."""

    folder: Path
    outcome: lamina.Outcome
    name: str = "example.org-ecg.ledger.db"

    @property
    def ledger(self) -> Path:
        return self.folder.parent / self.name

    def open(self) -> Ledger:
        """The ledger, to append to and sign."""
        return Ledger.open(self.ledger, PrivateKey.load(ledger_key_path(self.ledger), None))

    def someone(self, cls: str) -> int:
        """The leaf of a contribution of this class."""
        with LedgerReader.read_only(self.ledger) as ledger:
            for leaf in ledger.of_kind(ContributionRecord):
                if isinstance(leaf.record, ContributionRecord) and leaf.record.bound[0] == cls:
                    return leaf.seq
        raise AssertionError(cls)


@cache
def trained_run() -> Trained:
    """A small private run with three classes, trained once for all tests of a process."""
    folder = Path(tempfile.mkdtemp(prefix="lamina-trained-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
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


def copied_run(folder: Path) -> Trained:
    """A copy of it and its ledger, which a test may change."""
    once = trained_run()
    shutil.copytree(once.folder.parent, folder / "trained", symlinks=True)
    return Trained(folder / "trained" / "first", once.outcome)


def copied_hospital_run(folder: Path) -> Trained:
    """A run on the contributions that a hospital signed, and its ledger, trained once and copied for a test to change."""
    once = _hospital_run()
    shutil.copytree(once.folder.parent, folder / "runs", symlinks=True)
    return Trained(folder / "runs" / "first", once.outcome, name=once.name)


@cache
def _hospital_run() -> Trained:
    """The ledger records who was admitted."""
    folder = Path(tempfile.mkdtemp(prefix="lamina-hospital-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    hospital, ledger = usual(folder, real=True), folder / "runs" / "ward.ledger.db"
    trainer = hospital.trainer("first", corpus=hospital.admit(ledger=ledger), ledger=str(ledger))
    return Trained(folder / "runs" / "first", trainer.fit(), name=ledger.name)
