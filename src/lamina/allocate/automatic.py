"""`automatic`: every contribution counts by its direction alone, so there is no threshold to tune."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.allocate.options import measured, number
from lamina.allocate.problem import Allocation, Problem
from lamina.errors import PlanError
from lamina.plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic:
    """Automatic clipping (Bu et al. 2023), which scales a gradient by 1/(‖g‖ + γ), as a clip at a small threshold.

    A clip multiplies by min(1, C/‖g‖). At C = f·c_k with a small f nearly every contribution is longer than C, and
    the step releases

        f·c_k · Σ_i g_i/max(‖g_i‖, f·c_k)  +  N(0, (sigma_k·f·c_k)²),         divided by f·B:

    normalised gradients of length c_k, with the noise of `flat`. Where the paper has ‖g‖ + γ there is max(‖g‖, f·c_k):
    a contribution that is all but fitted (‖g‖ < f·c_k) fades out in both. f is common to all classes; it is

        f = gamma · min(1, min_k n_k/c_k),      n_k the typical norm of the class's whole gradient, if it was measured.

    Dividing by f·B instead of B changes no privacy, B being public; learning rates mean what they do under `flat`. A
    public class is not clipped, so it cannot take part.
    """

    name: ClassVar[str] = "automatic"
    gamma: float = 0.01

    def __post_init__(self) -> None:
        number(self.name, "gamma", self.gamma, 0.0, 1.0)

    def __call__(self, problem: Problem) -> Allocation:
        public = [
            name for name, sigma in zip(problem.classes, problem.sigma, strict=True) if math.isinf(sigma)
        ]
        if public:
            raise PlanError(
                "allocate.automatic-divides-batch",
                f"automatic divides by {self.gamma:g} of the batch, and class {public[0]!r} is public, so not clipped: "
                "its gradient would count that many times over",
                f"use flat or pareto, or leave the class out with batch={{{public[0]!r}: 0, …}}",
            )
        f = self.fraction(problem)
        clip = tuple(tuple(c if math.isinf(c) else f * c for c in row) for row in problem.thresholds())
        return Allocation(
            clip=clip,
            noise=problem.same_noise(),
            clipping=Clipping.JOINT,
            divide=f,
            why=(
                f"automatic clips the whole gradient at {f:.3g} of the class's norm, so that nearly every contribution "
                "counts by its direction alone, and divides by as much less: the clip norm only scales the step.",
            ),
        )

    def fraction(self, problem: Problem) -> float:
        """f: how much smaller than the class's norm the threshold is."""
        if problem.measure is None or not problem.private:
            return self.gamma
        squares = np.square(measured(problem, "norms", self.name))
        typical = [math.sqrt(squares[np.asarray(problem.reach[k])].sum()) for k in problem.private]
        least = min(n / problem.clip_norm[k] for n, k in zip(typical, problem.private, strict=True))
        return self.gamma * min(1.0, least)


automatic = Automatic()
