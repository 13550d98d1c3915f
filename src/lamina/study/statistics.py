"""Figures of merit and their uncertainty: AUC, membership inference, intervals, Wilcoxon and z-tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata, t, wilcoxon

Array = NDArray[np.float64]


def auc(score: Array, positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties count half (Mann and Whitney)."""
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return math.nan
    above = rankdata(score)[positive].sum() - ones * (ones + 1) / 2
    return float(above / (ones * zeros))


def macro_auc(scores: Array, labels: NDArray[np.int64]) -> float:
    """Mean over classes of one against the rest; classes that do not occur, or alone occur, are left out."""
    found = [auc(scores[:, k], labels == k) for k in range(scores.shape[1])]
    known = [value for value in found if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


class MembershipTest(NamedTuple):
    """The attack that calls whoever has a low loss a member: its AUC (0.5 is guessing), and p of a z-test against 0.5."""

    auc: float
    p: float


def membership_inference(members: Array, others: Array) -> MembershipTest:
    """Of one loss for each patient in training and of as many patients who were not."""
    scores = -np.concatenate([members, others])
    inside = np.arange(len(scores)) < len(members)
    value = auc(scores, inside)
    spread = math.sqrt((len(scores) + 1) / (12 * len(members) * len(others)))  # of the AUC if nothing differs
    return MembershipTest(value, float(2 * norm.sf(abs(value - 0.5) / spread)))


class Interval(NamedTuple):
    """A mean over seeds, and the 95 % limits of Student's t."""

    mean: float
    low: float
    high: float
    std: float

    def __str__(self) -> str:
        """One number where the limits show no other, or there are none."""
        mean, low, high = (f"{value:.4g}" for value in (self.mean, self.low, self.high))
        return mean if math.isnan(self.low) or low == mean == high else f"{mean} ({low}–{high})"


def interval(values: Sequence[float]) -> Interval | None:
    """None without values; with one there are no limits."""
    if not values:
        return None
    mean, n = float(np.mean(values)), len(values)
    if n == 1:
        return Interval(mean, math.nan, math.nan, math.nan)
    std = float(np.std(values, ddof=1))
    half = float(t.ppf(0.975, n - 1)) * std / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, std)


def least_wilcoxon_p(pairs: int) -> float:
    """The smallest two-sided p that so many pairs can reach: 0.0625 for five."""
    return float(2.0 ** (1 - pairs))


def wilcoxon_p(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Two-sided signed-rank test of pairs, exact; None with fewer than two pairs or no difference."""
    if len(ours) != len(theirs) or len(ours) < 2 or all(a == b for a, b in zip(ours, theirs, strict=True)):
        return None
    return float(wilcoxon(ours, theirs, method="exact" if len(ours) <= 25 else "auto").pvalue)
