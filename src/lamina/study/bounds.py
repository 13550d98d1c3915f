"""Δ by depth and activation, and the document's assumptions checked layer by layer: no training, no private data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from lamina.allocate.measure.bounds import bounds
from lamina.allocate.measure.gains import expected_slope, largest_slope
from lamina.allocate.measure.profile import profile
from lamina.allocate.measure.trace import trace
from lamina.plan.layer_stack import LayerStack
from lamina.study.cells import SEEDS, StudySize

WINDOW, LATENT = 256, 32
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
TABLE6_ROWS = (
    ("relu", 4), ("relu", 8), ("relu", 12), ("gelu", 4), ("gelu", 8), ("gelu", 12), ("silu", 4), ("silu", 8), ("silu", 12),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BoundRow:
    """Δ of the last of `depth` layers; `loose` is as printed with γ = 1. `layers` has (tight, worst, printed) of each."""

    activation: str
    depth: int
    tight: float
    worst: float
    printed: float
    loose: float
    layers: tuple[tuple[float, float, float], ...]


def stacked(depth: int, activation: str, seed: int) -> nn.Sequential:
    """A fully connected autoencoder of `depth` Linears, widths falling to the latent and rising again."""
    torch.manual_seed(seed)
    half = depth // 2
    down = [round(WINDOW * (LATENT / WINDOW) ** (i / half)) for i in range(half + 1)]
    up = [round(LATENT * (WINDOW / LATENT) ** (i / (depth - half))) for i in range(1, depth - half + 1)]
    widths, layers = [*down, *up], []
    for i in range(depth):
        layers += [nn.Linear(widths[i], widths[i + 1]), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


@lru_cache(maxsize=64)
def bounds_of(activation: str, depth: int, passes: int) -> BoundRow:
    """Δ on Gaussian inputs, which is the document's own proxy, scaled to one patient of norm 1."""
    model = stacked(depth, activation, SEEDS[0])
    example = torch.zeros(2, WINDOW)
    seen = profile(model, example=example, passes=passes, radius=1.0, seed=SEEDS[0])
    graph, stack = trace(model, example), LayerStack.from_model(model)
    found, loose = bounds(graph, seen, stack), bounds(graph, seen, stack, gamma="none")
    layers = tuple(zip(found.tight, found.worst, found.printed, strict=True))
    return BoundRow(activation, depth, found.tight[-1], found.worst[-1], found.printed[-1], loose.printed[-1], layers)


def bound_rows(size: StudySize) -> list[BoundRow]:
    """The rows of Table 6."""
    return [bounds_of(activation, depth, size.passes) for activation, depth in TABLE6_ROWS]


def assumption_rows(size: StudySize, depth: int = 12, activation: str = "gelu") -> list[list[str]]:
    """Return, for every activation, what its inputs say about assumptions A1 to A3, and both local constants."""
    model = stacked(depth, activation, SEEDS[0])
    function, largest = getattr(functional, activation), largest_slope(activation, {})
    rows = []
    for node in profile(model, example=torch.zeros(2, WINDOW), passes=size.passes, seed=SEEDS[0]).activations:
        before = node.pre_activation
        assert before is not None
        rows.append([
            node.module,
            f"{'yes' if before.atom <= 0.01 else 'no'}: {100 * before.atom:.2g} %",
            f"{'yes' if before.steepest <= largest else 'no'}: {before.steepest:.4g} of {largest:.4g}",
            f"{'yes' if before.ks <= 0.1 else 'no'}: {before.ks:.3f}",
            f"{before.slope:.4f}",
            f"{expected_slope(function, before.mean, before.variance**0.5, largest):.4f}",
        ])  # fmt: skip
    return rows
