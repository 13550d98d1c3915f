"""`PrivateTrainer`: the surface of `transformers.Trainer`, over a run of `lamina.Trainer`.

Arguments, optimisers, schedules, callbacks, evaluation, saving and reporting are those of transformers. The loop is not:
Poisson sampling, clipping, noise, ledger and exact resume are the run's, which this drives
(docs/decisions/integrations.md). So nothing of a private step can reach a log, a callback or a file of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves
from transformers.data.data_collator import DataCollatorForPermutationLanguageModeling, DataCollatorWithFlattening
from transformers.integrations import TensorBoardCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from lamina.engine.engine import Engine
from lamina.errors import RunError
from lamina.integrations.loggers import take_clock_away
from lamina.integrations.tokens import loss_for
from lamina.plan.step_plan import StepPlan
from lamina.run.corpus import Corpus
from lamina.run.private import make_private
from lamina.run.publisher import Evaluation, Outcome
from lamina.run.run_output import Callback, RunFigures
from lamina.run.trainer import Trainer
from lamina.run.trainer_checks import refuse_taken_options
from lamina.validate import short_repr

_ONE_PROCESS = ("one process trains here", "leave it out; several processes: lamina.Trainer under torchrun")
_STEPS_ONLY = ("Poisson sampling has no epochs", 'write "steps" or "no"')
_ALLOWED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "fp16": ((False,), "its loss scale follows the overflows of private gradients", "write bf16=True, or neither"),
    "max_grad_norm": (
        (0, None),
        "it clips the gradient of the whole batch, which bounds nobody; contributions are clipped one by one before the noise",
        "write max_grad_norm=0; the clip norm belongs to privacy= or to the plan",
    ),
    "train_sampling_strategy": (("random",), "ε counts on Poisson sampling", "leave it out"),
    "dataloader_drop_last": ((False,), "ε counts on Poisson sampling, which drops nobody", "leave it out"),
    "data_seed": ((None,), "who is sampled comes from a secret stream", "leave it out"),
    "auto_find_batch_size": ((False,), "a second try would use contributions twice", "more gradient_accumulation_steps"),
    "include_num_input_tokens_seen": (("no", False), "it counts the tokens of those who were sampled", "leave it out"),
    "skip_memory_metrics": ((True,), "the memory of a step tells how many were sampled", "leave it out"),
    "debug": (([], ""), "it prints activations of private examples", "leave it out"),
    "torch_compile": ((False,), "the engine works in layers, which a compiler would merge", "leave it out"),
    "use_liger_kernel": ((False,), "its kernels have no per-contribution gradients", "leave it out"),
    "neftune_noise_alpha": ((None,), "its hook would change a layer that the engine works in", "leave it out"),
    "optim_target_modules": ((None,), "such optimisers take gradients before they are private", "write optim='adamw_torch'"),
    "bf16_full_eval": ((False,), "it would round the weights that are trained", "leave it out"),
    "fp16_full_eval": ((False,), "it would round the weights that are trained", "leave it out"),
    "enable_jit_checkpoint": ((False,), "the run's own checkpoints survive a kill at any instant", "leave it out"),
    "resume_from_checkpoint": ((None,), "a run is resumed from its own folder, by train() again", "leave it out"),
    "deepspeed": ((None,), *_ONE_PROCESS),
    "fsdp": ((None, [], "", False), *_ONE_PROCESS),
    "parallelism_config": ((None,), *_ONE_PROCESS),
    "logging_strategy": (("steps",), "a segment, after which figures may leave, has logging_steps steps", 'write "steps"'),
    "eval_strategy": (("no", "steps"), *_STEPS_ONLY),
    "save_strategy": (("no", "steps"), *_STEPS_ONLY),
}  # fmt: skip
_TAKEN = {
    "evaluate": "give eval_dataset= and eval_on=",
    "segment": "write logging_steps in the arguments",
    "microbatches": "write gradient_accumulation_steps in the arguments",
    "progress": "write disable_tqdm in the arguments",
    "scheduler": "write lr_scheduler_type in the arguments, or give optimizers=",
    "optimizer": "write optim in the arguments, or give optimizers=",
    "corpus": "give train_dataset=",
    "model_init": "give the model itself",
    "compute_loss_func": "give loss_fn=, a function of (output, y) with one loss per example",
}
_NOT_CALLED = (
    "training_step", "compute_loss", "compute_loss_func", "get_train_dataloader", "create_scheduler", "get_batch_samples",
    "autocast_smart_context_manager", "_get_train_sampler", "_inner_training_loop", "_run_epoch", "_save_checkpoint",
    "_clip_grad_norm", "_maybe_log_save_evaluate", "_load_best_model",
)  # fmt: skip
_IN_THE_BACKWARD_PASS = ("lomo", "layerwise")
_EVENTS_OF_STEPS = (
    "on_step_begin", "on_step_end", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_epoch_begin", "on_epoch_end",
)  # fmt: skip
_LOGGED = ("epsilon", "learning_rate", "epoch", "eval_", "test_")
_TIMES = ("_runtime", "_per_second", "_compilation_time", "_preparation_time")


def check_arguments(args: Any) -> None:
    """Refuse training arguments that a private run cannot keep, or that would leak."""
    if not isinstance(args, transformers.TrainingArguments):
        problem = f"args is a {type(args).__name__}"
        raise RunError("integrations.arguments-missing", problem, "give transformers.TrainingArguments(output_dir=…)")
    for name, (allowed, why, remedy) in _ALLOWED.items():
        value = getattr(args, name, allowed[0])
        value = getattr(value, "value", value)
        if value not in allowed:
            problem = f"{name} is {short_repr(value)}, must be {' or '.join(map(repr, allowed))}: {why}"
            raise RunError("integrations.argument-refused", problem, remedy)
    optim = str(getattr(args.optim, "value", args.optim))
    if any(word in optim for word in _IN_THE_BACKWARD_PASS):
        problem = f"optim is {optim!r}, which takes gradients inside the backward pass, before they are private"
        raise RunError("integrations.argument-refused", problem, "write optim='adamw_torch'")
    if args.world_size > 1 or args.n_gpu > 1 or args.device.type != "cpu":
        problem = f"the arguments ask for {max(args.world_size, args.n_gpu)} × {args.device.type}, must be one process on the CPU"
        raise RunError("integrations.device", problem, "write use_cpu=True, or use lamina.Trainer")
    if "wandb" in args.report_to and os.environ.get("WANDB_WATCH", "false") != "false":
        problem = f"WANDB_WATCH is {os.environ['WANDB_WATCH']!r}: it hooks gradients before they are private"
        raise RunError("integrations.argument-refused", problem, "unset WANDB_WATCH")


def check_callback(callback: Any) -> None:
    """Refuse a callback that waits for single steps: nothing leaves a run but between segments."""
    kind = callback if isinstance(callback, type) else type(callback)
    theirs = kind.__module__.startswith("transformers.")
    own = {} if kind is callback else getattr(callback, "__dict__", {})
    events = [
        name
        for name in _EVENTS_OF_STEPS
        if name in own or not (theirs or getattr(kind, name, None) is getattr(TrainerCallback, name, None))
    ]
    if events:
        problem = f"callback {kind.__name__} has {events[0]}, and weights of a single step do not leave a run"
        remedy = (
            "use on_log, on_evaluate or on_save: they are told every logging_steps, eval_steps and save_steps steps"
        )
        raise RunError("integrations.callback-of-steps", problem, remedy)


def _check_collator(collator: Any, eval_on: str | None) -> None:
    """Refuse a collator that training would need: it is called for evaluation alone."""
    masks = getattr(collator, "mlm", isinstance(collator, DataCollatorForPermutationLanguageModeling))
    if collator is not None and (masks or eval_on is None or isinstance(collator, DataCollatorWithFlattening)):
        problem = f"data_collator is a {type(collator).__name__}, which a private run calls for evaluation only"
        remedy = "make the rows of the corpus as the model takes them; random changes of an example: augment=; or leave it out"
        raise RunError("integrations.collator-not-called", problem, remedy)


class PrivateTrainer(transformers.Trainer):  # type: ignore[misc]
    """Train a model of Hugging Face on a corpus, privately, with the arguments and callbacks of transformers.

        trainer = PrivateTrainer(model, args, train_dataset=corpus, privacy={"epsilon": 3.0, "delta": 1e-5})
        trainer.train()

    train_dataset  a `lamina.Corpus` (`lamina.integrations.tokens.token_corpus`), which knows whose example is whose
    privacy        as `lamina.make_private` takes it: epsilon or noise_multiplier, delta, clip_norm, population, …; the plan
                   then follows from the arguments: a step expects per_device_train_batch_size ×
                   gradient_accumulation_steps contributions; there are max_steps steps or num_train_epochs passes
    plan, engine   instead: a plan of one's own. max_steps and the batch of the arguments must be the plan's
    loss_fn        (output, y) with one loss per example; default: `loss_for(model)` with label_smoothing_factor
    eval_on        "public" or "simulated": what eval_dataset, and whatever is given to evaluate and predict, is
    folder         where the run lives, outside of output_dir, which hubs and trackers upload whole; default: output_dir-run.
                   train() again goes on from there, at no further cost
    run_options    whatever else `lamina.Trainer` takes: ledger, key, bounds, probe, seed, …

    logging_steps steps are a segment, and eval_steps and save_steps are multiples of it. Logged are ε so far, the learning rate
    and figures of the evaluation; never a training loss or a gradient norm. `outcome` is what the run came to.

    Formal guarantee: that of `lamina.Trainer`. Weights reach callbacks, evaluations and files of transformers only between
    segments, when their charge is durable.
    """

    def __init__(
        self, model: Any = None, args: Any = None, data_collator: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
        processing_class: Any = None, *, privacy: Mapping[str, Any] | None = None, plan: StepPlan | None = None,
        engine: Engine | None = None, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None, eval_on: str | None = None,
        folder: str | Path | None = None, callbacks: Sequence[Any] | None = None, compute_metrics: Any = None,
        optimizers: tuple[Any, Any] = (None, None), optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None, **run_options: Any,
    ) -> None:  # fmt: skip
        check_arguments(args)
        refuse_taken_options("the surface of transformers", run_options, _TAKEN)
        if not isinstance(train_dataset, Corpus):
            remedy = "make a corpus and say what a contribution is: token_corpus(texts, length=…, pad=…, unit=…)"
            raise RunError("train.data-not-a-corpus", f"train_dataset is a {type(train_dataset).__name__}", remedy)
        self._refuse_methods_not_called()
        _check_collator(data_collator, eval_on)
        for callback in callbacks or ():
            check_callback(callback)
        self.folder = _run_folder(Path(args.output_dir), folder)
        self.corpus, self.eval_on = train_dataset, eval_on
        self.outcome: Outcome | None = None
        self.optimizer: Any = None
        self.control: Any = None
        if eval_dataset is not None:
            self._check_public(eval_dataset)
        super().__init__(
            model=model, args=args, data_collator=data_collator, eval_dataset=eval_dataset, processing_class=processing_class,
            compute_metrics=compute_metrics, callbacks=list(callbacks or ()), optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs, preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        _take_clocks_away(self.callback_handler.callbacks)
        self.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # it waits for steps; the run shows its own progress
        self.plan, self._engine = self._plan(privacy, plan, engine)
        self._length = _length(args)
        self.loss_fn = loss_for(self.model, args.label_smoothing_factor) if loss_fn is None else loss_fn
        self._run_options = run_options
        self.segment = self._steps("logging_steps", self.plan.steps)

    def _refuse_methods_not_called(self) -> None:
        """Refuse methods of training that a subclass or the user has replaced."""
        for name in _NOT_CALLED:
            ours = getattr(type(self), name, None) is getattr(PrivateTrainer, name, None)
            if not ours or vars(self).get(name) is not None:
                problem = f"{type(self).__name__} has a {name} of its own, which a private run does not call"
                remedy = "give loss_fn=, the corpus or optimizers= instead"
                raise RunError("integrations.method-not-called", problem, remedy)

    def _plan(
        self, privacy: Mapping[str, Any] | None, plan: StepPlan | None, engine: Engine | None
    ) -> tuple[StepPlan, Engine | None]:
        args = self.args
        batch, *_ = _length(args)
        if (privacy is None) == (plan is None):
            problem = f"privacy is {privacy!r} and plan is {'given' if plan else 'None'}"
            remedy = "give exactly one: privacy={'epsilon': 3.0, 'delta': 1e-5}"
            raise RunError("integrations.privacy-or-plan", problem, remedy)
        if plan is None:
            length = {"steps": args.max_steps} if args.max_steps > 0 else {"epochs": args.num_train_epochs}
            engine, self.corpus, made = make_private(self.model, self.corpus, batch=batch, **length, **(privacy or {}))
            return made, engine
        if (args.max_steps, batch) != (plan.steps, plan.batch):
            problem = f"max_steps is {args.max_steps} and the batch {batch}, the plan has {plan.steps} steps and batch {plan.batch:g}"
            remedy = (
                "write the plan's numbers: max_steps, and per_device_train_batch_size × gradient_accumulation_steps; or give "
                "privacy= instead of a plan"
            )
            raise RunError("integrations.plan-not-of-arguments", problem, remedy)
        return plan, engine

    def _steps(self, name: str, default: int) -> int:
        """An interval of the arguments in steps: a number, or a part of the run below 1; whole segments."""
        value = getattr(self.args, name) or default
        steps = min(self.plan.steps, max(1, round(value * self.plan.steps if value < 1 else value)))
        segment = getattr(self, "segment", steps)
        if steps % segment and steps != self.plan.steps:
            problem = f"{name} is {steps}, must be a multiple of logging_steps, {segment}: figures and weights leave between segments"
            remedy = f"write {name}={(steps // segment + 1) * segment}"
            raise RunError("integrations.steps-not-whole-segments", problem, remedy)
        return steps

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end of the plan, or go on from where the run in `folder` was left."""
        args = self.args
        check_arguments(args)  # they may have been changed since
        self._refuse_methods_not_called()
        if self._length != (now := _length(args)) or self.train_dataset is not None:
            changed = (
                "train_dataset was set" if self._length == now else f"the batch or length was {self._length}, is {now}"
            )
            problem = f"{changed} after the trainer was made, and its plan is for what was given then"
            raise RunError("integrations.arguments-changed", problem, "make another PrivateTrainer")
        if resume_from_checkpoint not in (None, False, True):
            problem = f"resume_from_checkpoint is {resume_from_checkpoint!r}: nobody knows what an ordinary checkpoint has cost"
            remedy = (
                f"call train() again: it goes on from the run in '{self.folder}'; or load the weights before the run"
            )
            raise RunError("integrations.ordinary-checkpoint", problem, remedy)
        if trial is not None:
            return self.hyperparameter_search()
        if self._created_lr_scheduler:
            self.optimizer = self.lr_scheduler = None
        self.create_optimizer_and_scheduler(num_training_steps=self.plan.steps)
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
            )
            self.model.disable_input_require_grads()  # which only a reentrant pass needs
        surface = _Surface(self, ignore_keys_for_eval)
        autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=bool(args.bf16))
        with autocast:
            run = Trainer(
                self.model, self.optimizer, self.loss_fn, self.corpus, self.plan, engine=self._engine, folder=self.folder,
                scheduler=self.lr_scheduler, microbatches=args.gradient_accumulation_steps, evaluate=surface.evaluation(),
                callbacks=[surface], segment=self.segment, progress=not args.disable_tqdm, **self._run_options,
            )  # fmt: skip
            surface.begin()
            self.outcome = run.fit()
        if args.load_best_model_at_end:
            self.model.load_state_dict(load_file(self.folder / "best.safetensors"))
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, float("nan"), _epsilons(self.outcome.epsilon))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As ever, for figures that may leave: ε, the learning rate, figures of an evaluation. Not how long anything took."""
        if strange := [name for name in logs if not name.startswith(_LOGGED)]:
            problem = f"{strange[0]!r} is logged, which is not one of {', '.join(_LOGGED)}: a figure of private data is a release"
            raise RunError("integrations.figure-not-public", problem, "log figures of public data, named eval_…")
        super().log({name: value for name, value in logs.items() if not name.endswith(_TIMES)})

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """As ever, on data that `eval_on` declares public or simulated."""
        self._check_public(self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset)
        return super().evaluate(eval_dataset, *args, **options)  # type: ignore[no-any-return]

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """As ever, on data that `eval_on` declares public or simulated."""
        self._check_public(test_dataset)
        return super().predict(test_dataset, *args, **options)

    def add_callback(self, callback: Any) -> None:
        check_callback(callback)
        super().add_callback(callback)
        _take_clocks_away(self.callback_handler.callbacks)

    def get_train_dataloader(self) -> Any:
        """Refused: there is no loader of the corpus; `corpus.batches(plan)` draws as ε counts."""
        problem = "a private run draws Poisson samples by itself, and has no loader"
        raise RunError("integrations.no-train-loader", problem, "call train()")

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refused: every trial would be another run on the same people."""
        problem = "every trial of a search is a run on the same contributions, and choosing by them costs, too"
        remedy = "search on public or simulated data, then train once"
        raise RunError("integrations.search-on-private-data", problem, remedy)

    def _check_public(self, data: Any) -> None:
        """Refuse data that nobody declared, and the corpus or its tensors."""
        if self.eval_on is None:
            problem = "an evaluation is asked for, and eval_on is None: figures on private data are a release without a budget"
            remedy = 'declare it: eval_on="public" or eval_on="simulated"'
            raise RunError("train.evaluation-on-private-data", problem, remedy)
        Evaluation(function=len, on=self.eval_on)  # type: ignore[arg-type]
        mine = {id(self.corpus), *map(id, tree_leaves(vars(self.corpus.source)))}
        if any(id(part) in mine for part in [data, *tree_leaves(data)] if part is not None):
            problem = "the data to evaluate on is the corpus itself"
            raise RunError("train.evaluation-on-private-data", problem, "give public or simulated data")


