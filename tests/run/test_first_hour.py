"""What a newcomer does in the first hour, and what is said to them: ids among inputs, missing values, losses, loaders."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from refusals import raises_code
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lamina
from lamina import Corpus
from lamina.run.column_checks import ConstantColumn
from lamina.run.corpus import LoaderReplaced

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": RNG.normal(size=12), "bmi": RNG.normal(size=12), "PatientID": np.arange(12) // 3,
        "ward": ["a", "b"] * 6, "sick": np.arange(12) % 2,
    }
)  # fmt: skip
NUMBERS = ["age", "bmi"]


def rows_of(corpus: Corpus) -> Any:
    return corpus.source.fetch(np.arange(len(corpus.source)))


# ------------------------------------------------------------------------------------------------ whose rows they are


def test_a_column_of_ids_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    FRAME[["age", "bmi", "PatientID", "sick"]].to_csv(path, index=False)
    for make in (
        lambda: Corpus.of_csv(path, y="sick"),
        lambda: Corpus.of_frame(FRAME, x=[*NUMBERS, "PatientID"], y="sick"),
        lambda: Corpus(FRAME[[*NUMBERS, "PatientID"]], FRAME["sick"]),
        lambda: Corpus({"age": FRAME["age"].to_numpy(), "PatientID": FRAME["PatientID"].to_numpy()}),
    ):
        with raises_code("corpus.id-among-inputs") as refused:
            make()
        assert "'PatientID'" in refused.value.problem and "unit='PatientID'" in refused.value.remedy
    corpus = Corpus.of_csv(path, y="sick", unit="PatientID")
    assert len(corpus) == 4 and rows_of(corpus)[0].shape == (12, 2) and corpus.unit_name == "PatientID"
    assert len(Corpus.of_csv(path, y="sick", unit="each")) == 12  # it is meant


def test_text_ids_get_the_same_remedy(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("age,patient,ward\n1,P01,x\n2,P01,y\n")
    with raises_code("corpus.value-not-a-number") as refused:
        Corpus.of_csv(path, x=["age", "patient"])
    assert "unit='patient'" in refused.value.remedy and "leave" not in refused.value.remedy
    with raises_code("corpus.inputs-are-text") as refused:
        Corpus(pd.read_csv(path))
    assert "unit='patient'" in refused.value.remedy
    with raises_code("corpus.inputs-are-text") as refused:  # a category, or an id by another name
        Corpus.of_frame(FRAME, y="sick", unit="PatientID")
    assert "'ward'" in refused.value.problem and "x=[…]" in refused.value.remedy


@pytest.mark.parametrize(("name", "values"), [("case", [0, 1, 1]), ("id", [0.5, 1.5, 2.5]), ("age", [1, 2, 3])])
def test_labels_fractions_and_other_names_are_no_ids(name: str, values: list[float]) -> None:
    assert len(Corpus(pd.DataFrame({name: values}))) == 3


def test_a_frame_is_read_by_column_names() -> None:
    corpus = Corpus.of_frame(FRAME, x=NUMBERS, y="sick", unit="PatientID")
    x, y = rows_of(corpus)
    assert x.tolist() == FRAME[NUMBERS].to_numpy().astype(np.float32).tolist() and y.tolist() == FRAME["sick"].tolist()
    assert len(corpus) == 4 and corpus.layout.sizes(np.arange(4)).tolist() == [3, 3, 3, 3]
    same = Corpus(FRAME[NUMBERS].to_numpy(), FRAME["sick"].to_numpy(), unit=FRAME["PatientID"].to_numpy())
    assert corpus.digest(b"k") == same.digest(b"k")
    with raises_code("corpus.column-unknown"):
        Corpus.of_frame(FRAME, x=["height"])
    with raises_code("corpus.not-a-frame"):
        Corpus.of_frame(np.zeros((2, 2)))
    with raises_code("corpus.labels-are-text"):
        Corpus.of_frame(FRAME, x=NUMBERS, y="ward")


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_missing_and_infinite_values_are_refused_or_zeroed(tmp_path: Path, wrong: float) -> None:
    x = np.ones((5, 2), np.float32)
    x[:, 0], x[3, 1] = np.arange(5), wrong
    path = tmp_path / "t.csv"
    pd.DataFrame(x, columns=["a", "b"]).to_csv(path, index=False)
    frame = pd.DataFrame(x, columns=["a", "b"])
    items = TensorDataset(torch.from_numpy(x), torch.zeros(5), torch.zeros(5))
    pairs = [(row[0], 0.0) for row in items]
    makers: list[Any] = [
        lambda **o: Corpus(x, **o), lambda **o: Corpus(torch.from_numpy(x), **o), lambda **o: Corpus(frame, **o),
        lambda **o: Corpus.of_frame(frame, **o), lambda **o: Corpus.of_csv(path, **o), lambda **o: Corpus({"u": x}, **o),
    ]  # fmt: skip
    for make in makers:
        with raises_code("corpus.value-missing") as refused:
            make()
        assert "nan='zero'" in refused.value.remedy
        found = torch.utils._pytree.tree_leaves(rows_of(make(nan="zero"))[0])[0]
        assert found[3].tolist() == [3, 0] and found[2].tolist() == [2, 1]

    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, row: int) -> Any:
            return pairs[row]

    with raises_code("corpus.value-missing") as refused:
        Corpus(Pairs()).digest(b"k")
    assert "x[3][1]" in refused.value.problem
    filled = Corpus(Pairs(), nan="zero")
    assert rows_of(filled)[0][3].tolist() == [3, 0] and len(filled.digest(b"k")) == 32
    with raises_code("corpus.nan-unknown"):
        Corpus(x, nan="mean")


def test_filling_is_part_of_the_digest_and_a_version_is_not_read_whole() -> None:
    x = np.ones((2000, 1), np.float32)
    assert Corpus(x).digest(b"k") != Corpus(x, nan="zero").digest(b"k")
    x[1500] = np.nan
    assert len(Corpus(x, version="1")) == 2000
    with raises_code("corpus.value-missing"):
        Corpus(x)


def test_a_constant_column_is_named() -> None:
    with pytest.warns(ConstantColumn, match="'one'") as caught:
        Corpus(pd.DataFrame({"one": [1.0, 1.0], "two": [1.0, 2.0]}))
    assert caught[0].filename == __file__
    Corpus(np.ones((3, 2)))  # pixels have no names


# ------------------------------------------------------------------------------------------------ losses


def out(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width))


class Flat(nn.Module):
    """One number per example without an axis of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = out(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]  # type: ignore[no-any-return]


