"""The closed form of ECGSYN against NeuroKit2, which integrates its differential equation."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
from scipy.signal import find_peaks, lfilter

from lamina.signals.ecg_simulator import beat_phase
from lamina.signals.heart_model import WAVES, dipole


def integrated(height: np.ndarray, angle: np.ndarray, width: np.ndarray, *, pulse: float, rate: int) -> np.ndarray:
    """Twelve beats of five waves (no J) by NeuroKit2, without noise, stretched to a range of 1.6."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import neurokit2

        signal = neurokit2.ecg_simulate(
            duration=12 * 60 / pulse,
            length=2**30,
            sampling_rate=rate,
            noise=0,
            heart_rate=pulse,
            heart_rate_std=1,
            random_state=3,
            ai=2 * np.pi * height / width**2 * 0.04,
            ti=angle,
            bi=width,
        )
    return np.asarray(signal, dtype=np.float64)


@pytest.mark.parametrize("pulse", [62.0, 75.0, 95.0])
def test_a_sum_of_gaussians_is_what_the_differential_equation_gives(pulse: float) -> None:
    rate, height = 200, np.array([0.12, -0.1, 1.0, -0.15, 0.3])
    angle, width = np.array([-70.0, -15.0, 0.0, 15.0, 100.0]), np.array([0.25, 0.1, 0.1, 0.1, 0.4])
    theirs = integrated(height, angle, width, pulse=pulse, rate=rate)
    peaks, _ = find_peaks(theirs, height=0.6 * theirs.max(), distance=round(0.4 * rate))
    inside = np.arange(peaks[0], peaks[-1])
    phase = beat_phase(peaks[None].astype(np.float64), inside.astype(np.float64))
    ours = dipole(
        np.insert(height, WAVES.index("J"), 0.0)[None, None],
        np.insert(angle, WAVES.index("J"), 42.0)[None],
        np.insert(width, WAVES.index("J"), 0.3)[None],
        np.array([pulse]),
        phase,
    )[0, 0]
    slow = lfilter([1 / rate], [1, 1 / rate - 1], ours)  # the return to z₀ within about a second
    binned, settled = (phase[0] * 40 % 40).astype(int), np.arange(len(ours)) > 3 * rate
    beats = [[x[settled & (binned == k)].mean() for k in range(40)] for x in (ours - slow, theirs[inside])]
    assert np.corrcoef(*beats)[0, 1] > 0.999
