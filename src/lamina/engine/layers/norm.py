"""Normalisation inside one example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import DenseGrads, at_least_float32
from lamina.engine.layers.layer_rule import (
    ApplyRule,
    LayerForward,
    LayerRule,
    Needed,
    ParameterGrads,
    Params,
    SavedTensors,
    check_rank,
    made_if_needed,
    weight_and_bias,
)
from lamina.engine.native.norm_sums import norm_sums
from lamina.errors import CouplingError


class NormRule(LayerRule):
    """y = gain · x̂ + shift, with x̂ from one example's own statistics.

    One contribution: d gain = Σ g·x̂, d shift = Σ g over its positions: (P, d) sums, kept as they are.
    """

    @abstractmethod
    def normalised(self, saved: SavedTensors) -> Tensor:
        """x̂, in the shape of the input, float32 or better."""

    @abstractmethod
    def per_parameter(self, t: Tensor) -> Tensor:
        """(R, …) → (R, *parameter shape): sum over everything in a row that shares a parameter."""

    @abstractmethod
    def native_sums(self, saved: SavedTensors, g: Tensor) -> tuple[Tensor, Tensor] | None:
        """Σ g·x̂ and Σ g of every row, by a native kernel where it can."""

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        if (sums := self.native_sums(saved, g)) is not None:
            return [DenseGrads(layout.sum_rows(t)) if n else None for t, n in zip(sums, need, strict=False)]
        wide = at_least_float32(g)
        return made_if_needed(
            need,
            lambda: DenseGrads(layout.sum_rows(self.per_parameter(wide * self.normalised(saved)))),
            lambda: DenseGrads(layout.sum_rows(self.per_parameter(wide))),
        )


class TrailingNormRule(NormRule):
    """Statistics over the trailing `shape`."""

    def __init__(self, shape: Sequence[int], eps: float | None) -> None:
        self.shape, self.eps = list(shape), eps

    def per_parameter(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], prod(t.shape[1:]) // prod(self.shape), *self.shape).sum(1)

    def _native(self, g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor] | None:
        sums = norm_sums(g, x, mean, rstd, width=prod(self.shape), groups=0)
        return None if sums is None else (sums[0].view(-1, *self.shape), sums[1].view(-1, *self.shape))


class LayerNormRule(TrailingNormRule):
    """x̂ = (x - mean) / std."""

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        check_rank(x, len(self.shape) + 1, "LayerNorm")
        bias = params[1] if len(params) > 1 else None
        y, mean, rstd = torch.native_layer_norm(x, self.shape, params[0], bias, cast(float, self.eps))
        return y, (x, mean, rstd)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        x, mean, rstd = saved
        bias = params[1] if len(params) > 1 else None
        grads = torch.ops.aten.native_layer_norm_backward.default(
            g.contiguous(), x, self.shape, mean, rstd, params[0], bias, [True, False, False]
        )
        return cast(Tensor, grads[0])

    def normalised(self, saved: SavedTensors) -> Tensor:
        x, mean, rstd = saved
        return (x.to(mean.dtype) - mean) * rstd

    def native_sums(self, saved: SavedTensors, g: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._native(g, *saved)


class RMSNormRule(TrailingNormRule):
    """x̂ = x / √(mean x² + eps). No shift."""

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        check_rank(x, len(self.shape) + 1, "RMSNorm")
        axes = tuple(range(-len(self.shape), 0))
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        wide = at_least_float32(x)
        rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps)
        return (wide * rstd * cast(Tensor, params[0])).to(x.dtype), (x, rstd)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        x, rstd = saved
        axes = tuple(range(-len(self.shape), 0))
        unit = self.normalised(saved)
        scaled = g.to(unit.dtype) * cast(Tensor, params[0])
        return (rstd * (scaled - unit * (scaled * unit).mean(axes, keepdim=True))).to(x.dtype)

    def normalised(self, saved: SavedTensors) -> Tensor:
        x, rstd = saved
        return x.to(rstd.dtype) * rstd

    def native_sums(self, saved: SavedTensors, g: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._native(g, saved[0], None, saved[1])


class GroupNormRule(NormRule):
    """Statistics over groups of channels and all of space. InstanceNorm: as many groups as channels."""

    def __init__(self, groups: int, eps: float, *, rank: int = 2) -> None:
        self.groups, self.eps, self.rank = groups, eps, rank

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        check_rank(x, self.rank, "GroupNorm or InstanceNorm")
        x = x.contiguous()
        bias = params[1] if len(params) > 1 else None
        n, c, space = x.shape[0], x.shape[1], prod(x.shape[2:])
        y, mean, rstd = torch.native_group_norm(x, params[0], bias, n, c, space, self.groups, self.eps)
        return y, (x, mean, rstd)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        x, mean, rstd = saved
        sizes = (x.shape[0], x.shape[1], prod(x.shape[2:]), self.groups)
        grads = torch.ops.aten.native_group_norm_backward.default(
            g.contiguous(), x, mean, rstd, params[0], *sizes, [True, False, False]
        )
        return cast(Tensor, grads[0])

    def normalised(self, saved: SavedTensors) -> Tensor:
        x, mean, rstd = saved
        grouped = x.to(mean.dtype).view(x.shape[0], self.groups, -1)
        return ((grouped - mean.unsqueeze(2)) * rstd.unsqueeze(2)).view(x.shape)

    def native_sums(self, saved: SavedTensors, g: Tensor) -> tuple[Tensor, Tensor] | None:
        return norm_sums(g, *saved, width=g.shape[1], groups=self.groups)

    def per_parameter(self, t: Tensor) -> Tensor:
        return t.sum(tuple(range(2, t.dim()))) if t.dim() > 2 else t


class NormForward(LayerForward):
    """Any normalisation whose forward takes one tensor."""

    def __init__(self, module: nn.Module, rule: NormRule) -> None:
        self.rule, self.parameters = rule, weight_and_bias(module)

    def forward(self, apply: ApplyRule, input: Tensor) -> Tensor:
        return apply(self.rule, input, *self.parameters)


def instance_norm_forward(module: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d) -> NormForward:
    if module.track_running_stats:
        problem = f"{type(module).__name__} with track_running_stats=True mixes contributions in its buffers"
        remedy = "use track_running_stats=False, or `model, report = lamina.fix(model)`"
        raise CouplingError("engine.running-stats", problem, remedy)
    rank = 3 + (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d).index(type(module))
    return NormForward(module, GroupNormRule(module.num_features, module.eps, rank=rank))
