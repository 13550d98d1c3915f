"""Mean, variance and a sample of a stream of tensors, without keeping the tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

Array = NDArray[np.float64]


class Moments:
    """Running mean and variance per unit (an axis of the tensors), or of all entries if there is no axis.

    Two sets of n and m entries with means a, b and variances u, v are one set with (Chan, Golub, LeVeque 1979)

        mean = a + (b-a)·m/(n+m)        variance = (n·u + m·v)/(n+m) + (b-a)²·n·m/(n+m)²

    A batch is reduced in its own precision, batches are joined in float64. Variances are over n, not n-1.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Array = np.zeros(1)
        self._variance: Array = np.zeros(1)

    def add(self, values: Tensor, axis: int | None = None) -> None:
        """One more batch."""
        x = values.detach().reshape(-1, 1) if axis is None else values.detach()
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        others = [0] if axis is None else [i for i in range(x.ndim) if i != axis]
        centre = x.mean(others, keepdim=True)
        spread = (x - centre).square_().mean(others)  # three times as fast as var_mean, and as exact
        n, m = self.count, x.numel() // centre.numel()
        b, v = _array(centre).reshape(-1), _array(spread).reshape(-1)
        if n == 0:
            self._mean, self._variance = b, v
        else:
            shift = b - self._mean
            self._mean = self._mean + shift * (m / (n + m))
            self._variance = (n * self._variance + m * v) / (n + m) + shift**2 * (n / (n + m) * (m / (n + m)))
        self.count = n + m

    @property
    def units(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and variance of every unit."""
        return tuple(self._mean.tolist()), tuple(self._variance.tolist())

    @property
    def mean(self) -> float:
        """Of all entries."""
        return float(self._mean.mean())

    @property
    def variance(self) -> float:
        """Of all entries: the mean variance of a unit, plus the variance of the units' means."""
        return float(self._variance.mean() + self._mean.var())


class Average:
    """The running mean of a vector."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: Array = np.zeros(1)

    def add(self, values: Tensor) -> None:
        """One more batch (count, length) or (count,)."""
        rows = values.detach().double().reshape(values.shape[0], -1)
        self._sum = self._sum + _array(rows.sum(0))
        self.count += rows.shape[0]

    @property
    def value(self) -> tuple[float, ...]:
        return tuple((self._sum / self.count).tolist())


class Sample:
    """A sample of fixed size of all entries of a stream of `batches` tensors of equal size, drawn with replacement.

    Every batch gives an equal part of it, so that the whole is one pass and memory does not grow.
    """

    def __init__(self, size: int, batches: int, generator: torch.Generator) -> None:
        self._part = -(-size // batches)
        self._generator = generator
        self._parts: list[Array] = []

    def add(self, values: Tensor) -> None:
        """One more batch."""
        flat = values.detach().reshape(-1)
        rows = torch.randint(len(flat), (self._part,), generator=self._generator)
        self._parts.append(_array(flat[rows.to(flat.device)]))

    def distance(self, mean: float, variance: float) -> float:
        return kolmogorov(np.concatenate(self._parts), mean, variance)


def kolmogorov(sample: Array, mean: float, variance: float) -> float:
    """sup |F - Φ((z-mean)/std)|, F the distribution function of the sample: how far assumption A3 is from true.

    A constant has no density: its distance to a Gaussian of vanishing width around it is ½.
    """
    if not variance > 0:
        return 0.5
    z = np.sort(sample)
    fitted = special.ndtr((z - mean) / math.sqrt(variance))
    n = len(z)
    steps = np.arange(n + 1) / n
    return float(max(np.max(steps[1:] - fitted), np.max(fitted - steps[:-1])))


def _array(values: Tensor) -> Array:
    return np.asarray(values.detach().cpu().to(torch.float64).numpy())
