"""The effective noise multiplier of a row of thresholds, and the least noise that gives every row its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamina.errors import PlanError

Row = Sequence[float]


def radius(clip: Row, noise: Row) -> float:
    """How far a contribution can move the step, in units of its noise: √Σ_l (C_l/S_l)², 0/0 counting as 0.

    Infinite if a layer with C > 0 has S = 0: then nothing hides it.
    """
    if any(c > 0 and s == 0 for c, s in zip(clip, noise, strict=True)):
        return math.inf
    return math.hypot(*(c / s for c, s in zip(clip, noise, strict=True) if c > 0))


def effective_sigma(clip: Row, noise: Row, beside: float = 0.0) -> float:
    """sigma = (Σ_l (C_l/S_l)² + beside²)^(-1/2) (docs/theory.md, "The step").

    `beside`: how far the contribution moves what else the step releases, in units of that noise.
    """
    reach = math.hypot(radius(clip, noise), beside)
    if reach == 0:
        return math.inf
    return 1.0 / reach


def rescale(clip: Sequence[Row], noise: Row, sigma: Row, beside: Row | None = None) -> tuple[float, ...]:
    """κ·S with κ = max_k √(Σ_l (C[k,l]/S_l)² / (sigma_k^-2 - beside_k²)): the least noise that serves every class.

    Rows with sigma = inf or with infinite thresholds are public and owed nothing. The result is on the safe
    side in floating point: `effective_sigma` of every row is at least the declared sigma, exactly.
    """
    extra = [0.0] * len(clip) if beside is None else beside
    owed = [(row, s, b) for row, s, b in zip(clip, sigma, extra, strict=True) if _is_private(row, s)]
    for _, s, b in owed:
        if b * s >= 1:
            raise PlanError(
                "plan.noised-counts-alone",
                f"the noised counts alone have a multiplier of {1 / b:.4g}, below the {s:.4g} of the whole step",
                "give the counts more noise",
            )
    kappa = max(
        (radius(row, noise) / math.sqrt((1 / s - b) * (1 / s + b)) for row, s, b in owed), default=0.0
    )
    if kappa == 0:
        return tuple(noise)
    if not math.isfinite(kappa):
        raise PlanError(
            "plan.layer-private-class",
            "a layer that a private class reaches has no noise",
            "give it S > 0, or C = 0",
        )
    step = math.ulp(kappa)
    while True:
        scaled = tuple(kappa * s for s in noise)
        if all(effective_sigma(row, scaled, b) >= s for row, s, b in owed):
            return scaled
        kappa, step = kappa + step, 2 * step  # where counts take nearly all, one ulp would move nothing


def _is_private(row: Row, sigma: float) -> bool:
    return math.isfinite(sigma) and sigma > 0 and all(map(math.isfinite, row))
