"""The heart's electric dipole over a beat, by class of PTB-XL, and the twelve leads that it gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# What beats look like: the waves of the heart's electric dipole, and what each class changes.
#
# Rows are the dipole's components X (to the left), Y (to the feet), Z (to the back); columns the waves P, Q, R, S, the
# ST segment (J) and T. The healthy values are of the size of Frank-lead norms (Draper et al., "The corrected orthogonal
# electrocardiogram and vectorcardiogram in 510 normal men", Circulation 30, 1964): first septal forces to the right and
# front (Q), then the main forces to the left, feet and back (R); T follows R in X and Y and points to the front. The
# other classes are caricatures of what guidelines describe, one to three forms of each, by their name in PTB-XL
# (Wagner et al., "PTB-XL, a large publicly available electrocardiography dataset", Scientific Data 7, 2020):
#
#     MI    infarction. Anterior: the first forces to the front are lost (Q waves in V1 to V4), the ST segment there is
#           raised and runs into T. Inferior: the first forces point to the head (Q waves in II, III, aVF), T turned
#           round there (Thygesen et al., "Fourth universal definition of myocardial infarction", Circulation 138, 2018)
#     STTC  ST and T changes with a healthy QRS: ST depressed and T turned round in lateral leads, or T flat
#           (Rautaharju et al., AHA/ACCF/HRS recommendations part IV, Circulation 119, 2009)
#     CD    conduction disturbance. Left bundle branch: QRS of 120 ms and more, no septal q in I and V6, ST and T against
#           the QRS. Right bundle branch: late broad forces to the right and front. Left anterior fascicle: forces turned
#           to the head (Surawicz et al., part III of the same, 2009)
#     HYP   hypertrophy of the left ventricle: larger forces to the left and back, so that S in V1 and R in V5 together
#           exceed 3.5 mV (Sokolow and Lyon, Am. Heart J. 37, 1949), with or without T turned round in lateral leads,
#           the "strain" pattern (Hancock et al., part V of the same, 2009)
#
# A patient has a class to some degree, the severity s in [0, 1]: healthy + s · (form - healthy). Mild cases look
# healthy. All numbers are ours, made to be told apart neither never nor always; no diagnosis may rest on them.

Array = NDArray[np.float64]
WAVES = ("P", "Q", "R", "S", "J", "T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Morphology:
    """A beat: height (3, 6) in millivolt by component and wave, angle in degrees of a beat from R, width in radians."""

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


ANGLES = (-70.0, -14.0, 0.0, 14.0, 42.0, 100.0)
WIDTHS = (0.25, 0.10, 0.10, 0.10, 0.30, 0.40)


def _morphology(*height: ArrayLike, angle: ArrayLike = ANGLES, width: ArrayLike = WIDTHS) -> Morphology:
    arrays = [np.array(values, dtype=np.float64) for values in (height, angle, width)]
    for array in arrays:
        array.flags.writeable = False
    return Morphology(height=arrays[0], angle=arrays[1], width=arrays[2])


MORPHOLOGIES: dict[str, tuple[Morphology, ...]] = {
    "NORM": (
        _morphology(  # P     Q      R     S     J    T
            [0.06, -0.10, 1.05, -0.12, 0.0, 0.28],
            [0.12, -0.08, 0.85, -0.10, 0.0, 0.22],
            [0.02, -0.25, 0.75, 0.15, 0.0, -0.20],
        ),
    ),
    "MI": (
        _morphology(  # anterior
            [0.06, -0.22, 0.80, -0.08, 0.02, 0.28],
            [0.12, -0.08, 0.80, -0.10, 0.00, 0.18],
            [0.02, 0.20, 0.80, 0.05, -0.14, -0.32],
            angle=(-70.0, -14.0, 0.0, 14.0, 42.0, 88.0),
            width=(0.25, 0.12, 0.10, 0.10, 0.35, 0.48),
        ),
        _morphology(  # inferior
            [0.06, -0.05, 1.00, -0.08, -0.02, 0.26],
            [0.12, -0.50, 0.50, -0.05, 0.06, -0.12],
            [0.02, -0.22, 0.70, 0.10, 0.02, -0.26],
            width=(0.25, 0.14, 0.10, 0.10, 0.32, 0.42),
        ),
    ),
    "STTC": (
        _morphology(  # ST depressed, T turned round
            [0.06, -0.10, 1.05, -0.12, -0.10, -0.14],
            [0.12, -0.08, 0.85, -0.10, -0.06, -0.06],
            [0.02, -0.25, 0.75, 0.15, 0.06, 0.04],
            angle=(-70.0, -14.0, 0.0, 14.0, 45.0, 104.0),
        ),
        _morphology(  # T flat
            [0.06, -0.10, 1.05, -0.12, -0.02, 0.02],
            [0.12, -0.08, 0.85, -0.10, -0.03, 0.02],
            [0.02, -0.25, 0.75, 0.15, 0.02, -0.06],
        ),
    ),
    "CD": (
        _morphology(  # left bundle branch
            [0.06, 0.35, 1.00, 0.45, 0.00, -0.20],
            [0.12, 0.05, 0.75, 0.10, 0.00, 0.10],
            [0.02, 0.25, 0.95, 0.45, -0.05, -0.35],
            angle=(-76.0, -16.0, 0.0, 20.0, 48.0, 105.0),
            width=(0.25, 0.15, 0.16, 0.18, 0.30, 0.45),
        ),
        _morphology(  # right bundle branch
            [0.06, -0.10, 1.00, -0.50, 0.00, 0.24],
            [0.12, -0.08, 0.80, -0.15, 0.00, 0.22],
            [0.02, -0.25, 0.65, -0.45, 0.03, 0.10],
            angle=(-72.0, -14.0, 0.0, 24.0, 50.0, 104.0),
            width=(0.25, 0.10, 0.10, 0.20, 0.30, 0.40),
        ),
        _morphology(  # left anterior fascicle
            [0.06, -0.15, 1.05, 0.10, 0.00, 0.26],
            [0.12, 0.25, -0.35, -0.55, 0.00, 0.22],
            [0.02, -0.15, 0.75, 0.20, 0.00, -0.18],
            angle=(-72.0, -14.0, 0.0, 16.0, 44.0, 100.0),
            width=(0.25, 0.11, 0.11, 0.12, 0.30, 0.40),
        ),
    ),
    "HYP": (
        _morphology(  # with strain
            [0.07, -0.12, 1.75, -0.15, -0.06, -0.10],
            [0.12, -0.08, 0.95, -0.10, 0.00, 0.10],
            [0.04, -0.20, 1.35, 0.25, -0.05, -0.30],
            angle=(-70.0, -15.0, 0.0, 15.0, 44.0, 95.0),
            width=(0.28, 0.10, 0.11, 0.11, 0.30, 0.42),
        ),
        _morphology(  # voltage alone
            [0.07, -0.14, 1.80, -0.20, 0.00, 0.30],
            [0.12, -0.08, 1.00, -0.12, 0.00, 0.22],
            [0.04, -0.30, 1.40, 0.25, 0.00, -0.32],
            angle=(-70.0, -15.0, 0.0, 15.0, 44.0, 100.0),
            width=(0.28, 0.10, 0.11, 0.11, 0.30, 0.42),
        ),
    ),
}


# The dipole over time.
#
# ECGSYN (McSharry, Clifford, Tarassenko and Smith, "A dynamical model for generating synthetic electrocardiogram
# signals", IEEE Trans. Biomed. Eng. 50, 2003) lets a point run round a circle once per beat; waves at angles θ_j push
# it up and down, dz/dt = -Σ_j a_j Δθ_j exp(-Δθ_j²/2b_j²) - (z - z_0). At angular speed ω and without the slow return
# to z_0 that integrates to
#
#     z(θ) = Σ_j A_j exp(-Δθ_j²/2b_j²),     A_j = a_j b_j²/ω,
#
# which Sameni, Clifford, Jutten and Shamsollahi use for the three components of the dipole ("Multichannel ECG and noise
# modeling", EURASIP J. Adv. Signal Process., 2007). As in ECGSYN, width and angle grow with √pulse in units of a beat
# (the angles of P and T with its fourth root), so that in seconds QT shrinks as Bazett's formula has it.

PULSE_POWER = np.array([0.25, 0.5, 0.5, 0.5, 0.5, 0.25])  # of the angle of each wave; of every width 0.5


def dipole(height: Array, angle: Array, width: Array, pulse: Array, phase: Array) -> Array:
    """(N, 3, samples) in millivolt from height (N, 3, 6), angle and width (N, 6), pulse (N,) and phase (N, samples).

    The phase counts beats: an R wave lies at every whole number.
    """
    fast = (pulse / 60.0)[:, None]
    centre, spread = angle / 360.0 * fast**PULSE_POWER, width / (2 * np.pi) * fast**0.5  # in beats
    moving: Array = np.zeros((*height.shape[:2], phase.shape[1]))
    for wave in range(len(WAVES)):
        away = phase - centre[:, wave, None]
        away -= np.rint(away)  # the same wave of the nearest beat
        bump = np.exp(-0.5 * (away / spread[:, wave, None]) ** 2)
        moving += height[:, :, wave, None] * bump[:, None]
    return moving


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
    """(…, 3, samples) -> (…, 8, samples): I, II, V1 to V6."""
    return DOWER @ dipole


def twelve_leads(independent: Array) -> Array:
    """(…, 8, samples) -> (…, 12, samples), in the order of `LEADS`."""
    one, two, chest = independent[..., 0:1, :], independent[..., 1:2, :], independent[..., 2:, :]
    limbs = [one, two, two - one, -(one + two) / 2, one - two / 2, two - one / 2]
    return np.concatenate([*limbs, chest], axis=-2)
