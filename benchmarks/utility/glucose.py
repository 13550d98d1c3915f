"""Days of glucose: what each part of Lamina gives, against Opacus with the same network, first weights and preset.

    python benchmarks/utility goals --goal cgm-simulated    settings are chosen here, on simulated patients of higher glucose
    python benchmarks/utility goals --goal cgm              what was chosen, on the Weinstock days

Mean squared error over the days of patients who were held out; three splits, patients as unit, δ = 1e-3.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lamina
from lamina import LayerStack, Policy, StepPlan, make_plan
from lamina.account import calibrate
from lamina.allocate.basic import LSAB, Pareto, uniform
from lamina.allocate.ladp import LADP
from lamina.engine.rules.proxy import Proxy
from lamina.plan.correlation import participations, prefix_error
from lamina.recipes.recipe import squared_error
from lamina.recipes.signals import keep_top_band, pretrained_days, public_days, scaled
from lamina.run.training_checkpoint import MovingAverage
from lamina.signals import presets
from lamina.signals.cgm_simulator import CGMSimulator

from .goals import DATA, note, opacus_flat, private

PRESET, DELTA, SEEDS, EPSILONS = presets.find("cgm-pretrained"), 1e-3, 3, (3.0, 8.0)
SUBSPACE: dict[str, Any] = {"layers": ["decoder.12"], "rank": 20, "scale": 12.0}
PROXY = "simulated: glucose"
HIGHER = 1.25  # times what the simulator shows: the patients on whom settings are chosen
GRID = (
    (8, 15.0),
    (12, 15.0),
    (16, 3.0),
    (16, 10.0),
    (16, 15.0),
    (16, 20.0),
    (16, 30.0),
    (20, 12.0),
    (24, 10.0),
    (32, 10.0),
)
ALLOCATIONS: dict[str, Any] = {
    "uniform": uniform,
    "pareto, harm": Pareto(weights="harm"),
    "pareto, box": Pareto(weights="harm", clipping=lamina.Clipping.BOX),
    "lsab": LSAB(),
    "ladp": LADP(),
    "ladp, live Fisher shares": LADP(estimator="fisher"),
}
Start = Callable[[int], nn.Module]
Training = Callable[..., nn.Module]


class Split(NamedTuple):
    x: Tensor
    unit: Tensor  # the patient of each row of x, from 0
    test: Tensor
    owner: np.ndarray  # the patient of each row of test


def split(x: Tensor, patient: np.ndarray, seed: int, held: int) -> Split:
    people = np.random.default_rng(seed).permutation(np.unique(patient))
    out = np.isin(patient, people[:held])
    unit = torch.from_numpy(np.unique(patient[~out], return_inverse=True)[1])
    return Split(x[torch.from_numpy(~out)], unit, x[torch.from_numpy(out)], patient[out] + 10_000 * seed)


@cache
def weinstock() -> list[Split]:
    with np.load(DATA / "cgm" / "weinstock_days.npz", allow_pickle=False) as arrays:
        x, patient = scaled(arrays["x_mgdl"]), arrays["patient_id"]
    return [split(x, patient, seed, len(np.unique(patient)) // 5) for seed in range(SEEDS)]


@cache
def higher_glucose() -> list[Split]:
    """140 simulated patients to learn from, 460 to test on, six days each."""
    drawn = [CGMSimulator(days=6).draw(patients=600, seed=1000 + seed) for seed in range(SEEDS)]
    return [split(scaled(HIGHER * d.x), np.repeat(np.arange(600), 6), seed, 460) for seed, d in enumerate(drawn)]


@cache
def pretrained(seed: int) -> nn.Module:
    return pretrained_days(seed)


def all_layers(seed: int) -> nn.Module:
    return copy.deepcopy(pretrained(seed))


def top_band(seed: int) -> nn.Module:
    return keep_top_band(all_layers(seed))


def subspace(seed: int, **other: Any) -> nn.Module:
    """Private in the directions of the last layer that the simulated days use."""
    model, settings = all_layers(seed), {**SUBSPACE, **other}
    lamina.private_subspace(model, squared_error, public_days(), proxy=PROXY, **settings)
    return model


def not_private(model: nn.Module, loss_fn: Any, x: Tensor, y: None, unit: Tensor, **options: Any) -> nn.Module:
    """The preset's optimiser and steps, no clipping, no noise; every patient counts the same."""
    preset = options["preset"]
    optimizer, schedule = preset.optimizer_for(model)
    days = torch.bincount(unit)
    weight = 1 / (days[unit] * len(days))
    for _ in range(preset.steps):
        optimizer.zero_grad()
        (loss_fn(model(x), x) * weight).sum().backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def averaged(training: Training, decay: float) -> Training:
    """Give the moving average of the weights."""

    def train(model: nn.Module, *data: Any, **options: Any) -> nn.Module:
        average = MovingAverage(model, decay)
        training(model, *data, after=average.update, **options)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(average.average.get(name, p))
        return model

    return train


