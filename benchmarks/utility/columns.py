"""One task's results as the table needs them: figures by policy and seed, and differences to `flat` paired by seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t as student

from .store import Store
from .tasks import Task
from .tuning import best

LEVEL = 0.05  # of the paired t-test, two-sided
Paired = tuple[float, float, int]
"""Mean difference, its standard error, number of seeds."""


@dataclass(frozen=True)
class Column:
    """One task's results: figures by policy and seed, in the unit of the table."""

    task: Task
    store: Store

    def figures(self, policy: str) -> dict[int, float]:
        """By seed, with what tuning chose, over the seeds that every policy has; a run that diverged is NaN."""
        held = self._held(policy)
        return {seed: figure for seed, figure in held.items() if seed in self.seeds}

    @property
    def seeds(self) -> set[int]:
        """The seeds that every policy of the column was run with."""
        return set.intersection(*(set(self._held(policy)) for policy in self.store.runs))

    def _held(self, policy: str) -> dict[int, float]:
        rows = self.store.runs.get(policy, [])
        if not rows or policy not in self.store.tuning:
            return {}
        clip, rate = best(self.task, self.store.tuning[policy])
        return {
            row["seed"]: self.task.scale * (math.nan if row["figure"] is None else row["figure"])
            for row in rows
            if (row["clip"], row["rate"]) == (clip, rate)
        }

    def cell(self, policy: str) -> str:
        found = list(self.figures(policy).values())
        if not found:
            return "–"
        spread = stdev(found) if len(found) > 1 else 0.0
        return f"{fmean(found):{self.form}} ± {spread:{self.form}}"

    @property
    def form(self) -> str:
        return ".2f" if self.task.scale > 1 else ".4f"

    def difference(self, policy: str) -> Paired | None:
        """Mean difference to flat over the seeds that both have, and its standard error."""
        return None if policy == "flat" else _paired(self.figures(policy), self.figures("flat"))

    def at_same_point(self, policy: str) -> Paired | None:
        """The same against flat at the policy's own C and rate, if flat was run there."""
        if policy not in self.store.tuning:
            return None
        point = best(self.task, self.store.tuning[policy])
        flat = {
            row["seed"]: self.task.scale * row["figure"]
            for row in [*self.store.runs.get("flat", []), *self.store.spread.get("flat", [])]
            if (row["clip"], row["rate"]) == point and row["figure"] is not None
        }
        return _paired(self.figures(policy), flat)

    def word(self, found: Paired | None) -> str:
        """better, worse, or nothing if a paired t-test does not find the difference significant."""
        if found is None or not abs(found[0]) > float(student.ppf(1 - LEVEL / 2, found[2] - 1)) * found[1]:
            return ""
        return "better" if (found[0] > 0) == self.task.higher else "worse"

    def verdict(self, policy: str) -> str:
        return self.word(self.difference(policy))

    def difference_cell(self, policy: str) -> str:
        return self._told(self.difference(policy))

    def same_point_cell(self, policy: str) -> str:
        return self._told(self.at_same_point(policy))

    def _told(self, found: Paired | None) -> str:
        if found is None:
            return "–"
        text = f"{found[0]:+{self.form}} ± {found[1]:{self.form}}"
        mark = self.word(found)
        return f"**{text}** {mark}" if mark else text

    def chosen(self, policy: str) -> str:
        """C and rate as tuned; an asterisk where one of them lies on the edge of its grid."""
        if policy not in self.store.tuning:
            return "–"
        clip, rate = best(self.task, self.store.tuning[policy])
        return f"{clip:g}{_edge(clip, self.task.clips)}, {rate:g}{_edge(rate, self.task.rates)}"

    def tuned(self, policy: str) -> list[float]:
        """Mean figures of the grid points on the stand-in, those that did not diverge."""
        held: dict[tuple[float, float], list[float]] = {}
        for row in self.store.tuning.get(policy, []):
            if row["figure"] is not None and row["clip"] in self.task.clips and row["rate"] in self.task.rates:
                held.setdefault((row["clip"], row["rate"]), []).append(self.task.scale * row["figure"])
        return [fmean(found) for found in held.values()]


def _paired(mine: dict[int, float], other: dict[int, float]) -> Paired | None:
    """Mean and standard error of the differences over the seeds that both have, and their number."""
    paired = [mine[seed] - other[seed] for seed in mine if seed in other]
    return (fmean(paired), stdev(paired) / math.sqrt(len(paired)), len(paired)) if len(paired) > 1 else None


def _edge(value: float, grid: tuple[float, ...]) -> str:
    return "\\*" if value in (grid[0], grid[-1]) else ""
