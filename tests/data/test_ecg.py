"""Simulated ECG: shapes, reproducibility, the physics between leads, and classes that can be told apart."""

from __future__ import annotations

import numpy as np
import pytest

from lamina.data import LEADS, ECGSimulator
from lamina.data.morphology import MORPHOLOGIES
from lamina.errors import LaminaError


def lead(x: np.ndarray, name: str) -> np.ndarray:
    return x[:, LEADS.index(name)]


def test_shape_and_types() -> None:
    drawn = ECGSimulator(samples=100).draw(patients=5, windows=3, seed=0)
    assert drawn.x.shape == (15, 12, 100)
    assert drawn.x.dtype == np.float32
    assert drawn.label.dtype == drawn.patient.dtype == np.int64
    assert np.isfinite(drawn.x).all()
    assert drawn.patient.tolist() == [p for p in range(5) for _ in range(3)]


def test_a_patient_has_one_label() -> None:
    drawn = ECGSimulator(samples=16).draw(patients=40, windows=4, seed=1)
    by_patient = drawn.label.reshape(40, 4)
    assert (by_patient == by_patient[:, :1]).all()


def test_same_seed_same_signal_and_another_seed_another() -> None:
    simulator = ECGSimulator(samples=64)
    first, again, other = (simulator.draw(patients=4, windows=2, seed=s).x for s in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)


def test_limb_leads_obey_einthoven_and_goldberger() -> None:
    x = ECGSimulator().draw(patients=20, windows=1, seed=5).x.astype(np.float64)
    one, two, three = (lead(x, name) for name in ("I", "II", "III"))
    assert np.allclose(one + three, two, atol=1e-5)
    assert np.allclose(lead(x, "aVR") + lead(x, "aVL") + lead(x, "aVF"), 0, atol=1e-5)
    assert np.allclose(lead(x, "aVR"), -(one + two) / 2, atol=1e-5)


def test_amplitudes_are_of_the_size_of_a_heart() -> None:
    x = ECGSimulator(classes=("normal",)).draw(patients=300, windows=1, seed=6).x
    height = np.median(lead(x, "II").max(axis=1))
    assert 0.6 < height < 1.6  # millivolt
    assert np.abs(x).max() < 10


def test_heart_rate_shows_in_the_number_of_beats() -> None:
    """R waves counted in a long, clean window lie in the range of rates that is drawn from."""
    simulator = ECGSimulator(samples=3_000, rate=100.0, classes=("normal",), muscle=0.0, wander=0.0)
    x = lead(simulator.draw(patients=20, windows=1, seed=7).x, "V5")
    high = x > 0.6 * x.max(axis=1, keepdims=True)
    beats = (np.diff(high.astype(int), axis=1) == 1).sum(axis=1)
    rate = beats / 0.5  # thirty seconds
    assert rate.min() >= 40
    assert rate.max() <= 130
    assert 60 < np.median(rate) < 85


def test_classes_differ_where_medicine_says() -> None:
    def draw(name: str) -> np.ndarray:
        return ECGSimulator(classes=(name,)).draw(patients=200, windows=1, seed=8).x

    def sokolow(x: np.ndarray) -> float:
        return float(np.median(lead(x, "V5").max(axis=1) - lead(x, "V1").min(axis=1)))

    def width(x: np.ndarray) -> float:
        """Samples of lead II above half of its peak, per beat and peak: a stand-in for the QRS width."""
        two = lead(x, "II")
        high = two > 0.5 * two.max(axis=1, keepdims=True)
        return float(
            np.median(high.sum(axis=1) / np.maximum(1, (np.diff(high.astype(int), axis=1) == 1).sum(axis=1)))
        )

    assert sokolow(draw("hypertrophy")) > 3.5 > sokolow(draw("normal"))
    assert width(draw("block")) > 1.5 * width(draw("normal"))
    assert np.median(lead(draw("infarction"), "V2")) > np.median(lead(draw("normal"), "V2"))


def test_classes_can_be_learned_but_not_perfectly() -> None:
    """Nearest class mean of a few public features: far better than chance, worse than certain."""
    simulator = ECGSimulator()

    def features(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x.max(axis=2), x.min(axis=2), np.median(x, axis=2)], axis=1)

    train, test = (simulator.draw(patients=400, windows=1, seed=s) for s in (10, 11))
    known = features(train.x)
    mean, std = known.mean(axis=0), known.std(axis=0)
    centres = np.stack(
        [((known - mean) / std)[train.label == k].mean(axis=0) for k in range(len(MORPHOLOGIES))]
    )
    distance = (((features(test.x) - mean) / std)[:, None] - centres[None]) ** 2
    accuracy = (distance.sum(axis=2).argmin(axis=1) == test.label).mean()
    assert 0.5 < accuracy < 0.999


@pytest.mark.parametrize(
    ("settings", "draw"),
    [
        ({"samples": 0}, {}),
        ({"rate": -1.0}, {}),
        ({"classes": ("martian",)}, {}),
        ({"classes": ()}, {}),
        ({}, {"patients": 0, "windows": 1, "seed": 0}),
        ({}, {"patients": 1, "windows": 0, "seed": 0}),
    ],
)
def test_nonsense_is_refused_with_a_remedy(settings: dict[str, object], draw: dict[str, int]) -> None:
    with pytest.raises(LaminaError) as caught:
        ECGSimulator(**settings).draw(**draw)  # type: ignore[arg-type]
    assert caught.value.remedy