def moved_by(training: Training, factor: float) -> Training:
    """Go `factor` of the way from the first weights to the private ones, or beyond."""

    def train(model: nn.Module, *data: Any, **options: Any) -> nn.Module:
        first = [p.detach().clone() for p in model.parameters()]
        training(model, *data, **options)
        with torch.no_grad():
            for start, p in zip(first, model.parameters(), strict=True):
                p.copy_(start + factor * (p - start))
        return model

    return train


def viewed(model: nn.Module, *data: Any, **options: Any) -> nn.Module:
    """Four views of every day: 15 minutes earlier to 15 minutes later, up to 5 % higher or lower."""
    generator = torch.Generator().manual_seed(options["seed"])

    def view(x: Tensor) -> Tensor:
        by = torch.randint(-3, 4, (len(x), 1), generator=generator)
        at = (torch.arange(288) + by).clamp(0, 287)
        size = 1 + 0.1 * (torch.rand(len(x), 1, 1, generator=generator) - 0.5)
        return x.gather(2, at.unsqueeze(1)) * size

    return private(model, *data, view=view, views=4, **options)


def allocated(rule: str) -> Training:
    """Another allocation, measured on the simulated days at the first weights."""

    def train(model: nn.Module, loss_fn: Any, x: Tensor, y: None, unit: Tensor, **options: Any) -> nn.Module:
        stack, units, proxy = LayerStack.from_model(model), int(unit.max()) + 1, public_days()[:500]
        found = lamina.measure(model, stack, x=proxy, losses_of=lambda x, y: loss_fn(model(x), x), proxy=PROXY)
        about = {"origin": "benchmark", "delta": options["delta"]}
        terms = {"population": units, "clip_norm": PRESET.clip_norm, "unit": "patient"}
        plan: StepPlan = make_plan(
            stack, Policy.from_dict({"corpus": about, "class": {"all": terms}}), batch=units, steps=PRESET.steps,
            allocate=ALLOCATIONS[rule], epsilon=options["epsilon"], measure=found,
        )  # fmt: skip
        live = Proxy(source=PROXY, x=proxy, loss_fn=loss_fn) if "live" in rule else None
        return private(model, loss_fn, x, y, unit, plan=plan, proxy=live, **options)

    return train


def banded_error(bands: int, epsilon: float) -> float:
    """Squared error of sums of mean gradients with banded noise and turns, over that of all patients in every step."""
    alone = calibrate(epsilon, delta=DELTA, q=1.0, steps=PRESET.steps, accountant="pld")
    turns = calibrate(epsilon, delta=DELTA, q=1.0, steps=participations(PRESET.steps, bands), accountant="pld")
    own, other = prefix_error(bands, PRESET.steps), prefix_error(1, PRESET.steps)
    return (bands * turns / alone) ** 2 * own / other  # a turn has 1/bands of the patients


def errors(
    splits: list[Split], training: Training | None, start: Start, epsilon: float, *, preset: presets.Preset = PRESET
) -> list[np.ndarray]:
    """Of every day that was held out, split by split."""
    found = []
    for seed, part in enumerate(splits):
        model = start(seed)
        if training is not None:
            options: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "preset": preset, "seed": seed}
            model = training(model, squared_error, part.x, None, part.unit, **options)
        with torch.no_grad():
            found.append(squared_error(model.eval()(part.test), part.test).numpy())
    return found


def mean(found: list[np.ndarray]) -> float:
    return round(float(np.mean(np.concatenate(found))), 6)


