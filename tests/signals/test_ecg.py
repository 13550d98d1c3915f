"""Simulated patients: shapes, reproducibility, the physics between leads, and classes that differ as they should."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import raises_code

from lamina.errors import LaminaError
from lamina.signals.ecg_simulator import (
    CLASSES,
    PULSE_LIMITS,
    SECONDS_BEFORE_R,
    ECGSimulator,
    HeartPatients,
    Recordings,
    beat_phase,
    heart_beats,
)
from lamina.signals.heart_model import LEADS, MORPHOLOGIES, dipole, eight_leads, twelve_leads


def lead(x: np.ndarray, name: str) -> np.ndarray:
    return x[:, LEADS.index(name)]


@pytest.fixture(scope="module")
def mixed() -> Recordings:
    return ECGSimulator().draw(patients=12, seed=1)


@pytest.fixture(scope="module")
def textbook() -> dict[tuple[str, int], np.ndarray]:
    """(1, 12, 96) of each form of each class like the tables say: none of what patients differ in, no noise."""
    found = {}
    for name, forms in MORPHOLOGIES.items():
        for number, form in enumerate(forms):
            phase = (np.arange(96) / 100 - SECONDS_BEFORE_R)[None] * 72 / 60
            moving = dipole(form.height[None], form.angle[None], form.width[None], np.array([72.0]), phase)
            found[name, number] = twelve_leads(eight_leads(moving))
    return found


def test_shape_and_types(mixed: Recordings) -> None:
    assert mixed.x.shape == (36, 12, 96)
    assert mixed.x.dtype == np.float32
    assert mixed.label.dtype == mixed.patient.dtype == np.int64
    assert np.isfinite(mixed.x).all()
    assert mixed.patient.tolist() == [p for p in range(12) for _ in range(3)]
    assert set(mixed.label) <= set(range(len(CLASSES)))


def test_a_patient_has_one_label_and_windows_that_differ(mixed: Recordings) -> None:
    by_patient = mixed.label.reshape(12, 3)
    assert (by_patient == by_patient[:, :1]).all()
    x = mixed.x.reshape(12, 3, -1)
    assert (np.abs(x[:, 0] - x[:, 1]).mean(axis=1) > 0.01).all()


def test_a_patient_depends_on_settings_seed_and_number_alone(mixed: Recordings) -> None:
    fewer = ECGSimulator().draw(patients=3, seed=1)
    assert np.array_equal(fewer.x, mixed.x[:9])
    assert np.array_equal(fewer.label, mixed.label[:9])
    other = ECGSimulator().draw(patients=3, seed=9)
    assert not np.allclose(fewer.x, other.x, atol=0.1)


def test_limb_leads_obey_einthoven_and_goldberger(mixed: Recordings) -> None:
    x = mixed.x.astype(np.float64)
    one, two, three = (lead(x, name) for name in ("I", "II", "III"))
    assert np.allclose(one + three, two, atol=1e-5)
    assert np.allclose(lead(x, "aVR") + lead(x, "aVL") + lead(x, "aVF"), 0, atol=1e-5)
    assert np.allclose(lead(x, "aVR"), -(one + two) / 2, atol=1e-5)
    assert np.abs(three).mean() > 0.05  # not by being nothing


def test_windows_are_cut_round_r_waves(mixed: Recordings) -> None:
    """The strongest moment of a window lies where the R wave belongs."""
    power = np.square(mixed.x).sum(axis=1)
    off = np.abs(power.argmax(axis=1) - round(100 * SECONDS_BEFORE_R))
    assert np.median(off) == 0 and off.max() <= 5  # 50 ms


def test_amplitudes_are_of_the_size_of_a_heart(mixed: Recordings) -> None:
    assert 0.5 < np.median(lead(mixed.x, "II").max(axis=1)) < 1.7  # millivolt
    assert np.abs(mixed.x).max() < 8


PEAK = round(100 * SECONDS_BEFORE_R)


def sokolow(x: np.ndarray) -> float:
    """S in V1 and R in V5 together, millivolt."""
    return float(lead(x, "V5").max() - lead(x, "V1").min())


def level(x: np.ndarray, name: str, first: int, last: int) -> float:
    """Mean millivolt between two times after the R wave, in hundredths of a second."""
    return float(lead(x, name)[:, PEAK + first : PEAK + last].mean())


def qrs_width(x: np.ndarray) -> float:
    """Seconds in which the dipole's leads move faster than a tenth of their fastest."""
    speed = np.abs(np.diff(x[0], axis=1)).sum(0)[PEAK - 20 : PEAK + 21]
    return float((speed > 0.15 * speed.max()).sum() / 100)


def test_classes_differ_where_medicine_says(textbook: dict[tuple[str, int], np.ndarray]) -> None:
    normal, anterior, inferior = textbook["NORM", 0], textbook["MI", 0], textbook["MI", 1]
    left_branch, right_branch, fascicle = (textbook["CD", i] for i in range(3))
    strain, voltage = textbook["HYP", 0], textbook["HYP", 1]
    assert min(sokolow(strain), sokolow(voltage)) > 3.5 > sokolow(normal)
    assert qrs_width(left_branch) > 1.2 * qrs_width(normal)
    assert qrs_width(right_branch) > 1.1 * qrs_width(normal)
    assert level(right_branch, "V1", 4, 9) > 0.2 > level(normal, "V1", 4, 9)  # R'
    assert level(right_branch, "I", 4, 9) < -0.1  # broad S
    assert lead(fascicle, "I").max() > 0.5 and lead(fascicle, "aVF").min() < -0.5  # axis to the left
    assert level(anterior, "V2", -6, -2) < level(normal, "V2", -6, -2) - 0.2  # Q wave
    assert level(anterior, "V2", 8, 16) > level(normal, "V2", 8, 16) + 0.1  # raised ST
    assert level(inferior, "aVF", -6, -2) < level(normal, "aVF", -6, -2) - 0.2
    for form in (left_branch, strain, textbook["STTC", 0]):  # T against the QRS
        assert level(form, "V6", 20, 35) < 0 < level(normal, "V6", 20, 35)
    assert level(textbook["STTC", 0], "V5", 8, 14) < level(normal, "V5", 8, 14) - 0.05  # ST depressed
    assert level(textbook["STTC", 1], "V5", 20, 35) < 0.3 * level(normal, "V5", 20, 35)  # T flat


