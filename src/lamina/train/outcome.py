"""`Outcome`: what a run may say about itself, in public."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What `fit` returns.

    epsilon   by class: what this run was charged, redone segments included
    total     by class: what all runs in the ledger were charged
    unit      by class: what ε protects
    delta     by class: the δ at which ε is stated
    private   False if anything about the run voids its guarantee
    metrics   the last evaluation on public or simulated data
    notes     everything out of the ordinary that happened, in words
    """

    run: str
    folder: Path
    steps: int
    planned: int
    epsilon: dict[str, float]
    total: dict[str, float]
    unit: dict[str, str]
    delta: dict[str, float]
    private: bool
    metrics: dict[str, float]
    notes: tuple[str, ...]
    certificate: None = None

    def __str__(self) -> str:
        """For people: ε is rounded up."""
        lines = [f"run {self.run[:8]}: {self.steps} of {self.planned} steps, in {self.folder}"]
        for name, epsilon in self.epsilon.items():
            if not self.delta[name]:
                lines.append(f"  class {name}: public")
                continue
            whose = f"per {self.unit[name]} at δ = {self.delta[name]:g}"
            lines.append(
                f"  class {name}: ε {_up(epsilon)} {whose}; {_up(self.total[name])} over all runs in the ledger"
            )
        if self.metrics:
            lines.append("  " + ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items()))
        if not self.private:
            lines.append("  NOT PRIVATE: the noise came from a seed that somebody chose")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _up(value: float) -> str:
    return f"{math.ceil(value * 10_000) / 10_000:.4f}"
