"""The demo's simulated patients: how many, who they are, and how well a model does on those whom no training saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lamina.release.utility import Figure
from lamina.signals.ecg_simulator import CLASSES, ECGSimulator


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSizes:
    """Patients of each group, expected patients per step of each class, and the steps of the two stages.

    Every `strict_every`-th sensitive patient signs a stricter bound than the class asks for.
    """

    volunteers: int = 60
    sensitive: int = 500
    test: int = 240
    start: int = 150
    steps: int = 70
    volunteer_batch: int = 50
    sensitive_batch: int = 200
    strict_every: int = 10

    @property
    def batch(self) -> dict[str, int]:
        return {"volunteer": self.volunteer_batch, "sensitive": self.sensitive_batch}


FULL_SIZES = DemoSizes()
QUICK_SIZES = DemoSizes(
    volunteers=12, sensitive=24, test=16, start=4, steps=5, volunteer_batch=8, sensitive_batch=12, strict_every=6
)  # for tests: nothing can be learned from it


INPUT_SCALE = 2.0  # 1 / (0.5 mV): a public constant, never a statistic of the patients
SEEDS = {"volunteer": 110, "sensitive": 102, "test": 103, "proxy": 104}
VOLUNTEER_MIX = {"NORM": 9.0, "MI": 1.0, "STTC": 1.0, "CD": 1.0, "HYP": 1.0}  # who volunteers is mostly well
SEVERITY = (0.5, 1.0)  # clear cases: what a few hundred patients can teach


@dataclass(frozen=True, slots=True, kw_only=True)
class PatientGroup:
    """`x` (patients, windows, leads, samples) in units of half a millivolt, `label` (patients,)."""

    x: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, x=self.x.numpy(), label=self.label.numpy())

    @classmethod
    def load(cls, path: Path) -> PatientGroup:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(x=torch.from_numpy(arrays["x"]), label=torch.from_numpy(arrays["label"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPatients:
    """Three groups that share nobody."""

    volunteer: PatientGroup
    sensitive: PatientGroup
    test: PatientGroup

    @classmethod
    def simulated(cls, sizes: DemoSizes, tick: Callable[[int], None]) -> DemoPatients:
        """The same for the same sizes, whoever runs it. `tick` hears how many patients are done."""
        done = 0

        def group(name: str, patients: int, simulator: ECGSimulator) -> PatientGroup:
            nonlocal done
            before = done
            drawn = simulator.draw(patients=patients, seed=SEEDS[name], tick=lambda n: tick(before + n))
            done += patients
            x = INPUT_SCALE * torch.from_numpy(drawn.x).unflatten(0, (patients, simulator.windows))
            return PatientGroup(x=x, label=torch.from_numpy(drawn.label[:: simulator.windows].copy()))

        return cls(
            volunteer=group("volunteer", sizes.volunteers, ECGSimulator(mix=VOLUNTEER_MIX, severity=SEVERITY)),
            sensitive=group("sensitive", sizes.sensitive, ECGSimulator(severity=SEVERITY)),
            test=group("test", sizes.test, ECGSimulator(severity=SEVERITY)),
        )

    def contributing_groups(self) -> dict[str, PatientGroup]:
        """Those who contribute, by class."""
        return {"volunteer": self.volunteer, "sensitive": self.sensitive}


def prevalence_text(group: PatientGroup) -> str:
    """In words: how many of a public group have what."""
    counts = torch.bincount(group.label, minlength=len(CLASSES)).tolist()
    return ", ".join(f"{count} {name}" for name, count in zip(CLASSES, counts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utility:
    """`auc` is the mean over classes of `by_class`, each class against the rest, one score per patient.

    `error` is the fraction of the signal's variance that the reconstruction leaves; the mean beat leaves 1. `accuracy` is
    the share of patients whose class has the highest score, overall and by class.
    """

    auc: float
    by_class: dict[str, float]
    error: float
    accuracy: float = 0.0

    def figures(self) -> dict[str, float]:
        return {"auc": self.auc, "error": self.error, "accuracy": self.accuracy}


@torch.no_grad()
def measure_utility(model: nn.Module, test: PatientGroup) -> Utility:
    """A patient's score for a class is the mean over windows of its log probability. Leaves the model's mode alone."""
    training = model.training
    model.eval()
    residual, logits = model(test.x.flatten(0, 1))
    model.train(training)
    score = logits.log_softmax(1).unflatten(0, test.x.shape[:2]).mean(1).numpy()
    label = test.label.numpy()
    present = [k for k in range(len(CLASSES)) if 0 < (label == k).sum() < len(label)]
    by_class: dict[str, float] = {CLASSES[k]: Figure.of(score[:, k], label == k) for k in present}
    accuracy = Figure.of(score.argmax(1) == label, groups=[CLASSES[k] for k in label])
    total = (test.x - test.x.mean((0, 1))).square().mean()
    return Utility(
        auc=float(np.mean([*by_class.values()])), by_class=by_class, error=float(residual.square().mean() / total),
        accuracy=accuracy,
    )  # fmt: skip
