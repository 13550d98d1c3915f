"""Dipole components: what NeuroKit2 gives back has our heights, beats at our pulse, and stays quiet."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import raises_code
from scipy.signal import find_peaks

from lamina.data import heart_model as module
from lamina.data.heart_model import MORPHOLOGIES, Waves, dipole_component, import_neurokit

SETTINGS: dict[str, Any] = {"pulse": 70.0, "spread": 1.0, "beats": 6, "rate": 200, "seed": 3}


def waves(p: float = 0.1, q: float = -0.1, r: float = 1.0, s: float = -0.1, t: float = 0.3) -> Waves:
    normal = MORPHOLOGIES["normal"]
    return Waves(height=np.array([p, q, r, s, t]), angle=normal.angle, width=normal.width)


def test_our_parameters_are_the_package_s_own_where_they_agree() -> None:
    """With the waves of ECGSYN's defaults, a component is what ecg_simulate gives by itself, up to scale."""
    a, b = np.array([1.2, -5.0, 30.0, -7.5, 0.75]), np.array([0.25, 0.1, 0.1, 0.1, 0.4])
    default = Waves(height=a * b**2 / (2 * np.pi), angle=np.array([-70.0, -15.0, 0.0, 15.0, 100.0]), width=b)
    ours = dipole_component(default, **SETTINGS)
    theirs = import_neurokit().ecg_simulate(
        duration=6 * 60 / 70, length=2**30, sampling_rate=200, noise=0, heart_rate=70, random_state=3
    )
    settled = slice(100, None)
    assert np.corrcoef(ours[settled], np.asarray(theirs)[settled])[0, 1] > 0.99


@pytest.mark.parametrize("height", [0.3, 1.0, 2.5])
def test_the_r_wave_is_as_high_as_asked(height: float) -> None:
    signal = dipole_component(waves(p=0, q=0, r=height, s=0, t=0), **SETTINGS)[100:]
    assert signal.max() == pytest.approx(height, rel=0.12)
    assert abs(np.median(signal)) < 0.02


def test_a_wave_may_point_down() -> None:
    up = dipole_component(waves(), **SETTINGS)
    down = dipole_component(waves(-0.1, 0.1, -1.0, 0.1, -0.3), **SETTINGS)
    assert np.allclose(up, -down, atol=1e-6)


def test_beats_come_at_the_pulse_and_together() -> None:
    one, other = (dipole_component(waves(), **SETTINGS), dipole_component(waves(p=0.3, r=2.0, t=-0.2), **SETTINGS))
    assert len(one) == len(other)
    peaks = [find_peaks(signal, height=0.5 * signal.max(), distance=80)[0] for signal in (one, other)]
    assert len(peaks[0]) == len(peaks[1]) >= 6
    assert np.abs(peaks[0] - peaks[1]).max() <= 2  # samples of 5 ms
    assert 60 / (np.diff(peaks[0]).mean() / 200) == pytest.approx(70, abs=2)


def test_another_seed_is_another_rhythm() -> None:
    one, other = dipole_component(waves(), **SETTINGS), dipole_component(waves(), **{**SETTINGS, "seed": 4})
    size = min(len(one), len(other))
    assert not np.allclose(one[:size], other[:size], atol=0.05)


@pytest.fixture
def unloaded() -> Iterator[None]:
    import_neurokit.cache_clear()
    yield
    import_neurokit.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with raises_code("data.neurokit-missing") as caught:
        dipole_component(waves(), **SETTINGS)
    assert caught.value.remedy == "pip install lamina[demo]"


@pytest.mark.usefixtures("unloaded")
def test_warnings_of_the_package_do_not_leak(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("matplotlib.font_manager")

    def noisy(**settings: Any) -> list[float]:
        warnings.warn("the package warns", FutureWarning, stacklevel=1)
        log.warning("building the font cache")
        return [0.0, 1.0, 0.0]

    def loaded(name: str) -> SimpleNamespace:
        warnings.warn("so does its import", DeprecationWarning, stacklevel=1)
        return SimpleNamespace(ecg_simulate=noisy)

    monkeypatch.setattr(module.importlib, "import_module", loaded)
    before = logging.getLogger("matplotlib").level
    dipole_component(waves(), **SETTINGS)  # warnings are errors in tests
    assert not caplog.records
    assert logging.getLogger("matplotlib").level == before
