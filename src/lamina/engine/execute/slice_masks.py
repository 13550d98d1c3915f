"""`AxisRanges` and `SliceMask`: indices along an axis of a tensor, and which contributions may move which of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lamina.engine.execute.norms import block_length
from lamina.plan.selection import Range


class AxisRanges:
    """The indices `ranges` along `axis`. Of a tensor with P contributions in front, the axis is one further."""

    def __init__(self, axis: int, ranges: Sequence[Range]) -> None:
        self.axis, self.ranges = axis, tuple(ranges)
        self.size = sum(stop - first for first, stop in ranges)

    @cached_property
    def index(self) -> Tensor:
        return torch.cat([torch.arange(first, stop) for first, stop in self.ranges])

    def of(self, t: Tensor, dim: int) -> Tensor:
        """The indices along `dim` of t: a view where they lie together."""
        if len(self.ranges) == 1:
            first, stop = self.ranges[0]
            return t.narrow(dim, first, stop - first)
        return t.index_select(dim, self.index.to(t.device))

    def zero_(self, t: Tensor) -> None:
        """Set these indices of a tensor without contributions to exactly 0."""
        for first, stop in self.ranges:
            t.narrow(self.axis, first, stop - first).zero_()

    def shape(self, whole: torch.Size) -> torch.Size:
        return torch.Size((*whole[: self.axis], self.size, *whole[self.axis + 1 :]))

    def keeps_blocks(self, whole: torch.Size) -> bool:
        """Whether the norm of what is taken out is computed from the same blocks as that of the whole.

        If not, a contribution would be measured in another way (by a rounding) because of who else is in the batch.
        """
        width, behind = block_length(whole.numel()), whole[self.axis + 1 :].numel()
        if behind * whole[self.axis] % width or block_length(self.shape(whole).numel()) != width:
            return False
        return all(index * behind % width == 0 for both in self.ranges for index in both)


BlockedRanges = Sequence[tuple[Tensor, Sequence[Range]]]


class SliceMask:
    """`table` (P, length), True where a contribution may move an index. Shared by all tensors that are cut alike.

    `blocked` is the same for whoever knows it already: contributions, and the indices that none of them may move.
    `even`: take as long whatever is blocked.
    """

    def __init__(self, table: Tensor, blocked: BlockedRanges | None = None, *, even: bool = False) -> None:
        self.table, self.even = table, even
        self._blocked = blocked

    @cached_property
    def blocked(self) -> BlockedRanges:
        if self._blocked is not None:
            return self._blocked
        kinds, kind = torch.unique(self.table, dim=0, return_inverse=True)
        closed = [(i, _ranges_of_true(~row)) for i, row in enumerate(kinds) if not bool(row.all())]
        return [((kind == i).nonzero().flatten(), ranges) for i, ranges in closed]

    @cached_property
    def blocked_units(self) -> Tensor | None:
        """(P,) the contributions that may move nothing; None if there is none."""
        none = ~self.table.any(1)
        return none if bool(none.any()) else None

    def within(self, span: AxisRanges) -> SliceMask:
        """The same of the indices `span` alone."""
        return SliceMask(span.of(self.table, 1), even=self.even)

    def at(self, index: int, length: int) -> SliceMask:
        """All or nothing of something of another length, by whether a contribution may move one index."""
        table = self.table[:, index]
        return SliceMask(
            table.unsqueeze(1).expand(-1, length), [((~table).nonzero().flatten(), [(0, length)])], even=self.even
        )

    def kept(self, t: Tensor, dim: int, low: int = 0) -> Tensor:
        """t, of contributions low and on, with 0 at the indices along `dim` that are blocked. A single number is one.

        By `where`, never by multiplication: 0 times what is not finite is not 0.
        """
        table, shape = self.table[low : low + len(t)].to(t.device), [1] * t.dim()
        if t.dim() == 1:
            return torch.where(table[:, 0], t, t.new_zeros(()))
        shape[0], shape[dim] = table.shape
        return torch.where(table.view(shape), t, t.new_zeros(()))

    def zero_blocked_(self, t: Tensor, dim: int, low: int) -> None:
        """The same in place: only what is blocked is written."""
        if self.even:
            t.copy_(self.kept(t, dim, low))
            return
        for who, ranges in self.blocked:
            here = who if len(t) == len(self.table) else who[(who >= low) & (who < low + len(t))] - low
            for first, stop in ranges if len(here) else ():
                part = t.narrow(dim, first, stop - first)
                part.zero_() if len(here) == len(t) else part.index_fill_(0, here.to(t.device), 0)

    def emptied(self, t: Tensor) -> Tensor:
        """t (P, …) with 0 for contributions that may move nothing: it will meet a 0, and must be finite."""
        if self.blocked_units is None:
            return t
        return t.masked_fill(self.blocked_units.view(-1, *[1] * (t.dim() - 1)).to(t.device), 0)


def _ranges_of_true(flags: Tensor) -> tuple[Range, ...]:
    """The runs of True as ranges."""
    edge = torch.zeros(1, dtype=torch.int8)
    change = torch.diff(flags.to(torch.int8), prepend=edge, append=edge)
    first, stop = ((change == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(first, stop, strict=True))
