"""How large the demo is: patients, steps, batches. Everything here is public and was chosen on simulated patients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
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


FULL = Sizes()
QUICK = Sizes(
    volunteers=12,
    sensitive=24,
    test=16,
    start=4,
    steps=5,
    volunteer_batch=8,
    sensitive_batch=12,
    strict_every=6,
)  # for tests: nothing can be learned from it
