"""`uniform`: every layer clipped on its own at the same threshold, one noise for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lamina.allocate.problem import Allocation, Problem
from lamina.plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Box clipping at C_l = c_k/√L_k with one S = sigma_k·c_k: what per-layer clipping usually means."""

    name: ClassVar[str] = "uniform"

    def __call__(self, problem: Problem) -> Allocation:
        return Allocation(
            clip=problem.thresholds(),
            noise=problem.same_noise(),
            clipping=Clipping.BOX,
            why=(
                "uniform clips every layer on its own at c/√L and gives all the same noise: the noise of flat, and a "
                "box inside its ball, so it clips more. It buys one pass per step.",
            ),
        )


uniform = Uniform()
