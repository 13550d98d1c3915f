"""Poisson sampling with secret coins, for the demo only: the trainer brings the real sampler."""

from __future__ import annotations

import math
import os

import numpy as np
from numpy.typing import NDArray


def poisson_sample(population: int, rate: float) -> NDArray[np.int64]:
    """Rows 0 … population-1, each present with probability `rate`, independently of all others.

    A row is in if a 64-bit word from the system's generator is below ⌊rate · 2^64⌋: the probability is at most
    2^-64 too small, never too large. Nobody may learn the result; it must not be logged.

    >>> len(poisson_sample(10, 1.0)), len(poisson_sample(10, 0.0))
    (10, 0)
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate is {rate}, must be in [0, 1]")
    if rate == 1.0:
        return np.arange(population)
    words = np.frombuffer(os.urandom(8 * population), dtype=np.uint64)
    threshold = np.uint64(math.floor(math.ldexp(rate, 64)))
    return np.flatnonzero(words < threshold)
