"""The energy of noised sums: right on average, right in its spread, and a simplex whatever arrives."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import raises_code

from lamina.allocate.measure.energy import EnergyEstimate

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


def releases(rng: np.random.Generator, signal: np.ndarray, noise: float, times: int) -> np.ndarray:
    """‖G + S·Z‖² for `times` independent Z."""
    return np.square(signal + noise * rng.standard_normal((times, len(signal)))).sum(axis=1)


def test_mean_and_spread_against_monte_carlo_while_s_changes() -> None:
    rng, d, a = np.random.default_rng(1), 400, 0.8
    noises = [3.0, 1.0, 0.5, 2.0, 1.0, 1.5]
    signal = np.full(d, 0.1)
    runs = 4000  # independent runs, as so many layers
    found = {}
    for kind, mean in (("none", 0 * signal), ("some", signal)):
        estimate = EnergyEstimate.start(runs, decay=a)
        for s in noises:
            estimate = estimate.observed(releases(rng, mean, s, runs), noise=[s] * runs, sizes=[d] * runs)
        found[kind] = np.array(estimate.energy) / np.array(estimate.mass)  # before the positive part
    stated = estimate.deviations()[0]
    assert abs(found["some"].mean() - float(signal @ signal)) < 4 * found["some"].std() / math.sqrt(runs)
    assert abs(found["none"].mean()) < 4 * found["none"].std() / math.sqrt(runs)
    assert found["none"].std() == pytest.approx(stated, rel=0.05)  # se of a std from 4000: 1.1 %
    weights = [(1 - a) * a ** (len(noises) - 1 - t) / (1 - a ** len(noises)) for t in range(len(noises))]
    exact = math.sqrt(sum(w * w * 2 * d * s**4 for w, s in zip(weights, noises, strict=True)))
    assert stated == pytest.approx(exact, rel=1e-12)


def test_the_spread_tends_to_the_stationary_formula() -> None:
    estimate, a, d, s = EnergyEstimate.start(1, decay=0.9), 0.9, 1000, 0.7
    for _ in range(400):
        estimate = estimate.observed([d * s * s], noise=[s], sizes=[d])
    assert estimate.deviations()[0] == pytest.approx(math.sqrt(2 * d) * s * s * math.sqrt((1 - a) / (1 + a)), rel=1e-12)
    assert estimate.energies()[0] == pytest.approx(0.0, abs=1e-9)


def test_strong_signals_lead_to_the_optimum_and_faint_ones_keep_the_proxy() -> None:
    sizes, energy, noise = [100, 400, 900], np.array([4e6, 1e6, 0.0]), [1.0, 1.0, 1.0]
    estimate = EnergyEstimate.start(3, decay=0.5)
    for _ in range(50):
        estimate = estimate.observed(energy + np.array(sizes), noise=noise, sizes=sizes)
    proxy = [0.2, 0.3, 0.5]
    w, measured = estimate.shares(proxy, sizes, least=0.01)
    assert measured == (True, True, False)
    assert w[2] == pytest.approx(0.5, rel=1e-12)  # not measured: its proxy share, exactly
    # √(E d): 2000·10 and 1000·20 are equal, so the two divide their half equally
    assert w[0] == pytest.approx(0.25, rel=1e-4)
    assert w[1] == pytest.approx(0.25, rel=1e-4)


def test_below_signal_to_noise_one_nothing_moves() -> None:
    d, s = 10_000, 1.0
    sd = math.sqrt(2 * d)
    start, proxy = EnergyEstimate.start(2, decay=0.0), (0.3, 0.7)
    below = start.observed([d + 0.99 * sd, d - 5 * sd], noise=[s, s], sizes=[d, d])
    assert below.shares(proxy, [d, d]) == (proxy, (False, False))
    assert below.signal_to_noise() == pytest.approx([0.99, 0.0], rel=1e-9)
    above = start.observed([d + 1.01 * sd, d + 3.03 * sd], noise=[s, s], sizes=[d, d])
    w, measured = above.shares(proxy, [d, d])
    assert measured == (True, True)
    # λ = snr/(1+snr); target √(1.01) : √(3.03) = 1 : √3
    target = np.array([1, math.sqrt(3)]) / (1 + math.sqrt(3))
    mix = np.array([1.01 / 2.01, 3.03 / 4.03])
    mixed = mix * target + (1 - mix) * np.array(proxy)
    assert w == pytest.approx(mixed / mixed.sum(), rel=1e-9)


def test_nothing_seen_means_the_proxy() -> None:
    assert EnergyEstimate.start(2).shares([0.5, 0.5], [1, 1]) == ((0.5, 0.5), (False, False))


@given(
    rounds=st.lists(st.lists(ANY_FLOAT, min_size=4, max_size=4), max_size=12),
    noise=st.lists(st.floats(0, 1e200), min_size=4, max_size=4),
    raw=st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4),
    sizes=st.lists(st.integers(1, 10**9), min_size=4, max_size=4),
    decay=st.floats(0, 0.999999),
    least=st.floats(1e-3, 1.0),
)
def test_a_simplex_above_the_floor_whatever_arrives(
    rounds: list[list[float]], noise: list[float], raw: list[float], sizes: list[int], decay: float, least: float
) -> None:
    proxy = np.array(raw) / sum(raw)
    estimate = EnergyEstimate.start(4, decay=decay)
    for i, squares in enumerate(rounds):
        estimate = estimate.observed(squares, noise=np.roll(noise, i), sizes=sizes)
        w, measured = estimate.shares(proxy, sizes, least)
        assert all(math.isfinite(share) and share >= least / 4 for share in w)
        assert math.fsum(w) == pytest.approx(1.0, abs=1e-12)
        assert len(measured) == 4
        assert not np.isnan(estimate.signal_to_noise()).any()
        assert EnergyEstimate.from_state(json.loads(json.dumps(estimate.to_state(), allow_nan=False))) == estimate


def test_what_is_not_a_squared_norm_is_ignored_for_its_layer_only() -> None:
    before = EnergyEstimate.start(5).observed([5.0] * 5, noise=[1.0] * 5, sizes=[3] * 5)
    after = before.observed([math.nan, math.inf, -1.0, 7.0, 1.7e308], noise=[1, 1, 1, 1, 1e160], sizes=[3] * 5)
    for i in (0, 1, 2, 4):
        assert (after.energy[i], after.sd[i], after.mass[i]) == (before.energy[i], before.sd[i], before.mass[i])
    assert after.energy[3] > before.energy[3]
    assert after.mass[3] > before.mass[3]


def test_a_restored_estimate_goes_on_as_the_first_would() -> None:
    rng = np.random.default_rng(3)
    one = EnergyEstimate.start(3, decay=0.7)
    seen = [rng.uniform(0, 100, 3) for _ in range(10)]
    for y in seen[:5]:
        one = one.observed(y, noise=[1, 2, 3], sizes=[5, 6, 7])
    two = EnergyEstimate.from_state(json.loads(json.dumps(one.to_state())))
    for y in seen[5:]:
        one, two = (e.observed(y, noise=[1, 2, 3], sizes=[5, 6, 7]) for e in (one, two))
    assert one == two


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda e: EnergyEstimate.start(2, decay=1.0), "sensitivity.decay-range"),
        (lambda e: EnergyEstimate.start(0), "sensitivity.energy-state-shape"),
        (lambda e: e.observed([1.0], noise=[1, 1], sizes=[1, 1]), "sensitivity.energy-length"),
        (lambda e: e.observed([1.0, 1.0], noise=[1, math.nan], sizes=[1, 1]), "sensitivity.energy-range"),
        (lambda e: e.observed([1.0, 1.0], noise=[1, 1], sizes=[1, 0]), "sensitivity.energy-range"),
        (lambda e: e.shares([0.5, 0.6], [1, 1]), "sensitivity.shares-sum"),
        (lambda e: e.shares([1.5, -0.5], [1, 1]), "sensitivity.energy-range"),
        (lambda e: e.shares([0.5, 0.5], [1, 1], least=0.0), "sensitivity.least-range"),
        (lambda e: EnergyEstimate.from_state({**e.to_state(), "extra": 1}), "sensitivity.energy-state-keys"),
        (
            lambda e: EnergyEstimate.from_state({**e.to_state(), "sd": [math.nan, 0.0]}),
            "sensitivity.energy-state-damaged",
        ),
        (lambda e: EnergyEstimate.from_state({**e.to_state(), "sd": [0.0]}), "sensitivity.energy-state-shape"),
        (lambda e: EnergyEstimate.from_state({**e.to_state(), "sd": 5}), "sensitivity.energy-state-damaged"),
    ],
)
def test_bad_input_is_refused(call: Any, code: str) -> None:
    with raises_code(code):
        call(EnergyEstimate.start(2))
