"""When freezing pays: a network learned on simulated ECG, then private in all layers or in its last one alone.

`python benchmarks/utility goals --goal freezing`. Median beats, 480 numbers of a record; two hidden layers of 64 (tanh); macro
AUC of five superclasses; patients as unit, δ = 1e-4, every patient in every step. "simulated" stands for private patients
that the simulation describes well: other severities, other noise. PTB-XL is what it does not describe well.
The learning rate is chosen on those simulated patients; at the end the whole grid is run on PTB-XL too, and called tuning.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lamina
from lamina.recipes.recipe import binary
from lamina.recipes.signals import beat_rows, median_beats, simulated_beats
from lamina.signals.ecg_simulator import ECGSimulator
from lamina.signals.presets import Preset

from .goals import macro_auc, note, private, ptbxl_pages

Rows = tuple[Tensor, Tensor, Tensor]  # features, superclasses, patient
PATIENTS, EPSILONS, RATES, SEEDS = (250, 1000), (1.0, 3.0, 8.0), (0.01, 0.03, 0.1, 0.3, 1.0), 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(480, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def pretrained(seed: int, *, frozen: bool) -> nn.Module:
    return copy.deepcopy(_pretrained(seed, frozen))


@cache
def _pretrained(seed: int, frozen: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = network()
    beats, label = simulated_beats(patients=4000)
    x, y = torch.tensor(beat_rows(beats), dtype=torch.float32), torch.eye(5)[torch.from_numpy(label)]
    top = 0.34 if frozen else None
    lamina.pretrain(model, binary, x, y, proxy="simulated: ECG", steps=600, seed=seed, private_top=top)
    return model


def other_patients(count: int) -> Rows:
    """Sicker ones, with more noise than those that the network learned from."""
    drawn = ECGSimulator(severity=(0.3, 1.0), muscle=0.08, wander=0.2).draw(patients=count, seed=401)
    beats = np.median(drawn.x.reshape(count, -1, 12, 96), axis=1)[:, :, 8:88]
    beats = beats - np.median(beats, axis=2, keepdims=True)
    y = torch.eye(5)[torch.from_numpy(drawn.label.reshape(count, -1)[:, 0])]
    return torch.tensor(beat_rows(beats), dtype=torch.float32), y, torch.arange(count)


def ptbxl_patients() -> tuple[Rows, Rows]:
    """Folds 1 to 6, and folds 7 and 8; nobody is in both."""
    pages, strips, y, fold, patient = ptbxl_pages()
    starts = [250 * (i // 3) for i in range(12)]
    x = torch.tensor(beat_rows(median_beats(pages, rhythm=strips, starts=starts)), dtype=torch.float32)
    test = fold >= 7
    train = ~test & ~np.isin(patient, patient[test])
    owner = torch.from_numpy(np.unique(patient, return_inverse=True)[1])
    return (x[train], y[train], owner[train]), (x[test], y[test], owner[test])


def first_patients(rows: Rows, count: int, seed: int) -> Rows:
    x, y, owner = rows
    people = torch.unique(owner)
    kept = people[torch.randperm(len(people), generator=torch.Generator().manual_seed(seed))[:count]]
    mine = torch.isin(owner, kept)
    return x[mine], y[mine], torch.unique(owner[mine], return_inverse=True)[1]


def score(model: nn.Module, rows: Rows) -> float:
    with torch.no_grad():
        return macro_auc(model.eval()(rows[0]).numpy(), rows[1].numpy())


MODES = ("all layers", "last layer")


def trained(mode: str, seed: int, rows: Rows, rate: float, epsilon: float) -> nn.Module:
    model = pretrained(seed, frozen=mode == "last layer")
    preset = Preset(
        name="freezing", task="", clip_norm=0.1, sampling_rate=1.0, steps=60, chosen_on="",
        optimizer={"name": "sgd", "lr": 10.0 * rate, "momentum": 0.9},
    )  # fmt: skip
    options: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-4, "preset": preset, "seed": seed}
    return private(model, binary, *rows, **options)


def freezing() -> None:
    x, y, owner = other_patients(2000)
    simulated: tuple[Rows, Rows] = (x[:1200], y[:1200], owner[:1200]), (x[1200:], y[1200:], owner[1200:])

    cases = [(count, epsilon, mode) for count in PATIENTS for epsilon in EPSILONS for mode in MODES]
    rates = {}
    for count, epsilon, mode in cases:
        tried = first_patients(simulated[0], count, 0)
        scores = [score(trained(mode, 0, tried, rate, epsilon), simulated[1]) for rate in RATES]
        rates[count, epsilon, mode] = RATES[int(np.argmax(scores))]
    for name, (train, test) in {"simulated": simulated, "PTB-XL": ptbxl_patients()}.items():
        before = [round(score(pretrained(seed, frozen=False), test), 3) for seed in range(SEEDS)]
        note("freezing", f"{name}, before any private step", before)
        for count, epsilon, mode in cases:
            rate = rates[count, epsilon, mode]
            people = [first_patients(train, count, seed) for seed in range(SEEDS)]
            runs = [round(score(trained(mode, s, rows, rate, epsilon), test), 3) for s, rows in enumerate(people)]
            found = [round(float(np.mean(runs)), 3), runs, rate]
            note("freezing", f"{name}, {count} patients, ε={epsilon:g}, {mode}", found)
    every_rate(*ptbxl_patients())


def every_rate(train: Rows, test: Rows) -> None:
    """The whole grid on PTB-XL itself, two runs each, the best of it named: that is tuning, which ε excludes."""
    for count in PATIENTS:
        people = [first_patients(train, count, seed) for seed in range(2)]
        for epsilon in (1.0, 8.0):
            for mode in MODES:
                found = {}
                for rate in RATES[1:]:
                    runs = [score(trained(mode, s, rows, rate, epsilon), test) for s, rows in enumerate(people)]
                    found[rate] = round(float(np.mean(runs)), 3)
                best = max(found, key=lambda rate: found[rate])
                note("freezing", f"PTB-XL, {count} patients, ε={epsilon:g}, {mode}, best rate", [found[best], best])
