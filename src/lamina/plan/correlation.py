"""Noise that is correlated over steps: the banded strategy, who may take part when, and what is gained by it.

With `bands` = b > 1 the noise of step t is (C⁻¹Z)_t, Z the independent noise N(0, S²) of all steps and C the lower
triangular Toeplitz matrix with the b coefficients of `band_coefficients`: what a step adds is partly taken away again by the
next ones, so that sums of gradients, which is what weights are, carry less noise.

Contributions take turns: each has a fixed one of b, and step t samples from those whose turn is t mod b alone, at rate b·q
(cyclic Poisson sampling).

Claim. C·(gradients) + Z is released, from which the steps follow. A contribution that takes part in step t moves rows
t … t+b-1 by c_0·g … c_{b-1}·g: by ‖c‖·‖g‖ = ‖g‖ in all, as in one step with independent noise. It takes part in steps
that are b apart, whose rows do not meet. So n steps are ⌈n/b⌉ Poisson-subsampled Gaussian mechanisms of rate b·q with the
noise multiplier sigma_k of the plan (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", section 5):
docs/decisions/correlated_noise.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lamina.account.accountants import calibrate
from lamina.errors import PlanError

if TYPE_CHECKING:
    from lamina.plan.step_plan import StepPlan

MAX_BANDS = 1024
AUTO_BANDS = "auto"
_WORTH_A_DOUBLING = 0.9
_NORM_MARGIN = 2.0**-48  # so that ‖c‖ ≤ 1 after rounding


@lru_cache(maxsize=64)
def band_coefficients(bands: int) -> tuple[float, ...]:
    """c_0 … c_{b-1} of norm 1: the square root of the matrix of prefix sums, cut to b bands (Kalinin, Lampert 2024).

    The matrix of ones on and below the diagonal is the square of the Toeplitz matrix with binom(2j, j)/4^j
    (Fichtenberger, Henzinger, Upadhyay 2023).

    >>> [round(c, 4) for c in band_coefficients(3)]
    [0.848, 0.424, 0.318]
    """
    root = [1.0]
    for j in range(1, bands):
        root.append(root[-1] * (2 * j - 1) / (2 * j))
    norm = math.sqrt(math.fsum(c * c for c in root)) * (1 + _NORM_MARGIN)
    return tuple(c / norm for c in root)


def coefficients_digest(bands: int) -> bytes:
    """SHA-256 of the coefficients as big-endian float64: which strategy it was."""
    return hashlib.sha256(struct.pack(f">{bands}d", *band_coefficients(bands))).digest()


def turn_rate(rate: float, bands: int, cls: str) -> float:
    """b·q: at which a step samples those whose turn it is, so that its batch is as large as if nobody took turns."""
    if rate * bands > 1 + 1e-9:
        problem = f"bands is {bands}, and class {cls!r} has sampling rate {rate:.4g}: a turn would be sampled at {rate * bands:.4g}"
        raise PlanError(
            "plan.bands-above-rate", problem, f"use at most {int(1 / rate + 1e-9)} bands, or a smaller batch"
        )
    return min(1.0, rate * bands)


def participations(steps: int, bands: int) -> int:
    """How often one contribution takes part, at most, in so many steps on end."""
    return -(-steps // bands)


def aligned_length(steps: int, bands: int) -> int:
    """The least multiple of `bands` that is no shorter: stretches of such lengths cost together what the whole costs."""
    return participations(steps, bands) * bands


@lru_cache(maxsize=64)
def prefix_error(bands: int, steps: int) -> float:
    """The variance of the summed noise of steps 0 … t, averaged over t, in units of S²; (steps+1)/2 if independent."""
    import numpy as np
    from scipy.signal import lfilter

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    summed = np.cumsum(lfilter([1.0], band_coefficients(bands), impulse))  # of C⁻¹, a column
    return float((summed**2 * (1.0 - np.arange(steps) / steps)).sum())


def prefix_error_ratio(plan: StepPlan, bands: int | None = None) -> float:
    """Mean squared error of the sums of gradients over that of independent noise at the same ε; below 1 is a gain.

    Of the class that gains least. Both have the same clip norms, batch and number of steps; independent noise is sampled at
    q from everybody. `bands`: with so many bands instead of the plan's, at the plan's ε.
    """
    bands = plan.bands if bands is None else bands

    def error(k: int, width: int, epsilon: float) -> float:
        entry, sigma = plan.classes[k], plan.sigma(k)
        if width != plan.bands:
            q, steps = turn_rate(entry.sampling_rate, width, entry.name), participations(plan.steps, width)
            sigma = calibrate(epsilon, delta=plan.delta(k), q=q, steps=steps, accountant=plan.accountant)
        return sigma**2 * prefix_error(width, plan.steps)

    priced = [(k, e) for k in range(len(plan.classes)) if bands > 1 and 0 < (e := plan.epsilon(k)) < math.inf]
    return max((error(k, bands, e) / error(k, 1, e) for k, e in priced), default=1.0)


def best_bands(plan: StepPlan, most: int = 64) -> int:
    """Return the number of bands among 1, 2, 4, … `most` with the smallest error of sums of gradients at the plan's ε.

    The plan's own if it has more than 1. 1 if nothing is gained, a class has no population, or correlated noise is not
    proven with the plan. Every doubling has to take a tenth off the error, because the noise of b-1 steps is kept.
    Contributions also need stable ids, and one rank trains: neither is known to a plan.
    """
    private = [entry for entry in plan.classes if not entry.public]
    best, least = 1, 1.0
    if plan.bands > 1 or any(entry.population is None for entry in private):
        return plan.bands
    while (bands := 2 * best) <= min(most, plan.steps):
        try:
            dataclasses.replace(plan, bands=bands)
        except PlanError:  # not proven with it, or a turn would be sampled at a rate above 1
            break
        if (ratio := prefix_error_ratio(plan, bands)) > _WORTH_A_DOUBLING * least:
            break
        best, least = bands, ratio
    return best


def correlation_summary(plan: StepPlan) -> dict[str, Any] | None:
    """What `lamina plan --json` and certificates say of it; None for independent noise."""
    if plan.bands == 1:
        return None
    return {
        "kind": "banded", "bands": plan.bands, "coefficients": "square root of prefix sums",
        "coefficients_sha256": coefficients_digest(plan.bands).hex(),
    }  # fmt: skip
