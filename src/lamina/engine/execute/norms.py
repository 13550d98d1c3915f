"""Norms of contributions' gradients that do not read low, and the memory that they are measured in."""

from __future__ import annotations

import threading
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

# Norms that do not read low.
#
# A clip bound holds only if the norm is right. float32 `vector_norm` over d = 10⁷ elements reads
# 4e-4 low, and reducing in float64 directly is 10 times slower. So: float32 over blocks of at most
# 64 elements, then float64 over the blocks. The vectorised reduction adds at most 4 terms per lane,
# so a block's norm is off by less than 3e-7, and `NORM_SAFETY` shrinks every clip factor by more.
#
# Other devices add in an order of their own, and MPS has no float64: there, float32 over blocks of 16, twice, then
# float64 on the CPU, of one number for 256. In any order, a block's norm is off by at most 9·2^-24: 1.1e-6 in two levels,
# 2.2e-6 in a product of two norms, less than `NORM_SAFETY` takes. Factors of contributions, (P,) float64, are always
# kept on the CPU; only these numbers travel, never a gradient or a sum.

_MAX_BLOCK = 64
_BLOCK_ELSEWHERE = 16
NORM_SAFETY = 1.0 - 2.0**-18


def row_norm_sq(t: Tensor) -> Tensor:
    """(P, …) → (P,) squared norms in float64. Elements beyond 1e19 make it infinite; it never reads low
    by more than elements below 1.1e-19 can."""
    t = t.reshape(t.shape[0], t.shape[1:].numel())
    if t.dtype == torch.float64:
        return _square(torch.linalg.vector_norm(t, dim=1).cpu())
    t = t.float().contiguous()
    width = t.shape[1]
    if not t.is_cpu:
        return _norm_sq_elsewhere(t)
    if width <= _MAX_BLOCK:
        return _square(torch.linalg.vector_norm(t, dim=1))
    size = block_length(width)
    whole = width - width % size
    blocks = t.view(t.shape[0], -1, size) if whole == width else t[:, :whole].unflatten(1, (-1, size))
    total = _square(torch.linalg.vector_norm(blocks, dim=2)).sum(1)
    if whole < width:
        total += _square(torch.linalg.vector_norm(t[:, whole:].contiguous(), dim=1))
    return total


def _square(norm: Tensor) -> Tensor:
    return norm.double().square_()


def _norm_sq_elsewhere(t: Tensor) -> Tensor:
    """`row_norm_sq` of a tensor (P, width) on another device."""
    for _ in range(2):
        if rest := -t.shape[1] % _BLOCK_ELSEWHERE:
            t = torch.nn.functional.pad(t, (0, rest))
        t = torch.linalg.vector_norm(t.unflatten(1, (t.shape[1] // _BLOCK_ELSEWHERE, _BLOCK_ELSEWHERE)), dim=2)
    return _square(t.cpu()).sum(1)


def vector_norms(t: Tensor) -> Tensor:
    """(P, width) → (P,) norms in float64 outright, of the smallest and largest numbers too."""
    if t.is_cpu or t.dtype == torch.float64:
        norms: Tensor = torch.linalg.vector_norm(t, dim=1, dtype=torch.float64)
        return norms if t.is_cpu else norms.cpu()
    largest = torch.linalg.vector_norm(t, ord=torch.inf, dim=1) if t.shape[1] else t.new_zeros(len(t))
    size = torch.where(largest > 0, largest, 1.0)
    return row_norm_sq(t / size.unsqueeze(1)).sqrt_() * size.cpu().double()


def like_rows(factor: Tensor, t: Tensor) -> Tensor:
    """(P,) numbers of contributions, in the precision of t and where it is."""
    factor = factor.to(t.dtype)
    return factor if t.is_cpu else factor.to(t.device)


@lru_cache(maxsize=1024)
def block_length(width: int) -> int:
    """A block length that divides the width if a long one does, so that no rest is left."""
    return next((b for b in range(_MAX_BLOCK, 23, -1) if width % b == 0), _MAX_BLOCK)


# Memory that is used again: gradients formed some contributions at a time would otherwise fault in fresh pages
# for every chunk, which cost more than measuring them.

_thread_buffers = threading.local()
_MAX_BUFFER_ELEMENTS = 1 << 23  # elements; what is larger is allocated and given back


def take_buffer(slot: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
    """An uninitialised tensor where `like` is, valid until the same slot of this thread is taken again."""
    if like is not None and not like.is_cpu:  # whose memory torch keeps by itself
        return torch.empty(shape, dtype=dtype, device=like.device)
    size = prod(shape)
    return take_memory(slot, size, dtype)[:size].view(shape)


def take_memory(slot: str, size: int, dtype: torch.dtype) -> Tensor:
    """As `take_buffer`: a vector of at least this size."""
    if size > _MAX_BUFFER_ELEMENTS:
        return torch.empty(size, dtype=dtype)
    buffers: dict[tuple[str, torch.dtype], Tensor] = vars(_thread_buffers).setdefault("buffers", {})
    buffer = buffers.get((slot, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = buffers[slot, dtype] = torch.empty(size, dtype=dtype)
    return buffer


def release_buffers() -> None:
    """Give the memory back, at the end of a backward pass."""
    vars(_thread_buffers).pop("buffers", None)