BINARY = np.arange(24) % 2
BCE, CE, MSE = (kind(reduction="none") for kind in (nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.MSELoss))
LOSSES: dict[str, tuple[nn.Module, Any, Any]] = {
    "bce, (n, 1) against (n,)": (out(1), BCE, BINARY),
    "bce, (n, 1) against float (n,)": (out(1), BCE, BINARY.astype(np.float32)),
    "bce, whole (n, 1)": (out(1), BCE, BINARY[:, None]),
    "bce, losses (n, 1)": (out(1), BCE, BINARY[:, None].astype(np.float32)),
    "bce, (n,) against whole (n,)": (Flat(), BCE, BINARY),
    "bce of two outputs": (out(2), BCE, BINARY),
    "several labels": (out(3), BCE, np.stack([BINARY] * 3, 1)),
    "cross entropy of floats": (out(2), CE, BINARY.astype(np.float32)),
    "cross entropy of a column": (out(2), CE, BINARY[:, None]),
    "cross entropy of a float column": (out(2), CE, BINARY[:, None].astype(np.float32)),
    "cross entropy of one-hot rows": (out(2), CE, np.eye(2, dtype=np.int64)[BINARY]),
    "mse, (n, 1) against (n,)": (out(1), MSE, BINARY.astype(np.float32)),
    "mse by hand, all against all": (out(1), lambda o, y: F.mse_loss(o, y, reduction="none").mean(1), BINARY * 1.0),
}


