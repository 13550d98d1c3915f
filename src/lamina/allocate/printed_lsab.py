"""`printed-lsab`: the noise of the document's equation 16, letter by letter, to be measured. Not what it claims."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.account.zcdp import classical_epsilon
from lamina.allocate.options import harm, measured, one_of
from lamina.allocate.problem import Allocation, Problem
from lamina.errors import PlanError
from lamina.plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedLSAB:
    """C_l = Δ_l by the printed recursion, and  S_l = Δ_l·√(L·m_l/(2·ρ_cap·Σ_j m_j))        (eq. 16)

    A step then spends  ½ Σ (C_l/S_l)² = ρ_cap·(Σm)(Σ1/m)/L = ρ_cap · L·AM(m)/HM(m):  12 times the whole budget for 12
    layers of equal m, 306 times for six of m = 1 and six of m = 100, at every one of T steps.

      per_step  puts ρ_cap/T for ρ_cap, as eq. 21 has it and eq. 16 does not: T times less, still L·AM/HM too much
      weights   m_l: "harm" (measured, the document's MSE per unit of noise) or "sizes"

    ρ_cap is what the plan was asked for, or what eq. 4 makes of the target ε. The claim is eq. 22,
    ε = ρ_cap + 2√(ρ_cap log 1/δ). `plan.epsilon` is the true figure: exact for Gaussian noise, no credit for sampling.
    """

    name: ClassVar[str] = "printed-lsab"
    per_step: bool = False
    weights: str = "harm"

    def __post_init__(self) -> None:
        one_of(self.name, "weights", self.weights, ("harm", "sizes"))

    def __call__(self, problem: Problem) -> Allocation:
        if not problem.private:
            raise PlanError(
                "allocate.no-private-class",
                f"{self.name} has no private class to make a claim for",
                "use another allocation",
            )
        if len(problem.targets) != len(problem.sigma) or len(problem.delta) != len(problem.sigma):
            raise PlanError(
                "allocate.knows-neither-epsilon",
                f"{self.name} knows neither ε nor δ of the classes",
                "use make_plan",
            )
        delta, m = measured(problem, "printed", self.name), harm(problem, self.weights, self.name)
        cap = min(rho_cap(problem, k) for k in problem.private)
        budget = cap / problem.steps if self.per_step else cap
        noise = delta * np.sqrt(len(m) * m / (2.0 * budget * m.sum()))
        noised = np.array(problem.noised())
        clip = tuple(
            tuple(
                (math.inf if math.isinf(sigma) else float(c)) if reached else 0.0
                for c, reached in zip(delta, reach, strict=True)
            )
            for reach, sigma in zip(problem.reach, problem.sigma, strict=True)
        )
        over = float(m.sum() * (1 / m).sum() / len(m))
        return Allocation(
            clip=clip,
            noise=tuple(np.where(noised, noise, 0.0).tolist()),
            clipping=Clipping.BOX,
            claimed=tuple(
                classical_epsilon(cap, problem.delta[k]) if k in problem.private else 0.0
                for k in range(len(clip))
            ),
            why=(
                f"printed-lsab reproduces eq. 16 with ρ_cap = {cap:.4g}{' / T' if self.per_step else ', without T'}: "
                f"one step spends {over:.4g} times {'ρ_cap / T' if self.per_step else 'ρ_cap'}. By its own "
                "accounting the claim does not hold.",
            ),
        )


def rho_cap(problem: Problem, k: int) -> float:
    """ρ_cap of class k: asked for, or eq. 4 solved for the target ε:  √ρ = √(log 1/δ + ε) − √(log 1/δ)."""
    if problem.rho:
        return problem.rho[k]
    log, target = math.log(1.0 / problem.delta[k]), problem.targets[k]
    return (target / (math.sqrt(log + target) + math.sqrt(log))) ** 2


printed_lsab = PrintedLSAB()
