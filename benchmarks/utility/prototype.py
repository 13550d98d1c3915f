"""What a prototype of this project saw (docs/theory.md): to beat or to refute.

Its networks, preprocessing and splits were not kept, so only differences to its own `flat` can be compared. Units are
those of the table: accuracy in %, AUC, and for the autoencoder NMSE as a factor of flat's.
"""

from __future__ import annotations

LIKE = {
    "uniform": "uniform box, one S",
    "pareto-n-box": "box, kkt",
    "pareto-n": "joint, kkt",
    "lsab": "LSAB box, kkt",
    "automatic": "automatic",
}
"""Our policies, and what the prototype called them."""

SPREAD = {"mnist": 0.17, "ptbxl3": 0.005, "ptbxl8": 0.005, "autoencoder": 0.0}
"""Standard deviation of its `flat` over seeds (not kept for the autoencoder): what is within it was no difference."""

NAMES = ("flat", "uniform", "pareto-n-box", "pareto-n", "lsab", "automatic")
SEEN = {
    "mnist": dict(zip(NAMES, (93.20, 92.64, 93.11, 93.37, 93.19, 93.25), strict=True)),
    "ptbxl3": dict(zip(NAMES, (0.839, 0.825, 0.825, 0.843, 0.832, 0.834), strict=True)),
    "ptbxl8": dict(zip(NAMES, (0.858, 0.821, 0.817, 0.862, 0.847, 0.841), strict=True)),
    "autoencoder": {"flat": 0.0353, "pareto-n-box": 0.0369, "pareto-n": 0.0346, "lsab": 0.0379},
}
