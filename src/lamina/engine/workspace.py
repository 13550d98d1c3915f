"""Memory that is used again: gradients formed some contributions at a time would otherwise fault in fresh pages
for every chunk, which cost more than measuring them."""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor

_local = threading.local()
_LARGEST = 1 << 23  # elements; what is larger is allocated and given back


def take(slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, valid until the same slot of this thread is taken again."""
    size = prod(shape)
    if size > _LARGEST:
        return torch.empty(shape, dtype=dtype)
    buffers: dict[tuple[str, torch.dtype], Tensor] = vars(_local).setdefault("buffers", {})
    buffer = buffers.get((slot, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = buffers[slot, dtype] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)


def release() -> None:
    """Give the memory back, at the end of a backward pass."""
    vars(_local).pop("buffers", None)
