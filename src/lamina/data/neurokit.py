"""One component of the heart's electric dipole, by NeuroKit2's implementation of ECGSYN.

ECGSYN (McSharry, Clifford, Tarassenko and Smith, "A dynamical model for generating synthetic electrocardiogram
signals", IEEE Trans. Biomed. Eng. 50, 2003) lets a point run round a circle once per beat. Five waves j = P, Q, R, S, T
at angles θ_j push it up and down,

    dz/dt = - Σ_j a_j Δθ_j exp(-Δθ_j² / 2b_j²) - (z - z_0),

and the time of each turn comes from a rhythm with respiratory and slow modulation. At angular speed ω, wave j reaches
the height a_j b_j²/ω. NeuroKit2 (Makowski et al., Behav. Res. Methods 53, 2021) widens the waves with the heart rate
so that the rate cancels: a wave of height A needs a_j = 2πA/b_j².

NeuroKit2's own twelve leads take a second each, have one fixed mixture of waves, and are all stretched to 1.6 mV,
which hides what voltage tells. So it is asked for the three components of the dipole, and each gets back the height
that its waves say; leads.py makes twelve leads of them.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from lamina.data.morphology import Waves
from lamina.errors import LaminaError

Array = NDArray[np.float64]

STRETCHED = 1.6  # mV, the range to which NeuroKit2 stretches every signal
PEAK = 0.04  # where ECGSYN starts, on top of an R wave


def component(waves: Waves, *, pulse: float, spread: float, beats: int, rate: int, seed: int) -> Array:
    """At least `beats` beats of one component in millivolt, the isoelectric line at 0. The first sample is an R wave.

    pulse, spread  beats per minute, mean and standard deviation
    rate           samples per second
    seed           of the rhythm: components with equal pulse, spread, beats and seed beat together
    """
    turn = waves.turn()
    # Waves of the size that the starting point was made for; from another one it takes seconds to settle.
    scale = PEAK / float(turn[len(turn) // 2])
    package = neurokit()
    with _quiet():
        stretched: Array = np.asarray(
            package.ecg_simulate(
                duration=beats * 60.0 / pulse,
                length=2**30,  # all that was integrated, which is longer than the duration
                sampling_rate=rate,
                noise=0,
                heart_rate=pulse,
                heart_rate_std=spread,
                random_state=seed,
                ai=2 * np.pi * scale * waves.height / waves.width**2,
                ti=waves.angle,
                bi=waves.width,
            )
        )
    signal = stretched * (math.copysign(np.ptp(turn), scale) / STRETCHED)
    centred: Array = signal - np.median(signal)
    return centred


@cache
def neurokit() -> ModuleType:
    """The package, loaded when a signal is first asked for: it brings pandas, scikit-learn and matplotlib."""
    try:
        with _quiet():
            return importlib.import_module("neurokit2")
    except ImportError as error:
        raise LaminaError(
            "data.simulated-ecg-needs",
            f"simulated ECG needs neurokit2, which cannot be imported: {error}",
            "pip install lamina[demo]",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of other packages are not ours to pass on, nor is matplotlib's word on its font cache."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
