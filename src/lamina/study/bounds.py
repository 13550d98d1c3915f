"""Δ by depth and activation, and the document's assumptions checked layer by layer: no training, no private data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy.stats import kurtosis, skew
from torch import nn

from lamina.allocate.measure.bounds import bounds
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
    """Δ of the last of `depth` layers. `layers` has (tight, worst, printed) of each."""

    activation: str
    depth: int
    tight: float
    worst: float
    printed: float
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
    found = bounds(trace(model, example), seen, LayerStack.from_model(model))
    layers = tuple(zip(found.tight, found.worst, found.printed, strict=True))
    return BoundRow(activation, depth, found.tight[-1], found.worst[-1], found.printed[-1], layers)


def bound_rows(size: StudySize) -> list[BoundRow]:
    """The rows of Table 6."""
    return [bounds_of(activation, depth, size.passes) for activation, depth in TABLE6_ROWS]


def assumption_rows(size: StudySize, depth: int = 12, activation: str = "gelu") -> list[list[str]]:
    """Table 1: slopes, spectral norms, and how far the pre-activations of each layer are from a Gaussian."""
    model = stacked(depth, activation, SEEDS[0])
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach()}))
    with torch.no_grad():
        model(torch.randn(size.passes, WINDOW, generator=torch.Generator().manual_seed(SEEDS[0])))
    slope = {"relu": 1.0, "gelu": 1.129, "silu": 1.0998}[activation]
    rows = []
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            values = seen[name].double().numpy().ravel()
            shape = f"{float(skew(values)):+.2f}, {float(kurtosis(values)):+.2f}"
            norm = float(torch.linalg.matrix_norm(module.weight.detach(), 2))
            rows.append([name, f"yes, ≤ {slope}", f"{norm:.3g}", shape, f"{values.std():.3g}"])
    return rows
