"""The grid of a plan with noise on integers: what clipped gradients are cut to, and added up on.

A step with such noise rounds every clipped gradient to a grid, adds up in int64 and adds integers: no floating-point
number is released that depends on a contribution other than through them (docs/decisions/integer_noise.md).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.engine import native
from lamina.engine.execute.clip import ClipWeights
from lamina.engine.execute.grads import CHUNK_ELEMENTS, ContributionGrads
from lamina.engine.execute.norms import row_norm_sq
from lamina.plan.rules import NoiseKind
from lamina.plan.step_plan import StepPlan

# The grid of a layer. The scale s of its noise (S of the discrete Gaussian, √(π/2)·S of Laplace noise) is 2^b units of it,
# so that one unit is g = s/2^b. It depends on the plan alone:
#
#     b = ⌈log2(2^8 √d s / C)⌉, at least 12 and at most 25        C: the smallest threshold of a class that reaches it
#
# with d for √d where norms are L1. A clipped gradient of norm C then has coordinates of 2^8 units on average. Coordinates
# are cut toward zero, which never makes a vector longer in any norm: whatever a contribution was clipped to, ‖y‖·g is at
# most that, in box and joint clipping, under any scale. What is cut off is below one unit a coordinate, at most C/2^8 in
# norm (more where b is at its limit).
#
# Skellam noise of variance v = 4^b units costs a little more than Gaussian noise: for whole orders α and a whole shift y,
# RDP(α) ≤ α‖y‖²/(2v) + ((2α-1)‖y‖² + 6‖y‖₁)/(4v²) (Agarwal, Kairouz and Liu 2021), and ‖y‖₁ ≤ ‖y‖² for whole numbers, so it
# is at most α‖y‖²/(2v)·(1 + 3.5/v). So its unit is larger by √(1 + 3.5/v), which gives sigma back.
#
# Laplace noise costs what Gaussian noise of std S costs. A shift by n units of noise of scale 2^b changes every
# probability by a factor of at most e^ε, ε = n/2^b. What does that is a post-processing of two answers with odds e^ε
# and e^-ε (Kairouz, Oh and Viswanath 2015), and these of N(μ, 1) against N(0, 1), cut at μ/2, with Φ(μ/2) = 1/(1 + e^-ε):
# so μ ≤ √(π/2)·ε = n·g/S. Tensors are noised apart, so a step is a post-processing of Gaussians side by side, of
# μ² = Σ_t (‖g_t‖₁/S_t)². A layer's norm is therefore √Σ_t ‖g_t‖₁², and everything else is as for Gaussian noise.

LEAST_BITS, MOST_BITS = 12, 25
_UNITS_PER_COORDINATE = 2.0**8


class Grid(NamedTuple):
    """The grid of a layer: 2^bits units are the scale of its noise. `taxicab`: its norms are L1. No bits: no noise."""

    bits: int
    unit: float
    taxicab: bool


def layer_grids(plan: StepPlan, least: int = LEAST_BITS) -> tuple[Grid, ...]:
    """The grid of every layer, with at least so many bits: noise that comes in shares needs more."""
    taxicab = plan.noise_kind is NoiseKind.LAPLACE
    found = []
    for i, (layer, s) in enumerate(zip(plan.layers, plan.noise, strict=True)):
        scale = math.sqrt(math.pi / 2) * s if taxicab else s
        if taxicab:
            scale = math.nextafter(scale, math.inf)
        reached = [row[i] for row in plan.clip if row[i] > 0]
        spread = float(layer.size) if taxicab else math.sqrt(layer.size)
        wanted = math.log2(_UNITS_PER_COORDINATE * spread * scale / min(reached)) if reached and s else 0.0
        bits = min(MOST_BITS, max(least, math.ceil(wanted))) if s else 0
        if plan.noise_kind is NoiseKind.SKELLAM:
            scale *= math.sqrt(1 + 3.5 * 4.0**-bits)
        found.append(Grid(bits, math.ldexp(scale, -bits), taxicab))
    return tuple(found)


def row_taxicab_sq(rows: Tensor) -> Tensor:
    """(P, n) → (P,) squared L1 norms in float64."""
    length: Tensor = torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float64)
    return length.square_()


def _add_cut(grads: Tensor, factor: Tensor, out: Tensor) -> None:
    """out += Σ_p trunc(factor[p]·grads[p]) for grads (P, n), out (n,) int64. Who has factor 0 is left out, finite or not.

    The kernel and torch give the same integers.
    """
    library, shape = native.library(), tuple(grads.shape)
    if library is None:
        scaled = torch.where((factor > 0).unsqueeze(1), grads.double() * factor.unsqueeze(1), 0.0)
        out.add_(scaled.trunc_().to(torch.int64).sum(0))
        return
    at = native.pointer(grads, grads.dtype, *shape), native.pointer(out, torch.int64, shape[1])
    factors = native.pointer(factor.contiguous(), torch.float64, shape[0])
    sizes = ctypes.c_int64(shape[0]), ctypes.c_int64(shape[1])
    threads, wide = torch.get_num_threads(), int(grads.dtype == torch.float64)
    assert grads.dtype in (torch.float32, torch.float64)
    library.lamina_cut_add(
        ctypes.c_void_p(at[0]), wide, *sizes, ctypes.c_void_p(factors), ctypes.c_void_p(at[1]), threads
    )


class GridGrads(ContributionGrads):
    """A gradient that is added up in whole units: what each contribution adds is cut toward zero, then summed in int64.

    It is measured on the very numbers that are cut.
    """

    def __init__(self, inner: ContributionGrads, grid: Grid) -> None:
        self.inner, self.grid, self.units, self.shape = inner, grid, inner.units, inner.shape

    def _chunks(self) -> Iterator[tuple[int, int]]:
        size = max(1, CHUNK_ELEMENTS // max(1, self.shape.numel()))
        return ((low, min(low + size, self.units)) for low in range(0, self.units, size))

    def norm_sq(self) -> Tensor:
        measure = row_taxicab_sq if self.grid.taxicab else row_norm_sq
        parts = [measure(self.inner.dense(low, high)) for low, high in self._chunks()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def add_to(self, out: Tensor, weights: ClipWeights) -> None:
        for low, high in self._chunks():
            factor = weights.factor[low:high] / self.grid.unit
            _add_cut(self.inner.dense(low, high).contiguous(), factor, out.view(-1))

    def dense(self, low: int, high: int) -> Tensor:
        return self.inner.dense(low, high)
