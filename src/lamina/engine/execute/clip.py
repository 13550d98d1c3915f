"""Clip factors: by how much a contribution's gradient is scaled down.

    box    layer l of a class-k contribution is scaled by  min(1, C[k,l] / ‖g_l‖)
    joint  all its layers by one factor                    min(1, (1/sigma_k) / ‖(g_l / S_l)_l‖)

A layer that the class does not reach gets 0; a public class gets 1; what is not finite gets 0 (docs/theory.md, "One step").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.engine.execute.norms import NORM_SAFETY

LEAST_FACTOR = 2.0**-100  # a contribution that is 2^100 times too large is left out
_MIN_NORM_SQ = 1e-300


@dataclass(frozen=True, eq=False)
class ClipWeights:
    """The factor of each contribution, and which contributions must be left out of a product."""

    factor: Tensor  # (P,) float64, 0 where a contribution does not reach the layer or is not finite
    broken: Tensor | None  # (P,) bool, or None where every contribution is finite

    def slice(self, low: int, high: int) -> ClipWeights:
        return ClipWeights(self.factor[low:high], None if self.broken is None else self.broken[low:high])

    def clean(self, t: Tensor) -> Tensor:
        """Zero the broken contributions with `where`: multiplying NaN by 0 would keep it."""
        if self.broken is None:
            return t
        return t.masked_fill(self.broken.view(-1, *[1] * (t.dim() - 1)).to(t.device), 0)


def safe_bounds(bound: Tensor) -> Tensor:
    """Bounds for `clip_weights`: shrunk by more than a norm can read low."""
    return bound * NORM_SAFETY


def clip_weights(norm_sq: Tensor, bound: Tensor) -> ClipWeights:
    """min(1, bound/norm), for squared norms and `safe_bounds` (0: not reached, inf: public); 0 below `LEAST_FACTOR`."""
    factor = norm_sq.clamp(min=_MIN_NORM_SQ).rsqrt_().mul_(bound).clamp_(max=1.0)
    torch.threshold_(factor, LEAST_FACTOR, 0.0)
    if math.isfinite(norm_sq.sum().item()):
        return ClipWeights(factor, None)
    finite = torch.isfinite(norm_sq)
    return ClipWeights(torch.where(finite, factor, 0.0), ~finite)


class BoxClip:
    """The clip of one layer: its safe bounds, by contribution."""

    def __init__(self, bound: Tensor) -> None:
        self.bound = bound

    def __call__(self, norm_sq: Tensor, low: int, high: int) -> ClipWeights:
        """Of contributions low … high."""
        return clip_weights(norm_sq, self.bound[low:high])
