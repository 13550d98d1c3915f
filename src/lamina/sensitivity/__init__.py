"""How sensitive each layer is, learned from proxies and from noised releases; never from private data.

measure    everything below in one call: a `Measure`, which allocations read and a file can keep
profile    statistics of pre-activations on proxy inputs (phase 1 of LSAB)
bounds     Δ per layer by recursion through the traced graph: tight, worst, printed (phase 2)
harm       m_l, loss increase per unit of noise variance, by perturbation; `hessian_trace` is its check
fisher     norms and Fisher information of per-example gradients
influence  what single examples do to a loss through each layer
energy     `EnergyEstimate`: gradient energy read from noised sums, for shares that follow it
"""

from __future__ import annotations

from lamina.sensitivity.bounds import Bounds, bounds
from lamina.sensitivity.energy import EnergyEstimate
from lamina.sensitivity.fisher import Fisher, fisher
from lamina.sensitivity.graph import Graph, trace
from lamina.sensitivity.harm import Harm, harm
from lamina.sensitivity.hessian import Hessian, hessian_trace
from lamina.sensitivity.influence import Influence, influence
from lamina.sensitivity.measure import measure
from lamina.sensitivity.measurement import Measure
from lamina.sensitivity.profile import Profile, profile

__all__ = [
    "measure", "Measure",
    "profile", "Profile",
    "trace", "Graph",
    "bounds", "Bounds",
    "harm", "Harm",
    "hessian_trace", "Hessian",
    "fisher", "Fisher",
    "influence", "Influence",
    "EnergyEstimate",
]  # fmt: skip