def paired(mine: list[np.ndarray], other: list[np.ndarray], owner: np.ndarray) -> list[float]:
    """1 - mine/other, with 95 % over patients."""
    a, b = np.concatenate(mine), np.concatenate(other)
    groups = [np.flatnonzero(owner == u) for u in np.unique(owner)]
    sums = np.array([[a[rows].sum(), b[rows].sum()] for rows in groups])
    rng = np.random.default_rng(0)
    drawn = [sums[rng.integers(len(sums), size=len(sums))].sum(0) for _ in range(1000)]
    ratios = [1 - p / q for p, q in drawn]
    return [round(float(v), 4) for v in (1 - a.sum() / b.sum(), *np.quantile(ratios, [0.025, 0.975]))]


def cgm_simulated() -> None:
    """What settings are chosen on: [ε = 3, ε = 8] for each, or one figure where no noise is added."""
    splits = higher_glucose()

    def figures(what: str, training: Training, start: Start) -> None:
        note("cgm, simulated", what, [mean(errors(splits, training, start, epsilon)) for epsilon in EPSILONS])

    note("cgm, simulated", "before", mean(errors(splits, None, all_layers, 0.0)))
    starts = {"all layers": all_layers, "top band": top_band, "subspace": subspace}
    for where, start in starts.items():
        note("cgm, simulated", f"not private, {where}", mean(errors(splits, not_private, start, 0.0)))
        figures(where, private, start)
    for decay in (0.9, 0.99):
        figures(f"top band, ema {decay:g}", averaged(private, decay), top_band)
    for factor in (0.5, 0.75, 1.5, 2.0):
        figures(f"top band, moved by {factor:g}", moved_by(private, factor), top_band)
    figures("top band, views", viewed, top_band)
    for rule in ALLOCATIONS:
        figures(f"top band, {rule}", allocated(rule), top_band)
    for bands in (2, 5, 10):
        ratios = [round(banded_error(bands, epsilon), 2) for epsilon in EPSILONS]
        note("cgm, simulated", f"banded noise, {bands} bands: error of sums over that of the preset", ratios)
    for rank, scale in GRID:
        figures(f"subspace, rank {rank}, scale {scale:g}", private, partial(subspace, rank=rank, scale=scale))


CHOSEN: dict[str, tuple[Training, Start]] = {
    "lamina": (private, all_layers),
    "lamina, top band": (private, top_band),
    "lamina, subspace": (private, subspace),
    "opacus": (opacus_flat, all_layers),
    "opacus, top band": (opacus_flat, top_band),
    "opacus, subspace": (opacus_flat, subspace),
    "opacus, ema 0.9": (averaged(opacus_flat, 0.9), all_layers),
    "lamina, top band, ema 0.9": (averaged(private, 0.9), top_band),
    "lamina, top band, views": (viewed, top_band),
    "lamina, top band, moved by 0.5": (moved_by(private, 0.5), top_band),
}
COMPARED = (
    ("lamina", "opacus"), ("lamina, top band", "opacus"), ("lamina, top band", "opacus, top band"),
    ("lamina, subspace", "opacus"), ("lamina, subspace", "opacus, ema 0.9"), ("lamina, subspace", "opacus, top band"),
    ("lamina, subspace", "opacus, subspace"), ("opacus, subspace", "opacus"),
)  # fmt: skip


def cgm() -> None:
    splits = weinstock()
    owner = np.concatenate([part.owner for part in splits])
    starts = {"all layers": all_layers, "top band": top_band, "subspace": subspace}
    ceilings = {where: mean(errors(splits, not_private, start, 0.0)) for where, start in starts.items()}
    longer = partial(errors, preset=dataclasses.replace(PRESET, steps=300))
    ceilings["all layers, 300 steps"] = mean(longer(splits, not_private, all_layers, 0.0))
    note("cgm", "not private", ceilings)
    for epsilon in EPSILONS:
        found = {"before": errors(splits, None, all_layers, 0.0)}
        found |= {name: errors(splits, training, start, epsilon) for name, (training, start) in CHOSEN.items()}
        note("cgm", f"ε={epsilon:g}", {name: mean(rows) for name, rows in found.items()})
        for mine, other in COMPARED:
            note("cgm", f"ε={epsilon:g}, 1 - {mine} / {other}", paired(found[mine], found[other], owner))
