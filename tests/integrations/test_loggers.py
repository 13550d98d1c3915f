"""Plans, profiling statistics, noise and ε arrive in TensorBoard, W&B and MLflow; a planted private figure does not."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapted_models import adapted, texts
from by_hand import QUIET
from refusals import raises_code
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers.integrations import TensorBoardCallback
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

import lamina
from lamina.integrations.huggingface import PrivateTrainer
from lamina.integrations.loggers import FigureLogger, MLflow, TensorBoard, WeightsAndBiases, plan_scalars
from lamina.integrations.tokens import token_corpus

PLANTED = 0.73125908203125  # exact in float32, so that no copy of it is rounded
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


def planted_loss(output: Tensor, y: Tensor) -> Tensor:
    """Every private loss is the same number: its mean, its sum over a known batch and its log are known, too."""
    return output.sum(1) * 0.0 + output.sum(1).sub(output.sum(1).detach()) + PLANTED


def wandb_offline(folder: Path, *given: Any) -> FigureLogger:
    return WeightsAndBiases(*given, mode="offline", project="lamina", dir=str(folder))


ADAPTERS: dict[str, Callable[..., FigureLogger]] = {
    "tensorboard": TensorBoard,
    "wandb": wandb_offline,
    "mlflow": MLflow,
}


def copies(value: float) -> list[bytes]:
    return [struct.pack(form, value) for form in ("<f", "<d", ">d")] + [
        f"{value:.6f}".encode(),
        f"{value:.6g}".encode(),
    ]


@pytest.fixture
def logged(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run under one of the loggers: the bytes of all its files, the plan, the measure, the outcome."""
    for name in ("WANDB_SILENT", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(80, 4), torch.randint(0, 2, (80,))
    stack = lamina.LayerStack.from_model(model)
    measure = lamina.measure(
        model, stack, x=torch.randn(32, 4), losses_of=lambda x, y: model(x).square().sum(1), proxy="simulated"
    )
    engine, corpus, plan = lamina.make_private(model, (x, y), epsilon=5.0, batch=8, steps=6, clip_norm=0.1)
    place = tmp_path / "board"
    place.mkdir()
    logger = ADAPTERS[request.param](place, plan, measure)
    evaluation = lamina.Evaluation(function=lambda model: {"public_auc": 0.8125}, on="public")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outcome = lamina.Trainer(
        model, optimizer, planted_loss, corpus, plan, engine=engine, folder=tmp_path / "run", segment=2, evaluate=evaluation,
        callbacks=[logger], probe=False, progress=False,
    ).fit()  # fmt: skip
    logger.close()
    if request.param == "wandb":
        wait_until_written(place)
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    return request.param, files, plan, measure, outcome


each_adapter = pytest.mark.parametrize("logged", ADAPTERS, indirect=True)


def wandb_records(path: Path) -> list[Any]:
    store = DataStore()
    store.open_for_scan(str(path))
    found = []
    try:
        while (data := store.scan_data()) is not None:
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(data)
    finally:
        store.close()
    return found


def has_ended(path: Path) -> bool:
    """Whether W&B's last record is there. W&B's reader asserts that records are whole, and one may be half written."""
    try:
        return any(record.WhichOneof("record_type") == "exit" for record in wandb_records(path))
    except AssertionError:
        return False


def wait_until_written(folder: Path) -> None:
    """W&B writes in a process of its own: its last record says that it is through."""
    path, deadline = next(folder.rglob("*.wandb")), time.monotonic() + 120
    while not has_ended(path):
        assert time.monotonic() < deadline, "W&B did not end its file"
        time.sleep(0.1)


def read_back(kind: str, files: dict[Path, bytes]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    if kind == "tensorboard":
        events = EventAccumulator(str(next(iter(files)).parent))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[name] = [(e.step, e.value) for e in events.Scalars(name)]
    elif kind == "mlflow":
        for path, data in files.items():
            if "metrics" in path.parts:
                name = "/".join(path.parts[path.parts.index("metrics") + 1 :])
                rows = [line.split() for line in data.decode().splitlines()]
                found[name] = [(int(step), float(value)) for _, value, step in rows]
    else:
        for record in wandb_records(next(path for path in files if path.suffix == ".wandb")):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name in row:
                if "/" in name:
                    found.setdefault(name, []).append((int(row["step"]), float(row[name])))
    return found


@each_adapter
def test_what_arrives(logged: Any) -> None:
    kind, files, plan, measure, outcome = logged
    found = read_back(kind, files)
    for name, value in plan_scalars(plan, measure).items():
        assert found[name][0] == (0, pytest.approx(value, rel=1e-6)), name
    assert {"noise/0", "clip/data/2", "profile/norms/0", "profile/harm/2", "plan/epsilon/data"} <= set(found)
    assert [step for step, _ in found["epsilon/data"]] == [0, 2, 4, 6]
    assert found["epsilon/data"][-1] == (6, pytest.approx(outcome.epsilon["data"], rel=1e-6))
    assert found["noise/0"][-1] == (6, pytest.approx(plan.noise[0], rel=1e-6))
    assert found["evaluation/public_auc"][-1] == (6, 0.8125)


@each_adapter
def test_a_planted_private_figure_reaches_no_file(logged: Any) -> None:
    _, files, *_ = logged
    assert files
    for path, data in files.items():
        for copy in copies(PLANTED):
            assert copy not in data, path
    public = [copy for data in files.values() for copy in copies(0.8125) if copy in data]
    assert public  # the search finds what was logged


class Kept(FigureLogger):
    """An adapter that keeps what it is given."""

    def __init__(self, plan: lamina.StepPlan) -> None:
        super().__init__(plan)
        self.texts: dict[str, str] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []

    def text(self, name: str, content: str) -> None:
        self.texts[name] = content

    def scalars(self, values: Any, step: int) -> None:
        self.rows.append((step, dict(values)))


def test_noise_that_a_rule_moves(tmp_path: Path) -> None:
    """The schedule of noise per layer, as the ledger records it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(80, 4), torch.randint(0, 2, (80,))
    engine, corpus, plan = lamina.make_private(
        model, (x, y), epsilon=5.0, batch=8, steps=6, clip_norm=0.1, allocate="quantile"
    )
    logger = Kept(plan)
    lamina.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(reduction="none"), corpus, plan, engine=engine,
        folder=tmp_path / "run", segment=2, callbacks=[logger], probe=False, progress=False,
    ).fit()  # fmt: skip
    assert set(logger.texts) == {"plan", "plan.json"}
    assert logger.rows[0] == (0, plan_scalars(plan))
    moved = {step: row["noise/0"] for step, row in logger.rows[1:]}
    assert list(moved) == [2, 4, 6] and len({*moved.values(), plan.noise[0]}) == 4


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with raises_code("integrations.not-a-plan"):
        TensorBoard(tmp_path, "plan")  # type: ignore[arg-type]


def test_settings_that_would_open_what_is_closed_are_refused() -> None:
    _, _, plan = lamina.make_private(
        nn.Linear(2, 1), (torch.randn(8, 2), torch.randn(8)), epsilon=5.0, batch=2, steps=2
    )
    with raises_code("train.option-taken"):
        WeightsAndBiases(plan, settings=None)


@each_adapter
def test_how_long_segments_took_is_not_logged(logged: Any) -> None:
    """The time of every figure is its step."""
    kind, files, *_ = logged
    if kind == "tensorboard":
        events = EventAccumulator(str(next(iter(files)).parent))
        events.Reload()
        times = [(e.step, e.wall_time) for e in events.Scalars("epsilon/data")]
    elif kind == "mlflow":
        rows = next(data for path, data in files.items() if path.parts[-3:] == ("metrics", "epsilon", "data"))
        times = [(int(step), float(when)) for when, _, step in (line.split() for line in rows.decode().splitlines())]
    else:
        records = wandb_records(next(path for path in files if path.suffix == ".wandb"))
        rows = [
            {"/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
            for r in records
            if r.history.item
        ]
        times = [(row["step"], row["_timestamp"]) for row in rows]
    assert times and all(when == step for step, when in times)


def token_losses_planted(output: Any, y: Tensor) -> Tensor:
    return planted_loss(output.logits.flatten(1), y)


@QUIET
@pytest.mark.parametrize("late", [False, True])
def test_nor_by_the_reports_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    monkeypatch.chdir(tmp_path)
    args = transformers.TrainingArguments(
        "out", max_steps=4, per_device_train_batch_size=6, max_grad_norm=0, logging_steps=2, save_steps=2, disable_tqdm=True,
        use_cpu=True, report_to=[] if late else ["tensorboard"],
    )  # fmt: skip
    corpus = token_corpus(texts(40), length=8, pad=0)
    privacy = {"epsilon": 8.0, "clip_norm": 0.1}
    trainer = PrivateTrainer(
        adapted("llama", "lora"), args, train_dataset=corpus, privacy=privacy, loss_fn=token_losses_planted, probe=False
    )
    if late:
        trainer.add_callback(TensorBoardCallback())
    trainer.train()
    inside = tmp_path / "out-run"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and inside not in path.parents]
    assert any("tfevents" in path.name for path in files) and any(path.name == "trainer_state.json" for path in files)
    for path in files:
        data = path.read_bytes()
        assert not any(copy in data for copy in copies(PLANTED)), path
        if "tfevents" in path.name:
            found = EventAccumulator(str(path)).Reload()
            events = [event for name in found.Tags()["scalars"] for event in found.Scalars(name)]
            assert events and all(event.wall_time == event.step for event in events)  # not by the clock
