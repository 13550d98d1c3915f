"""`PrivateFit`: a callback by which `trainer.fit` of Lightning trains privately.

When Lightning is ready to train, the callback runs `lamina.Trainer` on its module, optimiser and schedule, and then tells Lightning
that training is over. So the loop of Lightning takes no step, `training_step` is never called, and nothing that it would log exists.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning import callbacks, loggers
from pytorch_lightning.core.optimizer import _MockOptimizer
from torch.utils.data import DataLoader

from lamina.engine.engine import Engine
from lamina.errors import RunError
from lamina.integrations.loggers import segment_scalars, take_clock_away
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.publisher import Evaluation, Outcome
from lamina.run.run_output import Callback, RunFigures
from lamina.run.trainer import Trainer
from lamina.run.trainer_checks import refuse_taken_options

_ONE_PROCESS = "one process on the CPU trains here: lamina.Trainer under torchrun for more"
_TAKEN = {
    "evaluate": "give eval_on= and a validation_step",
    "scheduler": "return it from configure_optimizers",
    "optimizer": "return it from configure_optimizers",
    "callbacks": "give callbacks of Lightning to its Trainer",
    "progress": "leave it out",
}
_REMEDIES: dict[str, tuple[Any, str]] = {
    "gradient_clip_val": (None, "leave it out: contributions are clipped one by one, to the plan's clip norm"),
    "accumulate_grad_batches": (1, "leave it out, and give microbatches= to PrivateFit: less memory, the same step"),
    "precision": ("32-true", "leave it out: a loss scale follows private gradients"),
    "overfit_batches": (0.0, "leave it out: ε counts on Poisson samples"),
    "fast_dev_run": (False, "leave it out: lamina.Trainer(…).rehearse() tries everything on simulated input"),
    "world_size": (1, _ONE_PROCESS),
    "num_devices": (1, _ONE_PROCESS),
    "ckpt_path": (None, "leave it out: fit goes on from the run in `folder` by itself"),
}
_EVENTS_OF_STEPS = (
    "on_exception", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
)  # fmt: skip
_KEPT = (
    callbacks.ProgressBar, callbacks.ModelSummary, callbacks.ModelCheckpoint, callbacks.EarlyStopping,
    callbacks.LearningRateMonitor, callbacks.DeviceStatsMonitor,
)  # fmt: skip
_SEARCHES = (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)


def check_callback(callback: Any) -> None:
    """Refuse a callback that acts on single steps or on errors: a run hands out values only between segments."""
    kind, ours = type(callback).__name__, pytorch_lightning.Callback
    if isinstance(callback, _SEARCHES):
        problem = f"callback {kind} takes its own steps before the private run"
        remedy = "search on public or simulated data, without PrivateFit"
        raise RunError("integrations.callback-of-steps", problem, remedy)
    found = {name: getattr(callback, name) for name in _EVENTS_OF_STEPS}
    events = [name for name, hook in found.items() if getattr(hook, "__func__", hook) is not getattr(ours, name)]
    if isinstance(callback, _KEPT):
        ends = "on_exception" in events and not found["on_exception"].__module__.startswith("pytorch_lightning.")
        events = ["on_exception"] if ends or getattr(callback, "save_on_exception", False) else []
    if not events:
        return
    remedy = "use on_validation_end, or leave it out: lamina.Trainer(ema=…) averages weights; the run in `folder` survives an error"
    if events[0] == "on_exception":
        problem = f"callback {kind} acts on an error, but a run never hands out weights from the middle of a segment"
    else:
        problem = f"callback {kind} has {events[0]}, which a private run does not call"
    raise RunError("integrations.callback-of-steps", problem, remedy)


class PrivateFit(pytorch_lightning.Callback):  # type: ignore[misc]
    """Train a LightningModule on a corpus, privately.

        private = PrivateFit(corpus, plan, loss_fn, folder="runs/first", engine=engine, eval_on="public")
        trainer = pytorch_lightning.Trainer(callbacks=[private], accelerator="cpu", max_epochs=1)
        trainer.fit(module, private.loader(), val_dataloaders=public_loader)

    loss_fn      (module(x), y) with one loss per example, as `lamina.Trainer` takes it; `training_step` is not called
    eval_on      "public" or "simulated": what the validation data are. Without it nothing is validated, and validation data
                 are refused
    run_options  whatever else `lamina.Trainer` takes: segment, microbatches, ledger, probe, seed, …

    Supported parts of Lightning: `configure_optimizers` with one optimiser and a schedule per step (None: those of the plan,
    `lamina.private_optimizer`), validation between segments with what `validation_step` logs, its loggers (which get ε),
    `EarlyStopping` and `ModelCheckpoint` after validations. `outcome` is what the run came to.
    Hooks of the module for batches and epochs of training are not called; callbacks that have such hooks are refused.
    """

    def __init__(
        self, corpus: Corpus, plan: StepPlan, loss_fn: Callable[[Any, Any], torch.Tensor], *, folder: str | Path,
        engine: Engine | None = None, eval_on: str | None = None, **run_options: Any,
    ) -> None:  # fmt: skip
        refuse_taken_options("the surface of Lightning", run_options, _TAKEN)
        self.corpus, self.plan, self.loss_fn, self.folder = corpus, plan, loss_fn, folder
        self.engine, self.eval_on, self._run_options = engine, eval_on, run_options
        self.outcome: Outcome | None = None
        self._loader: DataLoader[Any] = DataLoader([0])  # type: ignore[arg-type]

    def loader(self) -> DataLoader[Any]:
        """What `fit` is given as its training loader; nobody reads it: the run draws Poisson samples of the corpus."""
        return self._loader

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse callbacks that a private run does not support, before one of them acts."""
        for each in trainer.callbacks if stage == "fit" else ():
            if each is not self:
                check_callback(each)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a sanity check on validation data that was not declared with `eval_on`."""
        self._check_validation()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The whole run."""
        self._check(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, loggers.TensorBoardLogger):
                take_clock_away(logger.experiment)
        for each in trainer.early_stopping_callbacks:  # there are no epochs: they look at validations
            each._check_on_train_epoch_end = False
        for each in trainer.checkpoint_callbacks:
            each._save_on_train_epoch_end = False
        (optimizer,), schedule = trainer.optimizers, self._schedule(trainer)
        if isinstance(optimizer, _MockOptimizer):  # configure_optimizers returned None
            optimizer = "auto"
        surface = _LightningSurface(trainer, pl_module)
        evaluation = None
        if self.eval_on is not None:
            evaluation = Evaluation(function=surface.validate, on=self.eval_on)
        pl_module._trainer = None  # a run is resumed by its settings, and Lightning's trainer is another one each time
        try:
            surface.run = Trainer(
                pl_module, optimizer, self.loss_fn, self.corpus, self.plan, engine=self.engine, folder=self.folder,
                scheduler=schedule, evaluate=evaluation, callbacks=[surface], progress=False, **self._run_options,
            )  # fmt: skip
            self.outcome = surface.run.fit()
        finally:
            pl_module._trainer = trainer
        trainer.should_stop = True

    def _check(self, trainer: Any) -> None:
        """Refuse a trainer whose settings a private run cannot keep."""
        for name, (wanted, remedy) in _REMEDIES.items():
            value = getattr(trainer, name)
            if value != wanted:
                problem = f"{name} of the Lightning trainer is {value!r}, must be {wanted!r}"
                raise RunError("integrations.argument-refused", problem, remedy)
        if trainer.strategy.root_device.type != "cpu":
            problem = f"the Lightning trainer uses {trainer.strategy.root_device}"
            raise RunError("integrations.device", problem, "write accelerator='cpu'")
        if trainer.train_dataloader is not self._loader:
            problem = "fit was given a training loader of its own, which is not Poisson sampling"
            raise RunError(
                "corpus.dataloader-not-poisson", problem, "give it private.loader(), and the data to the corpus"
            )
        if trainer.min_steps or trainer.min_epochs:
            problem = (
                f"min_steps is {trainer.min_steps!r} and min_epochs {trainer.min_epochs!r}: the plan has the steps"
            )
            raise RunError("integrations.argument-refused", problem, "leave both out")
        if len(trainer.optimizers) != 1:
            problem = f"configure_optimizers returns {len(trainer.optimizers)} optimisers, must be 1"
            raise RunError("integrations.several-optimizers", problem, "return one optimiser of all that trains")
        if trainer.num_val_batches and sum(trainer.num_val_batches):
            self._check_validation()

    def _check_validation(self) -> None:
        if self.eval_on is None:
            problem = (
                "validation data are given, and eval_on is None: figures on private data are a release without a budget"
            )
            raise RunError("train.evaluation-on-private-data", problem, 'declare them: eval_on="public" or "simulated"')

    @staticmethod
    def _schedule(trainer: Any) -> Any:
        configs = trainer.lr_scheduler_configs
        if not configs:
            return None
        if len(configs) > 1 or configs[0].interval != "step" or configs[0].frequency != 1 or configs[0].monitor:
            problem = f"the schedule is stepped per {configs[0].interval}, or follows a figure, or is one of several"
            raise RunError("integrations.schedule", problem, 'return {"scheduler": …, "interval": "step"}')
        return configs[0].scheduler


