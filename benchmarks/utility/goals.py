"""What is reached on real data with front ends, pre-training and presets: `python benchmarks/utility goals`.

`LAMINA_DATA` names the folder with ptbxl_slice/, mnist/ and cgm/. Settings come from `lamina.signals.presets`, which were chosen on
simulated or public data. Noise comes from seeds, so that a figure can be had again: measurements, not releases. Results go
to benchmarks/results/goals.json, features to a cache folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn import functional as F

import lamina
from lamina import Batch, Engine, SeededNoise, StepPlan, recipes
from lamina.engine.rules.proxy import Proxy
from lamina.recipes.recipe import binary, class_losses, linear, squared_error
from lamina.recipes.signals import (
    autoencoder,
    beat_directions,
    beat_rows,
    ecg_rows,
    half_millivolts,
    median_beats,
    nmse,
)
from lamina.signals import presets
from lamina.signals.ecg_simulator import ECGSimulator
from lamina.signals.front_ends import Directions, ImageCNN, Scattering2D, bounded, distorted, unit_norm

from .data import digits, mnist, ptbxl, simulated
from .tasks import TASKS, single_leads

DATA = Path(os.environ.get("LAMINA_DATA", "."))
CACHE = Path(os.environ.get("LAMINA_CACHE", "/tmp/lamina-goals"))
RESULTS = Path(__file__).parent.parent / "results" / "goals.json"
Losses = Callable[[Any, Any], Tensor]


def private(
    model: nn.Module, loss_fn: Losses, x: Tensor, y: Tensor | None, unit: Tensor, *, epsilon: float, delta: float,
    preset: presets.Preset, seed: int, plan: StepPlan | None = None, proxy: Proxy | None = None,
    view: Callable[[Tensor], Tensor] | None = None, views: int = 1, after: Callable[[int], None] | None = None,
) -> nn.Module:  # fmt: skip
    """Train as the preset says; samples and noise from `seed`.

    plan, proxy  another plan than that of `make_private`, and what it follows
    view         makes a random view of the examples, of which the model is given so many `views` per step
    after        called after every step, with its number
    """
    units = int(unit.max()) + 1
    if plan is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # many trainings on one data set: that is what a measurement is
            settings = preset.settings(units)
            engine, _, plan = lamina.make_private(model, (x, y), unit=unit, epsilon=epsilon, delta=delta, **settings)
        engine.detach()
    optimizer, schedule = preset.optimizer_for(model)
    coins, rate = torch.Generator().manual_seed(seed), plan.classes[0].sampling_rate
    model.train()
    torch.manual_seed(seed)
    with Engine(model, plan, noise=SeededNoise(seed, threads=1), proxy=proxy) as engine:
        for step in range(plan.steps):
            chosen = torch.rand(units, generator=coins) < rate
            rows = chosen[unit].nonzero().flatten()
            owner = torch.unique(unit[rows], return_inverse=True)[1]
            batch = Batch(x[rows], None if y is None else y[rows], unit=owner).views(views)
            if view is not None:
                batch = dataclasses.replace(batch, x=view(batch.x))
            target = batch.x if y is None else batch.y
            engine.backward(loss_fn(model(batch.x), target) if len(batch) else None, batch)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if after is not None:
                after(step)
    return model.eval()


def opacus_flat(
    model: nn.Module, loss_fn: Losses, x: Tensor, y: Tensor | None, unit: Tensor, *, epsilon: float, delta: float,
    preset: presets.Preset, seed: int, after: Callable[[int], None] | None = None,
) -> nn.Module:  # fmt: skip
    """Opacus with flat clipping, the same settings and its own accountant; one example of each contribution, since it has
    no contributions of several.
    """
    from opacus import GradSampleModule
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.optimizers import DPOptimizer

    first = torch.from_numpy(np.unique(unit.numpy(), return_index=True)[1])
    x, y, units = x[first], None if y is None else y[first], len(first)
    rate = min(1.0, preset.batch(units) / units)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sigma = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=preset.steps, accountant="prv"
        )
        wrapped = GradSampleModule(model)
        plain, _ = preset.optimizer_for(model)
        optimizer = DPOptimizer(
            plain, noise_multiplier=sigma, max_grad_norm=preset.clip_norm, expected_batch_size=preset.batch(units),
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, preset.steps)
        coins = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        wrapped.train()
        for step in range(preset.steps):
            rows = (torch.rand(units, generator=coins) < rate).nonzero().flatten()
            if not len(rows):
                continue
            target = x[rows] if y is None else y[rows]
            loss_fn(wrapped(x[rows]), target).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if after is not None:
                after(step)
    return model.eval()


def kept(task: str) -> dict[str, Any]:
    """Return the figures of a task that were kept."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()).get(task, {})
    return found


