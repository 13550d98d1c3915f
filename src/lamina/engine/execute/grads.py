"""The gradient of one tensor for every contribution of a batch, without storing it: norms, slice masks, sums."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lamina.engine.execute.clip import BoxClip, ClipWeights
from lamina.engine.execute.norms import like_rows, row_norm_sq, take_buffer, vector_norms
from lamina.engine.execute.slice_masks import AxisRanges, SliceMask

# `ContributionGrads`: the gradient of one tensor for every contribution of a batch, without storing it.
#
# A rule describes what each contribution's gradient *is*; the classes here know how to measure and sum
# it. All work in float32 or better, and the norm is always that of the numbers that are summed.
# Native kernels are subclasses with a `clip_and_add` of their own: native/products.py.

# Elements of per-contribution gradient formed at a time: large enough to keep both cores busy, small
# enough to stay in cache and to leave peak memory alone.
CHUNK_ELEMENTS = 1 << 21
# Contributions added up in float32: more of them are added up in float64, so many at a time. Where a float32 sum is
# rounded depends on what is in it, and a contribution can move how thousands of others are rounded, by several times its
# bound (docs/decisions/noise.md, "Rounding in the sum").
SUM_BLOCK = 128
_UNIT_LENGTH = torch.ones((), dtype=torch.float64)
_MIN_WIDTH_PER_POSITION = 8  # a matrix of so many numbers per position is masked before it is formed
_MIN_SAFE_NORM, _MAX_SAFE_NORM = 1e-15, 1e15  # norms between which products in float32 lose nothing


class ContributionGrads(ABC):
    """Gradients G[p] of one tensor, p = 0 … P-1."""

    units: int
    shape: torch.Size

    @abstractmethod
    def norm_sq(self) -> Tensor:
        """(P,) squared norms, float64."""

    @abstractmethod
    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        """out += Σ_p weights[p] · G[p]."""

    @abstractmethod
    def dense(self, low: int, high: int) -> Tensor:
        """G[low:high], formed, as (high - low, numel) in the order of the tensor. Valid until the next call."""

    @property
    def formed(self) -> bool:
        """Whether measuring means forming G, so that measuring and summing belong in one pass."""
        return False

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: BoxClip) -> ClipWeights:
        """Measure, clip and sum. `others` is the squared norm of the rest of the layer, if it has more."""
        norm_sq = self.norm_sq()
        weights = clip(norm_sq if others is None else norm_sq + others, 0, self.units)
        self.add_to(out, weights)
        return weights

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        """The same, but 0 at the indices along `axis` that a contribution may not move."""
        return MaskedGrads(self, axis, mask)

    def pick(self, span: AxisRanges) -> ContributionGrads | None:
        """Only these indices, of every contribution; None where that saves nothing, or would be measured otherwise."""
        return None


class DenseGrads(ContributionGrads):
    """G itself: (P, *shape). For what is small: biases, norm layers, expanded tensors.

    `measure` gives the squared norms where something else has them already.
    """

    def __init__(self, grads: Tensor, measure: Callable[[], Tensor] | None = None) -> None:
        self.grads = grads if grads.dtype == torch.float64 else grads.float()
        self.units, self.shape, self.measure = grads.shape[0], grads.shape[1:], measure

    def norm_sq(self) -> Tensor:
        return row_norm_sq(self.grads) if self.measure is None else self.measure()

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        with _wide_sum(out, self.units) as total:
            _add_weighted(total, weights.clean(self.grads).reshape(self.units, -1), weights.factor)

    def dense(self, low: int, high: int) -> Tensor:
        return self.grads[low:high].reshape(high - low, -1)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        return DenseGrads(mask.kept(self.grads, axis + 1))


class ChunkedGrads(ContributionGrads):
    """Gradients that are formed some contributions at a time, measured, summed and forgotten."""

    @property
    def formed(self) -> bool:
        return True

    def chunks(self) -> Iterator[tuple[int, int]]:
        size = max(1, CHUNK_ELEMENTS // max(1, self.shape.numel()))
        return ((low, min(low + size, self.units)) for low in range(0, self.units, size))

    def norm_sq(self) -> Tensor:
        if self.units == 0:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([row_norm_sq(self.dense(low, high)) for low, high in self.chunks()])

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        with _wide_sum(out, self.units) as total:
            for low, high in self.chunks():
                part = weights.slice(low, high)
                _add_weighted(total, part.clean(self.dense(low, high)), part.factor)

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: BoxClip) -> ClipWeights:
        factors, broken = [], []
        with _wide_sum(out, self.units) as total:
            for low, high in self.chunks():
                grads = self.dense(low, high)
                norm_sq = row_norm_sq(grads)
                part = clip(norm_sq if others is None else norm_sq + others[low:high], low, high)
                _add_weighted(total, part.clean(grads), part.factor)
                factors.append(part.factor)
                broken.append(torch.zeros(high - low, dtype=torch.bool) if part.broken is None else part.broken)
        if not factors:
            return ClipWeights(torch.zeros(0, dtype=torch.float64), None)
        bad = torch.cat(broken)
        return ClipWeights(torch.cat(factors), bad if bool(bad.any()) else None)


class MaskedGrads(ChunkedGrads):
    """A gradient with 0 where a contribution may not move it, written over what is formed.

    Kinds that keep what `dense` gives, or can mask what they are made of for less, have a `where` of their own.
    """

    def __init__(self, inner: ContributionGrads, axis: int, mask: SliceMask) -> None:
        self.inner, self.axis, self.mask = inner, axis, mask
        self.units, self.shape = inner.units, inner.shape

    def chunks(self) -> Iterator[tuple[int, int]]:
        return self.inner.chunks() if isinstance(self.inner, ChunkedGrads) else super().chunks()

    def dense(self, low: int, high: int) -> Tensor:
        grads = self.inner.dense(low, high)  # formed for this call, so that it may be written to
        self.mask.zero_blocked_(grads.view(high - low, *self.shape), self.axis + 1, low)
        return grads


class OuterProductGrads(ContributionGrads):
    """G[p] = g[p] ⊗ a[p], one position per contribution: ‖G‖ = ‖g‖·‖a‖, nearly free."""

    def __init__(self, g: Tensor, a: Tensor) -> None:
        self.g, self.a, self.length = at_least_float32(g), at_least_float32(a), _UNIT_LENGTH  # (P, o), (P, i)
        self._norms: tuple[Tensor, Tensor] | None = None
        self.units, self.shape = g.shape[0], torch.Size((g.shape[1], a.shape[1]))

    def _measure(self) -> tuple[Tensor, Tensor]:
        """Squared norms of g and a, in float64 outright: they are vectors. Measured once.

        A row so small or large that a clip factor times it would lose bits in float32 becomes a unit vector, and
        `length` keeps its size in float64. Row by row: nobody's rounding depends on the others.
        """
        if self._norms is not None:
            return self._norms
        norms = torch.stack([vector_norms(t) for t in (self.g, self.a)])
        if self.units and not _well_scaled(norms):
            odd = ~((norms > _MIN_SAFE_NORM) & (norms < _MAX_SAFE_NORM)).all(0)
            self.length = torch.where(odd, norms[0] * norms[1], 1.0)
            self.g, self.a = (_unit_rows(t, odd, norm) for t, norm in zip((self.g, self.a), norms, strict=True))
        g, a = norms.square_().unbind(0)
        self._norms = (g, a)
        return self._norms

    def g_norm_sq(self) -> Tensor:
        return self._measure()[0]

    def norm_sq(self) -> Tensor:
        g, a = self._measure()
        return g * a

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        factor = weights.factor if self.length is _UNIT_LENGTH else weights.factor * weights.clean(self.length)
        g, a = weights.clean(self.g) * like_rows(factor, self.g).unsqueeze(1), weights.clean(self.a)
        with _wide_sum(out, self.units) as total:
            for low in range(0, self.units, SUM_BLOCK):
                total += g[low : low + SUM_BLOCK].t() @ a[low : low + SUM_BLOCK]

    def dense(self, low: int, high: int) -> Tensor:
        product = self.g[low:high].unsqueeze(2) * self.a[low:high].unsqueeze(1)
        if self.length is not _UNIT_LENGTH:
            product = product * like_rows(self.length[low:high], product).view(-1, 1, 1)
        return product.reshape(high - low, -1)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        return OuterProductGrads(*_masked_factors(self.g, self.a, axis, mask))

    def pick(self, span: AxisRanges) -> ContributionGrads | None:
        g, a = self.g, self.a
        return OuterProductGrads(span.of(g, 1), a) if span.axis == 0 else OuterProductGrads(g, span.of(a, 1))


class SequenceProductGrads(ChunkedGrads):
    """G[p] = Σ_t g[p,t] ⊗ a[p,t]: a linear map applied at T positions."""

    def __init__(self, g: Tensor, a: Tensor) -> None:
        self.g, self.a = g, a  # (P, T, o), (P, T, i)
        self.units, self.shape = g.shape[0], torch.Size((g.shape[2], a.shape[2]))

    def dense(self, low: int, high: int) -> Tensor:
        g, a = at_least_float32(self.g[low:high]), at_least_float32(self.a[low:high])
        grads = take_buffer("grads", (high - low, *self.shape), g.dtype, g)
        return torch.bmm(g.transpose(1, 2), a, out=grads).view(high - low, -1)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        if self.shape[1 - axis] < _MIN_WIDTH_PER_POSITION * self.g.shape[1]:
            return super().where(axis, mask)  # what was formed is cleared, some rows or columns of it
        return SequenceProductGrads(*_masked_factors(self.g, self.a, axis, mask))

    def pick(self, span: AxisRanges) -> ContributionGrads | None:
        if not span.keeps_blocks(self.shape):
            return None
        rows = span.axis == 0
        return SequenceProductGrads(span.of(self.g, 2) if rows else self.g, self.a if rows else span.of(self.a, 2))


def _well_scaled(norms: Tensor) -> bool:
    """Whether rows of these norms can be multiplied in float32 without losing bits."""
    low, high = norms.aminmax()
    return low.item() > _MIN_SAFE_NORM and high.item() < _MAX_SAFE_NORM


def _unit_rows(t: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
    """t with these rows divided by their norms, in float64; the others as they are, and at no cost."""
    index = rows.nonzero().flatten()
    if t.is_cpu:
        some = t[index].double() / norm[index].clamp(min=1e-300).unsqueeze(1)
    else:  # which may have no float64: in two divisions, so that neither leaves the range of float32
        root = like_rows(norm[index].clamp(min=1e-74).sqrt(), t).unsqueeze(1)
        some = t[index.to(t.device)] / root / root
    return t.index_put((index.to(t.device),), some.to(t.dtype))


def at_least_float32(t: Tensor) -> Tensor:
    """float32 or better: sums of clipped gradients are never kept in bfloat16."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _masked_factors(g: Tensor, a: Tensor, axis: int, mask: SliceMask) -> tuple[Tensor, Tensor]:
    """The factors of a product g ⊗ a of which a contribution may move some rows (axis 0) or columns."""
    if axis == 0:
        return mask.kept(g, g.dim() - 1), mask.emptied(a)
    return mask.emptied(g), mask.kept(a, a.dim() - 1)


