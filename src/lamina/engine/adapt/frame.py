"""`Frame`: what a plan promised, and the one way in which C and S may become others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lamina.errors import PlanError
from lamina.plan.rescale import rescale
from lamina.plan.step import StepPlan

Array = NDArray[np.float64]
Rows = Sequence[Sequence[float]]


class Frame:
    """The declared plan, seen as thresholds and shares.

    The height of layer l is  h_l = max_k sigma_k·C[k,l]  over the private classes; a simplex of shares w turns it into

        S_l = κ·h_l/√w_l,      κ the least factor for which sigma_k ≥ declared for every class.

    With one class, w_l is the part of its budget that layer l takes, whatever w is. Layers that no private class
    reaches keep the S they have. `sizes` are the numbers of a layer that are noised, all of them unless said otherwise.
    """

    def __init__(self, plan: StepPlan, sizes: Sequence[int] | None = None) -> None:
        self.plan = plan
        classes = range(len(plan.classes))
        self.private = tuple(
            k for k in classes if not plan.classes[k].public and math.isfinite(plan.sigma(k))
        )
        self.sigma = tuple(plan.sigma(k) for k in classes)
        self.bits = tuple(plan.bits(k) for k in classes)
        self.noised = np.flatnonzero(self.heights(plan.clip) > 0)
        every = [layer.size for layer in plan.layers] if sizes is None else sizes
        self.sizes = tuple(every[i] for i in self.noised.tolist())

    def heights(self, clip: Rows) -> Array:
        """h of every layer; 0 where no private class reaches."""
        rows = [np.asarray(clip[k], dtype=np.float64) * self.sigma[k] for k in self.private]
        return np.max(rows, axis=0) if rows else np.zeros(len(self.plan.layers))

    def shares(self, clip: Rows, noise: Sequence[float]) -> Array:
        """The shares of the noised layers that this C and S stand for."""
        ratio = self.heights(clip)[self.noised] / np.asarray(noise, dtype=np.float64)[self.noised]
        ratio = ratio / ratio.max()
        return np.asarray(ratio**2 / np.sum(ratio**2))

    def stretched(self, clip: Rows, factors: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """C with every layer of the private classes times its factor."""
        return tuple(
            tuple(c * f for c, f in zip(row, factors, strict=True)) if k in self.private else tuple(row)
            for k, row in enumerate(clip)
        )

    def fitted(self, clip: Rows, shares: Array, factor: float = 1.0) -> StepPlan | None:
        """The plan with this C and these shares, and sigma_k at least `factor` times the declared one, exactly.

        None if no plan can be made of them: a number that is not finite, or outside what float32 sums can carry.
        """
        with np.errstate(all="ignore"):
            ratio = self.heights(clip)[self.noised] / np.sqrt(shares)
        if not (np.isfinite(ratio).all() and (ratio > 0).all()):
            return None
        shape = np.zeros(len(self.plan.layers))
        shape[self.noised] = ratio
        wanted = [s * factor for s in self.sigma]
        try:
            noise = list(rescale(clip, shape.tolist(), wanted, self.bits))
            for i in set(range(len(noise))) - set(self.noised.tolist()):
                noise[i] = self.plan.noise[i]
            made = replace(self.plan, clip=tuple(tuple(row) for row in clip), noise=tuple(noise))
        except (PlanError, OverflowError):
            return None
        return made if self.keeps(made, factor) else None

    def keeps(self, plan: StepPlan, factor: float = 1.0) -> bool:
        """Whether every class has at least `factor` times its declared sigma."""
        return all(plan.sigma(k) >= self.sigma[k] * factor for k in self.private)
