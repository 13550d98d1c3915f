"""How a contribution's gradient is bounded: box and joint clip factors (docs/theory.md, "One step").

    box    layer l of a class-k contribution is scaled by  min(1, C[k,l] / ‖g_l‖)
    joint  all its layers by one factor                    min(1, (1/sigma_k) / ‖(g_l / S_l)_l‖)

A layer that the class does not reach gets 0; a public class gets 1; what is not finite gets 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.engine.norms import SAFETY
from lamina.engine.unitgrad import Clip, UnitGrad, Weights

_TINY = 1e-300
_FAINT, _NORMAL = 2.0**-100, 1e-35  # a contribution 2^100 times too large is left out


def safe(bound: Tensor, scale: float) -> Tensor:
    """Bounds as `weights_for` wants them: shrunk by more than a norm can read low, times the scale."""
    return bound * (SAFETY * scale)


def weights_for(norm_sq: Tensor, bound: Tensor, scale: float) -> Weights:
    """scale · min(1, bound/norm), for squared norms and `safe` bounds (0: not reached, inf: public)."""
    factor = norm_sq.clamp(min=_TINY).rsqrt_().mul_(bound).clamp_(max=scale)
    torch.threshold_(factor, max(scale * _FAINT, _NORMAL), 0.0)  # before it becomes a denormal in float32
    if math.isfinite(norm_sq.sum().item()):
        return Weights(factor, None)
    finite = torch.isfinite(norm_sq)
    return Weights(torch.where(finite, factor, 0.0), ~finite)


def box(bound: Tensor, scale: float) -> Clip:
    """The clip of one layer, for contributions with `safe` thresholds (P,)."""
    return lambda norm_sq, low, high: weights_for(norm_sq, bound[low:high], scale)


def clip_and_add(parts: Sequence[tuple[UnitGrad, Tensor]], clip: Clip) -> Weights:
    """Clip a layer made of several tensors by its whole norm, and add it to their sums. Returns the factors.

    What can be measured cheaply is measured first; of what must be formed to be measured, the
    largest is measured and summed in one pass.
    """
    *rest, (last, out) = sorted(parts, key=_cost) if len(parts) > 1 else parts
    others: Tensor | None = None
    for grad, _ in rest:
        others = grad.norm_sq() if others is None else others + grad.norm_sq()
    weights = last.clip_and_add(out, others, clip)
    for grad, target in rest:
        grad.add_to(target, weights)
    return weights


def _cost(part: tuple[UnitGrad, Tensor]) -> tuple[bool, int]:
    return part[0].formed, part[0].shape.numel()
