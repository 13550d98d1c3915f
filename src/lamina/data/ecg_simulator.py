"""Simulated 12-lead ECG: patients of several classes, a few beats of each, from one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.signal import find_peaks
from scipy.spatial.transform import Rotation

from lamina.data.heart_model import LEADS, MORPHOLOGIES, Morphology, dipole_component, eight_leads, twelve_leads
from lamina.errors import LaminaError

Array = NDArray[np.float64]

# How far patients of one class lie apart (standard deviations; of logarithms where the figure is a factor). Chosen
# by us so that the classes overlap; real populations are of this order (Rijnbeek et al., "Normal values of the
# electrocardiogram for ages 16-90 years", J. Electrocardiol. 47, 2014).
WAVE_SPREAD, COMPONENT_SPREAD = 0.25, 0.20  # factor of each wave's height: in all components, in each
HEIGHT_SHIFT = (0.01, 0.07, 0.07, 0.07, 0.06)  # mV, added to each wave's height
ANGLE_SPREAD, WIDTH_SPREAD = 0.06, 0.10  # factors of each wave's angle and width
ROTATION_SPREAD, SIZE_SPREAD = 14.0, 0.20  # the heart in the chest: degrees about each axis, factor
LIMB_LEAD_SPREAD, CHEST_LEAD_SPREAD = 0.05, 0.15  # factor of each lead: where electrodes sit
PULSE_MEAN_STD, PULSE_LIMITS = (
    (74.0, 9.0),
    (60.0, 100.0),
)  # beats per minute: mean and deviation, cut at the ends of sinus rhythm
PULSE_VARIABILITY = (1.0, 3.0)  # beats per minute, from least to most variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """Everything that all windows of a patient share."""

    morphology: Morphology
    pulse: float
    spread: float
    rhythm: int  # seed
    turn: Array  # (3, 3): rotation and size of the heart
    electrodes: Array  # (8, 1)

    @classmethod
    def drawn(cls, morphology: Morphology, generator: np.random.Generator) -> Patient:
        """A patient of this morphology, give or take what patients differ in."""
        normal = generator.normal
        return cls(
            morphology=Morphology(
                height=morphology.height
                * np.exp(normal(0.0, WAVE_SPREAD, (1, 5)) + normal(0.0, COMPONENT_SPREAD, (3, 5)))
                + normal(0.0, HEIGHT_SHIFT, (3, 5)),
                angle=morphology.angle * np.exp(normal(0.0, ANGLE_SPREAD, 5)),
                width=morphology.width * np.exp(normal(0.0, WIDTH_SPREAD, 5)),
            ),
            pulse=float(np.clip(normal(*PULSE_MEAN_STD), *PULSE_LIMITS)),
            spread=float(generator.uniform(*PULSE_VARIABILITY)),
            rhythm=int(generator.integers(2**31)),
            turn=np.exp(normal(0.0, SIZE_SPREAD))
            * Rotation.from_euler("xyz", normal(0.0, ROTATION_SPREAD, 3), degrees=True).as_matrix(),
            electrodes=np.exp(normal(0.0, [LIMB_LEAD_SPREAD] * 2 + [CHEST_LEAD_SPREAD] * 6))[:, None],
        )

    def dipole(self, *, beats: int, rate: int) -> Array:
        """(3, samples): the heart's dipole in millivolt over at least `beats` beats, as it lies in this chest."""
        components = [
            dipole_component(waves, pulse=self.pulse, spread=self.spread, beats=beats, rate=rate, seed=self.rhythm)
            for waves in self.morphology.components
        ]
        return self.turn @ np.stack(components)

    def leads(self, dipole: Array) -> Array:
        """(8, samples): I, II, V1 to V6 through this patient's electrodes."""
        return eight_leads(dipole) * self.electrodes


# NeuroKit2 beats the heart's dipole in shapes that are ours, for patients who differ; Dower's matrix makes leads of it
# (heart_model.py). Baseline wander and muscle noise are added, and windows are cut round R waves, as a beat detector
# does. For demonstrations, proxies and tests: no person's data is in it.

CLASSES = tuple(MORPHOLOGIES)
SECONDS_BEFORE_R = 0.38  # seconds of a window that lie before the R wave: room for P
MIN_RATE = 50  # samples per second; NeuroKit2's rhythm may never end at a few
SETTLING_SECONDS = 0.10  # seconds after which the simulation no longer shows where it began


