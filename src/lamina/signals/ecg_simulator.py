"""Simulated 12-lead ECG: patients of the five classes of PTB-XL, windows round beats or whole records, from one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from lamina.errors import LaminaError
from lamina.signals.heart_model import DOWER, MORPHOLOGIES, WAVES, Morphology, dipole, twelve_leads

Array = NDArray[np.float64]

# How far patients of one class lie apart (standard deviations; of logarithms where the figure is a factor). Chosen
# by us so that the classes overlap; real populations are of this order (Rijnbeek et al., "Normal values of the
# electrocardiogram for ages 16-90 years", J. Electrocardiol. 47, 2014).
WAVE_SPREAD, COMPONENT_SPREAD = 0.25, 0.20  # factor of each wave's height: in all components, in each
HEIGHT_SHIFT = (0.01, 0.07, 0.07, 0.07, 0.02, 0.06)  # mV, added to each wave's height
ANGLE_SPREAD, WIDTH_SPREAD = 0.06, 0.10  # factors of each wave's angle and width
ROTATION_SPREAD, SIZE_SPREAD = 14.0, 0.20  # the heart in the chest: degrees about each axis, factor
LEAD_SPREAD = np.array([0.05] * 2 + [0.15] * 6)  # factor of each lead, limbs and chest: where electrodes sit
PULSE_MEAN_STD, PULSE_LIMITS = (74.0, 9.0), (60.0, 100.0)  # beats per minute, cut at the ends of sinus rhythm
PULSE_VARIABILITY = (1.0, 3.0)  # beats per minute, from least to most variable

CLASSES = tuple(MORPHOLOGIES)
SECONDS_BEFORE_R = 0.38  # seconds of a window that lie before the R wave: room for P
MIN_RATE = 50  # samples per second
BLOCK = 64  # patients that are drawn together, always all of them: what patient i is depends on no one's number


class Recordings(NamedTuple):
    """N signals: `x` (N, channels, samples), `label` (N,) the index of a class, `patient` (N,)."""

    x: NDArray[np.float32]
    label: NDArray[np.int64]
    patient: NDArray[np.int64]


def heart_beats(generator: np.random.Generator, pulse: Array, spread: Array, *, seconds: float) -> Array:
    """(N, beats): the times of R waves in seconds, from before -1 to after `seconds` + 1.

    The time between beats varies about 60/pulse in two bands: with blood pressure at 0.1 Hz and with breathing at
    0.25 Hz, the second of twice the power (McSharry et al. 2003). `pulse` and `spread` are in beats per minute.
    """
    mean = 60.0 / pulse
    beats = math.ceil((seconds + 3.0) / (0.7 * mean.min())) + 2
    frequency = generator.normal([0.1, 0.1, 0.25, 0.25, 0.25, 0.25], 0.01, (len(pulse), 6))
    turns = frequency[:, None] * (np.arange(beats) * mean[:, None])[:, :, None] + generator.random((len(pulse), 1, 6))
    waves = np.sin(2 * np.pi * turns).sum(2) / math.sqrt(3.0)  # variance 1
    gaps = mean[:, None] * np.clip(1.0 + (spread / pulse)[:, None] * waves, 0.7, 1.5)
    first = -1.5 * mean - mean * generator.random(len(pulse))
    times: Array = first[:, None] + np.cumsum(gaps, axis=1) - gaps[:, :1]
    return times


def beat_phase(beats: Array, times: Array) -> Array:
    """(N, samples): how many beats have passed at each of `times` (samples,), whole at R waves."""
    number = np.arange(beats.shape[1], dtype=np.float64)
    return np.stack([np.interp(times, row, number) for row in beats])


def draw_pulse(generator: np.random.Generator, patients: int) -> tuple[Array, Array]:
    """Pulse and its variability of each patient, beats per minute."""
    pulse: Array = np.clip(generator.normal(*PULSE_MEAN_STD, patients), *PULSE_LIMITS)
    return pulse, generator.uniform(*PULSE_VARIABILITY, patients)


def wandering_baseline(generator: np.random.Generator, times: Array, size: float, shape: tuple[int, int]) -> Array:
    """(*shape, samples): slow sinusoids, one frequency per patient, another size and phase in each channel."""
    turns = 2 * np.pi * generator.uniform(0.15, 0.45, (shape[0], 1, 1)) * times
    phase, amplitude = 2 * np.pi * generator.random((*shape, 1)), size * generator.random((*shape, 1))
    slow: Array = amplitude * (np.cos(phase) * np.sin(turns) + np.sin(phase) * np.cos(turns))
    return slow


def in_blocks(patients: int, seed: int) -> Iterator[tuple[int, np.random.Generator]]:
    """How many patients of each block are wanted, and the generator of the block."""
    if patients < 1:
        raise LaminaError("data.patients-not-positive", f"patients={patients}, must be > 0", "ask for one or more")
    for number, first in enumerate(range(0, patients, BLOCK)):
        yield min(BLOCK, patients - first), np.random.default_rng([seed, number])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartPatients:
    """What stays of each of N patients: beats (`Morphology` with a first axis), chest and electrodes, pulse."""

    form: Morphology
    body: Array  # (N, 8, 3): from the dipole to the eight independent leads
    pulse: Array
    spread: Array

    @classmethod
    def drawn(cls, forms: list[Morphology], generator: np.random.Generator) -> HeartPatients:
        """Patients of these forms, give or take what patients differ in."""
        n, normal = len(forms), generator.normal
        height = np.stack([form.height for form in forms])
        factor = np.exp(normal(0.0, WAVE_SPREAD, (n, 1, len(WAVES))) + normal(0.0, COMPONENT_SPREAD, height.shape))
        turn = Rotation.from_euler("xyz", normal(0.0, ROTATION_SPREAD, (n, 3)), degrees=True).as_matrix()
        size = np.exp(normal(0.0, SIZE_SPREAD, (n, 1, 1)))
        electrodes = np.exp(normal(0.0, LEAD_SPREAD, (n, 8)))[:, :, None]
        pulse, spread = draw_pulse(generator, n)
        return cls(
            form=Morphology(
                height=height * factor + normal(0.0, HEIGHT_SHIFT, height.shape),
                angle=np.stack([form.angle for form in forms]) * np.exp(normal(0.0, ANGLE_SPREAD, (n, len(WAVES)))),
                width=np.stack([form.width for form in forms]) * np.exp(normal(0.0, WIDTH_SPREAD, (n, len(WAVES)))),
            ),
            body=electrodes * (DOWER @ (size * turn)),
            pulse=pulse,
            spread=spread,
        )

    def leads(self, phase: Array) -> Array:
        """(N, 8, samples) in millivolt: I, II, V1 to V6 at these phases of the beat (N, samples)."""
        found: Array = self.body @ dipole(self.form.height, self.form.angle, self.form.width, self.pulse, phase)
        return found


# Gaussian waves beat the heart's dipole in shapes that are ours, for patients who differ; Dower's matrix makes leads of
# it (heart_model.py). Baseline wander and muscle noise are added, and windows are cut round R waves, as a beat detector
# does. For demonstrations, proxies and tests: no person's data is in it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ECGSimulator:
    """Settings of the simulator; `draw` makes windows round beats, `records` whole recordings.

    samples   of a window, `rate` of them per second
    windows   of each patient, one R wave in each at the same place
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
            problem = f"samples={self.samples}, windows={self.windows}, both must be > 0"
            raise LaminaError("data.samples-not-positive", problem, "for example samples=96, windows=3")
        if self.rate < MIN_RATE:
            problem = f"rate is {self.rate} samples per second, must be >= {MIN_RATE}: a QRS complex takes 0.1 s"
            raise LaminaError("data.rate-too-low", problem, "for example rate=100")
        unknown = [name for name in self.mix if name not in CLASSES]
        if unknown or not self.mix:
            problem = f"classes {unknown or '()'} are not known"
            raise LaminaError("data.classes-not-known", problem, f"choose from {', '.join(CLASSES)}")
        if min(self.mix.values()) < 0 or not 0 < sum(self.mix.values()) < math.inf:
            problem = f"mix is {dict(self.mix)}, must hold finite numbers >= 0, not all 0"
            raise LaminaError("data.mix-not-valid", problem, "for example {'NORM': 7, 'CD': 3}")
        if not 0 <= self.severity[0] <= self.severity[1] <= 1:
            problem = f"severity is {self.severity}, must be 0 <= least <= most <= 1"
            raise LaminaError("data.severity-not-valid", problem, "for example (0.1, 0.8)")

    def draw(self, *, patients: int, seed: int, tick: Callable[[int], None] | None = None) -> Recordings:
        """`windows` beats of each of `patients` patients in millivolt; rows of one patient are neighbours.

        `tick` hears how many patients are done.
        """
        lead = SECONDS_BEFORE_R + 60.0 / PULSE_LIMITS[0]
        seconds = lead + 1.5 * self.windows * 60.0 / PULSE_LIMITS[0] + self.samples / self.rate
        before, window = round(SECONDS_BEFORE_R * self.rate), np.arange(self.samples)

        def cut(signal: NDArray[np.float32], beats: Array) -> NDArray[np.float32]:
            """The first `windows` R waves that have room before them."""
            first = (beats < SECONDS_BEFORE_R).sum(1)
            chosen = np.take_along_axis(beats, first[:, None] + np.arange(self.windows), axis=1)
            starts = np.rint(chosen * self.rate).astype(np.int64) - before
            at = np.maximum(starts[:, :, None] + window, 0)[:, :, None, :]
            return np.take_along_axis(signal[:, None], at, axis=3)

        return self._cut(patients, seed, seconds, self.windows, cut, tick)

    def records(
        self, *, patients: int, seed: int, seconds: float = 10.0, tick: Callable[[int], None] | None = None
    ) -> Recordings:
        """One recording of each patient in millivolt, (patients, 12, seconds · rate), as PTB-XL has them."""
        if not 0 < seconds <= 3600:
            problem = f"seconds={seconds}, must be > 0 and <= 3600"
            raise LaminaError("data.seconds-not-valid", problem, "for example seconds=10")
        return self._cut(patients, seed, seconds, 1, lambda signal, beats: signal[:, None], tick)

    def _cut(
        self, patients: int, seed: int, seconds: float, windows: int,
        cut: Callable[[NDArray[np.float32], Array], NDArray[np.float32]], tick: Callable[[int], None] | None,
    ) -> Recordings:  # fmt: skip
        parts: list[NDArray[np.float32]] = []
        labels: list[NDArray[np.int64]] = []
        for wanted, generator in in_blocks(patients, seed):
            label, signal, beats = self._block(generator, seconds)
            parts.append(cut(signal[:wanted], beats[:wanted]))
            labels.append(label[:wanted])
            if tick is not None:
                tick(sum(map(len, labels)))
        number = np.repeat(np.arange(patients), windows)
        x = np.concatenate(parts).reshape(-1, *parts[0].shape[2:])
        return Recordings(x, np.concatenate(labels)[number], number)

    def _block(
        self, generator: np.random.Generator, seconds: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], Array]:
        """A block of patients: classes (N,), recordings (N, 12, samples), times of R waves (N, beats)."""
        weight = np.array([self.mix.get(name, 0.0) for name in CLASSES])
        label = generator.choice(len(CLASSES), size=BLOCK, p=weight / weight.sum())
        severity, which = generator.uniform(*self.severity, BLOCK), generator.random(BLOCK)
        healthy, forms = MORPHOLOGIES["NORM"][0], [MORPHOLOGIES[CLASSES[k]] for k in label]
        mixed = [healthy.towards(f[int(w * len(f))], s) for f, w, s in zip(forms, which, severity, strict=True)]
        people = HeartPatients.drawn(mixed, generator)
        beats = heart_beats(generator, people.pulse, people.spread, seconds=seconds)
        times = np.arange(round(seconds * self.rate)) / self.rate
        leads = people.leads(beat_phase(beats, times))
        leads += wandering_baseline(generator, times, self.wander, (BLOCK, 8))
        noise = generator.standard_normal(leads.shape, dtype=np.float32)
        return label, twelve_leads(leads + self.muscle * noise).astype(np.float32), beats
