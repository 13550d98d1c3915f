"""What a model can tell the engine during its forward pass: who owns which rows, and how many examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lamina.errors import OwnershipError

_owner: ContextVar[Tensor | None] = ContextVar("lamina_rows", default=None)
_examples: ContextVar[int | None] = ContextVar("lamina_examples", default=None)


@contextmanager
def rows(owner: Tensor) -> Iterator[None]:
    """Say which example of the batch each leading row belongs to, for the layers called inside.

    Needed where the leading axis is not the batch's: flattened tokens, windows, the tokens that
    were routed to one expert. `owner[r]` is the example's place in the batch; -1 marks a row that
    belongs to nobody.

    >>> import torch, lamina
    >>> tokens = torch.randn(4 * 16, 8)                        # 4 examples of 16 tokens, flattened
    >>> with lamina.rows(torch.arange(4).repeat_interleave(16)):
    ...     y = torch.nn.Linear(8, 8)(tokens)
    """
    if owner.dim() != 1 or owner.dtype.is_floating_point or owner.dtype == torch.bool:
        raise OwnershipError(
            "engine.rows-got-tensor",
            f"rows() got a tensor of shape {tuple(owner.shape)} and dtype {owner.dtype}",
            "give one integer per row: the place of its example in the batch",
        )
    token = _owner.set(owner.detach().long())
    try:
        yield
    finally:
        _owner.reset(token)


@contextmanager
def examples(count: int) -> Iterator[None]:
    """Say how many examples a forward pass carries, where its first argument does not show it."""
    token = _examples.set(count)
    try:
        yield
    finally:
        _examples.reset(token)


def current_rows() -> Tensor | None:
    return _owner.get()


def current_examples() -> int | None:
    return _examples.get()