class _LightningSurface(Callback):
    """Shows a run to Lightning: its global step, its loggers, its validation loop."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self.trainer, self.module = trainer, module
        self.run: Trainer | None = None
        self._rehearsed = False

    def validate(self, model: Any) -> dict[str, float]:
        """What `validation_step` logs. The first time is the run's rehearsal, of which callbacks are not told."""
        trainer = self.trainer
        assert self.run is not None
        self._stand_at(self.run.state.step)
        self.module._trainer, trainer.validating, callbacks = trainer, True, trainer.callbacks
        trainer.callbacks, self._rehearsed = callbacks if self._rehearsed else [], True
        try:
            trainer.fit_loop.epoch_loop.val_loop.run()
            return {name: float(value) for name, value in trainer.callback_metrics.items()}
        finally:
            trainer.callbacks, trainer.training, self.module._trainer = callbacks, True, None

    def on_segment(self, now: RunFigures) -> None:
        self._stand_at(now.step)
        for logger in self.trainer.loggers:
            logger.log_metrics(
                {n: v for n, v in segment_scalars(now).items() if n.startswith("epsilon/")}, step=now.step
            )
            logger.save()
        self.stop = self.trainer.should_stop

    def _stand_at(self, step: int) -> None:
        """`trainer.global_step`, by which checkpoints are named."""
        loop = self.trainer.fit_loop.epoch_loop
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        loop.manual_optimization.optim_step_progress.total.completed = step
