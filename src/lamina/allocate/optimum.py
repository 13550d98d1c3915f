"""The convex program behind `pareto`, solved through its dual with a certificate.

    primal   min_x Σ_l m_l/x_l   subject to  Σ_l A[k,l] x_l ≤ 1 for every class k;   x = 1/S², A = (C sigma)²
    dual     max_λ≥0  2 Σ_l √(m_l a_l) − Σ_k λ_k,   a = Aᵀλ,   attained at  x_l = √(m_l/a_l)

The dual has one variable per class, however many layers there are. Its gradient in λ is the slack A x − 1, so
the conditions of optimality are  s = 1 − A x ≥ 0,  λ ≥ 0,  λ s = 0. Newton's method solves them for λ s = μ,
μ → 0. Any λ bounds the primal from below, and x divided by max_k (A x)_k is feasible: the gap between the two
says how far from the optimum the answer is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.errors import PlanError

Array = NDArray[np.float64]
TOLERANCE = 1e-10
_ROUNDS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """S per layer, the price λ of each class, and the relative duality gap."""

    noise: Array
    price: Array
    gap: float


def least_noise(clip: Array, weights: Array, sigma: Array) -> Optimum:
    """The S (L) that minimises Σ m S² such that every row of C (K × L) has sigma at least as declared."""
    a = np.square(clip * sigma[:, None])
    scale_a, scale_m = (
        a.max(),
        weights.max(),
    )  # units: x counts in 1/scale_a, the objective in scale_a·scale_m
    a, m = a / scale_a, weights / scale_m
    price = _single(a[0], m) if len(a) == 1 else _newton(a, m)
    x, gap = _certify(a, m, price)
    if not gap <= TOLERANCE:
        raise PlanError(
            "allocate.allocation-not-converge",
            f"the allocation did not converge: relative gap {gap:.1e}, must be <= {TOLERANCE:.0e}",
            "bring clip norms and weights closer to one scale, or use allocate='flat'",
        )
    return Optimum(noise=np.sqrt(scale_a / x), price=price * scale_a * scale_m, gap=gap)


def _single(a: Array, m: Array) -> Array:
    """One class: √λ = Σ_l √(m_l a_l)."""
    return np.array([np.sqrt(m * a).sum() ** 2])


def _certify(a: Array, m: Array, price: Array) -> tuple[Array, float]:
    """The feasible x of these prices, and its relative distance from the dual bound.

    Scaling λ is free in the dual; at the best scale its value is (Σ_l √(m_l a_l))²/Σ_k λ_k.
    """
    pull = a.T @ price
    x = np.sqrt(m / pull)
    x /= (a @ x).max()
    above, below = (m / x).sum(), np.sqrt(m * pull).sum() ** 2 / price.sum()
    return x, float((above - below) / above)


def _newton(a: Array, m: Array) -> Array:
    """Primal-dual interior point on  1 − A x(λ) = s,  λ s = μ."""
    classes = len(a)
    direction = np.full(classes, 1.0 / classes)
    price = direction * np.sqrt(m * (a.T @ direction)).sum() ** 2
    slack = np.full(classes, 1.0)
    best, best_gap = price, np.inf
    for _ in range(_ROUNDS):
        pull = a.T @ price
        x = np.sqrt(m / pull)
        gap = _certify(a, m, price)[1]
        if gap < best_gap:
            best, best_gap = price, gap
        mu = float(price @ slack) / classes
        residual = 1.0 - a @ x - slack
        if mu <= 1e-17 * price.sum() and np.abs(residual).max() <= 1e-14:
            break
        target = 0.1 * mu
        hessian = (a * (0.5 * x / pull)) @ a.T
        # eliminate the slack: (H + diag(s/λ)) dλ = −residual + μ'/λ − s
        try:
            step = np.linalg.solve(hessian + np.diag(slack / price), target / price - slack - residual)
        except np.linalg.LinAlgError:  # classes that are all but equal: the certificate decides
            break
        slack_step = (target - slack * step) / price - slack
        length = min(_to_edge(price, step), _to_edge(slack, slack_step))
        price, slack = price + length * step, slack + length * slack_step
    return np.asarray(best)


def _to_edge(value: Array, step: Array) -> float:
    """The longest part of the step, at most 1, that keeps every entry well above 0."""
    falling = step < 0
    return float(min(1.0, 0.99 * np.min(-value[falling] / step[falling], initial=np.inf)))