def trainer_of(model: nn.Module, loss: Any, y: Any, folder: Path, **options: Any) -> lamina.Trainer:
    x = np.random.default_rng(1).normal(size=(24, 4)).astype(np.float32)
    engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=5.0, batch=8, steps=4, origin="first-hour")
    return lamina.Trainer(model, "auto", loss, corpus, plan, engine=engine, folder=folder, progress=False, **options)


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore", "ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_does_not_fit_is_told_the_line_that_does(tmp_path: Path, name: str) -> None:
    model, loss, y = LOSSES[name]
    with raises_code("train.model-or-loss-failed") as refused:
        trainer_of(model, loss, y, tmp_path / "a").rehearse()
    error = refused.value
    assert "(n" in error.problem and str(np.asarray(y).dtype).replace("float64", "float32") in error.problem
    line = error.remedy.removeprefix("give loss_fn=").partition("  #")[0]
    outcome = trainer_of(model, eval(line, {"F": F}), y, tmp_path / "b").fit()  # it is the message of this repository
    assert outcome.steps == 4


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_cross_entropy_of_one_output_is_told_of_bce(tmp_path: Path) -> None:
    with raises_code("train.labels-out-of-range") as refused:
        trainer_of(out(1), CE, BINARY, tmp_path / "a")
    assert "with one output, use BCE" in refused.value.remedy


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore", "ignore:Using a target size")
def test_widths_that_no_loss_joins(tmp_path: Path) -> None:
    with raises_code("train.model-or-loss-failed") as refused:
        trainer_of(out(3), MSE, BINARY.astype(np.float32), tmp_path / "a").rehearse()
    assert "one output for each of the 1 numbers" in refused.value.remedy and "(n, 3)" in refused.value.problem


# ------------------------------------------------------------------------------------------------ doors


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_a_loader_is_taken_for_its_dataset(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(24, 4), torch.from_numpy(BINARY))
    for shuffle in (False, True):
        with pytest.warns(LoaderReplaced, match="Poisson"):
            _, corpus, plan = lamina.make_private(
                out(2), DataLoader(data, batch_size=8, shuffle=shuffle), epsilon=5.0, batch=8, steps=2
            )
        assert corpus.digest(b"k") == Corpus(data).digest(b"k")
    model = out(2)
    with pytest.warns(LoaderReplaced):
        trainer = lamina.Trainer(model, "auto", CE, DataLoader(data), plan, folder=tmp_path / "run", progress=False)
    assert len(trainer.corpus) == 24


def test_what_is_no_module_is_named() -> None:
    from sklearn.linear_model import LogisticRegression

    data = (np.zeros((4, 2)), np.zeros(4))
    for model, words in {
        "resnet18": "torchvision.models",
        LogisticRegression(): "torch.nn.Linear",
        nn.Linear: "Linear(…)",
    }.items():
        with raises_code("train.model-not-a-module") as refused:
            lamina.make_private(model, data, epsilon=1.0, batch=2, steps=1)  # type: ignore[arg-type]
        assert words in refused.value.remedy


