"""The public list of shapes that an exponential mechanism may choose S from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.allocate.problem import Problem
from lamina.allocate.shares import Rows, by_shares, optimal
from lamina.errors import PlanError

Candidates = tuple[tuple[str, tuple[float, ...]], ...]
SLOPE = 4.0
"""How much more of the budget the first layer gets than the last one where noise is shifted along the depth."""


def candidates(problem: Problem, clip: Rows, parts: NDArray[np.float64]) -> Candidates:
    """Six shapes of S for these thresholds, named:

    flat          one S for all
    proportional  equal shares of the budget, S ∝ C
    pareto        least Σ d_l S_l²
    preset        the shares `parts` of the policy itself
    input-heavy   shares fall by 4 from input to output: less noise near the input
    output-heavy  the other way round
    """
    layers = len(problem.sizes)
    slope = SLOPE ** (np.arange(layers) / max(layers - 1, 1))
    rows = {
        "flat": problem.same_noise(),
        "proportional": by_shares(problem, clip, np.ones(layers)),
        "pareto": optimal(problem, clip, np.asarray(problem.sizes, dtype=np.float64)),
        "preset": by_shares(problem, clip, parts),
        "input-heavy": by_shares(problem, clip, 1.0 / slope),
        "output-heavy": by_shares(problem, clip, slope),
    }
    return tuple(rows.items())


def check_candidates(problem: Problem, given: Sequence[tuple[str, Sequence[float]]]) -> Candidates:
    """Shapes of the user's own, one S > 0 for every layer; where no private class reaches they are 0."""
    noised = problem.noised()
    found = []
    for name, row in given:
        if len(row) != len(noised) or any(not 0 < s < math.inf for s in row):
            raise PlanError(
                f"candidate {name!r} is {tuple(row)}", f"give one S > 0 for each of the {len(noised)} layers"
            )
        found.append(
            (name, tuple(float(s) if needed else 0.0 for s, needed in zip(row, noised, strict=True)))
        )
    return tuple(found)
