"""A convolution as the linear operator on one example that it is, with the bound that its symbol proves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.errors import PlanError
from lamina.sensitivity.torus import torus_bound

Operator = Callable[[Tensor], Tensor]

_FORWARD: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_TRANSPOSED_LAYERS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED_LAYERS)

Sizes = int | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """x ↦ conv(x, weight) without bias, with torch's meaning of every argument.

    weight is (out, in/groups, *kernel), for a transposed one (in, out/groups, *kernel).
    """

    weight: Tensor
    stride: Sizes = 1
    padding: Sizes | str = 0
    dilation: Sizes = 1
    groups: int = 1
    padding_mode: str = "zeros"
    transposed: bool = False
    output_padding: Sizes = 0

    @classmethod
    def of(cls, layer: Any) -> Convolution:
        """The convolution that one of LAYERS carries out."""
        return cls(
            weight=layer.weight,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            padding_mode=layer.padding_mode,
            transposed=isinstance(layer, _TRANSPOSED_LAYERS),
            output_padding=layer.output_padding,
        )

    @property
    def dims(self) -> int:
        return self.weight.ndim - 2

    @property
    def channels(self) -> int:
        """Of the input."""
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups

    def operator(self) -> Operator:
        """The map on one example, (channels, *spatial), without batch axis."""
        if self.transposed:
            spread = _TRANSPOSED[self.dims - 1]
            options = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            return lambda x: spread(x, self.weight, None, *options)
        convolve = _FORWARD[self.dims - 1]
        if self.padding_mode == "zeros" and self.padding != "same":
            given = (self.stride, self.padding, self.dilation, self.groups)
            return lambda x: convolve(x, self.weight, None, *given)
        sides, mode = self._sides(), "constant" if self.padding_mode == "zeros" else self.padding_mode

        def padded(x: Tensor) -> Tensor:
            wide = F.pad(x.unsqueeze(0), sides, mode=mode).squeeze(0)
            return convolve(wide, self.weight, None, self.stride, 0, self.dilation, self.groups)

        return padded

    def bound(self, shape: Sequence[int]) -> float:
        """An upper bound on the norm for inputs of this shape where the torus gives one, else inf."""
        image = self._image(shape)
        # a transposed convolution is the transpose of the one that maps its output to its input
        signal = image if self.transposed else tuple(shape[1:])
        stride, dilation = _wide(self.stride, self.dims), _wide(self.dilation, self.dims)
        wraps = self.padding_mode == "circular"
        if wraps and any(n % s or s * m > n for n, s, m in zip(signal, stride, image, strict=True)):
            return math.inf  # an output that is there twice is not on the torus
        if not wraps and self.padding_mode != "zeros":
            return math.inf
        return torus_bound(
            self.weight, signal, stride=stride, dilation=dilation, groups=self.groups, wraps=wraps
        )

    def _image(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial size of the output, after a check of the input's shape."""
        if len(shape) != self.dims + 1 or shape[0] != self.channels or min(shape) < 1:
            raise PlanError(
                "measure.input-shape-not",
                f"input_shape {tuple(shape)} does not fit a convolution of {self.channels} channels",
                f"give ({self.channels}, …) with {self.dims} spatial sizes and no batch axis",
            )
        try:
            return tuple(self.operator()(torch.zeros(tuple(shape), dtype=self.weight.dtype)).shape[1:])
        except RuntimeError as problem:
            raise PlanError(
                "measure.convolution-not-accept",
                f"the convolution does not accept input_shape {tuple(shape)}: {problem}",
                "give the shape that the layer really sees",
            ) from problem

    def _sides(self) -> list[int]:
        """What F.pad is told: before and after, last axis first."""
        if self.padding == "valid":
            return [0] * (2 * self.dims)
        if self.padding != "same":
            assert not isinstance(self.padding, str)
            return [width for width in reversed(_wide(self.padding, self.dims)) for _ in range(2)]
        spans = zip(_wide(self.dilation, self.dims), self.weight.shape[2:], strict=True)
        totals = [d * (taps - 1) for d, taps in spans]
        return [width for total in reversed(totals) for width in (total // 2, total - total // 2)]


def _wide(sizes: Sizes, dims: int) -> tuple[int, ...]:
    """One number for all axes, or one for each."""
    if isinstance(sizes, int):
        return (sizes,) * dims
    return tuple(sizes) if len(sizes) == dims else tuple(sizes) * dims