def test_a_wrong_keyword_suggests_the_right_one() -> None:
    calls: dict[str, Any] = {
        "'unit'": lambda: Corpus(np.zeros((2, 2)), units=[1, 2]),  # type: ignore[call-arg]
        "'epsilon'": lambda: lamina.make_private(out(2), np.zeros((2, 2)), epsiln=1.0, batch=1),  # type: ignore[call-arg]
        "'batch'": lambda: lamina.make_plan(None, None, batches=1),  # type: ignore[arg-type, call-arg]
    }
    for word, call in calls.items():
        with raises_code("corpus.keyword-unknown", "train.keyword-unknown", "plan.keyword-unknown") as refused:
            call()
        assert f"did you mean {word}" in refused.value.problem


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_the_outcome_predicts_and_notebooks_show_it(tmp_path: Path) -> None:
    model, x = out(2), np.random.default_rng(2).normal(size=(30, 4)).astype(np.float32)
    trainer = trainer_of(model, CE, BINARY, tmp_path / "run", device="cpu")
    outcome = trainer.fit()
    model.train()
    expected = model(torch.from_numpy(x))
    assert torch.equal(outcome.predict(x, batch=7), expected.detach()) and model.training
    assert torch.equal(outcome.predict(pd.DataFrame(x)), expected.detach())
    for shown in (outcome, trainer.plan, outcome.certificate):
        page = shown._repr_html_()
        assert page.startswith("<pre>") and "<pre>" not in page[5:] and "ε" in page
    loaded = lamina.Outcome(**{name: getattr(outcome, name) for name in outcome.__dataclass_fields__})
    with raises_code("train.model-not-here"):
        loaded.predict(x)
    with raises_code("train.device-unknown"):
        trainer_of(out(2), CE, BINARY, tmp_path / "b", device="cuda:99")
    assert "Another run on the same data adds to it" in " ".join(outcome.notes)


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
@pytest.mark.parametrize("figure", ["accuracy", "auc"])
def test_early_stopping_by_the_name_of_a_figure(tmp_path: Path, figure: str) -> None:
    x = torch.randn(40, 4)
    rule = lamina.Evaluation.on_data(figure, x, (x[:, 0] > 0).long(), on="public", patience=1)
    outcome = trainer_of(out(2), CE, BINARY, tmp_path / "run", evaluate=rule, segment=1).fit()
    assert 0 <= outcome.metrics[figure] <= 1 and (outcome.folder / "best.safetensors").is_file()
    with raises_code("train.evaluation-on-private-data"):
        lamina.Evaluation.on_data(figure, x, x, on="private")
    with raises_code("train.figure-unknown"):
        lamina.Evaluation.on_data("f2", x, x, on="public")


def test_figures_by_name_are_right() -> None:
    """Against scikit-learn."""
    from sklearn.metrics import accuracy_score, mean_absolute_error, mean_squared_error, roc_auc_score

    from lamina.run.publisher import _FIGURES

    scores, y = torch.tensor([0.1, 0.1, -2.0, 3.0, 0.4, -0.5]), torch.tensor([0, 1, 0, 1, 1, 1])
    two = torch.stack([-scores, scores], 1)
    expected = {
        "auc": roc_auc_score(y, scores), "accuracy": accuracy_score(y, scores > 0),
        "mse": mean_squared_error(y, scores), "mae": mean_absolute_error(y, scores),
    }  # fmt: skip
    for name, value in expected.items():
        for output in (scores, scores[:, None]) if name in ("mse", "mae") else (scores[:, None], two):
            assert _FIGURES[name](output, y) == pytest.approx(value, abs=1e-6)


@pytest.mark.filterwarnings("ignore::lamina.run.private.PlannedBefore")
def test_weak_protection_is_said_when_planning() -> None:
    x = np.random.default_rng(0).random((50, 4))
    weak, fair = (lamina.make_private(out(2), x, epsilon=e, batch=5, steps=3, unit="each")[2] for e in (30.0, 8.0))
    assert "protects class data weakly" in str(weak) and "weakly" not in str(fair)


def test_the_batches_of_the_probe_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, corpus, plan = lamina.make_private(
            out(2), (np.random.default_rng(0).random((20, 4)), np.zeros(20, int)), epsilon=3.0, batch=4, steps=2
        )
    assert "no steps of the plan" not in capsys.readouterr().err
    next(iter(corpus.batches(plan)))
    assert capsys.readouterr().err.count("no steps of the plan") == 1
    assert not engine.probed


STOPPED = """
import os, signal, sys
import numpy as np, torch, lamina

class Stop(lamina.Callback):
    def on_segment(self, now):
        os.kill(os.getpid(), signal.SIGINT)

model = torch.nn.Sequential(torch.nn.Linear(4, 2))
data = (np.random.default_rng(0).normal(size=(24, 4)), np.arange(24) % 2)
engine, corpus, plan = lamina.make_private(model, data, epsilon=5.0, batch=8, steps=4, origin="stop")
loss = torch.nn.CrossEntropyLoss(reduction="none")
lamina.Trainer(model, "auto", loss, corpus, plan, engine=engine, folder=sys.argv[1], segment=1, callbacks=[Stop()]).fit()
"""


def test_ctrl_c_ends_a_script_without_a_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "run it again to go on from here" in done.stderr.splitlines()[-1]
