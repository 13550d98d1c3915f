"""The heart's electric dipole over a beat, by class, through NeuroKit2's ECGSYN.

And the twelve leads that it gives.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lamina.errors import LaminaError

# What beats look like: the waves of the heart's electric dipole, and what each class changes.
#
# Rows are the dipole's components X (to the left), Y (to the feet), Z (to the back); columns the waves P, Q, R, S, T.
# The healthy values are of the size of Frank-lead norms (Draper et al., "The corrected orthogonal electrocardiogram
# and vectorcardiogram in 510 normal men", Circulation 30, 1964): first septal forces to the right and front (Q), then
# the main forces to the left, feet and back (R); T follows R in X and Y and points to the front. The other classes
# are caricatures of what guidelines describe:
#
#     infarction   anterior: the first forces to the front are lost (Q waves in V1 to V4), the ST segment there is raised
#                  and runs into a broad, early T (Thygesen et al., "Fourth universal definition of myocardial
#                  infarction", Circulation 138, 2018)
#     hypertrophy  of the left ventricle: larger forces to the left and back, so that S in V1 and R in V5 together exceed
#                  3.5 mV (Sokolow and Lyon, Am. Heart J. 37, 1949), and T turned round in lateral leads, the "strain"
#                  pattern (Hancock et al., AHA/ACCF/HRS recommendations part V, Circulation 119, 2009)
#     block        of the left bundle branch: QRS of 120 ms and more, no septal q in I and V6, ST and T against the QRS
#                  (Surawicz et al., AHA/ACCF/HRS recommendations part III, Circulation 119, 2009)
#
# A patient has a class to some degree, the severity s in [0, 1]: healthy + s · (class - healthy). Mild cases look
# healthy. All numbers are ours, made to be told apart neither never nor always; no diagnosis may rest on them.

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """P, Q, R, S, T of one component: height in millivolt, angle in degrees of a beat from R, width in radians."""

    height: Array
    angle: Array
    width: Array

    def turn(self) -> Array:
        """The sum of the waves over one beat, in millivolt: 721 angles from -180° to 180°."""
        theta = np.linspace(-np.pi, np.pi, 721)[:, None]
        bumps = self.height * np.exp(-0.5 * ((theta - np.radians(self.angle)) / self.width) ** 2)
        turn: Array = bumps.sum(axis=1)
        return turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Morphology:
    """The beat of a class: height (3, 5) by component and wave, angle and width (5,) by wave."""

    height: Array
    angle: Array
    width: Array

    def towards(self, other: Morphology, severity: float) -> Morphology:
        """The point `severity` of the way from here to `other`."""
        return Morphology(
            height=self.height + severity * (other.height - self.height),
            angle=self.angle + severity * (other.angle - self.angle),
            width=self.width + severity * (other.width - self.width),
        )

    @property
    def components(self) -> tuple[Waves, ...]:
        """X, Y, Z."""
        return tuple(Waves(height=row, angle=self.angle, width=self.width) for row in self.height)


def _morphology(height: ArrayLike, angle: ArrayLike, width: ArrayLike) -> Morphology:
    arrays = [np.array(values, dtype=np.float64) for values in (height, angle, width)]
    for array in arrays:
        array.flags.writeable = False
    return Morphology(height=arrays[0], angle=arrays[1], width=arrays[2])


MORPHOLOGIES: dict[str, Morphology] = {
    "normal": _morphology(
        [  # P     Q      R     S     T
            [0.06, -0.10, 1.05, -0.12, 0.28],
            [0.12, -0.08, 0.85, -0.10, 0.22],
            [0.02, -0.25, 0.75, 0.15, -0.20],
        ],
        [-70.0, -14.0, 0.0, 14.0, 100.0],
        [0.25, 0.10, 0.10, 0.10, 0.40],
    ),
    "infarction": _morphology(
        [[0.06, -0.22, 0.80, -0.08, 0.30], [0.12, -0.08, 0.80, -0.10, 0.18], [0.02, 0.20, 0.80, 0.05, -0.38]],
        [-70.0, -14.0, 0.0, 14.0, 84.0],
        [0.25, 0.12, 0.10, 0.10, 0.55],
    ),
    "hypertrophy": _morphology(
        [[0.07, -0.12, 1.75, -0.15, -0.10], [0.12, -0.08, 0.95, -0.10, 0.10], [0.04, -0.20, 1.35, 0.25, -0.30]],
        [-70.0, -15.0, 0.0, 15.0, 95.0],
        [0.28, 0.10, 0.11, 0.11, 0.42],
    ),
    "block": _morphology(
        [[0.06, 0.35, 1.00, 0.45, -0.20], [0.12, 0.05, 0.75, 0.10, 0.10], [0.02, 0.25, 0.95, 0.45, -0.35]],
        [-76.0, -16.0, 0.0, 20.0, 105.0],
        [0.25, 0.15, 0.16, 0.18, 0.45],
    ),
}


# One component of the heart's electric dipole, by NeuroKit2's implementation of ECGSYN.
#
# ECGSYN (McSharry, Clifford, Tarassenko and Smith, "A dynamical model for generating synthetic electrocardiogram
# signals", IEEE Trans. Biomed. Eng. 50, 2003) lets a point run round a circle once per beat. Five waves j = P, Q, R,
# S, T at angles θ_j push it up and down,
#
#     dz/dt = - Σ_j a_j Δθ_j exp(-Δθ_j² / 2b_j²) - (z - z_0),
#
# and the time of each turn comes from a rhythm with respiratory and slow modulation. At angular speed ω, wave j reaches
# the height a_j b_j²/ω. NeuroKit2 (Makowski et al., Behav. Res. Methods 53, 2021) widens the waves with the heart rate
# so that the rate cancels: a wave of height A needs a_j = 2πA/b_j².
#
# NeuroKit2's own twelve leads take a second each, have one fixed mixture of waves, and are all stretched to 1.6 mV,
# which hides what voltage tells. So it is asked for the three components of the dipole, and each gets back the height
# that its waves say; `twelve_leads` makes leads of them.

NEUROKIT_RANGE = 1.6  # mV, the range to which NeuroKit2 stretches every signal
ECGSYN_START = 0.04  # where ECGSYN starts, on top of an R wave


def dipole_component(waves: Waves, *, pulse: float, spread: float, beats: int, rate: int, seed: int) -> Array:
    """At least `beats` beats of one component in millivolt, the isoelectric line at 0. The first sample is an R wave.

    pulse, spread  beats per minute, mean and standard deviation
    rate           samples per second
    seed           of the rhythm: components with equal pulse, spread, beats and seed beat together
    """
    turn = waves.turn()
    # Waves of the size that the starting point was made for; from another one it takes seconds to settle.
    scale = ECGSYN_START / float(turn[len(turn) // 2])
    package = import_neurokit()
    with _warnings_ignored():
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
    signal = stretched * (math.copysign(np.ptp(turn), scale) / NEUROKIT_RANGE)
    centred: Array = signal - np.median(signal)
    return centred


@cache
def import_neurokit() -> ModuleType:
    """The package, loaded when a signal is first asked for: it brings pandas, scikit-learn and matplotlib."""
    try:
        with _warnings_ignored():
            return importlib.import_module("neurokit2")
    except ImportError as error:
        raise LaminaError(
            "data.neurokit-missing",
            f"simulated ECG needs neurokit2, which cannot be imported: {error}",
            "pip install lamina[demo]",
        ) from None


@contextmanager
def _warnings_ignored() -> Iterator[None]:
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


# The twelve leads, from the heart's electric dipole.
#
# The dipole's three components (X to the left, Y to the feet, Z to the back, as Frank's leads measure them) give eight
# leads by the matrix of Dower, Machado and Osborne, "On deriving the electrocardiogram from vectorcardiographic leads"
# (Clin. Cardiol. 3, 1980). The other four follow from I and II by Einthoven's and Goldberger's relations:
#
#     III = II - I      aVR = -(I + II)/2      aVL = I - II/2      aVF = II - I/2

LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")

DOWER: Array = np.array(
    [  # X       Y       Z
        [0.632, -0.235, 0.059],  # I
        [0.235, 1.066, -0.132],  # II
        [-0.515, 0.157, -0.917],  # V1
        [0.044, 0.164, -1.387],  # V2
        [0.882, 0.098, -1.277],  # V3
        [1.213, 0.127, -0.601],  # V4
        [1.125, 0.127, -0.086],  # V5
        [0.831, 0.076, 0.230],  # V6
    ]
)
DOWER.flags.writeable = False


def eight_leads(dipole: Array) -> Array:
    """(3, samples) -> (8, samples): I, II, V1 to V6."""
    return DOWER @ dipole


def twelve_leads(independent: Array) -> Array:
    """(8, samples) -> (12, samples), in the order of `LEADS`."""
    one, two, chest = independent[0:1], independent[1:2], independent[2:]
    limbs = [one, two, two - one, -(one + two) / 2, one - two / 2, two - one / 2]
    return np.concatenate([*limbs, chest])
