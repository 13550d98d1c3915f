"""Callbacks and logs: public figures after every segment, and schedulers that fit the length of the run."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from refusals import raises_code
from stopping import During, Killed, die
from torch.optim import lr_scheduler

import lamina


class Heard(lamina.Callback):
    def __init__(self) -> None:
        self.told: list[tuple[str, lamina.RunFigures]] = []

    def on_segment(self, now: lamina.RunFigures) -> None:
        self.told.append(("segment", now))

    def on_evaluation(self, now: lamina.RunFigures) -> None:
        self.told.append(("evaluation", now))


def evaluation(**options: Any) -> lamina.Evaluation:
    return lamina.Evaluation(function=lambda model: {"acc": 0.5}, on="public", **options)


def test_callbacks_are_told_epsilon_and_evaluations_and_nothing_else(tmp_path: Path) -> None:
    heard = Heard()
    outcome = problem.trainer(tmp_path / "a", steps=12, evaluate=evaluation(every=2), callbacks=[heard]).fit()
    assert [(kind, now.step) for kind, now in heard.told] == [
        ("evaluation", 0), ("segment", 5), ("evaluation", 10), ("segment", 10), ("evaluation", 12), ("segment", 12),
    ]  # fmt: skip
    last = heard.told[-1][1]
    assert last.epsilon == {name: outcome.epsilon[name] for name in ("clinical", "sensitive")}
    assert last.steps == 12 and last.evaluation == {"acc": 0.5}
    assert not heard.told[1][1].evaluation
    assert {f.name for f in fields(lamina.RunFigures)} == {"step", "steps", "epsilon", "evaluation", "noise"}
    plan = problem.trainer(tmp_path / "b", steps=12).plan
    assert last.noise == {layer.name: s for layer, s in zip(plan.layers, plan.noise, strict=True)}


def test_a_callback_ends_the_run_between_two_segments(tmp_path: Path) -> None:
    class Stops(lamina.Callback):
        def on_segment(self, now: lamina.RunFigures) -> None:
            self.stop = now.step >= 5

    outcome = problem.trainer(tmp_path / "a", steps=12, callbacks=[Stops()]).fit()
    assert outcome.steps == 5 and any("a callback stopped it" in note for note in outcome.notes)
    assert outcome.epsilon["clinical"] < problem.trainer(tmp_path / "b", steps=12).plan.epsilon("clinical")
    again = problem.trainer(tmp_path / "a", steps=12).fit()  # the run is finished: only read
    assert again.steps == 5 and again.epsilon == outcome.epsilon


def test_what_is_no_callback_is_refused_and_one_that_fails_is_named(tmp_path: Path) -> None:
    with raises_code("train.callback-not-a-callback"):
        problem.trainer(tmp_path / "a", callbacks=[print])

    class Fails(lamina.Callback):
        def on_segment(self, now: lamina.RunFigures) -> None:
            raise ZeroDivisionError

    with raises_code("train.user-code-failed") as caught:
        problem.trainer(tmp_path / "a", steps=10, callbacks=[Fails()]).fit()
    assert "Fails" in caught.value.problem
    assert problem.trainer(tmp_path / "a", steps=10).fit().steps == 10


def read_log(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(text.splitlines())]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_log_has_one_row_for_each_segment_also_after_a_kill(tmp_path: Path, form: str) -> None:
    given: dict[str, Any] = {"steps": 12, "evaluate": evaluation(every=2), "log": form}
    with pytest.raises(Killed):
        problem.trainer(tmp_path / "a", progress=During({7: die}), **given).fit()
    outcome = problem.trainer(tmp_path / "a", **given).fit()
    rows = read_log(tmp_path / "a" / f"log.{form}")
    assert [row["step"] for row in rows] == [0, 5, 10, 12]
    assert ["eval_acc" in row for row in rows] == [True, False, True, True]
    assert rows[-1]["epsilon_clinical"] == outcome.epsilon["clinical"]
    assert set(rows[-1]) == {"step", "steps", "epsilon_clinical", "epsilon_sensitive", "eval_acc"}


def test_a_file_that_is_no_log_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.csv").write_text("name,value\nx,1\n", encoding="utf-8")
    with raises_code("train.log-unreadable"):
        problem.trainer(tmp_path / "a", log="csv")
    with raises_code("train.log-form"):
        problem.trainer(tmp_path / "a", log="xlsx")


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_counts_epochs_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model = problem.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}
    with raises_code("train.scheduler-does-not-fit") as caught:
        problem.trainer(tmp_path / "a", **given)
    assert type(given["scheduler"]).__name__ in caught.value.problem
    problem.trainer(tmp_path / "a", interval="epoch", **given)  # 24 steps are two epochs
    with raises_code("train.interval-unknown"):
        problem.trainer(tmp_path / "a", interval="day", **given)


def test_a_scheduler_by_epoch_is_stepped_once_per_pass(tmp_path: Path) -> None:
    """The populations are 480, the batch is 48: ten steps are an epoch, also across a kill."""
    model = problem.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    note = {step: (lambda: rates.append(optimizer.param_groups[0]["lr"])) for step in (9, 10, 19, 20, 24)}
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "interval": "epoch"}
    problem.trainer(tmp_path / "a", progress=During(note), **given).fit()
    assert rates == [0.1, 0.05, 0.05, 0.025, 0.025]
