"""The twelve leads, from the heart's electric dipole.

The dipole's three components (X to the left, Y to the feet, Z to the back, as Frank's leads measure them) give eight
leads by the matrix of Dower, Machado and Osborne, "On deriving the electrocardiogram from vectorcardiographic leads"
(Clin. Cardiol. 3, 1980). The other four follow from I and II by Einthoven's and Goldberger's relations:

    III = II - I      aVR = -(I + II)/2      aVL = I - II/2      aVF = II - I/2
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

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


def eight(dipole: Array) -> Array:
    """(3, samples) -> (8, samples): I, II, V1 to V6."""
    return DOWER @ dipole


def twelve(independent: Array) -> Array:
    """(8, samples) -> (12, samples), in the order of `LEADS`."""
    one, two, chest = independent[0:1], independent[1:2], independent[2:]
    limbs = [one, two, two - one, -(one + two) / 2, one - two / 2, two - one / 2]
    return np.concatenate([*limbs, chest])
