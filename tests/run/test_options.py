"""Options of a run: declared once for the trainer, for RUN.toml and for help; and one that is declared from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import problem
import pytest
import torch
from refusals import raises_code

import lamina
from lamina.cli.run_file import RunFile, run_template
from lamina.run import options as declarations
from lamina.run.options import OPTIONS, Count, Option, declare, options_help, settled


def test_the_declarations_need_no_torch() -> None:
    code = "import sys; from lamina.run.options import OPTIONS; print(len(OPTIONS), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(len(OPTIONS)), "False"]


def test_every_option_has_help_which_the_trainer_shows() -> None:
    for name, option in OPTIONS.items():
        assert option.help, name
        assert f"    {name} " in str(lamina.Trainer.__doc__) and option.help in str(lamina.Trainer.__doc__)
        assert option.toml is None or option.example or name in ("proxy", "evaluate"), name


def test_options_that_are_not_given_have_their_defaults() -> None:
    assert settled({}) == {name: option.default for name, option in OPTIONS.items()}
    assert settled({"views": 3})["views"] == 3


def test_an_unknown_option_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with raises_code("train.option-unknown") as caught:
        problem.trainer(tmp_path / "a", microbatch=2)
    assert "did you mean 'microbatches'" in caught.value.problem


def test_an_option_of_steps_differs_after_a_resume(tmp_path: Path) -> None:
    problem.trainer(tmp_path / "a").fit()
    again = problem.trainer(tmp_path / "a", microbatches=2).fit()
    assert any("options differ" in note for note in again.notes)


def _scale_losses(trainer: lamina.Trainer, scale: float | None) -> None:
    if scale is not None:
        loss = trainer.loss_fn
        trainer.loss_fn = lambda output, y: scale * loss(output, y)


SCALE = Option(
    help="multiply every loss by this number", toml=float, example="2.0", apply=_scale_losses, steps=True,
    read=lambda value, run: value * run.plan.steps / run.plan.steps,
)  # fmt: skip


@pytest.fixture
def loss_scale() -> Iterator[str]:
    """An option that is declared outside of the package, and gone after the test."""
    declare("loss_scale", SCALE)
    yield "loss_scale"
    declarations._options.pop("loss_scale")


def test_an_outside_option_is_an_option_of_the_trainer(tmp_path: Path, loss_scale: str) -> None:
    """Clipped to the same norm, scaled losses give other gradients; the same scale gives the same weights."""
    weights = []
    for folder, given in (("a", {}), ("b", {loss_scale: 1e-3}), ("c", {loss_scale: 1e-3})):
        model = problem.net()
        made: dict[str, Any] = {"model": model, "run_seed": 3, **given}
        problem.trainer(tmp_path / folder / "run", **made).fit()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2])
    assert f"{loss_scale} " in options_help()


def test_an_outside_option_is_a_key_of_a_run_file(loss_scale: str) -> None:
    text = run_template()
    assert "# loss_scale = 2.0" in text and SCALE.help in text
    assert RunFile.parse(f"{loss_scale} = 0.5\n{text}").options[loss_scale] == 0.5
    with raises_code("plan.policy-invalid"):
        RunFile.parse(f"{loss_scale} = 'half'\n{text}")


def test_a_run_that_is_resumed_with_another_value_says_so(tmp_path: Path, loss_scale: str) -> None:
    problem.trainer(tmp_path / "a", **{loss_scale: 1.0}).fit()
    again = problem.trainer(tmp_path / "a", **{loss_scale: 2.0}).fit()
    assert any("options differ" in note for note in again.notes)


@pytest.mark.parametrize("name", ["seed", "no name"])
def test_an_outside_option_replaces_none(name: str) -> None:
    with raises_code("train.option-not-declared"):
        declare(name, SCALE)


def test_an_outside_option_replaces_no_other_key_of_a_run_file() -> None:
    declare("policy", Option(help="another policy", toml=Count, example="1"))
    try:
        with raises_code("train.option-not-declared"):
            run_template()
    finally:
        declarations._options.pop("policy")
