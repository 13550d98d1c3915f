"""`pareto`: the noise that costs the loss least for what the classes are owed."""

from __future__ import annotations

import numpy as np

from lamina.allocate.optimum import least_noise
from lamina.allocate.problem import Allocation, Problem
from lamina.plan import Clipping


def pareto(problem: Problem) -> Allocation:
    """Minimise Σ_l m_l S_l² such that Σ_l (C[k,l]/S_l)² ≤ 1/sigma_k² for every private class k.

    With one class the optimum is in closed form (docs/theory.md, "Choosing C and S"),

        S_l² = sigma² · (C_l/√m_l) · Σ_j C_j √m_j,        share of the budget  C_l√m_l / Σ_j C_j√m_j

    with several it is a small convex program. C_l = c_k/√L_k on the layers that the class reaches. The clip
    is joint: for the same S and ε it never clips more than the box inside it.
    """
    clip = problem.thresholds()
    private, noised = problem.private, np.array(problem.noised())
    noise = np.zeros(len(problem.sizes))
    if private:
        thresholds = np.array([clip[k] for k in private])[:, noised]
        sigma = np.array([problem.sigma[k] for k in private])
        weights = np.array(problem.weights)[noised]
        noise[noised] = least_noise(thresholds, weights, sigma).noise
    return Allocation(clip=clip, noise=tuple(noise.tolist()), clipping=Clipping.JOINT)
