"""Simulated patients: shapes, reproducibility, the physics between leads, and classes that differ as they should."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import raises_code

from lamina.data.ecg_simulator import CLASSES, PULSE_LIMITS, SECONDS_BEFORE_R, ECGSimulator, Patient, Recordings
from lamina.data.heart_model import LEADS, MORPHOLOGIES, twelve_leads
from lamina.errors import LaminaError


def lead(x: np.ndarray, name: str) -> np.ndarray:
    return x[:, LEADS.index(name)]


@pytest.fixture(scope="module")
def mixed() -> Recordings:
    return ECGSimulator().draw(patients=12, seed=1)


@pytest.fixture(scope="module")
def textbook() -> dict[str, np.ndarray]:
    """(1, 12, samples) of a patient of each class like the tables say: none of what patients differ in, no noise."""
    found = {}
    for name, morphology in MORPHOLOGIES.items():
        patient = Patient(
            morphology=morphology, pulse=72.0, spread=1.0, rhythm=0, turn=np.eye(3), electrodes=np.ones((8, 1))
        )
        dipole, (start,) = ECGSimulator(windows=1)._beats(patient)
        found[name] = twelve_leads(patient.leads(dipole))[None, :, start : start + 96]
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
    assert np.abs(power.argmax(axis=1) - round(100 * SECONDS_BEFORE_R)).max() <= 5  # 50 ms


def test_amplitudes_are_of_the_size_of_a_heart(mixed: Recordings) -> None:
    assert 0.5 < np.median(lead(mixed.x, "II").max(axis=1)) < 1.7  # millivolt
    assert np.abs(mixed.x).max() < 8


def test_classes_differ_where_medicine_says(textbook: dict[str, np.ndarray]) -> None:
    normal = textbook["normal"]
    peak = round(100 * SECONDS_BEFORE_R)

    def sokolow(x: np.ndarray) -> float:
        """S in V1 and R in V5 together, millivolt."""
        return float(lead(x, "V5").max() - lead(x, "V1").min())

    def width(x: np.ndarray) -> float:
        """Samples of V5 round the R wave above half of its height."""
        around = lead(x, "V5")[:, peak - 12 : peak + 13]
        return float((around > 0.5 * around.max()).sum())

    def level(x: np.ndarray, name: str, first: int, last: int) -> float:
        """Mean millivolt between two times after the R wave, in hundredths of a second."""
        return float(lead(x, name)[:, peak + first : peak + last].mean())

    assert sokolow(textbook["hypertrophy"]) > 3.5 > sokolow(normal)
    assert width(textbook["block"]) > 1.4 * width(normal)
    assert level(textbook["infarction"], "V2", -6, -2) < level(normal, "V2", -6, -2) - 0.2  # Q wave
    assert level(textbook["infarction"], "V2", 8, 16) > level(normal, "V2", 8, 16) + 0.1  # raised ST
    for name in ("block", "hypertrophy"):  # T against the QRS
        assert level(textbook[name], "V6", 20, 35) < 0 < level(normal, "V6", 20, 35)


def test_severity_leads_from_healthy_to_ill() -> None:
    normal, block = MORPHOLOGIES["normal"], MORPHOLOGIES["block"]
    none, half, full = (normal.towards(block, s) for s in (0.0, 0.5, 1.0))
    assert np.array_equal(none.height, normal.height)
    assert np.allclose(full.height, block.height)
    assert np.allclose(half.width, (normal.width + block.width) / 2)
    assert np.allclose(half.angle, (normal.angle + block.angle) / 2)


def test_pulse_is_that_of_sinus_rhythm_and_patients_differ() -> None:
    generator = np.random.default_rng(0)
    drawn = [Patient.drawn(MORPHOLOGIES["normal"], generator) for _ in range(300)]
    pulses = np.array([patient.pulse for patient in drawn])
    assert PULSE_LIMITS[0] <= pulses.min() <= pulses.max() <= PULSE_LIMITS[1]
    assert pulses.std() > 5
    for patient in drawn[:20]:  # a rotation and a size
        size = np.cbrt(np.linalg.det(patient.turn))
        assert np.allclose(patient.turn @ patient.turn.T, size**2 * np.eye(3))


def test_only_the_classes_of_the_mix_occur() -> None:
    drawn = ECGSimulator(mix={"normal": 3, "block": 1, "infarction": 0}, samples=8, windows=1).draw(patients=24, seed=3)
    counts = np.bincount(drawn.label, minlength=4)
    assert counts[CLASSES.index("normal")] > counts[CLASSES.index("block")] > 0
    assert counts[CLASSES.index("infarction")] == counts[CLASSES.index("hypertrophy")] == 0


@pytest.mark.parametrize("settings", [{"windows": 9}, {"samples": 250}, {"samples": 250, "rate": 250}])
def test_other_shapes(settings: dict[str, int]) -> None:
    simulator = ECGSimulator(**settings)  # type: ignore[arg-type]
    x = simulator.draw(patients=2, seed=4).x
    assert x.shape == (2 * simulator.windows, 12, simulator.samples)
    assert np.abs(x).max() > 0.3


def test_progress_is_told() -> None:
    heard: list[int] = []
    ECGSimulator(samples=8, windows=1).draw(patients=3, seed=0, tick=heard.append)
    assert heard == [1, 2, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"samples": 0},
        {"rate": -1},
        {"rate": 49},
        {"windows": 0},
        {"mix": {"martian": 1.0}},
        {"mix": {}},
        {"mix": {"normal": 0.0}},
        {"mix": {"normal": 2.0, "block": -1.0}},
        {"mix": {"normal": float("nan")}},
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


def test_a_heart_that_does_not_beat_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def flat(patient: Patient, *, beats: int, rate: int) -> np.ndarray:
        heard.append(beats)
        return np.zeros((3, 100 * beats))

    monkeypatch.setattr(Patient, "dipole", flat)
    with raises_code("data.r-waves-missing"):
        ECGSimulator().draw(patients=1, seed=0)
    assert len(heard) == 3
