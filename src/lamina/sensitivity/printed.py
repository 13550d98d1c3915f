"""Formulas of the LSAB document exactly as printed, for comparison. None is used by a sound policy.

Each docstring says what is wrong and by how much; tests/sensitivity/test_printed.py measures it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

Array = NDArray[np.float64]

RATIO_CLAIMED = 4.7
"""What the text below eq. 15 says that 0.000132 amounts to."""


def relu_printed(mean: Any, variance: Any, epsilon_n: float = 0.0) -> Array:
    """Eq. 8: 1 - Φ(-μ/√(σ²+ε_n)). Right, up to what ε_n adds; `local("relu", …)` is the same number."""
    spread = np.sqrt(np.asarray(variance, np.float64) + epsilon_n)
    return np.asarray(1.0 - special.ndtr(-np.asarray(mean, np.float64) / spread))


def gelu_printed(mean: Any, variance: Any) -> Array:
    """Eq. 10: Φ(μ/r) + μφ(μ/r)/r, r = √(1+σ²).

    The second term should be divided by r³, and the absolute value of eq. 7 is missing: at σ = 1 it gives 0.5 for
    0.5393 (μ = 0), 0.0201 for 0.2306 (μ = -1), 0.9799 for 0.8766 (μ = 1); -0.0723 at μ = -3, where a mean
    of absolute values cannot be.
    """
    mu = np.asarray(mean, np.float64)
    r = np.sqrt(1.0 + np.asarray(variance, np.float64))
    return np.asarray(special.ndtr(mu / r) + mu * np.exp(-0.5 * (mu / r) ** 2) / math.sqrt(2 * math.pi) / r)


def compression_printed(std_out: float, std_in: float) -> float:
    """Eq. 12: γ = σ_out/σ_in, "in (0, 1]". It exceeds 1 for every layer that widens the spread."""
    return std_out / std_in


def clamped_compression(std_out: float, std_in: float) -> float:
    """γ of eq. 12 forced into the interval that the document promises, as its recursion (eq. 11) needs."""
    return min(compression_printed(std_out, std_in), 1.0)


def norm_compression_printed(eps: float, std: float) -> float:
    """Below eq. 12, for normalised layers: γ = ε_BN/σ_BN. With eps 1e-5 and σ = 1 it is 1e-5.

    The layer really multiplies by |gain|/√(σ²+ε): here 1, so the printed factor is 1e5 times too small.
    """
    return eps / std


def residual_printed(main: float, skip: float) -> float:
    """Eq. 13: √(a²+b²). Perturbations of both paths come from one input and may align: a+b, up to √2 larger."""
    return math.hypot(main, skip)


def ratio_printed(depth: int = 12, local: float = 0.5, supremum: float = 1.0, gamma: float = 0.95) -> float:
    """Eq. 15: (local/supremum)^depth·γ^depth = 0.475^12 = 0.000132 by default.

    The text calls this "4.7×" tighter; its inverse is 7580.
    """
    return float((local / supremum * gamma) ** depth)


def attention_printed(weights: Tensor) -> Tensor:
    """Eq. 20: a_max(1 - a_max), called the norm of diag(a) - aaᵀ and "< 1/4". It is a lower bound of that norm.

    The norm reaches twice as much: a = (½, ½) has norm ½, printed ¼.
    """
    top = weights.to(torch.float64).amax(-1)
    return top * (1.0 - top)