def _length(args: Any) -> tuple[Any, ...]:
    """Return what a plan follows from in the arguments: the batch, and the steps or passes."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return batch, args.max_steps, args.num_train_epochs


def _run_folder(output: Path, folder: str | Path | None) -> Path:
    """Seeds, past noise and counts of who was sampled are there: `push_to_hub` and some trackers upload all of output_dir."""
    found = Path(f"{output}-run") if folder is None else Path(folder)
    if found.resolve().is_relative_to(output.resolve()):
        problem = (
            f"the run is to live in '{found}', inside of output_dir, which push_to_hub and some trackers upload whole"
        )
        raise RunError("integrations.run-inside-output", problem, "give a folder beside output_dir, or leave it out")
    return found


def _take_clocks_away(callbacks: Sequence[TrainerCallback]) -> None:
    """Let TensorBoard write no times of day."""
    for callback in callbacks:
        writer = getattr(callback, "_SummaryWriter", None) if isinstance(callback, TensorBoardCallback) else None
        if writer is not None and not isinstance(writer, partial):
            callback._SummaryWriter = partial(_writer_without_clock, writer)


def _writer_without_clock(make: Callable[..., Any], **options: Any) -> Any:
    return take_clock_away(make(**options))


def _epsilons(epsilon: Mapping[str, float]) -> dict[str, float]:
    """ε as it is logged: `epsilon` of one class, `epsilon_NAME` of several."""
    if len(epsilon) == 1:
        return {"epsilon": next(iter(epsilon.values()))}
    return {f"epsilon_{name}": value for name, value in epsilon.items()}


class _Surface(Callback):
    """Shows a run as transformers shows a training: its state, its logs, its checkpoints of weights."""

    def __init__(self, trainer: PrivateTrainer, ignore_keys: Sequence[str] | None) -> None:
        self.trainer, self._ignore_keys = trainer, ignore_keys
        self._save_steps = trainer._steps("save_steps", trainer.segment) if trainer.args.save_strategy == "steps" else 0
        populations = [(entry.population or 0, entry.sampling_rate) for entry in trainer.plan.classes]
        self._passes = sum(n * q for n, q in populations) / max(1, sum(n for n, _ in populations))

    def begin(self) -> None:
        trainer = self.trainer
        trainer.is_in_train = True
        trainer.state = TrainerState()
        trainer.state.init_training_references(
            trainer, trainer.plan.steps, max(1, round(self._passes * trainer.plan.steps)), None
        )
        trainer.state.train_batch_size = trainer.args.train_batch_size
        trainer.state.compute_steps(trainer.args, trainer.plan.steps)
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)

    def evaluation(self) -> Evaluation | None:
        trainer, args = self.trainer, self.trainer.args
        if args.eval_strategy == "no":
            return None
        trainer._check_public(trainer.eval_dataset)
        best = None
        if args.load_best_model_at_end:
            best = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            best = f"{'+' if args.greater_is_better else '-'}{best}"
        every = trainer._steps("eval_steps", trainer.segment) // trainer.segment
        return Evaluation(function=self._figures, on=trainer.eval_on or "", every=max(1, every), best=best)

    def _figures(self, model: Any) -> dict[str, float]:
        """The evaluation of transformers, without its logging: a rehearsal is not told."""
        trainer, sets = self.trainer, self.trainer.eval_dataset
        found: dict[str, float] = {}
        for name, data in sets.items() if isinstance(sets, dict) else [("", sets)]:
            output = trainer.evaluation_loop(
                trainer.get_eval_dataloader(data), description="Evaluation", metric_key_prefix=f"eval_{name}" if name else "eval",
                prediction_loss_only=True if trainer.compute_metrics is None else None, ignore_keys=self._ignore_keys,
            )  # fmt: skip
            found |= {key: value for key, value in output.metrics.items() if not key.endswith(_TIMES)}
        return found

    def on_evaluation(self, now: RunFigures) -> None:
        trainer = self.trainer
        self._stand_at(now)
        metrics = dict(now.evaluation)
        trainer.log(dict(metrics))
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        trainer._determine_best_metric(metrics, None)
        self.stop = trainer.control.should_training_stop

    def on_segment(self, now: RunFigures) -> None:
        trainer = self.trainer
        self._stand_at(now)
        trainer.log({**_epsilons(now.epsilon), "learning_rate": trainer._get_learning_rate()})
        if self._save_steps and (now.step % self._save_steps == 0 or now.step == now.steps):
            self._save(now.step)
        self.stop = trainer.control.should_training_stop

    def _stand_at(self, now: RunFigures) -> None:
        state = self.trainer.state
        state.global_step, state.epoch = now.step, self._passes * now.step

    def _save(self, step: int) -> None:
        """Weights and state as transformers writes them; not generators or optimiser, which the run keeps."""
        trainer, args = self.trainer, self.trainer.args
        place = os.path.join(args.output_dir, f"checkpoint-{step}")
        trainer.save_model(place, _internal_call=True)
        trainer.state.save_to_json(os.path.join(place, "trainer_state.json"))
        rotate_checkpoints(output_dir=args.output_dir, save_total_limit=args.save_total_limit)
        trainer.control = trainer.callback_handler.on_save(args, trainer.state, trainer.control)
