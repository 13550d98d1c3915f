"""The two matrices of softmax attention: the Jacobian of a row of weights, and the weights as a whole.

A row a of weights (a ≥ 0, Σa = 1) has the Jacobian J = diag(a) - aaᵀ with respect to its logits, and

    max a(1-a) ≤ ‖J‖ ≤ 2·max a(1-a) ≤ ½           (a diagonal entry; the largest absolute row sum)

‖J‖ is the largest root of the secular equation Σ_i a_i/(a_i - λ) = 0, between the two largest weights. With a_1 the
largest and ψ(λ) = Σ_{i>1} a_i/(λ - a_i), it reads G(λ) = 1/ψ(λ) - 1 + λ/a_1 = 0; 1/ψ is concave, so Newton's
method climbs to the root from its first step on and cannot leave the interval. O(n) per row instead of O(n³).

The matrix of all rows is row-stochastic. Its norm is not at most 1: when all n queries look at one key it is √n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.errors import PlanError

_NEWTON = 60
_ENTRIES = 1 << 17  # at a time: a megabyte of float64, so that it stays in the cache


def softmax_jacobian_norm(weights: Tensor) -> Tensor:
    """‖diag(a) - aaᵀ‖ of every row a of weights (..., n), in float64, to about 1e-14 relative."""
    rows = _stochastic(weights)
    flat = rows.reshape(-1, rows.shape[-1])
    size = max(_ENTRIES // flat.shape[1], 1)
    norms = [_largest_root(part) for part in flat.split(size)]
    return torch.cat([*norms, flat.new_empty(0)]).reshape(rows.shape[:-1])


def expected_jacobian_norm(weights: Tensor) -> float:
    """The mean of ‖J‖ over all rows: the local constant of a softmax on these proxy inputs. At most ½."""
    if weights.numel() == 0:
        raise PlanError(
            "measure.no-attention-weights",
            "there are no attention weights to average",
            "run at least one proxy batch",
        )
    return float(softmax_jacobian_norm(weights).mean())


def row_stochastic_norm(weights: Tensor) -> Tensor:
    """‖A‖ of every matrix of weights (..., queries, keys), in float64: from 1 (or less, if padded) up to √queries."""
    if weights.ndim < 2:
        raise PlanError(
            "measure.attention-weights-shape",
            f"attention weights have shape {tuple(weights.shape)}",
            "give (..., queries, keys)",
        )
    a = _stochastic(weights)
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    top: Tensor = torch.linalg.eigvalsh(gram)[..., -1]
    return top.clamp(min=0).sqrt()


def _stochastic(weights: Tensor) -> Tensor:
    """Rows in float64 that sum to 1; refused where they do not nearly do so already."""
    a = weights.detach().to(torch.float64)
    if a.ndim == 0 or a.shape[-1] == 0:
        raise PlanError(
            "measure.attention-weights-shape-give",
            f"attention weights have shape {tuple(a.shape)}",
            "give rows of at least one weight",
        )
    if not torch.isfinite(a).all() or (a < 0).any():
        raise PlanError(
            "measure.attention-weights-negative",
            "attention weights are negative or not finite",
            "give the output of softmax; a row whose keys are all masked has none: leave it out",
        )
    total = a.sum(-1, keepdim=True)
    off = (total - 1).abs().max() if total.numel() else total.new_zeros(())
    if off > 1e-2:  # half precision sums to within 1e-3
        raise PlanError(
            "measure.row-attention-weights",
            f"a row of attention weights sums to 1 ± {float(off):.3g}",
            "give the output of softmax",
        )
    return a / total


def _largest_root(a: Tensor) -> Tensor:
    """λ_max of diag(a) - aaᵀ for rows (m, n)."""
    top, place = a.max(-1)
    rest = a.scatter(-1, place.unsqueeze(-1), 0.0)
    second, others = rest.amax(-1), rest.sum(-1)  # others = 1 - top without its cancellation
    root = torch.minimum(top, 2 * top * others)
    # a tie makes the root equal to both, and one weight alone makes J = 0: nothing to iterate, avoid 0/0
    open_rows = (others > 0) & (second < top)
    root = torch.where(open_rows, root, torch.where(others > 0, top, torch.zeros_like(top)))
    for _ in range(_NEWTON):
        above = (root.unsqueeze(-1) - rest).clamp(min=torch.finfo(torch.float64).tiny)
        share = rest / above
        psi = share.sum(-1)
        rise = (share / above).sum(-1) / psi.square() + 1 / top
        step = (1 / psi - 1 + root / top) / rise
        new = torch.where(open_rows, (root - step).maximum(second), root)
        if ((new - root).abs() <= 1e-10 * root).all():  # quadratic: the error is the square of that
            return new
        root = new
    return root
