"""Figures of merit against brute force, and the limits of what few seeds can show."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lamina.study.cells import SEEDS
from lamina.study.statistics import auc, interval, least_wilcoxon_p, macro_auc, membership_inference, wilcoxon_p


def brute_force(score: np.ndarray, positive: np.ndarray) -> float:
    pairs = [(a > b) + 0.5 * (a == b) for a, b in itertools.product(score[positive], score[~positive])]
    return float(np.mean(pairs))


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(seed: int) -> None:
    generator = np.random.default_rng(seed)
    score = generator.integers(0, 6, 60).astype(float)  # with ties
    positive = generator.random(60) < 0.3
    assert auc(score, positive) == pytest.approx(brute_force(score, positive))


def test_classes_that_do_not_occur_are_left_out() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 40)
    scores = generator.random((40, 3))
    expected = np.mean([brute_force(scores[:, k], labels == k) for k in range(2)])
    assert macro_auc(scores, labels) == pytest.approx(expected)
    assert math.isnan(macro_auc(scores, np.zeros(40, dtype=np.int64)))


def test_the_attack_finds_members_and_its_p_is_uniform_where_nothing_differs() -> None:
    generator = np.random.default_rng(1)
    told = membership_inference(generator.normal(0, 1, 200), generator.normal(1, 1, 200))
    assert told.auc > 0.7 and told.p < 1e-6
    found = [membership_inference(generator.normal(size=100), generator.normal(size=100)).p for _ in range(400)]
    assert 0.02 < np.mean(np.array(found) < 0.05) < 0.09


def test_five_seeds_cannot_reach_the_documents_p() -> None:
    ours, theirs = [0.9 + 0.001 * i for i in range(5)], [0.5 + 0.002 * i for i in range(5)]
    assert len(SEEDS) == 5
    assert wilcoxon_p(ours, theirs) == pytest.approx(least_wilcoxon_p(5)) == pytest.approx(0.0625)
    assert wilcoxon_p(ours, ours) is None and wilcoxon_p([1.0], [2.0]) is None


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(1000):
        found = interval(generator.normal(3.0, 2.0, 5).tolist())
        assert found is not None
        hits += found.low <= 3.0 <= found.high
    assert 930 <= hits <= 970
    assert interval([]) is None


def test_what_does_not_vary_is_one_number() -> None:
    told = [str(interval(values)) for values in ([90.42] * 5, [0.99996841, 0.99996840], [0.5], [0.5, 0.6, 0.7])]
    assert told == ["90.42", "1", "0.5", "0.6 (0.3516–0.8484)"]
