"""Convolutions of one to three dimensions, transposed ones too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.engine.batch import RowLayout
from lamina.engine.execute.grads import CHUNK_ELEMENTS, ChunkedGrads, ContributionGrads, DenseGrads, at_least_float32
from lamina.engine.execute.norms import take_buffer
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
from lamina.engine.native.products import NativeBias, NativeGrads, Windows


@dataclass(frozen=True, kw_only=True)
class ConvGeometry:
    """Stride, padding, dilation and groups of a convolution with the given kernel."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In the order of torch.convolution after the bias."""
        extra = self.output_padding or (0,) * len(self.kernel)
        return self.stride, self.padding, self.dilation, self.transposed, extra, self.groups


class ConvolutionGrads(ChunkedGrads):
    """G[p][o, i, k] = Σ over positions of v[p][o, position] · u[p][i, position·stride + k·dilation].

    For a convolution u is the padded input and v the output's gradient; for a transposed one they
    change places. The windows of u are unrolled some contributions at a time.
    """

    def __init__(self, u: Tensor, v: Tensor, geometry: ConvGeometry, shape: torch.Size) -> None:
        self.u, self.v, self.geometry, self.shape = u, v, geometry, shape  # (P, m, channels, *space)
        self.units = u.shape[0]

    def chunks(self) -> Iterator[tuple[int, int]]:
        windows = self.u.shape[1] * prod(self.v.shape[3:]) * self.u.shape[2] * prod(self.geometry.kernel)
        size = max(1, CHUNK_ELEMENTS // max(1, self.shape.numel(), windows))
        return ((low, min(low + size, self.units)) for low in range(0, self.units, size))

    def dense(self, low: int, high: int) -> Tensor:
        u, v = self.u[low:high], self.v[low:high]
        u, v = at_least_float32(u), at_least_float32(v)
        groups, space, units = self.geometry.groups, v.shape[3:], high - low
        columns = self._columns(u, space, groups)  # (units·groups, i·k, positions)
        rows = v.transpose(1, 2).reshape(units * groups, v.shape[2] // groups, -1)
        grads = take_buffer("grads", (units * groups, rows.shape[1], columns.shape[1]), rows.dtype, rows)
        return torch.bmm(rows, columns.transpose(1, 2), out=grads).view(units, -1)

    def _columns(self, u: Tensor, space: Sequence[int], groups: int) -> Tensor:
        geo, units = self.geometry, u.shape[0]
        if any(geo.padding):
            u = _zero_padded(u, geo.padding)
        if all(k == 1 for k in geo.kernel) and all(s == 1 for s in geo.stride):
            for axis, size in enumerate(space, 3):
                u = u.narrow(axis, 0, size)
            return u.transpose(1, 2).reshape(units * groups, u.shape[2] // groups, -1)
        u = u.contiguous()
        step = u.stride()
        within = [s * d for s, d in zip(step[3:], geo.dilation, strict=True)]
        across = [s * d for s, d in zip(step[3:], geo.stride, strict=True)]
        shape = (units, u.shape[2], *geo.kernel, u.shape[1], *space)
        windows = u.as_strided(shape, (step[0], step[2], *within, step[1], *across))
        columns = take_buffer("columns", tuple(windows.shape), u.dtype, u).copy_(windows)
        return columns.view(units * groups, u.shape[2] // groups * prod(geo.kernel), -1)


def _zero_padded(u: Tensor, padding: Sequence[int]) -> Tensor:
    """u with zeros around its space."""
    space = [size + 2 * pad for size, pad in zip(u.shape[3:], padding, strict=True)]
    whole = take_buffer("padded", (*u.shape[:3], *space), u.dtype, u).zero_()
    inner = whole
    for axis, (size, pad) in enumerate(zip(u.shape[3:], padding, strict=True), 3):
        inner = inner.narrow(axis, pad, size)
    inner.copy_(u)
    return whole


class ConvolutionRule(LayerRule):
    """y = conv(x, W) + b with the given geometry."""

    def __init__(self, geometry: ConvGeometry) -> None:
        self.geometry = geometry

    def run(self, x: Tensor, params: Params) -> tuple[Tensor, SavedTensors]:
        check_rank(x, len(self.geometry.kernel) + 2, "a convolution")
        x, weight, bias = cast_for_autocast(x, params)
        return torch.convolution(x, weight, bias, *self.geometry.arguments), (x,)

    def input_grad(self, saved: SavedTensors, params: Params, g: Tensor) -> Tensor:
        weight = cast(Tensor, params[0]).to(g.dtype)
        grads = torch.ops.aten.convolution_backward.default(
            g, saved[0], weight, None, *self.geometry.arguments, [True, False, False]
        )
        return cast(Tensor, grads[0])

    def contribution_grads(self, saved: SavedTensors, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads:
        if need[0] and (made := self._native(saved[0], g, layout, need)) is not None:
            return made
        geo, x = self.geometry, layout.fold(saved[0])
        g = layout.fold(g)
        u, v = (g, x) if geo.transposed else (x, g)
        shape = torch.Size((v.shape[2], u.shape[2] // geo.groups, *geo.kernel))
        return made_if_needed(
            need,
            lambda: ConvolutionGrads(u, v, geo, shape),
            lambda: DenseGrads(at_least_float32(g).sum((1, *range(3, g.dim())))),
        )

    def _native(self, x: Tensor, g: Tensor, layout: RowLayout, need: Needed) -> ParameterGrads | None:
        geo = self.geometry
        u, v = (g, x) if geo.transposed else (x, g)
        shape = torch.Size((v.shape[1], u.shape[1] // geo.groups, *geo.kernel))
        if not NativeGrads.can(u, v, shape):
            return None
        u, v = u.contiguous(), v.contiguous()  # once: a joint clip keeps them
        windows = Windows(
            kernel=geo.kernel, stride=geo.stride, padding=geo.padding, dilation=geo.dilation, groups=geo.groups
        )

        def rules() -> ContributionGrads:
            return ConvolutionGrads(layout.fold(u), layout.fold(v), geo, shape)

        def bias() -> Tensor:
            folded = layout.fold(u if geo.transposed else v)
            return folded.sum((1, *range(3, folded.dim())))

        weight = NativeGrads(u, v, layout, shape, rules, windows)
        if not any(need[1:]):
            return [weight, *[None] * (len(need) - 1)]
        return [weight, DenseGrads(bias()) if geo.transposed else NativeBias(weight, shape[0], bias)]


class ConvForward(LayerForward):
    """nn.Conv1d, 2d, 3d. Padding that is not zeros is done first, outside the rule."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        self.parameters = weight_and_bias(module)
        both = list(module._reversed_padding_repeated_twice)  # (left, right) from the last dimension back
        symmetric = all(left == right for left, right in zip(both[::2], both[1::2], strict=True))
        self.outside = module.padding_mode != "zeros" or not symmetric
        self.mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self.pad = both
        inside = (0,) * len(module.kernel_size) if self.outside else tuple(reversed(both[::2]))
        kernel, stride, dilation = tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation)
        self.rule = ConvolutionRule(
            ConvGeometry(kernel=kernel, stride=stride, padding=inside, dilation=dilation, groups=module.groups)
        )

    def forward(self, apply: ApplyRule, input: Tensor) -> Tensor:
        check_rank(input, len(self.rule.geometry.kernel) + 2, "a convolution")
        return apply(self.rule, F.pad(input, self.pad, self.mode) if self.outside else input, *self.parameters)


class ConvTransposeForward(LayerForward):
    """nn.ConvTranspose1d, 2d, 3d."""

    def __init__(self, module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) -> None:
        self.module = module
        self.parameters = weight_and_bias(module)

    def forward(self, apply: ApplyRule, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        m: Any = self.module
        kernel = tuple(m.kernel_size)
        check_rank(input, len(kernel) + 2, "a transposed convolution")
        extra = m._output_padding(input, output_size, m.stride, m.padding, m.kernel_size, len(kernel), m.dilation)
        geometry = ConvGeometry(
            kernel=kernel, stride=tuple(m.stride), padding=tuple(m.padding), dilation=tuple(m.dilation),
            groups=m.groups, transposed=True, output_padding=tuple(extra),
        )  # fmt: skip
        return apply(ConvolutionRule(geometry), input, *self.parameters)
