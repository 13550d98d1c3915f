"""The demo's ledger, as an auditor finds it: verified from its first record, without data and without a model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from lamina.admit.admission import Admission
from lamina.errors import LaminaError
from lamina.ledger.check import Verification, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`found` took `seconds`. `contribution` is the digest of the descriptor of one sensitive patient."""

    ledger: Path
    found: Verification
    seconds: float
    contribution: str

    @classmethod
    def gather(cls, ledger: Path, admission: Admission) -> Evidence:
        """Verify the ledger, signatures and spends included."""
        started = time.perf_counter()
        found = verify(ledger)
        if found.problem is not None:
            raise LaminaError(
                "cli.demo-ledger-not", f"the demo's ledger is not verified: {found.problem}", "report this"
            )
        seconds = time.perf_counter() - started
        traced = next(each for each in admission if each.bound.noise_multiplier)
        return cls(ledger=ledger, found=found, seconds=seconds, contribution=traced.descriptor.hex())

    def words(self) -> str:
        found = self.found
        return (
            f"verified in {self.seconds:.1f} seconds: {found.size} records, {found.checkpoints} signed checkpoints, "
            f"{found.attestations} signatures of contributions, {found.spends} figures of ε computed anew"
        )

    def commands(self) -> list[str]:
        """What to type, to see it oneself."""
        place = quote(str(self.ledger))
        return [
            f"lamina ledger verify {place}",
            f"lamina ledger show {place} --kind epoch",
            f"lamina ledger trace {place} {self.contribution}",
        ]

    def machine(self) -> dict[str, Any]:
        return {
            **self.found.to_dict(),
            "seconds": round(self.seconds, 2),
            "contribution": self.contribution,
        }
