"""`proportional`: every layer takes the same share of the budget, so its noise follows its threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.allocate.options import form, measured
from lamina.allocate.problem import Allocation, Problem
from lamina.allocate.shares import by_shares, shaped
from lamina.plan import Clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Proportional:
    """w_l = 1/L_k, hence S_l = sigma_k·√L_k·C[k,l]: the same signal-to-noise ratio for every layer's whole gradient.

    C follows the typical norms n_l of the measurement; without one √d_l, the norm of a gradient whose entries are
    all alike. (With even C equal shares would be `uniform`.) Box clipping unless `clipping` says joint.
    """

    name: ClassVar[str] = "proportional"
    clipping: Clipping = Clipping.BOX

    def __post_init__(self) -> None:
        object.__setattr__(self, "clipping", form(self.name, self.clipping))

    def __call__(self, problem: Problem) -> Allocation:
        if problem.measure is None:
            shape, source = np.sqrt(np.asarray(problem.sizes, dtype=np.float64)), "√d of each layer"
        else:
            shape = measured(problem, "norms", self.name)
            source = f"the typical norms on the proxy ({problem.measure.proxy})"
        clip = shaped(problem, shape)
        return Allocation(
            clip=clip,
            noise=by_shares(problem, clip, np.ones(len(problem.sizes))),
            clipping=self.clipping,
            why=(
                f"proportional gives every layer the same share of the budget; C follows {source}, S follows C.",
            ),
        )


proportional = Proportional()
