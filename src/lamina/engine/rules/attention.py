"""nn.MultiheadAttention: its projections are parameters of its own, used in slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.engine.layout import Layout
from lamina.engine.parts import RowBand
from lamina.engine.rules.linear import Linear
from lamina.engine.rules.rule import Apply, Kept, Params, Rule, Site, demand_rank
from lamina.engine.unitgrad import UnitGrad


class BandedLinear(Rule):
    """A linear map by some rows of a weight, of a bias, or of both. Other rows have gradient 0."""

    def __init__(self, weight: slice | None, bias: slice | None) -> None:
        self.bands, self.whole = (weight, bias), Linear()

    def _cut(self, params: Params) -> list[Tensor | None]:
        return [
            p if p is None or band is None else p[band] for p, band in zip(params, self.bands, strict=False)
        ]

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, Kept]:
        self.shapes = [None if p is None else p.shape for p in params]
        return self.whole.run(x, self._cut(params))

    def input_grad(self, kept: Kept, params: Params, g: Tensor) -> Tensor:
        return self.whole.input_grad(kept, self._cut(params), g)

    def unit_grads(
        self, kept: Kept, g: Tensor, layout: Layout, need: Sequence[bool]
    ) -> list[UnitGrad | None]:
        grads = self.whole.unit_grads(kept, g, layout, need)
        return [
            grad if grad is None or band is None else RowBand(grad, band.start, cast(torch.Size, shape))
            for grad, band, shape in zip(grads, self.bands, self.shapes, strict=False)
        ]


class AttentionSite(Site):
    """Multi-head attention with every projection taken through the engine.

    The output projection is a child module with a site of its own.
    """

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module
        weights = (
            ("in_proj_weight",)
            if module._qkv_same_embed_dim
            else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        )
        self.parameters = weights if module.in_proj_bias is None else (*weights, "in_proj_bias")

    def forward(self, apply: Apply, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return self._call(apply, *args, **kwargs)

    def _call(
        self,
        apply: Apply,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        m = self.module
        demand_rank(query, 3, "nn.MultiheadAttention")
        itself = query is key and key is value
        if not m.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._project(apply, query, key, value, itself)
        n, length, source, heads = q.shape[0], q.shape[1], k.shape[1], m.num_heads
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v))  # (N, H, T, d)
        mask = _additive_mask(attn_mask, key_padding_mask, (n, heads, length, source), q.dtype)
        dropout = m.dropout if m.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        out = m.out_proj(mixed.transpose(1, 2).flatten(2))
        return (out if m.batch_first else out.transpose(0, 1)), weights

    def _project(
        self, apply: Apply, query: Tensor, key: Tensor, value: Tensor, itself: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.module._qkv_same_embed_dim
        if packed and itself:
            q, k, v = apply(Linear(), query, *self.parameters).chunk(3, dim=-1)
            return q, k, v
        width = self.module.embed_dim
        outputs = []
        for i, t in enumerate((query, key, value)):
            band = slice(i * width, (i + 1) * width)
            names = (self.parameters[0 if packed else i], *self.parameters[1 if packed else 3 :])
            outputs.append(apply(BandedLinear(band if packed else None, band), t, *names))
        return outputs[0], outputs[1], outputs[2]


def _additive_mask(
    attn: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """attn (L, S) or (N·H, L, S) and padding (N, S), boolean (True: hidden) or additive → (N, H, L, S)."""
    n, heads, length, source = shape
    total: Tensor | None = None
    for mask, view in ((attn, None), (padding, (n, 1, 1, source))):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
        if view is not None:
            mask = mask.reshape(view)
        elif mask.dim() == 3:
            mask = mask.reshape(n, heads, length, source)
        total = mask.to(dtype) if total is None else total + mask.to(dtype)
    return total
