"""`Places`: some places along one axis of a tensor, taken out and put back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lamina.engine.norms import block
from lamina.plan.slices import Range


class Places:
    """The places `ranges` along `axis`. Of a tensor with P contributions in front, the axis is one further."""

    def __init__(self, axis: int, ranges: Sequence[Range]) -> None:
        self.axis, self.ranges = axis, tuple(ranges)
        self.size = sum(stop - first for first, stop in ranges)

    @cached_property
    def index(self) -> Tensor:
        return torch.cat([torch.arange(first, stop) for first, stop in self.ranges])

    def of(self, t: Tensor, dim: int) -> Tensor:
        """The places along `dim` of t: a view where they lie together."""
        if len(self.ranges) == 1:
            first, stop = self.ranges[0]
            return t.narrow(dim, first, stop - first)
        return t.index_select(dim, self.index)

    def zero_(self, t: Tensor) -> None:
        """Set these places of a tensor without contributions to exactly 0."""
        for first, stop in self.ranges:
            t.narrow(self.axis, first, stop - first).zero_()

    def shape(self, whole: torch.Size) -> torch.Size:
        return torch.Size((*whole[: self.axis], self.size, *whole[self.axis + 1 :]))

    def keeps_blocks(self, whole: torch.Size) -> bool:
        """Whether the norm of what is taken out is computed from the same blocks as that of the whole.

        If not, a contribution would be measured in another way (by a rounding) because of who else is in the batch.
        """
        width, behind = block(whole.numel()), whole[self.axis + 1 :].numel()
        if behind * whole[self.axis] % width or block(self.shape(whole).numel()) != width:
            return False
        return all(place * behind % width == 0 for both in self.ranges for place in both)
