"""Simulated 12-lead ECG: windows of a few beats, with classes, patients and noise, from one seed.

A beat is a sum of Gaussian waves, as in the dynamical model of McSharry, Clifford, Tarassenko and Smith, "A dynamical
model for generating synthetic electrocardiogram signals" (IEEE Trans. Biomed. Eng. 50, 2003), here without its
differential equation:

    v(t) = Σ_beats Σ_waves  a_wave · exp( -(t - t_beat - d_wave)² / (2 w_wave²) )        waves P, Q, R, S, J, T

J is the ST segment. Eight leads (I, II, V1 to V6) have amplitudes of their own, in millivolt, of the size of normal
adult values (Rijnbeek et al., "Normal values of the electrocardiogram for ages 16-90 years", J. Electrocardiol. 47,
2014; Goldberger, "Clinical Electrocardiography"). The other four follow from Einthoven's and Goldberger's relations:

    III = II - I      aVR = -(I + II)/2      aVL = I - II/2      aVF = II - I/2

Patients differ in heart rate, gain of each wave and electrode, and keep these over their windows. Windows of a patient
differ in phase, beat-to-beat intervals (respiratory and slow modulation), baseline wander and muscle noise. This is a
simulator for demonstrations, proxies and tests; no person's data is in it, and no diagnosis may rest on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.data.morphology import AMPLITUDE, DELAY, MORPHOLOGIES, WIDTH
from lamina.errors import LaminaError

LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")

Array = NDArray[np.float64]


class Recordings(NamedTuple):
    """N windows: `x` (N, 12, samples) in millivolt, `label` (N,) index of the class, `patient` (N,)."""

    x: NDArray[np.float32]
    label: NDArray[np.int64]
    patient: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ECGSimulator:
    """Settings of the simulator; `draw` makes recordings, the same for the same seed.

    >>> ECGSimulator(samples=64).draw(patients=3, windows=2, seed=1).x.shape
    (6, 12, 64)
    """

    samples: int = 256
    rate: float = 100.0  # samples per second
    classes: tuple[str, ...] = tuple(MORPHOLOGIES)
    muscle: float = 0.02  # mV, standard deviation
    wander: float = 0.06  # mV, amplitude

    def __post_init__(self) -> None:
        if self.samples < 1 or not self.rate > 0:
            raise LaminaError(
                f"samples is {self.samples} and rate is {self.rate}, both must be > 0",
                "for example samples=256, rate=100",
            )
        unknown = [name for name in self.classes if name not in MORPHOLOGIES]
        if unknown or not self.classes:
            raise LaminaError(
                f"classes {unknown or '()'} are not known", f"choose from {', '.join(MORPHOLOGIES)}"
            )

    def draw(self, *, patients: int, windows: int, seed: int) -> Recordings:
        """`windows` windows of each of `patients` patients; rows of one patient are neighbours."""
        if patients < 1 or windows < 1:
            raise LaminaError(
                f"patients={patients}, windows={windows}, both must be > 0", "ask for one or more"
            )
        generator = np.random.default_rng(seed)
        label = generator.integers(0, len(self.classes), patients)
        gain = self._amplitudes(label, generator)  # (patients, 8, 6)
        pulse = generator.normal(72.0, 11.0, patients).clip(48.0, 115.0)  # beats per minute
        stretch = np.array([MORPHOLOGIES[name].widen for name in self.classes])[label]

        patient = np.repeat(np.arange(patients), windows)
        beats = self._beats(60.0 / pulse[patient], generator)
        waves = self._waves(beats, stretch[patient])
        eight = np.einsum("nlw,nwt->nlt", gain[patient], waves)
        eight += self._wander(len(patient), generator) + generator.normal(0.0, self.muscle, eight.shape)
        x = _twelve(eight)
        return Recordings(x.astype(np.float32), label[patient].astype(np.int64), patient.astype(np.int64))

    def _amplitudes(self, label: NDArray[np.int64], generator: np.random.Generator) -> Array:
        """(patients, leads, waves): the class's amplitudes, varied per wave and per electrode."""
        table = np.stack([AMPLITUDE * MORPHOLOGIES[n].scale + MORPHOLOGIES[n].shift for n in self.classes])
        wave = np.exp(generator.normal(0.0, 0.25, (len(label), 1, table.shape[2])))
        electrode = np.exp(generator.normal(0.0, 0.15, (len(label), table.shape[1], 1)))
        amplitudes: Array = table[label] * wave * electrode
        return amplitudes

    def _beats(self, interval: Array, generator: np.random.Generator) -> Array:
        """(N, beats): times of the R waves in seconds, from before the window to after it."""
        n = len(interval)
        count = int(np.ceil(self.samples / self.rate / interval.min())) + 3
        k = np.arange(count)
        breath = 0.04 * np.sin(2 * np.pi * (0.25 * interval[:, None] * k + generator.random((n, 1))))
        slow = 0.03 * np.sin(2 * np.pi * (0.10 * interval[:, None] * k + generator.random((n, 1))))
        jitter = generator.normal(0.0, 0.01, (n, count))
        steps = interval[:, None] * (1.0 + breath + slow + jitter)
        start = -interval * (1.0 + generator.random(n))
        times: Array = start[:, None] + np.cumsum(steps, axis=1)
        return times

    def _waves(self, beats: Array, stretch: Array) -> Array:
        """(N, waves, samples): each wave at unit amplitude, summed over beats."""
        t = np.arange(self.samples) / self.rate
        out = np.empty((len(beats), len(DELAY), self.samples))
        for w, (delay, width) in enumerate(zip(DELAY, WIDTH, strict=True)):
            # the QRS complex (Q, R, S) is stretched by a conduction block; P comes before it, unchanged
            factor = stretch if 1 <= w <= 3 else np.ones_like(stretch)
            z = t[None, None, :] - beats[:, :, None] - (delay * factor)[:, None, None]
            out[:, w] = np.exp(-0.5 * (z / (width * factor)[:, None, None]) ** 2).sum(axis=1)
        return out

    def _wander(self, n: int, generator: np.random.Generator) -> Array:
        """(N, 8, samples): slow wander of the baseline, another phase in each lead."""
        t = np.arange(self.samples) / self.rate
        frequency = generator.uniform(0.15, 0.45, (n, 1, 1))
        phase = generator.random((n, 8, 1))
        size = self.wander * generator.random((n, 8, 1))
        wander: Array = size * np.sin(2 * np.pi * (frequency * t + phase))
        return wander


def _twelve(eight: Array) -> Array:
    """The four leads that the limb leads I and II determine, put in their usual places."""
    one, two, chest = eight[:, 0:1], eight[:, 1:2], eight[:, 2:]
    limbs = [one, two, two - one, -(one + two) / 2, one - two / 2, two - one / 2]
    return np.concatenate([*limbs, chest], axis=1)
