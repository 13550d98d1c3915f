"""Things by name, and whose line it was when one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from refusals import raises_code
from torch import nn

from lamina.cli import by_name
from lamina.cli.by_name import OPTIMIZERS, SCHEDULERS, make_optimizer, make_scheduler
from lamina.errors import LaminaError
from lamina.run.run_output import failing_layer, failing_layer_and_input, user_code, user_line, withhold_text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("lamina_test_")]:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "lamina_test_nets") -> str:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return name


def problem_of(name: str, folder: Path, **arguments: object) -> str:
    with pytest.raises(LaminaError) as caught:
        by_name.make_model(name, arguments, beside=folder)
    assert caught.value.remedy
    return caught.value.problem


def test_a_model_by_factory_class_or_instance(folder: Path) -> None:
    module = write(folder, "from torch import nn\nmodel = nn.Linear(2, 2)\nclass A:\n    Net = nn.Linear\n")
    assert isinstance(by_name.make_model(f"{module}:model", beside=folder), nn.Linear)
    made = by_name.make_model(f"{module}:A.Net", {"in_features": 3, "out_features": 5}, beside=folder)
    assert made.weight.shape == (5, 3)
    assert "takes no args" in problem_of(f"{module}:model", folder, width=3)


@pytest.mark.parametrize("name", by_name.BUILT_IN_MODELS)
def test_built_in_models(name: str) -> None:
    assert isinstance(by_name.make_model(name), nn.Module)


def test_what_is_not_there_is_named(folder: Path) -> None:
    module = write(folder, "def build(width): ...\ndef broken(): return 3\n")
    nowhere = problem_of("lamina_test_nowhere:build", folder)
    assert "no module 'lamina_test_nowhere'" in nowhere
    assert str(folder) in nowhere
    assert "did you mean 'build'" in problem_of(f"{module}:biuld", folder)
    assert "'depth'" in problem_of(f"{module}:build", folder, depth=3)
    assert "missing a required argument: 'width'" in problem_of(f"{module}:build", folder)
    assert "made a int" in problem_of(f"{module}:broken", folder)
    assert "did you mean 'residual'" in problem_of("residul", folder)


def test_the_users_line_is_named(folder: Path) -> None:
    module = write(folder, "\n\ndef build():\n    return make()\n\ndef make():\n    raise ValueError('too wide')\n")
    told = problem_of(f"{module}:build", folder)
    assert "ValueError: too wide" in told
    assert f"{module}.py:7, in make" in told


def test_a_line_in_a_library_is_not_the_users(folder: Path) -> None:
    """torch raises deep inside; the line to look at is the one that called it."""
    text = "import json\n\ndef build():\n    return json.loads('{')\n"
    assert ".py:4, in build" in problem_of(f"{write(folder, text)}:build", folder)


def test_a_line_of_ours_is_not_the_users(folder: Path) -> None:
    text = "from lamina.plan.table import epsilon_text\n\ndef build():\n    return epsilon_text('x')\n"
    assert ".py:4, in build" in problem_of(f"{write(folder, text)}:build", folder)


def test_a_module_that_cannot_be_imported(folder: Path) -> None:
    syntax = write(folder, "x = 1\ndef build(:\n", name="lamina_test_syntax")
    assert f"{syntax}.py:2" in problem_of(f"{syntax}:build", folder)
    inner = write(folder, "import lamina_test_missing\n", name="lamina_test_importer")
    told = problem_of(f"{inner}:build", folder)
    assert "lamina_test_missing" in told
    assert f"{inner}.py:1" in told


def test_a_refusal_passes_as_it_is() -> None:
    refusal = LaminaError("cli.mine", "mine", "do that")
    with pytest.raises(LaminaError) as caught, user_code("x", "y"):
        raise refusal
    assert caught.value is refusal


# ------------------------------------------------------------------------------------ layers


def failing() -> tuple[nn.Module, Exception]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(5, 3)))
    try:
        model(torch.randn(17, 4))
    except RuntimeError as error:
        return model, error
    raise AssertionError


def test_the_layer_is_named() -> None:
    model, error = failing()
    assert failing_layer(error, model) == "1.0"
    told = failing_layer_and_input(error, model)
    assert told is not None
    assert "layer '1.0', Linear(in_features=5, out_features=3, bias=True), was given float32 (17, 6)" in told
    assert failing_layer(ValueError("elsewhere"), model) is None
    assert failing_layer(error, nn.Linear(1, 1)) is None  # of another model


def test_in_training_neither_sizes_nor_texts_are_told() -> None:
    model, error = failing()
    assert "17" in str(error)
    told = withhold_text(error, model)
    assert "17" not in str(told)
    assert "layer '1.0'" in told.problem
    assert "RuntimeError" in told.problem
    assert f"{Path(__file__).name}:" in told.problem


def test_place_of_an_error_without_traceback() -> None:
    assert user_line(ValueError("never raised")) is None


# ------------------------------------------------------------------------------------ optimisers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps(name: str) -> None:
    model = nn.Linear(3, 3)
    made = make_optimizer(name, {}, model)
    model(torch.randn(2, 3)).sum().backward()
    before = model.weight.detach().clone()
    made.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_lasts_the_run(name: str) -> None:
    """As many steps as the run has, without a warning or an error (both fail here), and plain state."""
    needed = {"step": {"step_size": 2}, "multi_step": {"milestones": [2, 4]}, "exponential": {"gamma": 0.9}}
    over = make_optimizer("sgd", {"lr": 0.1}, nn.Linear(2, 2))
    made = make_scheduler(name, needed.get(name, {}), over, 7)
    for _ in range(7):
        over.step()
        made.step()
    made.load_state_dict(made.state_dict())


def test_cosine_ends_at_zero_after_the_run() -> None:
    over = make_optimizer("adam", {"lr": 0.1, "betas": [0.8, 0.9]}, nn.Linear(2, 2))
    assert over.defaults["betas"] == (0.8, 0.9)
    made = make_scheduler("cosine", {}, over, 5)
    for _ in range(5):
        over.step()
        made.step()
    assert over.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("adm", {}, "did you mean 'adam'"),
        ("lbfgs", {}, "several gradients in one step"),
        ("LBFGS", {}, "several gradients in one step"),
        ("adam", {"learning_rate": 0.1}, "'learning_rate'"),
        ("adam", {"params": []}, "params"),
        ("adam", {"lr": -1.0}, "Invalid learning rate"),
        ("sgd", {"lr": "fast"}, "optimizer 'sgd' cannot be made"),
    ],
)
def test_wrong_optimizers_are_refused(name: str, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(LaminaError) as caught:
        make_optimizer(name, arguments, nn.Linear(2, 2))
    assert words in caught.value.problem
    assert caught.value.remedy


def test_a_schedule_that_follows_the_loss_is_refused() -> None:
    over = make_optimizer("sgd", {}, nn.Linear(2, 2))
    with raises_code("cli.optimizer-not-private"):
        make_scheduler("plateau", {}, over, 5)
    with raises_code("cli.arguments-do-not-fit"):
        make_scheduler("step", {}, over, 5)
