"""Norms that do not read low.

A clip bound holds only if the norm is right. float32 `vector_norm` over d = 10⁷ elements reads
4e-4 low, and reducing in float64 directly is 10 times slower. So: float32 over blocks of at most
64 elements, then float64 over the blocks. The vectorised reduction adds at most 4 terms per lane,
so a block's norm is off by less than 3e-7, and `SAFETY` shrinks every clip factor by more.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_BLOCK = 64
SAFETY = 1.0 - 2.0**-18


def row_norm_sq(t: Tensor) -> Tensor:
    """(P, …) → (P,) squared norms in float64. Elements beyond 1e19 make it infinite; it never reads low
    by more than elements below 1e-22 can."""
    t = t.reshape(t.shape[0], t.shape[1:].numel())
    if t.dtype == torch.float64:
        return _square(torch.linalg.vector_norm(t, dim=1))
    t = t.float().contiguous()
    width = t.shape[1]
    if width <= _BLOCK:
        return _square(torch.linalg.vector_norm(t, dim=1))
    size = block(width)
    whole = width - width % size
    blocks = t.view(t.shape[0], -1, size) if whole == width else t[:, :whole].unflatten(1, (-1, size))
    total = _square(torch.linalg.vector_norm(blocks, dim=2)).sum(1)
    if whole < width:
        total += _square(torch.linalg.vector_norm(t[:, whole:].contiguous(), dim=1))
    return total


def _square(norm: Tensor) -> Tensor:
    return norm.double().square_()


@lru_cache(maxsize=1024)
def block(width: int) -> int:
    """A block length that divides the width if a long one does, so that no rest is left."""
    return next((b for b in range(_BLOCK, 23, -1) if width % b == 0), _BLOCK)
