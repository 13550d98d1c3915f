"""Gradients of each example with the same random draws as in a pass of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree
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


def replayed_by_autograd(model: nn.Module, losses: Callable[[], Tensor], seed: int) -> dict[str, Tensor]:
    """(n, *shape) of each example's loss, by plain autograd, in one forward pass of the batch from a seed."""
    with ReplayedDraws(seed):
        computed = losses()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [
        torch.autograd.grad(loss, list(params.values()), retain_graph=True, materialize_grads=True) for loss in computed
    ]
    return {name: torch.stack([g[i].double() for g in each]) for i, name in enumerate(params)}


class _Losses(nn.Module):
    def __init__(self, model: nn.Module, losses: Callable[[nn.Module, Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, x: Any, y: Any) -> Tensor:
        x, y = pytree.tree_map(lambda t: t.unsqueeze(0), (x, y))
        return self.losses(self.model, x, y).sum()


def replayed_by_vmap(
    model: nn.Module, losses: Callable[[nn.Module, Any, Any], Tensor], x: Any, y: Any, seed: int
) -> dict[str, Tensor]:
    """As `replayed_by_autograd`, by `vmap(grad)`: it draws for all examples at once, and so what the batch draws.

    Not where one draw is for the whole batch, or where memory that has no batch axis is filled in place.
    """
    call = _Losses(model, losses)
    params = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def one(tensors: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        return functional_call(call, tensors, (x, y))

    with ReplayedDraws(seed):
        found = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")(params, x, y)
    return {name.removeprefix("model."): g.double() for name, g in found.items()}
