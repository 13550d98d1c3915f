"""The demo's patients: volunteers who gave their data to the public, sensitive patients, and strangers to test on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lamina.cli.demo.sizes import Sizes
from lamina.data import CLASSES, ECGSimulator

SCALE = 2.0  # 1 / (0.5 mV): a public constant, never a statistic of the patients
SEEDS = {"volunteer": 101, "sensitive": 102, "test": 103}
HEALTHY = {
    "normal": 7.0,
    "infarction": 1.0,
    "hypertrophy": 1.0,
    "block": 1.0,
}  # who volunteers is mostly well


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`x` (patients, windows, leads, samples) in units of half a millivolt, `label` (patients,)."""

    x: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def take(self, patients: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """One window of each of these patients, and its label."""
        return self.x[patients, windows], self.label[patients]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patients:
    """Three groups that share nobody."""

    volunteer: Group
    sensitive: Group
    test: Group

    @classmethod
    def simulated(cls, sizes: Sizes, tick: Callable[[int], None]) -> Patients:
        """The same for the same sizes, whoever runs it. `tick` hears how many patients are done."""
        done = 0

        def group(name: str, patients: int, simulator: ECGSimulator) -> Group:
            nonlocal done
            before = done
            drawn = simulator.draw(patients=patients, seed=SEEDS[name], tick=lambda n: tick(before + n))
            done += patients
            x = SCALE * torch.from_numpy(drawn.x).unflatten(0, (patients, simulator.windows))
            return Group(x=x, label=torch.from_numpy(drawn.label[:: simulator.windows].copy()))

        return cls(
            volunteer=group("volunteer", sizes.volunteers, ECGSimulator(mix=HEALTHY)),
            sensitive=group("sensitive", sizes.sensitive, ECGSimulator()),
            test=group("test", sizes.test, ECGSimulator()),
        )

    def contributing(self) -> dict[str, Group]:
        """Those who contribute, by class."""
        return {"volunteer": self.volunteer, "sensitive": self.sensitive}


def save(group: Group, path: Path) -> None:
    """A group as an npz file that `load` reads."""
    np.savez_compressed(path, x=group.x.numpy(), label=group.label.numpy())


def load(path: Path) -> Group:
    with np.load(path, allow_pickle=False) as arrays:
        return Group(x=torch.from_numpy(arrays["x"]), label=torch.from_numpy(arrays["label"]))


def prevalence(group: Group) -> str:
    """In words: how many of a public group have what."""
    counts = torch.bincount(group.label, minlength=len(CLASSES)).tolist()
    return ", ".join(f"{count} {name}" for name, count in zip(CLASSES, counts, strict=True))
