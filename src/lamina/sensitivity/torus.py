"""A proven upper bound for the norm of a convolution, from its symbol.

A convolution that pads with zeros is a piece of the convolution on a torus that is too long for its ends to meet:
fewer inputs, fewer outputs, the same numbers. So its norm is at most that of the torus, where a Fourier transform
makes it block-diagonal: the largest norm of the (channels out × channels in) matrices Ŵ(ω) over the frequencies ω of
the torus. Stride s is first turned into s phases of the input, each a channel (a permutation, which changes no
norm); dilation is a longer kernel with zeros in it; groups are separate operators; a transposed convolution has the
norm of the convolution it transposes. For long signals the bound is tight: its excess falls as 1/length².
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORK = 2e9  # frequencies × channels³ that are worth it: a few seconds


def torus_bound(
    weight: Tensor,
    lengths: Sequence[int],
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    wraps: bool = False,
) -> float:
    """An upper bound for y = conv(x, weight), x of spatial size `lengths`; inf where it would take too long.

    weight (out, in/groups, *kernel), float64. `wraps`: padding is circular, the torus is the signal itself; the
    caller makes sure that each length is a multiple of its stride and that outputs do not repeat.
    """
    blocks = weight.detach().reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    sizes: list[int] = []
    for axis, (length, s, d) in enumerate(zip(lengths, stride, dilation, strict=True)):
        blocks = _phases(_dilated(blocks, 3 + axis, d), 3 + axis, s)
        taps = blocks.shape[3 + axis]
        # without wrapping, one more for the phase at which the signal begins
        sizes.append(length // s if wraps else -(-length // s) + 1 + taps)
    frequencies, smaller = math.prod(sizes), min(blocks.shape[1:3])
    if groups * frequencies * smaller**2 * max(blocks.shape[1:3]) > _WORK:
        return math.inf
    return _largest(blocks, sizes)


def _dilated(blocks: Tensor, axis: int, dilation: int) -> Tensor:
    """Taps `dilation` apart, zeros between."""
    taps = blocks.shape[axis]
    if dilation == 1 or taps == 1:
        return blocks
    shape = list(blocks.shape)
    shape[axis] = dilation * (taps - 1) + 1
    places = torch.arange(taps) * dilation
    return blocks.new_zeros(shape).index_copy_(axis, places, blocks)


def _phases(blocks: Tensor, axis: int, stride: int) -> Tensor:
    """Tap t = stride·j + phase becomes tap j of the input channel (channel, phase)."""
    if stride == 1:
        return blocks
    taps = blocks.shape[axis]
    longer = -(-taps // stride)
    shape = list(blocks.shape)
    shape[axis] = longer * stride
    padded = blocks.new_zeros(shape)
    padded.narrow(axis, 0, taps).copy_(blocks)
    split: Tensor = padded.unflatten(axis, (longer, stride))
    return split.movedim(axis + 1, 3).flatten(2, 3)  # the phase beside the input channel


def _largest(blocks: Tensor, sizes: Sequence[int]) -> float:
    """max over groups and frequencies of ‖Ŵ(ω)‖. The kernel is real, so half of the last axis is enough."""
    axes = tuple(range(3, 3 + len(sizes)))
    folded = _folded(blocks, sizes)
    symbol = torch.fft.rfftn(folded, dim=axes).flatten(3).movedim(-1, 1)  # groups, frequency, out, in
    gram = symbol @ symbol.mH if symbol.shape[-2] <= symbol.shape[-1] else symbol.mH @ symbol
    top = gram.real if gram.shape[-1] == 1 else torch.linalg.eigvalsh(gram)[..., -1]
    return math.sqrt(max(float(top.max()), 0.0))


def _folded(blocks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Kernels as long as the torus; taps that reach around it are added up."""
    for axis, size in enumerate(sizes, start=3):
        taps = blocks.shape[axis]
        shape = list(blocks.shape)
        shape[axis] = size
        places = torch.arange(taps) % size
        blocks = blocks.new_zeros(shape).index_add_(axis, places, blocks)
    return blocks
