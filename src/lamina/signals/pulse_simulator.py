"""Simulated bedside monitors: ECG lead II, arterial blood pressure and photoplethysmogram of one heart, from one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lamina.errors import LaminaError
from lamina.signals.ecg_simulator import (
    BLOCK,
    HeartPatients,
    Recordings,
    beat_phase,
    heart_beats,
    in_blocks,
    wandering_baseline,
)
from lamina.signals.heart_model import MORPHOLOGIES

# A pulse wave is the sum of a systolic wave and waves that come back from the body, each a Gaussian over the beat: three
# for pressure, two for light (Tang, Chen, Ward, Elgendi, "Synthetic photoplethysmogram generation using two Gaussian
# functions", Scientific Reports 10, 2020; Liu, Zheng, Murray, "Modeling carotid and radial artery pulse pressure
# waveforms by curve fitting with Gaussian functions", Biomed. Signal Process. Control 8, 2013). It leaves the heart
# with the R wave and arrives a transit time later, of which more pressure makes less (Mukkamala et al., "Toward ubiquitous
# blood pressure monitoring via pulse transit time", IEEE Trans. Biomed. Eng. 62, 2015). Breathing moves its height.
# Pressures are of the size of the classes of the ESC/ESH guidelines (Williams et al., Eur. Heart J. 39, 2018), and below
# 65 mmHg of mean pressure for the third, where intensive care treats (Evans et al., Surviving Sepsis, 2021). All other
# numbers are ours.

Array = NDArray[np.float64]
CHANNELS = ("II", "ABP", "PPG")
PRESSURES = {"normal": (118.0, 70.0), "hypertension": (160.0, 92.0), "hypotension": (82.0, 48.0)}  # systolic, diastolic
ABP_WAVES = np.array([[0.14, 0.055, 1.0], [0.27, 0.09, 0.55], [0.47, 0.11, 0.34]])  # place and width in beats, height
PPG_WAVES = np.array([[0.20, 0.085, 1.0], [0.48, 0.13, 0.42]])
TRANSIT = {"ABP": 0.16, "PPG": 0.24}  # seconds at 93 mmHg, to the radial artery and to the finger


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseSimulator:
    """Settings of the simulator; `records` makes recordings.

    rate      samples per second of all channels
    seconds   of a recording
    mix       how often each class of blood pressure occurs, in any unit
    noise     standard deviation of the noise, as a part of the height of each signal

    Patient i of a seed is a function of (settings, seed, i) alone. Labels are indices into `PRESSURES`.
    """

    rate: float = 125.0
    seconds: float = 30.0
    mix: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PRESSURES, 1.0))
    noise: float = 0.02

    def __post_init__(self) -> None:
        if not (self.rate >= 50 and 0 < self.seconds <= 3600 and self.noise >= 0):
            problem = f"rate={self.rate}, seconds={self.seconds}, noise={self.noise}"
            raise LaminaError("data.pulse-settings", problem, "use rate >= 50, 0 < seconds <= 3600 and noise >= 0")
        unknown = [name for name in self.mix if name not in PRESSURES]
        if unknown or not self.mix or min(self.mix.values()) < 0 or not 0 < sum(self.mix.values()) < np.inf:
            problem = f"mix is {dict(self.mix)}: finite numbers >= 0, not all 0"
            raise LaminaError("data.mix-not-valid", problem, f"of {', '.join(PRESSURES)}")

    def records(self, *, patients: int, seed: int) -> Recordings:
        """(patients, 3, samples): II in millivolt, ABP in mmHg, PPG from about 0 to 1."""
        drawn = [(wanted, *self._block(generator)) for wanted, generator in in_blocks(patients, seed)]
        x = np.concatenate([signal[:wanted] for wanted, _, signal in drawn])
        label = np.concatenate([kinds[:wanted] for wanted, kinds, _ in drawn])
        return Recordings(x, label, np.arange(patients))

    def _block(self, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        weight = np.array([self.mix.get(name, 0.0) for name in PRESSURES])
        label = generator.choice(len(PRESSURES), size=BLOCK, p=weight / weight.sum())
        heart = HeartPatients.drawn([MORPHOLOGIES["NORM"][0]] * BLOCK, generator)
        beats = heart_beats(generator, heart.pulse, heart.spread, seconds=self.seconds)
        times = np.arange(round(self.seconds * self.rate)) / self.rate
        usual = np.array([*PRESSURES.values()])[label]
        low = usual[:, 1] * np.exp(generator.normal(0.0, 0.07, BLOCK))
        high = low + (usual[:, 0] - usual[:, 1]) * np.exp(generator.normal(0.0, 0.15, BLOCK))
        breath = 0.06 * np.sin(
            2 * np.pi * (generator.uniform(0.2, 0.33, (BLOCK, 1)) * times + generator.random((BLOCK, 1)))
        )
        faster = np.sqrt((2 * low + high) / 3 / 93.0)
        waves = {}
        for name, shape in (("ABP", ABP_WAVES), ("PPG", PPG_WAVES)):
            delay = TRANSIT[name] / faster * np.exp(generator.normal(0.0, 0.08, BLOCK))
            phase = beat_phase(beats + delay[:, None], times)
            own = shape * np.exp(generator.normal(0.0, [0.04, 0.08, 0.15], (BLOCK, *shape.shape)))
            waves[name] = _pulse_wave(phase, own) * (1.0 + breath)
        mixed = np.stack([
            heart.leads(beat_phase(beats, times))[:, 1] + wandering_baseline(generator, times, 0.1, (BLOCK, 1))[:, 0],
            low[:, None] + (high - low)[:, None] * waves["ABP"],
            waves["PPG"] + wandering_baseline(generator, times, 0.1, (BLOCK, 1))[:, 0],
        ], axis=1)  # fmt: skip
        height = np.stack([np.ones(BLOCK), high - low, np.ones(BLOCK)], axis=1)[:, :, None]
        mixed += self.noise * height * generator.standard_normal(mixed.shape, dtype=np.float32)
        return label, mixed.astype(np.float32)


def _pulse_wave(phase: Array, waves: Array) -> Array:
    """(N, samples): from 0 at the foot to 1 at the top of the beat; waves (N, n, 3) are place, width and height."""
    grid = np.linspace(0.0, 1.0, 201)[None].repeat(len(phase), 0)
    shapes = []
    for at in (phase, grid):
        away = at[:, None] - waves[:, :, :1]
        away -= np.rint(away)
        shapes.append((waves[:, :, 2:] * np.exp(-0.5 * (away / waves[:, :, 1:2]) ** 2)).sum(1))
    least, most = shapes[1].min(1, keepdims=True), shapes[1].max(1, keepdims=True)
    made: Array = (shapes[0] - least) / (most - least)
    return made
