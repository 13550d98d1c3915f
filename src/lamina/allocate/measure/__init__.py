"""How sensitive each layer is, learned from proxies and from noised releases; never from private data.

measure    everything below in one call: a `Measure`, which allocations read and a file can keep
profile    statistics of pre-activations on proxy inputs (phase 1 of LSAB)
bounds     Δ per layer by recursion through the traced graph: tight, worst, printed (phase 2)
noise_cost m_l, loss increase per unit of noise variance, by perturbation
fisher     norms and Fisher information of per-example gradients
influence  how strongly single examples act on a reference loss through each layer
energy     `EnergyEstimate`: gradient energy read from noised sums, for shares that follow it
"""

from __future__ import annotations

from lamina.allocate.measure.bounds import SensitivityBounds, bounds
from lamina.allocate.measure.energy import EnergyEstimate
from lamina.allocate.measure.example_gradients import Fisher, fisher
from lamina.allocate.measure.influence import Influence, influence
from lamina.allocate.measure.measure import Measure, NoiseCost, measure, noise_cost
from lamina.allocate.measure.profile import ActivationProfile, profile
from lamina.allocate.measure.trace import TracedGraph, trace

__all__ = [
    "measure", "Measure",
    "profile", "ActivationProfile",
    "trace", "TracedGraph",
    "bounds", "SensitivityBounds",
    "noise_cost", "NoiseCost",
    "fisher", "Fisher",
    "influence", "Influence",
    "EnergyEstimate",
]  # fmt: skip
