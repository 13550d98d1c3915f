"""Linear maps: nn.Linear, and the transposed `Conv1D` of Hugging Face GPT-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.engine.layout import Layout
from lamina.engine.rules.rule import Apply, Kept, Params, Rule, Site, autocast, demand_rank
from lamina.engine.unitgrad import Dense, Outer, Product, UnitGrad


class Linear(Rule):
    """y = x Wᵀ + b. One contribution: dW = Σ_t g_t ⊗ x_t, db = Σ_t g_t over its positions t."""

    def __init__(self, *, transposed: bool = False) -> None:
        self.transposed = transposed  # y = x W + b: dW = Σ x_t ⊗ g_t

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, Kept]:
        demand_rank(x, 2, "a linear layer")
        kept, weight, bias = autocast(x, params[0], params[1] if len(params) > 1 else None)
        assert kept is not None and weight is not None
        return F.linear(kept, weight.t() if self.transposed else weight, bias), (kept,)

    def input_grad(self, kept: Kept, params: Params, g: Tensor) -> Tensor:
        weight = params[0]
        assert weight is not None
        weight = weight.to(g.dtype)
        return g.matmul(weight.t() if self.transposed else weight)

    def unit_grads(
        self, kept: Kept, g: Tensor, layout: Layout, need: Sequence[bool]
    ) -> list[UnitGrad | None]:
        if layout.plain and g.dim() == 2:
            return self._one_position(g, kept[0], need)
        g, a = _positions(layout.fold(g)), _positions(layout.fold(kept[0]))
        if g.shape[1] == 1:
            return self._one_position(g[:, 0], a[:, 0], need)
        grads: list[UnitGrad | None] = [None] * len(need)
        if need[0]:
            grads[0] = Product(a, g) if self.transposed else Product(g, a)
        if len(need) > 1 and need[1]:
            grads[1] = Dense((g.float() if g.element_size() < 4 else g).sum(1))
        return grads

    def _one_position(self, g: Tensor, a: Tensor, need: Sequence[bool]) -> list[UnitGrad | None]:
        outer = None
        if need[0]:
            outer = Outer(a, g) if self.transposed else Outer(g, a)
        if len(need) == 1:
            return [outer]
        measure = outer.g_norm_sq if outer is not None and not self.transposed else None
        return [outer, Dense(g, measure) if need[1] else None]


class LinearSite(Site):
    def __init__(self, module: nn.Module, *, transposed: bool = False) -> None:
        self.rule = Linear(transposed=transposed)
        self.parameters = ("weight",) if module.bias is None else ("weight", "bias")

    def forward(self, apply: Apply, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(apply, *args, **kwargs)

    def _call(self, apply: Apply, input: Tensor) -> Tensor:
        return apply(self.rule, input, *self.parameters)


def _positions(t: Tensor) -> Tensor:
    """(P, m, …, d) → (P, T, d)."""
    return t.reshape(t.shape[0], -1, t.shape[-1]) if t.shape[0] else t.reshape(0, 1, t.shape[-1])
