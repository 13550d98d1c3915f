"""`PrivateTrainer`: the run is Lamina's to the last bit, the surface is that of transformers, nothing private shows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted_models import WORDS, adapted, base_model, texts
from by_hand import QUIET
from refusals import raises_code
from torch import Tensor, nn

import lamina
from lamina.integrations.huggingface import PrivateTrainer
from lamina.integrations.tokens import TokenLoss, token_corpus
from lamina.run.code_fingerprint import CodeFingerprint

pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:.*use_cache=True")]
PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 0.1}
PUBLIC = [{"input_ids": ids[:8], "labels": ids[:8]} for ids in ([3, 4, 5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4, 3, 2])]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return a folder inside a folder of this test, because the run and its ledger are written beside output_dir."""
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def corpus_of(count: int = 60) -> lamina.Corpus:
    return token_corpus(texts(count), length=8, pad=0, unit=[i // 2 for i in range(count)], unit_name="patient")


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    standard: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 6, "max_grad_norm": 0, "logging_steps": 2,
        "learning_rate": 1e-2, "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "optim": "adamw_torch",
    }  # fmt: skip
    return transformers.TrainingArguments(**{**standard, **options})


def trainer_of(
    folder: Path, model: nn.Module | None = None, options: dict[str, Any] | None = None, **given: Any
) -> Any:
    model = adapted("llama", "lora") if model is None else model
    standard: dict[str, Any] = {"train_dataset": corpus_of(), "privacy": PRIVACY, "probe": False}
    return PrivateTrainer(model, arguments(folder, **(options or {})), **{**standard, **given})


class Told(transformers.TrainerCallback):
    """Notes what it is told, and what the model writes at that moment."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []
        self.written: list[Tensor] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.events.append(f"evaluate {state.global_step}")
        prompt = torch.tensor([[3, 4]])
        self.written.append(model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"save {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append("end")


def test_a_run_shows_what_transformers_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, model = Told(), adapted("llama", "lora")
    keys = list(model.state_dict())
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 6,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3,
        "optim": "adamw_torch", "weight_decay": 0.01,
    }  # fmt: skip
    trainer = trainer_of(
        tmp_path, model, options, eval_dataset=PUBLIC, eval_on="public", callbacks=[told],
        compute_metrics=lambda p: {"spread": float(p.predictions.std())}, probe=True,
    )  # fmt: skip
    result = trainer.train()
    assert trainer.plan.steps == 6 and trainer.plan.batch == 6
    assert told.events == ["evaluate 0", "evaluate 2", "save 2", "evaluate 4", "save 4", "evaluate 6", "save 6", "end"]
    assert all(written.shape == (1, 5) for written in told.written)
    figures = {name for logs in told.logs for name in logs}
    assert figures == {"epsilon", "learning_rate", "epoch", "eval_loss", "eval_spread"}
    epsilon = [logs["epsilon"] for logs in told.logs if "epsilon" in logs]
    assert (
        epsilon == sorted(epsilon) and math.isclose(epsilon[-1], trainer.outcome.epsilon["data"]) and epsilon[-1] <= 8
    )
    assert result.global_step == 6 and math.isnan(result.training_loss) and result.metrics == {"epsilon": epsilon[-1]}
    rates = [logs["learning_rate"] for logs in told.logs if "learning_rate" in logs]
    assert rates[0] == 1e-2 and rates[-1] < 1e-3  # warm after two steps, then a cosine
    assert "'epsilon'" in capsys.readouterr().out
    assert list(model.state_dict()) == keys
    saved = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert saved == ["checkpoint-6"]
    names = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in names and not {"rng_state.pth", "optimizer.pt", "scheduler.pt"} & names
    again = peft.PeftModel.from_pretrained(base_model("llama"), tmp_path / "checkpoint-6")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    assert not trainer.outcome.certificate.reasons
    assert trainer.evaluate()["eval_loss"] > 0 and trainer.predict(PUBLIC).metrics["test_loss"] > 0


def lamina_alone(folder: Path, steps: int = 4) -> nn.Module:
    """What `PrivateTrainer` must come to, with `lamina.Trainer` and an optimiser by hand."""
    model = adapted("llama", "lora")
    engine, corpus, plan = lamina.make_private(model, corpus_of(), batch=6, steps=steps, **PRIVACY)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], 1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    lamina.Trainer(
        model, optimizer, TokenLoss(), corpus, plan, engine=engine, folder=folder, scheduler=schedule, segment=2, seed=3,
        probe=False, progress=False,
    ).fit()  # fmt: skip
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_the_run_is_the_one_of_lamina(tmp_path: Path) -> None:
    """The same seeds, the same weights: transformers adds nothing to a step."""
    trainer = trainer_of(tmp_path / "a", seed=3)
    trainer.train()
    assert same(trainer.model, lamina_alone(tmp_path / "b"))


class Unplugged(transformers.TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    stopped = trainer_of(tmp_path / "a", seed=3, callbacks=[Unplugged()])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = trainer_of(tmp_path / "a", seed=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.outcome.steps == 4
    assert same(resumed.model, lamina_alone(tmp_path / "b"))
    whole = trainer_of(tmp_path / "c")
    whole.train()
    assert math.isclose(resumed.outcome.epsilon["data"], whole.outcome.epsilon["data"])
    with raises_code("integrations.ordinary-checkpoint"):
        resumed.train(resume_from_checkpoint=str(tmp_path))


def test_another_process_describes_the_same_model() -> None:
    """Otherwise the same program would be another one after a crash, and its open segment charged again."""
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1] / 'support')]!r}\n"
        "from adapted_models import adapted\n"
        "from lamina.run.code_fingerprint import CodeFingerprint\n"
        "model = adapted('llama', 'lora')\n"
        "print(CodeFingerprint(model).describe(model))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    model = adapted("llama", "lora")
    found = CodeFingerprint(model)
    assert said.stdout.strip() == found.describe(model) and not found.unknown


def test_early_stopping_and_the_best_weights(tmp_path: Path) -> None:
    """Both follow public figures, so they cost nothing; the run ends between two segments."""
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1, "max_steps": 5, "load_best_model_at_end": True,
        "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "falling", "greater_is_better": True,
    }  # fmt: skip
    figures = iter([0.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0])  # the first is the rehearsal's
    weights: dict[int, dict[str, Tensor]] = {}

    class Keep(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            weights[state.global_step] = {name: t.clone() for name, t in model.state_dict().items()}

    trainer = trainer_of(
        tmp_path, options=options, eval_dataset=PUBLIC, eval_on="simulated",
        compute_metrics=lambda p: {"falling": next(figures)}, callbacks=[transformers.EarlyStoppingCallback(2), Keep()],
    )  # fmt: skip
    trainer.train()
    assert trainer.outcome.steps == 3 and any("a callback stopped it" in note for note in trainer.outcome.notes)
    assert trainer.outcome.epsilon["data"] < trainer.plan.epsilon(0)
    assert all(torch.equal(t, weights[1][name]) for name, t in trainer.model.state_dict().items())


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}])
def test_options_that_a_private_run_keeps(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = trainer_of(tmp_path, adapted("gpt2", "lora"), options)
    trainer.train()
    assert trainer.outcome.steps == 4 and trainer.outcome.private
    assert trainer.loss_fn == TokenLoss(smoothing=options.get("label_smoothing_factor", 0.0))


def test_a_classifier(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    corpus = token_corpus(texts(40), length=8, pad=0, labels=[i % 3 for i in range(40)])
    options = {"num_train_epochs": 0.5, "max_steps": -1, "per_device_train_batch_size": 4}
    trainer = trainer_of(tmp_path, transformers.BertForSequenceClassification(config), options, train_dataset=corpus)
    trainer.train()
    assert trainer.plan.steps == 5 and trainer.state.epoch == 0.5


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    model, corpus = adapted("llama", "ia3"), corpus_of()
    engine, corpus, plan = lamina.make_private(model, corpus, batch=6, steps=4, **PRIVACY)  # type: ignore[arg-type]
    given = {"train_dataset": corpus, "plan": plan, "engine": engine, "privacy": None}
    for options in ({"max_steps": 5}, {"per_device_train_batch_size": 5}):
        with raises_code("integrations.plan-not-of-arguments"):
            trainer_of(tmp_path, model, options, **given)
    with raises_code("integrations.privacy-or-plan"):
        trainer_of(tmp_path, model, **{**given, "privacy": PRIVACY})
    trainer = trainer_of(tmp_path, model, **given)
    trainer.train()
    assert trainer.outcome.steps == 4


# ------------------------------------------------------------------------------- what is refused

REFUSED: list[dict[str, Any]] = [
    {"max_grad_norm": 1.0},
    {"train_sampling_strategy": "group_by_length"},
    {"dataloader_drop_last": True},
    {"data_seed": 1},
    {"auto_find_batch_size": True},
    {"include_num_input_tokens_seen": True},
    {"skip_memory_metrics": False},
    {"debug": "underflow_overflow"},
    {"use_liger_kernel": True},
    {"neftune_noise_alpha": 5.0},
    {"optim": "lomo"},
    {"optim": "galore_adamw_layerwise"},
    {"optim_target_modules": ["attn"]},
    {"bf16_full_eval": True},
    {"resume_from_checkpoint": "checkpoint-10"},
    {"logging_strategy": "epoch"},
    {"eval_strategy": "epoch"},
    {"save_strategy": "epoch"},
]


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: " ".join(map(str, options.items())))
def test_arguments_that_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with raises_code("integrations.argument-refused") as caught:
        trainer_of(tmp_path, nn.Linear(2, 2), options, eval_dataset=PUBLIC, eval_on="public")
    assert next(iter(options)) in caught.value.problem and caught.value.remedy


@pytest.mark.parametrize("name", ["fp16", "torch_compile", "deepspeed", "fsdp"])
def test_arguments_that_need_other_machines_are_refused(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    setattr(args, name, True)
    with raises_code("integrations.argument-refused"):
        PrivateTrainer(nn.Linear(2, 2), args, train_dataset=corpus_of(), privacy=PRIVACY)


def test_schedules_that_follow_a_figure_are_refused(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "metric_for_best_model": "loss"}
    trainer = trainer_of(tmp_path, options=options, eval_dataset=PUBLIC, eval_on="public")
    with raises_code("train.scheduler-follows-loss"):
        trainer.train()
    assert not trainer.folder.exists()


def test_a_run_does_not_live_where_a_hub_uploads_everything(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for place in (".", "run", "a/../b/run"):
        with raises_code("integrations.run-inside-output"):
            PrivateTrainer(nn.Linear(2, 2), args, train_dataset=corpus_of(), privacy=PRIVACY, folder=tmp_path / place)
    trainer = trainer_of(tmp_path, options={"save_strategy": "no"})
    trainer.train()
    assert trainer.folder.exists() and tmp_path not in trainer.folder.parents
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["evaluate", "segment", "microbatches", "scheduler"])
def test_options_that_transformers_sets_are_refused(tmp_path: Path, name: str) -> None:
    with raises_code("train.option-taken"):
        PrivateTrainer(
            nn.Linear(2, 2), arguments(tmp_path), train_dataset=corpus_of(), privacy=PRIVACY, **{name: 1}
        )  # fmt: skip


class Peek(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None: ...


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any: ...


def test_what_would_look_into_a_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("integrations.callback-of-steps"):
        trainer_of(tmp_path, callbacks=[Peek])
    trainer = trainer_of(tmp_path)
    with raises_code("integrations.callback-of-steps"):
        trainer.add_callback(Peek())
    with raises_code("integrations.figure-not-public"):
        trainer.log({"loss": 1.0})
    with raises_code("integrations.no-train-loader"):
        trainer.get_train_dataloader()
    with raises_code("integrations.search-on-private-data"):
        trainer.hyperparameter_search()
    with raises_code("integrations.search-on-private-data"):
        trainer.train(trial={})
    with raises_code("integrations.method-not-called"):
        OwnLoss(adapted("llama", "lora"), arguments(tmp_path), train_dataset=corpus_of(), privacy=PRIVACY)
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    with raises_code("integrations.argument-refused"):
        trainer_of(tmp_path, options={"report_to": "wandb"})


def test_data_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    with raises_code("train.data-not-a-corpus"):
        trainer_of(tmp_path, train_dataset=PUBLIC)
    with raises_code("train.data-not-a-corpus"):
        trainer_of(tmp_path, train_dataset=torch.utils.data.DataLoader([1]))
    with raises_code("integrations.arguments-missing"):
        PrivateTrainer(adapted("llama", "lora"), None, train_dataset=corpus_of(), privacy=PRIVACY)
    with raises_code("integrations.steps-not-whole-segments"):
        trainer_of(tmp_path, options={"save_strategy": "steps", "save_steps": 3}).train()


def test_how_long_something_took_is_not_logged(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, eval_dataset=PUBLIC, eval_on="public", options={"eval_strategy": "steps", "eval_steps": 2}
    )
    trainer.train()
    assert "eval_runtime" in trainer.evaluate()  # told to who asks, of public data
    names = {name for line in trainer.state.log_history for name in line}
    assert "eval_loss" in names and not [n for n in names if "runtime" in n or "per_second" in n or "time" in n]


def test_an_evaluation_is_declared_public(tmp_path: Path) -> None:
    corpus = corpus_of()
    with raises_code("train.evaluation-on-private-data"):
        trainer_of(tmp_path, eval_dataset=PUBLIC)
    with raises_code("train.evaluation-on-private-data"):
        trainer_of(tmp_path, eval_dataset=PUBLIC, eval_on="private")
    with raises_code("train.evaluation-on-private-data"):
        trainer_of(tmp_path, eval_dataset=corpus, train_dataset=corpus, eval_on="public")
    trainer = trainer_of(tmp_path, train_dataset=corpus)
    for ask in (trainer.evaluate, trainer.predict):
        with raises_code("train.evaluation-on-private-data"):
            ask(PUBLIC)


def test_nothing_of_transformers_is_imported_by_lamina(tmp_path: Path) -> None:
    import subprocess
    import sys

    names = ("transformers", "peft", "pytorch_lightning", "wandb", "mlflow", "tensorboard", "accelerate")
    code = f"import lamina, lamina.run, lamina.cli.app, sys, json; print(json.dumps([n for n in {names} if n in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
