"""Figures of a plan that follow from C, S, q and a measurement: what is kept of a gradient, signal to noise.

The signal of layer l is what a step's clipped sum would be if all contributions pulled the same way,

    signal_l = Σ_k b_k·n̂_kl,      b_k = q_k·N_k contributions of class k expected in a step,

with n̂_kl the norm that a typical contribution has at layer l after clipping:

    box          min(n_l, C[k,l])
    joint        n_l·min(1, r_k/‖(n_j/S_j)_j‖),   r_k = ‖(C[k,j]/S_j)_j‖, over the layers that it reaches
    elementwise  the mean gradient instead of the sum: min(n_l, c_l·√d_l), c_l = C_l/(2√d_l), and b = 1
    no measure   C[k,l] (elementwise C_l/2): as if every contribution were at its bound

n_l is the typical norm of an example's gradient on the proxy. The noise of layer l has the norm S_l·√d_l, and

    signal to noise = signal_l/(S_l·√d_l):

an upper figure at the first step. Gradients that disagree cancel, and they shrink as the model learns.

`sizes` are the d_l that count: the numbers that some class reaches (plan/opened.py), where slices leave others out.
Norms were measured on whole layers, and are taken to shrink by √(d_l/size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lamina.plan import Clipping, StepPlan
from lamina.plan.table import shares

if TYPE_CHECKING:
    from lamina.sensitivity import Measure

Array = NDArray[np.float64]
Sizes = Sequence[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """One row of `lamina plan --explain`. None: nothing was measured, or the layer has no noise."""

    name: str
    depth: float
    size: int
    reached: int
    clip: tuple[float, ...]
    noise: float
    share: float
    tight: float | None
    worst: float | None
    norm: float | None
    signal_to_noise: float | None


def layer_figures(plan: StepPlan, measure: Measure | None, sizes: Sizes = None) -> tuple[LayerFigures, ...]:
    """A row for each layer, in the order of the plan."""
    ratio, numbers = signal_to_noise(plan, measure, sizes), _numbers(plan, sizes)
    return tuple(
        LayerFigures(
            name=layer.name,
            depth=layer.depth,
            size=layer.size,
            reached=numbers[i],
            clip=tuple(row[i] for row in plan.clip),
            noise=plan.noise[i],
            share=share,
            tight=measure.tight[i] if measure is not None and measure.has_bounds else None,
            worst=measure.worst[i] if measure is not None and measure.has_bounds else None,
            norm=None if measure is None else measure.norms[i],
            signal_to_noise=ratio[i],
        )
        for i, (layer, share) in enumerate(zip(plan.layers, shares(plan), strict=True))
    )


def signal_to_noise(plan: StepPlan, measure: Measure | None, sizes: Sizes = None) -> tuple[float | None, ...]:
    """signal_l/(S_l·√d_l) of every layer; None where there is no noise."""
    found = zip(signal(plan, measure, sizes).tolist(), plan.noise, _numbers(plan, sizes), strict=True)
    return tuple(up / (s * math.sqrt(d)) if s > 0 else None for up, s, d in found)


def whole_signal_to_noise(plan: StepPlan, measure: Measure | None, sizes: Sizes = None) -> float | None:
    """‖signal‖/√(Σ_l d_l S_l²) over the layers with noise."""
    noise, up = np.array(plan.noise), signal(plan, measure, sizes)
    power = _power(plan, sizes)
    return float(np.linalg.norm(up[noise > 0]) / math.sqrt(power)) if power > 0 else None


def total_noise(plan: StepPlan, sizes: Sizes = None) -> float:
    """Σ_l d_l S_l², times (b/B)²: what a plan divides by another B counts as the optimiser sees it."""
    return _power(plan, sizes) * (float(expected(plan).sum()) / plan.batch) ** 2


def kept(plan: StepPlan, measure: Measure, sizes: Sizes = None) -> tuple[float | None, ...]:
    """The part of a typical contribution's norm that clipping keeps, by class; None for a class that is not clipped."""
    found: list[float | None] = []
    n = _norms(plan, measure, sizes)
    for k, entry in enumerate(plan.classes):
        reach = np.array(plan.clip[k]) > 0
        whole = float(np.linalg.norm(n[reach]))
        found.append(
            None if entry.public or not whole else float(np.linalg.norm(_typical(plan, k, n)) / whole)
        )
    return tuple(found)


def expected(plan: StepPlan) -> Array:
    """b_k, the contributions of each class that a step expects."""
    return np.array([entry.sampling_rate * (entry.population or 0) for entry in plan.classes])


def signal(plan: StepPlan, measure: Measure | None, sizes: Sizes = None) -> Array:
    """Σ_k b_k·n̂_kl by layer. A public class counts only where its norms were measured."""
    n = None if measure is None else _norms(plan, measure, sizes)
    rows = [_typical(plan, k, n) for k in range(len(plan.classes))]
    if plan.clipping is Clipping.ELEMENTWISE:
        return np.asarray(np.max(rows, axis=0))
    return np.asarray(expected(plan) @ np.array(rows))


def _typical(plan: StepPlan, k: int, n: Array | None) -> Array:
    """n̂_kl: the norms of a typical contribution of class k after clipping."""
    c, s = np.array(plan.clip[k]), np.array(plan.noise)
    reach = c > 0
    if plan.classes[k].public:
        return np.zeros(len(c)) if n is None else np.where(reach, n, 0.0)
    if plan.clipping is Clipping.ELEMENTWISE:
        c = c / 2
    if n is None:
        return c
    if plan.clipping is not Clipping.JOINT:
        return np.asarray(np.minimum(n, c))
    length = float(np.linalg.norm(n[reach] / s[reach]))
    return np.asarray(np.where(reach, n, 0.0) * min(1.0, plan.joint(k) / length if length else 1.0))


def _power(plan: StepPlan, sizes: Sizes) -> float:
    return math.fsum(d * s * s for d, s in zip(_numbers(plan, sizes), plan.noise, strict=True))


def _numbers(plan: StepPlan, sizes: Sizes) -> tuple[int, ...]:
    return tuple(layer.size for layer in plan.layers) if sizes is None else tuple(sizes)


def _norms(plan: StepPlan, measure: Measure, sizes: Sizes) -> Array:
    part = np.array(_numbers(plan, sizes)) / np.array([layer.size for layer in plan.layers])
    return np.asarray(np.array(measure.norms) * np.sqrt(part))
