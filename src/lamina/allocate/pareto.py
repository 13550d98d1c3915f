"""`pareto`: the noise that costs the loss least for what the classes are owed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lamina.allocate.options import form, harm, measured, number, one_of
from lamina.allocate.problem import Allocation, Problem
from lamina.allocate.shares import Rows, optimal, shaped
from lamina.plan import Clipping, rescale

AS_GOOD = 0.8
"""Above this ratio of noise, flat is as good: what is saved is less than what a proxy is wrong by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pareto:
    """Minimise Σ_l m_l S_l² such that Σ_l (C[k,l]/S_l)² ≤ 1/sigma_k² for every private class k.

    With one class the optimum is in closed form (docs/theory.md, "Choosing C and S"),

        S_l² = sigma² · (C_l/√m_l) · Σ_j C_j √m_j,        share of the budget  C_l√m_l / Σ_j C_j√m_j

    with several it is a small convex program. The parts of it:

      C         follows the typical norms n_l of the measurement; without one C_l ∝ √m_l: then one class gets `flat`,
                exactly, and several get equal S wherever the same classes reach, each its whole budget
      weights   m_l: "sizes" (d_l, the number of parameters) or "harm" (measured on the proxy)
      shrink    s in [0, 1]: C_l ∝ n_l^(1-s)·(√m_l)^s. At 1 C_l ∝ √m_l, all S are equal and a joint clip is exactly
                `flat`; in between it guards against a proxy that knows the norms badly
      clipping  joint by default: for the same S and ε it never clips more than the box inside it
    """

    name: ClassVar[str] = "pareto"
    weights: str = "sizes"
    shrink: float = 0.0
    clipping: Clipping = Clipping.JOINT

    def __post_init__(self) -> None:
        one_of(self.name, "weights", self.weights, ("sizes", "harm"))
        number(self.name, "shrink", self.shrink, 0.0, 1.0, closed=True)
        object.__setattr__(self, "clipping", form(self.name, self.clipping))

    def __call__(self, problem: Problem) -> Allocation:
        m = harm(problem, self.weights, self.name)
        norms = np.sqrt(m) if problem.measure is None else measured(problem, "norms", self.name)
        shape = np.exp((1 - self.shrink) * np.log(norms) + self.shrink * 0.5 * np.log(m))
        clip = shaped(problem, shape)
        noise = optimal(problem, clip, m)
        return Allocation(
            clip=clip, noise=noise, clipping=self.clipping, why=self._why(problem, clip, noise, m)
        )

    def _why(
        self, problem: Problem, clip: Rows, noise: tuple[float, ...], m: NDArray[np.float64]
    ) -> tuple[str, ...]:
        if problem.measure is None:
            source = "nothing is known of the layers' norms, so C goes with the square root of their sizes, as in flat"
        else:
            source = f"C follows the typical norms n on the proxy ({problem.measure.proxy})"
        if self.shrink:
            source += f", shrunk by {self.shrink:g} toward √m"
        lines = [f"pareto: {source}; S makes Σ m·S² least, m = {_M[self.weights]}."]
        if problem.private:
            ratio = saved(problem, clip, noise, m)
            several = (
                " (which serves the strictest class only)" if len(problem.private) > 1 else " at the same ε"
            )
            verdict = (
                f"above {AS_GOOD:g}, so flat is as good" if ratio > AS_GOOD else "the rest is what it saves"
            )
            lines.append(f"Its weighted noise is {ratio:.3f} of what flat would add{several}: {verdict}.")
        return tuple(lines)


_M = {"sizes": "the layer's number of parameters", "harm": "the harm measured on the proxy"}


def saved(problem: Problem, clip: Rows, noise: tuple[float, ...], m: NDArray[np.float64]) -> float:
    """Σ m S² of this noise over that of flat, both at the declared sigma.

    With one class that reaches all layers:  (Σ n_l √m_l)² / (Σ n_l² · Σ m_l),  n the shape of C; at most 1.
    """
    ours = rescale(problem.weighed(clip), noise, problem.sigma)
    flat = rescale(problem.weighed(problem.thresholds()), problem.same_noise(), problem.sigma)
    return float(m @ np.square(ours) / (m @ np.square(flat)))


pareto = Pareto()
