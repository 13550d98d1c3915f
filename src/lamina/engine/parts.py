"""Gradients made of others: looked up, banded, stacked, added up, and taken at some places only."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lamina.engine.may import May
from lamina.engine.norms import row_norm_sq
from lamina.engine.places import Places
from lamina.engine.unitgrad import Clip, Formed, UnitGrad, Weights, wide


class Scatter(UnitGrad):
    """G[p][id] = Σ over positions with that id of g: an embedding. Sorted and summed, never one-hot."""

    def __init__(self, ids: Tensor, g: Tensor, rows: int, skip: int | None) -> None:
        self.units, self.shape = ids.shape[0], torch.Size((rows, g.shape[2]))
        key = (ids + torch.arange(self.units).unsqueeze(1) * rows).flatten()
        g = wide(g.reshape(-1, g.shape[2]))
        if skip is not None:
            keep = (ids != skip).flatten()
            key, g = key[keep], g[keep]
        unique, segment = torch.unique(key, return_inverse=True)
        self.grads = g.new_zeros(len(unique), g.shape[1]).index_add_(0, segment, g)
        self.owner = torch.div(unique, rows, rounding_mode="floor")
        self.row = unique - self.owner * rows

    def norm_sq(self) -> Tensor:
        total = torch.zeros(self.units, dtype=torch.float64)
        return total.index_add_(0, self.owner, row_norm_sq(self.grads))

    def add_to(self, out: Tensor, weights: Weights) -> None:
        factor = weights.factor[self.owner].to(self.grads.dtype)
        grads = self.grads
        if weights.broken is not None:
            grads = grads.masked_fill(weights.broken[self.owner].unsqueeze(1), 0)
        out.index_add_(0, self.row, grads * factor.unsqueeze(1))

    def dense(self, low: int, high: int) -> Tensor:
        mine = (self.owner >= low) & (self.owner < high)
        flat = self.grads.new_zeros((high - low) * self.shape[0], self.shape[1])
        flat[(self.owner[mine] - low) * self.shape[0] + self.row[mine]] = self.grads[mine]
        return flat.view(high - low, -1)

    def where(self, axis: int, may: May) -> UnitGrad:
        less = copy.copy(self)
        if axis == 1:
            less.grads = self.grads.masked_fill(~may.table[self.owner], 0)
        else:
            open_ = may.table[self.owner, self.row]
            less.grads, less.owner, less.row = self.grads[open_], self.owner[open_], self.row[open_]
        return less


class RowBand(Formed):
    """The gradient of a tensor of which only rows start … start+len were used: zero elsewhere."""

    def __init__(self, inner: UnitGrad, start: int, shape: torch.Size) -> None:
        self.inner, self.start, self.shape, self.units = inner, start, shape, inner.units

    @property
    def formed(self) -> bool:
        return self.inner.formed

    def norm_sq(self) -> Tensor:
        return self.inner.norm_sq()

    def add_to(self, out: Tensor, weights: Weights) -> None:
        self.inner.add_to(out.narrow(0, self.start, self.inner.shape[0]), weights)

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: Clip) -> Weights:
        return self.inner.clip_and_add(out.narrow(0, self.start, self.inner.shape[0]), others, clip)

    def dense(self, low: int, high: int) -> Tensor:
        inner = self.inner.dense(low, high)
        whole = inner.new_zeros(high - low, *self.shape)
        whole.narrow(1, self.start, self.inner.shape[0]).copy_(inner.view(high - low, *self.inner.shape))
        return whole.view(high - low, -1)

    def where(self, axis: int, may: May) -> UnitGrad:
        mine = may if axis else may.narrow(self.start, self.start + self.inner.shape[0])
        return RowBand(self.inner.where(axis, mine), self.start, self.shape)


class Total(Formed):
    """A tensor used several times: its gradient is the sum over the uses, clipped once."""

    def __init__(self, parts: Sequence[UnitGrad]) -> None:
        self.parts, self.units, self.shape = tuple(parts), parts[0].units, parts[0].shape

    def dense(self, low: int, high: int) -> Tensor:
        total = self.parts[0].dense(low, high).clone()
        for part in self.parts[1:]:
            total += part.dense(low, high)
        return total

    def where(self, axis: int, may: May) -> UnitGrad:
        return Total([part.where(axis, may) for part in self.parts])

    def pick(self, places: Places) -> UnitGrad | None:
        if not places.keeps_blocks(self.shape):
            return None
        picked = [part.pick(places) for part in self.parts]
        return None if None in picked else Total([part for part in picked if part is not None])


class Stacked(UnitGrad):
    """A tensor of matrices along its first axis (experts), of which `parts` were used: zero elsewhere."""

    def __init__(self, parts: Mapping[int, UnitGrad], shape: torch.Size, units: int) -> None:
        self.parts, self.shape, self.units = parts, shape, units

    @property
    def formed(self) -> bool:
        return any(part.formed for part in self.parts.values())

    def norm_sq(self) -> Tensor:
        total = torch.zeros(self.units, dtype=torch.float64)
        for part in self.parts.values():
            total += part.norm_sq()
        return total

    def add_to(self, out: Tensor, weights: Weights) -> None:
        for place, part in self.parts.items():
            part.add_to(out[place], weights)

    def dense(self, low: int, high: int) -> Tensor:
        whole: Tensor | None = None
        for place, part in self.parts.items():
            grads = part.dense(low, high)
            if whole is None:
                whole = grads.new_zeros(high - low, self.shape[0], grads.shape[1])
            whole[:, place] = grads
        return torch.zeros(high - low, self.shape.numel()) if whole is None else whole.view(high - low, -1)

    def where(self, axis: int, may: May) -> UnitGrad:
        if axis:
            made = {place: part.where(axis - 1, may) for place, part in self.parts.items()}
        else:
            made = {
                place: part.where(0, may.at(place, part.shape[0]))
                for place, part in self.parts.items()
                if bool(may.table[:, place].any())
            }
        return Stacked(made, self.shape, self.units)


class Picked(Formed):
    """A gradient of which only some places are formed: it is zero at all others, for every contribution."""

    def __init__(self, inner: UnitGrad, places: Places, shape: torch.Size) -> None:
        self.inner, self.places, self.shape, self.units = inner, places, shape, inner.units

    @property
    def formed(self) -> bool:
        return self.inner.formed

    def norm_sq(self) -> Tensor:
        return self.inner.norm_sq()

    def add_to(self, out: Tensor, weights: Weights) -> None:
        part = self._part(out)
        self.inner.add_to(part, weights)
        self._put(out, part)

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: Clip) -> Weights:
        part = self._part(out)
        weights = self.inner.clip_and_add(part, others, clip)
        self._put(out, part)
        return weights

    def _part(self, out: Tensor) -> Tensor:
        """Where the inner gradient is added up: in `out` itself if its places lie together there."""
        if self._together:
            return self.places.of(out, 0)
        return torch.zeros(self.inner.shape, dtype=out.dtype)

    def _put(self, out: Tensor, part: Tensor) -> None:
        if not self._together:
            out.index_add_(self.places.axis, self.places.index, part)

    @property
    def _together(self) -> bool:
        return self.places.axis == 0 and len(self.places.ranges) == 1

    def dense(self, low: int, high: int) -> Tensor:
        inner = self.inner.dense(low, high).view(high - low, *self.inner.shape)
        whole = inner.new_zeros(high - low, *self.shape)
        return whole.index_copy_(self.places.axis + 1, self.places.index, inner).view(high - low, -1)


def total(parts: Sequence[UnitGrad]) -> UnitGrad:
    """The gradient of a tensor over all its uses."""
    return parts[0] if len(parts) == 1 else Total(parts)
