"""Paired comparisons of results/study.csv: mean difference of the error over the seeds that two methods share, and t.

python benchmarks/paired.py            every method against flat clip, by data and ε, in the study's main settings
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t as student

RESULTS = Path(__file__).parent / "results" / "study.csv"
SETTING = {"ecg": ("residual", "12"), "waves": ("transformer", "8"), "cgm": ("stacked", "8")}
BASE = "flat"


def paired(mine: dict[str, float], other: dict[str, float]) -> tuple[float, float, float]:
    """Relative mean difference, t, and the t beyond which it is significant at 5 % (two-sided)."""
    seeds = sorted(mine.keys() & other.keys())
    differences = [mine[s] - other[s] for s in seeds]
    found = fmean(differences) / (stdev(differences) / math.sqrt(len(seeds)))
    return fmean(differences) / fmean(other[s] for s in seeds), found, float(student.ppf(0.975, len(seeds) - 1))


def main() -> None:
    errors: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(RESULTS.open(encoding="utf-8")):
        setting = (row["architecture"], row["depth"])
        if SETTING[row["data"]] == setting and row["mse"] and row["epsilon_asked"] and float(row["share"] or 1) == 1.0:
            errors[row["data"], row["epsilon_asked"], row["method"]].setdefault(row["seed"], float(row["mse"]))
    for (data, epsilon, method), mine in sorted(errors.items()):
        other = errors[data, epsilon, BASE] if method != BASE else {}
        if len(mine.keys() & other.keys()) >= 3:
            by, found, critical = paired(mine, other)
            mark = "*" if abs(found) > critical else " "
            print(
                f"{data:6} ε {epsilon:4} {method:16} {100 * by:+6.1f} %  t {found:+6.1f} {mark} (critical {critical:.2f})"
            )


if __name__ == "__main__":
    main()