class Recordings(NamedTuple):
    """N windows: `x` (N, 12, samples) in millivolt, `label` (N,) index into `CLASSES`, `patient` (N,)."""

    x: NDArray[np.float32]
    label: NDArray[np.int64]
    patient: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ECGSimulator:
    """Settings of the simulator; `draw` makes recordings.

    samples   of a window, `rate` of them per second
    windows   of each patient, one R wave in each
    mix       how often each class occurs, in any unit; a class that is left out does not occur
    severity  least and most of what a patient has of the class
    muscle    standard deviation of muscle noise, millivolt
    wander    largest amplitude of the wandering baseline, millivolt

    Patient i of a seed is a function of (settings, seed, i) alone: a larger draw begins with the smaller one.
    """

    samples: int = 96
    rate: int = 100
    windows: int = 3
    mix: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 1.0))
    severity: tuple[float, float] = (0.1, 0.8)
    muscle: float = 0.05
    wander: float = 0.10

    def __post_init__(self) -> None:
        if min(self.samples, self.windows) < 1:
            raise LaminaError(
                "data.samples-not-positive",
                f"samples={self.samples}, windows={self.windows}, both must be > 0",
                "for example samples=96, windows=3",
            )
        if self.rate < MIN_RATE:
            raise LaminaError(
                "data.rate-too-low",
                f"rate is {self.rate} samples per second, must be >= {MIN_RATE}: a QRS complex takes 0.1 s",
                "for example rate=100",
            )
        unknown = [name for name in self.mix if name not in CLASSES]
        if unknown or not self.mix:
            raise LaminaError(
                "data.classes-not-known",
                f"classes {unknown or '()'} are not known",
                f"choose from {', '.join(CLASSES)}",
            )
        if min(self.mix.values()) < 0 or not 0 < sum(self.mix.values()) < math.inf:
            raise LaminaError(
                "data.mix-not-valid",
                f"mix is {dict(self.mix)}, must hold finite numbers >= 0, not all 0",
                "for example {'normal': 7, 'block': 3}",
            )
        if not 0 <= self.severity[0] <= self.severity[1] <= 1:
            raise LaminaError(
                "data.severity-not-valid",
                f"severity is {self.severity}, must be 0 <= least <= most <= 1",
                "for example (0.1, 0.8)",
            )

    def draw(self, *, patients: int, seed: int, tick: Callable[[int], None] | None = None) -> Recordings:
        """`windows` beats of each of `patients` patients; rows of one patient are neighbours.

        `tick` hears how many patients are done.
        """
        if patients < 1:
            raise LaminaError("data.patients-not-positive", f"patients={patients}, must be > 0", "ask for one or more")
        x = np.empty((patients, self.windows, len(LEADS), self.samples), dtype=np.float32)
        label = np.empty(patients, dtype=np.int64)
        for i in range(patients):
            label[i], x[i] = self._patient(np.random.default_rng([seed, i]))
            if tick is not None:
                tick(i + 1)
        number = np.repeat(np.arange(patients), self.windows)
        return Recordings(x.reshape(-1, len(LEADS), self.samples), label[number], number)

    def _patient(self, generator: np.random.Generator) -> tuple[int, Array]:
        """The class of a patient, and (windows, 12, samples)."""
        weight = np.array([self.mix.get(name, 0.0) for name in CLASSES])
        label = int(generator.choice(len(CLASSES), p=weight / weight.sum()))
        form = MORPHOLOGIES["normal"].towards(MORPHOLOGIES[CLASSES[label]], generator.uniform(*self.severity))
        patient = Patient.drawn(form, generator)
        dipole, starts = self._beats(patient)
        leads = patient.leads(dipole)
        leads += self._wander(leads.shape[1], generator) + generator.normal(0.0, self.muscle, leads.shape)
        recording = twelve_leads(leads)
        return label, np.stack([recording[:, s : s + self.samples] for s in starts])

    def _beats(self, patient: Patient) -> tuple[Array, list[int]]:
        """The patient's dipole, and where windows round the first R waves begin."""
        before, settled = (round(seconds * self.rate) for seconds in (SECONDS_BEFORE_R, SETTLING_SECONDS))
        after = max(1, math.ceil((self.samples / self.rate - SECONDS_BEFORE_R) * patient.pulse / 60.0))
        for stretch in (1, 2, 4):  # a slow stretch of the rhythm: listen for longer
            dipole = patient.dipole(beats=stretch * (self.windows + after), rate=self.rate)
            size = np.linalg.norm(dipole, axis=0)
            peaks, _ = find_peaks(size, height=0.5 * size.max(), distance=max(1, round(0.4 * self.rate)))
            last = dipole.shape[1] - self.samples
            starts = [int(p) - before for p in peaks if settled <= p - before <= last]
            if len(starts) >= self.windows:
                return dipole, starts[: self.windows]
        raise LaminaError(
            "data.r-waves-missing",
            f"a simulated recording has fewer than {self.windows} R waves that stand out",
            "make R the largest wave of the morphology",
        )

    def _wander(self, samples: int, generator: np.random.Generator) -> Array:
        """(8, samples): slow wander of the baseline, of another size and phase in each lead."""
        t = np.arange(samples) / self.rate
        frequency = generator.uniform(0.15, 0.45)
        phase = generator.random((8, 1))
        size = self.wander * generator.random((8, 1))
        wander: Array = size * np.sin(2 * np.pi * (frequency * t + phase))
        return wander
