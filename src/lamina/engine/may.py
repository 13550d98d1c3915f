"""`May`: which places along one axis of a tensor each contribution may move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lamina.plan.slices import Range

Denied = Sequence[tuple[Tensor, Sequence[Range]]]


class May:
    """`table` (P, length), True where a contribution may move a place. Shared by all tensors that are cut alike.

    `denied` is the same for whoever knows it already: contributions, and the places that none of them may move.
    `even`: take as long whoever is denied what.
    """

    def __init__(self, table: Tensor, denied: Denied | None = None, *, even: bool = False) -> None:
        self.table, self.even = table, even
        self._denied = denied

    @cached_property
    def denied(self) -> Denied:
        if self._denied is not None:
            return self._denied
        kinds, kind = torch.unique(self.table, dim=0, return_inverse=True)
        closed = [(i, _runs(~row)) for i, row in enumerate(kinds) if not bool(row.all())]
        return [((kind == i).nonzero().flatten(), ranges) for i, ranges in closed]

    @cached_property
    def nobody(self) -> Tensor | None:
        """(P,) the contributions that may move nothing; None if there is none."""
        none = ~self.table.any(1)
        return none if bool(none.any()) else None

    def narrow(self, first: int, stop: int) -> May:
        return May(self.table[:, first:stop], even=self.even)

    def at(self, place: int, length: int) -> May:
        """All or nothing of something of another length, by whether a contribution may move one place."""
        table = self.table[:, place]
        return May(
            table.unsqueeze(1).expand(-1, length),
            [((~table).nonzero().flatten(), [(0, length)])],
            even=self.even,
        )

    def kept(self, t: Tensor, dim: int, low: int = 0) -> Tensor:
        """t, of contributions low and on, with 0 at the places along `dim` that are denied. A single number is one.

        By `where`, never by multiplication: 0 times what is not finite is not 0.
        """
        table, shape = self.table[low : low + len(t)], [1] * t.dim()
        if t.dim() == 1:
            return torch.where(table[:, 0], t, t.new_zeros(()))
        shape[0], shape[dim] = table.shape
        return torch.where(table.view(shape), t, t.new_zeros(()))

    def clear_(self, t: Tensor, dim: int, low: int) -> None:
        """The same in place: only what is denied is written."""
        if self.even:
            t.copy_(self.kept(t, dim, low))
            return
        for who, ranges in self.denied:
            here = who if len(t) == len(self.table) else who[(who >= low) & (who < low + len(t))] - low
            for first, stop in ranges if len(here) else ():
                part = t.narrow(dim, first, stop - first)
                part.zero_() if len(here) == len(t) else part.index_fill_(0, here, 0)

    def emptied(self, t: Tensor) -> Tensor:
        """t (P, …) with 0 for contributions that may move nothing: it will meet a 0, and must be finite."""
        if self.nobody is None:
            return t
        return t.masked_fill(self.nobody.view(-1, *[1] * (t.dim() - 1)), 0)


def _runs(flags: Tensor) -> tuple[Range, ...]:
    """The runs of True as ranges."""
    edge = torch.zeros(1, dtype=torch.int8)
    change = torch.diff(flags.to(torch.int8), prepend=edge, append=edge)
    first, stop = ((change == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(first, stop, strict=True))
