"""`printed-ladp`: the document's algorithm 1, letter by letter, to be measured. It is not private."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.allocate.options import measured, number, one_of
from lamina.allocate.problem import Allocation, Problem
from lamina.allocate.sensitive import Sensitive, check_sensitive, sensitive_layers
from lamina.errors import PlanError
from lamina.plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedLADP:
    """Every entry of the batch's mean gradient is clipped to ±c_l and gets noise of standard deviation ε_l:

        ε_l = part_l·ε/T,  Σ part = 1;      c_l = 1.0, noise ε_l        in sensitive layers
                                            c_l = 5.0, noise ε_l/2      in others

    so that ε − Σ_t Σ_l ε_l reaches 0 after T steps (lines 4, 7 to 13, 18). Nothing bounds one contribution but the box
    itself: adding or replacing it can move each of the d_l entries from one edge to the other, an L2 sensitivity of
    C_l = 2·c_l·√d_l. The noise grows with ε, so asking for more privacy gives less. `plan.epsilon` is the true figure.

      split      "even", or "fisher": in proportion to the proxy's Fisher information
      sensitive  as for `LADP`
    """

    name: ClassVar[str] = "printed-ladp"
    sensitive: Sensitive | None = None
    share: float = 0.25
    split: str = "even"

    def __post_init__(self) -> None:
        check_sensitive(self.name, self.sensitive)
        number(self.name, "share", self.share, 0.0, 1.0)
        one_of(self.name, "split", self.split, ("even", "fisher"))

    def __call__(self, problem: Problem) -> Allocation:
        if not problem.private:
            raise PlanError(
                "allocate.no-private-class",
                f"{self.name} has no private class to make a claim for",
                "use another allocation",
            )
        if len(problem.targets) != len(problem.sigma):
            raise PlanError(
                "allocate.not-know-epsilon",
                f"{self.name} does not know ε of the classes",
                "use make_plan(epsilon=…)",
            )
        picked, because = sensitive_layers(problem, self.sensitive, self.share, self.name)
        layers = len(problem.sizes)
        parts = np.ones(layers) if self.split == "even" else measured(problem, "fisher", self.name)
        target = min(problem.targets[k] for k in problem.private)
        each = target / problem.steps * parts / parts.sum()
        noise = np.where(problem.noised(), each * np.where(picked, 1.0, 0.5), 0.0)
        bound = 2.0 * np.where(picked, 1.0, 5.0) * np.sqrt(np.asarray(problem.sizes, dtype=np.float64))
        clip = tuple(
            tuple(
                (math.inf if math.isinf(sigma) else float(c)) if reached else 0.0
                for c, reached in zip(bound, reach, strict=True)
            )
            for reach, sigma in zip(problem.reach, problem.sigma, strict=True)
        )
        return Allocation(
            clip=clip,
            noise=tuple(noise.tolist()),
            clipping=Clipping.ELEMENTWISE,
            claimed=tuple(target if k in problem.private else 0.0 for k in range(len(clip))),
            why=(
                because,
                f"printed-ladp reproduces algorithm 1: ε = {target:g} over {problem.steps:,} steps and {layers} layers "
                f"is noise of standard deviation {noise[noise > 0].min():.3g} to {noise.max():.3g} on a batch gradient "
                f"that one contribution can move by {bound.max():.4g}. Its claim does not hold.",
            ),
        )


printed_ladp = PrintedLADP()
