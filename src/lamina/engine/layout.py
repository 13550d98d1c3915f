"""`Layout`: which rows of an activation belong to which contribution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The owner of every leading row of an activation.

    `owner[r]` is the contribution of row r, or -1 where the row is padding. `fold` brings a tensor
    with R leading rows into the form (P contributions, m rows each, …): the m rows then act like m
    more sequence positions of one sample (docs/theory.md, "Unit"). Padding and filler rows are set
    to zero with `where`, never by multiplication, because 0 · NaN is NaN.
    """

    owner: Tensor
    units: int

    @property
    def rows(self) -> int:
        return len(self.owner)

    @cached_property
    def plain(self) -> bool:
        """Whether every row is a contribution of its own, in order."""
        return self._per_unit == 1 and self._padding is None

    @cached_property
    def _per_unit(self) -> int:
        """m if row r belongs to contribution r // m for every r, else 0."""
        if self.units == 0 or self.rows % self.units or self.rows == 0:
            return 0
        m = self.rows // self.units
        plain = torch.arange(self.units)
        if m > 1:
            plain = plain.repeat_interleave(m)
        return m if torch.equal(torch.where(self.owner < 0, plain, self.owner), plain) else 0

    @cached_property
    def _padding(self) -> Tensor | None:
        mask = self.owner < 0
        return mask if bool(mask.any()) else None

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        """For a ragged layout: row numbers (P, M) and where they are filler."""
        counts = torch.bincount(self.owner[self.owner >= 0], minlength=self.units)
        width = max(1, int(counts.max()) if self.units else 1)
        order = torch.argsort(self.owner, stable=True)
        order = order[self.owner[order] >= 0]
        owner = self.owner[order]
        start = torch.cumsum(counts, 0) - counts
        index = torch.zeros(self.units, width, dtype=torch.long)
        filler = torch.ones(self.units, width, dtype=torch.bool)
        place = torch.arange(len(order)) - start[owner]
        index[owner, place] = order
        filler[owner, place] = False
        return index, filler

    def fold(self, t: Tensor) -> Tensor:
        """(R, …) → (P, m, …)."""
        if self._per_unit:
            if self._padding is not None:
                t = t.masked_fill(self._padding.view(-1, *[1] * (t.dim() - 1)), 0)
            return (
                t.unsqueeze(1) if self._per_unit == 1 else t.reshape(self.units, self._per_unit, *t.shape[1:])
            )
        index, filler = self._index
        if self.rows == 0:
            return t.new_zeros(self.units, 1, *t.shape[1:])
        return t[index].masked_fill(filler.view(*filler.shape, *[1] * (t.dim() - 1)), 0)

    def through(self, example_of_row: Tensor) -> Layout:
        """The layout of rows that each come from one example of this layout (-1: from none)."""
        known = example_of_row >= 0
        owner = torch.where(known, self.owner[example_of_row.clamp(min=0)], -1)
        return Layout(owner, self.units)
