"""Linear maps and tables: nn.Linear, the transposed `Conv1D` of Hugging Face GPT-2, nn.Embedding."""

from __future__ import annotations

from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import (
    ContributionGrads,
    DenseGrads,
    OuterProductGrads,
    ScatterGrads,
    SequenceProductGrads,
    at_least_float32,
)
from lamina.engine.layers.layer_rule import (
    ApplyRule,
    LayerForward,
    LayerRule,
    Needed,
    ParameterGrads,
    Params,
    SavedTensors,
    cast_for_autocast,
    check_rank,
    made_if_needed,
    weight_and_bias,
)
from lamina.engine.native.products import NativeBias, NativeGrads, NativeOuterGrads
from lamina.errors import UnsupportedLayer


class LinearRule(LayerRule):
    """y = x Wᵀ + b. One contribution: dW = Σ_t g_t ⊗ x_t, db = Σ_t g_t over its positions t."""

    def __init__(self, *, transposed: bool = False) -> None:
        self.transposed = transposed  # y = x W + b: dW = Σ x_t ⊗ g_t

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        check_rank(x, 2, "a linear layer")
        x, weight, bias = cast_for_autocast(x, params)
        y = F.linear(x, weight.t() if self.transposed else weight, bias)
        if y._is_view():  # of a matrix that is nobody else's: it may be written in place, as without the engine
            y = torch.ops.aten._unsafe_view.default(y, y.shape)
        return y, (x,)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        weight = cast(Tensor, params[0]).to(g.dtype)
        return g.matmul(weight.t() if self.transposed else weight)

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        if layout.plain and prod(g.shape[1:-1]) == 1:
            return self._one_position(g.flatten(0, -2), saved[0].flatten(0, -2), need)
        several = prod(g.shape[1:-1]) * layout.most_rows > 1  # else nobody's rounding depends on who is padding
        if several and need[0] and (made := self._native(g, saved[0], layout, need)) is not None:
            return made
        g, a = _flatten_positions(layout.fold(g)), _flatten_positions(layout.fold(saved[0]))
        if g.shape[1] == 1:
            return self._one_position(g[:, 0], a[:, 0], need)
        factors = (a, g) if self.transposed else (g, a)
        return made_if_needed(
            need, lambda: SequenceProductGrads(*factors), lambda: DenseGrads(at_least_float32(g).sum(1))
        )

    def _native(self, g: Tensor, a: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads | None:
        v, u = (a, g) if self.transposed else (g, a)
        shape = torch.Size((v.shape[-1], u.shape[-1]))
        if not NativeGrads.can(u, v, shape):
            return None
        v, u = v.contiguous(), u.contiguous()  # once: a joint clip keeps them

        def rules() -> ContributionGrads:
            return SequenceProductGrads(*(_flatten_positions(layout.fold(t)) for t in (v, u)))

        weight = NativeGrads(u, v, layout, shape, rules)
        if not any(need[1:]):
            return [weight, *[None] * (len(need) - 1)]
        if self.transposed:
            return [weight, DenseGrads(_flatten_positions(layout.fold(g)).sum(1))]
        return [weight, NativeBias(weight, shape[0], lambda: _flatten_positions(layout.fold(v)).sum(1))]

    def _one_position(self, g: Tensor, a: Tensor, need: Needed) -> ParameterGrads:
        outer = None
        if need[0]:
            kind = NativeOuterGrads if NativeOuterGrads.can(g, a) else OuterProductGrads
            outer = kind(a, g) if self.transposed else kind(g, a)
        if isinstance(outer, NativeOuterGrads) and any(need[1:]) and not self.transposed:
            return [outer, NativeBias(outer, g.shape[1], lambda: g)]
        if len(need) == 1:
            return [outer]
        measure = outer.g_norm_sq if outer is not None and not self.transposed else None
        return [outer, DenseGrads(g, measure) if need[1] else None]


class LinearForward(LayerForward):
    def __init__(self, module: nn.Module, *, transposed: bool = False) -> None:
        self.rule = LinearRule(transposed=transposed)
        self.parameters = weight_and_bias(module)

    def forward(self, apply: ApplyRule, input: Tensor) -> Tensor:
        return apply(self.rule, input, *self.parameters)


def _flatten_positions(t: Tensor) -> Tensor:
    """(P, m, …, d) → (P, T, d)."""
    return t.reshape(t.shape[0], -1, t.shape[-1]) if t.shape[0] else t.reshape(0, 1, t.shape[-1])


class EmbeddingRule(LayerRule):
    """y = W[ids]. One contribution: dW[id] = Σ of g over the positions where it looked id up."""

    def __init__(self, rows: int, padding_idx: int | None) -> None:
        self.table_rows, self.padding_idx = rows, padding_idx

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        return F.embedding(x, cast(Tensor, params[0])), (x,)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        raise AssertionError("ids have no gradient")

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        g = layout.fold(g)
        ids, g = layout.fold(saved[0]).reshape(len(g), -1), g.reshape(len(g), -1, g.shape[-1])
        return [ScatterGrads(ids, g, self.table_rows, self.padding_idx)]


class EmbeddingForward(LayerForward):
    def __init__(self, module: nn.Embedding) -> None:
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):  # max_norm writes weights by who is in the batch
            if value := getattr(module, name):
                remedy = f"use {name}={None if name == 'max_norm' else False}, or `model, report = lamina.fix(model)`"
                raise UnsupportedLayer("engine.embedding-option", f"nn.Embedding has {name}={value}", remedy)
        self.parameters = ("weight",)
        self.rule = EmbeddingRule(module.num_embeddings, module.padding_idx)

    def forward(self, apply: ApplyRule, input: Tensor) -> Tensor:
        return apply(self.rule, input, "weight")