def note(task: str, key: str, value: Any) -> None:
    """Print a figure, and keep it."""
    print(task, key, value, flush=True)
    found = json.loads(RESULTS.read_text())
    found.setdefault(task, {})["date"] = datetime.date.today().isoformat()
    found[task][key] = value
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


# ----------------------------------------------------------------------------------------------- PTB-XL, beats


def macro_auc(scores: np.ndarray, y: np.ndarray) -> float:
    found = []
    for k in range(y.shape[1]):
        ill = y[:, k] > 0.5
        above = rankdata(scores[:, k])[ill].sum() - ill.sum() * (ill.sum() + 1) / 2
        found.append(above / (ill.sum() * (~ill).sum()))
    return float(np.mean(found))


def ecg() -> None:
    """A linear layer on median beats."""
    pages, strips, y, fold, patient = ptbxl_pages()
    starts = [250 * (i // 3) for i in range(12)]  # as on a printed page
    beats = median_beats(pages, rhythm=strips, starts=starts)
    eight_folds("ecg", ecg_rows(beat_rows(beats), beat_directions()), y, fold, patient)


def page_of(records: np.ndarray) -> Tensor:
    """(N, 12, 1000) -> (N, 12, 250) as on a printed page, each lead less its own median, tanh in units of half a millivolt."""
    groups = [records[:, 3 * g : 3 * g + 3, 250 * g : 250 * (g + 1)] for g in range(4)]
    pages = np.concatenate(groups, axis=1) if records.shape[2] == 1000 else records
    return torch.tensor(bounded(pages - np.median(pages, axis=2, keepdims=True)), dtype=torch.float32)


class PageCNN(nn.Module):
    """(N, 12, 250) -> 5 logits: four convolutions over time, mean and largest value of each channel, a linear layer."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for into, out in ((12, width), (width, width), (width, width), (width, width)):
            parts += [nn.Conv1d(into, out, 7, stride=2, padding=3), nn.GroupNorm(8, out), nn.Tanh()]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(2 * width, 5)

    def codes(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return torch.cat([h.mean(2), h.amax(2)], 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.codes(x))
        return out


def cnn() -> None:
    """A CNN on raw pages, pre-trained on simulated ones; its last layer, made anew, is all that is private."""
    pages, _, y, fold, patient = ptbxl_pages()
    drawn = ECGSimulator().records(patients=6000, seed=21)
    torch.manual_seed(0)
    model = PageCNN()
    kinds = F.one_hot(torch.from_numpy(drawn.label), 5).float()
    lamina.pretrain(model, binary, page_of(drawn.x), kinds, proxy="simulated: ECG", steps=1500, lr=2e-3)
    model.eval()
    with torch.no_grad():
        x = page_of(pages)
        note("cnn", "before any private step", round(macro_auc(model(x).numpy(), y.numpy()), 4))
        codes = model.codes(x).double().numpy()
        public = model.codes(page_of(drawn.x[:2000])).double().numpy()
    directions = Directions.of(public, proxy="simulated: ECG", count=64, whiten=0.5)
    eight_folds("cnn", ecg_rows(codes, directions), y, fold, patient, peers=False)


def ptbxl_pages() -> tuple[np.ndarray, np.ndarray, Tensor, np.ndarray, np.ndarray]:
    """Leads and strip in millivolt, superclasses, fold and patient of the labelled records."""
    with np.load(DATA / "ptbxl_slice" / "ptbxl_slice.npz", allow_pickle=False) as arrays:
        pages, strips = arrays["x12_uV"] / 1e3, arrays["leadII_uV"] / 1e3
        kinds, fold, patient = arrays["superclass"], arrays["strat_fold"], arrays["patient_id"]
    keep = (kinds >= 0).all(1) & (fold > 0)
    y = torch.tensor(kinds[keep], dtype=torch.float32)
    return pages[keep], strips[keep], y, fold[keep], patient[keep]


def eight_folds(task: str, x: Tensor, y: Tensor, fold: np.ndarray, patient: np.ndarray, *, peers: bool = True) -> None:
    """Macro AUC over folds 1 to 8, patients as unit, δ = 1e-4."""
    preset = presets.find("ecg-linear")

    def scores(train: Callable[..., nn.Module], seed: int, **options: Any) -> np.ndarray:
        out = np.zeros(y.shape)
        for k in range(1, 9):
            test = fold == k
            rows = torch.from_numpy(~test & ~np.isin(patient, patient[test]))
            unit = torch.from_numpy(np.unique(patient[rows.numpy()], return_inverse=True)[1])
            model = train(linear(x.shape[1], 5), binary, x[rows], y[rows], unit, seed=100 * seed + k, **options)
            with torch.no_grad():
                out[test] = model(x[torch.from_numpy(test)]).numpy()
        return out

    def interval(found: np.ndarray) -> list[float]:
        """95 %, over patients."""
        owner = np.unique(patient, return_inverse=True)[1]
        rows_of = [np.flatnonzero(owner == u) for u in range(owner.max() + 1)]
        rng, values = np.random.default_rng(0), []
        for _ in range(200):
            rows = np.concatenate([rows_of[u] for u in rng.integers(len(rows_of), size=len(rows_of))])
            values.append(macro_auc(found[rows], y.numpy()[rows]))
        return [round(float(v), 4) for v in np.quantile(values, [0.025, 0.975])]

    def plain(model: nn.Module, loss_fn: Losses, x: Tensor, y: Tensor, unit: Tensor, *, seed: int) -> nn.Module:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y).mean() + 1e-5 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)
        return model

    found = scores(plain, 0)
    note(task, "non-private", [round(macro_auc(found, y.numpy()), 4), interval(found)])
    for epsilon in (1.0, 3.0, 8.0):
        runs = [scores(private, seed, epsilon=epsilon, delta=1e-4, preset=preset) for seed in range(3)]
        figures = [round(macro_auc(run, y.numpy()), 4) for run in runs]
        note(task, f"lamina ε={epsilon:g}", [round(float(np.mean(figures)), 4), figures, interval(runs[0])])
        if not peers:
            continue
        other = scores(opacus_flat, 0, epsilon=epsilon, delta=1e-4, preset=preset)
        note(task, f"opacus ε={epsilon:g}", [round(macro_auc(other, y.numpy()), 4), interval(other)])


# ------------------------------------------------------------------------------------------------------- MNIST


def scattered(name: str, images: Tensor) -> Tensor:
    path, transform = CACHE / f"{name}.npy", Scattering2D()
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        parts = [transform(part).flatten(1).half() for part in images.view(-1, 1, 28, 28).split(25)]
        np.save(path, torch.cat(parts).numpy())
    return torch.from_numpy(np.load(path))


def public_digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of 28 x 28 from scikit-learn's 1,797 digits of 8 x 8, each enlarged and distorted many times."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found, generator = load_digits(), torch.Generator().manual_seed(seed)
    large = np.stack([np.pad(ndimage.zoom(image / 16.0, 2.5, order=3), 4) for image in found.images])
    images = torch.tensor(large, dtype=torch.float32).unsqueeze(1)
    rows = torch.randint(len(images), (count,), generator=generator)
    parts = [distorted(part, generator) for part in images[rows].split(1000)]
    return torch.cat(parts), torch.from_numpy(found.target)[rows].long()


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none", label_smoothing=0.05)


def public_cnn() -> ImageCNN:
    """Learned on public digits; kept in the cache folder."""
    path = CACHE / "digits-cnn.pt"
    torch.manual_seed(0)
    model = ImageCNN()
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        x, y = public_digits(60_000, 0)
        lamina.pretrain(model, smoothed, x, y, proxy="public: digits of scikit-learn", steps=4000, lr=2e-3)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model.eval()


def gradient_descent(layer: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """Sixty steps over all public rows, not further: Adam, and a better fit, are worse where private steps follow."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=30.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    for _ in range(60):
        optimizer.zero_grad()
        class_losses(layer(x), y).mean().backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return layer


def image(held_out: bool = False) -> None:
    """A linear layer on directions of a CNN's codes; CNN, directions and the layer's first weights are from public digits.

    held_out: learn from the first 50,000 training images and score the other 10,000, as the settings were looked at
    """
    split, preset, model = mnist(), presets.find("image-pretrained"), public_cnn()

    def codes(images: Tensor) -> np.ndarray:
        with torch.no_grad():
            parts = [model.codes(part) for part in images.view(-1, 1, 28, 28).split(500)]
        return torch.cat(parts).numpy()

    images, label = public_digits(10_000, 1)
    public = codes(images)
    proxy = "public: digits of scikit-learn"
    directions = Directions.of(public, proxy=proxy, count=256, whiten=0.75)

    def rows(found: np.ndarray) -> Tensor:
        return torch.tensor(unit_norm(directions(found)), dtype=torch.float32)

    x, y = rows(codes(split.train.x)), split.train.y
    test, target = (x[50_000:], y[50_000:]) if held_out else (rows(codes(split.test.x)), split.test.y)
    x, y = (x[:50_000], y[:50_000]) if held_out else (x, y)

    def accuracy(layer: nn.Module) -> float:
        with torch.no_grad():
            return round(100 * float((layer(test).argmax(1) == target).double().mean()), 2)

    first = gradient_descent(linear(256, 10), rows(public), label)
    task = "mnist, held out" if held_out else "mnist"
    note(task, "before any private step", accuracy(first))
    for epsilon in (1.0, 3.0):
        figures = []
        for seed in range(3):
            layer = linear(256, 10)
            layer.load_state_dict(first.state_dict())
            options: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5, "preset": preset, "seed": seed}
            private(layer, class_losses, x, y, torch.arange(len(x)), **options)
            figures.append(accuracy(layer))
        note(task, f"lamina ε={epsilon:g}", [round(float(np.mean(figures)), 2), figures])


def image_scattering() -> None:
    """A linear layer on 500 directions of scattered images: nothing in the features is learned."""
    public = scattered("digits-train", digits(24_000, 4_000).train.x)[:3000]
    directions = Directions.of(
        public.float().numpy(), proxy="public: digits of scikit-learn", count=DIRECTIONS, whiten=WHITEN
    )

    def rows(name: str, images: Tensor) -> Tensor:
        parts = [unit_norm(directions(part.float().numpy())) for part in scattered(name, images).split(2000)]
        found = torch.from_numpy(np.concatenate(parts).astype(np.float32))
        return torch.cat([found, torch.full((len(found), 1), 0.3)], 1)

    split = mnist()
    x, test = rows("mnist-train", split.train.x), rows("mnist-test", split.test.x)
    preset = presets.find("image-scattering")
    for epsilon in (1.0, 3.0):
        figures = []
        for seed in range(3):
            options: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5, "preset": preset, "seed": seed}
            model = private(linear(x.shape[1], 10), class_losses, x, split.train.y, split.train.unit, **options)
            with torch.no_grad():
                figures.append(round(100 * float((model(test).argmax(1) == split.test.y).double().mean()), 2))
        note("mnist, scattering", f"lamina ε={epsilon:g}", [round(float(np.mean(figures)), 2), figures])


