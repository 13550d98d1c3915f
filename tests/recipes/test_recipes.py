"""Recipes: enough for a private training, known before the data, and each record's features are its own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raises_code
from torch import nn

import lamina
from lamina import recipes
from lamina.recipes import Recipe, signals
from lamina.recipes.tabular import Columns
from lamina.signals import CGMSimulator, ECGSimulator, presets

SHORT: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-3, "steps": 3}
RANGES = [(0.0, 10.0), (-5.0, 5.0), (100.0, 200.0)]


@pytest.fixture(autouse=True)
def _less_public_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated patients enough for the shapes."""
    few = signals.simulated_beats(120, 3)
    monkeypatch.setattr(signals, "simulated_beats", lambda *_: few)
    days = signals.scaled(CGMSimulator().draw(patients=20, seed=5).x)
    monkeypatch.setattr(signals, "public_days", lambda: days)
    monkeypatch.setattr(signals, "beat_directions", signals.beat_directions.__wrapped__)


def table(rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = np.stack([rng.uniform(low, high, rows) for low, high in RANGES], axis=1)
    return x, (x[:, 0] > 5).astype(int)


def beats(patients: int = 30) -> tuple[np.ndarray, np.ndarray]:
    drawn = ECGSimulator().draw(patients=patients, seed=9)
    return np.median(drawn.x.reshape(patients, -1, 12, 96), axis=1)[:, :, 8:88], np.eye(5)[drawn.label[::3]]


def made(name: str) -> tuple[Recipe, Any]:
    x, y = table()
    found, kinds = beats()
    days = CGMSimulator(days=2).draw(patients=15, seed=1).x
    return {
        "tabular": lambda: (recipes.tabular(x, y, classes=2, ranges=RANGES, **SHORT), x),
        "ecg": lambda: (recipes.ecg(found, kinds, unit=np.arange(30), **SHORT), found),
        "beats_autoencoder": lambda: (
            recipes.beats_autoencoder(found, unit=np.arange(30), pretraining=2, **SHORT), found,
        ),
        "glucose": lambda: (recipes.glucose(days, unit=np.repeat(np.arange(15), 2), pretraining=2, **SHORT), days),
    }[name]()  # fmt: skip


@pytest.mark.parametrize("name", ["tabular", "ecg", "beats_autoencoder", "glucose"])
def test_a_recipe_trains_and_predicts(name: str) -> None:
    recipe, raw = made(name)
    trained = [p for p in recipe.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    assert 0 < recipe.plan.epsilon(0) <= 8.0 and recipe.plan.steps == 3
    recipe.engine.decline_probe()
    recipe.train()
    assert recipe.engine.budget.taken == 3
    assert any(not torch.equal(a, b) for a, b in zip(before, trained, strict=True))
    rows = recipe.predict(raw)
    assert torch.isfinite(rows).all()
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in recipe.model.modules())


@pytest.mark.parametrize("name", ["tabular", "ecg", "beats_autoencoder", "glucose"])
def test_features_of_a_record_depend_on_no_other(name: str) -> None:
    """Another batch around it, far away from it, changes no bit of its rows."""
    recipe, raw = made(name)
    alone, among = recipe.features(raw[:1]), recipe.features(np.concatenate([raw[:1], 50.0 * raw[1:]]))
    torch.testing.assert_close(alone, among[: len(alone)], rtol=1e-6, atol=1e-7)


def test_a_recipe_makes_a_trainer_with_its_own_optimiser(tmp_path: Path) -> None:
    recipe, _ = made("tabular")
    trainer = recipe.trainer(tmp_path / "run", progress=False, starting_weights="untrained")
    assert trainer.optimizer is recipe.optimizer and trainer.scheduler is recipe.schedule
    outcome = trainer.fit()
    assert outcome.steps == 3 and 0 < outcome.epsilon["data"] <= 8.0


@pytest.mark.parametrize("first", ["by hand", "by a trainer"])
def test_weights_that_learned_already_begin_no_run(tmp_path: Path, first: str) -> None:
    """The run would state ε of its own steps alone, and declare weights that are untrained."""
    recipe, _ = made("tabular")
    if first == "by hand":
        recipe.train()
    else:
        trainer = recipe.trainer(tmp_path / "one" / "run", progress=False)
        trainer.fit()
        assert recipe.trainer(tmp_path / "one" / "run", progress=False).fit().steps == 3  # the same run
    with raises_code("train.engine-used"):
        recipe.trainer(tmp_path / "two" / "run", progress=False, starting_weights="untrained")


def test_glucose_changes_the_top_band_alone() -> None:
    recipe, _ = made("glucose")
    free = {name.rsplit(".", 1)[0] for name, p in recipe.model.named_parameters() if p.requires_grad}
    assert free == {"decoder.8", "decoder.9", "decoder.12"}


def test_the_settings_are_those_of_the_presets() -> None:
    x, y = table()
    recipe = recipes.tabular(x, y, classes=2, ranges=RANGES, epsilon=3.0, delta=1e-3)
    preset = presets.find("tabular")
    assert (recipe.plan.steps, recipe.plan.batch, recipe.plan.norm(0)) == (preset.steps, 50, pytest.approx(0.1))
    wanted, _ = lamina.private_optimizer(recipe.model, recipe.plan)
    assert recipe.optimizer.param_groups[0]["lr"] == wanted.param_groups[0]["lr"]
    few = recipes.tabular(1.01 * x, y, classes=2, ranges=RANGES, epsilon=3.0, delta=1e-4, population=1000, batch=10)
    assert few.plan.classes[0].population == 1000 and few.plan.batch == 10


def test_columns_are_scaled_by_what_was_declared() -> None:
    x = np.array([[0.0, 5.0, 150.0], [20.0, np.nan, 100.0]])
    found = Columns(RANGES)(x)
    assert found.tolist() == [[-1.0, 1.0, 0.0], [1.0, 0.0, -1.0]]  # 20 is outside and cut; NaN is the middle


def test_a_regression_has_a_declared_target() -> None:
    x, _ = table()
    y = 50.0 + 4.0 * x[:, 0]
    recipe = recipes.tabular(x, y, target=(50.0, 90.0), ranges=RANGES, **SHORT)
    _, target = recipe.corpus.source.fetch(np.arange(200))
    torch.testing.assert_close(target[:, 0], torch.tensor((y - 70.0) / 20.0, dtype=torch.float32))


def test_what_is_not_declared_is_refused() -> None:
    x, y = table()
    for options in ({}, {"classes": 2, "target": (0.0, 1.0)}, {"classes": 1}):
        with raises_code("data.classes-or-target"):
            recipes.tabular(x, y, ranges=RANGES, **options, **SHORT)
    for ranges in ([(1.0, 1.0)] * 3, [(0.0, float("inf"))] * 3):
        with raises_code("data.ranges-not-valid"):
            recipes.tabular(x, y, classes=2, ranges=ranges, **SHORT)
    with raises_code("data.columns-differ"):
        recipes.tabular(x, y, classes=2, ranges=RANGES[:2], **SHORT)


@pytest.mark.parametrize("labels", ["from one", "text", "fraction", "nan"])
def test_labels_that_are_no_class_numbers_are_refused(labels: str) -> None:
    x, y = table()
    wrong = {
        "from one": y + 1, "text": np.where(y > 0, "ill", "well"), "fraction": y + 0.5, "nan": np.where(y > 0, np.nan, 0.0),
    }[labels]  # fmt: skip
    with raises_code("train.labels-out-of-range"):
        recipes.tabular(x, wrong, classes=2, ranges=RANGES, **SHORT)


def test_signals_of_another_shape_are_refused() -> None:
    beats, unit = np.zeros((20, 12, 80)), np.arange(20)
    for call in (
        lambda: recipes.ecg(beats[:, :, :70], np.zeros((20, 2)), unit=unit, **SHORT),
        lambda: recipes.ecg(beats, np.zeros(20), unit=unit, **SHORT),
        lambda: signals.half_millivolts(beats[:, 0]),
        lambda: signals.scaled(np.zeros((20, 280))),
    ):
        with raises_code("data.records-shape"):
            call()


def test_every_recipe_has_a_preset_and_is_named_lazily() -> None:
    assert {"tabular", "ecg-linear", "autoencoder-pretrained", "cgm-pretrained"} <= presets.PRESETS.keys()
    assert lamina.recipes.tabular is recipes.tabular
    assert all(inspect.getdoc(getattr(recipes, name)) for name in recipes.__all__)
