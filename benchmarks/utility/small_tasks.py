"""Small tasks on which defaults are chosen (DEVELOPMENT), and others on which they are measured afterwards (HELD_OUT).

One record is one contribution. Columns of tables are standardised with statistics of the whole table, as if their usual
ranges were public. MNIST is averaged to 14 × 14. Text: rows of AG News (the 7,600 of its test file, named by
LAMINA_TEXT; without it the task is left out) as hashed counts of words, unit norm.
"""

from __future__ import annotations

import csv
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lamina.signals.cgm_simulator import HIGHEST, LOWEST

from .data import _folder, mnist, ptbxl, simulated
from .many_runs import Problem

CACHE = Path(tempfile.gettempdir()) / "lamina-utility"


@dataclass(frozen=True, kw_only=True)
class SmallTask:
    """A problem, the length of its private run, and δ."""

    name: str
    kind: str
    make: Callable[[], Problem]
    batch: int
    steps: int
    delta: float

    def problem(self) -> Problem:
        return _made(self)


@cache
def _made(task: SmallTask) -> Problem:
    return task.make()


def _problem(x: np.ndarray, y: np.ndarray, sizes: tuple[int, ...], loss: str, *, test: float = 0.25) -> Problem:
    """Shuffled and split; sizes between input and output."""
    order = np.random.default_rng(0).permutation(len(x))
    cut = int(len(x) * (1 - test))
    xs = torch.tensor(x[order], dtype=torch.float32)
    ys = torch.tensor(y[order]).long() if loss == "ce" else torch.tensor(y[order], dtype=torch.float32)
    out = int(ys.max()) + 1 if loss == "ce" else xs.shape[1] if loss == "auto" else ys.shape[1]
    return _given(xs[:cut], ys[:cut], xs[cut:], ys[cut:], (xs.shape[1], *sizes, out), loss)


def _given(x: Tensor, y: Tensor, tx: Tensor, ty: Tensor, sizes: tuple[int, ...], loss: str) -> Problem:
    return Problem(x=x.contiguous(), y=y, test_x=tx, test_y=ty, sizes=sizes, loss=loss)


def _standard(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return found


def _table(load: str, sizes: tuple[int, ...], *, regression: bool = False) -> Problem:
    import sklearn.datasets as sets  # type: ignore[import-untyped]

    found = getattr(sets, load)()
    y = _standard(found.target[:, None]) if regression else found.target
    return _problem(_standard(found.data), y, sizes, "mse" if regression else "ce")


def _generated(n: int, features: int, classes: int, sizes: tuple[int, ...]) -> Problem:
    from sklearn.datasets import make_classification

    x, y = make_classification(
        n, features, n_informative=features // 2, n_redundant=features // 4, n_classes=classes, class_sep=1.5,
        flip_y=0.02, random_state=1,
    )  # fmt: skip
    return _problem(_standard(x), y, sizes, "ce")


def _friedman() -> Problem:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(8_000, 10, noise=1.0, random_state=1)
    return _problem(2.0 * x - 1.0, _standard(y[:, None]), (32,), "mse")


def _small_images(x: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(x.view(-1, 1, 28, 28), 2).flatten(1)


def _mnist(n: int, sizes: tuple[int, ...]) -> Problem:
    split = mnist()
    x, tx = _small_images(split.train.x[:n]), _small_images(split.test.x[:2_500])
    return _given(x, split.train.y[:n], tx, split.test.y[:2_500], (196, *sizes, 10), "ce")


def _simulated_ecg() -> Problem:
    split = simulated(CACHE)
    x, tx = split.train.x, split.test.x
    return _given(x, split.train.y.long(), tx, split.test.y.long(), (480, 24, 2), "ce")


def _simulated_beats() -> Problem:
    """Lead II of every simulated patient, 40 samples, through a code of eight."""
    split = simulated(CACHE)
    x, tx = (part.x.view(-1, 12, 40)[:, 1] for part in (split.train, split.test))
    return _given(x, x, tx, tx, (40, 32, 16, 8, 16, 32, 40), "auto")


def _cgm() -> np.ndarray:
    with np.load(_folder() / "cgm" / "weinstock_days.npz", allow_pickle=False) as arrays:
        x = np.clip(arrays["x_mgdl"], LOWEST, HIGHEST)
    hourly: np.ndarray = 2.0 * (x.reshape(len(x), 48, 6).mean(2) - LOWEST) / (HIGHEST - LOWEST) - 1.0
    return hourly


def _cgm_days() -> Problem:
    x = _cgm()
    return _problem(x, x, (24, 8, 24), "auto")


def _cgm_forecast() -> Problem:
    """The mean of the last hour of a day from the 23 hours before it, among 993 days."""
    x = _cgm()
    return _problem(x[:, :46], 2.0 * x[:, 46:].mean(1, keepdims=True), (16,), "mse")


def _text() -> Problem:
    text = Path(os.environ["LAMINA_TEXT"]).read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))
    x, y = np.zeros((len(rows), 512)), np.array([int(row[0]) - 1 for row in rows])
    for i, row in enumerate(rows):
        for word in re.findall(r"[a-z]+", " ".join(row[1:]).lower()):
            x[i, zlib.crc32(word.encode()) % 512] += 1.0
    x = np.sqrt(x)
    return _problem(x / np.linalg.norm(x, axis=1, keepdims=True), y, (), "ce")


