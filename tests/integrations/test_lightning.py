"""`PrivateFit`: `trainer.fit` of Lightning is a run of Lamina, with validation, loggers and checkpoints of Lightning."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from refusals import raises_code
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lamina
from lamina.integrations.lightning import PrivateFit

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*'val_dataloader' does not", "ignore:.*Checkpoint directory",
    "ignore:.*isinstance.*LeafSpec", "ignore::lamina.run.private.PlannedBefore", "ignore:.*logging interval", "ignore:.*litlogger",
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*have no `val_dataloader`",
)  # fmt: skip
LOSS = nn.CrossEntropyLoss(reduction="none")


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, number: int) -> Tensor:
        raise AssertionError("a private run does not call this")

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("val_loss", LOSS(self(x), y).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6), "interval": "step"}
        ]


def made(folder: Path, **options: Any) -> tuple[Classifier, PrivateFit]:
    torch.manual_seed(5)
    module = Classifier()
    x = torch.randn(80, 4)
    engine, corpus, plan = lamina.make_private(
        module, (x, (x[:, 0] > 0).long()), epsilon=5.0, batch=8, steps=6, clip_norm=0.5
    )
    given = {"folder": folder / "run", "engine": engine, "segment": 2, "probe": False, **options}
    return module, PrivateFit(corpus, plan, LOSS, **given)


def lightning(folder: Path, private: PrivateFit, *others: Any, **options: Any) -> pl.Trainer:
    standard: dict[str, Any] = {
        "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False,
        "enable_checkpointing": False, "default_root_dir": str(folder), "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    return pl.Trainer(callbacks=[private, *others], **{**standard, **options})


def public() -> DataLoader[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(9))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)


def test_fit_is_a_private_run(tmp_path: Path) -> None:
    module, private = made(tmp_path, eval_on="public")
    keys, logger = list(module.state_dict()), CSVLogger(tmp_path / "log")
    saved = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, monitor="val_loss", filename="{step}")
    trainer = lightning(tmp_path, private, saved, logger=logger, enable_checkpointing=True)
    trainer.fit(module, private.loader(), val_dataloaders=public())
    assert private.outcome is not None and private.outcome.steps == 6 and private.outcome.private
    assert trainer.global_step == 6 and list(module.state_dict()) == keys
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) <= {"step", "epoch", "epsilon/data", "val_loss"}
    assert [int(row["step"]) for row in rows if row["epsilon/data"]] == [2, 4, 6]
    assert float(rows[-1]["epsilon/data"]) == pytest.approx(private.outcome.epsilon["data"])
    again = Classifier.load_from_checkpoint(tmp_path / "saved" / "step=6.ckpt", weights_only=False)
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in module.state_dict().items())
    assert set(private.outcome.metrics) == {"val_loss"}


def alone(folder: Path) -> Classifier:
    module, private = made(folder)
    (optimizer,), (config,) = module.configure_optimizers()
    lamina.Trainer(
        module, optimizer, LOSS, private.corpus, private.plan, engine=private.engine, folder=folder / "run", segment=2, seed=3,
        scheduler=config["scheduler"], probe=False, progress=False,
    ).fit()  # fmt: skip
    return module


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the weights of `lamina.Trainer` alone, bit for bit; the segment that was open is replayed at no cost."""
    calls, step = iter(range(100)), torch.optim.SGD.step

    def unplugged(optimizer: Any, *given: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step(optimizer, *given)

    module, private = made(tmp_path / "a", eval_on="public", seed=3)
    monkeypatch.setattr(torch.optim.SGD, "step", unplugged)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        lightning(tmp_path, private).fit(module, private.loader(), val_dataloaders=public())
    monkeypatch.undo()
    module, private = made(tmp_path / "a", eval_on="public", seed=3)
    lightning(tmp_path, private).fit(module, private.loader(), val_dataloaders=public())
    want = alone(tmp_path / "b")
    assert all(torch.equal(t, want.state_dict()[name]) for name, t in module.state_dict().items())
    assert private.outcome is not None and private.outcome.epsilon["data"] <= 5.0
    assert not any("charged again" in note for note in private.outcome.notes)


def test_early_stopping(tmp_path: Path) -> None:
    module, private = made(tmp_path, eval_on="simulated")
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    lightning(tmp_path, private, stop).fit(module, private.loader(), val_dataloaders=public())
    assert private.outcome is not None and private.outcome.steps == 2


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"overfit_batches": 1},
        {"min_epochs": 2},
    ],
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    module, private = made(tmp_path)
    with raises_code("integrations.argument-refused"):
        lightning(tmp_path, private, **options).fit(module, private.loader())
    assert not (tmp_path / "run").exists()