@contextmanager
def _wide_sum(out: Tensor, units: int) -> Iterator[Tensor]:
    """Where so many contributions are added up before they are added to `out`: in float64 if they are many."""
    if units <= SUM_BLOCK or out.dtype == torch.float64 or not out.is_cpu:
        yield out
        return
    total = torch.zeros(out.shape, dtype=torch.float64)
    yield total
    out += total


def _add_weighted(out: Tensor, grads: Tensor, factor: Tensor) -> None:
    """out += factorᵀ · grads, for grads (P, numel)."""
    factor = like_rows(factor, grads)
    for low in range(0, len(grads), SUM_BLOCK):
        out += (factor[low : low + SUM_BLOCK] @ grads[low : low + SUM_BLOCK]).view(out.shape)


class ScatterGrads(ContributionGrads):
    """G[p][id] = Σ over positions with that id of g: an embedding. Sorted and summed, never one-hot."""

    def __init__(self, ids: Tensor, g: Tensor, rows: int, skip: int | None) -> None:
        self.units, self.shape = ids.shape[0], torch.Size((rows, g.shape[2]))
        key = (ids + torch.arange(self.units, device=ids.device).unsqueeze(1) * rows).flatten()
        g = at_least_float32(g.reshape(-1, g.shape[2]))
        if skip is not None:
            keep = (ids != skip).flatten()
            key, g = key[keep], g[keep]
        unique, segment = torch.unique(key, return_inverse=True)
        self.grads = g.new_zeros(len(unique), g.shape[1]).index_add_(0, segment, g)
        self.owner = torch.div(unique, rows, rounding_mode="floor")
        self.row = unique - self.owner * rows

    def norm_sq(self) -> Tensor:
        total = torch.zeros(self.units, dtype=torch.float64)
        return total.index_add_(0, self.owner.cpu(), row_norm_sq(self.grads))

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        factor = like_rows(weights.factor, self.grads)[self.owner]
        grads = self.grads
        if weights.broken is not None:
            grads = grads.masked_fill(weights.broken.to(grads.device)[self.owner].unsqueeze(1), 0)
        row, made = self.row, grads * factor.unsqueeze(1)
        if self.units > SUM_BLOCK and out.is_cpu:
            row, place = torch.unique(row, return_inverse=True)
            made = made.new_zeros(len(row), made.shape[1], dtype=torch.float64).index_add_(0, place, made.double())
        out.index_add_(0, row, made.to(out.dtype))

    def dense(self, low: int, high: int) -> Tensor:
        mine = (self.owner >= low) & (self.owner < high)
        flat = self.grads.new_zeros((high - low) * self.shape[0], self.shape[1])
        flat[(self.owner[mine] - low) * self.shape[0] + self.row[mine]] = self.grads[mine]
        return flat.view(high - low, -1)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        less = copy.copy(self)
        if axis == 1:
            less.grads = self.grads.masked_fill(~mask.table.to(self.owner.device)[self.owner], 0)
        else:
            open_ = mask.table.to(self.owner.device)[self.owner, self.row]
            less.grads, less.owner, less.row = self.grads[open_], self.owner[open_], self.row[open_]
        return less