def test_severity_leads_from_healthy_to_ill() -> None:
    normal, block = MORPHOLOGIES["NORM"][0], MORPHOLOGIES["CD"][0]
    none, half, full = (normal.towards(block, s) for s in (0.0, 0.5, 1.0))
    assert np.array_equal(none.height, normal.height)
    assert np.allclose(full.height, block.height)
    assert np.allclose(half.width, (normal.width + block.width) / 2)
    assert np.allclose(half.angle, (normal.angle + block.angle) / 2)


def test_pulse_is_that_of_sinus_rhythm_and_patients_differ() -> None:
    drawn = HeartPatients.drawn([MORPHOLOGIES["NORM"][0]] * 300, np.random.default_rng(0))
    assert PULSE_LIMITS[0] <= drawn.pulse.min() <= drawn.pulse.max() <= PULSE_LIMITS[1]
    assert drawn.pulse.std() > 5


def test_beats_come_at_the_pulse_with_both_bands_of_variability() -> None:
    pulse, spread = np.full(40, 70.0), np.full(40, 2.5)
    beats = heart_beats(np.random.default_rng(0), pulse, spread, seconds=240)
    assert (beats[:, 0] < -1).all() and (beats[:, -1] > 241).all()
    gaps = np.diff(beats, axis=1)
    assert gaps.mean() == pytest.approx(60 / 70, rel=0.01)
    assert (gaps / gaps.mean()).std() == pytest.approx(2.5 / 70, rel=0.15)
    power = np.square(np.abs(np.fft.rfft(gaps - gaps.mean(1, keepdims=True), axis=1))).mean(0)
    frequency = np.fft.rfftfreq(gaps.shape[1], 60 / 70)
    low, high = (power[(frequency > a) & (frequency < b)].sum() for a, b in ((0.06, 0.14), (0.21, 0.29)))
    assert low / high == pytest.approx(0.5, rel=0.4)
    assert (low + high) / power.sum() > 0.9


def test_the_phase_is_whole_at_r_waves() -> None:
    beats = heart_beats(np.random.default_rng(1), np.full(3, 66.0), np.full(3, 2.0), seconds=5)
    for i in range(3):
        assert np.allclose(beat_phase(beats, beats[i])[i], np.arange(beats.shape[1]))


def test_records_are_whole_and_their_windows_are_of_the_same_kind() -> None:
    simulator = ECGSimulator(muscle=0.0, wander=0.0)
    records = simulator.records(patients=70, seed=5, seconds=10)
    assert records.x.shape == (70, 12, 1000) and records.x.dtype == np.float32
    assert np.array_equal(records.patient, np.arange(70))
    again = simulator.records(patients=3, seed=5, seconds=10)
    assert np.array_equal(again.x, records.x[:3])
    with raises_code("data.seconds-not-valid"):
        simulator.records(patients=1, seed=0, seconds=0)


def test_only_the_classes_of_the_mix_occur() -> None:
    drawn = ECGSimulator(mix={"NORM": 3, "CD": 1, "MI": 0}, samples=8, windows=1).draw(patients=24, seed=3)
    counts = np.bincount(drawn.label, minlength=5)
    assert counts[CLASSES.index("NORM")] > counts[CLASSES.index("CD")] > 0
    assert counts[CLASSES.index("MI")] == counts[CLASSES.index("HYP")] == 0


@pytest.mark.parametrize("settings", [{"windows": 9}, {"samples": 250}, {"samples": 250, "rate": 250}])
def test_other_shapes(settings: dict[str, int]) -> None:
    simulator = ECGSimulator(**settings)  # type: ignore[arg-type]
    x = simulator.draw(patients=2, seed=4).x
    assert x.shape == (2 * simulator.windows, 12, simulator.samples)
    assert np.abs(x).max() > 0.3


def test_progress_is_told() -> None:
    heard: list[int] = []
    ECGSimulator(samples=8, windows=1).draw(patients=130, seed=0, tick=heard.append)
    assert heard == [64, 128, 130]


@pytest.mark.parametrize(
    "settings",
    [
        {"samples": 0},
        {"rate": -1},
        {"rate": 49},
        {"windows": 0},
        {"mix": {"martian": 1.0}},
        {"mix": {}},
        {"mix": {"NORM": 0.0}},
        {"mix": {"NORM": 2.0, "CD": -1.0}},
        {"mix": {"NORM": float("nan")}},
        {"severity": (0.5, 0.2)},
        {"severity": (0.0, 1.5)},
    ],
)
def test_nonsense_is_refused_with_a_remedy(settings: dict[str, object]) -> None:
    with pytest.raises(LaminaError) as caught:
        ECGSimulator(**settings)  # type: ignore[arg-type]
    assert caught.value.remedy


def test_no_patients_are_refused() -> None:
    with raises_code("data.patients-not-positive"):
        ECGSimulator().draw(patients=0, seed=0)
