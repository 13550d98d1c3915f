"""nn.RNN, nn.LSTM, nn.GRU: unrolled in time, with one engine node per weight and direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lamina.engine.layout import Layout
from lamina.engine.rules.linear import Linear
from lamina.engine.rules.rule import Apply, Kept, Params, Rule, Site, demand_rank
from lamina.engine.unitgrad import UnitGrad
from lamina.errors import UnsupportedLayer


class Tap(Rule):
    """Zeros that are added to W·h_t + b at every time t, and so receive its gradient at every t.

    The recurrence itself uses W and b detached; `states` collects the h_t that W met. One node then
    sees the whole use of W: dW = Σ_t g_t ⊗ h_t.
    """

    def __init__(self, rows: int, steps: int) -> None:
        self.size, self.steps = rows, steps
        self.states: list[Tensor] = []

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, Kept]:
        weight = cast(Tensor, params[0])
        return weight.new_zeros(self.size, self.steps, weight.shape[0]), ()

    def input_grad(self, kept: Kept, params: Params, g: Tensor) -> Tensor:
        raise AssertionError("a tap has no input")

    def unit_grads(
        self, kept: Kept, g: Tensor, layout: Layout, need: Sequence[bool]
    ) -> list[UnitGrad | None]:
        return Linear().unit_grads((torch.stack(self.states, 1),), g, layout, need)


class RecurrentSite(Site):
    """All layers and directions of one recurrent module."""

    def __init__(self, module: nn.RNNBase) -> None:
        self.module = module
        self.parameters = tuple(name for name, _ in module.named_parameters(recurse=False))

    def forward(self, apply: Apply, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return self._call(apply, *args, **kwargs)

    def _call(self, apply: Apply, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        m = self.module
        if isinstance(input, PackedSequence):
            raise UnsupportedLayer(
                "engine.got-packedsequence-whose",
                f"{type(m).__name__} got a PackedSequence, whose rows belong to several contributions",
                "pad with nn.utils.rnn.pad_sequence, and mask the loss",
            )
        demand_rank(input, 3, type(m).__name__)
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
        self, apply: Apply, x: Tensor, name: str, h: Tensor, c: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        m = self.module
        bias = m.bias
        inputs = apply(Linear(), x, "weight_ih" + name, *(["bias_ih" + name] if bias else []))
        recur = _Recurrence(apply, m, "weight_hh" + name, "bias_hh" + name if bias else None, x)
        project = _Recurrence(apply, m, "weight_hr" + name, None, x) if m.proj_size else None
        times = range(x.shape[1] - 1, -1, -1) if backwards else range(x.shape[1])
        states: list[Tensor] = []
        for count, t in enumerate(times):
            h, c = _cell(m.mode, inputs[:, t], recur(h, count), h, c)
            if project is not None:
                h = project(h, count)
            states.append(h)
        if backwards:
            states.reverse()
        return torch.stack(states, 1), h, c


class _Recurrence:
    """h ↦ W h + b at one time after another, with W and b seen through one `Tap`."""

    def __init__(self, apply: Apply, module: nn.Module, weight: str, bias: str | None, x: Tensor) -> None:
        self.rule = Tap(x.shape[0], x.shape[1])
        self.weight = cast(Tensor, getattr(module, weight)).detach()
        self.bias = cast(Tensor, getattr(module, bias)).detach() if bias else None
        self.tap = apply(self.rule, x.detach(), weight, *([bias] if bias else []))

    def __call__(self, h: Tensor, count: int) -> Tensor:
        self.rule.states.append(h.detach())
        return F.linear(h, self.weight, self.bias) + self.tap[:, count]


def _cell(mode: str, zx: Tensor, zh: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
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
