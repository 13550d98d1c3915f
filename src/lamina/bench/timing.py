"""Interleaved timing and paired ratios with bootstrap limits.

The machine's speed drifts by more than the differences to be measured. So every round runs every variant once, in an
order drawn anew, and a ratio is taken within the round; only ratios are averaged, never times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of paired ratios with a two-sided 95 % bootstrap interval [low, high]."""

    median: float
    low: float
    high: float
    rounds: int

    def as_json(self) -> dict[str, float | int]:
        return {
            "median": round(self.median, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "rounds": self.rounds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds per step, one entry per round, per variant; entry r of every variant belongs to round r."""

    seconds: Mapping[str, NDArray[np.float64]]

    def ratio(self, variant: str, baseline: str) -> Ratio:
        return paired_ratio(self.seconds[variant], self.seconds[baseline])

    def median(self, variant: str) -> float:
        return float(np.median(self.seconds[variant]))


def paired_ratio(
    above: NDArray[np.float64], below: NDArray[np.float64], *, draws: int = 4_000, seed: int = 0
) -> Ratio:
    """Median of above/below per round; limits by resampling rounds.

    >>> import numpy as np
    >>> paired_ratio(np.full(20, 3.0), np.full(20, 2.0))
    Ratio(median=1.5, low=1.5, high=1.5, rounds=20)
    """
    ratios = above / below
    generator = np.random.default_rng(seed)
    index = generator.integers(0, len(ratios), size=(draws, len(ratios)))
    medians = np.median(ratios[index], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high), rounds=len(ratios))


def interleave(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    budget: float,
    minimum: int = 5,
    slice_seconds: float = 0.05,
    tick: Callable[[int], None] | None = None,
) -> Times:
    """`rounds` rounds of every step, or as many as `budget` seconds allow, at least `minimum`.

    A step shorter than `slice_seconds` is repeated within its turn, each variant by a count of its own, so that the
    clock and the first touch of cold caches do not decide.
    """
    repeats = {name: _repeats(step, slice_seconds) for name, step in steps.items()}
    generator = np.random.default_rng(0)
    names = sorted(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(rounds):
            if done >= minimum and time.perf_counter() - started > budget:
                break
            for name in generator.permutation(names):
                step, count = steps[name], repeats[name]
                begin = time.perf_counter()
                for _ in range(count):
                    step()
                seconds[name].append((time.perf_counter() - begin) / count)
            gc.collect()
            if tick is not None:
                tick(done + 1)
    finally:
        if collecting:
            gc.enable()
    return Times(seconds={name: np.asarray(values) for name, values in seconds.items()})


def _repeats(step: Step, slice_seconds: float) -> int:
    """How often to repeat a step so that a turn lasts about `slice_seconds`; doubles as the second warm-up."""
    step()
    begin = time.perf_counter()
    step()
    return max(1, min(50, int(slice_seconds / max(time.perf_counter() - begin, 1e-6))))
