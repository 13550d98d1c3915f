"""What the demo found, for people and for machines. Public figures only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from lamina.admit.admission import Admission
from lamina.admit.resolution import Resolution
from lamina.cli.demo.evidence import Evidence
from lamina.cli.demo.patients import Group
from lamina.cli.demo.utility import Utility
from lamina.cli.output import columns, round_up
from lamina.plan import StepPlan
from lamina.train import Outcome

WORDS = {
    "without_sensitive": "without the sensitive patients",
    "private": "private",
    "without_privacy": "without privacy",
}
_LEDGER = ("audit:", "record:", "trace:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`utility` by training, as in WORDS; `model` is the private one, `test` the patients it was measured on.

    `evidence` is what an auditor finds in the ledger.
    """

    plan: StepPlan
    outcome: Outcome
    admission: Admission
    resolution: Resolution
    utility: dict[str, Utility]
    model: nn.Module
    test: Group
    evidence: Evidence
    seconds: float = 0.0

    def timed(self, seconds: float) -> Result:
        return replace(self, seconds=seconds)

    def cost_rows(self) -> list[list[str]]:
        """By class: what it reaches, and what it was charged."""
        rows = [["class", "reaches", "ε", "δ", "unit"]]
        for entry in self.plan.classes:
            spent = "public" if entry.public else round_up(self.outcome.epsilon[entry.name])
            delta = "–" if entry.public else f"{entry.delta:g}"
            rows.append([entry.name, entry.profile, spent, delta, entry.unit])
        return rows

    def refusal_rows(self) -> list[list[str]]:
        """Who was not let in, and why."""
        rows = [["contribution", "refused because", "reason"]]
        return rows + [[each.id, each.reason.meaning, str(each.reason)] for each in self.admission.refused]

    def bound_rows(self) -> list[list[str]]:
        """What was signed, by how many, and what it came to."""
        rows = [["class", "signed by", "clip norm", "noise multiplier", "ε signed", "ε spent", "scale"]]
        for which, count in enumerate(np.bincount(self.admission.bound).tolist()):
            found = self.resolution[which]
            if not found.bound.noise_multiplier:
                rows.append([found.bound.cls, str(count), "public", "–", "–", "–", "–"])
                continue
            rows.append(
                [
                    found.bound.cls,
                    str(count),
                    f"{found.bound.c:g}",
                    f"{found.bound.z:.4g}",
                    f"{found.epsilon_signed:.4f}",
                    round_up(found.epsilon),
                    f"{found.scale:.4g}",
                ]
            )
        return rows

    def utility_rows(self) -> list[list[str]]:
        """By training: how good it is on fresh simulated patients."""
        rows = [["trained", "AUC", *(next(iter(self.utility.values())).by_class), "reconstruction error"]]
        for name, words in WORDS.items():
            found = self.utility[name]
            rows.append(
                [words, *(f"{value:.3f}" for value in (found.auc, *found.by_class.values(), found.error))]
            )
        return rows

    def table(self, folder: Path, report: Path) -> str:
        noise = "from a secure stream" if self.outcome.private else "seeded: NOT PRIVATE"
        return "\n".join(
            [
                "",
                f"plan: {self.plan.steps} steps, expected batch {self.plan.batch:g}, {self.plan.allocation} "
                f"allocation, {self.plan.clipping.value} clipping, noise {noise}",
                "",
                f"admitted by signature: {len(self.admission)}; refused: {len(self.admission.refused)}",
                columns(self.refusal_rows(), left=3),
                "",
                columns(self.cost_rows(), left=2),
                "",
                columns(self.bound_rows()),
                "",
                f"on {len(self.test)} fresh simulated patients (AUC: mean of the classes, each against the rest; "
                "error: fraction of the variance):",
                columns(self.utility_rows()),
                "",
                *(f"note: {note}" for note in self.outcome.notes),
                f"ledger {self.evidence.words()}",
                "",
                f"{self.seconds:.0f} seconds. Where to look:",
                f"  report:  {report}",
                f"  model:   {folder / 'run' / 'model.safetensors'}",
                f"  spend:   lamina spend {self.evidence.ledger}",
                *(
                    f"  {name:<8} {line}"
                    for name, line in zip(_LEDGER, self.evidence.commands(), strict=True)
                ),
                f"  again:   cd {folder} && lamina train RUN.toml",
            ]
        )

    def machine(self, folder: Path, report: Path) -> dict[str, Any]:
        """Keys that machines read; null where the capability does not exist yet."""
        return {
            "folder": str(folder),
            "seconds": round(self.seconds, 2),
            "ledger": str(self.evidence.ledger),
            "verification": self.evidence.machine(),
            "certificate": None,
            "report": str(report),
            "release": None,
            "private": self.outcome.private,
            **{key: self.admission.to_dict()[key] for key in ("admitted", "refused")},
            "bounds": [self.resolution[row].to_dict() for row in range(len(self.admission.bounds))],
            "epsilon": self.outcome.epsilon,
            "delta": {entry.name: entry.delta for entry in self.plan.classes},
            "auc": {name: found.auc for name, found in self.utility.items()},
            "auc_by_class": {name: found.by_class for name, found in self.utility.items()},
            "error": {name: found.error for name, found in self.utility.items()},
            "notes": list(self.outcome.notes),
        }
