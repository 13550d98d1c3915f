"""`flat`: one clip of the whole gradient, one noise for all layers."""

from __future__ import annotations

from lamina.allocate.problem import Allocation, Problem
from lamina.plan import Clipping


def flat(problem: Problem) -> Allocation:
    """Joint clipping with equal S: ‖g‖ ≤ c_k over the layers that the class reaches, S = sigma_k·c_k.

    The classical DP-SGD step. With several classes S serves the one that needs most.
    """
    return Allocation(clip=problem.thresholds(), noise=problem.same_noise(), clipping=Clipping.JOINT)
