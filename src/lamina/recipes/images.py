"""`lamina.recipes.images`: a linear layer on scattered images of any size, without public data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina import validate
from lamina.errors import LaminaError
from lamina.recipes.recipe import Recipe, class_numbers
from lamina.run.corpus import Corpus
from lamina.run.optimizer import private_optimizer
from lamina.run.private import make_private
from lamina.signals.front_ends import Scattering2D

STEPS, BATCH, GROUP, CHUNK = 500, 8192, 3, 100
LENGTH = 7.0  # of every row: it sets how far a step of the optimiser moves the logits
OPPONENT = ((1 / 3, 1 / 3, 1 / 3), (1 / 2, -1 / 2, 0.0), (1 / 4, 1 / 4, -1 / 2))  # brightness, red-green, yellow-blue


class ScatteredImages(nn.Module):
    """Images -> (N, width): scattering coefficients, normalised within each image, without learned parameters.

    Three colours become brightness, red-green and yellow-blue. `mirror` averages the coefficients with those of the mirror
    image, and keeps the half of the columns that then holds all of it. `straighten` removes the slant of writing first.
    """

    opponent: Tensor

    def __init__(self, shape: tuple[int, int, int], *, mirror: bool = False, straighten: bool = False) -> None:
        super().__init__()
        self.mirror, self.straighten, self.scattering = mirror, straighten, Scattering2D(shape[1:])
        colours = torch.tensor(OPPONENT) if shape[0] == 3 else torch.eye(shape[0])
        self.register_buffer("opponent", colours, persistent=False)

    @torch.no_grad()
    def forward(self, x: Any) -> Tensor:
        """Return rows of length `LENGTH`."""
        return torch.cat([self._rows(part) for part in planes(x).split(CHUNK)])

    def _rows(self, x: Tensor) -> Tensor:
        x = torch.einsum("oc,nchw->nohw", self.opponent, x.float() / (1.0 if x.is_floating_point() else 255.0))
        found = self.scattering(upright(x) if self.straighten else x)
        if self.mirror:
            found = (found + self.scattering.mirrored(found))[..., : -(-found.shape[-1] // 2)]
        found = nn.functional.group_norm(found, found.shape[1] // GROUP, eps=1e-12).flatten(1)
        return nn.functional.normalize(found) * LENGTH


def upright(x: Tensor) -> Tensor:
    """Return images sheared along their rows until rows and columns of the bright pixels are uncorrelated."""
    row, column = ((2 * torch.arange(side) + 1) / side - 1 for side in x.shape[-2:])
    ink = x.sum(1).clamp_min(0)
    ink = ink / ink.sum((1, 2), keepdim=True).clamp_min(1e-9)
    down, across = ink.sum(2), ink.sum(1)
    centre = down @ row
    covariance = torch.einsum("nhw,h,w->n", ink, row, column) - centre * (across @ column)
    slant = covariance / (down @ row.square() - centre.square()).clamp_min(1e-9)
    shear = torch.eye(2, 3).repeat(len(x), 1, 1)
    shear[:, 0, 1], shear[:, 0, 2] = slant, -slant * centre
    grid = nn.functional.affine_grid(shear, list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


def planes(x: Any) -> Tensor:
    """Return images as (N, C, H, W)."""
    found = torch.as_tensor(x)
    if found.dim() not in (3, 4) or (found.dim() == 4 and found.shape[-1] <= 4):
        problem = f"images of shape {tuple(found.shape)}, must be (N, H, W) or (N, C, H, W)"
        remedy = "reshape them: one image per row of the first axis, colours before height: x.transpose(0, 3, 1, 2)"
        raise LaminaError("data.images-not-images", problem, remedy)
    return found.unsqueeze(1) if found.dim() == 3 else found


def images(
    x: Any, y: Any, *, classes: int, epsilon: float, delta: float = 1e-5, batch: int | None = None, steps: int = STEPS,
    mirror: bool = False, straighten: bool = False, population: int | None = None, unit: Any = None, **options: Any,
) -> Recipe:  # fmt: skip
    """Return a recipe for a linear classifier of scattered images at the given ε and δ.

        recipe = lamina.recipes.images(x, y, classes=10, epsilon=3.0)
        recipe.train()
        labels = recipe.predict(new_images).argmax(1)

    x        images, (N, H, W) or (N, C, H, W) with sides of 8 or more: bytes, or numbers of any scale
    y        labels from 0 to classes - 1; `classes` is public and not read from them
    batch    expected contributions per step; default: 8,192, or a quarter of the population if that is less
    mirror   left and right mean the same, as in photographs and not in writing
    straighten  the images are single characters, bright on dark: remove the slant of each
    unit     the patient of each image, whom ε then protects; without it, ε protects an image
    options  those of `make_private`: clip_norm, origin, bands, …

    Formal guarantee. That of `make_private`. Features are a function of one image and of public constants: nothing is
    learned from, or chosen on, the images before the first private step.
    """
    found = planes(x)
    classes = validate.whole(LaminaError, "data.images-classes", least=2, classes=classes)
    labels = class_numbers(y, classes)
    features = ScatteredImages((found.shape[1], found.shape[2], found.shape[3]), mirror=mirror, straighten=straighten)
    rows = torch.cat([features(part).half() for part in found.split(CHUNK)])
    return classifier(
        rows, labels, features, classes=classes, epsilon=epsilon, delta=delta, batch=batch, steps=steps,
        population=population, unit=unit, **options,
    )  # fmt: skip


def classifier(
    rows: Tensor, y: Any, features: ScatteredImages, *, classes: int, epsilon: float, delta: float = 1e-5,
    batch: int | None = None, steps: int = STEPS, population: int | None = None, unit: Any = None, **options: Any,
) -> Recipe:  # fmt: skip
    """Return the recipe of `images` for rows that `features` computed earlier; half precision saves memory."""
    model = nn.Linear(rows.shape[1], classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    corpus = Corpus(rows, y, unit=unit, origin=options.pop("origin", None), dtype=torch.float32)
    people = population or len(corpus)
    engine, corpus, plan = make_private(
        model, corpus, epsilon=epsilon, delta=delta, steps=steps, population=population,
        batch=min(BATCH, -(-people // 4)) if batch is None else batch, **options,
    )  # fmt: skip
    optimizer, schedule = private_optimizer(model, plan)
    return Recipe(
        model=model, engine=engine, corpus=corpus, plan=plan, optimizer=optimizer, schedule=schedule, features=features
    )
