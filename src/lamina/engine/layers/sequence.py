"""Layers over sequences: nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import AxisSliceGrads
from lamina.engine.execute.slice_masks import AxisRanges
from lamina.engine.layers.layer_rule import (
    ApplyRule,
    LayerForward,
    LayerRule,
    Needed,
    ParameterGrads,
    Params,
    SavedTensors,
    check_rank,
)
from lamina.engine.layers.linear import LinearRule
from lamina.errors import UnsupportedLayer
from lamina.plan.selection import Range


class RowSliceLinearRule(LayerRule):
    """A linear map by some rows of a weight, of a bias, or of both. Other rows have gradient 0."""

    def __init__(self, weight: Range | None, bias: Range | None) -> None:
        self.bands, self.whole = (weight, bias), LinearRule()

    def _cut(self, params: Params) -> list[Tensor | None]:
        return [
            p if p is None or band is None else p[slice(*band)] for p, band in zip(params, self.bands, strict=False)
        ]

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        self.shapes = [None if p is None else p.shape for p in params]
        return self.whole.run(x, self._cut(params))

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        return self.whole.input_grad(saved, self._cut(params), g)

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        grads = self.whole.contribution_grads(saved, g, layout, need)
        return [
            grad
            if grad is None or band is None
            else AxisSliceGrads(grad, AxisRanges(0, [band]), cast(torch.Size, shape))
            for grad, band, shape in zip(grads, self.bands, self.shapes, strict=False)
        ]


class AttentionForward(LayerForward):
    """Multi-head attention with every projection taken through the engine.

    The output projection is a child module with a `LayerForward` of its own.
    """

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module
        apart = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = ("in_proj_weight",) if module._qkv_same_embed_dim else apart
        self.parameters = weights if module.in_proj_bias is None else (*weights, "in_proj_bias")

    def forward(
        self, apply: ApplyRule, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        m = self.module
        check_rank(query, 3, "nn.MultiheadAttention")
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
        self, apply: ApplyRule, query: Tensor, key: Tensor, value: Tensor, itself: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.module._qkv_same_embed_dim
        if packed and itself:
            q, k, v = apply(LinearRule(), query, *self.parameters).chunk(3, dim=-1)
            return q, k, v
        width = self.module.embed_dim
        outputs = []
        for i, t in enumerate((query, key, value)):
            band = (i * width, (i + 1) * width)
            names = (self.parameters[0 if packed else i], *self.parameters[1 if packed else 3 :])
            outputs.append(apply(RowSliceLinearRule(band if packed else None, band), t, *names))
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
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
        if view is not None:
            mask = mask.reshape(view)
        elif mask.dim() == 3:
            mask = mask.reshape(n, heads, length, source)
        total = mask.to(dtype) if total is None else total + mask.to(dtype)
    return total


class RecurrentWeightRule(LayerRule):
    """Zeros that are added to W·h_t + b at every time t, and so receive its gradient at every t.

    The recurrence itself uses W and b detached; `states` collects the h_t that W met. One node then
    sees the whole use of W: dW = Σ_t g_t ⊗ h_t.
    """

    def __init__(self, rows: int, steps: int) -> None:
        self.size, self.steps = rows, steps
        self.states: list[Tensor] = []

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        weight = cast(Tensor, params[0])
        return weight.new_zeros(self.size, self.steps, weight.shape[0]), ()

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        raise AssertionError("the zeros depend on no input")

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        return LinearRule().contribution_grads((torch.stack(self.states, 1),), g, layout, need)


class RecurrentForward(LayerForward):
    """All layers and directions of one recurrent module."""

    def __init__(self, module: nn.RNNBase) -> None:
        self.module = module
        self.parameters = tuple(name for name, _ in module.named_parameters(recurse=False))

    def forward(self, apply: ApplyRule, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        m = self.module
        if isinstance(input, PackedSequence):
            problem = f"{type(m).__name__} got a PackedSequence, whose rows belong to several contributions"
            remedy = "pad with nn.utils.rnn.pad_sequence, and mask the loss"
            raise UnsupportedLayer("engine.packed-sequence", problem, remedy)
        check_rank(input, 3, type(m).__name__)
        x = input if m.batch_first else input.transpose(0, 1)
        directions = 2 if m.bidirectional else 1
        h0, c0 = self._initial(x, hx, directions)
        last_h, last_c = [], []
        for layer in range(m.num_layers):
            outputs = []
            for direction in range(directions):
                name = f"_l{layer}" + ("_reverse" if direction else "")
                i = layer * directions + direction
                y, h, c = self._run(apply, x, name, h0[i], c0[i] if c0 is not None else None, bool(direction))
                outputs.append(y)
                last_h.append(h)
                last_c.append(c)
            x = torch.cat(outputs, 2)
            if m.dropout and layer < m.num_layers - 1:
                x = F.dropout(x, m.dropout, m.training)
        out = x if m.batch_first else x.transpose(0, 1)
        h_n = torch.stack(last_h)
        return out, ((h_n, torch.stack(cast(list[Tensor], last_c))) if m.mode == "LSTM" else h_n)

    def _initial(self, x: Tensor, hx: Any, directions: int) -> tuple[Tensor, Tensor | None]:
        m = self.module
        if hx is not None:
            return cast(tuple[Tensor, Tensor | None], hx if m.mode == "LSTM" else (hx, None))
        count = m.num_layers * directions
        h = x.new_zeros(count, x.shape[0], m.proj_size or m.hidden_size)
        return h, (x.new_zeros(count, x.shape[0], m.hidden_size) if m.mode == "LSTM" else None)

    def _run(
        self, apply: ApplyRule, x: Tensor, name: str, h: Tensor, c: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        m = self.module
        bias = m.bias
        inputs = apply(LinearRule(), x, "weight_ih" + name, *(["bias_ih" + name] if bias else []))
        recur = _Recurrence(apply, m, "weight_hh" + name, "bias_hh" + name if bias else None, x)
        project = _Recurrence(apply, m, "weight_hr" + name, None, x) if m.proj_size else None
        times = range(x.shape[1] - 1, -1, -1) if backwards else range(x.shape[1])
        states: list[Tensor] = []
        for count, t in enumerate(times):
            h, c = _recurrent_cell(m.mode, inputs[:, t], recur(h, count), h, c)
            if project is not None:
                h = project(h, count)
            states.append(h)
        if backwards:
            states.reverse()
        return torch.stack(states, 1), h, c


class _Recurrence:
    """h ↦ W h + b at one time after another, with W and b seen through one `RecurrentWeightRule`."""

    def __init__(self, apply: ApplyRule, module: nn.Module, weight: str, bias: str | None, x: Tensor) -> None:
        self.rule = RecurrentWeightRule(x.shape[0], x.shape[1])
        self.weight = cast(Tensor, getattr(module, weight)).detach()
        self.bias = cast(Tensor, getattr(module, bias)).detach() if bias else None
        self.zeros = apply(self.rule, x.detach(), weight, *([bias] if bias else []))

    def __call__(self, h: Tensor, count: int) -> Tensor:
        self.rule.states.append(h.detach())
        return F.linear(h, self.weight, self.bias) + self.zeros[:, count]


def _recurrent_cell(mode: str, zx: Tensor, zh: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One time step from the input's and the state's pre-activations (torch.nn's gate order)."""
    if mode == "LSTM":
        i, f, g, o = (zx + zh).chunk(4, 1)
        c = torch.sigmoid(f) * cast(Tensor, c) + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if mode == "GRU":
        rx, zx_, nx = zx.chunk(3, 1)
        rh, zh_, nh = zh.chunk(3, 1)
        keep = torch.sigmoid(zx_ + zh_)
        new = torch.tanh(nx + torch.sigmoid(rx + rh) * nh)
        return new + keep * (h - new), None
    return (torch.tanh(zx + zh) if mode == "RNN_TANH" else torch.relu(zx + zh)), None
