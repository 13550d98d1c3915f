"""What users of `transformers.Trainer` may do to a private run: each is right by the oracle, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted_models import WORDS, adapted, base_model
from by_hand import QUIET
from oracle import Batch, clip_by_hand, difference, example_grads, unit_grads
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina.engine.noise.source import NoiseSource
from lamina.integrations.huggingface import PrivateTrainer
from lamina.integrations.tokens import LabelLoss, TokenLoss, loss_for, token_corpus

pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:.*use_cache=True")]
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-5, "clip_norm": 0.5}
PUBLIC = [{"input_ids": ids, "labels": ids} for ids in ([3, 4, 5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4, 3, 2])]
PEOPLE, LENGTH = 24, 8
Losses = Callable[[Any, Tensor], Tensor]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return a folder inside a folder of this test, because the run and its ledger are written beside output_dir."""
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient is the clipped sum divided by B, so that the oracle can tell what was summed."""

    def apply(self: Any, totals: Sequence[Tensor], *_: Any, fill: bool, divisor: float = 1.0, **__: Any) -> None:
        for total in totals:
            total.detach().zero_() if fill else total.detach().div_(divisor)

    monkeypatch.setattr(NoiseSource, "_apply", apply)


def texts(count: int = PEOPLE) -> list[list[int]]:
    """Texts of 3 to 8 tokens; no two are alike."""
    return [[1, 2 + i % 30, 3 + (7 * i) % 35, *(2 + (i * j) % 30 for j in range(i % 6))] for i in range(count)]


def patients() -> lamina.Corpus:
    return token_corpus(texts(), length=LENGTH, pad=0, unit=[i // 2 for i in range(PEOPLE)], unit_name="patient")


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    standard: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 6, "max_grad_norm": 0, "logging_steps": 2,
        "learning_rate": 1e-2, "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "optim": "adamw_torch",
    }  # fmt: skip
    return transformers.TrainingArguments(**{**standard, **options})


def trainer_of(folder: Path, model: nn.Module, options: dict[str, Any] | None = None, **given: Any) -> Any:
    standard: dict[str, Any] = {"train_dataset": patients(), "privacy": PRIVACY, "probe": False}
    return PrivateTrainer(model, arguments(folder, **(options or {})), **{**standard, **given})


@dataclass
class Step:
    """What a step used and came to: rows of the corpus, weights before it, gradients."""

    rows: list[int]
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]


@dataclass
class Watch:
    """Sees every step from the outside: the rows by their targets, and what the optimiser is given."""

    trainer: Any
    steps: list[Step] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        source, losses = self.trainer.corpus.source, self.trainer.loss_fn
        x, y = source.fetch(torch.arange(len(source)).numpy())
        known = {self._key(*pair): i for i, pair in enumerate(zip(x["input_ids"], y, strict=True))}
        ids: list[Tensor] = []
        self.trainer.model.register_forward_pre_hook(
            lambda _, args, kwargs: ids.append(kwargs["input_ids"]), with_kwargs=True
        )

        def seen(output: Any, y: Tensor) -> Tensor:
            self.rows += [known.get(self._key(*pair), -1) for pair in zip(ids[-1], y, strict=True)]
            return losses(output, y)

        self.trainer.loss_fn = seen
        create = self.trainer.create_optimizer_and_scheduler

        def watched(num_training_steps: int) -> None:
            create(num_training_steps=num_training_steps)
            self.trainer.optimizer.register_step_pre_hook(self._step)

        self.trainer.create_optimizer_and_scheduler = watched

    @staticmethod
    def _key(x: Tensor, y: Tensor) -> tuple[int, ...]:
        return (*x.tolist(), *torch.atleast_1d(y).tolist())

    def _step(self, *_: Any) -> None:
        named = {n: p for n, p in self.trainer.model.named_parameters() if p.requires_grad}
        weights = {n: p.detach().clone() for n, p in named.items()}
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        self.steps.append(Step(list(self.rows), weights, grads))
        self.rows.clear()


def agrees(watch: Watch, model: nn.Module, losses: Losses, relative: float = 1e-4) -> None:
    """Every step's gradient is the sum of clipped gradients of contributions, by the oracle, divided by B."""
    plan, source = watch.trainer.plan, watch.trainer.corpus.source
    model.config.use_cache = False  # as transformers.Trainer sets it: packed rows are recognised without a cache
    layout = watch.trainer.corpus.layout
    owner = [0] * len(source)
    for unit in range(len(layout)):
        for row in layout.rows_of(torch.tensor([unit]).numpy()).tolist():
            owner[row] = unit
    assert len(watch.steps) == plan.steps and sum(len(step.rows) for step in watch.steps) > 5
    for step in watch.steps:
        rows = [row for row in step.rows if row >= 0]
        assert len(set(rows)) == len(rows)
        if not rows:
            assert not any(g.any() for g in step.grads.values())
            continue
        model.load_state_dict({**model.state_dict(), **step.weights})
        x, y = source.fetch(torch.tensor(rows).numpy())
        present = sorted({owner[row] for row in rows})
        batch = Batch(x, y, unit=torch.tensor([present.index(owner[row]) for row in rows]))
        grads = unit_grads(example_grads(model.train(), x, y, lambda m, x, y: losses(m(**x), y)), batch)
        want = clip_by_hand(grads, [0] * len(present), plan)
        difference({name: g * plan.batch for name, g in step.grads.items()}, want, relative=relative, absolute=relative)


