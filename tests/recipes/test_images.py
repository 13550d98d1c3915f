"""The recipe for images: any size and colours, features of each image by itself, nothing chosen on the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code
from torch import Tensor

import lamina
from lamina.recipes import Recipe
from lamina.recipes.images import ScatteredImages, images, upright
from lamina.signals.front_ends import Scattering2D

pytestmark = pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")


def stripes(count: int, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Bytes: stripes along one axis or the other under noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=generator)
    rows, columns = torch.meshgrid(*(torch.arange(side) % 4 < 2 for side in shape[-2:]), indexing="ij")
    patterns = torch.stack([rows, columns])[y].float().view(count, *(1,) * (len(shape) - 2), *shape[-2:])
    noise = torch.rand(count, *shape, generator=generator)
    return (170 * (0.5 * patterns + noise)).to(torch.uint8), y


def fit(recipe: Recipe) -> None:
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    for batch in recipe.corpus.batches(recipe.plan):
        recipe.engine.backward(loss(recipe.model(batch.x), batch.y) if len(batch) else None, batch)
        recipe.optimizer.step()
        recipe.optimizer.zero_grad()
        recipe.schedule.step()


@pytest.mark.parametrize(("shape", "mirror"), [((12, 12), False), ((3, 11, 14), True), ((2, 8, 9), False)])
def test_images_of_any_size_and_colours_are_learned(shape: tuple[int, ...], mirror: bool) -> None:
    x, y = stripes(400, shape, 0)
    recipe = images(x, y, classes=2, epsilon=3.0, delta=1e-4, steps=30, mirror=mirror)
    assert recipe.plan.epsilon(0) <= 3.0 and recipe.plan.delta(0) == 1e-4
    assert recipe.plan.batch == 100 and recipe.plan.steps == 30
    fit(recipe)
    tx, ty = stripes(200, shape, 1)
    assert float((recipe.model(recipe.features(tx)).argmax(1) == ty).double().mean()) > 0.9


def test_features_are_of_one_image_and_do_not_depend_on_its_scale() -> None:
    x, _ = stripes(6, (3, 16, 12), 2)
    features = ScatteredImages((3, 16, 12), mirror=False)
    assert not list(features.parameters())
    found, other = features(x), x.clone()
    other[1:] = 255 - other[1:]
    torch.testing.assert_close(features(other)[:1], found[:1])
    torch.testing.assert_close(features(x / 37.0), found, rtol=1e-3, atol=1e-4)
    assert torch.linalg.vector_norm(found, dim=1) == pytest.approx(torch.full((6,), 7.0))
    assert not features(torch.full((1, 3, 16, 12), 0.0)).isnan().any()


@pytest.mark.parametrize("slant", [-0.6, 0.0, 0.5])
def test_slanted_writing_becomes_upright(slant: float) -> None:
    """A bar of ink that leans: afterwards, its columns do not depend on the row, and its ink is all there."""
    row, column = torch.meshgrid(*2 * (torch.linspace(-1, 1, 24),), indexing="ij")
    bar = torch.exp(-40 * (column - 0.1 - slant * row).square()) * (row.abs() < 0.6)
    x = torch.stack([bar, bar])[:, None]
    found = upright(x)[0, 0]
    middles = ((found * column).sum(1) / found.sum(1))[row[:, 0].abs() < 0.55]
    assert float(middles.max() - middles.min()) < 0.03
    assert float(found.sum()) == pytest.approx(float(bar.sum()), rel=0.05)
    assert torch.equal(upright(torch.zeros(1, 1, 9, 8)), torch.zeros(1, 1, 9, 8))


def test_a_straightened_image_has_the_features_of_the_upright_one() -> None:
    row, column = torch.meshgrid(*2 * (torch.linspace(-1, 1, 28),), indexing="ij")
    x = torch.stack([torch.exp(-40 * (column - slant * row).square()) * (row.abs() < 0.6) for slant in (0.0, 0.4)])
    plain, straight = (ScatteredImages((1, 28, 28), straighten=on)(x[:, None]) for on in (False, True))
    far = [float((rows[0] - rows[1]).norm()) for rows in (plain, straight)]
    assert far[1] < 0.2 * far[0]


def test_a_mirrored_image_has_nearly_the_same_features_and_half_of_the_columns() -> None:
    x, _ = stripes(4, (1, 16, 16), 3)
    x = x * (torch.arange(16) < 6)
    x[:, :, 3:5] //= 3
    plain, mirrored = (ScatteredImages((1, 16, 16), mirror=mirror) for mirror in (False, True))

    def alike(features: ScatteredImages) -> float:
        return float(torch.cosine_similarity(features(x), features(x.flip(-1))).min())

    assert alike(plain) < 0.7 < 0.9 < alike(mirrored)
    assert (plain(x).shape[1], mirrored(x).shape[1]) == (81 * 16, 81 * 8)


@pytest.mark.parametrize(("scales", "angles"), [(2, 8), (3, 4), (1, 6)])
def test_coefficients_of_the_mirror_image_are_those_of_other_angles(scales: int, angles: int) -> None:
    """Images without detail: a move by one pixel changes little."""
    scattering = Scattering2D((32, 32), scales=scales, angles=angles)
    row, column = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    x = torch.exp(-20 * ((row + 0.5 * column) ** 2 + (column - 0.3) ** 2)).expand(2, 2, 32, 32).clone()
    x[:, 1] = torch.sin(9 * row + 14 * column)
    found = scattering.mirrored(scattering(x)).unflatten(1, (2, -1))
    wanted = scattering(x.flip(-1)).unflatten(1, (2, -1))
    inner = (slice(None), slice(None), slice(None), slice(1, -1), slice(1, -1))
    for plane in range(2):
        far = (found - wanted)[inner][:, plane, 1:].norm() / wanted[inner][:, plane, 1:].norm()
        assert float(far) < 0.3
        assert float((scattering(x).unflatten(1, (2, -1)).flip(-1) - wanted)[inner][:, plane, 1:].norm()) > 2 * float(
            (found - wanted)[inner][:, plane, 1:].norm()
        )


def test_what_is_made_before_the_first_step_does_not_depend_on_the_data() -> None:
    """Other images and labels of the same number and shape: the same weights, plan, rate and schedule."""

    def made(x: Any, y: Any) -> tuple[Any, ...]:
        recipe = images(x, y, classes=5, epsilon=1.0, delta=1e-4, steps=20)
        weights = [p.detach().clone().tolist() for p in recipe.model.parameters()]
        return weights, recipe.plan.digest(), recipe.optimizer.state_dict(), recipe.schedule.state_dict()

    x, y = stripes(80, (9, 10), 4)
    assert made(x, y) == made(torch.zeros_like(x).numpy(), np.full(80, 3))


def test_patients_with_several_images_are_one_contribution_each() -> None:
    x, y = stripes(90, (8, 8), 5)
    recipe = images(x, y, classes=2, epsilon=1.0, delta=1e-3, steps=10, unit=np.arange(90) // 3, population=40)
    assert len(recipe.corpus) == 30
    assert recipe.plan.classes[0].population == 40 and recipe.plan.batch == 10


def test_what_are_no_images_is_refused() -> None:
    x, y = stripes(80, (8, 8), 6)
    with raises_code("data.images-not-images"):
        images(x[0], y, classes=2, epsilon=1.0)
    with raises_code("data.images-not-images"):
        images(torch.zeros(80, 8, 8, 3), y, classes=2, epsilon=1.0)  # colours last
    with raises_code("train.labels-out-of-range"):
        images(x, y + 1, classes=2, epsilon=1.0)
    with raises_code("data.images-classes"):
        images(x, y, classes=1, epsilon=1.0)
    with raises_code("data.scattering-shape"):
        images(x[:, :7], y, classes=2, epsilon=1.0)
    assert lamina.recipes.images is images
