"""Recipes for physiological signals: ECG classifier, autoencoders of beats and days of glucose, with simulated public parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lamina.recipes.recipe import Recipe, binary, linear, shaped, squared_error
from lamina.run.pretrain import pretrain
from lamina.signals.cgm_simulator import HIGHEST, LOWEST, CGMSimulator
from lamina.signals.ecg_simulator import ECGSimulator
from lamina.signals.front_ends import MILLIVOLT, Directions, bounded, median_beat, r_waves, unit_norm
from lamina.signals.presets import find
from lamina.signals.signal_autoencoders import StackedAE

Array = NDArray[np.float64]
LARGEST = 8.0  # half millivolts: what is larger is cut off
TOP_BAND = ("decoder.8.", "decoder.9.", "decoder.12.")  # of a StackedAE: two of eight layers, and the norm between them


# ------------------------------------------------------------------------------------------------------ ECG


def beat_rows(beats: Any) -> Array:
    """Return (N, 12, 80) in millivolt as (N, 480): means of two samples, tanh in units of half a millivolt."""
    return bounded(beats.reshape(len(beats), 12, -1, 2).mean(3).reshape(len(beats), -1))


@cache
def simulated_beats(patients: int = 2000, seed: int = 11, normal: float = 1.0) -> tuple[Any, Any]:
    """Return median beats (N, 12, 80) in millivolt and classes of simulated patients; `normal` weighs the healthy ones."""
    mix = {"NORM": normal, "MI": 1.0, "STTC": 1.0, "CD": 1.0, "HYP": 1.0}
    drawn = (ECGSimulator() if normal == 1.0 else ECGSimulator(mix=mix)).draw(patients=patients, seed=seed)
    beats = np.median(drawn.x.reshape(patients, -1, 12, 96), axis=1)[:, :, 8:88]
    return beats - np.median(beats, axis=2, keepdims=True), drawn.label.reshape(patients, -1)[:, 0]


@cache
def beat_directions() -> Directions:
    """Return the 64 directions of simulated median beats on which the preset `ecg-linear` was chosen."""
    return Directions.of(beat_rows(simulated_beats()[0]), proxy="simulated: ECG", count=64, whiten=0.25)


def ecg_rows(x: Array, directions: Directions) -> Tensor:
    """Return features of norm 1 along public directions, and a constant of 0.3 in place of a bias."""
    rows = unit_norm(directions(x))
    return torch.tensor(np.c_[rows, np.full(len(rows), 0.3)], dtype=torch.float32)


def median_beats(records: Any, *, rhythm: Any = None, starts: Sequence[int] | None = None) -> Array:
    """Return the median beat (N, 12, 80) of each record (N, 12, samples) in millivolt at 100 per second."""
    strips = [record[1] for record in records] if rhythm is None else rhythm  # lead II
    peaks = [r_waves(strip, rate=100) for strip in strips]
    return np.stack([median_beat(r, p, rate=100, starts=starts) for r, p in zip(records, peaks, strict=True)])


def ecg(beats: Any, y: Any, *, unit: Any, population: int | None = None, **options: Any) -> Recipe:
    """Return a recipe for 12-lead ECG: a linear layer on 64 directions of simulated median beats (preset `ecg-linear`).

    beats    (N, 12, 80) in millivolt at 100 per second, R at 0.3 s: `lamina.recipes.signals.median_beats` of records
    y        (N, K) zeros and ones
    unit     the patient of each record
    options  those of `make_private`: epsilon, delta, steps, …
    """
    aim = torch.as_tensor(shaped("y", y, "N", "K"), dtype=torch.float32)

    def features(found: Any) -> Tensor:
        return ecg_rows(beat_rows(shaped("beats", found, "N", 12, 80)), beat_directions())

    model = linear(65, aim.shape[1])
    return Recipe.of(
        model, features, beats, aim, find("ecg-linear"), binary, unit=unit, population=population, **options
    )


# ---------------------------------------------------------------------------------------------- autoencoders


class Residual(nn.Module):
    """A residual layer, y = x + tanh(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the learned residual."""
        return x + torch.tanh(self.inner(x))


def autoencoder(samples: int = 40, width: int = 32, code: int = 16) -> nn.Module:
    """Return twelve linear layers: into the width, four residual ones, the code, and back the same way."""
    return nn.Sequential(
        nn.Linear(samples, width), *(Residual(width) for _ in range(4)), nn.Linear(width, code),
        nn.Linear(code, width), *(Residual(width) for _ in range(4)), nn.Linear(width, samples),
    )  # fmt: skip


def half_millivolts(beats: Any) -> Tensor:
    """Return (N, L, 80) in millivolt as (N·L, 40): one row per lead, means of two samples in half millivolts, clipped at 8."""
    found = shaped("beats", beats, "N", "L", 80)
    pairs = found.reshape(*found.shape[:2], -1, 2).mean(3)
    return torch.tensor(np.clip(MILLIVOLT * pairs, -LARGEST, LARGEST), dtype=torch.float32).flatten(0, 1)


def nmse(output: Tensor, x: Tensor) -> float:
    """Return the squared error over the signal's power."""
    return float((output - x).double().square().sum() / x.double().square().sum())


def beats_autoencoder(
    beats: Any, *, unit: Any, population: int | None = None, seed: int = 0, patients: int = 4000,
    pretraining: int = 3000, **options: Any,
) -> Recipe:  # fmt: skip
    """Return a recipe for single-lead beats: a deep autoencoder, pre-trained on simulated patients (`autoencoder-pretrained`).

    beats        (N, L, 80) in millivolt at 100 per second; every lead is an example of its record's patient
    pretraining  steps on simulated beats of so many `patients`, `seed` their seed
    options      those of `make_private`: epsilon, delta, steps, …
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = autoencoder()
    public = half_millivolts(simulated_beats(patients, 7, 4.0)[0])
    pretrain(model, squared_error, public, proxy="simulated: ECG", steps=pretraining, lr=3e-3, seed=seed)
    owner = np.repeat(np.asarray(unit), np.shape(beats)[1])
    preset = find("autoencoder-pretrained")
    return Recipe.of(
        model, half_millivolts, beats, None, preset, squared_error, unit=owner, population=population, **options
    )


def scaled(x: Any) -> Tensor:
    """Return (N, 288) or (N, 1, 288) mg/dL as (N, 1, 288): [40, 400] is mapped to [0, 1], values outside are clipped."""
    days = shaped("days", np.squeeze(x, 1) if np.ndim(x) == 3 and np.shape(x)[1] == 1 else x, "N", 288)
    shown = (np.clip(days, LOWEST, HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
    return torch.tensor(shown, dtype=torch.float32).reshape(-1, 1, 288)


@cache
def public_days() -> Tensor:
    """Return days of 600 simulated patients."""
    return scaled(CGMSimulator().draw(patients=600, seed=5).x)


def pretrained_days(seed: int = 0, steps: int = 1000) -> StackedAE:
    """Return a stacked autoencoder of days, pre-trained on simulated days."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = StackedAE(1, 288, depth=8, dropout=0.0)
    pretrain(model, squared_error, public_days(), proxy="simulated: glucose", steps=steps, batch=64, seed=seed)
    return model.eval()


def keep_top_band(model: nn.Module) -> nn.Module:
    """Freeze all layers of a `StackedAE` of eight layers except the last two, in place, and return it."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(TOP_BAND))
    return model


def glucose(
    days: Any, *, unit: Any, population: int | None = None, seed: int = 0, pretraining: int = 1000, **options: Any
) -> Recipe:
    """Return a recipe for days of glucose: a stacked autoencoder, pre-trained on simulated days, its top band private.

    days         (N, 288) in mg/dL, one value every five minutes
    unit         the patient of each day
    pretraining  steps on simulated days, `seed` their seed
    options      those of `make_private`: epsilon, delta, steps, …
    """
    model = keep_top_band(pretrained_days(seed, pretraining))
    preset = find("cgm-pretrained")
    return Recipe.of(model, scaled, days, None, preset, squared_error, unit=unit, population=population, **options)
