"""`flat`: one clip of the whole gradient, one noise for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lamina.allocate.problem import Allocation, Problem
from lamina.plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Joint clipping with equal S: ‖g‖ ≤ c_k over the layers that the class reaches, S = sigma_k·c_k.

    The classical DP-SGD step. With several classes S serves the one that needs most.
    """

    name: ClassVar[str] = "flat"

    def __call__(self, problem: Problem) -> Allocation:
        return Allocation(
            clip=problem.thresholds(),
            noise=problem.same_noise(),
            clipping=Clipping.JOINT,
            why=(
                "flat clips the whole gradient once and gives every layer the same noise: layers differ in what they "
                "take of the budget by their gradients alone, and nothing about them need be known.",
            ),
        )


flat = Flat()