class SummedGrads(ChunkedGrads):
    """A tensor used several times: its gradient is the sum over the uses, clipped once."""

    def __init__(self, parts: Sequence[ContributionGrads]) -> None:
        self.parts, self.units, self.shape = tuple(parts), parts[0].units, parts[0].shape

    def dense(self, low: int, high: int) -> Tensor:
        total = self.parts[0].dense(low, high).clone()
        for part in self.parts[1:]:
            total += part.dense(low, high)
        return total

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        return SummedGrads([part.where(axis, mask) for part in self.parts])

    def pick(self, span: AxisRanges) -> ContributionGrads | None:
        if not span.keeps_blocks(self.shape):
            return None
        picked = [part.pick(span) for part in self.parts]
        return None if None in picked else SummedGrads([part for part in picked if part is not None])


class StackedGrads(ContributionGrads):
    """A tensor of matrices along its first axis (experts), of which `parts` were used: zero elsewhere."""

    def __init__(
        self, parts: Mapping[int, ContributionGrads], shape: torch.Size, units: int, device: torch.device | None = None
    ) -> None:
        self.parts, self.shape, self.units, self.device = parts, shape, units, device

    @property
    def formed(self) -> bool:
        return any(part.formed for part in self.parts.values())

    def norm_sq(self) -> Tensor:
        total = torch.zeros(self.units, dtype=torch.float64)
        for part in self.parts.values():
            total += part.norm_sq()
        return total

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        for index, part in self.parts.items():
            part.add_to(out[index], weights)

    def dense(self, low: int, high: int) -> Tensor:
        whole: Tensor | None = None
        for index, part in self.parts.items():
            grads = part.dense(low, high)
            if whole is None:
                whole = grads.new_zeros(high - low, self.shape[0], grads.shape[1])
            whole[:, index] = grads
        if whole is None:
            return torch.zeros(high - low, self.shape.numel(), device=self.device)
        return whole.view(high - low, -1)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        if axis:
            made = {index: part.where(axis - 1, mask) for index, part in self.parts.items()}
        else:
            made = {
                index: part.where(0, mask.at(index, part.shape[0]))
                for index, part in self.parts.items()
                if bool(mask.table[:, index].any())
            }
        return StackedGrads(made, self.shape, self.units, self.device)