DIRECTIONS, WHITEN = 500, 0.75


# ------------------------------------------------------------------------- autoencoder on beats of single leads


def beats_autoencoder() -> None:
    """The network, data and split of benchmarks/utility; ε = 1, δ = 1e-5."""
    split, proxy = single_leads(ptbxl()), single_leads(simulated(CACHE, train=4000, test=100))
    task, preset = TASKS["autoencoder"], presets.find("autoencoder-pretrained")

    def figure(model: nn.Module) -> float:
        with torch.no_grad():
            return round(float(task.figure(model.eval()(split.test.x), split.test)), 4)

    before, after, scratch = [], [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = autoencoder()
        fresh = {name: t.clone() for name, t in model.state_dict().items()}
        lamina.pretrain(model, squared_error, proxy.train.x, proxy="simulated: ECG", steps=3000, lr=3e-3, seed=seed)
        before.append(figure(model))
        part = split.train
        options: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "seed": seed}
        after.append(figure(private(model, squared_error, part.x, None, part.unit, preset=preset, **options)))
        best = []
        for clip, rate in ((0.02, 0.03), (0.02, 0.06), (0.1, 0.03)):
            own = presets.Preset(
                name="scratch", task="", clip_norm=clip, sampling_rate=256 / part.units, steps=200, chosen_on="",
                optimizer={"name": "sgd", "lr": rate / clip, "momentum": 0.9},
            )  # fmt: skip
            again = autoencoder()
            again.load_state_dict(fresh)
            best.append(figure(private(again, squared_error, part.x, None, part.unit, preset=own, **options)))
        scratch.append(min(best))
    ratio = round(float(np.mean(after) / np.mean(scratch)), 3)
    note("autoencoder", "NMSE", {"before": before, "private": after, "scratch, best": scratch, "ratio": ratio})


