"""The methods that are compared: what the document calls its baselines, its own method and its ablations, and ours.

All of them have the same first weights, Poisson samples, optimiser, clip norm and true ε, so that a difference is the
method's. The document's accountants are not copied: an accountant changes the number that is printed beside a model,
not the model. What zCDP without sampling would charge is in a column of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lamina.allocate.basic import LSAB, Pareto, Quantile, flat, refuse_wide_spread, uniform
from lamina.allocate.ladp import LADP
from lamina.allocate.paper import PaperLSAB
from lamina.allocate.problem import (
    Allocate,
    Allocation,
    AllocationProblem,
    clip_of_shape,
    measured_row,
    noise_by_shares,
    noise_weights,
    optimal_noise,
)
from lamina.plan.step_plan import Clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShaped:
    """C ∝ a row of the measure (`tight`, `worst`, `printed`), as boxes; S as `noise` says.

    optimal  least Σ m·S², as LSAB has it
    shares   every layer takes the same part of the budget: S ∝ C
    equal    one S for all layers
    """

    name: ClassVar[str] = "study"
    row: str
    noise: str = "optimal"

    def __call__(self, problem: AllocationProblem) -> Allocation:
        delta = measured_row(problem, self.row, self.name)
        refuse_wide_spread(delta, self.row)
        clip = clip_of_shape(problem, delta)
        if self.noise == "optimal":
            noise = optimal_noise(problem, clip, noise_weights(problem, "harm", self.name))
        elif self.noise == "shares":
            noise = noise_by_shares(problem, clip, np.ones(len(problem.sizes)))
        else:
            noise = problem.equal_noise()
        return Allocation(clip=clip, noise=noise, clipping=Clipping.BOX)


PLAIN, ENGINE, OPACUS, FEDAVG, NOBODY, LAPLACE = "plain", "engine", "opacus", "fedavg", "nobody", "laplace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of a table. `paper` is what the document calls it, `gamma` where its printed Δ has the factor γ."""

    name: str
    title: str
    what: str
    allocate: Callable[[], Allocate] | None = None
    trained_by: str = ENGINE
    paper: str = ""
    accountant: str = "pld"
    routed: bool = False
    gamma: str = "all"


_ALL = (
    Method(name="none", title="no privacy", what="the same training without clipping and noise", trained_by=PLAIN,
           paper="No-DP AE"),
    Method(name="public", title="public data alone", what="the first weights, after pre-training on simulated patients",
           trained_by=NOBODY),
    Method(name="laplace", title="pure DP, the last layer", what="Laplace noise and pure ε; the classifier of the code alone is private",
           trained_by=LAPLACE, allocate=lambda: uniform),
    Method(name="global", title="global Lipschitz", what="boxes, C ∝ Δ by global constants, S ∝ C",
           allocate=lambda: DeltaShaped(row="worst", noise="shares"), paper="Pure DP (Global Lip.)"),
    Method(name="rdp", title="flat clip, RDP accountant", what="joint clip, one S; sigma by Rényi DP: true ε is smaller",
           allocate=lambda: flat, accountant="rdp", paper="RDP Loose Bound"),
    Method(name="uniform", title="even boxes", what="boxes, even C, one S", allocate=lambda: uniform, paper="zCDP Naive"),
    Method(name="quantile", title="adaptive boxes", what="boxes, C follows paid medians of the norms",
           allocate=Quantile, paper="DP-BERT Adaptive"),
    Method(name="fedavg", title="DP-FedAvg", what="patients as clients: local steps, flat clip of the update",
           trained_by=FEDAVG, paper="DP-FedAvg"),
    Method(name="opacus", title="Opacus, flat", what="Opacus 1.6; one window of each patient, so that its unit is the patient",
           trained_by=OPACUS),
    Method(name="flat", title="flat clip", what="joint clip, one S", allocate=lambda: flat),
    Method(name="pareto", title="pareto", what="joint clip, C ∝ norms on the proxy, least Σ m·S²",
           allocate=lambda: Pareto(weights="harm")),
    Method(name="ladp", title="LADP", what="boxes, presets 1 : 5, shares follow the released energy", allocate=LADP),
    Method(name="routed", title="routed", what="half of the patients reach only the top quarter of the layers",
           allocate=Pareto, routed=True),
    Method(name="lsab", title="LSAB", what="boxes, C ∝ Δ by local constants, least Σ m·S²", allocate=LSAB,
           paper="LSAB-zCDP (Proposed)†"),
    Method(name="lsab-global", title="LSAB without local constants", what="C ∝ Δ by global constants",
           allocate=lambda: DeltaShaped(row="worst"), paper="w/o Local Lipschitz (global only)"),
    Method(name="lsab-printed", title="LSAB, Δ as printed", what="C ∝ Δ by the printed recursion, with γ of equation 12",
           allocate=lambda: DeltaShaped(row="printed"), paper="LSAB-zCDP (Full)"),
    Method(name="lsab-gamma", title="LSAB, Δ as printed, γ = 1 except at norm layers", what="no inter-layer correction",
           allocate=lambda: DeltaShaped(row="printed"), gamma="norm", paper="w/o Inter-layer Correl. Correction"),
    Method(name="lsab-gamma-norm", title="LSAB, Δ as printed, γ = 1 at norm layers", what="no correction by norm layers",
           allocate=lambda: DeltaShaped(row="printed"), gamma="elsewhere", paper="w/o BatchNorm γ_1 (γ = 1)"),
    Method(name="lsab-equal", title="LSAB with one S", what="C ∝ Δ by local constants, one S for all layers",
           allocate=lambda: DeltaShaped(row="tight", noise="equal"), paper="w/o Pareto Noise Allocation (uniform)"),
    Method(name="printed", title="LSAB as printed", what="equation 16 as it stands: the true ε is far above the claim",
           allocate=PaperLSAB),
)  # fmt: skip

METHODS = {method.name: method for method in _ALL}
