"""`lamina.recipes.tabular`: a small network on the columns of a table, scaled by declared ranges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lamina import validate
from lamina.errors import LaminaError
from lamina.recipes.recipe import Recipe, class_losses, class_numbers, squared_error
from lamina.signals.presets import find


class Columns(nn.Module):
    """Columns scaled to [-1, 1] by declared ranges, row by row: values outside are clipped, missing ones (NaN) are 0."""

    middle: Tensor
    spread: Tensor

    def __init__(self, ranges: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        low, high = np.array(ranges, dtype=np.float64).reshape(-1, 2).T
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (high > low).all()):
            problem = f"the ranges are {validate.short_repr(ranges)}"
            raise LaminaError("data.ranges-not-valid", problem, "give (least, largest) of each column, both finite")
        self.register_buffer("middle", torch.tensor((high + low) / 2))
        self.register_buffer("spread", torch.tensor((high - low) / 2))

    @torch.no_grad()
    def forward(self, x: Any) -> Tensor:
        """Return rows of float32."""
        found = torch.as_tensor(np.asarray(x), dtype=torch.float64)
        if found.dim() != 2 or found.shape[1] != len(self.middle):
            problem = f"a table of shape {tuple(found.shape)}, and {len(self.middle)} ranges"
            raise LaminaError("data.columns-differ", problem, "give one row per record, and one range per column")
        return ((found - self.middle) / self.spread).clamp(-1.0, 1.0).nan_to_num(0.0).float()


def tabular(
    x: Any, y: Any, *, ranges: Sequence[tuple[float, float]], classes: int | None = None,
    target: tuple[float, float] | None = None, hidden: Sequence[int] = (32,), unit: Any = None,
    population: int | None = None, seed: int = 0, **options: Any,
) -> Recipe:  # fmt: skip
    """Return a recipe for a table: columns scaled, hidden layers with tanh, the optimiser of the plan.

    y        class numbers below `classes`; or numbers within the declared range `target`, which become [-1, 1]
    ranges   least and largest value of each column, known without the data
    hidden   widths between input and output; `seed` is of the first weights
    unit     the patient of each row, whom ε then protects; without it, ε protects a row
    options  those of `make_private`: epsilon, delta, batch, steps, clip_norm, …

    Formal guarantee. That of `make_private`: ranges, classes and target are declared, nothing is read from the data.
    """
    if (classes is None) == (target is None):
        problem = f"classes is {classes}, target is {target}"
        raise LaminaError("data.classes-or-target", problem, "give the number of classes, or the range of the target")
    features = Columns(ranges)
    wide = features(x).shape[1]
    if target is None:
        outputs = validate.whole(LaminaError, "data.classes-or-target", least=2, classes=classes)
        aim = class_numbers(y, outputs)
    else:
        aim = Columns([target])(np.reshape(y, (-1, 1)))
        outputs = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = (wide, *hidden)
        layers: list[nn.Module] = []
        for into, out in pairwise(sizes):
            layers += [nn.Linear(into, out), nn.Tanh()]
        model = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
    loss_fn = squared_error if classes is None else class_losses
    return Recipe.of(model, features, x, aim, find("tabular"), loss_fn, unit=unit, population=population, **options)
