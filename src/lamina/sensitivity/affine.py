"""Normalisation layers at fixed statistics: x ↦ gain·(x - mean)/√(variance + eps) + bias."""

from __future__ import annotations

from typing import Any

import numpy as np

from lamina.errors import PlanError


def affine_norm_constant(gain: Any, variance: Any, eps: float) -> float:
    """max |gain|/√(variance + eps), over channels or examples: the Lipschitz constant of the fixed affine map.

    A layer that takes its statistics from the example itself (LayerNorm, GroupNorm) is, at any point, this map after
    an orthogonal projection, so that with the smallest variance of the inputs the constant bounds its slope there.
    The input's own variance may be tiny: then the constant is up to |gain|/√eps, and that is what it really does.
    """
    gains, variances = np.asarray(gain, np.float64), np.asarray(variance, np.float64)
    if not np.isfinite(gains).all() or gains.size == 0:
        raise PlanError(
            "measure.gain-normalisation-empty",
            "the gain of a normalisation is empty or not finite",
            "give its weight, or 1.0",
        )
    if variances.size == 0 or not (np.isfinite(variances) & (variances >= 0)).all():
        raise PlanError(
            "measure.variance-normalisation-not",
            "the variance of a normalisation is not finite and >= 0",
            "profile the model again",
        )
    if not (np.isfinite(eps) and eps >= 0) or not (variances + eps > 0).all():
        raise PlanError(
            "measure.variance-eps-normalisation",
            f"variance + eps of a normalisation is 0 (eps={eps})",
            "give the layer's positive eps",
        )
    return float(np.max(np.abs(gains) / np.sqrt(variances + eps)))