class AxisSliceGrads(ChunkedGrads):
    """A gradient of which only some indices were used or are formed: zero at all others, for every contribution."""

    def __init__(self, inner: ContributionGrads, span: AxisRanges, shape: torch.Size) -> None:
        self.inner, self.span, self.shape, self.units = inner, span, shape, inner.units

    @property
    def formed(self) -> bool:
        return self.inner.formed

    def norm_sq(self) -> Tensor:
        return self.inner.norm_sq()

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        with self._summed(out) as part:
            self.inner.add_to(part, weights)

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: BoxClip) -> ClipWeights:
        with self._summed(out) as part:
            return self.inner.clip_and_add(part, others, clip)

    @contextmanager
    def _summed(self, out: Tensor) -> Iterator[Tensor]:
        """Where the inner gradient is added up: in `out` itself if its indices lie together there."""
        if self.span.axis == 0 and len(self.span.ranges) == 1:
            yield self.span.of(out, 0)
            return
        part = out.new_zeros(self.inner.shape)
        yield part
        out.index_add_(self.span.axis, self.span.index.to(out.device), part)

    def where(self, axis: int, mask: SliceMask) -> ContributionGrads:
        mine = mask.within(self.span) if axis == self.span.axis else mask
        return AxisSliceGrads(self.inner.where(axis, mine), self.span, self.shape)

    def dense(self, low: int, high: int) -> Tensor:
        inner = self.inner.dense(low, high).view(high - low, *self.inner.shape)
        whole = inner.new_zeros(high - low, *self.shape)
        return whole.index_copy_(self.span.axis + 1, self.span.index.to(whole.device), inner).view(high - low, -1)