def test_options_that_lightning_sets_are_refused(tmp_path: Path) -> None:
    _, private = made(tmp_path)
    with raises_code("train.option-taken"):
        PrivateFit(private.corpus, private.plan, private.loss_fn, folder=tmp_path / "run", callbacks=[])


def test_data_that_are_refused(tmp_path: Path) -> None:
    module, private = made(tmp_path)
    with raises_code("train.evaluation-on-private-data"):
        lightning(tmp_path, private).fit(module, private.loader(), val_dataloaders=public())
    module, private = made(tmp_path)
    with raises_code("corpus.dataloader-not-poisson"):
        lightning(tmp_path, private).fit(module, public())


class TwoOptimizers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


class PerEpoch(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class WithoutOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
def test_a_module_without_an_optimiser_gets_that_of_the_plan(tmp_path: Path) -> None:
    module = WithoutOptimizer()
    engine, corpus, plan = lamina.make_private(
        module, (torch.randn(80, 4), torch.randint(0, 2, (80,))), epsilon=5.0, batch=8, steps=6
    )
    private = PrivateFit(corpus, plan, LOSS, folder=tmp_path / "run", engine=engine)
    lightning(tmp_path, private).fit(module, private.loader())
    told = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["optimizer"]
    assert told["name"] == "Adam" and told["scheduler"] == "HoldThenFall"


@pytest.mark.parametrize(
    ("kind", "code"), [(PerEpoch, "integrations.schedule"), (TwoOptimizers, "integrations.several-optimizers")]
)
def test_optimisers_that_are_refused(tmp_path: Path, kind: type[Classifier], code: str) -> None:
    _, private = made(tmp_path)
    with raises_code(code):
        lightning(tmp_path, private).fit(kind(), private.loader())


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*no last checkpoint available")
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: OnExceptionCheckpoint(folder / "saved"),
        lambda folder: ModelCheckpoint(folder / "saved", save_on_exception=True),
        lambda folder: LambdaCallback(on_exception=lambda *_: None),
        lambda folder: EMAWeightAveraging(),
        lambda folder: StochasticWeightAveraging(1e-2),
        lambda folder: GradientAccumulationScheduler({0: 2}),
        lambda folder: LearningRateFinder(),
    ],
)
def test_callbacks_that_wait_for_steps_or_errors_are_refused(tmp_path: Path, make: Any) -> None:
    """Without the refusal, some callbacks save or restore weights during a segment, and others have no effect."""
    module, private = made(tmp_path)
    with raises_code("integrations.callback-of-steps"):
        lightning(tmp_path, private, make(tmp_path), enable_checkpointing=True).fit(module, private.loader())
    assert not (tmp_path / "run").exists()


def test_callbacks_that_do_no_harm_are_kept(tmp_path: Path) -> None:
    module, private = made(tmp_path)
    logger = CSVLogger(tmp_path / "log")
    lightning(
        tmp_path, private, LearningRateMonitor(), logger=logger, enable_progress_bar=True, enable_model_summary=True
    ).fit(module, private.loader())
    assert private.outcome is not None and private.outcome.steps == 6


class Validated(Classifier):
    def validation_step(self, batch: Any, number: int) -> None:
        raise AssertionError("a validation on data that nobody declared")


def test_no_sanity_check_on_undeclared_data(tmp_path: Path) -> None:
    _, private = made(tmp_path)
    trainer = lightning(tmp_path, private, num_sanity_val_steps=2)
    with raises_code("train.evaluation-on-private-data"):
        trainer.fit(Validated(), private.loader(), val_dataloaders=public())


def test_how_long_segments_took_is_not_logged(tmp_path: Path) -> None:
    module, private = made(tmp_path, eval_on="public")
    logger = TensorBoardLogger(tmp_path / "log")
    lightning(tmp_path, private, logger=logger).fit(module, private.loader(), val_dataloaders=public())
    found = EventAccumulator(logger.log_dir).Reload()
    events = [event for name in ("epsilon/data", "val_loss") for event in found.Scalars(name)]
    assert len(events) > 3 and all(event.wall_time == event.step for event in events)
