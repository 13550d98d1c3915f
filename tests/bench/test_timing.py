"""Paired ratios: right under drift, honest about their limits, never averaged over times."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lamina.bench.step_cost import interleave, paired_ratio


def test_drift_of_the_machine_cancels() -> None:
    """Times that grow tenfold over the run leave the ratio where it is."""
    drift = np.geomspace(1, 10, 25)
    ratio = paired_ratio(1.3 * drift, drift)
    assert ratio.median == pytest.approx(1.3)
    assert ratio.low == pytest.approx(1.3)
    assert ratio.high == pytest.approx(1.3)


def test_limits_cover_the_truth_about_as_often_as_they_claim() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for seed in range(200):
        above = 1.2 * np.exp(0.1 * generator.standard_normal(25))
        ratio = paired_ratio(above, np.ones(25), draws=400, seed=seed)
        assert ratio.low <= ratio.median <= ratio.high
        covered += ratio.low <= 1.2 <= ratio.high
    assert covered / 200 > 0.88


def test_every_variant_runs_in_every_round() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: (calls.append(name), time.sleep(0.001))[0]) for name in ("a", "b", "c")}
    times = interleave(steps, rounds=6, budget=60, minimum=1, slice_seconds=0.0)
    assert {name: len(values) for name, values in times.items()} == {"a": 6, "b": 6, "c": 6}
    rounds = [calls[i : i + 3] for i in range(len(calls) - 18, len(calls), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1  # the order is drawn anew


def test_the_budget_ends_the_run_but_not_before_the_minimum() -> None:
    times = interleave({"a": lambda: time.sleep(0.02)}, rounds=50, budget=0.0, minimum=3)
    assert len(times["a"]) == 3


def test_a_slower_step_is_seen_as_slower() -> None:
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    steps = {"fast": lambda: takes(0.002), "slow": lambda: takes(0.008)}
    times = interleave(steps, rounds=8, budget=60, clock=lambda: now[0])
    assert paired_ratio(times["slow"], times["fast"]).low == pytest.approx(4)
