"""`UnitGrad`: the gradient of one tensor for every contribution of a batch, without storing it.

A rule describes what each contribution's gradient *is*; the classes here know how to measure and sum
it. All work in float32 or better, and the norm is always that of the numbers that are summed.
A native kernel for a layer kind is a new subclass with its own `clip_and_add`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.engine.may import May
from lamina.engine.norms import row_norm_sq
from lamina.engine.places import Places
from lamina.engine.workspace import take

# Elements of per-contribution gradient formed at a time: large enough to keep both cores busy, small
# enough to stay in cache and to leave peak memory alone.
CHUNK = 1 << 21
_ONE = torch.ones((), dtype=torch.float64)
_FEW = 8  # a matrix of so many numbers per position is masked before it is formed
_LOW, _HIGH = 1e-15, 1e15  # norms between which products in float32 lose nothing


@dataclass(frozen=True, eq=False)
class Weights:
    """The factor of each contribution, and which contributions must be left out of a product."""

    factor: Tensor  # (P,) float64, 0 where a contribution does not reach the layer or is not finite
    broken: Tensor | None  # (P,) bool, or None where every contribution is finite

    def slice(self, low: int, high: int) -> Weights:
        return Weights(self.factor[low:high], None if self.broken is None else self.broken[low:high])

    def clean(self, t: Tensor) -> Tensor:
        """Zero the broken contributions with `where`: multiplying NaN by 0 would keep it."""
        if self.broken is None:
            return t
        return t.masked_fill(self.broken.view(-1, *[1] * (t.dim() - 1)), 0)


Clip = Callable[[Tensor, int, int], Weights]  # (norm², first, last) of some contributions → weights


class UnitGrad(ABC):
    """Gradients G[p] of one tensor, p = 0 … P-1."""

    units: int
    shape: torch.Size

    @abstractmethod
    def norm_sq(self) -> Tensor:
        """(P,) squared norms, float64."""

    @abstractmethod
    def add_to(self, out: Tensor, weights: Weights) -> None:
        """out += Σ_p weights[p] · G[p]."""

    @abstractmethod
    def dense(self, low: int, high: int) -> Tensor:
        """G[low:high], formed, as (high - low, numel) in the order of the tensor. Valid until the next call."""

    @property
    def formed(self) -> bool:
        """Whether measuring means forming G, so that measuring and summing belong in one pass."""
        return False

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: Clip) -> Weights:
        """Measure, clip and sum. `others` is the squared norm of the rest of the layer, if it has more."""
        norm_sq = self.norm_sq()
        weights = clip(norm_sq if others is None else norm_sq + others, 0, self.units)
        self.add_to(out, weights)
        return weights

    def where(self, axis: int, may: May) -> UnitGrad:
        """The same, but 0 at the places along `axis` that a contribution may not move."""
        return Masked(self, axis, may)

    def pick(self, places: Places) -> UnitGrad | None:
        """Only these places, of every contribution; None where that saves nothing, or would be measured otherwise."""
        return None


class Dense(UnitGrad):
    """G itself: (P, *shape). For what is small: biases, norm layers, expanded tensors.

    `measure` gives the squared norms where something else has them already.
    """

    def __init__(self, grads: Tensor, measure: Callable[[], Tensor] | None = None) -> None:
        self.grads = grads if grads.dtype == torch.float64 else grads.float()
        self.units, self.shape, self.measure = grads.shape[0], grads.shape[1:], measure

    def norm_sq(self) -> Tensor:
        return row_norm_sq(self.grads) if self.measure is None else self.measure()

    def add_to(self, out: Tensor, weights: Weights) -> None:
        grads = weights.clean(self.grads)
        if grads.dim() == 2:
            out.addmv_(grads.t(), weights.factor.to(grads.dtype))
        else:
            _add_weighted(out, grads.reshape(self.units, -1), weights.factor)

    def dense(self, low: int, high: int) -> Tensor:
        return self.grads[low:high].reshape(high - low, -1)

    def where(self, axis: int, may: May) -> UnitGrad:
        return Dense(may.kept(self.grads, axis + 1))


class Formed(UnitGrad):
    """Gradients that are formed some contributions at a time, measured, summed and forgotten."""

    @property
    def formed(self) -> bool:
        return True

    def chunks(self) -> Iterator[tuple[int, int]]:
        size = max(1, CHUNK // max(1, self.shape.numel()))
        return ((low, min(low + size, self.units)) for low in range(0, self.units, size))

    def norm_sq(self) -> Tensor:
        if self.units == 0:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([row_norm_sq(self.dense(low, high)) for low, high in self.chunks()])

    def add_to(self, out: Tensor, weights: Weights) -> None:
        for low, high in self.chunks():
            part = weights.slice(low, high)
            _add_weighted(out, part.clean(self.dense(low, high)), part.factor)

    def clip_and_add(self, out: Tensor, others: Tensor | None, clip: Clip) -> Weights:
        factors, broken = [], []
        for low, high in self.chunks():
            grads = self.dense(low, high)
            norm_sq = row_norm_sq(grads)
            part = clip(norm_sq if others is None else norm_sq + others[low:high], low, high)
            _add_weighted(out, part.clean(grads), part.factor)
            factors.append(part.factor)
            broken.append(torch.zeros(high - low, dtype=torch.bool) if part.broken is None else part.broken)
        if not factors:
            return Weights(torch.zeros(0, dtype=torch.float64), None)
        bad = torch.cat(broken)
        return Weights(torch.cat(factors), bad if bool(bad.any()) else None)


class Masked(Formed):
    """A gradient with 0 where a contribution may not move it, written over what is formed.

    Kinds that keep what `dense` gives, or can mask what they are made of for less, have a `where` of their own.
    """

    def __init__(self, inner: UnitGrad, axis: int, may: May) -> None:
        self.inner, self.axis, self.may = inner, axis, may
        self.units, self.shape = inner.units, inner.shape

    def chunks(self) -> Iterator[tuple[int, int]]:
        return self.inner.chunks() if isinstance(self.inner, Formed) else super().chunks()

    def dense(self, low: int, high: int) -> Tensor:
        grads = self.inner.dense(low, high)  # formed for this call, so that it may be written to
        self.may.clear_(grads.view(high - low, *self.shape), self.axis + 1, low)
        return grads


class Outer(UnitGrad):
    """G[p] = g[p] ⊗ a[p], one position per contribution: ‖G‖ = ‖g‖·‖a‖, nearly free."""

    def __init__(self, g: Tensor, a: Tensor) -> None:
        self.g, self.a, self.length = wide(g), wide(a), _ONE  # (P, o), (P, i)
        self._norms: tuple[Tensor, Tensor] | None = None
        self.units, self.shape = g.shape[0], torch.Size((g.shape[1], a.shape[1]))

    def _measure(self) -> tuple[Tensor, Tensor]:
        """Squared norms of g and a, in float64 outright: they are vectors. Measured once.

        A row so small or large that a clip factor times it would lose bits in float32 becomes a unit vector, and
        `length` keeps its size in float64. Row by row: nobody's rounding depends on the others.
        """
        if self._norms is not None:
            return self._norms
        norms = torch.stack(
            [torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (self.g, self.a)]
        )
        if self.units and not _well_scaled(norms):
            odd = ~((norms > _LOW) & (norms < _HIGH)).all(0)
            self.length = torch.where(odd, norms[0] * norms[1], 1.0)
            self.g, self.a = (
                _unit_rows(t, odd, norm) for t, norm in zip((self.g, self.a), norms, strict=True)
            )
        g, a = norms.square_().unbind(0)
        self._norms = (g, a)
        return self._norms

    def g_norm_sq(self) -> Tensor:
        return self._measure()[0]

    def norm_sq(self) -> Tensor:
        g, a = self._measure()
        return g * a

    def add_to(self, out: Tensor, weights: Weights) -> None:
        factor = weights.factor if self.length is _ONE else weights.factor * weights.clean(self.length)
        g = weights.clean(self.g) * factor.to(self.g.dtype).unsqueeze(1)
        out.addmm_(g.t(), weights.clean(self.a))

    def dense(self, low: int, high: int) -> Tensor:
        product = self.g[low:high].unsqueeze(2) * self.a[low:high].unsqueeze(1)
        if self.length is not _ONE:
            product = product * self.length[low:high].view(-1, 1, 1).to(product.dtype)
        return product.reshape(high - low, -1)

    def where(self, axis: int, may: May) -> UnitGrad:
        return Outer(*_factors(self.g, self.a, axis, may))

    def pick(self, places: Places) -> UnitGrad | None:
        g, a = self.g, self.a
        return Outer(places.of(g, 1), a) if places.axis == 0 else Outer(g, places.of(a, 1))


class Product(Formed):
    """G[p] = Σ_t g[p,t] ⊗ a[p,t]: a linear map applied at T positions."""

    def __init__(self, g: Tensor, a: Tensor) -> None:
        self.g, self.a = g, a  # (P, T, o), (P, T, i)
        self.units, self.shape = g.shape[0], torch.Size((g.shape[2], a.shape[2]))

    def dense(self, low: int, high: int) -> Tensor:
        g, a = wide(self.g[low:high]), wide(self.a[low:high])
        grads = take("grads", (high - low, *self.shape), g.dtype)
        return torch.bmm(g.transpose(1, 2), a, out=grads).view(high - low, -1)

    def where(self, axis: int, may: May) -> UnitGrad:
        if self.shape[1 - axis] < _FEW * self.g.shape[1]:
            return super().where(axis, may)  # what was formed is cleared, some rows or columns of it
        return Product(*_factors(self.g, self.a, axis, may))

    def pick(self, places: Places) -> UnitGrad | None:
        if not places.keeps_blocks(self.shape):
            return None
        g, a = self.g, self.a
        return Product(places.of(g, 2), a) if places.axis == 0 else Product(g, places.of(a, 2))


def _well_scaled(norms: Tensor) -> bool:
    """Whether rows of these norms can be multiplied in float32 without losing bits."""
    low, high = norms.aminmax()
    return low.item() > _LOW and high.item() < _HIGH


def _unit_rows(t: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
    return torch.where(rows.unsqueeze(1), t / norm.clamp(min=1e-300).unsqueeze(1), t).to(t.dtype)


def wide(t: Tensor) -> Tensor:
    """float32 or better: sums of clipped gradients are never kept in bfloat16."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _factors(g: Tensor, a: Tensor, axis: int, may: May) -> tuple[Tensor, Tensor]:
    """The factors of a product g ⊗ a of which a contribution may move some rows (axis 0) or columns."""
    if axis == 0:
        return may.kept(g, g.dim() - 1), may.emptied(a)
    return may.emptied(g), may.kept(a, a.dim() - 1)


def _add_weighted(out: Tensor, grads: Tensor, factor: Tensor) -> None:
    """out += factorᵀ · grads, for grads (P, numel) and a contiguous out."""
    out.view(1, -1).addmm_(factor.to(grads.dtype).unsqueeze(0), grads)
