"""What beats look like: timing, width and amplitude of the waves, and what each class changes.

Columns are the waves P, Q, R, S, J (the ST segment) and T; rows are the leads I, II, V1, …, V6. The classes are
caricatures of what textbooks describe, so that a model has something to learn: hypertrophy by the voltage criterion
of Sokolow and Lyon (S in V1 + R in V5 above 3.5 mV), an anterior infarction by Q waves and a raised ST segment in V1
to V4, a bundle branch block by a QRS complex wider than 120 ms with inverted T waves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#               P       Q       R      S      J     T
DELAY = (-0.170, -0.032, 0.000, 0.032, 0.120, 0.270)  # seconds from the R wave
WIDTH = (0.024, 0.009, 0.011, 0.010, 0.040, 0.052)  # seconds, standard deviation

AMPLITUDE: Array = np.array(
    [  # P      Q      R      S      J     T     millivolt
        [0.09, -0.06, 0.60, -0.12, 0.00, 0.22],  # I
        [0.15, -0.08, 1.00, -0.20, 0.01, 0.32],  # II
        [0.06, 0.00, 0.20, -0.90, 0.03, 0.06],  # V1
        [0.08, 0.00, 0.45, -1.30, 0.06, 0.45],  # V2
        [0.08, -0.02, 0.80, -0.90, 0.05, 0.45],  # V3
        [0.08, -0.06, 1.35, -0.60, 0.03, 0.42],  # V4
        [0.08, -0.10, 1.30, -0.30, 0.01, 0.35],  # V5
        [0.08, -0.10, 1.05, -0.15, 0.00, 0.28],  # V6
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Morphology:
    """A class: amplitudes become AMPLITUDE · scale + shift, and the QRS complex `widen` times as wide."""

    scale: Array
    shift: Array
    widen: float = 1.0


def _morphology(
    *,
    scale: dict[tuple[str, str], float] | None = None,
    shift: dict[tuple[str, str], float] | None = None,
    widen: float = 1.0,
) -> Morphology:
    factors, terms = np.ones_like(AMPLITUDE), np.zeros_like(AMPLITUDE)
    for table, changes in ((factors, scale or {}), (terms, shift or {})):
        for (leads, waves), value in changes.items():
            rows = [_ROWS.index(lead) for lead in leads.split()]
            columns = [_WAVES.index(wave) for wave in waves]
            table[np.ix_(rows, columns)] = value
    factors.flags.writeable = terms.flags.writeable = False
    return Morphology(scale=factors, shift=terms, widen=widen)


_ROWS = ("I", "II", "V1", "V2", "V3", "V4", "V5", "V6")
_WAVES = "PQRSJT"

MORPHOLOGIES: dict[str, Morphology] = {
    "normal": _morphology(),
    "hypertrophy": _morphology(
        scale={("V5 V6", "R"): 1.9, ("V1 V2", "S"): 1.8, ("I", "R"): 1.5, ("V5 V6", "T"): 0.2}
    ),
    "infarction": _morphology(
        scale={("V1 V2 V3", "R"): 0.25},
        shift={("V1 V2 V3 V4", "Q"): -0.25, ("V1 V2 V3 V4", "J"): 0.25},
    ),
    "block": _morphology(scale={("I V5 V6", "T"): -0.8, ("V1 V2", "R"): 0.4}, widen=2.2),
}
AMPLITUDE.flags.writeable = False