KEPT: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("accumulated", {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    ("smoothed", {"label_smoothing_factor": 0.2}),
    ("checkpointed", {"gradient_checkpointing": True}),
    (
        "checkpointed reentrant",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    ("sgd", {"optim": "sgd"}),
    ("adafactor", {"optim": "adafactor"}),
    ("fused", {"optim": "adamw_torch_fused"}),
    ("cosine", {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}),
    ("stable decay", {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}}),
]


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("base", ["gpt2", "llama"])
@pytest.mark.parametrize(("name", "options"), KEPT, ids=[name for name, _ in KEPT])
def test_steps_are_those_of_the_oracle(tmp_path: Path, base: str, name: str, options: dict[str, Any]) -> None:
    trainer = trainer_of(tmp_path, base_model(base), options)
    watch = Watch(trainer)
    trainer.train()
    agrees(watch, base_model(base), TokenLoss(smoothing=options.get("label_smoothing_factor", 0.0)))


@pytest.mark.usefixtures("noiseless")
def test_bf16_clips_like_the_oracle_within_its_precision(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, base_model("llama"), {"bf16": True})
    watch = Watch(trainer)
    trainer.train()
    agrees(watch, base_model("llama"), TokenLoss(), relative=0.05)
    with pytest.raises(AssertionError):  # otherwise autocast was not on
        agrees(watch, base_model("llama"), TokenLoss(), relative=1e-5)


def classifier(labels: int = 3) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            num_labels=labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)


def classes(labels: Sequence[Any] | None = None) -> lamina.Corpus:
    found = [i % 3 for i in range(PEOPLE)] if labels is None else labels
    return token_corpus(texts(), length=LENGTH, pad=0, labels=found)


