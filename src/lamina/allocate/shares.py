"""Thresholds of a given shape, and the noise that gives layers their shares of the budget."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lamina.allocate.optimum import least_noise
from lamina.allocate.problem import Problem
from lamina.allocate.problem import Rows as Rows
from lamina.errors import PlanError

Array = NDArray[np.float64]


def shaped(problem: Problem, shape: Array) -> Rows:
    """C[k,l] = c_k·r_l/√Σ_j r_j² over the layers that class k reaches: the shape r, and ‖C[k]‖ = c_k."""
    for name, r in zip(problem.layers, shape.tolist(), strict=True):
        if not 0 < r < math.inf:
            raise PlanError(
                "allocate.threshold-layer-finite",
                f"the threshold of layer {name!r} is {r!r}, must be finite and > 0",
                "freeze the layer, or leave it out of the profiles",
            )
    rows = []
    for reach, c, sigma in zip(problem.reach, problem.clip_norm, problem.sigma, strict=True):
        if math.isinf(sigma):
            rows.append(tuple(math.inf if reached else 0.0 for reached in reach))
            continue
        r = np.where(reach, shape, 0.0)
        r = r / max(r.max(), np.finfo(float).tiny)  # squares that neither overflow nor vanish
        rows.append(tuple((c * r / max(float(np.linalg.norm(r)), np.finfo(float).tiny)).tolist()))
    return tuple(rows)


def by_shares(problem: Problem, clip: Rows, parts: Array) -> tuple[float, ...]:
    """S such that layer l takes the part w_l of a class's budget:  S_l = sigma·C_l/√w_l,  Σ_l w_l = 1.

    With several classes each has its own w, `parts` over what it reaches, and S_l is the largest that any asks for:
    no class is served worse than declared.
    """
    noise, clip = np.zeros(len(problem.sizes)), problem.weighed(clip)
    for k in problem.private:
        reach = np.asarray(problem.reach[k])
        w = parts[reach] / parts[reach].sum()
        asked = problem.sigma[k] * np.asarray(clip[k])[reach] / np.sqrt(w)
        noise[reach] = np.maximum(noise[reach], asked)
    return tuple(noise.tolist())


def optimal(problem: Problem, clip: Rows, weights: Array) -> tuple[float, ...]:
    """S that minimises Σ m_l S_l² such that every private class has its sigma (allocate/optimum.py)."""
    private, noised, clip = problem.private, np.array(problem.noised()), problem.weighed(clip)
    noise = np.zeros(len(problem.sizes))
    if private:
        thresholds = np.array([clip[k] for k in private])[:, noised]
        sigma = np.array([problem.sigma[k] for k in private])
        noise[noised] = least_noise(thresholds, weights[noised], sigma).noise
    return tuple(noise.tolist())
