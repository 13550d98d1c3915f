"""`Check`: one claim, what was found against it, and the verdict. The shape of `lamina audit --json`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any


class Verdict(enum.Enum):
    """`passed`: nothing was found against the claim. `failed`: the claim is refuted."""

    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim and the evidence.

    lower_bound  the least that is true, by what was measured
    claimed      what the plan says
    unit         of both: "epsilon", or "noise std" (how far something moved that must not move at all),
                 or "relative"
    """

    name: str
    lower_bound: float
    claimed: float
    verdict: Verdict
    unit: str = "epsilon"
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASSED

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values: an infinite figure is the string "inf"."""
        return {
            "name": self.name,
            "lower_bound": _plain(self.lower_bound),
            "claimed": _plain(self.claimed),
            "verdict": self.verdict.value,
            "unit": self.unit,
            "detail": self.detail,
        }


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
