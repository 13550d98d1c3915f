"""The outcome of a benchmark as one JSON object. The keys are a contract: machines read them.

`time_ratio` is the *upper* 95 % bootstrap limit of Lamina's box step over the plain step, so noise cannot flatter it;
a peer's figure is its median. `memory_ratio` is the quotient of the peaks. Everything else is under `detail`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lamina.bench.peers import PEERS
from lamina.bench.timing import Ratio, Times
from lamina.bench.variants import BASELINE

ROUTED = ("resae", "tfae")  # the two deep workloads on which routing is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found on one workload; `reasons` says for each missing variant why it is missing."""

    name: str
    times: Times | None
    memory: Mapping[str, int]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def time(self, variant: str, baseline: str = BASELINE) -> Ratio | None:
        if self.times is None or not {variant, baseline} <= self.times.seconds.keys():
            return None
        return self.times.ratio(variant, baseline)

    def upper(self, variant: str, baseline: str = BASELINE) -> float | None:
        ratio = self.time(variant, baseline)
        return None if ratio is None else round(ratio.high, 4)

    def memory_ratio(self, variant: str) -> float | None:
        if variant not in self.memory or BASELINE not in self.memory:
            return None
        return round(self.memory[variant] / self.memory[BASELINE], 4)

    def peer(self, name: str) -> float | None:
        ratio = self.time(name)
        return None if ratio is None else round(ratio.median, 4)

    def as_json(self) -> dict[str, Any]:
        seconds = {} if self.times is None else self.times.seconds
        detail: dict[str, Any] = {
            name: {
                "milliseconds": round(1_000 * statistics.median(values.tolist()), 3),
                "time": None if (ratio := self.time(name)) is None else ratio.as_json(),
                "peak_bytes": self.memory.get(name),
                "memory_ratio": self.memory_ratio(name),
            }
            for name, values in sorted(seconds.items())
        }
        return {
            "time_ratio": self.upper("box"),
            "memory_ratio": self.memory_ratio("box"),
            "joint": {"time_ratio": self.upper("joint"), "memory_ratio": self.memory_ratio("joint")},
            "peers": {name: self.peer(name) for name in PEERS},
            "reasons": dict(self.reasons),
            "detail": detail,
        }


def assemble(measured: list[Measured], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result. A figure that could not be measured anywhere is null."""
    overhead = [m.upper("masked", "box") for m in measured]
    restricted = [m.upper("restricted", "box") for m in measured]
    worst_overhead = _worst(overhead)
    return {
        **_summary(measured, "box"),
        "joint": _summary(measured, "joint"),
        "workloads": {m.name: m.as_json() for m in measured},
        "routing": {
            "mask_overhead": None if worst_overhead is None else round(worst_overhead - 1, 4),
            "restricted_ratio": _worst(restricted),
            "detail": {
                m.name: {
                    "mask": None if (mask := m.time("masked", "box")) is None else mask.as_json(),
                    "restricted": None if (top := m.time("restricted", "box")) is None else top.as_json(),
                }
                for m in measured
                if m.name in ROUTED
            },
        },
        "about": dict(about),
    }


def _summary(measured: list[Measured], variant: str) -> dict[str, float | None]:
    times = [t for m in measured if (t := m.upper(variant)) is not None]
    memory = [m.memory_ratio(variant) for m in measured]
    return {
        "median_time_ratio": round(statistics.median(times), 4) if times else None,
        "worst_time_ratio": _worst(list(times)),
        "worst_memory_ratio": _worst(memory),
    }


def _worst(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
