"""`lsab`: thresholds in the shape of a sensitivity analysis through depth, noise by the optimum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.allocate.options import form, harm, measured, one_of
from lamina.allocate.problem import Allocation, Problem
from lamina.allocate.shares import optimal, shaped
from lamina.errors import PlanError
from lamina.plan import Clipping

SPREAD = 1e12
"""The widest range of Δ that is still a shape: beyond, float32 carries some layers and not others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LSAB:
    """C_l ∝ Δ_l, the layer's tight bound by recursion through depth on proxy inputs; ‖C[k]‖ = c_k.

    S minimises Σ m_l S_l² such that every class has its sigma, in closed form for one class (see `Pareto`). So a
    step takes exactly

        ρ_step = ½ Σ_l (C_l/S_l)² = 1/(2 sigma²),      and with make_plan(rho=ρ_cap)  ρ_step = ρ_cap/T.

    Δ_l is an expectation over a proxy, which bounds nobody: it is a rule for the *shape* of C. What makes the step
    private is that every contribution is clipped to C_l. A Δ that is wrong costs utility, never privacy.

      weights   m_l: "harm" (measured on the proxy, as the document means) or "sizes" (d_l)
      bound     which recursion shapes C: "tight" (local constants) or "worst" (global suprema)
      clipping  box, as the document has it, or joint
    """

    name: ClassVar[str] = "lsab"
    weights: str = "harm"
    bound: str = "tight"
    clipping: Clipping = Clipping.BOX

    def __post_init__(self) -> None:
        one_of(self.name, "weights", self.weights, ("harm", "sizes"))
        one_of(self.name, "bound", self.bound, ("tight", "worst"))
        object.__setattr__(self, "clipping", form(self.name, self.clipping))

    def __call__(self, problem: Problem) -> Allocation:
        delta = measured(problem, self.bound, self.name)
        low, high = float(delta.min()), float(delta.max())
        spread = high / low if math.isfinite(high) else math.inf  # plain floats: a quotient may overflow
        if not spread <= SPREAD:
            raise PlanError(
                "allocate.delta-layers-spans",
                f"Δ ({self.bound}) of the layers spans a factor of {spread:.1e}, above {SPREAD:.0e}: the lowest "
                "thresholds would stop their layers",
                "use bound='tight', a smaller or better normalised model, or allocate='pareto'",
            )
        clip = shaped(problem, delta)
        return Allocation(
            clip=clip,
            noise=optimal(problem, clip, harm(problem, self.weights, self.name)),
            clipping=self.clipping,
            why=self._why(problem, delta),
        )

    def _why(self, problem: Problem, delta: np.ndarray) -> tuple[str, ...]:
        assert problem.measure is not None
        low, high = int(np.argmin(delta)), int(np.argmax(delta))
        lines = [
            f"lsab: C follows Δ, the {self.bound} bound by recursion through depth on the proxy "
            f"({problem.measure.proxy}), from {delta[low]:.3g} at {problem.layers[low]!r} to {delta[high]:.3g} at "
            f"{problem.layers[high]!r}.",
            "Δ is a rule for the shape of C, not a sensitivity bound: clipping to C is what makes the step private.",
        ]
        for k in problem.private:
            lines.append(
                f"Every step takes ρ = {0.5 / problem.sigma[k] ** 2:.4g} at most of class {problem.classes[k]!r}; "
                f"{problem.steps:,} steps take {0.5 * problem.steps / problem.sigma[k] ** 2:.4g} without sampling."
            )
        return tuple(lines)


lsab = LSAB()
