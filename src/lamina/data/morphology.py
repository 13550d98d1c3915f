"""What beats look like: the waves of the heart's electric dipole, and what each class changes.

Rows are the dipole's components X (to the left), Y (to the feet), Z (to the back); columns the waves P, Q, R, S, T. The
healthy values are of the size of Frank-lead norms (Draper et al., "The corrected orthogonal electrocardiogram and
vectorcardiogram in 510 normal men", Circulation 30, 1964): first septal forces to the right and front (Q), then the
main forces to the left, feet and back (R); T follows R in X and Y and points to the front. The other classes are
caricatures of what guidelines describe:

    infarction   anterior: the first forces to the front are lost (Q waves in V1 to V4), the ST segment there is raised
                 and runs into a broad, early T (Thygesen et al., "Fourth universal definition of myocardial
                 infarction", Circulation 138, 2018)
    hypertrophy  of the left ventricle: larger forces to the left and back, so that S in V1 and R in V5 together exceed
                 3.5 mV (Sokolow and Lyon, Am. Heart J. 37, 1949), and T turned round in lateral leads, the "strain"
                 pattern (Hancock et al., AHA/ACCF/HRS recommendations part V, Circulation 119, 2009)
    block        of the left bundle branch: QRS of 120 ms and more, no septal q in I and V6, ST and T against the QRS
                 (Surawicz et al., AHA/ACCF/HRS recommendations part III, Circulation 119, 2009)

A patient has a class to some degree, the severity s in [0, 1]: healthy + s · (class - healthy). Mild cases look
healthy. All numbers are ours, made to be told apart neither never nor always; no diagnosis may rest on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


def _table(height: ArrayLike, angle: ArrayLike, width: ArrayLike) -> Morphology:
    arrays = [np.array(values, dtype=np.float64) for values in (height, angle, width)]
    for array in arrays:
        array.flags.writeable = False
    return Morphology(height=arrays[0], angle=arrays[1], width=arrays[2])


MORPHOLOGIES: dict[str, Morphology] = {
    "normal": _table(
        [  # P     Q      R     S     T
            [0.06, -0.10, 1.05, -0.12, 0.28],
            [0.12, -0.08, 0.85, -0.10, 0.22],
            [0.02, -0.25, 0.75, 0.15, -0.20],
        ],
        [-70.0, -14.0, 0.0, 14.0, 100.0],
        [0.25, 0.10, 0.10, 0.10, 0.40],
    ),
    "infarction": _table(
        [
            [0.06, -0.22, 0.80, -0.08, 0.30],
            [0.12, -0.08, 0.80, -0.10, 0.18],
            [0.02, 0.20, 0.80, 0.05, -0.38],
        ],
        [-70.0, -14.0, 0.0, 14.0, 84.0],
        [0.25, 0.12, 0.10, 0.10, 0.55],
    ),
    "hypertrophy": _table(
        [
            [0.07, -0.12, 1.75, -0.15, -0.10],
            [0.12, -0.08, 0.95, -0.10, 0.10],
            [0.04, -0.20, 1.35, 0.25, -0.30],
        ],
        [-70.0, -15.0, 0.0, 15.0, 95.0],
        [0.28, 0.10, 0.11, 0.11, 0.42],
    ),
    "block": _table(
        [
            [0.06, 0.35, 1.00, 0.45, -0.20],
            [0.12, 0.05, 0.75, 0.10, 0.10],
            [0.02, 0.25, 0.95, 0.45, -0.35],
        ],
        [-76.0, -16.0, 0.0, 20.0, 105.0],
        [0.25, 0.15, 0.16, 0.18, 0.45],
    ),
}