def beats_recipe() -> None:
    """`lamina.recipes.beats_autoencoder` on PTB-XL: patients as unit, δ = 1e-4, folds 7 and 8 tested; NMSE by seed.

    auto         the same network from random weights with make_private's defaults, batch and steps of the recipe
    non-private  1,000 steps of Adam from the recipe's pre-trained weights
    """
    pages, strips, _, fold, patient = ptbxl_pages()
    beats = median_beats(pages, rhythm=strips, starts=[250 * (i // 3) for i in range(12)])
    test = np.isin(fold, (7, 8))
    train = ~test & ~np.isin(patient, patient[test])
    unit = np.unique(patient[train], return_inverse=True)[1]
    x, tx = half_millivolts(beats[train]), half_millivolts(beats[test])
    name, held = "beats recipe", kept("beats recipe")

    def keep(key: str, model: nn.Module) -> None:
        with torch.no_grad():
            held.setdefault(key, []).append(round(nmse(model.eval()(tx), tx), 5))
        note(name, key, held[key])

    for seed in range(len(held.get("auto ε=8", ())), 3):
        for epsilon in (1.0, 3.0, 8.0):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # many trainings on one data set
                recipe = recipes.beats_autoencoder(beats[train], unit=unit, epsilon=epsilon, delta=1e-4, seed=seed)
                torch.manual_seed(seed)
                batch, steps = round(recipe.plan.batch), recipe.plan.steps
                fresh = autoencoder()
                engine, corpus, plan = lamina.make_private(
                    fresh, x, unit=np.repeat(unit, 12), epsilon=epsilon, delta=1e-4, batch=batch, steps=steps
                )
            if epsilon == 1.0:
                plain = autoencoder()
                plain.load_state_dict(recipe.model.state_dict())
                keep("before any private step", plain)
                keep("non-private", not_private(plain.train(), x, seed))
            keep(f"recipe ε={epsilon:g}", recipe.train())
            optimizer, schedule = lamina.private_optimizer(fresh, plan)
            scratch = dataclasses.replace(
                recipe, model=fresh, engine=engine, corpus=corpus, plan=plan, optimizer=optimizer, schedule=schedule
            )
            keep(f"auto ε={epsilon:g}", scratch.train())


def not_private(model: nn.Module, x: Tensor, seed: int, steps: int = 1000) -> nn.Module:
    """Adam at 0.001 with a cosine schedule on batches of 256 rows."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = x[torch.randint(len(x), (256,), generator=generator)]
        optimizer.zero_grad()
        squared_error(model(rows), rows).mean().backward()
        optimizer.step()
        schedule.step()
    return model


GOALS: dict[str, Callable[[], None]] = {
    "ecg": ecg,
    "cnn": cnn,
    "mnist": image,
    "mnist-held-out": partial(image, held_out=True),
    "mnist-scattering": image_scattering,
    "autoencoder": beats_autoencoder,
    "beats-recipe": beats_recipe,
}
