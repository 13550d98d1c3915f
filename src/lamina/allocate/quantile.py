"""`quantile`: thresholds that follow a quantile of the gradient norms, read from noised counts that are paid for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.allocate.options import measured, number
from lamina.allocate.problem import Allocation, Problem
from lamina.allocate.shares import optimal, shaped
from lamina.plan import Clipping, FollowQuantile


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantile:
    """Box clipping at thresholds that move at every step (Andrew et al. 2021, one quantile per layer):

        C_l ← C_l·exp(-rate·(b̃_l - target)),     b̃_l = (Σ_i (bit_il - ½) + N(0, σ_b²))/B + ½

    bit_il says that contribution i was not clipped at layer l. The counts are a release like the gradient, in the
    same step: a contribution moves the L_k counts of its layers by ½ each, so

        sigma_k^-2 = Σ_l (C[k,l]/S_l)² + L_k/(4σ_b²)

    and σ_b is the least noise for which the counts take at most the part `cost` of every class's budget:
    σ_b = max_k sigma_k·√L_k/(2√cost). The gradients get the rest: S grows by 1/√(1-cost).

    The start is C ∝ n_l if norms were measured, else even; S by the optimum for d_l.
    """

    name: ClassVar[str] = "quantile"
    target: float = 0.5
    rate: float = 0.2
    cost: float = 0.01

    def __post_init__(self) -> None:
        number(self.name, "target", self.target, 0.0, 1.0)
        number(self.name, "rate", self.rate, 0.0, 10.0)
        number(self.name, "cost", self.cost, 0.0, 1.0)

    def __call__(self, problem: Problem) -> Allocation:
        if problem.measure is None:
            clip, start = problem.thresholds(), "even thresholds"
        else:
            clip = shaped(problem, measured(problem, "norms", self.name))
            start = f"the typical norms on the proxy ({problem.measure.proxy})"
        noise = optimal(problem, clip, np.asarray(problem.weights, dtype=np.float64))
        counts = max(
            (problem.sigma[k] * math.sqrt(sum(problem.reach[k])) for k in problem.private), default=0.0
        ) / (2.0 * math.sqrt(self.cost))
        rules = (FollowQuantile(target=self.target, rate=self.rate, noise=counts),) if counts else ()
        return Allocation(
            clip=clip,
            noise=noise,
            clipping=Clipping.BOX,
            rules=rules,
            why=(
                f"quantile starts from {start} and moves each toward the {self.target:g} quantile of the norms.",
                f"The counts that tell it so get noise {counts:.4g} and take {100 * self.cost:g} % of the strictest "
                f"class's budget; the gradients get {100 / math.sqrt(1 - self.cost) - 100:.2g} % more noise for it.",
            ),
        )


quantile = Quantile()