def _ptbxl(sizes: tuple[int, ...]) -> Problem:
    split = ptbxl()
    return _given(split.train.x, split.train.y.long(), split.test.x, split.test.y.long(), (480, *sizes, 2), "ce")


def _real_beats() -> Problem:
    split = ptbxl()
    x, tx = (part.x.view(-1, 12, 40)[:, 1] for part in (split.train, split.test))
    return _given(x, x, tx, tx, (40, 32, 16, 8, 16, 32, 40), "auto")


def _colour() -> Problem:
    """Photographs of ten kinds, averaged to 8 × 8 pixels of three colours (LAMINA_COLOUR: .npz with x in [0, 1], and y)."""
    with np.load(os.environ["LAMINA_COLOUR"], allow_pickle=False) as arrays:
        x, y = arrays["x"].reshape(len(arrays["x"]), -1), arrays["y"]
    return _problem(2.0 * x - 1.0, y, (32,), "ce")


def _t(name: str, kind: str, make: Callable[[], Problem], batch: int, steps: int, delta: float) -> SmallTask:
    return SmallTask(name=name, kind=kind, make=make, batch=batch, steps=steps, delta=delta)


DEVELOPMENT = (
    _t("wine", "table, 133", lambda: _table("load_wine", (16,)), 32, 100, 1e-3),
    _t("diabetes", "table, 331, regression", lambda: _table("load_diabetes", (16,), regression=True), 64, 100, 1e-3),
    _t("generated-small", "table, 1,500", lambda: _generated(2_000, 20, 2, (16,)), 128, 150, 1e-4),
    _t("generated-large", "table, 22,500", lambda: _generated(30_000, 40, 5, (32,)), 256, 250, 1e-5),
    _t("friedman", "table, 6,000, regression", _friedman, 256, 200, 1e-5),
    _t("mnist-small", "image, 3,000", lambda: _mnist(3_000, (32,)), 256, 120, 1e-4),
    _t("mnist-wide", "image, 6,000", lambda: _mnist(6_000, (256,)), 256, 150, 1e-5),
    _t("ecg-simulated", "signal, 1,100", _simulated_ecg, 128, 120, 1e-4),
    _t("beats-simulated", "signal, 1,100, autoencoder", _simulated_beats, 256, 200, 1e-4),
    _t("cgm-days", "signal, 744, autoencoder", _cgm_days, 128, 150, 1e-4),
    _t("cgm-forecast", "signal, 744, regression", _cgm_forecast, 128, 100, 1e-4),
    _t("text", "text, 5,700, linear", _text, 256, 200, 1e-5),
)

HELD_OUT = (
    _t("digits", "image, 1,347", lambda: _table("load_digits", (32,)), 128, 120, 1e-4),
    _t("breast-cancer", "table, 426", lambda: _table("load_breast_cancer", (16,)), 64, 100, 1e-3),
    _t("ptbxl", "signal, patients", lambda: _ptbxl((24,)), 256, 150, 1e-4),
    _t("beats-real", "signal, patients, autoencoder", _real_beats, 256, 200, 1e-4),
    _t("colour", "image, 7,500, colour", _colour, 256, 250, 1e-5),
)
