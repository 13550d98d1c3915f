"""The norm of a linear operator that is known only by its products: a bracket from Golub and Kahan's process.

From a random unit vector v the process builds orthonormal V, U with A V = U B, B bidiagonal. After k steps:

lower   ‖A y‖ for the best unit vector y = V s, computed afresh: ‖A‖ is at least that, whatever v was
upper   the next basis vector is p(AᵀA)v for the Lanczos polynomial p, so 1 ≥ p(‖A‖²)·|c| with c the component of v
        along the top singular vector. For a uniform v in n dimensions Pr[|c| < t] ≤ t·√(2n/π); with t such that this
        is MISS, ‖A‖² is at most the point beyond the zeros of p where p = 1/t (Hochstenbach 2013)

The upper end is wrong with probability at most MISS over the random start, for *every* operator: no gap, no rate of
convergence and no luck is assumed. The start comes from a fixed seed, which no weights were chosen to defeat.
Arithmetic is float64 with full re-orthogonalisation, whose error acts as a relative change of A of about 1e-15 per
step; both ends are moved outwards by ROUNDING for it. t stays far above that error: else p would see only rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

Array = NDArray[np.float64]
Product = Callable[[Tensor], Tensor]

MISS = 1e-9
ROUNDING = 1e-12
_CHECK = 10  # steps between two looks at the bracket
_NUMBERS = 1 << 25  # the bases may hold: 256 MB
_EXHAUSTED = 1e-13  # a new direction shorter than this, relatively, is rounding: the space is invariant


@dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """lower ≤ ‖A‖ ≤ upper, and how that is known.

    method     "dense": all singular values. "torus": `upper` is proven by a Fourier transform. "random start":
               `upper` holds with probability at least 1 - MISS
    residual   ‖AᵀA y - lower² y‖/lower² of the vector y that attains `lower` (0 for "dense")
    steps      products with A and with Aᵀ
    """

    lower: float
    upper: float
    method: str
    residual: float = 0.0
    steps: int = 0

    @property
    def width(self) -> float:
        """(upper - lower)/lower; 0 for the zero operator."""
        return (self.upper - self.lower) / self.lower if self.lower > 0 else self.upper

    def scaled(self, factor: float) -> Bracket:
        """The bracket of factor·A, factor > 0."""
        return replace(self, lower=self.lower * factor, upper=self.upper * factor)


@dataclass
class _Basis:
    """V (k+1 rows), U (k rows) and the diagonals α, β of B."""

    right: Tensor
    left: Tensor
    alpha: list[float]
    beta: list[float]

    def tridiagonal(self) -> tuple[Array, Array]:
        """BᵀB: its diagonal (k), and beside it α·β (k), the last of which leads out of the space."""
        alpha, beta = np.array(self.alpha), np.array(self.beta)
        diagonal = alpha**2
        diagonal[1:] += beta[:-1] ** 2
        return diagonal, alpha * beta


def golub_kahan(
    forward: Product,
    adjoint: Product,
    sizes: tuple[int, int],
    *,
    tolerance: float,
    most: int,
    seed: int,
    proven: float = math.inf,
) -> Bracket:
    """Steps until upper ≤ (1 + tolerance)·lower, the space is exhausted, or `most` were taken.

    `sizes` are (columns, rows) of A; `proven` is an upper bound known from elsewhere.
    """
    columns, rows = sizes
    most = max(min(most, _NUMBERS // (columns + rows), columns), 2)
    basis = _Basis(
        torch.empty(most + 1, columns, dtype=torch.float64),
        torch.empty(most, rows, dtype=torch.float64),
        [],
        [],
    )
    start = torch.randn(columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis.right[0] = start / torch.linalg.vector_norm(start)
    unit = float(torch.linalg.vector_norm(forward(basis.right[0])))
    if unit == 0.0:
        return Bracket(lower=0.0, upper=0.0, method="random start", steps=1)
    ahead, back = (
        (lambda v: forward(v) / unit),
        (lambda u: adjoint(u) / unit),
    )  # squares neither over- nor underflow
    threshold = math.log(math.sqrt(2.0 * columns / math.pi) / MISS)
    ended = False
    for k in range(1, most + 1):
        ended = _extend(ahead, back, basis) or k == columns
        if ended or k == most or (k % _CHECK == 0 and _enough(basis, tolerance, threshold, proven / unit)):
            break
    found = _bracket(ahead, back, basis, proven / unit, None if ended else threshold)
    return found.scaled(unit)


def _extend(forward: Product, adjoint: Product, basis: _Basis) -> bool:
    """One step; True if it found no new direction."""
    k = len(basis.alpha)
    scale = max((*basis.alpha, *basis.beta), default=0.0)
    u = _orthogonal(forward(basis.right[k]), basis.left[:k])
    alpha = float(torch.linalg.vector_norm(u))
    if k == len(u) or alpha <= _EXHAUSTED * scale:
        basis.alpha.append(0.0)
        basis.beta.append(0.0)
        return True
    basis.left[k] = u / alpha
    w = _orthogonal(adjoint(basis.left[k]), basis.right[: k + 1])
    beta = float(torch.linalg.vector_norm(w))
    basis.alpha.append(alpha)
    basis.beta.append(beta)
    if beta <= _EXHAUSTED * max(scale, alpha):
        return True
    basis.right[k + 1] = w / beta
    return False


def _orthogonal(vector: Tensor, rows: Tensor) -> Tensor:
    """What of the vector is orthogonal to the rows. Twice, since what cancels in the first pass leaves its rounding."""
    for _ in range(2):
        vector = vector - rows.T @ (rows @ vector)
    return vector


def _enough(basis: _Basis, tolerance: float, threshold: float, proven: float) -> bool:
    diagonal, beside = basis.tridiagonal()
    top, _ = _top(diagonal, beside)
    target = top * (1 + 0.99 * tolerance) ** 2
    return proven**2 <= target or _log_polynomial(target, diagonal, beside) >= threshold


def _bracket(
    forward: Product, adjoint: Product, basis: _Basis, proven: float, threshold: float | None
) -> Bracket:
    """The ends that this basis proves. threshold None: the space is invariant, and its norm is the norm."""
    steps = len(basis.alpha)
    diagonal, beside = basis.tridiagonal()
    top, vector = _top(diagonal, beside)
    y = basis.right[:steps].T @ torch.from_numpy(vector)
    y = y / torch.linalg.vector_norm(y)
    image = forward(y)
    lower = float(torch.linalg.vector_norm(image))
    residual = float(torch.linalg.vector_norm(adjoint(image) - lower**2 * y)) / lower**2
    guess = math.sqrt(top if threshold is None else _where_large(top, diagonal, beside, threshold))
    method = "random start" if guess < proven else "torus"
    upper = max(min(guess, proven), lower) * (1 + ROUNDING)
    return Bracket(
        lower=lower * (1 - ROUNDING), upper=upper, method=method, residual=residual, steps=steps + 1
    )


def _top(diagonal: Array, beside: Array) -> tuple[float, Array]:
    """The largest eigenvalue of the tridiagonal matrix and its vector."""
    last = len(diagonal) - 1
    if last == 0:
        return float(diagonal[0]), np.ones(1)
    values, vectors = eigh_tridiagonal(diagonal, beside[:-1], select="i", select_range=(last, last))
    return float(values[0]), np.asarray(vectors[:, 0], np.float64)


def _log_polynomial(x: float, diagonal: Array, beside: Array) -> float:
    """log p(x) = Σ log(pivot/β), from the pivots of x - BᵀB; -inf where x is not beyond all zeros."""
    pivot, previous, total = math.inf, 0.0, 0.0
    for d, e in zip(diagonal.tolist(), beside.tolist(), strict=True):
        pivot = (x - d) - previous * (previous / pivot)
        if pivot <= 0.0:
            return -math.inf
        total += math.log(pivot) - math.log(e)
        previous = e
    return total


def _where_large(top: float, diagonal: Array, beside: Array, threshold: float) -> float:
    """The x ≥ top with log p(x) = threshold, from above."""
    low, high = top, 2.0 * top
    while _log_polynomial(high, diagonal, beside) < threshold:
        low, high = high, 4.0 * high
    while high - low > 1e-14 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if _log_polynomial(middle, diagonal, beside) < threshold:
            low = middle
        else:
            high = middle
    return high
