"""Modules of their own kind that are given flattened tokens: run once per contribution, on that one's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lamina.engine.owner import Examples, OwnerSite
from lamina.engine.rules.rule import Apply, Site
from lamina.errors import OwnershipError


class FlattenedSite(Site):
    """Rows (N·T, …) of N examples in order become (N, T, …), and every example goes through the module alone.

    Every tensor among arguments and results must have a row per token: a router's logits, scores and choices.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], examples: Examples) -> None:
        self.name, self.examples, self.original = name, examples, forward
        self.inner = OwnerSite(name, module, self._together, examples)
        self.parameters = self.inner.parameters

    def forward(self, apply: Apply, *args: Any, **kwargs: Any) -> Any:
        n = self.examples()
        args, kwargs = pytree.tree_map(
            lambda t: self._apart(t, n) if isinstance(t, Tensor) else t, (args, kwargs)
        )
        out = self.inner.forward(apply, *args, **kwargs)
        return pytree.tree_map(lambda t: t.flatten(0, 1) if isinstance(t, Tensor) else t, out)

    def _apart(self, t: Tensor, n: int | None) -> Tensor:
        if not n or not t.dim() or t.shape[0] % n:
            raise OwnershipError(
                "engine.given-tensor-shape",
                f"'{self.name}' was given a tensor of shape {tuple(t.shape)} for {n} examples: whose rows are they?",
                "keep as many tokens per example, or name the block above it in Engine(..., per_contribution=[...])",
            )
        apart: Tensor = t.unflatten(0, (n, -1))
        return apart

    def _together(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, for arguments with a batch axis in front of the tokens."""
        n = next(len(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        args, kwargs = pytree.tree_map(
            lambda t: t.flatten(0, 1) if isinstance(t, Tensor) else t, (args, kwargs)
        )
        out = self.original(*args, **kwargs)
        return pytree.tree_map(lambda t: t.unflatten(0, (n, -1)) if isinstance(t, Tensor) else t, out)
