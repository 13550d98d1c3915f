"""A simulated patient: what makes one heart, and one recording of it, differ from another of its class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from lamina.data.leads import eight
from lamina.data.morphology import Morphology
from lamina.data.neurokit import component

Array = NDArray[np.float64]

# How far patients of one class lie apart (standard deviations; of logarithms where the figure is a factor). Chosen
# by us so that the classes overlap; real populations are of this order (Rijnbeek et al., "Normal values of the
# electrocardiogram for ages 16-90 years", J. Electrocardiol. 47, 2014).
WAVE, COMPONENT = 0.25, 0.20  # factor of each wave's height: in all components, in each
SHIFT = (0.01, 0.07, 0.07, 0.07, 0.06)  # mV, added to each wave's height
ANGLE, WIDTH = 0.06, 0.10  # factors of each wave's angle and width
TURN, SIZE = 14.0, 0.20  # the heart in the chest: degrees about each axis, factor
LIMB, CHEST = 0.05, 0.15  # factor of each lead: where electrodes sit
PULSE, RESTING = (
    (74.0, 9.0),
    (60.0, 100.0),
)  # beats per minute: mean and deviation, cut at the ends of sinus rhythm
SPREAD = (1.0, 3.0)  # beats per minute, from least to most variable


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
                height=morphology.height * np.exp(normal(0.0, WAVE, (1, 5)) + normal(0.0, COMPONENT, (3, 5)))
                + normal(0.0, SHIFT, (3, 5)),
                angle=morphology.angle * np.exp(normal(0.0, ANGLE, 5)),
                width=morphology.width * np.exp(normal(0.0, WIDTH, 5)),
            ),
            pulse=float(np.clip(normal(*PULSE), *RESTING)),
            spread=float(generator.uniform(*SPREAD)),
            rhythm=int(generator.integers(2**31)),
            turn=np.exp(normal(0.0, SIZE))
            * Rotation.from_euler("xyz", normal(0.0, TURN, 3), degrees=True).as_matrix(),
            electrodes=np.exp(normal(0.0, [LIMB] * 2 + [CHEST] * 6))[:, None],
        )

    def dipole(self, *, beats: int, rate: int) -> Array:
        """(3, samples): the heart's dipole in millivolt over at least `beats` beats, as it lies in this chest."""
        components = [
            component(waves, pulse=self.pulse, spread=self.spread, beats=beats, rate=rate, seed=self.rhythm)
            for waves in self.morphology.components
        ]
        return self.turn @ np.stack(components)

    def leads(self, dipole: Array) -> Array:
        """(8, samples): I, II, V1 to V6 through this patient's electrodes."""
        return eight(dipole) * self.electrodes
