"""Simulated blood pressure, pulse and glucose: shapes, reproducibility, sizes and what hangs together."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import raises_code
from scipy.signal import find_peaks

from lamina.signals.cgm_simulator import CONTROL, CGMSimulator
from lamina.signals.ecg_simulator import Recordings
from lamina.signals.pulse_simulator import PRESSURES, PulseSimulator


@pytest.fixture(scope="module")
def monitors() -> Recordings:
    return PulseSimulator(seconds=12).records(patients=66, seed=2)


@pytest.fixture(scope="module")
def glucose() -> Recordings:
    return CGMSimulator(days=2).draw(patients=65, seed=3)


def test_shapes_types_and_patients(monitors: Recordings, glucose: Recordings) -> None:
    assert monitors.x.shape == (66, 3, 1500) and monitors.x.dtype == np.float32
    assert glucose.x.shape == (130, 1, 288) and glucose.x.dtype == np.float32
    assert glucose.patient.tolist() == [p for p in range(65) for _ in range(2)]
    assert set(monitors.label) == set(range(len(PRESSURES)))
    assert set(glucose.label) == set(range(len(CONTROL)))
    assert np.isfinite(monitors.x).all() and np.isfinite(glucose.x).all()


def test_a_patient_depends_on_settings_seed_and_number_alone(monitors: Recordings, glucose: Recordings) -> None:
    fewer = PulseSimulator(seconds=12).records(patients=2, seed=2)
    assert np.array_equal(fewer.x, monitors.x[:2])
    fewer = CGMSimulator(days=2).draw(patients=2, seed=3)
    assert np.array_equal(fewer.x, glucose.x[:4])
    assert not np.array_equal(fewer.x, CGMSimulator(days=2).draw(patients=2, seed=4).x)


def test_pressure_is_that_of_the_class_and_follows_the_heart() -> None:
    drawn = PulseSimulator(seconds=12, noise=0.0).records(patients=64, seed=5)
    for kind, (systolic, diastolic) in enumerate(PRESSURES.values()):
        found = drawn.x[drawn.label == kind, 1]
        assert np.median(found.max(1)) == pytest.approx(systolic, rel=0.15)
        assert np.median(found.min(1)) == pytest.approx(diastolic, rel=0.15)
    for lead, pressure, light in drawn.x[:12].astype(np.float64):
        steep = np.abs(np.gradient(lead))  # T may be higher than R, never as steep
        beats = find_peaks(steep, height=0.6 * np.quantile(steep, 0.995), distance=50)[0]
        tops = find_peaks(pressure, prominence=0.6 * np.ptp(pressure), distance=50)[0]
        late = find_peaks(light, prominence=0.5 * np.ptp(light), distance=50)[0]
        assert abs(len(beats) - len(tops)) <= 1 and abs(len(tops) - len(late)) <= 1
        after = [tops[tops > r][0] - r for r in beats[1:-2]]
        assert 0.1 < np.median(after) / 125 < 0.6  # the pulse arrives after the R wave, always by about as much
        assert np.std(after) / 125 < 0.05


def test_glucose_has_the_sizes_of_the_literature(glucose: Recordings) -> None:
    x = glucose.x[:, 0]
    assert x.min() >= 40 and x.max() <= 400
    assert 135 < x.mean() < 190
    assert 0.25 < (x.std(1) / x.mean(1)).mean() < 0.45
    assert 0.45 < ((x >= 70) & (x <= 180)).mean() < 0.75
    assert 2.5 < np.abs(np.diff(x, axis=1)).mean() < 6.0  # mg/dL in five minutes
    low = [(x[glucose.label == kind] < 70).mean() for kind in (0, 1)]
    assert low[1] > low[0]
    assert x[:, 156:180].mean() > x[:, 24:48].mean()  # after lunch, and at night


def test_nonsense_is_refused() -> None:
    for settings in ({"rate": 10}, {"seconds": 0}, {"seconds": 1e9}, {"noise": -1}):
        with raises_code("data.pulse-settings"):
            PulseSimulator(**settings)  # type: ignore[arg-type]
    for mix in ({}, {"martian": 1.0}, {"normal": 0.0}, {"normal": float("nan")}):
        with raises_code("data.mix-not-valid"):
            PulseSimulator(mix=mix)
    for settings in ({"days": 0}, {"days": 10_000}, {"prone": 2}, {"sensor": -1}):
        with raises_code("data.cgm-settings"):
            CGMSimulator(**settings)  # type: ignore[arg-type]
    with raises_code("data.patients-not-positive"):
        CGMSimulator().draw(patients=0, seed=0)
