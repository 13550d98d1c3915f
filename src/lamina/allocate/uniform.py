"""`uniform`: every layer clipped on its own at the same threshold, one noise for all layers."""

from __future__ import annotations

from lamina.allocate.problem import Allocation, Problem
from lamina.plan import Clipping


def uniform(problem: Problem) -> Allocation:
    """Box clipping at C_l = c_k/√L_k with one S = sigma_k·c_k: what per-layer clipping usually means."""
    return Allocation(clip=problem.thresholds(), noise=problem.same_noise(), clipping=Clipping.BOX)
