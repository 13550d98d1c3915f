"""The public list of shapes that an exponential mechanism may choose S from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.allocate.choice import offered
from lamina.allocate.problem import Problem
from lamina.allocate.shares import Rows, by_shares, optimal
from lamina.errors import PlanError
from lamina.plan import Choose, Clipping, effective_sigma
from lamina.plan.limits import LEAST, MOST, shown

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


def named_rows(policy: str, given: Any) -> Candidates:
    """Shapes of the user's own as (name, row) pairs; refused where they are anything else."""
    remedy = "give pairs of a name and a row with one S for each layer: (('flat', (1.0, 1.0)), …)"
    if not isinstance(given, tuple | list) or not given:
        raise PlanError("allocate.candidates", f"candidates of {policy} is {shown(given)}", remedy)
    found = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PlanError("allocate.candidate", f"a candidate of {policy} is {shown(pair)}", remedy)
        name, row = pair
        if not isinstance(name, str) or not name or not isinstance(row, tuple | list):
            raise PlanError("allocate.candidate", f"a candidate of {policy} is {shown(pair)}", remedy)
        for s in row:
            if not isinstance(s, int | float) or isinstance(s, bool) or not LEAST <= s <= MOST:
                raise PlanError(
                    "allocate.candidate-lie",
                    f"candidate {name!r} has S = {shown(s)}, must lie in [{LEAST:g}, {MOST:g}]",
                    "scale the row: only its shape matters",
                )
        found.append((name, tuple(float(s) for s in row)))
    return tuple(found)


def check_candidates(problem: Problem, given: Candidates) -> Candidates:
    """Shapes of the user's own, one S > 0 for every layer; where no private class reaches they are 0."""
    noised = problem.noised()
    found = []
    for name, row in given:
        if len(row) != len(noised):
            raise PlanError(
                "allocate.candidate-give",
                f"candidate {name!r} is {shown(row)}",
                f"give one S > 0 for each of the {len(noised)} layers",
            )
        found.append((name, tuple(s if needed else 0.0 for s, needed in zip(row, noised, strict=True))))
    return tuple(found)


def check_offers(problem: Problem, rule: Choose, clip: Rows, noise: Sequence[float], form: Clipping) -> None:
    """Refuse a candidate that a step could not take if it were drawn: it would be paid for and have no effect."""
    owed = [k in problem.private for k in range(len(clip))]
    sigma = [
        effective_sigma(row, noise) if private else np.inf for row, private in zip(clip, owed, strict=True)
    ]
    shares = [
        [(c / s * own) ** 2 if c > 0 else 0.0 for c, s in zip(row, noise, strict=True)]
        if private
        else [0.0] * len(row)
        for row, own, private in zip(clip, sigma, owed, strict=True)
    ]
    batch = problem.batch or 1.0
    for offer in offered(
        rule, clip=clip, shares=shares, sigma=problem.sigma, bits=[0.0] * len(clip), form=form
    ):
        numbers = [*offer.noise, *(s / batch for s in offer.noise)]
        numbers += [c for row, private in zip(offer.clip, owed, strict=True) if private for c in row]
        if bad := [x for x in numbers if x != 0 and not LEAST <= x <= MOST]:
            raise PlanError(
                "allocate.candidate-needs-thresholds",
                f"candidate {offer.name!r} needs thresholds or noise of {bad[0]:.3g}, "
                f"outside [{LEAST:g}, {MOST:g}]: float32 would lose it",
                "give rows whose numbers lie closer together",
            )
