"""Gradients of each example with the same random draws as in a pass of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class ReplayedDraws(TorchDispatchMode):
    """Random numbers from a seed, by index: torch fills in the order of memory, which is not the same when attached."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket.__name__.endswith("_"):
            return args[0].copy_(func(torch.empty(args[0].shape), *args[1:], **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def replayed_gradients(model: nn.Module, losses: Callable[[], Tensor], seed: int) -> dict[str, Tensor]:
    """(n, *shape) of each example's loss, by plain autograd, in one forward pass of the batch from a seed."""
    with ReplayedDraws(seed):
        computed = losses()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [
        torch.autograd.grad(loss, list(params.values()), retain_graph=True, materialize_grads=True) for loss in computed
    ]
    return {name: torch.stack([g[i].double() for g in each]) for i, name in enumerate(params)}
