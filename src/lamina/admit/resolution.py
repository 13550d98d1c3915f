"""`Resolution`: what the resolver says about signed bounds under a plan, for engines, ledgers and people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.admit.bound import Bound
from lamina.plan.table import aligned

SHOWN = 40  # entries in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One distinct bound (c, z) of a class under a plan.

    scale             thresholds of the class are multiplied by this; 0: no scale keeps the bound, so it must stay out
    ceiling           c: whatever the thresholds are, its clipped gradient is no longer; infinite in a public class
    sigma_acc         the multiplier that a step needs for ε(z)
    sigma             the multiplier that a step has for it: plan.sigma(class, scale)
    occurrences       N: the cap (`capped`), or how often it takes part on average
    variance_floor    (sigma_acc·c)², or N·z²·c² if a cap makes that less: enough while the sampling is secret
    variance_ceiling  N·z²·c²: with a capped N enough even if all occurrences become known
    variance          (sigma·c)², what is applied: the noise of a step as this contribution meets it, in units in which
                      its gradient has norm c. Never below the floor. Above the ceiling where the class has more noise
                      than this bound asks for, or c is small beside the class's thresholds: S is the class's alone
    epsilon_signed    ε(z) at the δ of the class
    epsilon           what the whole plan spends on it
    problem           why there is no scale
    """

    bound: Bound
    scale: float
    ceiling: float
    sigma_acc: float
    sigma: float
    occurrences: float
    capped: bool
    variance_floor: float
    variance_ceiling: float
    variance: float
    epsilon_signed: float
    epsilon: float
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain figures; what is infinite is null."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "bound"}
        return {
            "class": self.bound.cls,
            "clip_norm": self.bound.clip_norm,
            "noise_multiplier": self.bound.noise_multiplier,
            **{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Where a class may reach: its profile in the policy, and the plan's layers that it comes to."""

    profile: str
    layers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """`entries` are the distinct bounds; `index[i]` is the entry that bound i is held to; `depth` is by class alone.

    `rounded` names the classes whose bounds were too many and were taken to a grid, and its ratio.
    """

    entries: tuple[Resolved, ...]
    index: NDArray[np.int32]
    depth: Mapping[str, Depth]
    rounded: Mapping[str, float]

    @cached_property
    def scale(self) -> NDArray[np.float64]:
        """For each bound that was asked about; 0 where it must stay out."""
        return self._column([entry.scale for entry in self.entries])

    @cached_property
    def ceiling(self) -> NDArray[np.float64]:
        """For each bound that was asked about, c in plain units."""
        return self._column([entry.ceiling for entry in self.entries])

    def _column(self, values: Sequence[float]) -> NDArray[np.float64]:
        return np.asarray(values, dtype=np.float64)[self.index] if values else np.empty(0)

    def __getitem__(self, bound: int) -> Resolved:
        """What bound number `bound` is held to."""
        return self.entries[int(self.index[bound])]

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "bounds": [entry.to_dict() for entry in self.entries],
            "depth": {
                name: {"profile": depth.profile, "layers": list(depth.layers)}
                for name, depth in self.depth.items()
            },
            "rounded": dict(self.rounded),
        }

    def table(self) -> str:
        """For people: one line per bound, then one per class with its depth."""
        rows = [["class", "c", "z", "scale", "floor", "variance", "ceiling", "ε signed", "ε spent"]]
        rows += [_line(entry) for entry in self.entries[:SHOWN]]
        lines = aligned(rows, left=1)
        if len(self.entries) > SHOWN:
            lines.append(f"… and {len(self.entries) - SHOWN} more")
        for name, ratio in self.rounded.items():
            lines.append(
                f"class {name} has more than {MOST} distinct bounds: they are taken to a grid of ratio {ratio:.4g}, "
                "c down and z up"
            )
        depths = [[name, depth.profile, f"{len(depth.layers)} layers"] for name, depth in self.depth.items()]
        return "\n".join([*lines, "", *aligned([["class", "reaches", ""], *depths], left=2)])

    def __str__(self) -> str:
        return self.table()


MOST = 256  # distinct bounds of a class: each has an accountant of its own


def _line(entry: Resolved) -> list[str]:
    bound = entry.bound
    if not bound.noise_multiplier:
        return [bound.cls, "public", "", "1", "", "", "", "", "0"]
    line = [bound.cls, f"{bound.c:.4g}", f"{bound.z:.4g}"]
    if entry.problem:
        return [*line, "stays out", "", "", "", f"{entry.epsilon_signed:.4g}", ""]
    ceiling = f"{entry.variance_ceiling:.4g}{'' if entry.capped else ' (expected)'}"
    figures = [f"{entry.scale:.4g}", f"{entry.variance_floor:.4g}", f"{entry.variance:.4g}", ceiling]
    return [*line, *figures, f"{entry.epsilon_signed:.4f}", f"{_up(entry.epsilon):.4f}"]


def _up(epsilon: float) -> float:
    """A printed guarantee is rounded up, as far as what was signed allows."""
    return math.ceil(epsilon * 1e4) / 1e4