@pytest.mark.usefixtures("noiseless")
def test_a_classifier_with_smoothed_labels_is_right(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, classifier(), {"label_smoothing_factor": 0.1}, train_dataset=classes())
    watch = Watch(trainer)
    trainer.train()
    agrees(watch, classifier(), LabelLoss(smoothing=0.1))


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("column", ["position_ids", "labels", "token_type_ids"])
def test_packed_texts_and_further_columns_are_right(tmp_path: Path, column: str) -> None:
    """Two texts in a row with positions of their own; labels among the inputs, of which the model makes another loss."""
    ids = torch.tensor([[*row, *row][:LENGTH] for row in ([*t, *t] for t in texts())])
    half = torch.arange(LENGTH) % (LENGTH // 2)
    more = {"position_ids": half.repeat(PEOPLE, 1), "labels": ids, "token_type_ids": torch.zeros_like(ids)}[column]
    corpus = lamina.Corpus({"input_ids": ids, column: more}, ids, unit=[i // 3 for i in range(PEOPLE)])
    trainer = trainer_of(tmp_path, base_model("gpt2"), train_dataset=corpus)
    watch = Watch(trainer)
    trainer.train()
    agrees(watch, base_model("gpt2"), TokenLoss())


def with_dropout() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2,
            bos_token_id=1, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()  # as from_pretrained returns it


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
@pytest.mark.parametrize("name", ["evaluated", "checkpointed", "saved", "evaluated by a callback"])
def test_what_happens_beside_a_step_does_not_change_it(tmp_path: Path, name: str) -> None:
    """Dropout is that of the run without it, bit for bit."""

    class Evaluates(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.rand(7)
            trainers[1].model.eval()
            trainers[1].predict(PUBLIC)

    public = {"eval_dataset": PUBLIC, "eval_on": "public"}
    options, given = {
        "evaluated": (EVALUATED, public),
        "checkpointed": ({"gradient_checkpointing": True}, {}),
        "saved": ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}, {}),
        "evaluated by a callback": ({}, {**public, "callbacks": [Evaluates()]}),
    }[name]
    trainers: list[Any] = []
    for folder, more, extra in (("a", {}, {}), ("b", options, given)):
        trainers.append(trainer_of(tmp_path / folder / "output", with_dropout(), more, seed=3, **extra))
        if extra.get("callbacks") is None or folder == "b":
            trainers[-1].train()
    (a, b), started = (each.model.state_dict() for each in trainers), with_dropout().state_dict()
    assert all(torch.equal(t, b[key]) for key, t in a.items())
    assert any(not torch.equal(t, started[key]) for key, t in a.items())


# ------------------------------------------------------------------------------- callbacks


def acting(event: str, act: Callable[[dict[str, Any], Any], None]) -> transformers.TrainerCallback:
    def told(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        act(given, state)

    made: transformers.TrainerCallback = type("Acting", (transformers.TrainerCallback,), {event: told})()
    return made


def shrink(given: dict[str, Any], state: Any) -> None:
    with torch.no_grad():
        for p in given["model"].parameters():
            p.mul_(0.9)


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("event", ["on_train_begin", "on_log", "on_evaluate", "on_save"])
def test_weights_that_a_callback_writes_are_trained_from_and_noted(tmp_path: Path, event: str) -> None:
    options = {**EVALUATED, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(
        tmp_path, base_model("gpt2"), options, callbacks=[acting(event, shrink)], eval_dataset=PUBLIC, eval_on="public"
    )
    watch = Watch(trainer)
    trainer.train()
    agrees(watch, base_model("gpt2"), TokenLoss())
    outside = [note for note in trainer.outcome.notes if "written outside of optimizer.step" in note]
    assert len(outside) == 1 or event == "on_train_begin"  # which is before the run: the ledger records these weights


def mixing(given: dict[str, Any], state: Any) -> None:
    if state.global_step == 2:
        given["model"].transformer.h[0].mlp.register_forward_hook(lambda m, args, out: out - out.mean(0, keepdim=True))


def leaving(given: dict[str, Any], state: Any) -> None:
    for p in given["model"].parameters():
        p.grad = torch.ones_like(p)


def unfreezing(given: dict[str, Any], state: Any) -> None:
    given["model"].requires_grad_(True)


@pytest.mark.parametrize(("act", "adapter"), [(mixing, False), (leaving, False), (unfreezing, True)])
def test_a_callback_that_goes_past_the_clipping_is_refused(tmp_path: Path, act: Any, adapter: bool) -> None:
    model = adapted("llama", "lora") if adapter else base_model("gpt2")
    trainer = trainer_of(tmp_path, model, callbacks=[acting("on_log", act)], probe=not adapter)
    with raises_code("train.error-text-withheld"):
        trainer.train()


def test_a_callback_that_gets_an_event_of_steps_later_is_refused(tmp_path: Path) -> None:
    callback = transformers.TrainerCallback()
    callback.on_step_end = lambda *_, **__: None
    with raises_code("integrations.callback-of-steps"):
        trainer_of(tmp_path, base_model("gpt2"), callbacks=[callback])


@pytest.mark.parametrize("event", ["on_train_begin", "on_log"])
def test_a_callback_that_stops_ends_the_run_between_segments(tmp_path: Path, event: str) -> None:
    def stop(self: Any, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = True
        return control

    callback = type("Stopping", (transformers.TrainerCallback,), {event: stop})
    trainer = trainer_of(tmp_path, base_model("gpt2"), callbacks=[callback])
    trainer.train()
    assert trainer.outcome.steps == 2


# ------------------------------------------------------------------------------- refused by name


def masked_words() -> Any:
    return transformers.DataCollatorForLanguageModeling(tokenizer=_Tokenizer(), mlm=True)


class _Tokenizer:
    mask_token, pad_token = "<mask>", "<pad>"


def test_collators_that_training_would_need_are_refused(tmp_path: Path) -> None:
    """They mask, mix or pack rows, and a private run would train without it."""
    public = {"eval_dataset": PUBLIC, "eval_on": "public"}
    for collator, given in (
        (lambda rows: rows, {}),
        (masked_words(), public),
        (transformers.DataCollatorWithFlattening(), public),
    ):
        with raises_code("integrations.collator-not-called"):
            trainer_of(tmp_path, base_model("gpt2"), data_collator=collator, **given)
    trainer_of(tmp_path, base_model("gpt2"), data_collator=transformers.default_data_collator, **public)


NEVER_CALLED = ["compute_loss", "training_step", "get_batch_samples", "_get_train_sampler", "_inner_training_loop"]


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
@pytest.mark.parametrize("name", NEVER_CALLED)
def test_methods_of_training_are_not_ignored(tmp_path: Path, name: str) -> None:
    def method(*_: Any, **__: Any) -> None: ...

    kind = type("Own", (PrivateTrainer,), {name: method})
    with raises_code("integrations.method-not-called") as caught:
        kind(base_model("gpt2"), arguments(tmp_path), train_dataset=patients(), privacy=PRIVACY)
    assert name in caught.value.problem
    trainer = trainer_of(tmp_path, base_model("gpt2"))
    setattr(trainer, name, method)
    with raises_code("integrations.method-not-called"):
        trainer.train()
    assert not trainer.folder.exists()


def test_losses_and_models_by_function_are_refused(tmp_path: Path) -> None:
    for name in ("compute_loss_func", "model_init"):
        with raises_code("train.option-taken"):
            trainer_of(tmp_path, base_model("gpt2"), **{name: lambda *_: None})
    trainer = trainer_of(tmp_path, base_model("gpt2"))
    trainer.compute_loss_func = lambda *_, **__: None
    with raises_code("integrations.method-not-called"):
        trainer.train()


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_what_is_changed_after_the_trainer_was_made_is_refused(tmp_path: Path) -> None:
    for name, value in (("max_steps", 8), ("gradient_accumulation_steps", 2), ("per_device_train_batch_size", 3)):
        trainer = trainer_of(tmp_path, base_model("gpt2"))
        setattr(trainer.args, name, value)
        with raises_code("integrations.arguments-changed"):
            trainer.train()
    trainer = trainer_of(tmp_path, base_model("gpt2"))
    trainer.train_dataset = PUBLIC
    with raises_code("integrations.arguments-changed"):
        trainer.train()
    for name, value in (("max_grad_norm", 1.0), ("fp16", True), ("auto_find_batch_size", True)):
        trainer = trainer_of(tmp_path, base_model("gpt2"))
        setattr(trainer.args, name, value)
        with raises_code("integrations.argument-refused"):
            trainer.train()
    assert not trainer.folder.exists()


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_optimisers_and_schedules_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def model_and(make: Callable[[Any], Any]) -> tuple[Any, Any]:
        model = base_model("gpt2")
        return model, make(model)

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), 0.1)

    model, other = model_and(lambda _: sgd(base_model("gpt2")))
    with raises_code("train.optimizer-of-other-model"):
        trainer_of(tmp_path, model, optimizers=(other, None)).train()
    model, lbfgs = model_and(lambda model: torch.optim.LBFGS(model.parameters()))
    with raises_code("train.optimizer-several-gradients"):
        trainer_of(tmp_path, model, optimizers=(lbfgs, None)).train()
    model, plain = model_and(sgd)
    with raises_code("train.scheduler-follows-loss"):
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(plain)
        trainer_of(tmp_path, model, optimizers=(plain, schedule)).train()
    options = {"lr_scheduler_type": "greedy", "metric_for_best_model": "loss", **EVALUATED}
    trainer = trainer_of(tmp_path, base_model("gpt2"), options, eval_dataset=PUBLIC, eval_on="public")
    with raises_code("train.scheduler-follows-loss"):
        trainer.train()
    assert not trainer.folder.exists()


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield from PUBLIC


def test_data_and_losses_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with raises_code("train.data-not-a-corpus"):
        trainer_of(tmp_path, base_model("gpt2"), train_dataset=Endless())
    with raises_code("corpus.inputs-not-indexable"):
        lamina.Corpus(Endless(), unit=[0, 1])
    with raises_code("integrations.tokens-not-whole"):
        classes([0.5] * PEOPLE)
    with raises_code("integrations.loss-unknown"):  # of one output, the cross-entropy is 0 for everybody
        trainer_of(tmp_path, classifier(labels=1), train_dataset=classes([0] * PEOPLE))
    config = transformers.XLNetConfig(vocab_size=WORDS, d_model=16, n_layer=1, n_head=2, d_inner=16)
    with raises_code("integrations.loss-unknown"):
        loss_for(transformers.XLNetLMHeadModel(config))


# ------------------------------------------------------------------------------- several calls


def test_a_second_call_of_train_takes_no_step(tmp_path: Path) -> None:
    options = {**EVALUATED, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = trainer_of(tmp_path, base_model("gpt2"), options, eval_dataset=PUBLIC, eval_on="public")
    first = trainer.train()
    weights = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    second = trainer.train()
    assert second.metrics == first.metrics and trainer.outcome.steps == 4
    assert all(torch.equal(t, weights[name]) for name, t in trainer.model.state_dict().items())
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight


@pytest.mark.usefixtures("noiseless")
def test_a_run_that_is_resumed_is_right(tmp_path: Path) -> None:
    plugged = iter([False])

    def unplug(given: dict[str, Any], state: Any) -> None:
        if state.global_step == 2 and not next(plugged, True):
            raise KeyboardInterrupt

    trainer = trainer_of(tmp_path, base_model("gpt2"), callbacks=[acting("on_log", unplug)])
    watch = Watch(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.outcome.steps == 4
    agrees(watch, base_model("gpt2"), TokenLoss())


@pytest.mark.usefixtures("noiseless")
def test_adapters_are_right_with_accumulation_and_checkpointing(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "gradient_checkpointing": True}
    trainer = trainer_of(tmp_path, adapted("llama", "lora"), options)
    assert isinstance(trainer.model, peft.PeftModel)
    watch = Watch(trainer)
    trainer.train()
    agrees(watch, adapted("llama", "lora"), TokenLoss())
